"""Forward of a single stage: the model's own forward, with placeholders for the modules of other stages.

The forward starts at its beginning on every stage, with the micro-batch's own arguments. So every stage has what the
model computes from them (masks, angles, positions), and only the hidden state is sent. While it runs:

- a module of the stem, and a block of an earlier stage, is not called; it returns a placeholder of its output's shape;
- the stage's first block is called with the received hidden state as its first argument;
- a module of the head is not called: it would need weights of the last stage;
- the forward ends where the next stage's first block would be called: that block's first argument is sent.

So the code between two blocks runs in the stage of the earlier block. Arguments of blocks that the plan names as
carried, such as an encoder's output in a decoder, are sent with the hidden state, in one tensor, and take the place of
their placeholders in all blocks of the stage; their gradients come back the same way.

If the forward uses anything else from earlier stages (for example in a skip connection around a block), it would use a
placeholder, which is an error: nothing may be computed from placeholders after the hidden state has been received. What
is computed from a placeholder is one too. The loss has placeholders in place of the weights of other stages. Operations
on other tensors are not watched, so that the check costs nothing, and runs always.

Code outside of stem and blocks runs on several stages, and draws the same random numbers on all of them: a block, and
a module of the stem, draws from a stream of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dlo_framework.batches import tree_iter, tree_map_only
from dlo_framework.errors import DloError
from dlo_framework.random_streams import random_stream
from dlo_plugins.parallel.pipeline.model_stages import Stages

#: Attributes of every module.
_OF_TORCH = frozenset(vars(nn.Module()))
#: Operations that use only a tensor's shape, dtype and device.
_SHAPE_ONLY = ("_like", "new_empty", "new_full", "new_ones", "new_zeros", "new_empty_strided")


class SkipCheck:
    """State of one forward of a stage, which its placeholders share.

    Args:
        model: Model that runs.
        fix: Advice of the messages, beside pp=1.

    Attributes:
        place: Place in the forward in words, for messages.
        is_received: Whether the hidden state has been received, so that placeholders must not be used.
    """

    def __init__(self, model: nn.Module, fix: str = "keep both in one stage (split)") -> None:
        self.model, self.fix, self.place, self.is_received = model, fix, "before the blocks", False

    def check_values(self, values: Any, what: str) -> None:
        """Checks that values hold no placeholder.

        Args:
            values: Tensors, or lists, tuples, dicts and dataclasses of them.
            what: Values in words, for the message.

        Raises:
            DloError: One of them is a placeholder.
        """
        for tensor in tensors_in(values):
            if isinstance(tensor, Placeholder):
                raise self.error(f"{what} computed from '{tensor.source}'")

    def error(self, what: str) -> DloError:
        """Returns the error for a use of another stage's value, in words."""
        return DloError(
            f"a pipeline stage must use nothing of other stages but the hidden state, got {what}, which is in another"
            f" stage; {self.fix}, or train with pp=1"
        )


class Placeholder(Tensor):
    """Tensor of another stage, of which this stage has the shape and the dtype, and no value: it is NaN or zero.

    Args:
        value: Tensor of its shape, dtype and device.
        source: Name of the module or parameter that it depends on.
        check: State of the forward.

    Attributes:
        received: Value that this stage has received in its place; None for none.
    """

    value: Tensor
    source: str
    check: SkipCheck
    received: Tensor | None
    _is_param: bool
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def of_weight(cls, weight: Tensor, source: str, check: SkipCheck, device: torch.device) -> Placeholder:
        """Returns a placeholder of a parameter or buffer, without memory, for a check of which each use fails."""
        made = cls(torch.zeros((), dtype=weight.dtype, device=device).expand(weight.shape), source, check)
        made._is_param = isinstance(weight, nn.Parameter)  # What `isinstance(made, nn.Parameter)` asks.
        made.requires_grad_(weight.requires_grad)
        return made

    @staticmethod
    def __new__(cls, value: Tensor, source: str, check: SkipCheck) -> Placeholder:
        """Returns a tensor without memory of its own."""
        made: Any = Tensor._make_wrapper_subclass(
            cls, value.shape, strides=value.stride(), dtype=value.dtype, device=value.device, layout=value.layout
        )
        made.value, made.source, made.check, made.received = value, source, check, None
        return made

    def __deepcopy__(self, memo: Any) -> Placeholder:
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Computes an operation on placeholders, whose results are placeholders.

        Raises:
            DloError: The hidden state has been received, or the result would be used outside of this check.
        """
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        tensors = [leaf for leaf in tree_iter((args, kwargs)) if isinstance(leaf, Tensor)]
        used = {id(tensor.value): tensor for tensor in tensors if isinstance(tensor, Placeholder)}
        first = next(iter(used.values()))
        check, by_shape = first.check, name.endswith(_SHAPE_ONLY)
        if not by_shape and check.is_received:
            raise check.error(f"'{name}' {check.place} on a value computed from '{first.source}'")
        if torch.Tag.data_dependent_output in func.tags:
            raise check.error(f"a Python number computed from '{first.source}'")
        if torch.Tag.dynamic_output_shape in func.tags and _shape_needs_values(name, args):
            raise check.error(f"a shape computed from values of '{first.source}' by '{name}'")
        values = tree_map_only(Placeholder, lambda tensor: tensor.value, (args, kwargs))
        out = func(*values[0], **values[1])
        if by_shape:
            return out
        others = {id(tensor) for tensor in tensors}

        def wrapped(tensor: Tensor) -> Tensor:
            if id(tensor) not in others:
                return used[id(tensor)] if id(tensor) in used else cls(tensor, first.source, check)
            buffer = next((key for key, buffer in check.model.named_buffers() if buffer is tensor), None)
            if buffer is not None:
                raise check.error(f"buffer '{buffer}' computed from '{first.source}'")
            return tensor  # It has been written to, and now holds NaN.

        return tree_map_only(Tensor, wrapped, out)


def _own(module: nn.Module) -> dict[str, Any]:
    """Returns the attributes of a module that torch has not set."""
    return {key: value for key, value in vars(module).items() if key not in _OF_TORCH}


def _held(place: list[Any] | dict[Any, Any]) -> list[Any]:
    return list(place.values() if isinstance(place, dict) else place)


def _shape_needs_values(name: str, args: tuple[Any, ...]) -> bool:
    """Returns whether the shape of an operation's result depends on placeholders' values."""
    deciding = tree_iter(args[1:] if name in ("index", "masked_select") else args)
    placeholders = [leaf for leaf in deciding if isinstance(leaf, Placeholder)]
    return any(name != "index" or leaf.dtype in (torch.bool, torch.uint8) for leaf in placeholders)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in nested lists, tuples, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from tensors_in(list(vars(value).values()))


@dataclass(frozen=True)
class TensorShape:
    """Shape and dtype of a tensor."""

    size: tuple[int, ...]
    dtype: torch.dtype

    def placeholder(self, device: torch.device, source: str, check: SkipCheck, dense: bool) -> Tensor:
        """Returns a placeholder; unless `dense`, it has the memory of one element, which must not be written to."""
        value = float("nan") if self.dtype.is_floating_point or self.dtype.is_complex else 0
        size = self.size if dense else ()
        full = torch.full(size, value, dtype=self.dtype, device=device).expand(self.size)
        return Placeholder(full, source, check)


#: Outputs of the modules of earlier stages in one forward, for micro-batches of one shape: of each call, by module,
#: with a :class:`TensorShape` for each tensor.
StageShapes = dict[str, list[Any]]


class _Identity(torch.autograd.Function):
    """View of a received hidden state that is not a leaf of autograd's graph, so that a block may write to it."""

    @staticmethod
    def forward(ctx: Any, received: Tensor) -> Tensor:
        return received.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class _StageEnd(Exception):
    """Ends a stage's forward at the first block of the next stage."""

    def __init__(self, hidden: Any) -> None:
        super().__init__()
        self.hidden = hidden


class StageForward:
    """One forward of a stage.

    Args:
        model: Full model.
        stages: Stages of the model.
        stage: Number of the stage that runs.
        device: Device of the stage.
        received: Hidden state from the previous stage; None in the first.
        shapes: Shapes that the modules of earlier stages return.
        record: Whether to record the shapes that this stage's modules return.
        seed: Seed of the streams of random numbers of stem and blocks; None for no streams of their own.

    Attributes:
        check: Check for uses of placeholders.
    """

    def __init__(
        self,
        model: nn.Module,
        stages: Stages,
        stage: int,
        device: torch.device,
        received: Tensor | None,
        shapes: StageShapes,
        record: bool,
        seed: int | None = None,
    ) -> None:
        self.model, self.stages, self.stage, self.device = model, stages, stage, device
        self.received, self.shapes, self.record, self.seed = received, shapes, record, seed
        self.check, self.has_ended = SkipCheck(model), False
        self._builds_graph = torch.is_grad_enabled()
        self.entered = -1  # Number of the block that was called last.
        #: Shapes that the modules of this stage and of earlier ones return; complete if `record` is set.
        self.known = {name: list(calls) for name, calls in shapes.items()}

    def run(self, forward: Callable[[], Any]) -> Any:
        """Returns the hidden state for the next stage; in the last stage, the output of `forward`.

        Raises:
            DloError: If the forward does not call each block once and in order.
        """
        last = self.stage + 1 == self.stages.count
        with self._gates():
            try:
                outputs = forward()
            except _StageEnd as end:
                return end.hidden
            except RuntimeError as error:
                if not re.search(r"\bmeta\b", str(error)):
                    raise
                line = str(error).splitlines()[0]
                raise self.check.error(f"an operation {self.check.place} on a weight ({line})") from error
            finally:
                self.has_ended = True
        wanted = self.stages.first[self.stage + 1] - last
        if self.entered < wanted:
            raise DloError(
                "a forward must call each block once in a pipeline, got one that ended without"
                f" '{self.stages.blocks[self.entered + 1]}'; turn off what skips blocks, or train with pp=1"
            )
        return outputs

    @contextlib.contextmanager
    def _gates(self) -> Iterator[None]:
        """Replaces modules by gates inside the block, and restores them after it."""
        undo: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for name, make in self._plan():
                parent, _, leaf = name.rpartition(".")
                module = self.model.get_submodule(parent)
                place: dict[str, Any] = module._modules if leaf in module._modules else module._parameters
                undo.append((place, leaf, place[leaf]))
                place[leaf] = make(name, place[leaf])
            yield
        finally:
            for place, leaf, value in reversed(undo):
                place[leaf] = value

    def _plan(self) -> Iterator[tuple[str, Callable[[str, Any], Any]]]:
        first, end = self.stages.first[self.stage], self.stages.first[self.stage + 1]
        units = self.stages.stem_units.items()
        yield from ((name, self._absent_tensor) for name, of in self.stages.stem_tensors.items() if of < self.stage)
        yield from ((name, self._placeholder) for name, of in units if of < self.stage)
        yield from ((name, self._placeholder) for name in self.stages.blocks[:first])
        if self.record or self.seed is not None:
            yield from ((name, self._recorded) for name, of in units if of == self.stage)
        yield from ((name, self._block) for name in self.stages.blocks[first:end])
        yield from ((name, self._exit) for name in self.stages.blocks[end:])
        yield from ((name, self._head) for name in self.stages.absent_heads[self.stage])

    def _absent_tensor(self, name: str, parameter: Tensor) -> Tensor:
        return TensorShape(tuple(parameter.shape), parameter.dtype).placeholder(self.device, name, self.check, False)

    def _placeholder(self, name: str, module: nn.Module) -> nn.Module:
        is_block = name in self.stages.blocks
        calls = iter(self.shapes.get(name, []))

        def placeholder(*args: Any, **kwargs: Any) -> Any:
            try:
                shapes = next(calls)
            except StopIteration:
                raise DloError(self._extra_call_message(name, is_block)) from None
            if is_block:
                self._enter(name)
            return _mapped(shapes, TensorShape, lambda shape: shape.placeholder(self.device, name, self.check, True))

        return _Gate(module, placeholder, lambda leaf, tensor: self._absent_tensor(f"{name}.{leaf}", tensor))

    def _extra_call_message(self, name: str, is_block: bool) -> str:
        """Returns the message for a module of an earlier stage that is called more often than in that stage."""
        if is_block or self.entered < 0:
            return (
                "a forward must call each module equally often for micro-batches of one shape, got one that calls"
                f" '{name}' more often; remove what depends on values, or train with pp=1"
            )
        return (
            f"a pipeline's stem must run before the first block, got a forward that calls '{name}' after"
            f" '{self.stages.blocks[self.entered]}'; name it in the plan's head, or among its blocks if it runs between"
            " two of them (Task.parallel_plan)"
        )

    def _recorded(self, name: str, module: nn.Module) -> nn.Module:
        def recorded(*args: Any, **kwargs: Any) -> Any:
            with self._stream(name):
                return self._record_shape(name, module(*args, **kwargs))

        return _Gate(module, recorded)

    def _stream(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which a module of the stem, or a block, draws its own random numbers."""
        if self.seed is None:
            return contextlib.nullcontext()
        names = (*self.stages.stem_units, *self.stages.blocks)
        return random_stream(hash((self.seed, names.index(name))), self.device)

    def _block(self, name: str, module: nn.Module) -> nn.Module:
        is_first = self.received is not None and self.stages.blocks.index(name) == self.stages.first[self.stage]

        def block(*args: Any, **kwargs: Any) -> Any:
            if not self.has_ended:  # A recomputation in backward calls it again.
                self._enter(name)
            if is_first:
                sent = self._sent(module, args, kwargs)
                hidden, *carried = self._unpacked(self._hidden(name), sent)
                for placeholder, value in zip(sent[1:], carried, strict=True):
                    placeholder.received = value
                args, kwargs = ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): hidden})
                self.check.is_received = True
            if self.check.is_received:
                args, kwargs = _filled((args, kwargs))
                self.check.check_values((args, kwargs), f"'{name}' with an argument")
            with self._stream(name), self._leaves_nothing(name, module):
                return self._record_shape(name, module(*args, **kwargs))

        return _Gate(module, block)

    @contextlib.contextmanager
    def _leaves_nothing(self, name: str, module: nn.Module) -> Iterator[None]:
        """Checks that a block leaves nothing in the memory of others that a later stage would miss.

        It looks where hooks on the block and blocks that share an object can reach, in the first forward of a shape.

        Raises:
            DloError: There is a new tensor with a graph, or a number in what blocks share.
        """
        if not self.record or self.has_ended or not self._builds_graph or self.stage + 1 == self.stages.count:
            yield
            return
        before = [(place, is_of_blocks, _held(place)) for place, is_of_blocks in self._places(module)]
        yield
        for place, is_of_blocks, old in before:
            now = _held(place)
            for value in (new for number, new in enumerate(now) if number >= len(old) or new is not old[number]):
                has_graph = any(tensor.grad_fn is not None for tensor in tensors_in(value))
                if has_graph or (is_of_blocks and isinstance(value, int | float)):
                    what = "a tensor" if has_graph else "a number"
                    raise self.check.error(
                        f"{what} that '{name}' leaves outside of itself, as for a loss or a later block"
                    )

    def _places(self, module: nn.Module) -> Iterator[tuple[Any, bool]]:
        """Yields what holds values that a block may write and other stages read, and whether blocks share it."""
        of_blocks: dict[int, tuple[Any, set[str]]] = {}
        for block in self.stages.blocks:
            for value in (v for part in self.model.get_submodule(block).modules() for v in _own(part).values()):
                if isinstance(value, list | dict):
                    of_blocks.setdefault(id(value), (value, set()))[1].add(block)
        yield from ((value, True) for value, users in of_blocks.values() if len(users) > 1)
        for part in module.modules():
            for hook in (*part._forward_pre_hooks.values(), *part._forward_hooks.values()):
                cells = (cell.cell_contents for cell in getattr(hook, "__closure__", None) or ())
                for reached in (getattr(hook, "__self__", None), *cells):
                    if isinstance(reached, list | dict):
                        yield reached, False
                    elif isinstance(reached, nn.Module) and reached is not part:
                        own = _own(reached)
                        yield own, False
                        yield from ((value, False) for value in own.values() if isinstance(value, list | dict))

    def _head(self, name: str, module: nn.Module) -> nn.Module:
        def head(*args: Any, **kwargs: Any) -> Any:
            raise DloError(
                f"a pipeline's head must run after the last block, got a forward of {type(self.model).__name__} that"
                f" calls '{name}' before '{self.stages.blocks[-1]}'; name it among the plan's blocks or stem"
                " (Task.parallel_plan), or set pp to 1"
            )

        return _Gate(module, head)

    def _hidden(self, name: str) -> Any:
        received: Any = self.received
        if not received.requires_grad:
            return received
        if self._builds_graph and not torch.is_grad_enabled():
            raise DloError(
                f"a stage's first block must run with gradients in training, got '{name}' without, as in torch's"
                " checkpoint(use_reentrant=True); use use_reentrant=False, or the applier ActivationCheckpoint"
            )
        return _Identity.apply(received)

    def _sent(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Returns the tensors of the message to a stage, of its first block's arguments; the hidden state is first."""
        first = next(iter((*args, *kwargs.values())), None)
        if not self.stages.carried:
            return [first]
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        given = {**dict(zip(names, args, strict=False)), **kwargs}
        values = [given.get(name) for name in self.stages.carried]
        # No block changes those of whole numbers, such as positions.
        return [first, *(value for value in values if isinstance(value, Tensor) and value.is_floating_point())]

    @staticmethod
    def _unpacked(received: Tensor, sent: list[Tensor]) -> list[Tensor]:
        """Returns the tensors of one message, in the shapes of those that were sent."""
        if len(sent) == 1:
            return [received]
        tensors, end = [], 0
        for tensor in sent:
            begin, end = end, end + tensor.numel()
            tensors.append(received[begin:end].view(tensor.shape).to(tensor.dtype))
        return tensors

    def _exit(self, name: str, module: nn.Module) -> nn.Module:
        def leave(*args: Any, **kwargs: Any) -> Any:
            self._enter(name)
            args, kwargs = _filled((args, kwargs))
            hidden, *carried = self._sent(module, args, kwargs)
            if not isinstance(hidden, Tensor):
                raise DloError(
                    f"the first argument of a stage's first block must be a tensor, got {type(hidden).__name__} for"
                    f" '{name}'; pass the hidden state first, or train with pp=1"
                )
            raise _StageEnd(torch.cat([part.flatten() for part in (hidden, *carried)]) if carried else hidden)

        return _Gate(module, leave)

    def _enter(self, name: str) -> None:
        """Records and checks that a block is called."""
        number = self.stages.blocks.index(name)
        if number != self.entered + 1:
            expected = self.stages.blocks[min(self.entered + 1, len(self.stages.blocks) - 1)]
            raise DloError(
                f"a forward must call each block once and in the plan's order in a pipeline, got '{name}' in place of"
                f" '{expected}'; turn off what skips or repeats blocks, or train with pp=1"
            )
        self.entered = number
        self.check.place = f"after '{name}'"

    def _record_shape(self, name: str, returned: Any) -> Any:
        """Returns what a module has returned, whose shapes it records if they are wanted."""
        if self.record and not self.has_ended:
            shape = _mapped(returned, Tensor, lambda tensor: TensorShape(tuple(tensor.shape), tensor.dtype))
            self.known.setdefault(name, []).append(shape)
        return returned


def _filled(arguments: Any) -> Any:
    """Returns arguments with the received values in place of their placeholders."""
    return tree_map_only(Placeholder, lambda made: made if made.received is None else made.received, arguments)


class _Gate(nn.Module):
    """Module that replaces another one: it has the other's attributes, and a call of its own.

    Args:
        module: Module that it replaces.
        call: Function that it calls.
        absent: Returns a placeholder of a parameter or buffer that this stage does not have, by its name.
    """

    def __init__(
        self, module: nn.Module, call: Callable[..., Any], absent: Callable[[str, Tensor], Tensor] | None = None
    ) -> None:
        super().__init__()
        self.module = module
        self._call = call
        self._absent = absent

    def __getattr__(self, name: str) -> Any:
        modules = self.__dict__["_modules"]
        if name in modules:
            return modules[name]
        value, absent = getattr(modules["module"], name), self.__dict__["_absent"]
        if absent is not None and isinstance(value, Tensor) and value.is_meta:  # As in `places.weight[:n]`.
            return absent(name, value)
        return value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)


def _mapped(value: Any, kind: type, change: Callable[[Any], Any]) -> Any:
    """Returns a value with each item of a class changed, inside lists, tuples and dicts too.

    Strings, numbers and booleans are kept; anything else becomes None.
    """
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, list | tuple):
        items = [_mapped(item, kind, change) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {key: _mapped(item, kind, change) for key, item in value.items()}
    return value if isinstance(value, str | int | float | bool) else None
