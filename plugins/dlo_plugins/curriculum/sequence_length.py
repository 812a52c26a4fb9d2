"""Callback that grows the length of a language model's sequences over the run.

- SkyLadder: Better and Faster Pretraining via Context Window Scheduling. Zhu et al., 2025, arXiv 2503.15450: attention
  is limited to windows of the sequence, which is what rows of the windows' length compute.
- The Stability-Efficiency Dilemma: Investigating Sequence Length Warmup for Training GPT Models. Li, Zhang & He, 2021,
  arXiv 2108.06084 (DeepSpeed's curriculum): sequences are truncated.

Departure: lengths follow the fraction of training, and not the number of steps.

Batches are dicts of `[B, N]` tensors: `input_ids`; `labels`, the id of the next token; `position_ids`, which restart
where a document begins; `attention_mask` of padded rows. Other entries have no dim of N.
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor

from dlo_framework.batch_transform import BatchTransform
from dlo_framework.data import ResumableDataModule
from dlo_framework.data.description import DataDescription
from dlo_framework.data.sampler import uniform
from dlo_framework.errors import DloError, agreed_errors, check_choice, check_number, check_one_of
from dlo_framework.progress import (
    DataHook,
    FollowsSteps,
    RunPosition,
    StepFraction,
    check_end,
    parse_position,
    run_fraction,
)
from dlo_framework.strategy_abilities import SplitsSequences
from dlo_framework.strategy_contract import contract_of
from dlo_framework.watch.media import is_logged, log_scalars

_STREAM = 0x534C  # of the draws, among other hashes of the same seed
Method = Literal["split", "truncate"]


class SequenceLength(FollowsSteps, BatchTransform):
    """Trains a language model on short sequences first, and on longer ones as training goes on.

    `split` cuts each row of a batch into several rows of the current length: a step has the same tokens and the same
    targets, and attention costs less. A document that is cut begins again at position 0 in its next row; documents that
    are packed into one row stay apart. `truncate` trains on the first tokens of each row: a step has fewer tokens, and
    the rest of the row is left out of the epoch.

    Set either `start` or `lengths`. Lengths are rounded down to a divisor of the rows' length with `split`, and to
    `multiple`. The length depends only on the position in the run: it is the same on every rank, for all micro-batches
    of a step, and after a resume. Validation has the full length.

    With `split`, the loss is the mean over all tokens of the step, as without it. With `truncate`, it is the mean over
    the tokens of a micro-batch, over all ranks, and micro-batches of a step have equal weights.

    Logged every ``trainer.log_every_n_steps``: ``data/sequence_length``.

    Args:
        start: First length, of one that grows linearly to that of the rows.
        until: Point of the run at which the full length is reached; in SkyLadder's experiments 60% was best.
        lengths: Points of the run, each with the length from there on, or a list of lengths, one of which is drawn for
            each step: `{0: 64, "30%": [64, 128], "60%": 256}`.
        method: Way to shorten rows: `split` or `truncate`.
        multiple: Multiple to which lengths are rounded down.
        seed: Seed of the draws from a list.

    Raises:
        DloError: If a value is out of range, batches are not those of a language model, or rows are shorter than a
            length.
    """

    example = "{start: 8}"

    #: Its batches have several shapes in a run.
    changes_batch_shapes = True

    order = 5

    def __init__(
        self,
        start: int | None = None,
        until: str | float = "60%",
        lengths: dict[str | float, int | list[int]] | None = None,
        method: Method = "split",
        multiple: int = 8,
        seed: int = 0,
    ) -> None:
        check_one_of("SequenceLength", start=start, lengths=lengths)
        check_choice("SequenceLength: method", method, get_args(Method), "leave it out for split")
        check_number("SequenceLength: multiple", multiple, "at least 1", "leave it out")
        self.start, self.method, self.multiple, self.seed = start, method, multiple, seed
        self.until = parse_position(until, "SequenceLength: until", in_samples=False, at_zero=start is None)
        self.steps = {
            parse_position(point, "SequenceLength: lengths", in_samples=False): (
                [value] if isinstance(value, int) else list(value)
            )
            for point, value in (lengths or {}).items()
        }
        if lengths is not None and all(point.value for point in self.steps):
            raise DloError(
                f"SequenceLength: lengths must have the first length of the run under 0, got {lengths}; add 0: 64"
            )
        for size in [start, *(size for sizes in self.steps.values() for size in sizes)]:
            check_number("SequenceLength: a length", size, f"at least {multiple}, the multiple", f"set {multiple}")
        if not all(self.steps.values()):
            raise DloError(f"SequenceLength: a list of lengths must not be empty, got {lengths}; add a length")
        used = [self.until] if start is not None else [point for point in self.steps if point.value]
        self.needs_max_epochs = any(point.unit == "epochs" for point in used)
        self._points: list[tuple[float, list[int]]] = []
        self._until = 1.0
        super().__init__()
        self._hook = DataHook("shape_batch", "SequenceLength", "shape the batches")
        self._logged_step, self._length = -1, 0

    # --- the schedule --------------------------------------------------------------------------------------

    def length_at(self, fraction: float, full: int, step: int) -> int:
        """Returns the length after a fraction of training.

        Args:
            fraction: Fraction of training, 0 to 1.
            full: Length of the rows.
            step: Number of optimizer steps before this one, for draws from a list.
        """
        if self.start is not None:
            wanted = int(self.start + (full - self.start) * min(1.0, fraction / self._until) + 1e-9)
        else:
            sizes = [sizes for point, sizes in self._points if point <= fraction + 1e-9][-1]
            draw = float(uniform(np.zeros(1, dtype=np.int64), self.seed, step, _STREAM)[0])
            wanted = sizes[int(draw * len(sizes))]
        if wanted > full:
            raise DloError(
                f"SequenceLength: a length must be at most that of the rows, {full}, got {wanted}; set seq_len of the"
                f" data to {wanted}"
            )
        if wanted == full:
            return full
        if self.method == "split":
            return fitting_length(wanted, full, self.multiple)
        return wanted // self.multiple * self.multiple

    # --- before training -----------------------------------------------------------------------------------

    def check_run(self, trainer: Trainer, module: LightningModule, datamodule: Any = None) -> None:
        """Checks the points of the run, the data's rows and the strategy, before processes start.

        Raises:
            DloError: If a point or a length does not fit.
        """
        check_end(trainer)
        self._set_points(trainer)
        full = DataDescription(datamodule).seq_len
        sizes = [self.start] if self.start is not None else [size for sizes in self.steps.values() for size in sizes]
        if isinstance(full, int) and (largest := max(size for size in sizes if size is not None)) > full:
            raise DloError(
                f"SequenceLength: a length must be at most seq_len of the data, {full}, got {largest}; set seq_len to"
                f" {largest}"
            )
        split = contract_of(trainer.strategy).find_ability(SplitsSequences)
        if split is not None:
            shards = split.sequence_multiple()
            if self.multiple % shards:
                raise DloError(
                    f"SequenceLength: multiple must be a multiple of {shards} on a mesh that shards sequences, got"
                    f" {self.multiple}; set multiple: {-(-self.multiple // shards) * shards}"
                )

    def _set_points(self, trainer: Trainer) -> None:
        def fraction(point: RunPosition, key: str) -> float:
            return run_fraction(trainer, point, "SequenceLength", key) if point.value else 0.0

        if self.start is not None:
            self._until = fraction(self.until, "until")
        self._points = sorted((fraction(point, "lengths"), sizes) for point, sizes in self.steps.items())

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Sets the function that shapes batches in the datamodule, if that can apply it before the transfer."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self._clock, self._logged_step = StepFraction(), -1
        with agreed_errors():
            check_end(trainer)
            self._set_points(trainer)
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        if isinstance(datamodule, ResumableDataModule) and datamodule.shapes_batches:
            self._hook.set(datamodule, lambda batch: self._shape(trainer, batch))

    # --- training ------------------------------------------------------------------------------------------

    def _shape(self, trainer: Trainer, batch: Any) -> Any:
        """Returns the batch with rows of the current length."""
        full = check_tokens(batch, "SequenceLength")
        self._clock.update(trainer, with_this_batch=True)  # The batches so far are those before it.
        self._length = self.length_at(self._clock.fraction, full, self._clock.step)
        if self._length == full:
            return batch
        return (split_rows if self.method == "split" else truncate_rows)(batch, self._length)

    def transform(self, trainer: Trainer, pl_module: LightningModule, batch: Any) -> Any:
        """Returns the batch with rows of the current length, unless the datamodule has shaped it."""
        return batch if self._hook.is_set else self._shape(trainer, batch)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Logs the length."""
        step = trainer.global_step
        if not is_logged(trainer, step + 1) or step == self._logged_step:
            return
        self._logged_step = step
        log_scalars(trainer, {"data/sequence_length": float(self._length)}, step + 1)

    def release(self, trainer: Trainer) -> None:
        """Removes the function from the datamodule."""
        super().release(trainer)
        self._hook.remove()


#: Entries of a batch with one value per token.
TOKEN_KEYS = ("input_ids", "labels", "position_ids", "attention_mask")


def fitting_length(length: int, full: int, multiple: int) -> int:
    """Returns the largest divisor of a row's length that is a multiple of a number, and at most ``length``.

    Args:
        length: Wanted length.
        full: Length of the rows.
        multiple: Number that the result must be a multiple of; if none is small enough, the smallest such divisor.
    """
    fitting = [full // parts for parts in range(1, full + 1) if full % parts == 0 and full // parts % multiple == 0]
    if not fitting:
        return full
    return max((size for size in fitting if size <= length), default=min(fitting))


def check_tokens(batch: Any, what: str) -> int:
    """Returns the length of the rows of a batch.

    Args:
        batch: Batch.
        what: Name of the callback, for the message.

    Raises:
        DloError: If it is not a batch of tokens, or has other values per token.
    """
    if not isinstance(batch, dict) or not isinstance(batch.get("input_ids"), Tensor) or batch["input_ids"].ndim != 2:
        raise DloError(
            f"{what}: batches must be dicts with input_ids [B, N], got {type(batch).__name__}; use it with language"
            " models, or leave it out"
        )
    length = batch["input_ids"].shape[1]
    others = [
        key for key, value in batch.items() if key not in TOKEN_KEYS and isinstance(value, Tensor) and value.ndim > 0
    ]
    if others:
        raise DloError(
            f"{what}: batches must have values per token in {', '.join(TOKEN_KEYS)} alone, got '{others[0]}', which"
            " belongs to full rows; leave the callback out"
        )
    return int(length)


def split_rows(batch: dict[str, Any], length: int) -> dict[str, Any]:
    """Returns a batch whose rows are cut into rows of a length that divides theirs.

    All tokens and targets stay, in their order. A document that is cut begins again at position 0 in the next row.

    Args:
        batch: Batch of rows `[B, N]`.
        length: Length of the new rows.
    """
    new_batch = {
        key: value.reshape(-1, length) if key in TOKEN_KEYS else value for key, value in batch.items()
    }  # [B * N / length, length]
    positions = new_batch.get("position_ids")
    if positions is not None:
        begins = torch.ones_like(positions, dtype=torch.bool)
        begins[:, 1:] = positions.diff(dim=1) != 1
        places = torch.arange(length, device=positions.device).expand_as(positions)
        new_batch["position_ids"] = places - torch.where(begins, places, 0).cummax(dim=1).values
    return new_batch


def truncate_rows(batch: dict[str, Any], length: int) -> dict[str, Any]:
    """Returns a batch with the first tokens of each row, without the number of targets of the step.

    Args:
        batch: Batch of rows `[B, N]`.
        length: Length of the new rows.
    """
    kept = {key: value for key, value in batch.items() if key != "tokens_in_step"}
    return {key: value[:, :length].contiguous() if key in TOKEN_KEYS else value for key, value in kept.items()}
