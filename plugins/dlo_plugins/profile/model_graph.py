"""Graph of a model's modules and their shapes, drawn by torchview on tensors without values."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlo_framework.batches import tree_map
from dlo_framework.errors import DloError
from dlo_framework.task import Task
from dlo_plugins.plan.run_memory import batch_of

#: Levels of modules that are drawn, the preferred number first.
_DEPTHS = (4, 5, 6, 8, 12, 20)


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
    twin = task.on_meta()
    args, kwargs = twin.inputs(tree_map(_on_meta, batch_of(twin, datamodule)))
    names = list(kwargs)
    drawn = _draw(_Positional(twin.model, names), [*args, *kwargs.values()], type(twin.model).__name__)
    folder.mkdir(parents=True, exist_ok=True)
    source = folder / "model_graph.gv"
    source.write_text(drawn.source)
    if shutil.which("dot") is None:
        return source
    drawn.render(outfile=str(folder / "model_graph.svg"), cleanup=True)
    return folder / "model_graph.svg"


def _draw(model: torch.nn.Module, inputs: list[Any], name: str) -> Any:
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
