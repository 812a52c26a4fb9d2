"""Draws docs/images/imports.svg, the imports between folders, from the source files.

Run ``python docs/pictures/imports.py``. Files are parsed, not imported. ``tests/framework`` checks the tree against the
layers below, and the page on the architecture makes a table from ``UPWARD``.
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

#: Layers of each package, from the lowest: a title, and its folders and single modules. A module may import from lower
#: layers. A single module may also import from its own layer; a folder may not.
LAYERS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "dlo_framework": (
        (
            "utilities",
            (
                "_version",
                "errors",
                "extensions",
                "units",
                "yaml_text",
                "atomic_file",
                "agreement",
                "lock",
                "process_setup",
                "random_streams",
                "copy_streams",
                "batches",
                "fake_kernels",
                "costs",
            ),
        ),
        (
            "description",
            (
                "plan",
                "mesh",
                "shards",
                "norms",
                "local_memory",
                "applier",
                "placed_model",
                "strategy_contract",
                "model_sizes",
                "batch_transform",
                "distillation",
                "token_loss",
                "four_bit_linear",
                "recompute",
                "attention/",
            ),
        ),
        ("data and state", ("registry/", "data/", "checkpoint/", "experts/")),
        (
            "run",
            (
                "task",
                "progress",
                "resume",
                "runs",
                "ema",
                "frozen_model",
                "optimizers",
            ),
        ),
        ("ranks", ("distributed/",)),
        ("monitoring", ("watch/",)),
        ("callbacks", ("accelerator", "finite", "stop", "rehearsal", "defaults", "run_setup", "trainer")),
        ("testing", ("testing/",)),
        ("command line", ("cli/",)),
        ("", ("__main__", "__init__")),
    ),
    "dlo_plugins": (
        ("sharding", ("sharding/", "sweep/", "loggers/")),
        (
            "techniques",
            (
                "__init__",
                "compression/",
                "context/",
                "tensor/",
                "experts/",
                "pipeline/",
                "remat/",
                "zero/",
                "fsdp/",
                "deepspeed/",
            ),
        ),
        ("pruning", ("pruning/",)),
        ("quantisation", ("quantisation/",)),
        ("appliers", ("appliers/",)),
        ("mesh", ("mesh/",)),
        ("strategies", ("strategies/",)),
        ("distillation", ("distillation/",)),
        ("optimizers", ("optimizers/",)),
        ("callbacks", ("callbacks/",)),
        ("planner", ("planner/",)),
        ("profiling", ("profiling/",)),
        ("commands", ("commands/",)),
    ),
    "dlo_tasks": (("shared", ("optim", "__init__")), ("tasks", ("imagenet/", "llm/"))),
}

#: Imports inside functions that go up, with the reason.
UPWARD = {
    (
        "dlo_framework.distillation",
        "dlo_framework.distributed.vocab_parallel",
    ): "names the shard of classes that losses get, for type checkers",
    (
        "dlo_plugins.remat.planning",
        "dlo_plugins.pipeline.actions",
    ): "counts the micro-batches in flight by the kinds of a schedule's actions",
    (
        "dlo_plugins.strategies.deepspeed",
        "dlo_plugins.callbacks.lr_curves",
    ): "finds the callbacks that set the learning rate",
}


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
        elif isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            pending += [(child, "types") for child in node.body] + [(child, kind) for child in node.orelse]
        else:
            late = kind == "module" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            pending += [(child, "function" if late else kind) for child in ast.iter_child_nodes(node)]


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


def layer_of(module: str) -> int:
    """Returns the number of a module's layer in its package, 0 for the lowest.

    Raises:
        LookupError: If no layer has the folder or single module.
    """
    package, place = place_of(module)
    for number, (_, places) in enumerate(LAYERS[package]):
        if place in places:
            return number
    raise LookupError(
        f"LAYERS must name every folder of {package}, got none for {place}; add it in docs/pictures/imports.py"
    )


def goes_up(edge: Edge) -> bool:
    """Returns whether an import inside a package goes to a higher layer, or to another folder of the same layer."""
    (package, place), (other, target) = place_of(edge.source), place_of(edge.target)
    if package != other or place == target:
        return False
    own, its = layer_of(edge.source), layer_of(edge.target)
    return its > own or (its == own and (place.endswith("/") or target.endswith("/")))


# --- the picture -------------------------------------------------------------------------------------------

COLOURS = {"dlo_framework": "#3f6ad8", "dlo_plugins": "#d9822b", "dlo_tasks": "#2e8b57"}
#: Position of a package: centre of its boxes in x (pixels), its top row, and x of its name (pixels).
PLACES = {
    "dlo_framework": (240.0, 0, 110.0),
    "dlo_plugins": (790.0, 0, 520.0),
    "dlo_tasks": (790.0, len(LAYERS["dlo_plugins"]) + 1, 520.0),
}
TITLES = {"dlo_framework": 84.0, "dlo_plugins": 500.0, "dlo_tasks": 500.0}  # right edge of the layers' titles, pixels
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
    middle, row = PLACES["dlo_tasks"][:2]
    body += [
        f'<text x="{middle:g}" y="{TOP + (row - 1) * BAND + 12 * number + 12:g}" text-anchor="middle">{line}</text>'
        for number, line in enumerate(words)
    ]
    height = TOP + BAND * max(PLACES[package][1] + len(_titled(package)) for package in PACKAGES)
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-size="10"'
    head += (
        ' font-family="system-ui, sans-serif" fill="#808080">\n<title>imports between the folders, in layers</title>'
    )
    tip = '<marker id="tip" viewBox="0 0 6 6" refX="6" refY="3" markerWidth="6" markerHeight="6" orient="auto">'
    tip += '<path d="M0 0L6 3L0 6z"/></marker>'
    return "\n".join([head, tip, *arrows, *body, *map(_drawn, boxes.values()), "</svg>"]) + "\n"


def _column(package: str, boxes: dict[Node, Box]) -> Iterator[str]:
    """Adds a package's boxes to ``boxes``; yields its name and the titles of its layers."""
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
    """Returns the imports between boxes of a package, without those implied by others."""
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
