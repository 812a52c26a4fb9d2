"""Models that are built without memory, on the meta device, and get it unit by unit as they are sharded.

Each module's ``reset_parameters`` draws its random numbers from a seed made of the run's and the module's name. So the
weights are the same on every rank, however many there are and in whatever order units are sharded.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dlo_framework.cuts import Cut, Layout
from dlo_framework.distributed.canonical import clean
from dlo_framework.errors import DloError


def on_meta(module: nn.Module) -> bool:
    """Returns whether any parameter or buffer of a module has no memory yet."""
    return any(tensor.is_meta for tensor in itertools.chain(module.parameters(), module.buffers()))


def own_tensors(module: nn.Module) -> Iterator[Tensor]:
    """Yields the parameters and buffers that a module itself holds."""
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def check_initialisable(module: nn.Module, loads_weights: bool) -> None:
    """Checks that everything on the meta device will get values.

    Args:
        module: with all its submodules.
        loads_weights: whether a checkpoint's weights will be loaded; then only buffers that checkpoints leave out need
            to be initialised.

    Raises:
        DloError: with the names of what would stay without values.
    """
    lacking = []
    for name, submodule in module.named_modules():
        if _resets(submodule) or not any(tensor.is_meta for tensor in own_tensors(submodule)):
            continue
        absent = submodule._non_persistent_buffers_set if loads_weights else None
        lacking += [
            f"{name}.{key}" if name else key
            for key, tensor in [
                *submodule.named_parameters(recurse=False),
                *submodule.named_buffers(recurse=False),
            ]
            if tensor.is_meta and (absent is None or key in absent)
        ]
    if lacking:
        shown = ", ".join(lacking[:5]) + (f" and {len(lacking) - 5} more" if len(lacking) > 5 else "")
        raise DloError(
            f"meta_init: no reset_parameters() initialises {shown}; give the modules that hold them one, start from a"
            " checkpoint (--ckpt_path), or leave meta_init out"
        )


class Initialiser:
    """Gives modules that are on the meta device memory and initial values, on all ranks alike.

    Submodules come before those that hold them, as in a constructor: ``nn.MultiheadAttention`` sets its projection's
    bias after the projection has. A module is initialised once, however often it is met; so is a tensor that several
    modules share.

    Args:
        device: where the memory is to be.
        seed: the run's.
        layout: what tensor and pipeline parallelism have made of the whole model. What has been cut is initialised
            whole, and cut again; what other stages hold stays without memory.
    """

    def __init__(self, device: torch.device, seed: int, layout: Layout | None = None) -> None:
        self._device, self._seed, self._layout = device, seed, layout or Layout()
        self._done: set[int] = set()
        self._made: dict[int, Tensor] = {}
        self._replaced: list[Tensor] = []  # Alive, so that no other tensor gets the id of one of them.

    def __call__(self, module: nn.Module, prefix: str) -> None:
        """Initialises what of a module is on the meta device.

        Args:
            module: a unit, or the root with what its units have left.
            prefix: its name in the whole model.
        """
        order = [(name, part) for name, part in _children_first(module, prefix) if id(part) not in self._done]
        fresh = [(name, submodule, self._lacking(name, submodule)) for name, submodule in order]
        for name, submodule, lacking in fresh:
            self._allocate(name, submodule, lacking)
        for name, submodule, lacking in fresh:
            if lacking and _resets(submodule):
                with torch.random.fork_rng(devices=[self._device] if self._device.type == "cuda" else []):
                    torch.manual_seed(module_seed(self._seed, name))
                    with torch.no_grad():
                        _reset(submodule)
        for name, submodule, lacking in fresh:
            for key in lacking:
                _cut_again(submodule, key, self._layout.cuts.get(_joined(name, key)))
        self._done.update(id(submodule) for _, submodule in order)

    def now(self, tensor: Any) -> Any:
        """Returns what has taken a meta tensor's place; other tensors are their own."""
        return self._made.get(id(tensor), tensor)

    def _lacking(self, name: str, module: nn.Module) -> list[str]:
        """Returns the names of a module's own parameters and buffers that are to get memory."""
        return [
            key
            for key, tensor in [*module._parameters.items(), *module._buffers.items()]
            if tensor is not None and tensor.is_meta and _joined(name, key) not in self._layout.elsewhere
        ]

    def _allocate(self, name: str, module: nn.Module, lacking: list[str]) -> None:
        """Replaces a module's own meta tensors by filled ones, whole; those that are one tensor stay one.

        What nothing initialises is NaN, so that a weight that no checkpoint brought shows in the first loss.
        """
        for key in lacking:
            entries: Any = module._parameters if key in module._parameters else module._buffers
            tensor = entries[key]
            if id(tensor) not in self._made:
                cut = self._layout.cuts.get(_joined(name, key))
                shape = tensor.shape if cut is None else cut.whole_shape(tensor.shape)
                fill = torch.nan if tensor.is_floating_point() else 0
                value = torch.full(shape, fill, dtype=tensor.dtype, device=self._device)
                new = nn.Parameter(value, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
                new.__dict__.update(tensor.__dict__)  # Marks that optimizers' groupings look at.
                self._made[id(tensor)] = new
                self._replaced.append(tensor)
            entries[key] = self._made[id(tensor)]


def module_seed(seed: int, name: str) -> int:
    """Returns the seed of a module's initial values."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _cut_again(module: nn.Module, key: str, cut: Cut | None) -> None:
    tensor = module._parameters[key] if key in module._parameters else module._buffers[key]
    assert tensor is not None
    if cut is not None and tensor.shape[cut.dim] == cut.size != cut.length:
        tensor.data = cut.take(tensor.data)


def _joined(name: str, key: str) -> str:
    return clean(f"{name}.{key}" if name else key)


def _children_first(module: nn.Module, prefix: str) -> Iterable[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        yield from _children_first(child, f"{prefix}.{name}" if prefix else name)
    yield prefix, module


def _resets(module: nn.Module) -> bool:
    return any(callable(getattr(module, name, None)) for name in ("reset_parameters", "_reset_parameters"))


def _reset(module: nn.Module) -> None:
    """Calls a module's own initialisation; torch's attention and transformer call theirs ``_reset_parameters``."""
    method: Any = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
    method()
