"""Callbacks that change batches, on two gloo ranks: the curve of one process, also after a resume.

Together on one run: what takes the time is the start of each process.
"""

import pytest

CONFIG = """
seed_everything: 3
trainer:
  max_epochs: 3
  accelerator: cpu
  log_every_n_steps: 1
  callbacks:
    - class_path: ProgressiveResizing
      init_args: {sizes: {0: 16, "40%": 24, "2 epochs": 32}}
    - class_path: BatchMix
      init_args: {mode: pair, group_size: 2, label_smoothing: 0.1}
model:
  class_path: ImageClassifier
  init_args:
    model: vit_tiny_patch16_224
    model_args: {patch_size: 8, embed_dim: 48, depth: 2, num_heads: 2}
    schedule: constant
data:
  class_path: ImageFolderData
  init_args: {root: ROOT, image_size: 32, batch_size: 4, num_workers: 1, rand_augment: rand-m5-n1}
"""
RANKS = ["--trainer.strategy", "ddp", "--trainer.devices", "2"]


@pytest.mark.slow
def test_two_ranks_resize_and_mix_as_one_process_does_also_after_a_resume(dlo, photos, curve):
    """40% of 3 epochs is at the third batch of the second: there the second run is cut, on two ranks.

    Each rank has one group of images to mix of a batch of which one process has two.
    """
    (dlo.folder / "batches.yaml").write_text(CONFIG.replace("ROOT", str(photos)))
    dlo("fit", "--config", "batches.yaml", "--run.name", "one")
    dlo("fit", "--config", "batches.yaml", "--run.name", "two", *RANKS, "--trainer.max_steps", "8")
    dlo("fit", "--config", "batches.yaml", "--run.name", "two", *RANKS, "--ckpt_path", "last")
    one, two = (dlo.folder / "runs" / name / "version_0" for name in ("one", "two"))
    sizes = [16.0] * 8 + [24.0] * 4 + [32.0] * 6
    assert curve(one, "data/image_size") == dict(zip(range(1, 19), sizes, strict=True))
    assert curve(two, "data/image_size") == curve(one, "data/image_size")
    for tag in ("train/loss", "train/grad_norm"):
        assert len(curve(one, tag)) == 18
        assert curve(two, tag) == pytest.approx(curve(one, tag), rel=1e-5), tag
