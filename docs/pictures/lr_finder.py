"""Draws docs/images/lr-finder.svg with the finder's own functions, from the losses of a typical sweep.

Run ``python docs/pictures/lr_finder.py``.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from pathlib import Path

from dlo_plugins.schedules.lr_finder import Sweep, suggest, sweep_rates

FILE = Path(__file__).parents[1] / "images" / "lr-finder.svg"
STEPS = 100
WIDTH, HEIGHT, LEFT, TOP = 640, 240, 50, 30  # of the panel, in pixels
DECADES = (-7, 1)  # powers of ten, left and right
LOSSES = (1.0, 3.4)  # bottom and top
COLOURS = {"valley": "#d9822b", "steep": "#3a9d5d", "minimum": "#c0504d", "slide": "#8064a2"}


def typical_sweep() -> Sweep:
    """Returns a noisy sweep of a classifier of ten classes: flat, then falling, then divergent."""
    noise = random.Random(0)
    sweep = Sweep(STEPS)
    for rate in sweep_rates(1e-7, 10.0, STEPS):
        learned = 1.3 / (1 + (3e-3 / rate) ** 0.8)
        if not sweep.add(rate, 2.35 - learned + (rate / 0.12) ** 1.5 + noise.gauss(0, 0.06)):
            break
    return sweep


def draw() -> str:
    """Returns the picture."""
    sweep = typical_sweep()
    rates, losses = sweep.trimmed()
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {TOP + HEIGHT + 60}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#808080">',
        "<title>LRFinder: loss over learning rate in a sweep, and the four suggestions</title>",
        f'<clipPath id="panel"><path d="M{LEFT} {TOP}h{WIDTH}v{HEIGHT}h-{WIDTH}z"/></clipPath>',
        f'<path d="M{_x(rates[0]):.1f} {TOP}H{_x(rates[-1]):.1f}V{TOP + HEIGHT}H{_x(rates[0]):.1f}z" '
        'fill="#808080" fill-opacity="0.1"/>',
        f'<path d="M{LEFT} {TOP}v{HEIGHT}h{WIDTH}" fill="none" stroke="#808080"/>',
        f'<text x="{LEFT}" y="{TOP - 12}">training loss</text>',
    ]
    for loss in (1.0, 1.5, 2.0, 2.5, 3.0):
        lines.append(f'<path d="M{LEFT} {_y(loss):.1f}h{WIDTH}" stroke="#808080" stroke-opacity="0.25"/>')
        lines.append(f'<text x="{LEFT - 8}" y="{_y(loss) + 4:.1f}" text-anchor="end">{loss:g}</text>')
    for power in range(DECADES[0], DECADES[1] + 1):
        lines.append(f'<text x="{_x(10.0**power):.1f}" y="{TOP + HEIGHT + 20}" text-anchor="middle">1e{power}</text>')
    lines.append(f'<text x="{LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 42}" text-anchor="middle">learning rate</text>')
    lines.append(_curve(sweep.rates, sweep.losses, "#808080", "1", 0.5))
    lines.append(_curve(sweep.rates, sweep.smoothed, "#3f6ad8", "2", 1.0))
    for row, (name, rate) in enumerate(suggest(rates, losses)[0].items()):
        assert rate is not None
        x, y = _x(rate), TOP + 20 + 20 * row
        lines.append(f'<path d="M{x:.1f} {TOP}v{HEIGHT}" stroke="{COLOURS[name]}" stroke-width="2"/>')
        lines.append(f'<path d="M{LEFT + 20} {y - 4}h24" stroke="{COLOURS[name]}" stroke-width="2"/>')
        lines.append(f'<text x="{LEFT + 50}" y="{y}">{name} {rate:.1e}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _curve(rates: Sequence[float], losses: Sequence[float], colour: str, width: str, opacity: float) -> str:
    points = " ".join(f"{_x(rate):.1f},{_y(loss):.1f}" for rate, loss in zip(rates, losses, strict=True))
    style = f'fill="none" stroke="{colour}" stroke-width="{width}" stroke-opacity="{opacity}"'
    return f'<polyline points="{points}" {style} clip-path="url(#panel)"/>'


def _x(rate: float) -> float:
    left, right = DECADES
    return LEFT + WIDTH * (math.log10(rate) - left) / (right - left)


def _y(loss: float) -> float:
    low, high = LOSSES
    return TOP + HEIGHT * (high - loss) / (high - low)


if __name__ == "__main__":
    FILE.write_text(draw(), encoding="utf-8")
