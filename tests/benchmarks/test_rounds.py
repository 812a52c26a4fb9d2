"""The arithmetic and the order of measuring: benchmarks/measuring/rounds.py and stopwatch.py."""

import importlib
import random
from types import SimpleNamespace

import pytest
import torch


@pytest.fixture
def rounds(load):
    return load("measuring.rounds")


class Ticking:
    """A clock's hand that moves on by one at each look."""

    def __init__(self) -> None:
        self.time = 0.0

    def __call__(self) -> float:
        self.time += 1.0
        return self.time


def test_all_take_part_once_a_round_in_changing_orders_and_the_first_round_only_warms_up(rounds):
    turns, numbers = [], []
    runs = {name: (lambda name=name: turns.append(name) or len(turns)) for name in "abcd"}
    found = rounds.take_turns(runs, 6, order=random.Random(0), before_round=numbers.append)
    by_round = [turns[first : first + 4] for first in range(0, 28, 4)]
    assert len(turns) == 28
    assert all(sorted(of_one) == list("abcd") for of_one in by_round)
    assert len({tuple(of_one) for of_one in by_round}) > 3
    assert numbers == list(range(7))
    assert {name: len(values) for name, values in found.items()} == dict.fromkeys("abcd", 6)
    # Turns are numbered from 1: what the first four found is dropped, all else is there, in the order of rounds.
    assert sorted(number for values in found.values() for number in values) == list(range(5, 29))
    assert all(values == sorted(values) for values in found.values())


def test_who_does_not_fit_the_device_leaves_and_the_others_go_on(rounds):
    def loop() -> float:
        raise torch.OutOfMemoryError("CUDA out of memory")

    runs = {"loop": loop, "loop, compiled": lambda: 4.0, "dlo fit": lambda: 2.0}
    seconds = rounds.take_turns(runs, 2, warm_up=0, may_fail=torch.OutOfMemoryError)
    training, throughput = (importlib.import_module(f"on_accelerator.{name}") for name in ("training", "throughput"))
    found = {name: [training.Trained(value, None, 3.0) for value in values] for name, values in seconds.items()}
    subject = SimpleNamespace(title="a model", item="tokens", items=8, samples=1)
    text = importlib.import_module("measuring.record").as_text(
        throughput.rates_table(subject, found, rounds.ELAPSED).as_dict()
    )
    assert "1 is the tokens a second of loop, compiled" in text
    assert "out of memory" in next(line for line in text.splitlines() if line.startswith("loop  "))


def test_a_ratio_is_taken_within_its_round(rounds):
    # In the second round all of the machine is slow, in the third the contestant alone.
    values = {"base": [1.0, 10.0, 1.0], "other": [2.0, 20.0, 30.0]}
    assert rounds.all_ratios(values, "base") == {"base": [1.0, 1.0, 1.0], "other": [2.0, 2.0, 30.0]}
    with pytest.raises(ValueError, match="argument 2 is longer"):
        rounds.ratios([1.0], [1.0, 2.0])


def test_a_stopwatch_times_what_follows_the_warm_up(rounds):
    stopwatch = importlib.import_module("measuring.stopwatch").Stopwatch
    hand = Ticking()
    settled = []
    clock = rounds.Clock("a clock", hand)
    clock.settle = lambda: settled.append(hand.time)
    watch = stopwatch(clock, warm=2, steps=3)
    for number in range(7):
        hand.time = 10.0 * (number + 1)  # when batch `number` has ended
        watch.on_train_batch_end()
    assert settled == [20.0]
    assert watch.seconds_of_a_step == pytest.approx((51 - 21) / 3)
