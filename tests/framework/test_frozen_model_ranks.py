"""Second models on two ranks: their outputs equal one process's under each strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dlo_framework.distributed.strategy import DataParallelStrategy, SingleProcessStrategy
from dlo_framework.frozen_model import FrozenModel
from dlo_framework.testing import run_distributed
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from support import frozen_runs as runs
from support.fsdp_nets import Batches
from support.runs import Watch

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
}
#: Strategies for language models alone.
TEXT_ONLY = ("cp", "zero3_meta", "fsdp_meta")
#: Strategies that hold half of a model on each rank.
HALVED = ("zero3", "zero3_offload", "zero3_meta", "fsdp", "fsdp_offload", "fsdp_meta", "deepspeed_3")
CASES = [(name, kind) for name in STRATEGIES for kind in runs.TASKS if kind == "text" or name not in TEXT_ONLY]
#: What runs each time, in one set of ranks: each way to divide a model; the others are slow. test_distill_ranks has
#: images.
SOME = [(name, "text") for name in ("ddp", "fsdp_offload", "tp_sequence", "pp", "cp")]


def _look(own: runs.Teacher, trainer: Any) -> None:
    """Notes this rank's bytes, full sequences, and logits of the head."""
    placed = own.frozen.placed
    state = getattr(placed, "_state", None)
    if state is not None and state.context is not None and state.context.sequence is not None:
        own.found[-1] = state.context.gather(own.found[-1])
    own.notes["bytes"] = placed.held_bytes()
    own.notes["names"] = sorted(placed.shards())
    if own.frozen.has_outputs and hasattr(placed.task, "head"):
        with own.frozen.head() as head:
            own.notes["logits"] = head.logits(own.found[-1].flatten(0, 1))
    assert placed.held_bytes() == own.notes["bytes"]


def _outputs(rank: int, world: int, folders: dict[str, str], cases: list[tuple[str, str]]) -> dict[str, Any]:
    found = {}
    for name, kind in cases:
        make, shares = STRATEGIES[name]
        torch.manual_seed(1)
        callback = runs.Teacher(FrozenModel(folders[kind]))
        callback.look = _look
        trainer = runs.make_trainer(make(), world, [callback])
        try:
            trainer.fit(runs.TASKS[kind](lr=1e-2), runs.loader(kind, rank * shares // world, shares))
        except Exception as error:
            raise RuntimeError(f"{name} {kind}") from error
        names = [name for name, _ in trainer.lightning_module.named_parameters()]
        found[f"{name} {kind}"] = {"outputs": callback.found, "names_of_run": names, **callback.notes}
    return found


@pytest.fixture(scope="module")
def folders(tmp_path_factory: Any) -> dict[str, str]:
    made = tmp_path_factory.mktemp("teachers")
    return {kind: str(runs.make_teacher(kind, made / kind / "version_0")) for kind in runs.TASKS}


@pytest.fixture(scope="module")
def ranks(folders: dict[str, str], request: pytest.FixtureRequest) -> list[dict[str, Any]]:
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
    ranks: Any, folders: dict[str, str], name: str, kind: str
) -> None:
    shares, batches = STRATEGIES[name][1], runs.batches(kind)
    wholes = [runs.expected_outputs(kind, Path(folders[kind]), batch) for batch in batches]
    share = 0.52 if name in HALVED else 0.75 if name in ("tp", "pp") else 1.01
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
            logits = runs.expected_logits(Path(folders[kind]), batches[-1])
            expected = logits.chunk(shares)[rank * shares // 2].flatten(0, 1)
            torch.testing.assert_close(found["logits"], expected, rtol=1e-5, atol=1e-6)


# --- an average of the student ---------------------------------------------------------------------------------

AVERAGED = ("ddp", "zero1", "zero2", "zero3", "zero3_offload", "fsdp", "tp", "pp", "cp", "deepspeed_2", "deepspeed_3")
#: What runs each time, `zero3` and `pp` for the resumed runs.
SOME_AVERAGED = ("zero3", "pp")
SAVED_AT, AVERAGED_STEPS = 2, 4


def _fit_average(strategy: Any, world: int, share: tuple[int, int], path: Path, resumes: bool, **options: Any) -> Any:
    torch.manual_seed(1)
    callback = runs.Teacher(FrozenModel(average=0.5))
    callback.look = _gather_sequences
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


def _gather_sequences(own: runs.Teacher, trainer: Any) -> None:
    inner = getattr(own.frozen.placed, "_inner", None)
    state = getattr(inner, "_state", None)
    if state is not None and state.context is not None and state.context.sequence is not None:
        own.found[-1] = state.context.gather(own.found[-1])


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
