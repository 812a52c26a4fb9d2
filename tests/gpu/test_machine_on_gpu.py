"""Measuring a GPU for `dlo plan`, programs of weights packed for one, and images much larger than their views."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import Trainer, seed_everything
from PIL import Image

from dlo_framework.checkpoint import SafeCheckpointIO
from dlo_framework.cli.main import main
from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_plugins.plan.machine import parse_machine
from dlo_plugins.quantise.callback import Quantise
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.decode import Box
from dlo_tasks.imagenet.digits import DigitsData
from dlo_tasks.imagenet.folder_dataset import EncodedImage, EncodedImages, resize_crop

CONFIG = """
trainer: {accelerator: gpu, devices: 1, max_steps: 2, precision: bf16-mixed}
model:
  class_path: CausalLM
  init_args:
    config: {model_type: llama, hidden_size: 256, intermediate_size: 512, num_hidden_layers: 2, num_attention_heads: 4,
             num_key_value_heads: 2, max_position_embeddings: 64, vocab_size: 512}
data: {class_path: TextData, init_args: {seq_len: 64, batch_size: 16}}
"""


@pytest.mark.timeout(280)
def test_dlo_plan_measures_a_gpu_in_the_precision_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (tmp_path / "mine.yaml").write_text(CONFIG)
    words = ["plan", "--config", str(tmp_path / "mine.yaml"), "--gpus", "1", "--measure", "--json", "--top", "1"]
    assert main([*words, "--out", str(tmp_path / "plans")]) == 0
    assert json.loads(capsys.readouterr().out)["plans"][0]["step_seconds"] > 0
    machine = parse_machine(yaml.safe_load((tmp_path / "plans" / "machine.yaml").read_text()), "machine.yaml")
    assert machine.device == "cuda"
    assert 5e7 < machine.reserved < 0.5 * machine.memory
    assert machine.peak["bfloat16"] > 1e12
    assert machine.bandwidth > 1e11


@pytest.mark.timeout(280)
@pytest.mark.parametrize("scheme", ["int8", "int8_static", "int8_weights", "int4_weights", "fp8"])
def test_a_program_of_a_quantised_model_computes_what_the_model_does(tmp_path: Path, scheme: str) -> None:
    seed_everything(2, verbose=False)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 96, "depth": 2, "num_heads": 3}
    task = ImageClassifier("vit_tiny_patch16_224", model_args=sizes, lr=1e-3, schedule="constant")
    callback = Quantise(scheme, export=["model.pt2"])
    trainer = Trainer(
        accelerator="gpu", devices=1, callbacks=[callback], default_root_dir=tmp_path, plugins=[SafeCheckpointIO()],
        max_epochs=1, limit_train_batches=6, limit_val_batches=2, logger=False, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=False,
    )  # fmt: skip
    use_canonical_checkpoints(trainer)
    trainer.fit(task, datamodule=DigitsData(image_size=16, batch_size=16))
    report = callback.last_report
    assert report is not None
    assert abs(report.after["val_loss"] - report.before["val_loss"]) < 0.5
    program = torch.export.load(tmp_path / "quantised" / "model.pt2").module()
    on_gpu = scheme in ("int4_weights", "fp8")
    images = torch.randn(5, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    images = images.cuda() if on_gpu else images
    found = program(images.bfloat16() if on_gpu else images).float().cpu()
    with torch.no_grad():
        expected = task.model.cpu().eval()(images.cpu())  # in float
    assert float((found - expected).norm() / expected.norm()) < (0.5 if scheme == "int4_weights" else 0.2)


def jpeg(height: int, width: int) -> torch.Tensor:
    """Returns the bytes of an image of gradients."""
    rows, columns = np.mgrid[0:height, 0:width]
    pixels = np.stack([rows * 255 // height, columns * 255 // width, np.full_like(rows, 90)], 2).astype(np.uint8)
    content = io.BytesIO()
    Image.fromarray(pixels).save(content, "jpeg", quality=95)
    return torch.frombuffer(bytearray(content.getvalue()), dtype=torch.uint8)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_images_that_are_much_larger_than_their_views_are_decoded(interpolation: str) -> None:
    boxes = [Box(0, 0, 3000, 2000), Box(10, 20, 90, 80)]
    views = [EncodedImage(jpeg(3000, 2000), boxes[0], False), EncodedImage(jpeg(120, 160), boxes[1], True)]
    found = EncodedImages(views, (16, 16), interpolation).decode(torch.device("cuda", 0)).cpu()
    expected = EncodedImages(views, (16, 16), interpolation).decode(torch.device("cpu"))
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert float((found.float() - expected.float()).abs().mean()) < 3
    pixels = torch.full((3, 4000, 4000), 7, dtype=torch.uint8, device="cuda")
    assert (resize_crop(pixels, Box(0, 0, 4000, 4000), (16, 16), interpolation, False) == 7).all()
