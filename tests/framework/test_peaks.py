"""The peak that MFU is held against: that of the accelerator's data sheet, by the name that CUDA tells."""

from types import SimpleNamespace

import pytest
import torch

from dlo_framework import costs
from dlo_framework.costs import known_peak, peak_flops

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
def test_of_parts_and_of_other_devices_the_table_knows_nothing(name):
    assert known_peak(name) is None


@pytest.mark.parametrize("name", OTHERS[:5])
def test_what_lightning_would_take_for_another_device_has_no_peak_in_half_precision(name, monkeypatch):
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
