"""Second models on two ranks: their outputs equal one process's under each strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.frozen_model import FrozenModel
from dlo_framework.testing import run_distributed
from dlo_plugins.strategies.deepspeed import DeepSpeedBridge
from dlo_plugins.strategies.fsdp import FSDPStrategy
from dlo_plugins.strategies.mesh import MeshStrategy
from dlo_plugins.strategies.zero import ZeroStrategy
from tests.support import frozen_runs as runs

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
def ranks(folders: dict[str, str]) -> list[dict[str, Any]]:
    return run_distributed(_outputs, 2, folders, CASES, timeout=600)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_outputs_equal_one_process(ranks: Any, folders: dict[str, str], name: str, kind: str) -> None:
    shares = STRATEGIES[name][1]
    for step, batch in enumerate(runs.batches(kind)):
        whole = runs.expected_outputs(kind, Path(folders[kind]), batch)
        for rank in range(2):
            found = ranks[rank][f"{name} {kind}"]["outputs"][step]
            if name == "pp" and rank == 0:
                assert found is None
                continue
            torch.testing.assert_close(found, whole.chunk(shares)[rank * shares // 2], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "kind"), [case for case in CASES if case[1] == "text"])
def test_the_head_gives_the_logits_of_one_process(ranks: Any, folders: dict[str, str], name: str, kind: str) -> None:
    shares, batch = STRATEGIES[name][1], runs.batches(kind)[-1]
    whole = runs.expected_logits(Path(folders[kind]), batch)
    for rank in range(2):
        if name == "pp" and rank == 0:
            assert "logits" not in ranks[rank][f"{name} {kind}"]
            continue
        expected = whole.chunk(shares)[rank * shares // 2].flatten(0, 1)
        torch.testing.assert_close(ranks[rank][f"{name} {kind}"]["logits"], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_a_rank_holds_its_share_alone(ranks: Any, name: str, kind: str) -> None:
    full = ranks[0][f"ddp {kind}"]["bytes"]
    for rank in range(2):
        found = ranks[rank][f"{name} {kind}"]
        if name in HALVED:
            assert found["bytes"] <= 0.52 * full
        elif name in ("tp", "pp"):
            assert found["bytes"] <= 0.75 * full
        else:
            assert found["bytes"] <= 1.01 * full
