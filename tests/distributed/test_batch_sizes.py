"""A batch size that follows the noise, on two gloo ranks: the same on both, and exact after a resume."""

import signal

import pytest

CONFIG = """
trainer:
  max_epochs: 4
  log_every_n_steps: 1
  accelerator: cpu
  callbacks:
    - class_path: OneCycle
      init_args: {max_lr: 1.0e-3}
    - class_path: DynamicBatchSize
      init_args: {noise_scale: {max_batch_size: 512, every: 3, smoothing: 0.5}, max_micro_batch: 64}
model:
  class_path: ImageClassifier
  init_args:
    model: vit_tiny_patch16_224
    model_args: {patch_size: 8, embed_dim: 48, depth: 2, num_heads: 2, drop_path_rate: 0.2}
    schedule: constant
data: {class_path: DigitsData, init_args: {image_size: 16, batch_size: 64}}
"""
RANKS = ["--trainer.strategy", "ddp", "--trainer.devices", "2"]


@pytest.mark.slow
def test_two_ranks_follow_the_noise_together_and_resume_exactly(dlo, curve):
    (dlo.folder / "noise.yaml").write_text(CONFIG)
    command = ["fit", "--config", "noise.yaml", *RANKS]
    whole, cut = (dlo.folder / "runs" / name / "version_0" for name in ("whole", "cut"))
    dlo(*command, "--run.name", "whole")
    dlo.interrupt(signal.SIGTERM, cut, *command, "--run.name", "cut")
    dlo(*command, "--run.name", "cut", "--ckpt_path", "last")
    assert curve(cut) == curve(whole)
    assert curve(cut, "batch/size") == curve(whole, "batch/size")
    sizes = list(curve(whole, "batch/size").values())
    assert sizes == sorted(sizes)
    assert sizes[-1] > sizes[0] == 64
    assert all(value > 0 for value in curve(whole, "batch/noise_scale").values())
