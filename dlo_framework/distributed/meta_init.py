"""Initialisation of models built on the meta device, unit by unit as units are sharded.

Each module's ``reset_parameters`` draws its random numbers from a seed made of the run's seed and the module's name. So
the weights are the same on every rank, whatever the number of ranks and the order in which units are sharded.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from dlo_framework.errors import DloError, shown_names
from dlo_framework.shards import Layout, TensorSlice
from dlo_framework.strategy_contract import plain_name


def on_meta(module: nn.Module) -> bool:
    """Returns whether any parameter or buffer of a module is on the meta device."""
    return any(tensor.is_meta for tensor in itertools.chain(module.parameters(), module.buffers()))


def _own_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Returns a module's own parameters and buffers by name, without those of its submodules."""
    return [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]


def check_initialisable(module: nn.Module, loads_weights: bool) -> None:
    """Checks that all parameters and buffers on the meta device will get values.

    Args:
        module: Module to check with all its submodules.
        loads_weights: Whether a checkpoint's weights will be loaded; then only buffers that checkpoints leave out need
            to be initialised.

    Raises:
        DloError: with the names of tensors that would stay uninitialised.
    """
    lacking = []
    for name, submodule in module.named_modules():
        if not _resets(submodule):
            absent = submodule._non_persistent_buffers_set if loads_weights else None
            missing = [key for key, tensor in _own_tensors(submodule) if tensor.is_meta]
            lacking += [f"{name}.{key}" if name else key for key in missing if absent is None or key in absent]
    if lacking:
        raise DloError(
            f"tensors under meta_init must have a reset_parameters() that initialises them, got {shown_names(lacking)}"
            " without; add one to their modules, start from a checkpoint (--ckpt_path,"
            " or trainer.ckpt_path set before the fit), or remove meta_init"
        )


#: Attribute of modules whose values are read after they have been sharded.
_READ_LATER = "_dlo_read_later"


def set_read_later(module: nn.Module) -> None:
    """Marks a module on the meta device whose parameters are read once it is sharded.

    Its slices over `ep` or `tp` are then allocated alone, without initial values: otherwise each rank would hold all
    experts of a unit for a moment.
    """
    module.__dict__[_READ_LATER] = True


class Initialiser:
    """Allocates and initialises modules that are on the meta device, with the same values on all ranks.

    Submodules come before their parents, as in a constructor: ``nn.MultiheadAttention`` sets its projection's bias
    after the projection has. Each module, and each tensor that several modules share, is initialised once.

    Args:
        device: Device on which to allocate.
        seed: Seed of the run.
        layout: Layout of the model after tensor and pipeline parallelism. Sliced tensors are initialised in full shape
            and sliced again; tensors of other stages stay on the meta device.
    """

    def __init__(self, device: torch.device, seed: int, layout: Layout | None = None) -> None:
        self._device, self._seed, self._layout = device, seed, layout or Layout()
        self._done: set[int] = set()
        self._made: dict[int, Tensor] = {}
        self._replaced: list[Tensor] = []  # Keeps them alive, so that no other tensor gets one of their ids.

    def __call__(self, module: nn.Module, prefix: str) -> None:
        """Initialises a module's tensors on the meta device.

        Args:
            module: Unit, or root module after its units.
            prefix: Name of the module in the model.
        """
        order = [(name, part) for name, part in _children_first(module, prefix) if id(part) not in self._done]
        fresh = [(name, submodule, self._lacking(name, submodule)) for name, submodule in order]
        for name, submodule, lacking in fresh:
            self._allocate(name, submodule, lacking)
        for name, submodule, lacking in fresh:
            if lacking and _resets(submodule) and not self._is_read_later(name, submodule):
                with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
                    digest = hashlib.sha256(f"{self._seed}/{name}".encode()).digest()
                    torch.manual_seed(int.from_bytes(digest[:8], "little") >> 1)
                    with torch.no_grad():
                        _resets(submodule)()
        for name, submodule, lacking in fresh:
            for key in lacking:
                _cut_again(submodule, key, self._layout.slices.get(_joined(name, key)))
        self._done.update(id(submodule) for _, submodule in order)

    def _is_read_later(self, name: str, module: nn.Module) -> bool:
        """Returns whether a module's values are read later, of which this rank has slices over `ep` or `tp`."""
        own = [*module._parameters, *module._buffers]
        return _READ_LATER in module.__dict__ and any(_joined(name, key) in self._layout.slices for key in own)

    def replacement_of(self, tensor: Any) -> Any:
        """Returns the tensor that has replaced a meta tensor; any other tensor itself."""
        return self._made.get(id(tensor), tensor)

    def _lacking(self, name: str, module: nn.Module) -> list[str]:
        """Returns the names of a module's own parameters and buffers to allocate."""
        return [
            key
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]
            if tensor is not None and tensor.is_meta and _joined(name, key) not in self._layout.other_stages
        ]

    def _allocate(self, name: str, module: nn.Module, lacking: list[str]) -> None:
        """Replaces a module's own meta tensors by full tensors; shared tensors stay shared.

        They are filled with NaN, so that a weight that nothing initialised or loaded shows in the first loss.
        """
        for key in lacking:
            entries: Any = module._parameters if key in module._parameters else module._buffers
            tensor = entries[key]
            if id(tensor) not in self._made:
                cut = self._layout.slices.get(_joined(name, key))
                whole = cut is not None and not self._is_read_later(name, module)
                shape = cut.full_shape(tensor.shape) if cut is not None and whole else tensor.shape
                fill = torch.nan if tensor.is_floating_point() else 0
                value = torch.full(shape, fill, dtype=tensor.dtype, device=self._device)
                new = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
                new.__dict__.update(tensor.__dict__)  # Attributes that parameter groups are made by.
                self._made[id(tensor)] = new
                self._replaced.append(tensor)
            entries[key] = self._made[id(tensor)]


def _cut_again(module: nn.Module, key: str, cut: TensorSlice | None) -> None:
    tensor = module._parameters[key] if key in module._parameters else module._buffers[key]
    assert tensor is not None
    if cut is not None and tensor.shape[cut.dim] == cut.size != cut.length:
        tensor.data = cut.slice_tensor(tensor.data)


def _joined(name: str, key: str) -> str:
    return plain_name(f"{name}.{key}" if name else key)


def _children_first(module: nn.Module, prefix: str) -> Iterable[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        yield from _children_first(child, f"{prefix}.{name}" if prefix else name)
    yield prefix, module


def _resets(module: nn.Module) -> Any:
    """Returns a module's own initialisation; torch's attention and transformer call theirs ``_reset_parameters``."""
    return getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
