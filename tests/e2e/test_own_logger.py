"""A run with loggers other than TensorBoard: a user's own, and Lightning's CSVLogger."""

import json

import yaml

CONFIG = """
plugins: [./line_logger.py]
trainer:
  max_epochs: 1
  accelerator: cpu
  log_every_n_steps: 1
  limit_train_batches: 3
  limit_val_batches: 1
  logger:
    - class_path: LineLogger
      init_args: {path: lines.jsonl}
    - class_path: CSVLogger
      init_args: {save_dir: curves}
data: {class_path: DigitsData, init_args: {image_size: 16, batch_size: 32}}
model:
  class_path: ImageClassifier
  init_args:
    model: vit_tiny_patch16_224
    model_args: {patch_size: 8, embed_dim: 48, depth: 1, num_heads: 2}
"""
LOGGER = """
import json

from lightning.pytorch.loggers import Logger


class LineLogger(Logger):
    name, version = "lines", 0

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path

    def write(self, **line) -> None:
        with open(self.path, "a") as file:
            file.write(json.dumps(line, default=str) + "\\n")

    def log_metrics(self, metrics, step=None) -> None:
        self.write(metrics=metrics, step=step)

    def log_hyperparams(self, params, *args, **kwargs) -> None:
        self.write(options=dict(params))

    def log_image(self, key, images, step=None, **kwargs) -> None:
        self.write(image=key, shape=images[0].shape)
"""


def test_values_config_and_pictures_reach_it_and_csv_gets_files(dlo):
    (dlo.folder / "line_logger.py").write_text(LOGGER)
    (dlo.folder / "small.yaml").write_text(CONFIG)
    done = dlo("fit", "--config", "small.yaml")
    lines = [json.loads(line) for line in (dlo.folder / "lines.jsonl").read_text().splitlines()]
    values = {name for line in lines for name in line.get("metrics", ())}
    assert {"train/loss", "speed/samples_per_s", "val_loss", "val_acc1", "memory/state/parameters"} <= values
    options = {name: value for line in lines for name, value in line.get("options", {}).items()}
    assert options["data.init_args.batch_size"] == 32
    assert options["model"] == "vit_tiny_patch16_224"
    assert [line["image"] for line in lines if "image" in line] == ["train/images", "val/confusion"]
    assert "takes no images" not in done.stdout + done.stderr
    table = dlo.folder / "curves" / "lightning_logs" / "version_0"
    assert (table / "media/train/images/0.png").is_file()
    assert len(list((table / "media/val/confusion").glob("*.png"))) == 1
    assert {"train/loss", "val_acc1"} <= set((table / "metrics.csv").read_text().splitlines()[0].split(","))
    assert yaml.safe_load((table / "hparams.yaml").read_text())["data.init_args.batch_size"] == 32
    assert "tensorboard" not in done.stdout
    assert "look at it:  curves/lightning_logs/version_0" in done.stdout
