"""Sequence parallelism: between regions, activations are sharded along the sequence, from the first block to the last.

Reducing Activation Recomputation in Large Transformer Models. Korthikanti et al., 2022, arXiv 2205.05198. Departures:
the sequence is gathered after the last block, so the final norm works on all tokens; lengths that are not divisible
by the ranks are padded. As in the paper, backward gathers a region's input again
(:mod:`dlo_plugins.parallel.tensor.overlap`), so a layer saves `34 / t` times the size of its input. Compiled regions,
and those with column projections other than a trainable `nn.Linear` (GPT-2's Conv1D, frozen weights), save the
gathered input: `4 + 30 / t`.

All ranks of the axis draw the same random numbers, so that dropout on replicated activations is equal on all of them.
On sharded activations it must differ. A seed is drawn from the common numbers and combined with the rank; afterwards
the common state is as if only the seed had been drawn. So everything follows from the common state: a resume, and a
recomputation that restores this state, draw the same numbers.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.errors import DloError
from dlo_framework.models.recompute import in_backward
from dlo_plugins.parallel.tensor.collectives import gather_sequence, scatter_sequence

#: Classes of dropout modules.
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
#: Attributes with a probability of dropout, for modules without a dropout module.
_PROBABILITIES = ("attention_dropout", "attn_dropout", "dropout", "dropout_p")
_SPREAD = 0x9E3779B97F4A7C15  # An odd number with well-mixed bits, so that ranks' seeds are far apart.


class LocalRandom:
    """Switches the default generators of the CPU and the accelerator to this rank's numbers, and back.

    Args:
        rank: This rank's number among those that share the common numbers.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._common: list[Any] | None = None
        self._owner: Any = None

    def enter(self, owner: Any, device: torch.device) -> None:
        """Switches to this rank's own numbers, unless they are on already; only the owner switches back."""
        if self._common is None and device.type != "meta":
            self._switch(owner, device)

    def leave(self, owner: Any) -> None:
        """Switches back to the common numbers, if the owner has switched."""
        if self._common is not None and self._owner is owner:
            self._switch_back()

    @torch.compiler.disable
    def _switch(self, owner: Any, device: torch.device) -> None:
        drawn = int(torch.randint(2**63 - 1, (), device="cpu"))
        seed = (drawn + (self._rank + 1) * _SPREAD) % 2**63
        self._owner, self._common = owner, [torch.get_rng_state(), device, None]
        torch.default_generator.manual_seed(seed)
        if device.type != "cpu":
            module = torch.get_device_module(device)
            self._common[2] = module.get_rng_state(device)
            module.manual_seed(seed)

    @torch.compiler.disable
    def _switch_back(self) -> None:
        assert self._common is not None
        (cpu, device, state), self._owner, self._common = self._common, None, None
        torch.set_rng_state(cpu)
        if state is not None:
            torch.get_device_module(device).set_rng_state(state, device)


class Dropouts:
    """Dropouts of a module and of all modules inside it.

    Args:
        module: Module to search.
    """

    def __init__(self, module: nn.Module) -> None:
        self._rates: list[tuple[nn.Module, str]] = []
        for part in module.modules():
            keys = [key for key in _PROBABILITIES if isinstance(getattr(part, key, None), float)]
            self._rates += [(part, key) for key in (["p", *keys] if isinstance(part, DROPOUTS) else keys)]

    @property
    def active(self) -> bool:
        """Whether any dropout draws random numbers now."""
        return any(part.training and getattr(part, key) > 0 for part, key in self._rates)


class ShardedSequence:
    """Sequence that is sharded between regions.

    All shards are padded to one length, so several full lengths can have shards of the same length. The last one seen
    is used; a recomputation in backward could belong to another.

    Args:
        communicator: Communicator of the ranks that share a sequence.
        random: This rank's random numbers, for the dropout between regions, as each rank has other tokens.
    """

    def __init__(self, communicator: Communicator, random: LocalRandom) -> None:
        self.communicator, self.random = communicator, random
        self._by_part: dict[int, int] = {}
        self._ambiguous: set[int] = set()
        self._first: list[nn.Module] = []
        self._last: list[nn.Module] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedSequence:
        return self  # A process group cannot be copied.

    def install(self, module: nn.Module, blocks: list[str]) -> None:
        """Splits the sequence before a model's first block, and gathers it after its last.

        Args:
            module: Model.
            blocks: Names of its blocks, in order.
        """
        self._begin(module.get_submodule(blocks[0]))
        self._end(module.get_submodule(blocks[-1]))
        for name in blocks:
            for part in module.get_submodule(name).modules():
                if isinstance(part, DROPOUTS):
                    part.register_forward_pre_hook(self._enter_dropout)
                    part.register_forward_hook(lambda dropout, *_: self.random.leave(dropout), always_call=True)

    def _enter_dropout(self, dropout: Any, args: Any) -> None:
        if dropout.training and dropout.p > 0:
            self.random.enter(dropout, args[0].device)

    def gather_between_stages(self, module: nn.Module, blocks: list[str], starts: Collection[str]) -> None:
        """Gathers the sequence between pipeline stages too, as a stage knows only the lengths that it has split.

        Args:
            module: Model.
            blocks: Names of its blocks, in order.
            starts: Names of the stages' first blocks, except the first stage's.
        """
        for before, name in itertools.pairwise(blocks):
            if name in starts:
                self._end(module.get_submodule(before))
                self._begin(module.get_submodule(name))

    def _begin(self, block: nn.Module) -> None:
        change_first_input(block, self.split)
        self._first.append(block)

    def _end(self, block: nn.Module) -> None:
        block.register_forward_hook(self._gather_output)
        self._last.append(block)

    def _gather_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        return (self.gather(output[0]), *output[1:]) if isinstance(output, tuple) else self.gather(output)

    def as_returned(self, hidden: Tensor, block: nn.Module) -> Tensor:
        """Returns a block's hidden state with the positions that the block returns: all, or this rank's shard.

        Args:
            hidden: Hidden state that the block gets, `[B, l, D]`.
            block: Block.
        """
        if (block in self._first) == (block in self._last):
            return hidden
        return self.split(hidden) if block in self._first else self.gather(hidden)

    def split(self, whole: Tensor) -> Tensor:
        """Returns this rank's shard `[B, l, D]` of `[B, L, D]`."""
        part = scatter_sequence(whole, self.communicator)
        length = part.shape[1]
        if self._by_part.setdefault(length, whole.shape[1]) != whole.shape[1]:
            self._ambiguous.add(length)
            self._by_part[length] = whole.shape[1]
        return part

    def gather(self, part: Tensor) -> Tensor:
        """Returns the full `[B, L, D]` from the ranks' shards."""
        return gather_sequence(part, self.length(part), self.communicator)

    def length(self, part: Tensor) -> int:
        """Returns the full length of a shard `[B, l, D]`.

        Raises:
            DloError: In a recomputation, if several full lengths have had shards of this length.
        """
        length = part.shape[1]
        if length in self._ambiguous and in_backward():
            raise DloError(
                "sequence lengths must have shards of different lengths for sequence_parallel with recomputation, got"
                f" several with shards of {length} tokens; pad them to a multiple of tp"
            )
        return self._by_part[length]


def change_first_input(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Registers a function on the first argument of a module's forward, the activations, by position or by name."""
    name = next(iter(inspect.signature(module.forward).parameters))

    def change_input(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return ((change(args[0]), *args[1:]), kwargs) if args else (args, {**kwargs, name: change(kwargs[name])})

    module.register_forward_pre_hook(change_input, with_kwargs=True)
