"""Graph of a model's modules and their shapes, drawn by torchview on tensors without values."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from dlo_framework.errors import DloError
from dlo_framework.task import Task
from dlo_plugins.planner.plan_report import first_batch

#: Levels of modules that are drawn.
_DEPTH = 3


def check_torchview() -> None:
    """Checks that torchview is installed.

    Raises:
        DloError: It is not.
    """
    if importlib.util.find_spec("torchview") is None:
        raise DloError("profile: --graph must have torchview, got none installed; pip install 'dlo_framework[profile]'")


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
    torchview = importlib.import_module("torchview")
    twin = task.on_meta()
    batch = twin.example_batch(datamodule)
    args, kwargs = twin.inputs(tree_map(_on_meta, first_batch(datamodule) if batch is None else batch))
    names = list(kwargs)
    drawn = torchview.draw_graph(
        _Positional(twin.model, names), input_data=[*args, *kwargs.values()], device="meta", depth=_DEPTH + 1,
        graph_name=type(twin.model).__name__, expand_nested=True,
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "model_graph.gv"
    source.write_text(drawn.visual_graph.source)
    if shutil.which("dot") is None:
        return source
    drawn.visual_graph.render(outfile=str(folder / "model_graph.svg"), cleanup=True)
    return folder / "model_graph.svg"


def _on_meta(leaf: Any) -> Any:
    return leaf.to("meta") if isinstance(leaf, Tensor) else leaf


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
        found = self.model(*inputs[:count], **dict(zip(self._names, inputs[count:], strict=True)))
        return list(found.values()) if isinstance(found, dict) else found
