import math
from types import SimpleNamespace

import pytest

from dlo_framework.errors import DloError
from dlo_framework.progress import fraction_seen, optimizer_steps


def run(epoch=0, ready=0, batches=10, max_epochs=4, max_steps=-1, step=0, accumulate=1):
    """Stands for a trainer in the given place."""
    progress = SimpleNamespace(current=SimpleNamespace(ready=ready))
    return SimpleNamespace(
        max_epochs=max_epochs,
        max_steps=max_steps,
        current_epoch=epoch,
        global_step=step,
        num_training_batches=batches,
        accumulate_grad_batches=accumulate,
        fit_loop=SimpleNamespace(epoch_loop=SimpleNamespace(batch_progress=progress)),
    )


def test_progress_is_counted_in_batches_so_accumulation_does_not_shift_it():
    assert fraction_seen(run(epoch=1, ready=5)) == 1.4 / 4
    assert fraction_seen(run(epoch=1, ready=5), with_this_batch=True) == 1.5 / 4
    assert fraction_seen(run(epoch=1, ready=5, accumulate=4), with_this_batch=True) == 1.5 / 4
    assert fraction_seen(run(epoch=3, ready=10), with_this_batch=True) == 1.0


def test_before_the_first_batch_nothing_has_been_seen():
    assert fraction_seen(run()) == 0.0


def test_the_nearer_limit_decides():
    assert fraction_seen(run(epoch=1, ready=5, max_steps=20, step=15)) == 0.75
    assert fraction_seen(run(epoch=1, batches=math.inf, max_epochs=None, max_steps=20, step=5)) == 0.25


def test_a_training_without_an_end_is_refused():
    with pytest.raises(DloError, match=r"max_epochs and trainer\.max_steps are both unlimited"):
        fraction_seen(run(max_epochs=-1))


def test_steps_of_the_run():
    assert optimizer_steps(run(batches=10, accumulate=4)) == 12
    assert optimizer_steps(run(batches=10, max_steps=7)) == 7
    assert optimizer_steps(run(batches=math.inf)) == math.inf
