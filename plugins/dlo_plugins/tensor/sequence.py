"""Sequence parallelism: between regions each rank has a part of the tokens, from the first block to the last.

Reducing Activation Recomputation in Large Transformer Models. Korthikanti et al., 2022, arXiv 2205.05198. Departures:
the stream is whole again after the last block, so the final norm works on all tokens; lengths that the ranks do not
divide are padded; what a region has gathered is kept for the weights' gradients, where the paper gathers it a second
time (of its `34 / t` times the size of the activations that a layer keeps, `4 + 30 / t` are left to gain).
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.errors import DloError
from dlo_plugins.tensor.collectives import gather_out, split_in
from dlo_plugins.tensor.local_random import LocalRandom


class Sequence:
    """The sequence whose parts pass between regions.

    Parts are all padded to one length, so a part's length leaves a few lengths of the whole possible. The last one
    seen holds; a recomputation in backward might belong to another.

    Args:
        communicator: the ranks that share a sequence.
        random: this rank's numbers: for the dropout between regions too, as each rank has other tokens.
    """

    def __init__(self, communicator: Communicator, random: LocalRandom) -> None:
        self.communicator, self.random = communicator, random
        self._by_part: dict[int, int] = {}
        self._ambiguous: set[int] = set()

    def __deepcopy__(self, memo: dict[int, Any]) -> Sequence:
        return self  # A process group cannot be copied.

    def install(self, module: nn.Module, blocks: list[str]) -> None:
        """Splits the sequence before a model's first block, and puts it together after its last.

        Args:
            module: the model.
            blocks: names of its blocks, in order.
        """
        change_first_input(module.get_submodule(blocks[0]), self.split)
        module.get_submodule(blocks[-1]).register_forward_hook(functools.partial(_gather, self))
        for name in blocks:
            for part in module.get_submodule(name).modules():
                if isinstance(part, nn.modules.dropout._DropoutNd):
                    part.register_forward_pre_hook(functools.partial(_enter_dropout, self))
                    part.register_forward_hook(functools.partial(_leave_dropout, self), always_call=True)

    def part_stages(self, module: nn.Module, blocks: list[str], starts: Collection[str]) -> None:
        """Makes the sequence whole between stages too: a stage knows no lengths but those it has split itself.

        Args:
            module: the model.
            blocks: names of its blocks, in order.
            starts: names of the stages' first blocks, but for the first stage's.
        """
        for before, name in itertools.pairwise(blocks):
            if name in starts:
                module.get_submodule(before).register_forward_hook(functools.partial(_gather, self))
                change_first_input(module.get_submodule(name), self.split)

    def split(self, whole: Tensor) -> Tensor:
        """Returns this rank's part `[B, l, D]` of `[B, L, D]`."""
        part = split_in(whole, self.communicator)
        length = part.shape[1]
        if self._by_part.setdefault(length, whole.shape[1]) != whole.shape[1]:
            self._ambiguous.add(length)
            self._by_part[length] = whole.shape[1]
        return part

    def gather(self, part: Tensor) -> Tensor:
        """Returns `[B, L, D]` of the ranks' parts."""
        return gather_out(part, self.length(part), self.communicator)

    def length(self, part: Tensor) -> int:
        """Returns the length of the whole that a part `[B, l, D]` is of.

        Raises:
            DloError: in a recomputation, if several lengths have had parts of that length.
        """
        length = part.shape[1]
        if length in self._ambiguous and torch._C._current_graph_task_id() != -1:
            raise DloError(
                "sequence_parallel with recomputation tells sequences by their length, and has seen several whose"
                f" parts have {length} tokens each; pad them to a multiple of tp"
            )
        return self._by_part[length]


def change_first_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Changes the first argument of a module's forward, given by position or by name: the activations."""
    name = next(iter(inspect.signature(module.forward).parameters))
    module.register_forward_pre_hook(functools.partial(_change, name, change), with_kwargs=True)


def _change(
    name: str, change: Callable[[Tensor], Tensor], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return ((change(args[0]), *args[1:]), kwargs) if args else (args, {**kwargs, name: change(kwargs[name])})


def _gather(sequence: Sequence, module: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (sequence.gather(output[0]), *output[1:])
    return sequence.gather(output)


def _enter_dropout(sequence: Sequence, module: nn.Module, args: Any) -> None:
    dropout: Any = module
    if dropout.training and dropout.p > 0:
        sequence.random.enter(module, args[0].device)


def _leave_dropout(sequence: Sequence, module: nn.Module, args: Any, output: Any) -> None:
    sequence.random.leave(module)
