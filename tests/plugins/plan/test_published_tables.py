"""Predicted times and memory of published tables; the models are profiled as a user's, and nothing is fitted to a row.

Narayanan et al., SC 2021, arXiv 2104.04473, table 1 (with IDRIS' TFLOPS); Korthikanti et al. 2022, arXiv 2205.05198,
table 5 and figure 1; Liang et al. 2024, arXiv 2410.06511 (torchtitan), tables 2 to 4.
"""

from dataclasses import replace
from statistics import mean

import pytest

from dlo_framework.mesh import MeshSpec
from dlo_plugins.plan.layout import Layout, StateFormat
from dlo_plugins.plan.machine import Machine, load_machine
from dlo_plugins.plan.rank_memory import MemoryModel
from dlo_plugins.plan.step_time import TimeModel
from support.planner_models import gpt, llama

GIB = 2**30
#: Megatron's kernels are fused by hand, and gradients are reduced after backward.
MEGATRON_2021 = StateFormat("float16", 2, 2, 2, 2, 16.0, fused=True, overlaps=False)
MEGATRON_2022 = replace(MEGATRON_2021, gradient=4, state=12.0, accumulates_in_products=True, frees_sent=True)
TORCHTITAN = StateFormat()

#: TP, PP, stages of a rank, micro-batch, global batch, layers, width, heads, GPUs, seconds.
SC21 = {
    "1.7B": (1, 1, 1, 16, 512, 24, 2304, 24, 32, 3.53),
    "3.6B": (2, 1, 1, 16, 512, 30, 3072, 32, 64, 3.70),
    "7.5B": (4, 1, 1, 16, 512, 36, 4096, 32, 128, 3.70),
    "18B": (8, 1, 1, 8, 1024, 40, 6144, 48, 256, 9.40),
    "39B": (8, 2, 1, 4, 1536, 48, 8192, 64, 512, 14.45),
    "76B": (8, 4, 3, 2, 1792, 60, 10240, 80, 1024, 16.06),
    "145B": (8, 8, 2, 2, 2304, 80, 12288, 96, 1536, 24.82),
    "310B": (8, 16, 2, 1, 2160, 96, 16384, 128, 1920, 37.61),
    "530B": (8, 35, 3, 1, 2520, 105, 20480, 128, 2520, 54.08),
    "1T": (8, 64, 1, 1, 3072, 128, 25600, 160, 3072, 102.63),
}
#: PP, stages of a rank, micro-batch, global batch, layers, width, heads, seconds with full recomputation, and with
#: selective and sequence parallelism; GiB of weights and optimizer, of activations without either, and with both.
KORTHIKANTI = {
    "22B": (1, 1, 4, 4, 48, 6144, 64, 1.42, 1.10, 45.6, 59.3, 9.6),
    "175B": (8, 3, 1, 64, 96, 12288, 96, 18.13, 13.75, 45.6, 66.8, 12.4),
    "530B": (35, 3, 1, 280, 105, 20480, 128, 49.05, 37.83, 31.6, 114.0, 23.1),
    "1T": (64, 1, 1, 512, 128, 25600, 160, 94.42, 71.49, 33.0, 131.3, 26.6),
}


def _schedule(pp: int, chunks: int) -> str:
    return "Interleaved1F1B" if chunks > 1 else "1F1B"


def _sc21_error(name: str, machine: Machine) -> float:
    tp, pp, chunks, rows, batch, layers, width, heads, gpus, measured = SC21[name]
    data = gpus // tp // pp
    mesh = MeshSpec(pp=pp, dp_replicate=data, dp_shard=1, tp=tp)
    layout = Layout(mesh, rows, batch // data // rows, _schedule(pp, chunks), chunks, None, 0, False, False, "full")
    return TimeModel(gpt(width, layers, heads), machine, MEGATRON_2021).step(layout).total / measured - 1


def _korthikanti_layout(name: str, sequence_parallel: bool, recompute: str) -> Layout:
    pp, chunks, rows, batch, *_ = KORTHIKANTI[name]
    mesh = MeshSpec(pp=pp, dp_shard=1, tp=8)
    return Layout(
        mesh, rows, batch // rows, _schedule(pp, chunks), chunks, None, 0, False, sequence_parallel, recompute
    )


def _korthikanti_times(name: str) -> list[float]:
    layers, width, heads, full, selective = KORTHIKANTI[name][4:9]
    model = TimeModel(gpt(int(width), int(layers), int(heads)), load_machine("a100"), MEGATRON_2022)
    layouts = (_korthikanti_layout(name, False, "full"), _korthikanti_layout(name, True, "attention"))
    return [model.step(layout).total / seconds - 1 for layout, seconds in zip(layouts, (full, selective), strict=True)]


def _korthikanti_memory(name: str) -> list[float]:
    layers, width, heads, _, _, weights, without, with_both = KORTHIKANTI[name][4:]
    memory = MemoryModel(TimeModel(gpt(int(width), int(layers), int(heads)), load_machine("a100"), MEGATRON_2022))
    plain = memory.ranks(_korthikanti_layout(name, False, "none"))
    both = memory.ranks(_korthikanti_layout(name, True, "attention"))
    found = [plain[len(plain) // 2].state, max(r.activations for r in plain), max(r.activations for r in both)]
    return [value / GIB / gib - 1 for value, gib in zip(found, (weights, without, with_both), strict=True)]


@pytest.mark.slow
def test_megatron_from_data_sheets() -> None:
    machine = load_machine("a100")
    errors = {name: _sc21_error(name, machine) for name in SC21}
    assert mean(map(abs, errors.values())) < 0.06
    assert max(map(abs, errors.values())) < 0.1


def test_a_row_of_korthikanti_from_data_sheets() -> None:
    assert max(map(abs, _korthikanti_times("22B"))) < 0.07
    state, without, with_both = _korthikanti_memory("22B")
    assert abs(state) < 0.02
    assert max(abs(without), abs(with_both)) < 0.05


@pytest.mark.slow
def test_all_of_korthikanti_from_data_sheets() -> None:
    times = [abs(error) for name in KORTHIKANTI for error in _korthikanti_times(name)]
    assert mean(times) < 0.04
    assert max(times) < 0.07
    memory = [_korthikanti_memory(name) for name in KORTHIKANTI]
    assert max(abs(row[0]) for row in memory) < 0.02
    activations = [abs(error) for row in memory for error in row[1:]]
    assert mean(activations) < 0.015
    assert max(activations) < 0.05


#: GPUs, whether compiled, tokens a second and GPU, GiB: Llama 3.1 8B, FSDP, batch 2 of 8,192 tokens.
TITAN_8B = ((8, False, 5762, 82.4), (8, True, 6667, 77.0), (128, False, 5605, 67.0), (128, True, 6514, 62.0))


def test_torchtitan_calibrated_on_one_row() -> None:
    """Their H100 have 96 GB of slower memory and 500 W, without a data sheet: one row gives the efficiency."""
    profile = llama(4096, 14336, 32, 32, 8)
    profile = replace(profile, max_logits=None)
    machine = replace(load_machine("h100"), bandwidth=2.4e12)

    def predict(machine: Machine, gpus: int, compiled: bool, recompute: str = "alternate") -> tuple[float, float]:
        times = TimeModel(profile, machine, replace(TORCHTITAN, fused=compiled, compiled=compiled))
        layout = Layout(MeshSpec(dp_shard=gpus), 2, 1, recompute=recompute)
        memory = MemoryModel(times).largest(layout)
        return 2 * 8192 / times.step(layout).total, (memory.total - memory.overhead) / GIB

    wanted = TITAN_8B[0][2]
    low, high = 0.3, 0.8
    for _ in range(30):
        middle = (low + high) / 2
        is_fast = predict(replace(machine, efficiency=middle), 8, False)[0] > wanted
        low, high = (low, middle) if is_fast else (middle, high)
    machine = replace(machine, efficiency=high)
    found = [predict(machine, gpus, compiled) for gpus, compiled, *_ in TITAN_8B]
    speeds = [abs(tokens / row[2] - 1) for (tokens, _), row in zip(found, TITAN_8B, strict=True)]
    sizes = [abs(gib / row[3] - 1) for (_, gib), row in zip(found, TITAN_8B, strict=True)]
    assert max(speeds) < 0.10
    assert mean(sizes) < 0.03
    assert max(sizes) < 0.05
    modes = [predict(machine, 8, False, mode)[0] for mode in ("none", "selective", "full")]
    assert modes == sorted(modes, reverse=True)
