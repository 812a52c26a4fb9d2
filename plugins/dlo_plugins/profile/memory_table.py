"""Memory of a rank over the batch and the length of sequences, predicted on tensors without values.

The model is profiled once for each length, as `dlo plan` does; no device and no weights are needed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dlo_framework.atomic_file import write_atomic
from dlo_framework.batches import tree_leaves, tree_map
from dlo_framework.errors import DloError
from dlo_framework.task import Task
from dlo_framework.units import format_bytes
from dlo_framework.watch.media import draw_figure
from dlo_plugins.plan.layout import Layout
from dlo_plugins.plan.machine import load_machine
from dlo_plugins.plan.plan_config import layout_or_one_rank, read_device
from dlo_plugins.plan.rank_memory import MemoryModel, RankMemory
from dlo_plugins.plan.run_memory import batch_of, on_meta, profile_formats, run_state
from dlo_plugins.plan.step_time import TimeModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PARTS = ("parameters", "gradients", "optimizer", "gathered", "activations", "working", "loss", "overhead")


@dataclass(frozen=True)
class MemoryRow:
    """Memory of a rank for one batch and length.

    Attributes:
        batch: Rows of a micro-batch on a rank.
        length: Tokens of a row; None where rows have no length.
        memory: Predicted bytes.
    """

    batch: int
    length: int | None
    memory: RankMemory


@dataclass(frozen=True)
class MemoryTable:
    """Memory of a rank over batch and length.

    Attributes:
        model: Class name of the model.
        layout: Layout of the run.
        device: Type of the device.
        rows: Predictions.
    """

    model: str
    layout: Layout
    device: str
    rows: tuple[MemoryRow, ...]

    def text(self) -> str:
        """Returns the table."""
        used = [part for part in _PARTS if any(getattr(row.memory, part) for row in self.rows)]
        head = f"{'rows':>6}{'length':>8}" + "".join(f"{part:>12}" for part in used) + f"{'sum':>12}"
        lines = [
            f"memory of a rank over batch and length, predicted for {self.model} on {self.device}: {self.layout}",
            head,
        ]
        for row in self.rows:
            cells = "".join(f"{format_bytes(getattr(row.memory, part)):>12}" for part in used)
            lines.append(f"{row.batch:>6}{row.length or '-':>8}{cells}{format_bytes(row.memory.total):>12}")
        return "\n".join(lines)


def memory_table(
    config: dict[str, Any], model: Any, datamodule: Any, batches: Sequence[int] | None, lengths: Sequence[int] | None
) -> MemoryTable:
    """Returns the memory of a rank over batch and length.

    Args:
        config: Config of the user.
        model: Task of the config.
        datamodule: Datamodule of the config.
        batches: Rows of a micro-batch on a rank; None for a quarter to four times the config's.
        lengths: Tokens of a row; None for half to twice the config's.

    Raises:
        DloError: The model cannot be profiled, or lengths are given for rows without one.
    """
    trainer = config.get("trainer") or {}
    device = read_device(config)
    machine = load_machine("h100" if device == "cuda" else "cpu")
    state, _ = run_state(config, model)
    devices, nodes = trainer.get("devices"), int(trainer.get("num_nodes") or 1)
    layout = layout_or_one_rank(config, devices * nodes if isinstance(devices, int) and devices > 0 else None)
    batches = batches or sorted({max(1, layout.micro_batch * factor // 4) for factor in (1, 2, 4, 8, 16)})
    task = on_meta(model)
    batch = batch_of(task, datamodule)
    own = _length(batch) if isinstance(task, Task) and bool(task.parallel_plan().attention) else None
    if lengths and own is None:
        raise DloError(
            f"profile: --lengths must be for a model of sequences of tokens, got {type(model).__name__} without; leave"
            " it out"
        )
    wanted: list[int | None] = [None]
    if own is not None:
        wanted = list(lengths or sorted({max(1, own // 2), own, 2 * own}))
    rows: list[MemoryRow] = []
    name = ""
    for length in wanted:
        plan = task.parallel_plan() if isinstance(task, Task) else None
        given = batch if length is None else _of_length(batch, length)
        profile = profile_formats(task, given, plan, state, machine.device)
        name = profile.model
        memory = MemoryModel(TimeModel(profile, machine, state))
        rows += [MemoryRow(size, length, memory.largest(replace(layout, micro_batch=size))) for size in batches]
    return MemoryTable(name, layout, device, tuple(rows))


def _length(batch: Any) -> int | None:
    """Returns the tokens of a batch's rows; None without token ids `[rows, length]`."""
    ids = (
        leaf for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim == 2 and leaf.dtype == torch.long
    )
    found = next(ids, None)
    return None if found is None else int(found.shape[1])


def _of_length(batch: Any, length: int) -> Any:
    """Returns a batch whose rows have another number of tokens, repeated or cut."""
    own = _length(batch)
    assert own is not None

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.ndim < 2 or leaf.shape[1] != own:
            return leaf
        return torch.cat([leaf] * -(-length // own), dim=1)[:, :length]

    return tree_map(resize, batch)


def write_memory_table(table: MemoryTable, folder: Path) -> None:
    """Writes a table as `memory_table.json`, and plots it as `memory_table.png`.

    Args:
        table: Table.
        folder: Folder of the files.
    """
    content = {
        "model": table.model,
        "layout": str(table.layout),
        "device": table.device,
        "rows": [{"batch": row.batch, "length": row.length, **asdict(row.memory)} for row in table.rows],
    }
    write_atomic(folder / "memory_table.json", json.dumps(content, indent=1) + "\n")
    figure = draw_figure("dlo profile", lambda: _draw(table))
    if figure is not None:
        figure.savefig(folder / "memory_table.png", dpi=120)


def _draw(table: MemoryTable) -> Figure:
    from matplotlib.figure import Figure

    lengths = list(dict.fromkeys(row.length for row in table.rows))
    figure = Figure(figsize=(3.2 * len(lengths) + 1.5, 3.2), layout="constrained")
    every = figure.subplots(1, len(lengths), sharey=True, squeeze=False)[0]
    for axes, length in zip(every, lengths, strict=True):
        rows = [row for row in table.rows if row.length == length]
        names = [str(row.batch) for row in rows]
        bottom = [0.0] * len(rows)
        for part in _PARTS:
            sizes = [getattr(row.memory, part) / 1e9 for row in rows]
            if max(sizes) > 0:
                axes.bar(names, sizes, bottom=bottom, label=part)
                bottom = [at + size for at, size in zip(bottom, sizes, strict=True)]
        axes.set(xlabel="rows", title=f"{length} tokens" if length else "")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    every[0].set_ylabel("GB")
    every[-1].legend(fontsize=7, frameon=False)
    return figure
