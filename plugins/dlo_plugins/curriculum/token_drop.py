"""Callback that lets blocks see random tokens only: random layer token drop.

Random-LTD: Random and Layerwise Token Dropping Brings Efficient Training for Large-scale Transformers. Yao, Wu, Li,
Holmes, Rajbhandari, Zhang & He, 2022, arXiv 2211.11586. Departures: draws are a hash of (seed, step, block), the same
for all rows of a step, on all ranks and after a resume; the paper draws each batch's by a generator. The learning rate
is not scheduled by the number of tokens that the layers have seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from dlo_framework.batches import chosen_tokens, rebuild
from dlo_framework.data.sampler import hash64
from dlo_framework.errors import DloError, check_number
from dlo_framework.models.hugging_face import attention_implementation
from dlo_framework.models.recompute import has_backward
from dlo_framework.progress import parse_position, run_fraction
from dlo_framework.strategy_abilities import SplitsSequences, mesh_spec
from dlo_framework.strategy_contract import contract_of
from dlo_plugins.curriculum.block_schedule import (
    BlockSchedule,
    ModelBlocks,
    check_hidden,
)
from dlo_plugins.memory.block_calls import Handler, split_hidden, with_hidden


class TokenDrop(BlockSchedule):
    """Lets each middle block see a random selection of the tokens, fewer at the start: random layer token drop.

    The other tokens pass the block unchanged, and rejoin the sequence behind it, so that each block sees another
    selection, and the head sees all tokens. The first and the last block see all. The number of tokens grows linearly
    to all of them. In a causal model, a token still attends to earlier ones only, and packed documents stay apart.

    The selection is a function of `seed`, step and block: all rows, ranks and micro-batches of a step have the same
    one, as does a resumed run, so that losses and weights are those of one process. Blocks are those of the parallel
    plan; their hidden state is `[B, N, D]`. Class and register tokens of timm's models are always seen.

    Logged every ``trainer.log_every_n_steps``: ``token_drop/kept``, the fraction of the tokens that the middle blocks
    see.

    Args:
        start: Fraction of the tokens that a middle block sees at the start.
        until: Point of the run from which all blocks see all tokens, in epochs or percent.
        multiple: Multiple to which the number of tokens is rounded up.
        skip: Patterns of blocks that see all tokens, relative to the model, besides the first and the last.
        seed: Seed of the draws.

    Raises:
        DloError: If a value is out of range, the model has fewer than three blocks, a block has another hidden state or
            unknown arguments per token, or the mesh shards sequences.
    """

    example = "{multiple: 1}"

    #: Place of the handler among those of other callbacks: inside all others.
    order = 30
    replaces_outputs = True

    def __init__(
        self,
        start: float = 0.5,
        until: str | float = "70%",
        multiple: int = 8,
        skip: list[str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        check_number("TokenDrop: start", start, "above 0 and below 1", "0.5 is the default")
        check_number("TokenDrop: multiple", multiple, "at least 1", "leave it out")
        self.start, self.multiple, self.skip, self.seed = start, multiple, list(skip or []), seed
        self.until = parse_position(until, "TokenDrop: until", in_samples=False, at_zero=False)
        self.needs_max_epochs = self.until.unit == "epochs"
        self._until = 1.0
        self._always = 0
        self._places: dict[str, int] = {}  # Of all blocks, by name.
        self._index: dict[tuple[int, int], Tensor] = {}  # Of the current step, by block and length.

    # --- before training -----------------------------------------------------------------------------------

    def check_trainer(self, trainer: Trainer) -> None:
        """Checks the strategy and the other callbacks.

        Raises:
            DloError: If they do not go with blocks that see some tokens only.
        """
        super().check_trainer(trainer)
        contract = contract_of(trainer.strategy)
        spec, split = mesh_spec(contract), contract.find_ability(SplitsSequences)
        shards = [f"cp {spec.cp}"] if spec is not None and spec.cp > 1 else []
        shards += ["sequence_parallel: true"] if split is not None and split.sequence_parallel else []
        if shards:
            raise DloError(
                f"TokenDrop does not support {' and '.join(shards)}: each rank must have full sequences; use the other"
                " axes, or leave the callback out"
            )
        self._until = run_fraction(trainer, self.until, "TokenDrop", "until")

    def choose_blocks(self, blocks: ModelBlocks) -> list[str]:
        """Returns the names of the middle blocks."""
        if len(blocks.names) < 3:
            raise DloError(
                f"TokenDrop: the model must have at least 3 blocks, as the first and the last see all tokens, got"
                f" {len(blocks.names)}; leave the callback out"
            )
        kernel = attention_implementation(blocks.model)
        if kernel is not None and "flash" in kernel:
            raise DloError(
                f"TokenDrop: attention must not find documents by gaps of the positions, got {kernel}; set attention:"
                " sdpa or dlo_varlen"
            )
        self._places = {name: place for place, name in enumerate(blocks.names)}
        return blocks.without([*self.skip, blocks.names[0], blocks.names[-1]])

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins to handle the blocks' calls."""
        self.check_run(trainer, pl_module)
        blocks = self.handle_blocks(pl_module)
        self._always = int(getattr(blocks.model, "num_prefix_tokens", 0))

    def _remove(self) -> None:
        super()._remove()
        self._index = {}

    # --- steps ---------------------------------------------------------------------------------------------

    def kept(self, length: int) -> int:
        """Returns the number of a row's tokens that the middle blocks see in the current step."""
        count = kept_tokens(self._clock.fraction, self.start, self._until, length, self.multiple)
        return min(length, max(count, self._always + 1))

    def begin_step(self) -> dict[str, float]:
        """Begins a new step's selection, and returns the fraction of the tokens that is seen."""
        self._index = {}
        return {"token_drop/kept": self.start + (1 - self.start) * min(1.0, self._clock.fraction / self._until)}

    def handler(self, number: int, name: str, block: nn.Module) -> Handler:
        """Returns a handler that calls the block with a selection of the tokens."""

        def call(inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not (has_backward() and block.training) or self._clock.fraction >= self._until:
                return inner(*args, **kwargs)
            hidden, (rest, others) = split_hidden(args, kwargs)
            if not isinstance(hidden, Tensor) or hidden.ndim != 3:
                shape = list(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
                raise DloError(
                    f"TokenDrop: a block's hidden state must be [B, N, D], got {shape} for '{name}'; leave it out by"
                    f" skip: ['{name}']"
                )
            rows, length, _ = hidden.shape
            if self.kept(length) == length:
                return inner(*args, **kwargs)
            if any(isinstance(arg, Tensor) for arg in rest):
                raise DloError(
                    f"TokenDrop: a block must get all tensors but the hidden state by name, got positional ones for"
                    f" '{name}'; leave it out by skip: ['{name}']"
                )
            index = self._draw(self._places[name], length, hidden.device)
            chosen = hidden.index_select(1, index)
            more = select_arguments(others, index, length, rows, name)
            new_args, new_kwargs = with_hidden(args, more if args else {next(iter(kwargs)): chosen, **more}, chosen)
            with chosen_tokens(index):
                output = inner(*new_args, **new_kwargs)
            _, changed = check_hidden(chosen, output, name, "TokenDrop")
            return hidden.index_copy(1, index, changed.to(hidden.dtype))

        return call

    def _draw(self, number: int, length: int, device: torch.device) -> Tensor:
        """Returns the positions of the tokens that a block sees in the current step, int64 `[K]`."""
        key = number, length
        if key not in self._index:
            step = max(0, self._clock.step)
            drawn = draw_tokens(length, self.kept(length), self._always, step, number, self.seed)
            self._index[key] = torch.from_numpy(drawn).to(device, non_blocking=True)
        return self._index[key]


_STREAM = 0x5444  # of the draws, among other hashes of the same seed
#: Dims of the tokens in arguments of blocks besides the hidden state, counted from the end.
_DIMS = {
    "position_ids": (-1,),
    "attention_mask": (-1, -2),
    "position_embeddings": (-2,),
    "cache_position": (-1,),
    "seq_idx": (-1,),
}
#: Bounds of the documents of all rows, which the selection moves.
_BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k")


def kept_tokens(fraction: float, start: float, until: float, length: int, multiple: int) -> int:
    """Returns the number of tokens that a block sees.

    Args:
        fraction: Fraction of training, 0 to 1.
        start: Fraction of the tokens at the start, from which it grows linearly to 1.
        until: Fraction of training at which all tokens are seen.
        length: Number of tokens of a row.
        multiple: Multiple to which the number is rounded up.
    """
    share = start + (1 - start) * min(1.0, fraction / until)
    count = -(-int(np.ceil(share * length - 1e-9)) // multiple) * multiple
    return min(length, count)


def draw_tokens(length: int, count: int, always: int, step: int, block: int, seed: int) -> np.ndarray:
    """Returns the positions of the tokens that a block sees in a step, ascending, int64 `[count]`.

    Args:
        length: Number of tokens of a row.
        count: Number of tokens to choose.
        always: Number of tokens at the start of a row that are always chosen, such as class tokens.
        step: Number of optimizer steps before this one.
        block: Number of the block.
        seed: Seed of the draws.
    """
    order = np.argsort(hash64(np.arange(always, length), seed, step, block, _STREAM), kind="stable") + always
    return np.sort(np.concatenate([np.arange(always), order[: max(0, count - always)]]))


def select_arguments(kwargs: Mapping[str, Any], index: Tensor, length: int, rows: int, name: str) -> dict[str, Any]:
    """Returns a block's arguments by name for the chosen tokens.

    Args:
        kwargs: Arguments besides the hidden state.
        index: Positions of the tokens, int64 `[K]`.
        length: Number of tokens of a row.
        rows: Number of rows.
        name: Name of the block, for the message.

    Raises:
        DloError: If an argument has a dim of the tokens, and it is not known which.
    """
    selected = dict(kwargs)
    for key, value in kwargs.items():
        if key in _BOUNDS and isinstance(value, Tensor):
            kept = torch.zeros(length, dtype=torch.int32, device=value.device)
            kept[index] = 1
            before = torch.cat([kept.new_zeros(1), kept.repeat(rows).cumsum(0, dtype=torch.int32)])
            selected[key] = before[value.long()]
        elif isinstance(value, tuple):
            selected[key] = rebuild(value, [_select(key, part, index, length, name) for part in value])
        else:
            selected[key] = _select(key, value, index, length, name)
    return selected


def _select(key: str, value: Any, index: Tensor, length: int, name: str) -> Any:
    if value is None or isinstance(value, int | float | bool | str):
        return value
    if not isinstance(value, Tensor):
        if key == "past_key_values":
            return value
        raise DloError(
            f"TokenDrop: arguments of a block must be tensors, got {type(value).__name__} for '{key}' of '{name}';"
            f" leave the block out by skip: ['{name}']"
        )
    if value.ndim == 0 or value.numel() == 0:  # An empty mask says that there is none.
        return value
    dims = _DIMS.get(key)
    if dims is None:
        if length in value.shape:
            raise DloError(
                f"TokenDrop: it must be known which dim of a block's argument is that of the tokens, got '{key}' of"
                f" shape {list(value.shape)} for '{name}'; leave the block out by skip: ['{name}']"
            )
        return value
    if key == "attention_mask" and value.ndim == 2:
        dims = dims[:1]  # The other dim is that of the rows.
    for dim in dims:
        if value.ndim >= -dim and value.shape[dim] == length:
            value = value.index_select(dim, index)
    return value
