"""What needs no run: memory of a rank over the batch and the length of sequences, and the graph of a model's modules.

Both are of tensors without values; no device and no weights are needed. The model is profiled once for each length, as
`dlo plan` does. torchview draws the graph.
"""

from __future__ import annotations

import importlib
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dlo_framework.atomic_file import write_atomic
from dlo_framework.batches import tree_map
from dlo_framework.errors import DloError
from dlo_framework.task import Task
from dlo_framework.units import format_bytes, format_table
from dlo_framework.watch.media import draw_figure
from dlo_plugins.plan.layout import Layout
from dlo_plugins.plan.machine import load_machine
from dlo_plugins.plan.model_profile import row_length
from dlo_plugins.plan.plan_config import layout_or_one_rank, read_device
from dlo_plugins.plan.rank_memory import MemoryModel, RankMemory
from dlo_plugins.plan.run_memory import batch_of, on_meta, profile_formats, run_state
from dlo_plugins.plan.step_time import TimeModel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_PARTS = tuple(part.name for part in fields(RankMemory))


@dataclass(frozen=True)
class MemoryTable:
    """Memory of a rank over batch and length.

    Attributes:
        model: Class name of the model.
        layout: Layout of the run.
        device: Type of the device.
        memory: Predicted bytes by length, the tokens of a row (None where rows have none), and by the rows of a
            micro-batch on a rank.
    """

    model: str
    layout: Layout
    device: str
    memory: dict[int | None, dict[int, RankMemory]]

    def text(self) -> str:
        """Returns the table."""
        rows = [(length, batch, memory) for length, own in self.memory.items() for batch, memory in own.items()]
        used = [part for part in _PARTS if any(getattr(memory, part) for *_, memory in rows)]
        cells = [["rows", "length", *used, "sum"]]
        for length, batch, memory in rows:
            sizes = (*(getattr(memory, part) for part in used), memory.total)
            cells.append([str(batch), str(length or "-"), *map(format_bytes, sizes)])
        title = f"memory of a rank over batch and length, predicted for {self.model} on {self.device}: {self.layout}"
        return "\n".join([title, *format_table(cells, left=0)])

    def write(self, folder: Path) -> None:
        """Writes the table as `memory_table.json`, and plots it as `memory_table.png`."""
        rows = [
            {"batch": batch, "length": length, **asdict(memory)}
            for length, own in self.memory.items()
            for batch, memory in own.items()
        ]
        content = {"model": self.model, "layout": str(self.layout), "device": self.device, "rows": rows}
        write_atomic(folder / "memory_table.json", json.dumps(content, indent=1) + "\n")
        figure = draw_figure("dlo profile", self.figure)
        if figure is not None:
            figure.savefig(folder / "memory_table.png", dpi=120)

    def figure(self) -> Figure:
        """Returns a plot with bars of the parts for each length."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(3.2 * len(self.memory) + 1.5, 3.2), layout="constrained")
        every = figure.subplots(1, len(self.memory), sharey=True, squeeze=False)[0]
        for axes, (length, own) in zip(every, self.memory.items(), strict=True):
            names, bottom = [str(batch) for batch in own], [0.0] * len(own)
            for part in _PARTS:
                sizes = [getattr(memory, part) / 1e9 for memory in own.values()]
                if max(sizes) > 0:
                    axes.bar(names, sizes, bottom=bottom, label=part)
                    bottom = [at + size for at, size in zip(bottom, sizes, strict=True)]
            axes.set(xlabel="rows", title=f"{length} tokens" if length else "")
            axes.spines[["top", "right"]].set_visible(False)
        every[0].set_ylabel("GB")
        every[-1].legend(fontsize=7, frameon=False)
        return figure


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
    batch, plan = batch_of(task, datamodule), task.parallel_plan() if isinstance(task, Task) else None
    own = row_length(batch) if plan is not None and plan.attention else None
    if lengths and own is None:
        raise DloError(
            f"profile: --lengths must be for a model of sequences of tokens, got {type(model).__name__} without; leave"
            " it out"
        )
    wanted: Sequence[int | None] = [None]
    if own is not None:
        wanted = lengths or sorted({max(1, own // 2), own, 2 * own})
    name, by_length = "", {}
    for length in wanted:
        given = batch if length is None else _of_length(batch, length)
        profile = profile_formats(task, given, plan, state, machine.device)
        name, memory = profile.model, MemoryModel(TimeModel(profile, machine, state))
        by_length[length] = {size: memory.largest(replace(layout, micro_batch=size)) for size in batches}
    return MemoryTable(name, layout, device, by_length)


def _of_length(batch: Any, length: int) -> Any:
    """Returns a batch whose rows have another number of tokens, repeated or cut."""
    own = row_length(batch)
    assert own is not None

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.ndim < 2 or leaf.shape[1] != own:
            return leaf
        return torch.cat([leaf] * -(-length // own), dim=1)[:, :length]

    return tree_map(resize, batch)


# --- graph ---------------------------------------------------------------------------------------------------

#: Levels of modules that are drawn, the preferred number first.
_DEPTHS = (4, 5, 6, 8, 12, 20)


def draw_model(task: Any, datamodule: Any, folder: Path) -> Path:
    """Draws the graph of a task's model; returns the path of the SVG, or of its source where Graphviz is missing.

    Args:
        task: Task of the run.
        datamodule: Datamodule of the run, which may give the batch.
        folder: Folder of the files `model_graph.gv` and `model_graph.svg`.

    Raises:
        DloError: The module is not a task, which says what the model's inputs are.
    """
    if not isinstance(task, Task):
        raise DloError(
            f"profile: --graph must have a Task, whose inputs() say what the model takes, got {type(task).__name__};"
            " leave --graph out"
        )
    twin = task.on_meta()
    batch = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, batch_of(twin, datamodule))
    args, kwargs = twin.inputs(batch)
    names = list(kwargs)
    drawn = _draw_graph(_Positional(twin.model, names), [*args, *kwargs.values()], type(twin.model).__name__)
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "model_graph.gv"
    source.write_text(drawn.source)
    if shutil.which("dot") is None:
        return source
    drawn.render(outfile=str(folder / "model_graph.svg"), cleanup=True)
    return folder / "model_graph.svg"


def _draw_graph(model: torch.nn.Module, inputs: list[Any], name: str) -> Any:
    """Returns the drawn graph.

    torchview (0.2.7) fails with a KeyError at depths that cut through some models' functions, so others are tried.

    Raises:
        DloError: The model cannot be drawn.
    """
    torchview = importlib.import_module("torchview")
    for depth in _DEPTHS:
        try:
            return torchview.draw_graph(
                model, input_data=inputs, device="meta", depth=depth, graph_name=name, expand_nested=True
            ).visual_graph
        except KeyError:
            continue
        except RuntimeError as error:
            first = str(error).partition("\n")[0]
            raise DloError(
                f"profile: --graph must have a model that torchview can trace, got: {first}; leave it out"
            ) from error
    raise DloError(f"profile: --graph must have a model that torchview can draw, got {name}; leave --graph out")


class _Positional(torch.nn.Module):
    """Model whose last arguments have names, for torchview, which traces tensors among positional ones.

    Args:
        model: Model.
        names: Names of the last arguments.
    """

    def __init__(self, model: torch.nn.Module, names: list[str]) -> None:
        super().__init__()
        self.model, self._names = model, names

    def forward(self, *inputs: Any) -> Any:
        """Calls the model."""
        count = len(inputs) - len(self._names)
        outputs = self.model(*inputs[:count], **dict(zip(self._names, inputs[count:], strict=True)))
        return list(outputs.values()) if isinstance(outputs, dict) else outputs
