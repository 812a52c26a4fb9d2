"""The command on two gloo ranks: the curve of one process, and exact resuming on each rank."""

import json
import signal

import pytest
import torch

MODEL = """
model:
  class_path: ImageClassifier
  init_args:
    model: vit_tiny_patch16_224
    model_args: {patch_size: 8, embed_dim: 48, depth: 2, num_heads: 2, drop_path_rate: DROP}
"""
PHOTOS = """
trainer: {max_epochs: 3, log_every_n_steps: 1, accelerator: cpu}
data:
  class_path: ImageFolderData
  init_args: {root: ROOT, image_size: 32, batch_size: 4, num_workers: 2, rand_augment: rand-m5-n1}
""" + MODEL.replace("DROP", "0.0")
DIGITS = """
trainer: {max_epochs: 8, log_every_n_steps: 1, accelerator: cpu, accumulate_grad_batches: 3}
data: {class_path: DigitsData, init_args: {image_size: 16, batch_size: 32}}
""" + MODEL.replace("DROP", "0.3")
RANKS = ["--trainer.strategy", "ddp", "--trainer.devices", "2"]


@pytest.mark.slow  # Predictions are compared in every run, and so are losses, by tests/composition.
def test_jpegs_on_two_ranks_give_the_metrics_of_one_process(dlo, photos, curve):
    """24 photographs and 10 to validate on, which two ranks cannot share evenly; each rank has two workers."""
    (dlo.folder / "photos.yaml").write_text(PHOTOS.replace("ROOT", str(photos)))
    dlo("fit", "--config", "photos.yaml", "--run.name", "one")
    dlo("fit", "--config", "photos.yaml", "--run.name", "two", *RANKS)
    one, two = (dlo.folder / "runs" / name / "version_0" for name in ("one", "two"))
    for tag in ("train/loss", "train/grad_norm", "val_loss", "val_acc1"):
        expected, found = curve(one, tag), curve(two, tag)
        assert len(expected) == (3 if tag.startswith("val") else 18)
        assert found == pytest.approx(expected, rel=1e-5), tag
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (one, two)]
    assert [summary["world_size"] for summary in summaries] == [1, 2]
    assert [summary["samples"] for summary in summaries] == [72, 72]


@pytest.mark.slow  # test_failures.py stops a run with dropout likewise, and resumes it.
def test_a_signal_to_one_rank_stops_both_and_each_resumes_its_own_random_stream(dlo, curve):
    (dlo.folder / "digits.yaml").write_text(DIGITS)
    command = ["fit", "--config", "digits.yaml", *RANKS]
    whole, cut = (dlo.folder / "runs" / name / "version_0" for name in ("whole", "cut"))
    dlo(*command, "--run.name", "whole")
    dlo.interrupt(signal.SIGTERM, cut, *command, "--run.name", "cut")
    dlo(*command, "--run.name", "cut", "--ckpt_path", "last")
    assert curve(cut) == curve(whole)
    assert len(curve(cut)) == 8 * 15


@pytest.mark.slow
def test_predictions_of_two_ranks_are_those_of_one_process_in_the_order_of_the_data(dlo, photos):
    (dlo.folder / "photos.yaml").write_text(PHOTOS.replace("ROOT", str(photos)))
    dlo("fit", "--config", "photos.yaml", "--trainer.max_epochs", "1")
    saved = dlo.folder / "runs" / "photos" / "version_0" / "predictions-last.pt"
    found = []
    for ranks in ([], RANKS):
        out = dlo("predict", "--config", "photos.yaml", "--ckpt_path", "last", *ranks).stdout
        assert "predictions: runs/photos/version_0/predictions-last.pt" in out
        found.append(torch.load(saved, weights_only=True))
        saved.unlink()
    assert found[0].shape == (10, 2)
    assert len(found[0].unique(dim=0)) == 10
    torch.testing.assert_close(found[1], found[0])
