import pytest

from dlo_plugins.callbacks.quantise import fitting_period, scheduled_bits


def by_definition(start: int, target: int, period: int, steps: int) -> int:
    """DeepSpeed's loop (0.14): a bit less when the step reaches the period, and then a period twice as long."""
    for step in range(steps + 1):
        while start > target and step >= period:
            start -= 1
            period *= 2
    return start


@pytest.mark.parametrize(("start", "target", "period"), [(8, 4, 10), (16, 8, 1), (12, 8, 7)])
def test_it_is_deepspeeds(start: int, target: int, period: int) -> None:
    for steps in range(0, 400, 3):
        assert scheduled_bits(start, target, period, steps) == by_definition(start, target, period, steps)


@pytest.mark.parametrize("steps", [40, 900])
def test_the_fitting_period_reaches_the_target_by_the_middle(steps: int) -> None:
    bits = [scheduled_bits(8, 4, fitting_period(8, 4, steps), at) for at in (0, steps // 2, steps // 5)]
    assert bits[:2] == [8, 4]
    assert bits[2] > 4
