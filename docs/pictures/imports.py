"""Draws docs/images/imports.svg, the imports between folders, from the source files.

Run ``python docs/pictures/imports.py``. Files are parsed, not imported. A folder or single module stands one layer
above the highest that it imports when it is imported itself. ``tests/test_import_graph.py`` checks that there are no
circles.
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


class Edge(NamedTuple):
    """Import of one module by another.

    Attributes:
        source: Importing module.
        target: Imported module.
        kind: Time of the import: ``module``, with the file; ``function``, inside one; ``types``, for type checkers.
    """

    source: str
    target: str
    kind: str


@functools.cache
def modules() -> dict[str, Path]:
    """Returns the files of the three packages' modules, by dotted name."""
    found = {}
    for package, folder in PACKAGES.items():
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT / folder).with_suffix("").parts
            found[".".join([package, *(part for part in parts if part != "__init__")])] = file
    return found


def imports(source: str, module: str, is_package: bool = False) -> Iterator[tuple[str, str]]:
    """Yields ``(name, kind)`` of each import in a file; for ``from a import b`` the name is ``a.b``.

    Args:
        source: Text of the file.
        module: Dotted name of the module, for relative imports.
        is_package: Whether the file is an ``__init__.py``.
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
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            pending += [(child, "types") for child in node.body] + [(child, kind) for child in node.orelse]
        else:
            late = kind == "module" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            inner = "function" if late else kind
            pending += [(child, inner) for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]


@functools.cache
def edges() -> frozenset[Edge]:
    """Returns all imports between modules of the three packages."""
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
    """Returns the cycles along the pairs, as sorted groups of names that reach each other."""
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
    """Returns the package of a module, and its folder with a slash, or its own name for a single module."""
    package, _, rest = module.partition(".")
    first = rest.partition(".")[0]
    if (ROOT / PACKAGES[package] / first / "__init__.py").exists() and first:
        return package, f"{first}/"
    return package, first or "__init__"


@functools.cache
def layers(package: str) -> tuple[tuple[str, ...], ...]:
    """Returns the folders and single modules of a package by layer, the lowest first; a circle shares a layer."""
    onward: dict[str, set[str]] = {place_of(module)[1]: set() for module in modules() if module.startswith(package)}
    for edge in edges():
        (own, source), (other, target) = place_of(edge.source), place_of(edge.target)
        if own == other == package and source != target and edge.kind == "module":
            onward[source].add(target)
    reach = {place: _reached(onward, place) for place in onward}
    height: dict[str, int] = {}
    for place in sorted(onward, key=lambda each: (len(reach[each]), each not in reach[each])):
        circle = {other for other in reach[place] if place in reach[other]}
        below = [height[other] for other in reach[place] - circle]
        height[place] = max([height[other] for other in circle if other in height], default=max(below, default=-1) + 1)
    return tuple(
        tuple(sorted(place for place in height if height[place] == number))
        for number in range(max(height.values()) + 1)
    )


def circles() -> list[list[str]]:
    """Returns the folders and single modules that import each other, as files are imported."""
    ends = [(place_of(edge.source), place_of(edge.target)) for edge in edges() if edge.kind == "module"]
    return cycles(("/".join(a), "/".join(b)) for a, b in ends if a[0] == b[0] and a != b)


# --- the picture -------------------------------------------------------------------------------------------

COLOURS = {"dlo_framework": "#3f6ad8", "dlo_plugins": "#d9822b", "dlo_tasks": "#2e8b57"}
#: Centre of a package's boxes in x, and of its name (pixels).
CENTRES = {"dlo_framework": (260.0, 60.0), "dlo_plugins": (790.0, 500.0), "dlo_tasks": (790.0, 500.0)}
TOP, BAND, HIGH, GAP, LETTER = 10, 62, 34, 18, 5.3  # pixels: top margin, layer, box, gap between boxes, letter
WIDTH = 1060


@dataclass
class Box:
    """Box of a folder, or of the single modules of a layer; sizes in pixels."""

    lines: list[str]
    colour: str
    x: float = 0
    y: float = 0

    @property
    def width(self) -> float:
        """Width for the longest line."""
        return max(64, LETTER * max(map(len, self.lines)) + 14)

    @property
    def middle(self) -> float:
        """Centre in x."""
        return self.x + self.width / 2


Node = tuple[str, int, str]  # a package, a layer, and a folder or "" for the single modules


def draw() -> str:
    """Returns the picture: the three packages in layers, with arrows for imports."""
    boxes: dict[Node, Box] = {}
    body = [line for package in PACKAGES for line in _column(package, boxes)]
    arrows = [_arrow(boxes[source], boxes[target]) for source, target in sorted(_drawn_edges())]
    words = ("plug-ins and tasks import the core,", "never each other")
    middle, row = CENTRES["dlo_tasks"][0], _first_row("dlo_tasks")
    body += [
        f'<text x="{middle:g}" y="{TOP + (row - 1) * BAND + 12 * number + 12:g}" text-anchor="middle">{line}</text>'
        for number, line in enumerate(words)
    ]
    height = TOP + BAND * max(_first_row(package) + len(layers(package)) for package in PACKAGES)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-size="10"'
    head += (
        ' font-family="system-ui, sans-serif" fill="#808080">\n<title>imports between the folders, in layers</title>'
    )
    tip = '<marker id="tip" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
    tip += '<path d="M0 0L6 3L0 6z"/></marker>'
    return "\n".join([head, tip, *arrows, *body, *map(_drawn, boxes.values()), "</svg>"]) + "\n"


def _first_row(package: str) -> int:
    """Returns the row of a package's highest layer: the tasks stand below the plug-ins."""
    return len(layers("dlo_plugins")) + 1 if package == "dlo_tasks" else 0


def _column(package: str, boxes: dict[Node, Box]) -> Iterator[str]:
    """Adds a package's boxes to ``boxes``; yields its name."""
    middle, name_at = CENTRES[package]
    for number, places in enumerate(layers(package)):
        single = [place for place in places if not place.endswith("/") and not place.startswith("__")]
        names = [*([""] if single else []), *(place for place in places if place.endswith("/"))]
        y = TOP + (_first_row(package) + len(layers(package)) - 1 - number) * BAND
        made = [Box([name] if name else _wrapped(single), COLOURS[package], y=y) for name in names]
        x = middle - (sum(box.width for box in made) + GAP * (len(made) - 1)) / 2
        for name, box in zip(names, made, strict=True):
            boxes[package, number, name], box.x = box, x
            x += box.width + GAP
        if number == len(layers(package)) - 1:
            yield f'<text x="{name_at:g}" y="{y + HIGH / 2 + 4:g}" font-size="12">{package}</text>'


def _wrapped(names: list[str]) -> list[str]:
    if len(names) > 7:
        return [", ".join(names[:2]), f"and {len(names) - 2} more modules"]
    half = -(-len(names) // 2) if len(names) > 3 else len(names)
    return [", ".join(names[start : start + half]) for start in range(0, len(names), half)]


def _drawn_edges() -> set[tuple[Node, Node]]:
    """Returns the imports between boxes of a package, without those implied by others."""
    pairs = set()
    for edge in edges():
        ends = [place_of(module) for module in edge[:2]]
        if edge.kind != "module" or any(place.startswith("__") for _, place in ends):
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
    number = next(number for number, places in enumerate(layers(package)) if place in places)
    return package, number, place if place.endswith("/") else ""


def _arrow(source: Box, target: Box) -> str:
    """Returns an arrow that is horizontal up to the next layer, and vertical below it."""
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
