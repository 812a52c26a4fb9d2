"""Check that all ranks have the same number of batches: a rank with fewer would leave the others waiting for it."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer

from dlo_framework.callback import PluginCallback
from dlo_framework.distributed.groups import control_group
from dlo_framework.errors import DloError, mark_agreed
from dlo_framework.strategy_contract import contract_of


class EqualBatches(PluginCallback):
    """Ends a run whose ranks have different numbers of batches with an error, instead of a hang; on by default.

    dlo's own loaders give all ranks the same number. With other loaders, their lengths are compared before training,
    and before a validation under a strategy that shards parameters, whose forward pass needs all ranks. Where a
    training loader has no length, the ranks compare at each batch whether it is their last, and stop at the first
    batch that is the last on some ranks only.
    """

    def __init__(self) -> None:
        self._without_length = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compares the numbers of training batches, and in each epoch again, because loaders may have been rebuilt."""
        if control_group(trainer) is None:
            return
        known = _have_length(trainer)
        counts = _gather(trainer, (trainer.num_training_batches, known))
        self._without_length = not all(has for _, has in counts)
        _compare("training", [count for count, _ in counts], "limit_train_batches")

    on_train_epoch_start = on_train_start

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Compares the numbers of validation batches, where a forward pass needs all ranks."""
        if contract_of(trainer.strategy).forward_needs_all_ranks and control_group(trainer) is not None:
            batches: Any = trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches
            totals = [sum(counts) for counts in _gather(trainer, batches)]
            _compare("validation", totals, "limit_val_batches")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Stops, where loaders have no length, when some ranks have their last batch and others go on."""
        group = control_group(trainer) if self._without_length else None
        if group is None:
            return
        last = trainer.fit_loop.epoch_loop.batch_progress.is_last_batch
        votes = torch.tensor([int(last), int(not last)])
        dist.all_reduce(votes, dist.ReduceOp.MAX, group=group)
        if int(votes.sum()) == 2:
            ended = [rank for rank, over in enumerate(_gather(trainer, last)) if over]
            count = batch_idx + 1
            raise mark_agreed(
                DloError(
                    f"all ranks must have the same number of training batches, got {count} on {_listed(ended)} and more"
                    f" on the others; set trainer.limit_train_batches to {count} or less, or give all ranks the same"
                    " number"
                )
            )


def _compare(what: str, counts: list[float], option: str) -> None:
    """Raises a DloError on all ranks if their numbers of batches differ."""
    if len(set(counts)) == 1:
        return
    listed = ", ".join("unknown" if math.isinf(count) else str(int(count)) for count in counts)
    least = min(counts)
    raise mark_agreed(
        DloError(
            f"all ranks must have the same number of {what} batches, got {listed} on ranks 0 to {len(counts) - 1};"
            f" set trainer.{option} to {int(least)} or less, pad the data, or use a dlo datamodule"
        )
    )


def _gather(trainer: Trainer, value: Any) -> list[Any]:
    values: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(values, value, group=control_group(trainer))
    return values


def _have_length(trainer: Trainer) -> bool:
    """Returns whether all training loaders have a length.

    Lightning (2.6) keeps the loaders, from whatever nested structure, in the fit loop's private ``_combined_loader``.
    ``num_training_batches`` does not show it where ``limit_train_batches`` is more than there are.
    """
    loop: Any = trainer.fit_loop
    for loader in loop._combined_loader.flattened:
        try:
            len(loader)
        except (TypeError, NotImplementedError):
            return False
    return True


def _listed(ranks: list[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"
