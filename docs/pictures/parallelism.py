"""Draws docs/images/{data,tensor,context}-parallelism.svg with the plug-ins' own functions; run it with ``python``.

``pipeline_schedules.py`` draws pipeline parallelism.
"""

from __future__ import annotations

from pathlib import Path

from dlo_framework.mesh import MeshSpec
from dlo_framework.shards import make_equal_slice
from dlo_plugins.parallel.context.sequence_layout import chunks_of

IMAGES = Path(__file__).parents[1] / "images"
COLOURS = ("#3f6ad8", "#d9822b", "#2e8b57", "#a05195")  # of ranks, or of each rank's initial shard
GREY = "#808080"


class Picture:
    """Builder of an SVG; sizes in pixels."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.body: list[str] = []
        self.width = self.height = 0.0

    def box(self, x: float, y: float, width: float, height: float, fill: str = "none") -> None:
        """Draws a rectangle: filled, or its outline."""
        line = f' stroke="{GREY}" stroke-width="0.7"' if fill == "none" else ""
        self.body.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" fill="{fill}"{line}/>')
        self.width, self.height = max(self.width, x + width), max(self.height, y + height)

    def text(self, x: float, y: float, words: str, anchor: str = "middle", size: float = 10, **more: str) -> None:
        """Writes a line of text with baseline y; ``more`` are SVG attributes."""
        attributes = {"x": f"{x:g}", "y": f"{y:g}", "text-anchor": anchor, "font-size": f"{size:g}", **more}
        self.body.append(
            "<text " + " ".join(f'{key}="{value}"' for key, value in attributes.items()) + f">{words}</text>"
        )
        self.height = max(self.height, y + 3)

    def __str__(self) -> str:
        """Returns the file's text."""
        size = f"{self.width + 10:g} {self.height + 6:g}"
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" font-family="system-ui, sans-serif"'
        return "\n".join([f'{head} fill="{GREY}">\n<title>{self.title}</title>', *self.body, "</svg>"]) + "\n"


# --- data ----------------------------------------------------------------------------------------------------


def data() -> Picture:
    """Returns the picture of each rank's shard of the model state and its samples of a batch of eight."""
    picture = Picture("data parallelism: the shard of the state and the samples of each of four ranks")
    wide, band, gap = 40, 13, 8
    for panel, spec in enumerate(
        (MeshSpec(dp_replicate=4, dp_shard=1), MeshSpec(dp_shard=4), MeshSpec(dp_replicate=2, dp_shard=2))
    ):
        left = 58 + panel * (4 * (wide + gap) + 34)
        picture.text(left + 2 * (wide + gap) - gap / 2, 14, str(spec), size=12)
        for rank in range(4):
            x = left + rank * (wide + gap)
            place = spec.coordinates(rank)
            for first, count in make_equal_slice(0, 4, spec.dp_shard, place.dp_shard).runs:
                for quarter in range(first, first + count):
                    picture.box(x, 24 + quarter * band, wide, band - 1, COLOURS[quarter])
            picture.box(x, 24, wide, 4 * band - 1)
            picture.text(x + wide / 2, 24 + 4 * band + 14, f"rank {rank}")
            for first, count in make_equal_slice(0, 8, 4, spec.data_rank(rank)).runs:
                picture.text(x + wide / 2, 24 + 4 * band + 30, f"{first} to {first + count - 1}")
    picture.text(52, 24 + 2 * band + 3, "state", "end")
    picture.text(52, 24 + 4 * band + 30, "samples", "end")
    return picture


# --- tensor --------------------------------------------------------------------------------------------------

LENGTH, WIDTH, HIDDEN, RANKS = 34, 44, 66, 2  # tokens, features, hidden features
#: Tensors of a rank in the forward of an MLP: (caption, rows, columns, split dim).
PASSAGE = (
    ("input", LENGTH, WIDTH, None),
    ("up", WIDTH, HIDDEN, 1),
    ("hidden", LENGTH, HIDDEN, 1),
    ("down", HIDDEN, WIDTH, 0),
    ("partial sum", LENGTH, WIDTH, None),
)
RULES = {"up": "column", "down": "row"}
ROW = 74


def tensor() -> Picture:
    """Returns the picture of an MLP's weights and activations on two ranks, with its collectives."""
    picture = Picture("tensor parallelism: shards of an MLP on two ranks, with and without sequence_parallel")
    for number, (title, split, enter, leave) in enumerate(
        (("tp 2", None, None, "all-reduce"), ("tp 2, sequence_parallel", 0, "all-gather", "reduce-scatter"))
    ):
        _mlp(picture, number * (RANKS * ROW + 78), title, split, enter, leave)
    return picture


def _mlp(picture: Picture, top: float, title: str, split: int | None, enter: str | None, leave: str) -> None:
    outside = ("norm, residual", LENGTH, WIDTH, split)
    steps: list[tuple[str, int, int, int | None] | str] = [outside, *([enter] if enter else []), *PASSAGE]
    x = 66.0
    picture.text(x, top + 14, title, "start", size=12)
    for rank in range(RANKS):
        picture.text(56, top + 46 + rank * ROW + ROW / 2, f"rank {rank}", "end")
    for step in [*steps, leave, outside]:
        if isinstance(step, str):
            picture.box(x + 8, top + 42, 9, RANKS * ROW - 10, GREY)
            picture.text(x + 12, top + 48 + RANKS * ROW, step)
            x += 40
            continue
        caption, rows, columns, dim = step
        rule = f": {RULES[caption]}" if caption in RULES else ""
        picture.text(x + columns / 2, top + 36, f"{caption}{rule}")
        for rank in range(RANKS):
            y = top + 42 + rank * ROW + (ROW - rows) / 2 - 4
            partial = caption == "partial sum"
            for first, count in make_equal_slice(dim or 0, (rows, columns)[dim or 0], RANKS, rank).runs:
                across, down = (columns, count) if dim == 0 else (count, rows)
                at = (x, y + first) if dim == 0 else (x + first, y)
                full = (x, y, columns, rows)
                colour = COLOURS[rank] if dim is not None or partial else GREY
                picture.box(*(full if dim is None else (*at, across, down)), colour)
            picture.box(x, y, columns, rows)
        x += columns + 34
    picture.width = max(picture.width, x)


# --- context -------------------------------------------------------------------------------------------------

SHARERS, CELL = 4, 17


def context() -> Picture:
    """Returns the picture of causal attention's work per rank, of the ring's order of keys, and of Ulysses."""
    picture = Picture("context parallelism: contiguous chunks and head-tail chunks; the ring; Ulysses")
    chunks = 2 * SHARERS
    head_tail = {chunk: rank for rank in range(SHARERS) for chunk in chunks_of(rank, SHARERS)}
    contiguous = {chunk: chunk // 2 for chunk in range(chunks)}
    for panel, (title, owner) in enumerate((("contiguous chunks", contiguous), ("head-tail chunks", head_tail))):
        left = 30 + panel * (chunks * CELL + 40)
        picture.text(left + chunks * CELL / 2, 14, title, size=12)
        for query in range(chunks):
            for key in range(query + 1):
                # On the diagonal, half of the pairs of tokens are visible.
                half = CELL / 2 if key == query else CELL
                picture.box(left + key * CELL, 24 + query * CELL, half - 1, CELL - 1, COLOURS[owner[query]])
        picture.box(left, 24, chunks * CELL, chunks * CELL)
        work = [sum(query + 0.5 for query in owner if owner[query] == rank) for rank in range(SHARERS)]
        words = "work of each rank: " + ", ".join(f"{part:g}" for part in work)
        picture.text(left + chunks * CELL / 2, 24 + chunks * CELL + 16, words)
    middle = 24 + chunks * CELL / 2
    picture.text(20, middle, "queries", transform=f"rotate(-90 20 {middle:g})")
    picture.text(30 + chunks * CELL / 2, 24 + chunks * CELL + 32, "columns: keys")
    _ring(picture, 30 + 2 * (chunks * CELL + 40) + 36)
    _ulysses(picture, 30 + 2 * (chunks * CELL + 40) + 36 + SHARERS * 36 + 46)
    return picture


def _ring(picture: Picture, left: float) -> None:
    picture.text(left + SHARERS * 18, 14, "ring: owner of keys", size=12)
    for rank in range(SHARERS):
        picture.text(left - 6, 24 + rank * 34 + 20, f"rank {rank}", "end")
        for step in range(SHARERS):
            owner = (rank - step) % SHARERS
            picture.box(left + step * 36, 24 + rank * 34, 34, 32, COLOURS[owner])
            picture.text(left + step * 36 + 17, 24 + rank * 34 + 20, str(owner), fill="white")
    picture.text(left + SHARERS * 18, 24 + SHARERS * 34 + 16, "columns: steps in time")


def _ulysses(picture: Picture, left: float) -> None:
    cell = 24
    for part, (title, by_heads) in enumerate((("positions", False), ("heads", True))):
        x = left + part * (SHARERS * cell + 34)
        picture.text(x + SHARERS * cell / 2, 24 + SHARERS * cell + 16, f"by {title}")
        for row, column in ((row, column) for row in range(SHARERS) for column in range(SHARERS)):
            rank = column if by_heads else row
            picture.box(x + column * cell, 24 + row * cell, cell - 1, cell - 1, COLOURS[rank])
    picture.text(left + SHARERS * cell + 17, 14, "Ulysses: all-to-all", size=12)
    picture.text(left + SHARERS * cell + 17, 24 + SHARERS * cell / 2 + 4, "→", size=16)
    picture.text(left + SHARERS * cell + 17, 24 + SHARERS * cell + 32, "rows: positions; columns: heads")


def draw() -> dict[str, str]:
    """Returns the pictures by file name."""
    return {f"{make.__name__}-parallelism.svg": str(make()) for make in (data, tensor, context)}


if __name__ == "__main__":
    for name, text in draw().items():
        (IMAGES / name).write_text(text, encoding="utf-8")
