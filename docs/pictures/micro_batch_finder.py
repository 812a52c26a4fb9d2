"""Draws docs/images/micro-batch-finder.svg with the search's own function.

Run ``python docs/pictures/micro_batch_finder.py``.
"""

from __future__ import annotations

from pathlib import Path

from dlo_plugins.batches.micro_batch_finder import find_largest

FILE = Path(__file__).parents[1] / "images" / "micro-batch-finder.svg"
START, MEMORY, LIMIT = 32, 411, 50_000  # samples: batch size of the config, memory limit, size of the dataset
BAR, GAP, HEIGHT, LEFT, TOP = 34, 14, 200, 76, 40  # in pixels
FITS, TOO_LARGE = "#3f6ad8", "#c0504d"


def trials() -> list[int]:
    """Returns the tested sizes, in order."""
    tried: list[int] = []

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= MEMORY

    assert find_largest(fits, START, LIMIT) == MEMORY
    return tried


def draw() -> str:
    """Returns the picture: one bar per trial, with its size as height, and a line at the memory limit."""
    tried = trials()
    width = len(tried) * (BAR + GAP)
    top = max(tried)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + width + 20} {TOP + HEIGHT + 56}" '
        'font-family="system-ui, sans-serif" font-size="13" fill="#808080">',
        "<title>MicroBatchFinder: tested sizes, doubling until memory runs out, then bisecting</title>",
        f'<text x="{LEFT}" y="{TOP - 18}">samples per micro-batch, in the order of the trials</text>',
        f'<path d="M{LEFT} {TOP}v{HEIGHT}h{width}" fill="none" stroke="#808080"/>',
    ]
    for number, size in enumerate(tried):
        x, high = LEFT + GAP + number * (BAR + GAP), HEIGHT * size / top
        colour = FITS if size <= MEMORY else TOO_LARGE
        lines.append(f'<path d="M{x} {TOP + HEIGHT}v-{high:.1f}h{BAR}v{high:.1f}z" fill="{colour}"/>')
        lines.append(f'<text x="{x + BAR / 2}" y="{TOP + HEIGHT + 18}" text-anchor="middle">{size}</text>')
    line = TOP + HEIGHT * (1 - MEMORY / top)
    lines.append(f'<path d="M{LEFT} {line:.1f}h{width}" stroke="#808080" stroke-dasharray="6 4"/>')
    lines.append(f'<text x="{LEFT - 8}" y="{line + 4:.1f}" text-anchor="end">memory</text>')
    for x, colour, text in ((LEFT, FITS, "fits"), (LEFT + 80, TOO_LARGE, "runs out of memory on some rank")):
        lines.append(f'<path d="M{x} {TOP + HEIGHT + 34}h12v12h-12z" fill="{colour}"/>')
        lines.append(f'<text x="{x + 18}" y="{TOP + HEIGHT + 45}">{text}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    FILE.write_text(draw(), encoding="utf-8")
