"""Draws docs/images/preference-lm.svg from a run's events: ``python docs/pictures/preference_lm.py RUN``."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

FILE = Path(__file__).parents[1] / "images" / "preference-lm.svg"
COLOURS = {"reward_chosen": "#3f6ad8", "reward_rejected": "#d9822b", "reward_margin": "#2a9d5c"}
WIDTH, HEIGHT, LEFT, TOP = 560, 240, 60, 30  # of the panel, in pixels

Curve = Sequence[tuple[int, float]]


def read_curves(run: Path) -> dict[str, Curve]:
    """Returns the rewards of a run by step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = next(file.parent for file in sorted(run.rglob("events.out.tfevents.*")))
    events = EventAccumulator(str(folder)).Reload()
    return {name: [(event.step, event.value) for event in events.Scalars(f"train/{name}")] for name in COLOURS}


def draw(curves: Mapping[str, Curve]) -> str:
    """Returns the picture: one curve for each reward, and their margin."""
    values = [value for curve in curves.values() for _, value in curve]
    low, high = min(0.0, *values), max(values)
    last = max(step for curve in curves.values() for step, _ in curve)

    def point(step: int, value: float) -> str:
        return f"{LEFT + WIDTH * step / last:.1f} {TOP + HEIGHT * (high - value) / (high - low):.1f}"

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {TOP + HEIGHT + 50}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#808080">',
        "<title>Rewards of chosen and rejected answers, and their margin, by optimizer step</title>",
        f'<path d="M{LEFT} {TOP}v{HEIGHT}h{WIDTH}" fill="none" stroke="#808080"/>',
        f'<path d="M{point(0, 0.0)}H{LEFT + WIDTH}" stroke="#808080" stroke-dasharray="4 4"/>',
        f'<text x="{LEFT + WIDTH}" y="{TOP + HEIGHT + 34}" text-anchor="end">optimizer steps: {last}</text>',
    ]
    for value in (low, 0.0, high):
        y = point(0, value).split()[1]
        lines.append(f'<text x="{LEFT - 8}" y="{y}" text-anchor="end">{value:.2f}</text>')
    for row, (name, curve) in enumerate(curves.items()):
        path = "L".join(point(step, value) for step, value in curve)
        lines.append(f'<path d="M{path}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"/>')
        x, y = LEFT + 16, TOP + 14 + 20 * row
        lines.append(f'<path d="M{x} {y - 4}h24" stroke="{COLOURS[name]}" stroke-width="2"/>')
        lines.append(f'<text x="{x + 30}" y="{y}">{name.replace("_", " ")}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    FILE.write_text(draw(read_curves(Path(sys.argv[1]))), encoding="utf-8")
