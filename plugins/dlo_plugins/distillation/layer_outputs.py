"""Outputs of named layers: their shapes before a run, and their values in a forward."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.hooks import RemovableHandle

from dlo_framework.errors import DloError, did_you_mean
from dlo_framework.fake_kernels import FakeKernels
from dlo_framework.task import Task
from dlo_plugins.mesh.mesh_simulation import copy_modules, fake_batch, make_fake


def check_layers(option: str, model: nn.Module, names: Iterable[str]) -> None:
    """Checks that a model has layers of these names.

    Args:
        option: Option that names them, for the error.
        model: Model, which may be on the meta device.
        names: Names of modules, relative to the model.

    Raises:
        DloError: It has not; the message has the nearest name.
    """
    known = [name for name, _ in model.named_modules() if name]
    for name in names:
        if name not in known:
            raise DloError(
                f"Distill: {option} must name layers of {type(model).__name__}, got '{name}'{did_you_mean(name, known)}"
            )


def output_tensor(output: Any) -> Tensor | None:
    """Returns the hidden states among a layer's outputs: the output itself, or its first tensor."""
    if isinstance(output, Tensor):
        return output
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    return next((part for part in parts if isinstance(part, Tensor)), None)


class LayerOutputs:
    """Keeps the outputs of named layers from one forward to the next :meth:`pop`.

    Only the first call of a layer is kept, so that recomputation in backward changes nothing.

    Args:
        model: Model with the layers.
        names: Names of the layers.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self.values: dict[str, Tensor] = {}
        self.is_on = True
        self._handles: list[RemovableHandle] = []
        for name in dict.fromkeys(names):
            hook = _Keep(self, name)
            self._handles.append(model.get_submodule(name).register_forward_hook(hook))

    def pop(self) -> dict[str, Tensor]:
        """Returns the outputs by name, and forgets them."""
        found, self.values = self.values, {}
        return found

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.values = [], {}


class _Keep:
    """Hook that keeps a layer's output."""

    def __init__(self, outputs: LayerOutputs, name: str) -> None:
        self._outputs, self._name = outputs, name

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        tensor = output_tensor(output)
        if self._outputs.is_on and tensor is not None:
            self._outputs.values.setdefault(self._name, tensor)


def layer_shapes(task: Task, batch: Any, names: Iterable[str]) -> dict[str, torch.Size]:
    """Returns the shapes of layers' outputs for a batch, from a forward without values; no memory is allocated.

    Args:
        task: Task with its model, which may be on the meta device; it is not changed.
        batch: Batch of one sample.
        names: Names of the layers.

    Raises:
        DloError: A layer was not called, or has no tensor as its output.
    """
    wanted = list(dict.fromkeys(names))
    copied = copy_modules(task)
    copied.eval()
    with FakeTensorMode(allow_non_fake_inputs=True), FakeKernels(), torch.no_grad():
        make_fake(copied, None)
        outputs = LayerOutputs(copied.model, wanted)
        args, kwargs = copied.inputs(fake_batch(batch))
        copied.forward(*args, **kwargs)
        found = {name: tensor.shape for name, tensor in outputs.pop().items()}
        outputs.remove()
    for name in wanted:
        if name not in found:
            raise DloError(
                f"Distill: layers must return tensors in the forward of {type(task.model).__name__}, got '{name}',"
                " which does not, or is not called; name the layer around it"
            )
    return found
