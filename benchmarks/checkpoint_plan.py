"""What saving and loading a large model's checkpoint take beside its bytes: who writes what, and the manifest.

    python benchmarks/checkpoint_plan.py [--rounds 5] [--ranks 64 256] [--layers 80]

A Llama of 70 billion parameters with Adam's state, sharded by rows as FSDP does it. All ranks are played by this
process, nothing is written but the manifest, and no tensor has memory. The base is the plan of a first save, which the
first rank makes: `first plan again` is the A/A control. A later save, in which nothing has changed, is what a rank does
that holds as many boxes as the first of these, without the bytes that pass. What a rank tells and is told is counted.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import PROCESS, ratios, take_turns

from dlo_framework.checkpoint import read_manifest
from dlo_framework.checkpoint.manifest import MANIFEST, Manifest, Runs, SavedTensor, shard_name, to_text
from dlo_framework.checkpoint.save_plan import (
    PackedInventory,
    Plan,
    local_inventory,
    make_file_plan,
    make_global_plan,
    pack_inventory,
)
from dlo_framework.checkpoint.saving import SavePlanner
from dlo_framework.checkpoint.state_tree import TensorLocation
from dlo_framework.checkpoint.tensor_file import dtype_of
from dlo_framework.shards import FlatShard

WIDTH, INNER, VOCABULARY, KEYS = 8192, 28_672, 128_256, 1024
LAYER = {
    **{"q": (WIDTH, WIDTH), "k": (KEYS, WIDTH), "v": (KEYS, WIDTH), "o": (WIDTH, WIDTH)},
    **{"gate": (INNER, WIDTH), "up": (INNER, WIDTH), "down": (WIDTH, INNER), "norm1": (WIDTH,), "norm2": (WIDTH,)},
}
FIRST, AGAIN, LATER = "first plan", "first plan again", "a later save, each rank"
WRITTEN, READ = "manifest to text", "manifest read"
LATER_BAR = 0.5  # of the first plan for hundreds of ranks


def shapes(layers: int) -> dict[str, tuple[int, ...]]:
    """Returns the model's parameters."""
    found: dict[str, tuple[int, ...]] = {"embed": (VOCABULARY, WIDTH), "head": (VOCABULARY, WIDTH), "norm": (WIDTH,)}
    return found | {f"layers.{n}.{name}.weight": shape for n in range(layers) for name, shape in LAYER.items()}


def held_by(rank: int, ranks: int, layers: int) -> list[tuple[TensorLocation, torch.Tensor | FlatShard]]:
    """Returns what a rank holds: its rows of the weights and of Adam's moments, and Adam's steps."""
    held: list[tuple[TensorLocation, torch.Tensor | FlatShard]] = []
    for name, shape in shapes(layers).items():
        rows, row = -(-shape[0] // ranks), torch.Size(shape[1:]).numel()
        first, last = min(rank * rows, shape[0]), min((rank + 1) * rows, shape[0])
        part = FlatShard(torch.empty((last - first) * row, device="meta"), torch.Size(shape), first * row)
        held.append((TensorLocation(("state_dict", name), "model", name), part))
        path = ("optimizer_states", 0, "state", name)
        held += [
            (TensorLocation((*path, key), "optimizer.0", f"{name}.{key}"), part) for key in ("exp_avg", "exp_avg_sq")
        ]
        held.append((TensorLocation((*path, "step"), "optimizer.0", f"{name}.step"), torch.empty((), device="meta")))
    return held


def manifest_of(plan: Plan) -> Manifest:
    """Returns the manifest of a save, as if the files' headers had a thousand bytes."""
    sizes = {shard_name(number): 1000 + size for number, size in enumerate(plan.sizes)}
    files = {name: {"bytes": size, "sha256": "0" * 64, "data": 1000} for name, size in sizes.items()}
    manifest, starts = Manifest(1, 0, len(files), 0.0, {}, files=files), dict.fromkeys(range(len(files)), 1000)
    for (group, name), tensor in plan.tensors.items():
        runs = Runs(tensor.runs, dtype_of(tensor.dtype).itemsize, starts)
        manifest.tensors.setdefault(group, {})[name] = SavedTensor(tensor.dtype, tensor.shape, runs)
    return manifest


def compared(ranks: int, layers: int, rounds: int, folder: Path) -> Table:
    """Measures one number of ranks."""
    told: list[PackedInventory] = [
        pack_inventory(local_inventory(held_by(rank, ranks, layers))[0]) for rank in range(ranks)
    ]
    plan, mine, alone = make_global_plan(told), held_by(0, ranks, layers), held_by(0, 1, layers)
    rest = {"optimizer_states": [{"state": {}, "param_groups": [{"params": list(shapes(layers))}]}]}
    manifest = manifest_of(plan)
    (folder / MANIFEST).write_text(to_text(manifest))
    runs: dict[str, Callable[[], object]] = {
        FIRST: lambda: make_global_plan(told),
        AGAIN: lambda: make_global_plan(told),
        LATER: lambda: SavePlanner(rest, alone, folder / "step.ckpt", None).plan(),
        WRITTEN: lambda: to_text(manifest),
        READ: lambda: read_manifest(folder),
    }
    runs[LATER]()  # The save before it.
    seconds = take_turns({name: (lambda run=run: PROCESS.seconds(run)) for name, run in runs.items()}, rounds)
    table = Table(f"{ranks} ranks, {len(plan.tensors)} tensors", FIRST, PROCESS)
    for name, values in seconds.items():
        table.add(
            name,
            ratios(values, seconds[FIRST]),
            bar=LATER_BAR if name == LATER and ranks >= 256 else None,
            ours=name != AGAIN,
            control=name == AGAIN,
            ms=statistics.median(values) * 1e3,
        )
    file = make_file_plan(0, local_inventory(mine)[0], plan.masks[0], plan.sizes[0])
    assert file is not None
    told_bytes = sum(map(len, told[0]))
    table.notes += [
        f"a rank tells {told_bytes / 1e3:.1f} kB and is told {len(plan.masks[0])} bytes;"
        f" the first writes {len(file.boxes)} boxes",
        f"the first rank gathers {sum(len(part) for one in told for part in one) / 1e6:.1f} MB, at a first save alone",
        f"the manifest has {(folder / MANIFEST).stat().st_size / 1e3:.0f} kB",
    ]
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--layers", type=int, default=80)
    options = parse_options(parser, __file__)
    record = Record.of(__file__, __doc__, options)
    with tempfile.TemporaryDirectory() as name:
        for ranks in options.ranks:
            record.add(compared(ranks, options.layers, options.rounds, Path(name)))
    record.finish()


if __name__ == "__main__":
    main()
