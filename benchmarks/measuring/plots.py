"""Draws one plot per table: medians as bars, minimum and maximum as whiskers, dlo's in colour."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measuring.record import number

INK, OURS, PEER, CONTROL, BAR = "#808080", "#3f6ad8", "#a9a9a9", "#d0d0d0", "#d9822b"
#: Ratio of the largest to the smallest median from which the axis is logarithmic.
WIDE = 50.0


def has_peers(table: Mapping[str, Any]) -> bool:
    """Returns whether a table compares rows: at least two without controls, and not only dlo's without a control."""
    rows = table["rows"].values()
    controlled = any(row.get("control") for row in rows)
    return sum(not row.get("control") for row in rows) > 1 and (controlled or not all(row.get("ours") for row in rows))


def draw(table: Mapping[str, Any], path: Path) -> None:
    """Draws a table that has peers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    style: dict[Any, Any] = {"svg.hashsalt": "dlo", "font.size": 9, "text.color": INK}
    style |= {f"{part}.{of}": INK for part, of in (("axes", "labelcolor"), ("axes", "edgecolor"), ("xtick", "color"))}
    rows = [(name, row) for name, row in table["rows"].items() if row["n"]]
    with plt.rc_context(style | {"ytick.color": INK}):
        figure, axes = plt.subplots(figsize=(8, 0.9 + 0.3 * len(rows)), layout="constrained")
        for place, (_, row) in enumerate(rows):
            colour = CONTROL if row.get("control") else OURS if row.get("ours") else PEER
            whiskers = [[row["median"] - row["min"]], [row["max"] - row["median"]]]
            error = {"ecolor": INK, "elinewidth": 1, "capsize": 2}
            axes.barh(place, row["median"], xerr=whiskers if row["n"] > 1 else None, color=colour, error_kw=error)
            if "bar" in row:
                axes.plot([row["bar"]] * 2, [place - 0.4, place + 0.4], color=BAR, linewidth=2)
            axes.annotate(
                number(row["median"]),
                (max(row["max"], row.get("bar", 0.0), 0.0), place),
                (4, 0),
                textcoords="offset points",
                va="center",
            )
        medians = [row["median"] for _, row in rows]
        if min(medians) > 0 and max(medians) / min(medians) > WIDE:
            axes.set_xscale("log")
        axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
        axes.margins(x=0.12)
        axes.set_yticks(range(len(rows)), [name for name, _ in rows])
        axes.invert_yaxis()
        axes.set_title(table["title"], fontsize=9)
        axes.set_xlabel(f"1 is {table['unit']}; {table['better']} is better; the orange mark is the bar")
        axes.spines[["top", "right"]].set_visible(False)
        axes.patch.set_alpha(0)
        figure.patch.set_alpha(0)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)
