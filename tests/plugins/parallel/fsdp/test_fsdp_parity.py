"""FSDP on ranks trains as one process does: each option, optimizer, accumulation, precision, clipping, hybrid sharding.

Plain torch is the reference of test_fsdp_runs and test_fsdp_behaviour.
"""

from functools import partial
from typing import Any

import pytest

from dlo_framework.testing import Case, assert_parity
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from support.plain_nets import plain


def case(optimizer: str = "adamw", accumulate: int = 1, trainer: dict[str, Any] | None = None, **options: Any) -> Case:
    trainer = {"accumulate_grad_batches": accumulate, **(trainer or {})}
    name = f"{options}, {optimizer}, {trainer}"
    return Case(partial(FSDPStrategy, **options), {"optimizer": optimizer}, trainer, name)


CLIPPED = {"gradient_clip_val": 0.1}
HALF = {"precision": "bf16-mixed"}


def test_each_option_and_optimizer_is_one_process() -> None:
    cases = [
        case(reshard_after_forward=False, accumulate=2),
        case(reshard_after_forward=True, accumulate=2),
        case(units=["blocks.1", "blocks.*.2", "head"], accumulate=2),
        case(units=[], trainer=CLIPPED),
        case(offload=True, recompute=True, forward_prefetch=1, sync_every_micro_batch=True, accumulate=2),
        case("lamb", offload=True),
        case("orthogonal", accumulate=2),
        case("sgd", accumulate=2, trainer=CLIPPED),
        case(accumulate=4, trainer=HALF),
        case(param_dtype="bfloat16", trainer=HALF),
    ]
    assert_parity(plain, cases, steps=3)


@pytest.mark.slow
def test_four_ranks_are_one_process() -> None:
    cases = [
        case(replicate=2, shard=-1, accumulate=2),
        case("lamb", replicate=-1, shard=2),
        case("orthogonal", replicate=2, shard=2, accumulate=2),
        case(replicate=2, trainer=CLIPPED),
        case(replicate=2, offload=True),
        case(accumulate=4),
        case(reshard_after_forward=2),
        case("sgd", units=["blocks.*"]),
    ]
    assert_parity(plain, cases, world_size=4, steps=4, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_of_it_over_a_hundred_steps(ranks: int) -> None:
    optimizers = ("adamw", "sgd", "lamb", "orthogonal")
    axes: list[dict[str, Any]] = [{}, {"offload": True}, *([{"replicate": 2}] if ranks == 4 else [])]
    every = [(name, options, count) for name in optimizers for options in axes for count in (1, 4)]
    assert_parity(plain, [case(n, c, **o) for n, o, c in every], world_size=ranks, steps=100, rtol=1e-5, timeout=3500)
    assert_parity(plain, [case(n, c, HALF, **o) for n, o, c in every], world_size=ranks, steps=20, timeout=3500)
