"""DeepSpeed's learning-rate schedules as pure functions of the step.

Each function has the arguments, the defaults and the order of arithmetic of DeepSpeed's class of the same name (0.19.8,
``deepspeed/runtime/lr_schedules.py``), so that the rates are bit-equal.
LRRangeTest and OneCycle: A disciplined approach to neural network hyper-parameters. Smith, 2018, arXiv 1803.09820.

A step is DeepSpeed's ``last_batch_iteration``: -1 for the first optimizer step, 0 for the next. ``base`` is a parameter
group's own rate, as set in the optimizer before the schedule starts.
"""

from __future__ import annotations

import math
from typing import Literal

Warmup = Literal["log", "linear"]


def lr_range_test(
    step: int,
    base: float,
    *,
    lr_range_test_min_lr: float = 1e-3,
    lr_range_test_step_size: int = 2000,
    lr_range_test_step_rate: float = 1.0,
    lr_range_test_staircase: bool = False,
) -> float:
    """Returns a rate that rises linearly, or in stairs, from its minimum."""
    if step < 0:
        return lr_range_test_min_lr
    interval = float(step + 1) / lr_range_test_step_size
    if lr_range_test_staircase:
        interval = math.floor(interval)
    return lr_range_test_min_lr * (1 + lr_range_test_step_rate * interval)


def warmup_lr(
    step: int,
    base: float,
    *,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float | None = None,
    warmup_num_steps: int = 1000,
    warmup_type: Warmup = "log",
) -> float:
    """Returns a rate that rises to its maximum and stays there."""
    greatest = base if warmup_max_lr is None else warmup_max_lr
    if step < 0:
        return warmup_min_lr
    return warmup_min_lr + (greatest - warmup_min_lr) * _warmup(step, warmup_num_steps, warmup_type)


def warmup_decay_lr(
    step: int,
    base: float,
    *,
    total_num_steps: int,
    warmup_min_lr: float = 0.0,
    warmup_max_lr: float = 0.001,
    warmup_num_steps: int = 1000,
    warmup_type: Warmup = "log",
) -> float:
    """Returns a rate that rises to its maximum, then falls linearly to its minimum."""
    if step < 0:
        return warmup_min_lr
    warm = max(2, warmup_num_steps)
    if step < warm:
        part = _warmup(step, warmup_num_steps, warmup_type)
    else:
        part = max(0.0, float(total_num_steps - step) / float(max(1.0, total_num_steps - warm)))
    return warmup_min_lr + (warmup_max_lr - warmup_min_lr) * part


def warmup_cosine_lr(
    step: int,
    base: float,
    *,
    total_num_steps: int,
    warmup_min_ratio: float = 0.0,
    warmup_num_steps: int = 1000,
    cos_min_ratio: float = 0.0001,
    warmup_type: Warmup = "log",
) -> float:
    """Returns a rate that rises from a fraction of the group's rate to all of it, then falls along half a cosine."""
    if step < 0:
        return 0.0
    warm = max(2, warmup_num_steps)
    if step < warm:
        return base * (warmup_min_ratio + _warmup(step, warmup_num_steps, warmup_type) * (1.0 - warmup_min_ratio))
    progress = min(1.0, (step - warm + 1) / max(1, total_num_steps - warm))
    ratio = (1 + math.cos(math.pi * progress)) / 2
    return base * max(0.0, cos_min_ratio + (1.0 - cos_min_ratio) * ratio)


def _warmup(step: int, steps: int, kind: Warmup) -> float:
    """Returns the fraction of a warm-up that is over, 0 to 1; a warm-up has at least two steps, as in DeepSpeed."""
    warm = max(2, steps)
    if step >= warm:
        return 1.0
    return 1.0 / math.log(warm) * math.log(step + 1) if kind == "log" else step / warm


def one_cycle(
    step: int,
    base: float,
    *,
    cycle_min_lr: float,
    cycle_max_lr: float,
    decay_lr_rate: float = 0.0,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
    cycle_momentum: bool = True,
    cycle_min_mom: float = 0.8,
    cycle_max_mom: float = 0.9,
    decay_mom_rate: float = 0.0,
) -> float:
    """Returns a rate that rises and falls in one cycle, then decays; :func:`one_cycle_momentum` has the momentum."""
    first, second = _halves(cycle_first_step_size, cycle_second_step_size)
    if step < 0:
        return cycle_min_lr
    if step < first + second:
        scale = _cycle(step, first, second, cycle_first_stair_count, cycle_second_stair_count)
        return cycle_min_lr + (cycle_max_lr - cycle_min_lr) * scale
    if math.isclose(decay_step_size, 0) or math.isclose(decay_lr_rate, 0):
        return cycle_min_lr
    return cycle_min_lr / (1 + decay_lr_rate * ((step - (first + second) + 1) / decay_step_size))


def one_cycle_momentum(
    step: int,
    *,
    cycle_first_step_size: int = 2000,
    cycle_second_step_size: int | None = None,
    cycle_first_stair_count: int = 0,
    cycle_second_stair_count: int | None = None,
    decay_step_size: int = 0,
    cycle_min_mom: float = 0.8,
    cycle_max_mom: float = 0.9,
    decay_mom_rate: float = 0.0,
) -> float:
    """Returns the first of an optimizer's `betas` under :func:`one_cycle`; the second is 0.99."""
    first, second = _halves(cycle_first_step_size, cycle_second_step_size)
    if step < 0:
        return cycle_min_mom
    if step < first + second:
        scale = _cycle(step, first, second, cycle_first_stair_count, cycle_second_stair_count)
        return cycle_max_mom - (cycle_max_mom - cycle_min_mom) * scale
    if math.isclose(decay_step_size, 0) or math.isclose(decay_mom_rate, 0):
        return cycle_max_mom
    return cycle_max_mom * (1 + decay_mom_rate * ((step - (first + second) + 1) / decay_step_size))


def _halves(first: int, second: int | None) -> tuple[float, float]:
    return float(first), float(first if second is None else second)


def _cycle(step: int, first: float, second: float, first_stairs: int, second_stairs: int | None) -> float:
    """Returns the height of a cycle, 0 to 1: linear, or in the given number of stairs per half."""
    total, position = first + second, step + 1
    x = 1.0 + position / total - math.floor(1 + position / total)
    rising = x <= first / total
    stairs = first_stairs if rising or second_stairs is None else second_stairs
    if stairs > 0:
        within = position % total
        height = within * stairs / first if within <= first else (total - within) * stairs / second
        return math.floor(height) / stairs
    return x / (first / total) if rising else (x - 1) / (first / total - 1)
