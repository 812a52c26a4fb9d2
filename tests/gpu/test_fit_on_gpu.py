"""The command on an accelerator: `pytest -m gpu` on a machine that has one."""

import json

import pytest
import torch

from dlo_framework.costs import device_peak

CONFIG = """
trainer: {max_epochs: 4, log_every_n_steps: 5, accelerator: gpu, devices: 1, precision: PRECISION}
model:
  class_path: ImageClassifier
  init_args:
    model: vit_tiny_patch16_224
    model_args: {patch_size: 4, embed_dim: 96, depth: 4, num_heads: 3, drop_path_rate: 0.2}
    ema_decay: 0.9
    schedule: constant # one that ends with training would follow max_steps
    channels_last: true
data: {class_path: DigitsData, init_args: {image_size: 16, batch_size: 64, num_workers: 2}}
"""


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "16-mixed"])
def test_it_learns_and_logs_what_the_accelerator_does(dlo, curve, precision):
    (dlo.folder / "gpu.yaml").write_text(CONFIG.replace("PRECISION", precision))
    dlo("fit", "--config", "gpu.yaml")
    run = dlo.folder / "runs" / "gpu" / "version_0"
    losses = curve(run)
    assert losses[max(losses)] < 0.95 * losses[min(losses)]
    assert max(curve(run, "speed/tflops").values()) > 0
    assert max(curve(run, "memory/peak_gb").values()) > 0
    summary = json.loads((run / "summary.json").read_text())
    assert summary["accelerator"] == "CUDAAccelerator"
    assert summary["precision"] == precision
    if precision == "bf16-mixed" and device_peak(torch.device("cuda", 0), torch.bfloat16, tf32=False):
        assert all(0 < value < 1 for value in curve(run, "speed/mfu").values())


def test_a_run_resumes_with_the_accelerators_random_state(dlo, curve):
    """Drop path draws on the device: the losses after a resume are those of a run that was not interrupted."""
    # Without it, sums in another order show in the losses after twenty steps.
    config = CONFIG.replace("PRECISION", "32-true, deterministic: warn")
    (dlo.folder / "gpu.yaml").write_text(config)
    dlo("fit", "--config", "gpu.yaml", "--run.name", "whole")
    dlo("fit", "--config", "gpu.yaml", "--run.name", "cut", "--trainer.max_steps", "31")
    dlo("fit", "--config", "gpu.yaml", "--run.name", "cut", "--ckpt_path", "last")
    whole, cut = (curve(dlo.folder / "runs" / name / "version_0") for name in ("whole", "cut"))
    shared = sorted(set(whole) & set(cut))
    assert len(shared) > 10
    assert [cut[step] for step in shared] == pytest.approx([whole[step] for step in shared], rel=1e-5)
