"""Which rank is slow, and why, from made-up steps."""

import pytest

from dlo_plugins.profile.operations import DATA, EXPOSED, HOST, MATRIX
from dlo_plugins.profile.rank_profile import find_straggler
from dlo_plugins.profile.step_breakdown import StepTime


def step(compute: float = 80, wait: float = 10, data: float = 2, host: float = 8) -> StepTime:
    kinds = {MATRIX: compute / 1e3, EXPOSED: wait / 1e3, DATA: data / 1e3, HOST: host / 1e3}
    return StepTime(0, sum(kinds.values()), kinds)


@pytest.mark.parametrize(
    ("slow", "others", "cause"),
    [
        (step(compute=180), step(wait=110), "compute"),
        (step(data=60), step(wait=68), "data"),
        (step(host=70), step(wait=72), "host"),
    ],
)
def test_the_rank_with_most_time_of_its_own_is_named_with_its_cause(slow, others, cause) -> None:
    found = find_straggler({0: [others] * 3, 1: [others] * 3, 2: [slow] * 3, 3: [others] * 3})
    assert (found.slowest, found.cause) == (2, cause)
    assert found.text.startswith("rank 2 is slow")
    assert found.by_cause[cause] == pytest.approx(found.excess)
    assert found.steps == (3, 3)


def test_links_are_named_where_every_rank_waits() -> None:
    found = find_straggler({rank: [step(compute=40, wait=60)] * 3 for rank in range(4)})
    assert (found.slowest, found.cause) == (None, "links")
    assert found.transfer == pytest.approx(0.06)


def test_equal_ranks_are_not_blamed() -> None:
    found = find_straggler({rank: [step(compute=80 + rank)] * 3 for rank in range(4)})
    assert (found.slowest, found.cause) == (None, "")
    assert "no rank stands out" in found.text


def test_a_rank_that_is_slow_in_half_of_the_steps_is_not_called_slow() -> None:
    found = find_straggler({0: [step(compute=300), step()] * 3, 1: [step(), step(compute=200)] * 3})
    assert (found.slowest, found.steps) == (None, (3, 6))


def test_a_loader_that_is_slow_on_every_rank_is_named_too() -> None:
    found = find_straggler({rank: [step(data=50)] * 3 for rank in range(2)})
    assert "every rank waits at least 50.0 ms for its data loader" in found.text
