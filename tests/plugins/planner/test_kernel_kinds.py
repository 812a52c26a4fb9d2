"""Kinds of kernels: found from operators and the order of memory, priced by a machine's file, measured on a device."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_framework.mesh import MeshSpec
from dlo_plugins.planner import kernel_measurement
from dlo_plugins.planner.kernel_kind import KINDS, kind_of_fused
from dlo_plugins.planner.kernel_measurement import kernel_calls, measure_kinds
from dlo_plugins.planner.layout import Layout, StateFormat
from dlo_plugins.planner.machine import _FOLDER, load_machine, parse_machine
from dlo_plugins.planner.model_profile import ModelProfile, profile_model
from dlo_plugins.planner.operation_recorder import Recorder, summarise
from dlo_plugins.planner.recorded_operation import Operation, Record
from dlo_plugins.planner.step_time import TimeModel
from dlo_plugins.planner.work import Amount, Kernel, Share, Work
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.llm.causal_lm import CausalLM

X = torch.ones(4, 8, 16)
WEIGHT, BIAS = torch.ones(16), torch.zeros(16)


def _recorded(run: Callable[[], object]) -> list[Operation]:
    recorder = Recorder(lambda _: ("", False))
    with recorder:
        recorder.record = record = Record()
        run()
    return record.operations


def _norm_backward() -> None:
    x = X.clone().requires_grad_()
    nn.functional.layer_norm(x, [16], WEIGHT, BIAS).backward(X)


@pytest.mark.parametrize(
    ("run", "kind"),
    [
        (lambda: X.clone(), "copy"),
        (lambda: X[:, :1].expand(4, 8, 16).contiguous(), "copy"),
        (lambda: X.transpose(0, 1).contiguous(), "strided"),
        (lambda: X + X.transpose(0, 1).contiguous().transpose(0, 1), "strided"),
        (lambda: torch.cat([X, X], dim=-1), "strided"),
        (lambda: torch.stack([X, X]), "strided"),
        (lambda: X.bfloat16(), "cast"),
        (lambda: X.transpose(0, 1).to(torch.bfloat16, memory_format=torch.contiguous_format), "strided"),
        (lambda: X + X, "pointwise"),
        (lambda: X + WEIGHT, "pointwise"),
        (lambda: X.transpose(0, 1) + X.transpose(0, 1), "pointwise"),
        (lambda: nn.functional.gelu(X), "activation"),
        (lambda: nn.functional.layer_norm(X, [16], WEIGHT, BIAS), "norm"),
        (_norm_backward, "norm_backward"),
        (lambda: X.softmax(-1), "softmax"),
        (lambda: X.sum((0, 1)), "reduction"),
        (lambda: nn.functional.embedding(torch.tensor([0, 1]), X[0]), "gather"),
    ],
)
def test_a_kind_follows_from_the_operator_and_the_order_of_memory(run: Callable[[], object], kind: str) -> None:
    assert _recorded(run)[-1].kind == kind


def test_parts_of_one_tensor_are_read_each_and_the_same_part_once() -> None:
    (joined,) = _recorded(lambda: torch.cat(X.chunk(2, dim=-1)[::-1], dim=-1))
    (squared,) = _recorded(lambda: X * X)
    assert joined.moved == squared.moved == 2 * X.nbytes


def test_a_compiled_kernel_has_one_kind_and_reads_and_writes_once() -> None:
    first, last = torch.ones(32, 64), torch.ones(64, 8)

    def run() -> Tensor:
        x = nn.functional.gelu(torch.mm(first, first.T))
        return torch.mm(torch.cat([x, x + 1], dim=-1), last)

    ((eager, compiled),) = [(work.eager, work.compiled) for work in [summarise(_recorded(run), set())]]
    assert {kernel.kind for kernel, _ in eager} == {"activation", "pointwise", "strided"}
    ((kernel, count),) = compiled
    assert (kernel.kind, count) == ("activation", 1)
    assert kernel.moved.total == 4 * (32 * 32 + 32 * 64)  # It reads the product, and writes the joined tensors.
    assert sum(count * kernel.moved.total for kernel, count in eager) == 4 * (2 + 2 + 2 + 2) * 32 * 32
    assert [kind_of_fused(kinds) for kinds in (["cast", "strided"], ["pointwise", "strided"])] == [
        "strided",
        "pointwise",
    ]


def test_a_compiled_normalisation_writes_the_dtype_of_the_product_alone() -> None:
    weight = torch.ones(16, 4, dtype=torch.bfloat16)
    work = summarise(
        _recorded(lambda: nn.functional.layer_norm(X, [16], WEIGHT, BIAS).bfloat16().reshape(32, 16) @ weight), set()
    )
    ((kernel, _),) = work.compiled
    assert kernel.kind == "norm"
    assert kernel.moved.total == X.numel() * (4 + 2) + 4 * (16 + 16)


def _content() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load(_FOLDER.joinpath("h100.yaml").read_text())
    return content


def _seconds(content: dict[str, Any], kind: Any, size: float) -> float:
    machine = replace(parse_machine(content, "mine.yaml"), launch=0.0)
    work = Work(eager=((Kernel(kind, Amount(0.0, size)), 3),))
    return machine.work_seconds(work, Share(), "bfloat16", fused=False)


def test_a_machine_prices_a_kind_by_its_own_bandwidth_and_others_as_a_copy() -> None:
    content = _content()
    copied = content["bandwidth"]["value"] * content["bandwidth_efficiency"]["value"]
    assert _seconds(content, "norm", 1e9) == pytest.approx(3e9 / copied)
    content["kinds"] = {"norm": {"value": 0.5, "source": "a test"}, "cast": {1e6: 2.0, 1e8: 0.5}}
    assert _seconds(content, "norm", 1e9) == pytest.approx(2 * 3e9 / copied)
    assert _seconds(content, "gather", 1e9) == pytest.approx(3e9 / copied)
    ratios = [3 * size / copied / _seconds(content, "cast", size) for size in (1e5, 1e6, 1e7, 1e8, 1e9)]
    assert ratios == pytest.approx([2.0, 2.0, 1.0, 0.5, 0.5])
    assert parse_machine(content, "mine.yaml").sources["kinds.norm"] == "a test"
    content["kinds"]["copy"] = 0.25
    assert _seconds(content, "gather", 1e9) == pytest.approx(4 * 3e9 / copied)
    assert _seconds(content, "norm", 1e9) == pytest.approx(2 * 3e9 / copied)


@pytest.mark.parametrize(
    ("kinds", "message"),
    [
        ({"nrom": 0.5}, r"kinds must be of copy, .*, got nrom; did you mean 'norm'"),
        ({"norm": "fast"}, r"kinds\.norm must be a bandwidth over a large copy's, .*, got 'fast'"),
        ({"norm": {"value": -1.0}}, r"kinds\.norm must be"),
        ({"norm": {0: 1.0}}, r"kinds\.norm must be"),
        ([0.5], r"kinds must be a mapping of kinds of kernels, got \[0\.5\]"),
    ],
)
def test_bad_kinds_are_refused(kinds: Any, message: str) -> None:
    with pytest.raises(DloError, match=message):
        parse_machine(_content() | {"kinds": kinds}, "mine.yaml")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_kind_is_measured_by_kernels_of_that_kind(dtype: torch.dtype) -> None:
    for kind in KINDS[:-1]:
        for call in kernel_calls(kind, 1 << 20, torch.device("cpu"), dtype):
            (operation,) = _recorded(call.run)
            assert operation.kind == kind
            assert call.moved == pytest.approx(operation.moved, rel=0.03)  # Weights, and sums over a dim.


def test_measured_rates_leave_out_the_cost_of_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that takes 1 ms a call and 1 ns a byte: rates are those of the bytes, where these take as long."""
    monkeypatch.setattr(kernel_measurement, "_SIZES", {"cpu": (1 << 14, 1 << 22)})
    monkeypatch.setattr(kernel_measurement, "_ENOUGH", 1)
    sizes: list[float] = []
    real = kernel_measurement.kernel_calls

    def calls(*args: Any) -> list[kernel_measurement.KernelCall]:
        found = real(*args)
        sizes[:] = [sum(call.moved for call in found), len(found)]
        return found

    def seconds(run: Callable[[], object]) -> float:
        run()
        return 1e-3 * sizes[1] + 1e-9 * sizes[0]

    monkeypatch.setattr(kernel_measurement, "kernel_calls", calls)
    found = measure_kinds(["copy", "reduction"], torch.device("cpu"), torch.float32, seconds)
    assert set(found) == {("copy", float(1 << 22)), ("reduction", float(1 << 21))}
    assert list(found.values()) == pytest.approx([1e9, 1e9], rel=0.05)


VIT = {"model": "vit_base_patch16_224", "num_classes": 1000, "image_size": 224}
LLAMA = {
    **{"model_type": "llama", "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12},
    **{"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32_768, "max_position_embeddings": 1024},
    "tie_word_embeddings": False,
}


class _Rows:
    seq_len = 1024


def _step(profile: ModelProfile, rows: int, compiled: bool) -> float:
    state = StateFormat("bfloat16", 4, 4, 4, 4, 8.0, autocasts=True, fused=compiled)
    model = TimeModel(profile, load_machine("h200"), state)
    return model.step(Layout(MeshSpec(dp_shard=1), rows, 1, zero=0)).total


@pytest.mark.parametrize(
    ("task", "rows", "compiled", "measured", "bar"),
    [
        # Kinds of the H200's file are from this run: the row shows that they are used, not that they hold.
        (ImageClassifier(**VIT), 256, (False, True), (95.4e-3, 75.2e-3), 0.05),  # type: ignore[arg-type]
        # Nothing is from this one. Eager, 1,300 kernels wait for the host.
        (CausalLM(config=LLAMA), 8, (True,), (29.2e-3,), 0.05),
    ],
)
def test_steps_on_an_h200(
    task: Any, rows: int, compiled: tuple[bool, ...], measured: tuple[float, ...], bar: float
) -> None:
    """benchmarks/results/h200_2026-11-26.md."""
    task = task.on_meta()
    profile = profile_model(
        task, task.example_batch(_Rows()), task.parallel_plan(), dtype=torch.float32, autocast=torch.bfloat16
    )
    assert [_step(profile, rows, way) for way in compiled] == pytest.approx(list(measured), rel=bar)
