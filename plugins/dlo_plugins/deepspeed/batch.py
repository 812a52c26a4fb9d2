"""Batch size and accumulation, which DeepSpeed's JSON and the Trainer both have.

DeepSpeed asks for ``train_batch_size = train_micro_batch_size_per_gpu x gradient_accumulation_steps x ranks``, and
derives what is missing. dlo's `data.batch_size` counts the samples of all ranks of one micro-step, so it is DeepSpeed's
micro-batch times the ranks, or its train batch over the accumulation.
"""

from __future__ import annotations

from typing import Any

from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.facts import TrainerFacts

TRAIN, MICRO, STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


def with_batch_size(config: dict[str, Any], facts: TrainerFacts, source: str) -> None:
    """Fills the three batch settings in, in place.

    Where neither the JSON nor the Trainer knows the micro-batch, it is 1, as Lightning has it: DeepSpeed takes it for
    its throughput log alone.

    Raises:
        DloError: where they contradict each other or the Trainer.
    """
    train, micro, steps = (_positive(config, key, source) for key in (TRAIN, MICRO, STEPS))
    world = facts.world_size
    if train is not None and micro is not None and train % (micro * world):
        raise DloError(
            f"{source}: {TRAIN} {train} is no multiple of {MICRO} {micro} x {world} ranks = {micro * world}; set"
            f" {TRAIN} {_nearest_multiple(train, micro * world)}"
        )
    derived = f"{TRAIN} {train} / ({MICRO} {micro} x {world} ranks)"
    if steps is None and train is not None and micro is not None:
        steps = train // (micro * world)
    else:
        derived = ""
    if steps is not None and steps != facts.accumulation:
        raise DloError(
            f"{source} says {STEPS} {steps}{f' ({derived})' if derived else ''}, trainer.accumulate_grad_batches is"
            f" {facts.accumulation}; set --trainer.accumulate_grad_batches {steps}, or"
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
            f"{source}: {TRAIN} {train} is not {MICRO} {micro} x {STEPS} {facts.accumulation} x {world} ranks ="
            f" {product}; set {TRAIN} {product}, or leave it out"
        )
    config.update({TRAIN: product, MICRO: micro, STEPS: facts.accumulation})


def _positive(config: dict[str, Any], key: str, source: str) -> int | None:
    value = config.get(key)
    if value is None or value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise DloError(f'{source}: {key} is a number from 1 on, or "auto", but was {value!r}')
    return value


def _micro_of(train: int, facts: TrainerFacts, source: str) -> int:
    """Returns a rank's micro-batch of a train batch."""
    share = facts.accumulation * facts.world_size
    if train % share:
        raise DloError(
            f"{source}: {TRAIN} {train} is not divisible by trainer.accumulate_grad_batches {facts.accumulation} x"
            f" {facts.world_size} ranks = {share}; set {TRAIN} {_nearest_multiple(train, share)}"
        )
    return train // share


def _other_batch(micro: int, key: str, value: int, facts: TrainerFacts, source: str) -> DloError:
    """Returns the error for data whose batch is not the JSON's: `key` is what says it there."""
    assert facts.micro_batch_size is not None
    world, loaded = facts.world_size, facts.micro_batch_size
    means = f"{micro} samples a rank and micro-step"
    if key == TRAIN:
        means += f" ({world} ranks, trainer.accumulate_grad_batches {facts.accumulation})"
    return DloError(
        f"{source} says {key} {value}, so {means}, but data.batch_size {loaded * world} gives each rank {loaded} (dlo"
        f' counts the samples of all ranks together); set --data.batch_size {micro * world}, or "{key}": "auto" in the'
        " JSON"
    )


def _nearest_multiple(value: int, of: int) -> str:
    below = value // of * of
    return f"{below} or {below + of}" if below else str(of)
