"""FLOPs and bytes from the shapes in a trace, beside torch's counter."""

import json

import pytest
import timm
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from dlo_plugins.profile.operations import Work, operator_cost
from dlo_plugins.profile.step_breakdown import HostFrames, Phases, parse_trace


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
