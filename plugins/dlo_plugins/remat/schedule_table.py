"""Table of a plan for people, and as JSON: what happens to each block, with its bytes and times."""

from __future__ import annotations

from typing import Any

from dlo_framework.units import format_bytes
from dlo_plugins.remat.planning import Plan, kinds_of


def describe_plan(plan: Plan) -> str:
    """Returns a summary and a table with a row for each stage."""
    rows = [("stage", "forward", "forwards", "keeps", "forward ms", "backward ms")]
    for row in _rows(plan):
        rows.append(
            (
                row["stage"],
                row["kind"] + (", offloaded" if row["offloaded"] else ""),
                str(row["forwards"]),
                format_bytes(row["kept_bytes"]),
                f"{row['forward'] * 1e3:.3g}",
                f"{row['backward'] * 1e3:.3g}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for texts in rows:
        pairs = enumerate(zip(texts, widths, strict=True))
        cells = [cell.ljust(width) if n < 2 else cell.rjust(width) for n, (cell, width) in pairs]
        lines.append("  ".join(cells).rstrip())
    return "\n".join([plan.describe(), "", *lines, ""])


def to_json(plan: Plan) -> dict[str, Any]:
    """Returns a plan as JSON's types; bytes, seconds."""
    return {
        "budget": plan.budget,
        "predicted_peak": plan.peak,
        "peak_if_all_kept": plan.measured.kept_peak,
        "predicted_seconds": plan.schedule.time,
        "predicted_overhead": plan.overhead,
        "predicted_waits": plan.schedule.waited,
        "offloaded_bytes": plan.offloaded,
        "stages": _rows(plan),
    }


def _rows(plan: Plan) -> list[dict[str, Any]]:
    chain, schedule = plan.measured.chain, plan.schedule
    kinds = kinds_of(chain, schedule)
    rows = []
    for index, (stage, kind, forwards) in enumerate(zip(chain.stages, kinds, schedule.forwards, strict=True)):
        mode = next((mode for mode in stage.modes if mode.name == kind), stage.modes[0])
        first = any(node.first == index for node in schedule.nodes)
        kept = mode.saved if kind != "recompute" else chain.input_of(index) if first else 0
        offloaded = next((node.offload for node in schedule.nodes if node.first <= index <= node.last), False)
        rows.append(
            {
                "stage": stage.name,
                "kind": kind,
                "forwards": forwards,
                "kept_bytes": kept,
                "offloaded": offloaded,
                "forward": mode.forward,
                "backward": mode.backward,
            }
        )
    return rows
