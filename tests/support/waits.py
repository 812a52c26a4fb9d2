"""What makes the host wait for a device in a training step, found on a CPU, where nothing has to be waited for."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

#: Operators whose result, or its size, depends on values that are on the device.
_READS = {
    "_local_scalar_dense", "nonzero", "equal", "masked_select", "_unique2", "unique_dim", "unique_consecutive",
    "bincount",
}  # fmt: skip
#: Methods that read values without an operator.
_METHODS = {"tolist", "cpu", "numpy", "__array__"}
#: Functions that make a tensor on the CPU unless they are given a device.
_FACTORIES = {
    "tensor", "as_tensor", "zeros", "ones", "empty", "full", "arange", "rand", "randn", "randint", "randperm",
    "linspace", "eye", "from_numpy", "frombuffer",
}  # fmt: skip
#: Steps before those that are counted: optimizers make their state, the monitor counts FLOPs.
_WARM_UP = 3
_HOST = "_is_on_the_host"
_TORCH = str(Path(torch.__file__).parent)


class Waits(TorchDispatchMode):
    """Notes what happens in a block that would wait for a device if the tensors were on one.

    Every tensor counts as one of the device's but those that are made in the block without a device, and what is
    computed of these alone: such are on the CPU of every machine, and reading them waits for nothing. So a tensor that
    something unseen has made is counted rather than missed.

    A wait is: reading a value (`item`, `bool`, `tolist`, `equal`), a result whose size depends on values (`nonzero`,
    indexing by a mask), a copy between device and CPU in either direction without `non_blocking`, a tensor of the
    device's made of Python's numbers.

    Args:
        allowed: Functions, as `file.py:name`, below which waits are counted apart.

    Attributes:
        calls: names of what has waited, in order.
        found: the same, each with the function that it was called in, `item in finite.py:read`.
        let: how often each allowed function has waited.
    """

    def __init__(self, allowed: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.allowed = allowed
        self.calls: list[str] = []
        self.found: list[str] = []
        self.let: Counter[str] = Counter()
        self._functions = _Functions(self)

    def __enter__(self) -> Waits:
        self._functions.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._functions.__exit__(*error)

    def clear(self) -> None:
        """Forgets what has been noted."""
        self.calls.clear()
        self.found.clear()
        self.let.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind.__torch_dispatch__ != Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # Such as DTensor: what it does to plain tensors comes here too.
        kwargs = kwargs or {}
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        waits = _waits(func, args, kwargs, given)
        result = func(*args, **kwargs)
        if waits is not None:
            self.note(waits)
        if given and all(map(is_on_host, given)):
            mark(result)
        return result

    def note(self, call: str) -> None:
        """Notes a wait, and who asked for it."""
        frames = [f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}" for frame in _stack()]
        allowed = next((name for name in self.allowed if name in frames), None)
        if allowed is not None:
            self.let[allowed] += 1
            return
        self.calls.append(call)
        outside = (frame for frame in _stack() if not frame.f_code.co_filename.startswith((_TORCH, __file__)))
        place = next(outside, None)
        code = place.f_code if place is not None else sys._getframe().f_code
        self.found.append(f"{call} in {Path(code.co_filename).name}:{code.co_name}")


class _Functions(TorchFunctionMode):
    """The part that operators do not show: methods that copy, and where a new tensor is."""

    def __init__(self, waits: Waits) -> None:
        super().__init__()
        self._waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        own = args[0] if args and isinstance(args[0], Tensor) else None
        if name in _METHODS and own is not None and not is_on_host(own) and not own.is_meta:
            self._waits.note(name)
            if name == "cpu":
                return mark(own.detach().clone())
        if name in ("to", "cuda") and own is not None:
            return self._moved(func, own, args, kwargs)
        result = func(*args, **kwargs)
        if name in _FACTORIES and own is None and isinstance(result, Tensor):
            if kwargs.get("device") in (None, "cpu"):  # Where a device is meant, it is a torch.device.
                mark(result)
            elif name in ("tensor", "as_tensor") and torch.device(kwargs["device"]).type != "meta":
                self._waits.note(name)
        elif name == "new_tensor":
            self._waits.note(name)
        return result

    def _moved(self, func: Any, own: Tensor, args: Any, kwargs: Any) -> Any:
        """Copies as `to` does: of tensors that are told apart by their marks alone."""
        others = [*args[1:], *kwargs.values()]
        device = next((value for value in others if isinstance(value, str | torch.device)), None)
        blocks = not kwargs.get("non_blocking", False)
        result = func(
            *((own.detach().clone(), *args[1:]) if device is not None and is_on_host(own) else args), **kwargs
        )
        if device is None or torch.device(device).type == "meta" or own.is_meta:
            return result
        if is_on_host(own) and not isinstance(device, str):
            if blocks:
                self._waits.note("to a device")
            result.__dict__.pop(_HOST, None)
        elif device == "cpu" and not is_on_host(own):
            if blocks:
                self._waits.note("to the cpu")
            result = mark(result.detach().clone())
        return result


def is_on_host(tensor: Tensor) -> bool:
    """Returns whether a tensor is on the CPU of every machine."""
    return getattr(tensor, _HOST, False)


def mark(result: Any) -> Any:
    """Marks tensors as being on the CPU of every machine."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, Tensor):
            setattr(leaf, _HOST, True)
    return result


def _waits(func: Any, args: Any, kwargs: Any, given: list[Tensor]) -> str | None:
    """Returns what an operator would wait for; None if it does not."""
    name = func.overloadpacket.__name__
    if not given or all(map(is_on_host, given)) or any(tensor.is_meta for tensor in given):
        return None
    if name in _READS:
        return {"_local_scalar_dense": "item"}.get(name, name)
    if name == "copy_" and is_on_host(args[0]) != is_on_host(args[1]):
        return None if (args[2] if len(args) > 2 else kwargs.get("non_blocking", False)) else name
    if name == "repeat_interleave" and len(given) == 1 and kwargs.get("output_size") is None:
        return name
    if name in ("index", "index_put", "index_put_", "_unsafe_index", "_index_put_impl_"):
        indices = [index for index in args[1] if index is not None]
        fills = name.startswith(("index_put", "_index_put")) and args[2].numel() == 1
        if any(index.dtype == torch.bool for index in indices):
            return None if fills else "nonzero"
        if any(is_on_host(index) and not is_on_host(args[0]) for index in indices):
            return "index of the host's"
    return None


def _stack() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


class WaitsOfSteps(Callback):
    """Counts the waits of each step of a fit, but for its first ones.

    Args:
        allowed: see :class:`Waits`.

    Attributes:
        steps: of each batch, what has waited.
        first: the same of the first batch.
        let: of all of them, how often allowed functions have.
    """

    #: Where batches are made and moved: on the CPU of every machine, and by copies that wait for none.
    _LOADING = (
        "fetchers.py:__next__",
        "apply_func.py:move_data_to_device",
        "batches.py:count_rows",
        "sequence_layout.py:count_ends",
    )

    def __init__(self, allowed: tuple[str, ...] = ()) -> None:
        self.waits = Waits((*self._LOADING, *allowed))
        self.steps: list[list[str]] = []
        self.first: list[str] = []
        self.let: Counter[str] = Counter()
        self._batches = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        move = trainer.strategy.batch_to_device

        def moved(*args: Any, **kwargs: Any) -> Any:
            batch = move(*args, **kwargs)
            for leaf in tree_leaves(batch):
                if isinstance(leaf, Tensor):
                    leaf.__dict__.pop(_HOST, None)
            return batch

        trainer.strategy.batch_to_device = moved  # type: ignore[method-assign]
        self.waits.__enter__()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """A step runs between two such calls, with all that Lightning does around it."""
        self._batches += 1
        if self._batches == 2:
            self.first = list(self.waits.found)
        if self._batches > _WARM_UP:
            self.steps.append(list(self.waits.found))
            self.let += self.waits.let
        self.waits.clear()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.waits.__exit__(None, None, None)
        del trainer.strategy.batch_to_device
