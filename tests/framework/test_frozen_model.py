"""Second models in one process: their source, their outputs, their dtype, and that training does not see them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from dlo_framework.checkpoint import load
from dlo_framework.errors import DloError
from dlo_framework.frozen_model import FrozenModel, find_checkpoint
from dlo_framework.rehearsal import trial_steps
from dlo_framework.task import Task
from support import frozen_runs as runs
from support.fsdp_nets import Batches


@pytest.fixture(scope="module", params=["images", "text"])
def teacher(request: Any, tmp_path_factory: Any) -> tuple[str, Path]:
    kind = request.param
    return kind, runs.make_teacher(kind, tmp_path_factory.mktemp(kind) / "version_0")


@pytest.fixture(scope="module")
def images(tmp_path_factory: Any) -> Path:
    return runs.make_teacher("images", tmp_path_factory.mktemp("images") / "version_0")


class SaveAt(Callback):
    """Saves a checkpoint after a step."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def fit(kind: str, frozen: FrozenModel | None, **options: Any) -> tuple[Task, runs.Teacher | None, Any]:
    torch.manual_seed(1)
    student = runs.TASKS[kind](lr=1e-2)
    callback = None if frozen is None else runs.Teacher(frozen)
    trainer = runs.make_trainer("auto", callbacks=[] if callback is None else [callback], **options)
    trainer.fit(student, runs.loader(kind))
    return student, callback, trainer


def test_outputs_are_those_of_the_saved_model(teacher: tuple[str, Path]) -> None:
    kind, folder = teacher
    _, callback, _ = fit(kind, FrozenModel(str(folder)))
    assert callback is not None
    for found, batch in zip(callback.found, runs.batches(kind), strict=True):
        torch.testing.assert_close(found, runs.expected_outputs(kind, folder, batch), rtol=0, atol=0)
        assert not found.requires_grad


def test_training_and_checkpoints_are_those_without_it(teacher: tuple[str, Path], tmp_path: Path) -> None:
    kind, folder = teacher
    states = []
    for number, frozen in enumerate((None, FrozenModel(str(folder)))):
        student, _, trainer = fit(kind, frozen)
        trainer.save_checkpoint(tmp_path / f"{number}.ckpt")
        saved = load(tmp_path / f"{number}.ckpt")
        states.append(
            (
                {name: saved["state_dict"][name] for name in saved["state_dict"]},
                list(student.state_dict()),
                torch.get_rng_state(),
            )
        )
    (alone, names, random), (beside, names_beside, random_beside) = states
    assert names == names_beside
    assert alone.keys() == beside.keys()
    assert all(torch.equal(alone[name], beside[name]) for name in alone)
    assert torch.equal(random, random_beside)


@pytest.mark.parametrize("offload", [False, True])
def test_it_computes_in_its_own_dtype(teacher: tuple[str, Path], offload: bool) -> None:
    kind, folder = teacher
    _, callback, _ = fit(kind, FrozenModel(str(folder), dtype="bfloat16", offload=offload))
    assert callback is not None
    expected = runs.expected_outputs(kind, folder, runs.batches(kind)[0], torch.bfloat16)
    assert callback.found[0].dtype == torch.bfloat16
    torch.testing.assert_close(callback.found[0], expected, rtol=0, atol=0.05)


def test_a_task_brings_its_own_weights_and_needs_no_checkpoint() -> None:
    torch.manual_seed(3)
    given = runs.image_task(width=48)
    given.configure_model()
    _, callback, _ = fit("images", FrozenModel(task=given))
    assert callback is not None
    batch = runs.batches("images")[0]
    with torch.no_grad():
        expected = given.eval().forward(batch[0])
    torch.testing.assert_close(callback.found[0], expected, rtol=0, atol=0)
    assert next(given.parameters()).requires_grad  # The user's own object is left alone.


def test_checkpoints_are_found_by_run_by_name_and_by_path(images: Path) -> None:
    last = images / "checkpoints" / "last.ckpt"
    for text in (images, images / "last", last, images.parent):
        assert find_checkpoint(str(text)) == last


# --- an average of the student ---------------------------------------------------------------------------------


class Track(Callback):
    """Computes the average of the weights in plain torch, in the order of the steps."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.average = {name: value.detach().clone() for name, value in pl_module.named_parameters()}
        self.seen: list[dict[str, torch.Tensor]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append({name: value.clone() for name, value in self.average.items()})

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for name, value in pl_module.named_parameters():
            self.average[name].lerp_(value.detach(), 1 - 0.9)


@pytest.mark.parametrize("kind", ["images", "text"])
def test_an_average_computes_with_the_averaged_weights(kind: str) -> None:
    torch.manual_seed(1)
    callback, track = runs.Teacher(FrozenModel(average=0.9)), Track()
    student = runs.TASKS[kind](lr=1e-2)
    runs.make_trainer("auto", callbacks=[callback, track]).fit(student, runs.loader(kind))
    twin = runs.TASKS[kind]()
    twin.configure_model()
    for found, weights, batch in zip(callback.found, track.seen, runs.batches(kind), strict=True):
        twin.load_state_dict(weights, strict=False)
        args, named = twin.eval().inputs(batch)
        with torch.no_grad():
            torch.testing.assert_close(found, twin.forward(*args, **named), rtol=1e-6, atol=1e-6)
    assert not torch.equal(callback.found[0], callback.found[1])


def test_an_average_does_not_change_training_and_resumes_exactly(tmp_path: Path) -> None:
    students, found = [], []
    for frozen, save in ((None, False), (FrozenModel(average=0.9), True), (FrozenModel(average=0.9), False)):
        torch.manual_seed(1)
        student = runs.image_task(lr=1e-2)
        callback = None if frozen is None else runs.Teacher(frozen)
        callbacks = [callback] if callback is not None else []
        again = None if save or frozen is None else str(tmp_path / "at2")
        trainer = runs.make_trainer("auto", callbacks=[*([SaveAt(tmp_path / "at2", 2)] if save else []), *callbacks])
        # The same batch in each step: which one a resumed run begins with is not what is tested.
        trainer.fit(student, Batches([runs.batches("images")[0]] * 4), ckpt_path=again)
        students.append({name: value.detach() for name, value in student.named_parameters()})
        found.append([] if callback is None else callback.found)
        assert student.training
    assert all(torch.equal(value, students[1][name]) for name, value in students[0].items())
    assert len(found[2]) == 2
    for one, other in zip(found[1][2:], found[2], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert not torch.equal(found[1][0], found[1][2])


class Aside(Callback):
    """Trains on the side before the first batch, and undoes it."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        with trial_steps(trainer) as rehearsal:
            for _ in range(3):
                rehearsal.optimizer_step()


def test_an_average_has_nothing_of_steps_that_were_undone() -> None:
    found = []
    for aside in ([], [Aside()]):
        torch.manual_seed(1)
        callback = runs.Teacher(FrozenModel(average=0.9))
        trainer = runs.make_trainer("auto", callbacks=[*aside, callback])
        trainer.fit(runs.image_task(lr=1e-2), runs.loader("images"))
        found.append(callback.found)
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


# --- bad input -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "must have one of checkpoint, task and average, got none"),
        ({"checkpoint": "x", "average": 0.9}, "must have one source, got checkpoint and average"),
        ({"average": 1.0}, "must be at least 0 and below 1, got 1.0; 0.999 is usual"),
        ({"average": 0.9, "dtype": "bfloat16"}, "dtype of a second model must be unset with average"),
        ({"checkpoint": "x", "dtype": "bfloat61"}, "got bfloat61; did you mean 'bfloat16'?"),
        ({"task": torch.nn.Linear(1, 1)}, "must be a dlo_framework.Task, got a Linear"),
    ],
)
def test_bad_options_are_one_line_errors(options: Any, message: str) -> None:
    with pytest.raises(DloError) as caught:
        FrozenModel(**options)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_checkpoint_names_the_nearest(images: Path) -> None:
    with pytest.raises(DloError, match=r"did you mean 'version_0'"):
        FrozenModel(str(images.parent / "versoin_0")).check(runs.image_task())
    with pytest.raises(DloError, match=r"did you mean 'last.ckpt'"):
        FrozenModel(str(images / "checkpoints" / "lst.ckpt")).check(runs.image_task())


def test_weights_of_another_model_are_refused(images: Path) -> None:
    with pytest.raises(DloError, match=r"model.cls_token \[1, 1, 48\] for \[1, 1, 32\].* of another shape"):
        FrozenModel(str(images), task=runs.image_task(width=32)).check(runs.image_task())


class NotOnMeta(Task):
    def configure_model(self) -> None:
        if not self.has_model:
            layer = torch.nn.Linear(2, 2)
            layer.weight.data.fill_(float(layer.weight.sum()))
            self.model = layer

    def loss(self, outputs: Any, batch: Any) -> torch.Tensor:
        return outputs.sum()


def test_a_model_that_reads_values_while_it_is_built_is_refused() -> None:
    with pytest.raises(DloError, match=r"must be buildable on the meta device, got .* of NotOnMeta"):
        FrozenModel(task=NotOnMeta()).check(runs.image_task())
