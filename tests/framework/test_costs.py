"""FLOPs of a Llama's step are the same whoever counts them; the peak that MFU is held against."""

import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._higher_order_ops.scan import scan
from torch.nn.attention.flex_attention import flex_attention

from dlo_framework import costs
from dlo_framework.costs import FlopCounter, OperatorCounter, known_peak, peak_flops
from dlo_plugins.parallel.pipeline.model_stages import flop_costs
from dlo_plugins.plan.model_profile import profile_model
from dlo_tasks.language.causal_lm import CausalLM

ROWS, LENGTH = 2, 16
LLAMA = {
    **{"model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": LENGTH},
}


@pytest.fixture(scope="module")
def task() -> CausalLM:
    found = CausalLM(config=LLAMA)
    found.configure_model()
    return found


@pytest.fixture(scope="module")
def batch() -> dict[str, torch.Tensor]:
    tokens = torch.randint(96, (ROWS, LENGTH))
    return {"input_ids": tokens, "labels": tokens.clone()}


def _counted(module: Any, step: Any) -> float:
    counter = FlopCounter()
    counter.count_first()
    counter.start(module, ((LENGTH,),))
    step().backward()
    counter.stop(ROWS)
    return counter.per_sample


def _step(task: CausalLM, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    args, kwargs = task.inputs(batch)
    return task.loss(task(*args, **kwargs), batch)


def test_a_llamas_step_counts_the_same_alone_with_our_loss_and_compiled(task: CausalLM, batch: Any) -> None:
    alone = _counted(nn.Module(), lambda: task.model(**batch).loss)
    products = sum(p.numel() for n, p in task.model.named_parameters() if p.ndim == 2 and "embed" not in n)
    attention = 2 * 2 * LENGTH * LENGTH * 32
    # Backward computes the scores again: five products for forward's two.
    assert alone == 6 * LENGTH * products + 2 * attention * (1 + 5 / 2)
    assert _counted(task, lambda: _step(task, batch)) == alone
    for block in task.model.model.layers:
        block.compile(backend="eager")
    assert _counted(task, lambda: _step(task, batch)) == alone


def test_the_balance_of_a_pipeline_and_a_plan_count_what_the_monitor_does(task: CausalLM, batch: Any) -> None:
    with OperatorCounter() as counter, torch.no_grad():
        task.model(batch["input_ids"])
    meta = CausalLM(config=LLAMA).on_meta()
    parts = flop_costs(meta.model, meta.parallel_plan(), lambda: meta.model(batch["input_ids"]))
    assert parts is not None
    assert parts.stem + sum(parts.blocks) + parts.head == counter.get_total_flops()
    profile = profile_model(meta, batch, meta.parallel_plan(), dtype=torch.float32, device="cpu")
    # A plan leaves out what the kernel does: the half of the scores that a causal mask hides.
    products = [item for part in profile.parts for work in (part.forward, part.backward) for item in work.products]
    found = sum(count * product.flops / product.fraction for product, count in products)
    assert found == pytest.approx(_counted(task, lambda: _step(task, batch)))


@pytest.mark.parametrize("make", [lambda attend: attend, functools.partial(torch.compile, backend="aot_eager")])
def test_a_users_flex_attention_runs_while_it_is_counted(make, monkeypatch):
    """torch (2.11 to 2.15) does not run it under a mode of operators, not even uncompiled."""
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)
    inputs = [torch.randn(1, 2, 128, 16, requires_grad=True) for _ in range(3)]
    with OperatorCounter() as counter:
        out = make(flex_attention)(*inputs)
        grads = torch.autograd.grad(out.sum(), inputs)
    expected = torch.nn.functional.scaled_dot_product_attention(*inputs)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(grads, torch.autograd.grad(expected.sum(), inputs))
    assert counter.get_total_flops() == 2 * 2 * 128 * 128 * (2 + 5) * 16


def test_an_operator_of_functions_without_a_formula_runs_and_has_no_mfu(caplog):
    def add(total, one):
        return total + one, total * one

    with OperatorCounter() as counter:
        total, _ = scan(add, torch.zeros(2), torch.ones(3, 2))
    assert total.tolist() == [3, 3]
    assert counter.refused
    assert "the FLOPs of scan are not known" in caplog.text


# --- the peak that MFU is held against: that of the accelerator's data sheet, by the name that CUDA tells ------------


#: TFLOP/s of dense products in bfloat16 (float16 where there is none), by names that torch.cuda.get_device_name tells.
HALF = {
    "Tesla V100-SXM2-16GB": 125,
    "Tesla V100S-PCIE-32GB": 130,
    "Tesla T4": 65,
    "A100-PCIE-40GB": 312,
    "NVIDIA A100 80GB PCIe": 312,
    "NVIDIA L4": 121,
    "NVIDIA L40S": 362.05,
    "NVIDIA GeForce RTX 3090": 71,
    "NVIDIA H100 80GB HBM3": 989.4,
    "NVIDIA H200 NVL": 835.5,
    "NVIDIA GH200 480GB": 989.4,
    "NVIDIA GB200": 2500,
}
#: Parts of an accelerator, slower kin, and others that no sheet was read of.
OTHERS = (
    *("NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100-SXM4-40GB MIG 3g.20gb", "NVIDIA GeForce RTX 4090 Laptop GPU"),
    *("NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 3090 Ti", "NVIDIA RTX A4000", "NVIDIA A16", "NVIDIA H20"),
    *("NVIDIA A800-SXM4-80GB", "NVIDIA H800", "Quadro T400", "AMD Instinct MI300X"),
)


def peak_on(name: str, precision: str, monkeypatch: pytest.MonkeyPatch) -> float | None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    # Lightning asks for what a device can.
    monkeypatch.setattr("lightning.fabric.accelerators.cuda._is_ampere_or_later", lambda: True)
    costs.device_peak.cache_clear()
    strategy = SimpleNamespace(root_device=torch.device("cuda", 0))
    return peak_flops(SimpleNamespace(strategy=strategy, precision=precision))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", HALF)
def test_in_half_precision_it_is_that_of_the_tensor_cores_without_sparsity(name, monkeypatch):
    without_bf16 = "V100" in name or "T4" in name
    found = peak_on(name, "16-mixed" if without_bf16 else "bf16-mixed", monkeypatch)
    assert found == pytest.approx(HALF[name] * 1e12)
    assert (peak_on(name, "bf16-true", monkeypatch) is None) == without_bf16


@pytest.mark.parametrize("name", OTHERS)
def test_of_parts_and_of_other_devices_the_table_knows_nothing(name, monkeypatch):
    assert known_peak(name) is None
    if name in OTHERS[:5]:  # Lightning would take them for another device.
        assert peak_on(name, "bf16-mixed", monkeypatch) is None


@pytest.mark.parametrize(
    ("name", "single", "tf32", "double"),
    [
        ("NVIDIA A100-SXM4-80GB", 19.5, 156, 19.5),
        ("NVIDIA H200", 66.9, 494.7, 66.9),
        ("NVIDIA L40S", 91.6, 183, None),
        ("Tesla V100-SXM2-32GB", 15.7, 15.7, 7.8),
    ],
)
def test_other_precisions_have_peaks_of_their_own(name, single, tf32, double, monkeypatch):
    assert peak_on(name, "32-true", monkeypatch) == single * 1e12
    assert peak_on(name, "64-true", monkeypatch) == (double and double * 1e12)
    assert peak_on(name, "transformer-engine", monkeypatch) is None
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert peak_on(name, "32-true", monkeypatch) == tf32 * 1e12
    finally:
        torch.set_float32_matmul_precision(before)


def test_lightning_is_asked_for_others(monkeypatch):
    assert peak_on("Quadro RTX 5000", "16-mixed", monkeypatch) == 89.2e12
    assert peak_on("NVIDIA GeForce RTX 4080", "32-true", monkeypatch) == 48.7e12
    assert peak_on("NVIDIA GeForce RTX 4080", "16-mixed", monkeypatch) is None
