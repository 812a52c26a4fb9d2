"""Draws docs/images/one-cycle.svg from the schedule's own functions: ``python docs/pictures/one_cycle.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from dlo_plugins.schedules.lr_curves import PRESETS, Preset, phase_ends, piecewise

FILE = Path(__file__).parents[1] / "images" / "one-cycle.svg"
STEPS = 100  # steps of the drawn run
MOMENTUM = (0.95, 0.85)
COLOURS = {"fastai": "#3f6ad8", "torch": "#d9822b"}

WIDTH, HEIGHT, GAP, LEFT, TOP = 300, 180, 80, 50, 40  # of a panel, in pixels


def lr(preset: Preset, fraction: float) -> float:
    """Returns the learning rate, divided by its maximum."""
    values = (1 / preset.div_factor, 1.0, 1 / preset.final_div_factor)
    return piecewise(fraction, _ends(preset), values, "cos")


def momentum(preset: Preset, fraction: float) -> float:
    """Returns the momentum, or Adam's first beta."""
    high, low = MOMENTUM
    return piecewise(fraction, _ends(preset), (high, low, high), "cos")


def _ends(preset: Preset) -> tuple[float, ...]:
    return phase_ends(preset.pct_start, False, 1 / STEPS if preset.last_step_is_the_end else 0.0)


def draw() -> str:
    """Returns the picture: learning rate on the left, momentum on the right, one curve per preset."""
    size = LEFT + 2 * WIDTH + GAP + 20, TOP + HEIGHT + 60
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size[0]} {size[1]}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#808080">',
        "<title>OneCycle: learning rate and momentum over a run, presets fastai and torch</title>",
    ]
    lines += _panel(LEFT, "lr / max_lr", lr, (0.0, 1.0), (0.0, 0.5, 1.0))
    lines += _panel(LEFT + WIDTH + GAP, "momentum, or Adam's first beta", momentum, (0.84, 0.96), (0.85, 0.9, 0.95))
    for row, (name, colour) in enumerate(COLOURS.items()):
        x, y = LEFT + 200, TOP + 20 + 20 * row
        lines.append(f'<path d="M{x} {y - 4}h24" stroke="{colour}" stroke-width="2"/>')
        lines.append(f'<text x="{x + 30}" y="{y}">{name}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _panel(
    left: int, title: str, curve: Callable[[Preset, float], float], limits: tuple[float, float], ticks: Sequence[float]
) -> list[str]:
    low, high = limits

    def y(value: float) -> float:
        return TOP + HEIGHT * (high - value) / (high - low)

    frame = f'<path d="M{left} {TOP}v{HEIGHT}h{WIDTH}" fill="none" stroke="#808080"/>'
    lines = [f'<text x="{left}" y="{TOP - 16}">{title}</text>', frame]
    for tick in ticks:
        lines.append(f'<path d="M{left} {y(tick):.1f}h{WIDTH}" stroke="#808080" stroke-opacity="0.25"/>')
        lines.append(f'<text x="{left - 8}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for percent in (0, 25, 50, 75, 100):
        x = left + WIDTH * percent / 100
        lines.append(f'<text x="{x:.1f}" y="{TOP + HEIGHT + 20}" text-anchor="middle">{percent}%</text>')
    middle = left + WIDTH / 2
    lines.append(f'<text x="{middle:.1f}" y="{TOP + HEIGHT + 42}" text-anchor="middle">samples seen</text>')
    for name, colour in COLOURS.items():
        points = [(step / STEPS, curve(PRESETS[name], step / STEPS)) for step in range(STEPS)]
        path = " ".join(f"{left + WIDTH * fraction:.1f},{y(value):.1f}" for fraction, value in points)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
    return lines


if __name__ == "__main__":
    FILE.write_text(draw(), encoding="utf-8")
