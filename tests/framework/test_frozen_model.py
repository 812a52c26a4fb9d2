"""Second models: their source, outputs and dtype; training does not see them; ranks and CPU memory as one process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback

from dlo_framework import placed_model
from dlo_framework.checkpoint import load
from dlo_framework.copy_streams import CopyStreams
from dlo_framework.distributed.strategy import DataParallelStrategy, SingleProcessStrategy
from dlo_framework.errors import DloError
from dlo_framework.frozen_model import FrozenModel, find_checkpoint
from dlo_framework.rehearsal import trial_steps
from dlo_framework.task import Task
from dlo_framework.testing import run_distributed
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from support import frozen_runs as runs
from support.fsdp_nets import Batches
from support.late import LateStream, OnDevice
from support.runs import Watch


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("teachers")
    return {kind: runs.make_teacher(kind, made / kind / "version_0") for kind in runs.TASKS}


@pytest.fixture(params=["images", "text"])
def teacher(request: Any, folders: dict[str, Path]) -> tuple[str, Path]:
    return request.param, folders[request.param]


@pytest.fixture
def images(folders: dict[str, Path]) -> Path:
    return folders["images"]


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
        trainer = runs.make_trainer("auto", callbacks=[*([Watch(tmp_path / "at2", 2)] if save else []), *callbacks])
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


# --- second models on two ranks: their outputs equal one process's under each strategy -------------------------------


#: DeepSpeed keeps no parameter in full because it is small.
CUT = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}
#: Strategies by name, with the number of data-parallel ranks on two ranks.
STRATEGIES: dict[str, tuple[Any, int]] = {
    "ddp": (DataParallelStrategy, 2),
    "zero1": (lambda: ZeroStrategy(1), 2),
    "zero2": (lambda: ZeroStrategy(2), 2),
    "zero3": (lambda: ZeroStrategy(3), 2),
    "zero3_offload": (lambda: ZeroStrategy(3, offload="both"), 2),
    "zero3_meta": (lambda: ZeroStrategy(3, meta_init=True), 2),
    "fsdp": (FSDPStrategy, 2),
    "fsdp_offload": (lambda: FSDPStrategy(offload=True), 2),
    "fsdp_meta": (lambda: FSDPStrategy(meta_init=True), 2),
    "hsdp": (lambda: FSDPStrategy(replicate=2, shard=1), 2),
    "tp": (lambda: MeshStrategy(tp=2, dp_shard=1), 1),
    "tp_sequence": (lambda: MeshStrategy(tp=2, dp_shard=1, sequence_parallel=True), 1),
    "pp": (lambda: MeshStrategy(pp=2, dp_shard=1, micro_batches=4), 1),
    "cp": (lambda: MeshStrategy(cp=2, dp_shard=1), 1),
    "deepspeed_0": (lambda: DeepSpeedBridge(0), 2),
    "deepspeed_2": (lambda: DeepSpeedBridge(2), 2),
    "deepspeed_3": (lambda: DeepSpeedBridge(3, config=CUT), 2),
    "zero2, a teacher in CPU memory": (lambda: OnDevice(2), 2),
    "zero3, a teacher in CPU memory": (lambda: OnDevice(3), 2),
}
#: Strategies for language models alone.
OFFLOADING = tuple(name for name in STRATEGIES if "teacher" in name)
TEXT_ONLY = ("cp", "zero3_meta", "fsdp_meta", *OFFLOADING)
#: Strategies that hold half of a model on each rank.
HALVED = ("zero3", "zero3_offload", "zero3_meta", "fsdp", "fsdp_offload", "fsdp_meta", "deepspeed_3", OFFLOADING[1])
CASES = [(name, kind) for name in STRATEGIES for kind in runs.TASKS if kind == "text" or name not in TEXT_ONLY]
#: What runs each time, in one set of ranks: each way to divide a model; the others are slow. test_distill_ranks has
#: images.
SOME = [(name, "text") for name in ("ddp", "fsdp_offload", "tp_sequence", "pp", *OFFLOADING)]


def _gather_sequences(own: runs.Teacher, placed: Any) -> None:
    state = getattr(placed, "_state", None)
    if state is not None and state.context is not None and state.context.sequence is not None:
        own.found[-1] = state.context.gather(own.found[-1])


def _look(own: runs.Teacher, trainer: Any) -> None:
    """Notes this rank's bytes, full sequences, and logits of the head."""
    placed = own.frozen.placed
    _gather_sequences(own, placed)
    own.notes["bytes"] = placed.held_bytes()
    if own.frozen.has_outputs and hasattr(placed.task, "head"):
        with own.frozen.head() as head:
            own.notes["logits"] = head.logits(own.found[-1].flatten(0, 1))
    assert placed.held_bytes() == own.notes["bytes"]


@contextlib.contextmanager
def _late_copies() -> Iterator[mock.Mock]:
    """Has copies to the device arrive late; yields the function that starts them."""
    streams = CopyStreams(LateStream(), LateStream())  # type: ignore[arg-type]
    with (
        mock.patch.object(placed_model, "copy_streams", return_value=streams) as start,
        mock.patch.object(placed_model, "empty_host_tensor", lambda like, _: torch.empty_like(like, device="cpu")),
    ):
        yield start


def _outputs(rank: int, world: int, folders: dict[str, Path], cases: list[tuple[str, str]]) -> dict[str, Any]:
    found = {}
    for name, kind in cases:
        make, shares = STRATEGIES[name]
        torch.manual_seed(1)
        saved = str(folders[kind] / "checkpoints" / "last.ckpt")
        callback = runs.Teacher(FrozenModel(saved, offload=name in OFFLOADING))
        callback.look = _look
        trainer = runs.make_trainer(make(), world, [callback])
        with _late_copies() as start:
            try:
                trainer.fit(runs.TASKS[kind](lr=1e-2), runs.loader(kind, rank * shares // world, shares))
            except Exception as error:
                raise RuntimeError(f"{name} {kind}") from error
        # ZeRO's stage 3 offloads shards, by the machinery of its own models.
        assert start.called == (name == OFFLOADING[0])
        found[f"{name} {kind}"] = {"outputs": callback.found, **callback.notes}
    return found


@pytest.fixture(scope="module")
def ranks(folders: dict[str, Path], request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    """What the ranks found in the cases that this session's tests ask for."""
    ours = [item for item in request.session.items if item.fspath == request.node.fspath]
    asked = {
        (item.callspec.params["name"], item.callspec.params["kind"]) for item in ours if "ranks" in item.fixturenames
    }
    asked |= {("ddp", kind) for _, kind in asked}  # What others hold is compared with it.
    return run_distributed(_outputs, 2, folders, [case for case in CASES if case in asked], timeout=600)


@pytest.mark.parametrize(
    ("name", "kind"), [case if case in SOME else pytest.param(*case, marks=pytest.mark.slow) for case in CASES]
)
def test_outputs_and_logits_equal_one_process_and_a_rank_holds_its_share_alone(
    ranks: Any, folders: dict[str, Path], name: str, kind: str
) -> None:
    shares, batches = STRATEGIES[name][1], runs.batches(kind)
    wholes = [runs.expected_outputs(kind, folders[kind], batch) for batch in batches]
    share = 0.52 if name in HALVED else 0.75 if name in ("tp", "pp") else 1.1  # The tensors of a copy are aligned.
    for rank in range(2):
        found = ranks[rank][f"{name} {kind}"]
        assert found["bytes"] <= share * ranks[0][f"ddp {kind}"]["bytes"]
        if name == "pp" and rank == 0:
            assert found["outputs"] == [None] * len(batches)
            assert "logits" not in found
            continue
        for output, whole in zip(found["outputs"], wholes, strict=True):
            torch.testing.assert_close(output, whole.chunk(shares)[rank * shares // 2], rtol=1e-6, atol=1e-6)
        if kind == "text":
            logits = runs.expected_logits(folders[kind], batches[-1])
            expected = logits.chunk(shares)[rank * shares // 2].flatten(0, 1)
            torch.testing.assert_close(found["logits"], expected, rtol=1e-5, atol=1e-6)


# --- an average of the student ---------------------------------------------------------------------------------

AVERAGED = ("ddp", "zero1", "zero2", "zero3", "zero3_offload", "fsdp", "tp", "pp", "cp", "deepspeed_2", "deepspeed_3")
#: What runs each time, `zero3` and `pp` for the resumed runs.
SOME_AVERAGED = ("zero3", "pp")
SAVED_AT, AVERAGED_STEPS = 2, 3


def _fit_average(strategy: Any, world: int, share: tuple[int, int], path: Path, resumes: bool, **options: Any) -> Any:
    torch.manual_seed(1)
    callback = runs.Teacher(FrozenModel(average=0.5))
    callback.look = lambda own, _: _gather_sequences(own, getattr(own.frozen.placed, "_inner", None))
    callbacks = [callback] if resumes else [Watch(path, batch=2 * SAVED_AT), callback]
    # Two micro-batches a step, of the same batch in each step.
    trainer = runs.make_trainer(strategy, world, callbacks, accumulate_grad_batches=2, **options)
    batch = runs.slice_rows(runs.batches("text")[0], *share)
    trainer.fit(
        runs.text_task(optimizer="sgd", lr=0.5),
        Batches([batch] * 2 * AVERAGED_STEPS),
        ckpt_path=str(path) if resumes else None,
    )
    return callback.found


def _averages(rank: int, world: int, folder: Path, names: tuple[str, ...]) -> dict[str, Any]:
    found = {}
    for name in names:
        make, shares = STRATEGIES[name]
        share = (rank * shares // world, shares)
        try:
            found[name] = _fit_average(make(), world, share, folder / name, resumes=False)
            if name in ("zero3", "fsdp", "deepspeed_3"):
                found[f"{name} resumed"] = _fit_average(make(), world, share, folder / name, resumes=True)
        except Exception as error:
            raise RuntimeError(name) from error
    found["fsdp from pp"] = _fit_average(FSDPStrategy(), world, (rank, world), folder / "pp", resumes=True)
    half = {"precision": "bf16-mixed"}
    for resumes in (False, True):
        strategy = ZeroStrategy(2, param_dtype="bfloat16")
        path = folder / "half"
        found[f"half {resumes}"] = _fit_average(strategy, world, (rank, world), path, resumes, **half)
    return found


@pytest.mark.parametrize("names", [SOME_AVERAGED, pytest.param(AVERAGED, marks=pytest.mark.slow)], ids=["some", "all"])
def test_an_average_of_the_student_equals_one_process_and_resumes(tmp_path: Path, names: tuple[str, ...]) -> None:
    alone = _fit_average(SingleProcessStrategy(device=torch.device("cpu")), 1, (0, 1), tmp_path / "alone", False)
    ranks = run_distributed(_averages, 2, tmp_path, names, timeout=900)
    assert not torch.allclose(alone[0], alone[-1], atol=1e-2)
    left = 2 * (AVERAGED_STEPS - SAVED_AT)
    for rank, found in enumerate(ranks):
        for name in names:
            shares = STRATEGIES[name][1]
            if name == "pp" and rank == 0:
                assert found[name] == [None] * 2 * AVERAGED_STEPS
                continue
            for one, whole in zip(found[name], alone, strict=True):
                expected = whole.chunk(shares)[rank * shares // 2]
                torch.testing.assert_close(one, expected, rtol=1e-5, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}")
        for name in {"zero3", "fsdp", "deepspeed_3"} & {*names}:
            for one, other in zip(found[f"{name} resumed"], found[name][-left:], strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0)
        for one, other in zip(found["half True"], found["half False"][-left:], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        for one, whole in zip(found["fsdp from pp"], alone[-left:], strict=True):
            torch.testing.assert_close(one, whole.chunk(2)[rank], rtol=1e-5, atol=1e-5)
    strategy = SingleProcessStrategy(device=torch.device("cpu"))
    back = _fit_average(strategy, 1, (0, 1), tmp_path / "zero3", resumes=True)
    for one, whole in zip(back, alone[-left:], strict=True):
        torch.testing.assert_close(one, whole, rtol=1e-5, atol=1e-5)
