"""Parity on accelerators: the command on as many as there are, and that TF32 is off for it."""

import json

import torch

CONFIG = """
trainer: {max_epochs: 4, accelerator: gpu, strategy: ddp}
model:
  class_path: ImageClassifier
  init_args:
    model: vit_tiny_patch16_224
    model_args: {patch_size: 4, embed_dim: 96, depth: 4, num_heads: 3, drop_path_rate: 0.2}
data: {class_path: DigitsData, init_args: {image_size: 16, batch_size: 64}}
"""


def test_all_accelerators_train_as_one(dlo):
    (dlo.folder / "gpu.yaml").write_text(CONFIG)
    devices = torch.cuda.device_count() // 2 * 2 or 1  # which divides the batch
    words = ["--config", "gpu.yaml", "--devices", str(devices), "--steps", "10", "--json"]
    told = json.loads(dlo("parity", *words).stdout)
    assert told["parity"] is True
    assert told["ranks"] == devices
    assert any("TF32" in note for note in told["notes"])
    assert max(step["loss"]["difference"] for step in told["steps"]) < 1e-5
