"""Draws docs/images/imports.svg, who imports whom, from the tree itself: ``python docs/pictures/imports.py``.

The files are parsed, not imported. The layers below are what the tree is held to by ``tests/framework``; the tables of
the page on the architecture are made from the same reading.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "images" / "imports.svg"
PACKAGES = {"dlo_framework": "dlo_framework", "dlo_plugins": "plugins/dlo_plugins", "dlo_tasks": "tasks/dlo_tasks"}

#: Each package's layers from the lowest: what it is for, and its folders and single modules. Who stands higher may
#: import what stands lower; a folder never one beside it, a single module may.
LAYERS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "dlo_framework": (
        ("said everywhere", ("_version", "versions", "errors", "amounts", "whole_file")),
        ("described", ("plan", "mesh", "cuts", "applier", "contract", "model_sizes", "batch_transform")),
        ("read and kept", ("registry/", "data/", "checkpoint/")),
        ("a run", ("task", "progress", "accumulation", "resume", "snapshot", "runs", "run_lock")),
        ("its ranks", ("distributed/",)),
        ("looked at", ("watch/",)),
        ("its callbacks", ("accelerator", "ema", "finite", "stop", "rehearsal", "defaults")),
        ("proved", ("testing/",)),
        ("commanded", ("cli/",)),
        ("", ("__main__", "__init__")),
    ),
    "dlo_plugins": (
        ("without values", ("fake_kernels",)),
        ("beside", ("copy_streams",)),
        (
            "techniques",
            (
                *("mixing", "resizing", "points", "batch_plan", "batch_search", "lr_suggest", "noise_meter"),
                *("scaled_rates", "compile_log", "compile_parts", "__init__"),
                *("compression/", "context/", "tensor/", "zero/", "pipeline/"),
            ),
        ),
        ("others' engines", ("fsdp/", "deepspeed/")),
        ("put on a model", ("appliers/",)),
        ("put together", ("mesh/",)),
        ("strategies", ("strategies/",)),
        ("callbacks", ("callbacks/",)),
    ),
    "dlo_tasks": (("shared", ("optim", "__init__")), ("tasks", ("imagenet/", "llm/"))),
}

#: Imports inside functions that go up all the same, and why.
UPWARD = {
    ("dlo_framework.testing.command", "dlo_framework.cli.main"): "a forked process becomes `dlo`",
    ("dlo_plugins.deepspeed.translate", "dlo_plugins.strategies.mesh"): "the JSON that is nearest to a strategy",
    ("dlo_plugins.deepspeed.translate", "dlo_plugins.strategies.zero"): "the JSON that is nearest to a strategy",
}


class Edge(NamedTuple):
    """An import: of a module by another.

    Attributes:
        source: who imports.
        target: what.
        kind: ``module``, as the file is imported; ``function``, later, inside one; ``types``, for the type checker.
    """

    source: str
    target: str
    kind: str


@functools.cache
def modules() -> dict[str, Path]:
    """Returns the modules of the three packages, each with its file."""
    found = {}
    for package, folder in PACKAGES.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = file
    return found


def imports(source: str, module: str, is_package: bool = False) -> Iterator[tuple[str, str]]:
    """Yields ``(what, kind)`` of each import in a file; of ``from a import b`` the name ``a.b``.

    Args:
        source: the file's text.
        module: its dotted name, to which relative imports are relative.
        is_package: whether it is an ``__init__.py``.
    """
    pending: list[tuple[ast.AST, str]] = [(ast.parse(source), "module")]
    while pending:
        node, kind = pending.pop()
        if isinstance(node, ast.Import):
            yield from ((alias.name, kind) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = module.split(".")[: len(module.split(".")) - node.level + is_package]
                base = ".".join([*up, base] if base else up)
            yield from ((f"{base}.{alias.name}", kind) for alias in node.names)
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            pending += [(child, "types") for child in node.body] + [(child, kind) for child in node.orelse]
        else:
            late = kind == "module" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            pending += [(child, "function" if late else kind) for child in ast.iter_child_nodes(node)]


@functools.cache
def edges() -> frozenset[Edge]:
    """Returns what the modules of the three packages import of one another."""
    known, found = modules(), set()
    for module, file in known.items():
        for name, kind in imports(file.read_text(encoding="utf-8"), module, file.name == "__init__.py"):
            target = name
            while target and target not in known:
                target = target.rpartition(".")[0]
            if target and target != module:
                found.add(Edge(module, target, kind))
    return frozenset(found)


def cycles(pairs: Iterable[tuple[str, str]]) -> list[list[str]]:
    """Returns the groups of names that reach each other along the pairs, each sorted: none if there is no cycle."""
    onward: dict[str, set[str]] = {}
    for source, target in pairs:
        onward.setdefault(source, set()).add(target)
    reach = {name: _reached(onward, name) for name in onward}
    groups = {tuple(sorted(other for other in reach[name] if name in reach.get(other, ()))) for name in onward}
    return [list(group) for group in sorted(groups) if group]


def _reached(onward: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    pending = [start]
    while pending:
        new = onward.get(pending.pop(), set()) - seen
        seen |= new
        pending += new
    return seen


def place_of(module: str) -> tuple[str, str]:
    """Returns the package of a module, and its folder, with a slash; of a single module its own name."""
    package, _, rest = module.partition(".")
    first = rest.partition(".")[0]
    if (ROOT / PACKAGES[package] / first / "__init__.py").exists() and first:
        return package, f"{first}/"
    return package, first or "__init__"


def layer_of(module: str) -> int:
    """Returns the number of the layer of its package in which a module stands, 0 for the lowest.

    Raises:
        LookupError: for a folder or single module that no layer names.
    """
    package, place = place_of(module)
    for number, (_, places) in enumerate(LAYERS[package]):
        if place in places:
            return number
    raise LookupError(f"no layer of {package} names {place}; add it to LAYERS in docs/pictures/imports.py")


def goes_up(edge: Edge) -> bool:
    """Returns whether an import inside a package is of something that stands higher, or of a folder beside."""
    (package, place), (other, target) = place_of(edge.source), place_of(edge.target)
    if package != other or place == target:
        return False
    own, its = layer_of(edge.source), layer_of(edge.target)
    return its > own or (its == own and (place.endswith("/") or target.endswith("/")))


# --- the picture -------------------------------------------------------------------------------------------

COLOURS = {"dlo_framework": "#3f6ad8", "dlo_plugins": "#d9822b", "dlo_tasks": "#2e8b57"}
#: Of a package: the middle of its boxes across, its highest row, where its name stands; pixels, a row, pixels.
PLACES = {"dlo_framework": (240.0, 0, 110.0), "dlo_plugins": (790.0, 0, 520.0), "dlo_tasks": (790.0, 7, 520.0)}
TITLES = {"dlo_framework": 84.0, "dlo_plugins": 500.0, "dlo_tasks": 500.0}  # where the layers' titles end, pixels
TOP, BAND, HIGH, GAP, LETTER = 10, 62, 34, 18, 5.3  # pixels: above all, a layer, a box, between boxes, a letter
WIDTH = 1060


@dataclass
class Box:
    """A folder, or the single modules of a layer; sizes are pixels."""

    lines: list[str]
    colour: str
    x: float = 0
    y: float = 0

    @property
    def width(self) -> float:
        """As its longest line needs."""
        return max(64, LETTER * max(map(len, self.lines)) + 14)

    @property
    def middle(self) -> float:
        """Of its width."""
        return self.x + self.width / 2


Node = tuple[str, int, str]  # a package, a layer, and a folder or "" for the single modules


def draw() -> str:
    """Returns the picture: the core beside plug-ins and tasks, layer over layer, with what imports what."""
    boxes: dict[Node, Box] = {}
    body = [line for package in PACKAGES for line in _column(package, boxes)]
    arrows = [_arrow(boxes[source], boxes[target]) for source, target in sorted(_drawn_edges())]
    words = ("plug-ins and tasks import the core,", "and neither the other")
    middle, row = PLACES["dlo_tasks"][:2]
    body += [
        f'<text x="{middle:g}" y="{TOP + (row - 1) * BAND + 12 * number + 12:g}" text-anchor="middle">{line}</text>'
        for number, line in enumerate(words)
    ]
    height = TOP + BAND * max(PLACES[package][1] + len(_titled(package)) for package in PACKAGES)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-size="10"'
    head += ' font-family="system-ui, sans-serif" fill="#808080">\n<title>who imports whom, layer over layer</title>'
    tip = '<marker id="tip" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
    tip += '<path d="M0 0L6 3L0 6z"/></marker>'
    return "\n".join([head, tip, *arrows, *body, *map(_drawn, boxes.values()), "</svg>"]) + "\n"


def _column(package: str, boxes: dict[Node, Box]) -> Iterator[str]:
    """Adds a package's boxes; yields its name and the titles of its layers."""
    layers, (middle, row, name_at) = _titled(package), PLACES[package]
    for number, (title, places) in enumerate(layers):
        single = [place for place in places if not place.endswith("/") and not place.startswith("__")]
        names = [*([""] if single else []), *(place for place in places if place.endswith("/"))]
        y = TOP + (row + len(layers) - 1 - number) * BAND
        made = [Box([name] if name else _wrapped(single), COLOURS[package], y=y) for name in names]
        x = middle - (sum(box.width for box in made) + GAP * (len(made) - 1)) / 2
        for name, box in zip(names, made, strict=True):
            boxes[package, number, name], box.x = box, x
            x += box.width + GAP
        yield f'<text x="{TITLES[package]:g}" y="{y + HIGH / 2 + 3:g}" text-anchor="end">{title}</text>'
        if number == len(layers) - 1:
            yield f'<text x="{name_at:g}" y="{y + HIGH / 2 + 4:g}" font-size="12">{package}</text>'


def _titled(package: str) -> list[tuple[str, tuple[str, ...]]]:
    return [layer for layer in LAYERS[package] if layer[0]]


def _wrapped(names: list[str]) -> list[str]:
    if len(names) > 7:
        return [", ".join(names[:2]), f"and {len(names) - 2} more modules"]
    half = -(-len(names) // 2) if len(names) > 3 else len(names)
    return [", ".join(names[start : start + half]) for start in range(0, len(names), half)]


def _drawn_edges() -> set[tuple[Node, Node]]:
    """Returns the imports between boxes of a package, without those that follow from others."""
    pairs = set()
    for edge in edges():
        ends = [place_of(module) for module in edge[:2]]
        if edge[:2] in UPWARD or edge.kind == "types" or any(place.startswith("__") for _, place in ends):
            continue
        source, target = _node(edge.source), _node(edge.target)
        if source[0] == target[0] and source != target:
            pairs.add((source, target))
    onward: dict[str, set[str]] = {}
    names = {str(node): node for pair in pairs for node in pair}
    for source, target in pairs:
        onward.setdefault(str(source), set()).add(str(target))
    return {
        (names[source], names[target])
        for source, targets in onward.items()
        for target in targets
        if not any(target in _reached(onward, other) for other in targets - {target})
    }


def _node(module: str) -> Node:
    package, place = place_of(module)
    return package, layer_of(module), place if place.endswith("/") else ""


def _arrow(source: Box, target: Box) -> str:
    """Returns a line that has gone across by the next layer, and goes down from there."""
    a, b, top, turn = source.middle, target.middle, source.y + HIGH, source.y + BAND
    path = f"M{a:g} {top:g}C{a:g} {turn:g} {b:g} {top:g} {b:g} {turn - 1:g}L{b:g} {target.y - 1:g}"
    return f'<path d="{path}" fill="none" stroke="#808080" stroke-width="1" marker-end="url(#tip)"/>'


def _drawn(box: Box) -> str:
    first = box.y + HIGH / 2 + 3.5 - 5 * (len(box.lines) - 1)
    lines = "".join(
        f'<text x="{box.middle:g}" y="{first + 11 * number:g}" text-anchor="middle" fill="white">{line}</text>'
        for number, line in enumerate(box.lines)
    )
    at = f'x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{HIGH}"'
    return f'<rect {at} rx="3" fill="{box.colour}"/>{lines}'


if __name__ == "__main__":
    FILE.write_text(draw(), encoding="utf-8")
