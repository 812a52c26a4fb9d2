"""Batch size and gradient accumulation, which both DeepSpeed's JSON and the Trainer set.

DeepSpeed requires ``train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks``, and
derives missing values. dlo's `data.batch_size` is the global batch of one micro-step: DeepSpeed's micro-batch times the
ranks, or its train batch divided by the accumulation.
"""

from __future__ import annotations

from typing import Any

from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.trainer_settings import TrainerSettings

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def fill_batch_size(config: dict[str, Any], facts: TrainerSettings, source: str) -> None:
    """Fills in the three batch settings, in place.

    If neither the JSON nor the Trainer has the micro-batch, it is 1, as in Lightning: DeepSpeed uses it only for its
    throughput log.

    Raises:
        DloError: If they contradict each other or the Trainer.
    """
    train, micro, steps = (_positive(config, key, source) for key in (TRAIN, MICRO, STEPS))
    world = facts.world_size
    if train is not None and micro is not None and train % (micro * world):
        raise DloError(
            f"{source}: {TRAIN} must be a multiple of {MICRO} {micro} x {world} ranks = {micro * world}, got {train};"
            f" set {TRAIN} {_nearest_multiple(train, micro * world)}"
        )
    derived = f"{TRAIN} {train} / ({MICRO} {micro} x {world} ranks)"
    if steps is None and train is not None and micro is not None:
        steps = train // (micro * world)
    else:
        derived = ""
    if steps is not None and steps != facts.accumulation:
        raise DloError(
            f"{source}: {STEPS} must equal trainer.accumulate_grad_batches {facts.accumulation}, got {steps}"
            f"{f' ({derived})' if derived else ''}; set --trainer.accumulate_grad_batches {steps}, or"
            f' "{STEPS}": "auto" in the JSON'
        )
    key = MICRO if micro is not None else TRAIN
    if micro is None and train is not None:
        micro = _micro_of(train, facts, source)
    if micro is not None and facts.micro_batch_size not in (None, micro):
        raise _other_batch(micro, key, config[key], facts, source)
    micro = facts.micro_batch_size or micro or 1
    product = micro * facts.accumulation * world
    if train is not None and train != product:
        raise DloError(
            f"{source}: {TRAIN} must be {MICRO} {micro} x {STEPS} {facts.accumulation} x {world} ranks = {product}, got"
            f" {train}; set {TRAIN} {product}, or leave it out"
        )
    config.update({TRAIN: product, MICRO: micro, STEPS: facts.accumulation})


def _positive(config: dict[str, Any], key: str, source: str) -> int | None:
    value = config.get(key)
    if value is None or value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DloError(f'{source}: {key} must be an integer of at least 1 or "auto", got {value!r}')
    return value


def _micro_of(train: int, facts: TrainerSettings, source: str) -> int:
    """Returns the micro-batch of a rank for a train batch."""
    share = facts.accumulation * facts.world_size
    if train % share:
        raise DloError(
            f"{source}: {TRAIN} must be divisible by trainer.accumulate_grad_batches {facts.accumulation} x"
            f" {facts.world_size} ranks = {share}, got {train}; set {TRAIN} {_nearest_multiple(train, share)}"
        )
    return train // share


def _other_batch(micro: int, key: str, value: int, facts: TrainerSettings, source: str) -> DloError:
    """Returns the error for data whose batch size differs from the JSON's; `key` is the JSON's key for it."""
    assert facts.micro_batch_size is not None
    world, loaded = facts.world_size, facts.micro_batch_size
    means = f"{micro} samples per rank and micro-step"
    if key == TRAIN:
        means += f" ({world} ranks, trainer.accumulate_grad_batches {facts.accumulation})"
    return DloError(
        f"data.batch_size must be {micro * world} for {key} {value} of {source}, which means {means}, got"
        f" {loaded * world} (the global batch: {loaded} per rank); set --data.batch_size {micro * world}, or"
        f' "{key}": "auto" in the JSON'
    )


def _nearest_multiple(value: int, of: int) -> str:
    below = value // of * of
    return f"{below} or {below + of}" if below else str(of)
