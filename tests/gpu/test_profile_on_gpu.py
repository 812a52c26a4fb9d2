"""`dlo profile` on an accelerator: parts of the device's time, kernels with modules, memory, energy, NVTX ranges."""

import json

import pytest

CONFIG = """
trainer: {max_epochs: 1, log_every_n_steps: 5, accelerator: gpu, devices: 1, precision: bf16-mixed}
model:
  class_path: ImageClassifier
  init_args:
    model: vit_tiny_patch16_224
    model_args: {patch_size: 4, embed_dim: 192, depth: 6, num_heads: 3}
    schedule: constant
data: {class_path: DigitsData, init_args: {image_size: 32, batch_size: 128}}
"""
NVTX = ["--trainer.callbacks", "[{class_path: Profile, init_args: {wait: 2, warmup: 1, active: 2, formats: [nvtx]}}]"]


def test_the_devices_time_adds_up_and_kernels_belong_to_modules(dlo) -> None:
    (dlo.folder / "gpu.yaml").write_text(CONFIG)
    dlo("profile", "--config", "gpu.yaml", "--steps", "14")
    run = dlo.folder / "runs" / "gpu" / "profile" / "version_0"
    (rank,) = json.loads((run / "profile" / "report.0.json").read_text())["ranks"]
    assert sum(rank["kinds"].values()) == pytest.approx(rank["step_seconds"], rel=0.02)
    assert rank["kinds"]["matrix products"] > 0
    assert rank["kinds"]["attention"] > 0
    assert rank["modules"]["model.blocks.3.mlp.fc1"]["backward"] > 0
    assert rank["memory"]["on_device"]
    assert list((run / "profile").glob("*.memory.pickle"))
    energy = json.loads((run / "summary.json").read_text())["energy"]
    assert energy["joules"] is None or energy["joules"] > 0


def test_nvtx_ranges_run_without_tables(dlo) -> None:
    (dlo.folder / "gpu.yaml").write_text(CONFIG)
    dlo("fit", "--config", "gpu.yaml", *NVTX, "--trainer.max_steps", "8")
    assert not list((dlo.folder / "runs" / "gpu").rglob("report*"))
