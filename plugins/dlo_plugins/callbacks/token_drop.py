"""Callback that lets blocks see random tokens only: random layer token drop.

Random-LTD: Random and Layerwise Token Dropping Brings Efficient Training for Large-scale Transformers. Yao, Wu, Li,
Holmes, Rajbhandari, Zhang & He, 2022, arXiv 2211.11586. Departure: the learning rate is not scheduled by the number of
tokens that the layers have seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn

from dlo_framework.batches import chosen_tokens
from dlo_framework.errors import DloError
from dlo_framework.recompute import has_backward
from dlo_framework.task import Task
from dlo_plugins.callbacks.block_schedule import BlockSchedule
from dlo_plugins.callbacks.run_position import parse_position, run_fraction
from dlo_plugins.curricula.block_handlers import check_hidden, handle_calls, hidden_of, replace_hidden
from dlo_plugins.curricula.model_blocks import ModelBlocks
from dlo_plugins.curricula.token_draws import draw_tokens, kept_tokens, select_arguments
from dlo_plugins.strategies.mesh import MeshStrategy


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

    #: Place of the handler among those of other callbacks: inside all others.
    order = 30

    def __init__(
        self,
        start: float = 0.5,
        until: str | float = "70%",
        multiple: int = 8,
        skip: list[str] | None = None,
        seed: int = 0,
    ) -> None:
        super().__init__()
        if not 0 < start < 1:
            raise DloError(f"TokenDrop: start must be between 0 and 1, got {start}; 0.5 is the default")
        if multiple < 1:
            raise DloError(f"TokenDrop: multiple must be at least 1, got {multiple}; leave it out")
        self.start, self.multiple, self.skip, self.seed = start, multiple, list(skip or []), seed
        self.until = parse_position(until, "TokenDrop: until")
        if self.until.unit == "samples" or not self.until.value:
            raise DloError(f"TokenDrop: until must be in epochs or percent and above 0, got {until!r}; write '70%'")
        self.needs_max_epochs = self.until.unit == "epochs"
        self._until = 1.0
        self._always = 0
        self._index: dict[tuple[int, int], Tensor] = {}  # Of the current step, by block and length.

    # --- before training -----------------------------------------------------------------------------------

    def check_run(
        self, trainer: Trainer, module: LightningModule, datamodule: LightningDataModule | None = None
    ) -> None:
        """Checks the strategy, the other callbacks and the model, before processes start.

        Raises:
            DloError: If they do not go with blocks that see some tokens only.
        """
        self.check_trainer(trainer)
        if isinstance(module, Task) or next(module.parameters(), None) is not None:
            self._choose_blocks(ModelBlocks(module.on_meta() if isinstance(module, Task) else module, "TokenDrop"))
        if getattr(module, "looks_inside", False):
            raise DloError(
                f"TokenDrop: the loss must not use outputs of all blocks, got {type(module).__name__} with router"
                " logits; set output_router_logits: false"
            )

    def check_trainer(self, trainer: Trainer) -> None:
        """Checks the strategy and the other callbacks.

        Raises:
            DloError: If they do not go with blocks that see some tokens only.
        """
        super().check_trainer(trainer)
        strategy = trainer.strategy
        if isinstance(strategy, MeshStrategy):
            spec = strategy.mesh_spec()
            shards = [f"cp {spec.cp}"] if spec.cp > 1 else []
            shards += ["sequence_parallel: true"] if strategy.appliers.tensor.sequence_parallel and spec.tp > 1 else []
            if shards:
                raise DloError(
                    f"TokenDrop does not support {' and '.join(shards)}: each rank must have full sequences; use the"
                    " other axes, or leave the callback out"
                )
        self._until = run_fraction(trainer, self.until, "TokenDrop", "until")

    def _choose_blocks(self, blocks: ModelBlocks) -> list[str]:
        if len(blocks.names) < 3:
            raise DloError(
                f"TokenDrop: the model must have at least 3 blocks, as the first and the last see all tokens, got"
                f" {len(blocks.names)}; leave the callback out"
            )
        kernel = str(getattr(getattr(blocks.model, "config", None), "_attn_implementation", ""))
        if "flash" in kernel:
            raise DloError(
                f"TokenDrop: attention must not find documents by gaps of the positions, got {kernel}; set attention:"
                " sdpa or dlo_varlen"
            )
        return blocks.without([*self.skip, blocks.names[0], blocks.names[-1]], "TokenDrop")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begins to handle the blocks' calls."""
        self._remove()
        self.check_run(trainer, pl_module)
        blocks = ModelBlocks(pl_module, "TokenDrop")
        self._always = int(getattr(blocks.model, "num_prefix_tokens", 0))
        self._handles = [
            handle_calls(
                blocks.block(name), self._handler(blocks.names.index(name), name, blocks.block(name)), self.order
            )
            for name in self._choose_blocks(blocks)
        ]

    def _remove(self) -> None:
        super()._remove()
        self._index = {}

    # --- steps ---------------------------------------------------------------------------------------------

    def kept(self, length: int) -> int:
        """Returns the number of a row's tokens that the middle blocks see in the current step."""
        count = kept_tokens(self._clock.fraction, self.start, self._until, length, self.multiple)
        return min(length, max(count, self._always + 1))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begins a new step's selection, and logs."""
        if not self._clock.update(trainer):
            return
        self._index = {}
        step = trainer.global_step + 1
        if step % trainer.log_every_n_steps == 0:  # type: ignore[attr-defined]
            share = self.start + (1 - self.start) * min(1.0, self._clock.fraction / self._until)
            for logger in trainer.loggers:
                logger.log_metrics({"token_drop/kept": share}, step=step)

    def _handler(self, number: int, name: str, block: nn.Module) -> Callable[..., Any]:
        def call(inner: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            if not (has_backward() and block.training) or self._clock.fraction >= self._until:
                return inner(*args, **kwargs)
            hidden = hidden_of(args, kwargs)
            if not isinstance(hidden, Tensor) or hidden.ndim != 3:
                shape = list(hidden.shape) if isinstance(hidden, Tensor) else type(hidden).__name__
                raise DloError(
                    f"TokenDrop: a block's hidden state must be [B, N, D], got {shape} for '{name}'; leave it out by"
                    f" skip: ['{name}']"
                )
            rows, length, _ = hidden.shape
            if self.kept(length) == length:
                return inner(*args, **kwargs)
            if len(args) > 1 and any(isinstance(arg, Tensor) for arg in args[1:]):
                raise DloError(
                    f"TokenDrop: a block must get all tensors but the hidden state by name, got positional ones for"
                    f" '{name}'; leave it out by skip: ['{name}']"
                )
            index = self._draw(number, length, hidden.device)
            others = kwargs if args else {key: value for key, value in kwargs.items() if value is not hidden}
            chosen = hidden.index_select(1, index)
            more = select_arguments(others, index, length, rows, name)
            new_args, _ = replace_hidden(args, kwargs, chosen)
            if not args:
                more = {next(iter(kwargs)): chosen, **more}
            with chosen_tokens(index):
                output = inner(*new_args, **more)
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
