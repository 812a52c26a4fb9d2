"""Where the time of made-up traces goes, what operations cost, and which rank is slow."""

import json
from typing import Any

import pytest
import timm
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from dlo_plugins.profile.operations import (
    ATTENTION,
    COPIES,
    DATA,
    ELEMENTWISE,
    EXPOSED,
    HOST,
    KINDS,
    MATRIX,
    NORMALISATION,
    OPTIMIZER,
    Work,
    operator_cost,
)  # fmt: skip
from dlo_plugins.profile.rank_profile import find_straggler, memory_timeline
from dlo_plugins.profile.step_breakdown import (
    MARK,
    MODULE,
    Breakdown,
    HostFrames,
    Phases,
    StepTime,
    break_down,
    parse_trace,
)


def op(name: str, start: float, end: float, category: str = "cpu_op", thread: int = 1, **args: Any) -> dict[str, Any]:
    given = {key.replace("_", " "): value for key, value in args.items()}
    return {"ph": "X", "cat": category, "name": name, "tid": thread, "pid": 1, "ts": start, "dur": end - start,
            "args": given}  # fmt: skip


def mark(label: str, at: float) -> dict[str, Any]:
    return op(MARK + label, at - 0.001, at, "user_annotation")


def broken(events: list[dict[str, Any]]) -> Breakdown:
    trace = parse_trace(events)
    phases = Phases(trace)
    return break_down(trace, phases, HostFrames(trace, phases))


def micros(found: Breakdown) -> dict[str, float]:
    return {kind: round(found.kind(kind) * 1e6, 1) for kind in KINDS if found.kind(kind) > 5e-8}


def steps_of_a_cpu() -> list[dict[str, Any]]:
    """One step of 1,000 us: 100 fetch, forward of a module, backward, optimizer, and a wait for a collective."""
    return [
        mark("step 7", 0),
        mark("data", 10),
        mark("between", 110),
        mark("forward", 120),
        op(MODULE + "net.0", 130, 300, "user_annotation"),
        op("aten::linear", 140, 240, Sequence_number=5),
        op("aten::addmm", 150, 230, Sequence_number=5),
        op("aten::layer_norm", 250, 290, Sequence_number=6),
        op("aten::native_layer_norm", 255, 285, Sequence_number=6),
        op("aten::mul", 310, 330, Sequence_number=7),
        mark("backward", 400),
        op("autograd::engine::evaluate_function: NativeLayerNormBackward0", 410, 450, Sequence_number=6),
        op("aten::sum", 415, 445),
        op("autograd::engine::evaluate_function: AddmmBackward0", 460, 560, Sequence_number=5),
        op("AddmmBackward0", 465, 555, Sequence_number=5),
        op("aten::mm", 470, 550),
        mark("between", 600),
        # In flight since 520, it ends at 700: the host computes until 560, and waits from 600 on, when nothing runs.
        op("gloo:all_reduce", 520, 700, "user_annotation", thread=2),
        op("aten::copy_", 700, 720),
        mark("optimizer", 800),
        op("aten::add_", 810, 890),
        mark("between", 900),
        mark("end 7", 1000),
    ]


def test_each_moment_of_a_step_counts_once() -> None:
    found = broken(steps_of_a_cpu())
    (step,) = found.steps
    assert step.number == 7
    assert step.wall == pytest.approx(1e-3, rel=1e-6)
    assert sum(step.kinds.values()) == pytest.approx(step.wall, rel=1e-9)
    assert micros(found) == {
        MATRIX: 180.0,  # 100 of linear, 80 of mm
        NORMALISATION: 40.0 + 40.0,  # the node's operators too, by the kind of its forward
        ELEMENTWISE: 20.0,
        COPIES: 20.0,
        EXPOSED: 140.0,  # 560 to 700
        OPTIMIZER: 100.0,
        DATA: 100.0,
        HOST: 1000 - 180 - 80 - 20 - 20 - 140 - 100 - 100,
    }
    assert found.hidden == pytest.approx(40e-6)
    assert not found.on_device


def test_a_backward_belongs_to_the_module_of_its_forward() -> None:
    found = broken(steps_of_a_cpu())
    net = found.modules["net.0"]
    assert net.forward == pytest.approx(170e-6)
    assert net.backward == pytest.approx(140e-6)  # both nodes
    assert found.modules["(data loader)"].seconds == pytest.approx(100e-6)
    assert sum(module.seconds for module in found.modules.values()) == pytest.approx(found.wall, rel=1e-9)


def test_a_collective_that_ends_later_is_not_waited_for() -> None:
    events = [
        mark("step 1", 0),
        op("aten::mm", 10, 100),
        op("gloo:all_reduce", 20, 400, "user_annotation", thread=2),  # It runs on while the host goes on.
        op("aten::mm", 200, 500),
        mark("end 1", 600),
    ]
    found = broken(events)
    assert micros(found) == {MATRIX: 390.0, HOST: 210.0}
    assert found.hidden == pytest.approx(380e-6)


def kernel(name: str, start: float, end: float, operator: int, category: str = "kernel") -> dict[str, Any]:
    return op(name, start, end, category, thread=7, External_id=operator)


def step_of_a_gpu() -> list[dict[str, Any]]:
    """The host runs ahead; kernels follow, in the form of the trace of an NVIDIA GPU."""
    return [
        mark("step 3", 0),
        mark("data", 5),
        mark("between", 25),
        mark("forward", 30),
        op(MODULE + "block.attn", 30, 60, "user_annotation"),
        op("aten::scaled_dot_product_attention", 32, 50, Sequence_number=3, External_id=11),
        op("cudaLaunchKernel", 40, 45, "cuda_runtime", External_id=11, correlation=1),
        op("aten::mm", 52, 58, Sequence_number=4, External_id=12),
        mark("backward", 70),
        op("autograd::engine::evaluate_function: MmBackward0", 72, 90, thread=3, Sequence_number=4, External_id=13),
        op("aten::mm", 74, 88, thread=3, External_id=14),
        op("c10d::allreduce_", 91, 93, thread=3, External_id=15),
        mark("between", 95),
        mark("optimizer", 96),
        op("aten::_foreach_add_", 97, 99, External_id=16),
        mark("between", 99),
        mark("end 3", 100),
        kernel("pytorch_flash::flash_fwd_kernel", 50, 150, 11),
        kernel("sm90_xmma_gemm_bf16", 150, 250, 12),
        kernel("sm90_xmma_gemm_bf16", 250, 400, 14),
        kernel("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 300, 500, 15),  # 100 hidden, 100 exposed
        kernel("Memcpy DtoH (Device -> Pageable)", 500, 510, 17, "gpu_memcpy"),
        kernel("multi_tensor_apply_kernel", 520, 600, 16),
    ]


def test_an_accelerators_time_is_that_of_its_kernels() -> None:
    found = broken(step_of_a_gpu())
    assert found.on_device
    assert found.wall == pytest.approx(600e-6)  # to the end of the last kernel
    assert micros(found) == {
        ATTENTION: 100.0, MATRIX: 250.0, EXPOSED: 100.0, COPIES: 10.0, OPTIMIZER: 80.0, DATA: 20.0, HOST: 40.0,
    }  # fmt: skip
    assert found.hidden == pytest.approx(100e-6)
    assert found.modules["block.attn"].forward == pytest.approx(200e-6)
    assert found.modules["block.attn"].backward == pytest.approx(150e-6)  # of the mm in forward, on autograd's thread


def test_memory_at_the_peak_is_named_by_module_and_phase() -> None:
    def memory(at: float, size: int, address: int) -> dict[str, Any]:
        return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "tid": 1, "pid": 1, "ts": at,
                "args": {"Bytes": size, "Addr": address, "Device Type": 0, "Total Allocated": 0}}  # fmt: skip

    events = [
        mark("step 0", 0), mark("forward", 10), op(MODULE + "a", 20, 50, "user_annotation"), memory(30, 100, 1),
        op(MODULE + "b", 60, 90, "user_annotation"), memory(70, 300, 2), memory(80, -100, 1), memory(85, 150, 3),
        mark("backward", 100), memory(110, -300, 2), memory(120, 200, 4), mark("end 0", 200), memory(250, 9999, 9),
    ]  # fmt: skip
    trace = parse_trace(events)
    phases = Phases(trace)
    found = memory_timeline(trace, phases, HostFrames(trace, phases))
    assert found is not None
    assert (found.peak, found.phase) == (450, "forward")
    assert found.at_peak == {"b": 450}
    assert len(found.points) == 6  # not that after the step


# --- FLOPs and bytes from the shapes in a trace, beside torch's counter ----------------------------------------------


def traced_flops(run, path) -> float:
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as found:
        run()
    found.export_chrome_trace(str(path))
    trace = parse_trace(json.loads(path.read_text())["traceEvents"])
    return sum(frame.cost.flops for frame in HostFrames(trace, Phases(trace)).costed)


class Mixed(torch.nn.Module):
    """A strided convolution, batched products, an embedding, causal attention by the fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(3, 8, 3, stride=2, padding=1, groups=1)
        self.norm = torch.nn.BatchNorm2d(8)
        self.embed = torch.nn.Embedding(10, 16)
        self.out = torch.nn.Linear(16, 8)

    def forward(self, images, ids):
        x = self.norm(self.conv(images)).flatten(2)  # [B, 8, 64]
        y = self.embed(ids)  # [B, L, 16]
        heads = y.view(*ids.shape, 2, 8).transpose(1, 2)
        y = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2)
        return torch.bmm(self.out(y), x).sum()


def test_flops_are_those_of_torchs_counter(tmp_path) -> None:
    torch.manual_seed(0)
    vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, embed_dim=48, depth=2, num_heads=3)
    images = torch.randn(4, 3, 32, 32)
    mixed, small, ids = Mixed(), torch.randn(4, 3, 16, 16), torch.randint(10, (4, 12))
    cases = (
        # The CPU's fused attention: four products' worth forward, and two and a half times that backward.
        (lambda: vit(images).sum().backward(), 3.5 * 2 * 4 * 4 * 3 * 17 * 17 * 16),
        (lambda: mixed(small, ids).backward(), 3.5 * 4 * 4 * 2 * 12 * 12 * 8),
    )
    for run, attention in cases:
        run()
        with FlopCounterMode(display=False) as counter:
            run()
        if torch.ops.aten._scaled_dot_product_flash_attention_for_cpu in flop_registry:
            attention = 0.0  # torch's counter knows it, as of torch 2.15.
        expected = counter.get_total_flops() + attention
        assert traced_flops(run, tmp_path / "trace.json") == pytest.approx(expected, rel=1e-6)


def test_causal_attention_counts_half() -> None:
    dims = [[2, 4, 16, 8]] * 3
    args = {"Input Dims": [*dims, [], []], "Input type": ["float"] * 3 + ["Scalar", "Scalar"]}
    name = "aten::_scaled_dot_product_flash_attention_for_cpu"
    full = operator_cost(name, {**args, "Concrete Inputs": ["", "", "", "0.", "False"]})
    half = operator_cost(name, {**args, "Concrete Inputs": ["", "", "", "0.", "True"]})
    assert full.flops == 2 * half.flops == 2 * 2 * (2 * 4 * 16 * 16 * 8)


def test_elementwise_work_moves_its_operands_and_its_result() -> None:
    args = {"Input Dims": [[64, 32], [32], []], "Input type": ["c10::BFloat16", "c10::BFloat16", "Scalar"]}
    assert operator_cost("aten::add", args) == Work(0.0, 2 * (64 * 32 + 32 + 64 * 32))
    assert operator_cost("aten::add", {}) is None


# --- which rank is slow, and why, from made-up steps -----------------------------------------------------------------


def step(compute: float = 80, wait: float = 10, data: float = 2, host: float = 8) -> StepTime:
    kinds = {MATRIX: compute / 1e3, EXPOSED: wait / 1e3, DATA: data / 1e3, HOST: host / 1e3}
    return StepTime(0, sum(kinds.values()), kinds)


@pytest.mark.parametrize(
    ("slow", "others", "cause"),
    [
        (step(compute=180), step(wait=110), "compute"),
        (step(data=60), step(wait=68), "data"),
        (step(host=70), step(wait=72), "host"),
    ],
)
def test_the_rank_with_most_time_of_its_own_is_named_with_its_cause(slow, others, cause) -> None:
    found = find_straggler({0: [others] * 3, 1: [others] * 3, 2: [slow] * 3, 3: [others] * 3})
    assert (found.slowest, found.cause) == (2, cause)
    assert found.text.startswith("rank 2 is slow")
    assert found.by_cause[cause] == pytest.approx(found.excess)
    assert found.steps == (3, 3)


def test_links_are_named_where_every_rank_waits() -> None:
    found = find_straggler({rank: [step(compute=40, wait=60)] * 3 for rank in range(4)})
    assert (found.slowest, found.cause) == (None, "links")
    assert found.transfer == pytest.approx(0.06)


def test_equal_ranks_are_not_blamed() -> None:
    found = find_straggler({rank: [step(compute=80 + rank)] * 3 for rank in range(4)})
    assert (found.slowest, found.cause) == (None, "")
    assert "no rank stands out" in found.text


def test_a_rank_that_is_slow_in_half_of_the_steps_is_not_called_slow() -> None:
    found = find_straggler({0: [step(compute=300), step()] * 3, 1: [step(), step(compute=200)] * 3})
    assert (found.slowest, found.steps) == (None, (3, 6))


def test_a_loader_that_is_slow_on_every_rank_is_named_too() -> None:
    found = find_straggler({rank: [step(data=50)] * 3 for rank in range(2)})
    assert "every rank waits at least 50.0 ms for its data loader" in found.text
