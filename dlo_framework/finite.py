"""Detects losses that are NaN or infinite: no rank takes such a step, and all ranks react in the same way."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer

from dlo_framework.callback import PluginCallback, drops_gradients
from dlo_framework.distributed.groups import control_group
from dlo_framework.distributed.step_primitives import agreed_gradient_norm, loss_scaler, skip_step
from dlo_framework.errors import DloError, check_choice, check_number, mark_agreed
from dlo_framework.run.resume import mid_accumulation
from dlo_framework.strategy_abilities import DelayedGradients, ExplainsNaN, Pipelined
from dlo_framework.strategy_contract import contract_of


class FiniteLoss(PluginCallback):
    """Keeps a NaN or infinite loss or gradient, on any rank, from reaching the weights; on by default, stops the run.

    One such loss makes the mean of the ranks' gradients NaN, and the next step the weights of all. Here all ranks check
    the losses of a step's batches, and the norm of its gradient, before they take it. On an accelerator the loss waits
    for the forward pass (in a pipeline: for the last stage's forward of the last micro-batch), while the device still
    has a backward pass to run, so that it is never idle. The norm is known only after that backward, so that ``stop``
    looks at it in the next step and before each checkpoint: the run ends one step late, with its checkpoints intact.
    ``skip`` waits for it. Of a pipeline that delays gradients, and of OptimizerInBackward, only losses are checked.

    With ``precision: 16-mixed`` the loss scaler already skips such steps, and this does nothing.

    Args:
        on_nan: Reaction: ``stop`` ends the run with an error before the step; ``skip`` skips the step (the optimizer's
            state stays unchanged too; the step counts); ``ignore`` does not check.
        max_skipped: Number of skipped steps in a row that ends the run, with ``skip``.
    """

    #: Whether its hooks need the gradients of a step; OptimizerInBackward has dropped them by then.
    needs_gradients = False

    def __init__(self, on_nan: Literal["stop", "skip", "ignore"] = "stop", max_skipped: int = 10) -> None:
        check_choice("FiniteLoss: on_nan", on_nan, ("stop", "skip", "ignore"))
        check_number("FiniteLoss: max_skipped", max_skipped, "at least 1")
        self.on_nan, self.max_skipped = on_nan, max_skipped
        if on_nan == "skip":
            self.needs_full_step = (
                "on_nan of FiniteLoss must be stop or ignore, got skip, which would come after the step"
            )
        self.skipped = 0
        self._in_a_row = 0
        self._flag = _Flag()
        self._gradient = _Flag()  # of the last step, on an accelerator where nothing has read it yet
        self._looks = False
        self._has_gradients = False  # whether the gradients in memory before a step are those that it applies
        #: Whether the strategy passes on losses as they are computed, before that of the step is known.
        self._told_by_strategy = False

    def state_dict(self) -> dict[str, Any]:
        """The number of skipped steps; the verdict so far of an open accumulation window."""
        return {"skipped": self.skipped, "in_a_row": self._in_a_row, "bad": self._flag.read()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the count."""
        self.skipped, self._in_a_row = state_dict["skipped"], state_dict["in_a_row"]
        self._flag.preset = state_dict["bad"]

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the counts of all ranks to the checkpoint, which otherwise holds rank 0's state of callbacks.

        Raises:
            DloError: The last step's gradient was not finite.
        """
        if self._gradient.read():
            raise mark_agreed(DloError(_message(trainer, _Problem.TAKEN)))
        group = control_group(trainer)
        own = checkpoint.get("callbacks", {}).get(self.state_key)
        if group is not None and own is not None and mid_accumulation(trainer):
            bad = torch.tensor(int(own["bad"]))
            dist.all_reduce(bad, dist.ReduceOp.MAX, group=group)
            own["bad"] = bool(bad)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Creates the ranks' group, at the same point on all; requests early losses from the strategy."""
        control_group(trainer)
        self._gradient.clear()
        self._has_gradients = not (drops_gradients(trainer) or _delays(trainer))
        self._looks = self.on_nan != "ignore" and loss_scaler(trainer.precision_plugin) is None
        stages = contract_of(trainer.strategy).find_ability(Pipelined)
        self._told_by_strategy = self._looks and stages is not None and stages.register_loss_hook(self._flag.look)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Checks each batch by itself with manual optimization."""
        if not pl_module.automatic_optimization:
            self._flag.clear()

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Records the loss, without waiting for it."""
        if self._looks and not self._told_by_strategy:
            self._flag.look(loss)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Agrees with the other ranks, and prevents a bad step."""
        if not self._looks:
            return
        if self._gradient.read():  # The flag stays, so that nothing saves these weights.
            raise mark_agreed(DloError(_message(trainer, _Problem.TAKEN)))
        problem = _Problem.LOSS if self._flag.read() else None
        if self._has_gradients:
            self._gradient.look(agreed_gradient_norm(trainer, optimizer))
            if self.on_nan == "skip" or self._gradient.is_known:
                if problem is None and self._gradient.read():
                    problem = _Problem.GRADIENT
                self._gradient.clear()
        if pl_module.automatic_optimization:
            self._flag.clear()
        rank, problem = _agree(trainer, problem)
        if problem is None:
            self._in_a_row = 0
        elif self.on_nan == "stop":
            raise mark_agreed(DloError(_message(trainer, problem, rank)))
        else:
            self._skip(trainer, pl_module, optimizer, _describe(trainer, problem, rank))

    def _skip(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer, what: str) -> None:
        skip_step(trainer, optimizer)
        self.skipped += 1
        self._in_a_row += 1
        rank_zero_warn(f"{what}: the step is skipped; {self.skipped} skipped in this run")
        if self._in_a_row >= self.max_skipped:
            raise mark_agreed(DloError(f"{what}; {self._in_a_row} steps in a row were skipped. {_ADVICE}"))
        name = _nonfinite_buffer(trainer, pl_module)
        if name:
            raise mark_agreed(
                DloError(
                    f"{what}, and neither is the buffer {name} now (a running statistic?), which skipping the step does"
                    " not undo; resume from the last checkpoint, and remove such inputs from the data"
                )
            )


class _Problem(IntEnum):
    """Number that is not finite, the gravest first; TAKEN is a gradient that the weights have got."""

    TAKEN, LOSS, GRADIENT = range(3)


class _Flag:
    """Whether a recorded number is not finite, read from the device as late as possible.

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

    def look(self, number: Tensor) -> None:
        bad = ~torch.isfinite(number.detach()).all()
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


def _agree(trainer: Trainer, problem: _Problem | None) -> tuple[int, _Problem | None]:
    """Returns the first rank with the gravest problem, and this; called on all ranks."""
    world = trainer.world_size
    if world == 1:
        return 0, problem
    vote = torch.tensor(len(_Problem) * world if problem is None else problem * world + trainer.global_rank)
    group = control_group(trainer)
    # Ranks whose gradients are delayed have the same loss: none waits for another.
    if group is not None and not _delays(trainer):
        dist.all_reduce(vote, dist.ReduceOp.MIN, group=group)
    kind, rank = divmod(int(vote), world)
    return rank, None if kind == len(_Problem) else _Problem(kind)


def _delays(trainer: Trainer) -> bool:
    return contract_of(trainer.strategy).find_ability(DelayedGradients) is not None


def _describe(trainer: Trainer, problem: _Problem, rank: int) -> str:
    batch = trainer.fit_loop.epoch_loop.batch_progress.current.ready
    step, epoch = trainer.global_step + 1, trainer.current_epoch + 1  # all from 1, as in the progress bar
    if problem is _Problem.TAKEN:
        return f"the gradient was not finite in step {step - 1} (epoch {epoch})"
    where = f" of rank {rank}" if trainer.world_size > 1 and problem is _Problem.LOSS else ""
    what = f"the loss{where}" if problem is _Problem.LOSS else "the gradient of a finite loss"
    return f"{what} was not finite in step {step} (epoch {epoch}, batch {batch})"


_ADVICE = (
    "Lower the learning rate, clip the gradients (trainer.gradient_clip_val), check the batch's data, or skip such"
    " steps (FiniteLoss, on_nan: skip)"
)


def _message(trainer: Trainer, problem: _Problem, rank: int = 0) -> str:
    taken = problem is _Problem.TAKEN
    cause = contract_of(trainer.strategy).find_ability(ExplainsNaN)
    hint = "" if cause is None else cause.nan_hint
    return (
        f"{_describe(trainer, problem, rank)}; "
        + (
            "the weights have it, checkpoints have not: resume from the last"
            if taken
            else "the weights are those before it"
        )
        + f". {_ADVICE}"
        + (f". Or: {hint}" if hint else "")
    )


def _nonfinite_buffer(trainer: Trainer, module: LightningModule) -> str:
    """Returns the name of a buffer that is not finite on any rank; empty if all are finite."""
    names = [n for n, b in module.named_buffers() if b.is_floating_point() and not bool(torch.isfinite(b).all())]
    group = control_group(trainer)
    if group is None:
        return names[0] if names else ""
    by_rank: list[Any] = [None] * trainer.world_size
    dist.all_gather_object(by_rank, names[:1], group=group)
    return next((name for of_rank in by_rank for name in of_rank), "")
