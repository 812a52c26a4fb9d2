"""Sharing blocks out to stages by cost."""

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlo_framework.errors import DloError
from dlo_plugins.parallel.pipeline.model_stages import balance_stages, flop_costs
from support.pipeline_nets import language, plain, vit


def stage_costs(costs: list[float], counts: Any, stem: float, head: float) -> list[float]:
    sums, at = [], 0
    for count in counts:
        sums.append(sum(costs[at : at + count]))
        at += count
    sums[0] += stem
    sums[-1] += head
    return sums


def dearest(costs: list[float], counts: Any, stem: float, head: float) -> float:
    return max(stage_costs(costs, counts, stem, head))


def squares(costs: list[float], counts: Any, stem: float, head: float) -> float:
    return sum(cost * cost for cost in stage_costs(costs, counts, stem, head))


@given(
    st.lists(st.integers(0, 20).map(float), min_size=1, max_size=9),
    st.integers(1, 5),
    st.integers(0, 20).map(float),
    st.integers(0, 20).map(float),
)
def test_no_split_has_a_cheaper_dearest_stage(costs: list[float], stages: int, stem: float, head: float) -> None:
    if stages > len(costs):
        with pytest.raises(DloError, match=f"to {len(costs)} or less"):
            balance_stages(costs, stages, stem, head)
        return
    counts = balance_stages(costs, stages, stem, head)
    assert sum(counts) == len(costs)
    assert min(counts) >= 1
    every = itertools.product(range(1, len(costs) + 1), repeat=stages)
    splits = [split for split in every if sum(split) == len(costs)]
    best = min(dearest(costs, split, stem, head) for split in splits)
    assert dearest(costs, counts, stem, head) == best
    fair = [split for split in splits if dearest(costs, split, stem, head) == best]
    assert squares(costs, counts, stem, head) == min(squares(costs, split, stem, head) for split in fair)


def test_costs_by_operations() -> None:
    case = vit(1)
    by_flops = flop_costs(case.model, case.plan, lambda: case.forward(case.model, case.micro_batches[0]))
    assert by_flops is not None
    tokens, width, rows = 17, 24, 3
    dense = 2 * 12 * width * width * tokens * rows
    attention = 2 * 2 * tokens * tokens * width * rows
    assert by_flops.blocks == (dense + attention,) * 6
    assert by_flops.stem == 2 * 16 * 3 * 64 * width * rows
    assert by_flops.head == 2 * width * 7 * rows
    # A loss that computes belongs to the head.
    llama = language("llama", 1, packed=True)
    batch = llama.micro_batches[0]
    with_loss = flop_costs(
        llama.model, llama.plan, lambda: llama.loss(llama.model, llama.forward(llama.model, batch), batch)
    )
    assert with_loss is not None
    assert with_loss.head == 2 * 24 * 61 * 18
    assert with_loss.stem == 0


def test_a_forward_that_needs_values_has_no_count() -> None:
    case = plain(1)

    def forward() -> None:
        case.forward(case.model, case.micro_batches[0]).nonzero()

    assert flop_costs(case.model, case.plan, forward) is None
