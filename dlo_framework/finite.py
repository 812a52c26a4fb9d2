"""Detects losses that are NaN or infinite: no rank takes such a step, and all ranks react in the same way."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from dlo_framework.distributed.control_group import control_group
from dlo_framework.errors import DloError, mark_agreed
from dlo_framework.resume import mid_accumulation
from dlo_framework.strategy_contract import contract_of


class FiniteLoss(Callback):
    """Keeps a NaN or infinite loss, on any rank, from reaching the weights; on by default, and stops the run.

    One such loss makes the mean of the ranks' gradients NaN, and the next step the weights of all. Here all ranks check
    the losses of a step's batches before they take it. On an accelerator this waits for the forward pass (in a
    pipeline: for the last stage's forward of the last micro-batch), while the device still has a backward pass to run,
    so that it is never idle; several ranks exchange one number in parallel with the gradients.

    With ``precision: 16-mixed`` the loss scaler already skips such steps, and this does nothing.

    Args:
        on_nan: Reaction: ``stop`` ends the run with an error before the step; ``skip`` skips the step (the optimizer's
            state stays unchanged too; the step counts); ``ignore`` does not check.
        max_skipped: Number of skipped steps in a row that ends the run, with ``skip``.
    """

    #: Whether its hooks need the gradients of a step; OptimizerInBackward has dropped them by then.
    needs_gradients = False

    def __init__(self, on_nan: Literal["stop", "skip", "ignore"] = "stop", max_skipped: int = 10) -> None:
        if on_nan not in ("stop", "skip", "ignore"):
            raise DloError(f"FiniteLoss: on_nan must be stop, skip or ignore, got {on_nan!r}")
        if max_skipped < 1:
            raise DloError(f"FiniteLoss: max_skipped must be at least 1, got {max_skipped}")
        self.on_nan, self.max_skipped = on_nan, max_skipped
        self.skipped = 0
        self._in_a_row = 0
        self._flag = _Flag()
        #: Whether the strategy passes on losses as they are computed, before that of the step is known.
        self._told_by_strategy = False
        self._pending: tuple[Tensor, dist.Work | None] | None = None

    def state_dict(self) -> dict[str, Any]:
        """The number of skipped steps; the verdict so far of an open accumulation window."""
        return {"skipped": self.skipped, "in_a_row": self._in_a_row, "bad": self._flag.read()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the count."""
        self.skipped, self._in_a_row = state_dict["skipped"], state_dict["in_a_row"]
        self._flag.preset = state_dict["bad"]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the counts of all ranks to the checkpoint, which otherwise holds rank 0's state of callbacks."""
        group = control_group(trainer)
        own = checkpoint.get("callbacks", {}).get(self.state_key)
        if group is not None and own is not None and mid_accumulation(trainer):
            bad = torch.tensor(int(own["bad"]))
            dist.all_reduce(bad, dist.ReduceOp.MAX, group=group)
            own["bad"] = bool(bad)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Creates the ranks' group, at the same point on all; requests early losses from the strategy."""
        control_group(trainer)
        strategy, looks = trainer.strategy, self.on_nan != "ignore" and not _has_scaler(trainer)
        self._told_by_strategy = looks and contract_of(strategy).watch_losses(self._flag.look)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Checks each batch by itself with manual optimization."""
        if not pl_module.automatic_optimization:
            self._flag.clear()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Records the loss, without waiting for it."""
        if self.on_nan == "ignore" or _has_scaler(trainer):
            return
        if not self._told_by_strategy:
            self._flag.look(loss)
        # If it is known now, the ranks agree during backward.
        if self._flag.is_known and pl_module.automatic_optimization and not mid_accumulation(trainer):
            self._pending = self._start_search(trainer)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Agrees with the other ranks, and prevents a bad step."""
        if self.on_nan == "ignore" or _has_scaler(trainer):
            return
        vote, work = self._pending or self._start_search(trainer)
        self._pending = None
        if work is not None:
            work.wait()
        if pl_module.automatic_optimization:
            self._flag.clear()
        rank = int(vote)
        if rank == trainer.world_size:
            self._in_a_row = 0
        elif self.on_nan == "stop":
            raise mark_agreed(DloError(_message(trainer, rank)))
        else:
            self._skip(trainer, pl_module, optimizer, rank)

    def _start_search(self, trainer: Trainer) -> tuple[Tensor, dist.Work | None]:
        """Starts the search for the first rank with a bad loss; its result is the number of ranks if there is none."""
        vote = torch.tensor(trainer.global_rank if self._flag.read() else trainer.world_size)
        group = control_group(trainer)
        if contract_of(trainer.strategy).delays_gradients:  # All ranks have the same loss: none waits for another.
            return (torch.zeros_like(vote) if self._flag.read() else vote), None
        work = None if group is None else dist.all_reduce(vote, dist.ReduceOp.MIN, group=group, async_op=True)
        return vote, work

    def _skip(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer, rank: int) -> None:
        # An optimizer skips parameters without a gradient: no weight decay, no change of state.
        for parameter in (p for group in optimizer.param_groups for p in group["params"]):
            parameter.grad = None
        self.skipped += 1
        self._in_a_row += 1
        rank_zero_warn(f"{_describe(trainer, rank)}: the step is skipped; {self.skipped} skipped in this run")
        if self._in_a_row >= self.max_skipped:
            raise mark_agreed(DloError(f"{_message(trainer, rank)}; {self._in_a_row} steps in a row were skipped"))
        name = _nonfinite_buffer(trainer, pl_module)
        if name:
            raise mark_agreed(
                DloError(
                    f"{_describe(trainer, rank)}, and neither is the buffer {name} now (a running statistic?), which"
                    " skipping the step does not undo; resume from the last checkpoint, and remove such inputs from the"
                    " data"
                )
            )

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Drops what was pending."""
        self._pending = None


class _Flag:
    """Whether a recorded loss is not finite, read from the device as late as possible.

    Attributes:
        preset: Verdict of an open accumulation window in the checkpoint of a resumed run.
    """

    def __init__(self) -> None:
        self.preset = False
        self._bad: Tensor | None = None  # on the loss's device
        self._copy: Tensor | None = None  # on the CPU
        self._copied: torch.Event | None = None

    @property
    def is_known(self) -> bool:
        """Whether reading it waits for no device."""
        return self._bad is None or self._bad.device.type == "cpu"

    def look(self, loss: Tensor) -> None:
        bad = ~torch.isfinite(loss.detach()).all()
        self._bad = bad if self._bad is None else self._bad | bad
        device = self._bad.device.type
        if self._copy is None:
            self._copy = torch.empty((), dtype=torch.bool, pin_memory=device == "cuda")
            self._copied = None if device == "cpu" else torch.Event(device)
        self._copy.copy_(self._bad, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def read(self) -> bool:
        if self._bad is None or self.preset:
            return self.preset
        assert self._copy is not None
        if self._copied is not None:
            self._copied.synchronize()
        return bool(self._copy)

    def clear(self) -> None:
        self._bad, self.preset = None, False


def _has_scaler(trainer: Trainer) -> bool:
    return getattr(trainer.precision_plugin, "scaler", None) is not None


def _describe(trainer: Trainer, rank: int) -> str:
    batch = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    where = f" of rank {rank}" if trainer.world_size > 1 else ""
    step, epoch = trainer.global_step + 1, trainer.current_epoch + 1  # all from 1, as in the progress bar
    return f"the loss{where} was not finite in step {step} (epoch {epoch}, batch {batch})"


def _message(trainer: Trainer, rank: int) -> str:
    strategy = trainer.strategy
    hint = contract_of(strategy).nan_hint
    return (
        f"{_describe(trainer, rank)}; the weights are those before it. Lower the learning rate, clip the gradients"
        " (trainer.gradient_clip_val), check the batch's data, or skip such steps (FiniteLoss, on_nan: skip)"
        + (f". Or: {hint}" if hint else "")
    )


def _nonfinite_buffer(trainer: Trainer, module: LightningModule) -> str:
    """Returns the name of a buffer that is not finite on any rank; empty if all are finite."""
    names = [n for n, b in module.named_buffers() if b.is_floating_point() and not bool(torch.isfinite(b).all())]
    group = control_group(trainer)
    if group is None:
        return names[0] if names else ""
    found: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(found, names[:1], group=group)
    return next((name for of_rank in found for name in of_rank), "")
