"""A batch size that changes, on two gloo ranks: the curve of one process, and exact resuming."""

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
      init_args: {SIZES}
model:
  class_path: ImageClassifier
  init_args:
    model: vit_tiny_patch16_224
    model_args: {patch_size: 8, embed_dim: 48, depth: 2, num_heads: 2, drop_path_rate: DROP}
    schedule: constant
data: {class_path: DigitsData, init_args: {image_size: 16, batch_size: 64}}
"""
RANKS = ["--trainer.strategy", "ddp", "--trainer.devices", "2"]
# Points within epochs; of 256 samples a rank takes 2 x 64 where there are two, 4 x 64 where there is one.
SCHEDULE = 'schedule: {"700 samples": 128, "55%": 256}, max_micro_batch: 64, lr_rule: sqrt'
NOISE = "noise_scale: {max_batch_size: 512, every: 3, smoothing: 0.5}, max_micro_batch: 64"


@pytest.mark.slow  # The callback has tests of its own; tests/composition has it on ranks.
def test_two_ranks_take_the_steps_of_one_process(dlo, curve):
    (dlo.folder / "sizes.yaml").write_text(CONFIG.replace("SIZES", SCHEDULE).replace("DROP", "0.0"))
    dlo("fit", "--config", "sizes.yaml", "--run.name", "one")
    dlo("fit", "--config", "sizes.yaml", "--run.name", "two", *RANKS)
    one, two = (dlo.folder / "runs" / name / "version_0" for name in ("one", "two"))
    # The last steps of epochs, which have 64 to 192 of 1,438 images, are the same samples too.
    sizes = curve(one, "batch/size")
    assert set(sizes.values()) == {64.0, 128.0, 256.0}
    assert curve(two, "batch/size") == sizes
    for tag in ("train/loss", "train/grad_norm", "val_loss", "optim/lr"):
        assert curve(two, tag) == pytest.approx(curve(one, tag), rel=1e-5), tag


@pytest.mark.slow
def test_two_ranks_follow_the_noise_together_and_resume_exactly(dlo, curve):
    (dlo.folder / "noise.yaml").write_text(CONFIG.replace("SIZES", NOISE).replace("DROP", "0.2"))
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
