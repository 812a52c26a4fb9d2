import math
import pickle
from fractions import Fraction
from types import SimpleNamespace

import pytest

from dlo_framework.errors import DloError
from dlo_framework.progress import AccumulationWindow, fraction_seen, optimizer_steps, steps_per_epoch
from dlo_plugins.batches.dynamic_batch_size import DynamicBatchSize


def run(epoch=0, ready=0, batches=10, max_epochs=4, max_steps=-1, step=0, accumulate=1):
    """Takes the part of a trainer at the given position."""
    progress = SimpleNamespace(current=SimpleNamespace(ready=ready))
    return SimpleNamespace(
        max_epochs=max_epochs,
        max_steps=max_steps,
        current_epoch=epoch,
        global_step=step,
        num_training_batches=batches,
        accumulate_grad_batches=accumulate,
        train_dataloader=[],
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)),
    )


def test_progress_is_counted_in_batches_so_accumulation_does_not_shift_it():
    assert fraction_seen(run(epoch=1, ready=5)) == 1.4 / 4
    assert fraction_seen(run(epoch=1, ready=5), with_this_batch=True) == 1.5 / 4
    assert fraction_seen(run(epoch=1, ready=5, accumulate=4), with_this_batch=True) == 1.5 / 4
    assert fraction_seen(run(epoch=3, ready=10), with_this_batch=True) == 1.0


def test_the_nearer_limit_decides():
    assert fraction_seen(run(epoch=1, ready=5, max_steps=20, step=15)) == 0.75
    assert fraction_seen(run(epoch=1, batches=math.inf, max_epochs=None, max_steps=20, step=5)) == 0.25


def test_a_training_without_an_end_is_refused():
    with pytest.raises(DloError, match=r"max_epochs or trainer\.max_steps must be set"):
        fraction_seen(run(max_epochs=-1))


def test_a_run_of_no_epochs_is_over_and_not_endless():
    assert fraction_seen(run(max_epochs=0)) == 1.0
    assert fraction_seen(run(max_epochs=-1, max_steps=0)) == 1.0
    assert optimizer_steps(run(max_epochs=0, batches=math.inf)) == 0
    assert optimizer_steps(run(max_steps=0)) == 0


def test_without_the_length_of_an_epoch_a_schedule_needs_max_steps():
    with pytest.raises(DloError, match=r"the training loader has no length; set trainer\.max_steps, or trainer\.limit"):
        fraction_seen(run(ready=1, batches=math.inf))
    assert fraction_seen(run(ready=1, batches=math.inf, max_steps=8, step=2)) == 0.25
    unbuilt = run(batches=math.inf)
    unbuilt.train_dataloader = None  # as the optimizers are made: there is no loader to ask yet
    assert fraction_seen(unbuilt) == 0.0


def test_a_window_that_the_epochs_end_cuts_short_does_not_change_how_many_steps_it_has():
    assert steps_per_epoch(run(batches=9, accumulate=8)) == 2
    assert steps_per_epoch(run(batches=9, accumulate=AccumulationWindow(1, 8, 8))) == 2
    assert steps_per_epoch(run(batches=10, accumulate=AccumulationWindow(4, 0))) == 3
    mixed = AccumulationWindow(4, 0, Fraction(10, 7))  # ten batches in seven windows by plan
    assert steps_per_epoch(run(batches=10, accumulate=mixed)) == 7
    assert pickle.loads(pickle.dumps(mixed)).usual == Fraction(10, 7)


def test_a_plan_s_usual_window_is_saved_exactly():
    """As a float, 8/3 would make four steps of eight batches."""
    saved, found = DynamicBatchSize(schedule={0: 32}), DynamicBatchSize(schedule={0: 32})
    saved._window = AccumulationWindow(2, 6, Fraction(8, 3))
    found.load_state_dict(saved.state_dict())
    assert (int(found._window), found._window.start, found._window.usual) == (2, 6, Fraction(8, 3))
