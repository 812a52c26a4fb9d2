"""Training with rounded weights and inputs on two ranks has the losses of one process.

Rounded weights alone are compared in `tests/composition` in single precision, weights at the end included. With rounded
inputs, a value that differs in its last bit may get another level, so that losses differ by about 1e-5 in single
precision: these runs are in double precision, where no value is that near to the middle of two levels.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from composition import matrix
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import merge_records
from dlo_plugins.compile.compile_blocks import CompileBlocks
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.quantise.callback import Quantise

#: Options of meshes that the composition table does not have.
MESHES: dict[str, Callable[[], dict[str, Any]]] = {
    "sequence parallel": lambda: {"tp": 2, "dp_shard": 1, "sequence_parallel": True},
    "tp, compiled": lambda: {"tp": 2, "dp_shard": 1, "appliers": [CompileBlocks(backend="aot_eager")]},
    "zero bubble": lambda: {"pp": 2, "dp_shard": 1, "micro_batches": 2, "schedule": "ZBH1"},
}


def run(
    rank: int, world_size: int, folder: Path, task: str, strategy: str, scheme: str, bits: int, mixed: bool = False
) -> matrix.Found:
    """Trains six steps, of which the last four round."""
    matrix.register_data_parallel()
    # No group of 32 divides the 48 features of this layer.
    skip = ["**.down_proj"] if task == "CausalLM" else []

    def rounding() -> list[Any]:
        options: dict[str, Any] = {"start_bits": bits or None, "skip": skip}
        if mixed:  # Each layer drops its bits after one to five steps.
            options |= {"mixed_bits": True, "period": 1}
        return [Quantise(scheme, when="aware", start="30%", report=False, **options)] if scheme else []

    matrix.BESIDE["tested"] = matrix.With(rounding, trainer=(("precision", "32-true" if bits else "64-true"),))
    matrix.STRATEGIES.update({name: (MeshStrategy, options) for name, options in MESHES.items()})
    found = matrix.run_cell(folder, task, "tested", strategy, world_size)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("texts")
    matrix.prepare(home)
    return home


#: Task, strategy, scheme and bits at the start; with those, in single precision.
ORDINARY = [("ImageClassifier", "mesh tp", "int8", 0)]
SLOW = [
    ("CausalLM", "fsdp", "int4_weights", 8),
    *(("ImageClassifier", name, "int8", 0) for name in ("ddp", "zero3", "fsdp", "mesh pp", "zero bubble")),
    *(("ImageClassifier", name, "int8", 0) for name in ("sequence parallel", "mesh, compiled", "tp, compiled")),
    *(("CausalLM", name, "int8", 0) for name in ("mesh tp", "mesh cp", "mesh pp", "sequence parallel")),
    ("ImageClassifier", "deepspeed_3", "int4_weights", 8),
    ("ImageClassifier", "zero3", "int4_weights", 8),
]


@pytest.mark.parametrize(
    ("task", "strategy", "scheme", "bits"),
    [*ORDINARY, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_losses_are_those_of_one_process(folder: Path, task: str, strategy: str, scheme: str, bits: int) -> None:
    (alone,) = run_distributed(run, 1, folder, task, "", scheme, bits, backend=None, timeout=250)
    (plain,) = run_distributed(run, 1, folder, task, "", "", bits, backend=None, timeout=250)
    ranks = run_distributed(run, 2, folder, task, strategy, scheme, bits, backend=None, timeout=250)
    assert [cell.error or cell.refusal for cell in [*ranks, alone]] == [""] * 3
    merged = merge_records([cell.record for cell in ranks])
    assert len(merged.steps) == len(alone.record.steps) == 6
    for mine, theirs in zip(merged.steps, alone.record.steps, strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-5 if bits else 1e-7)
        assert all(norm == pytest.approx(theirs.norms[0], rel=1e-3 if bits else 1e-6) for norm in mine.norms)
    losses = [[step.loss for step in cell.record.steps] for cell in (alone, plain)]
    assert losses[0][:2] == losses[1][:2]
    assert all(abs(one / other - 1) > 2e-6 for one, other in zip(losses[0][2:], losses[1][2:], strict=True))


@pytest.mark.slow
def test_bits_of_layers_by_their_curvature_are_those_of_one_process(folder: Path) -> None:
    cases = [("CausalLM", "fsdp"), ("ImageClassifier", "zero3"), ("CausalLM", "mesh pp"), ("CausalLM", "deepspeed_3")]
    for task in ("CausalLM", "ImageClassifier"):
        (alone,) = run_distributed(run, 1, folder, task, "", "int4_weights", 8, True, backend=None, timeout=250)
        (alike,) = run_distributed(run, 1, folder, task, "", "int4_weights", 8, backend=None, timeout=250)
        curves = [[step.loss for step in cell.record.steps] for cell in (alone, alike)]
        assert curves[0][:3] == curves[1][:3]
        assert curves[0][3:] != curves[1][3:]
        for _, strategy in (case for case in cases if case[0] == task):
            found = run_distributed(run, 2, folder, task, strategy, "int4_weights", 8, True, backend=None, timeout=250)
            assert [cell.error or cell.refusal for cell in found] == [""] * 2
            merged = merge_records([cell.record for cell in found])
            assert [step.loss for step in merged.steps] == pytest.approx(curves[0], rel=1e-5)


def test_a_group_larger_than_a_slice_of_a_row_is_refused(folder: Path) -> None:
    """A row of 32 features is cut into two slices of 16."""
    for cell in run_distributed(
        run, 2, folder, "ImageClassifier", "mesh tp", "int4_weights", 0, backend=None, timeout=250
    ):
        assert "got 32 for 32 / 2 input features of blocks.0.attn.qkv" in cell.refusal
        assert cell.refusal.endswith("set tp=1")
