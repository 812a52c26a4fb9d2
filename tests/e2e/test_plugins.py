"""Plug-ins through the command: the user's own file, and a third party's distribution."""

import json
import os


def small(plugins: str, callback: str) -> str:
    return f"""
plugins: {plugins}
trainer:
  max_epochs: 1
  limit_train_batches: 4
  accelerator: cpu
  log_every_n_steps: 1
  callbacks: [{callback}]
model:
  class_path: ImageClassifier
  init_args:
    model: vit_tiny_patch16_224
    model_args: {{patch_size: 8, embed_dim: 48, depth: 1, num_heads: 2}}
data: {{class_path: DigitsData}}
"""


def test_a_file_of_the_users_own(dlo):
    dlo("plugins", "new", "callback", "my_thing")
    (dlo.folder / "mine.yaml").write_text(small("[./my_thing.py]", "{class_path: MyThing}"))
    dlo("fit", "--config", "mine.yaml")
    config = (dlo.folder / "runs" / "mine" / "version_0" / "config.yaml").read_text()
    assert "my_thing.MyThing" in config


def test_a_third_partys_pack(dlo, example_pack, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.fspath(example_pack))
    listed = json.loads(dlo("plugins", "--json").stdout)
    pack = next(plugin for plugin in listed if plugin["name"] == "WeightNormLogger")
    assert pack["distribution"] == "dlo-example-pack"
    (dlo.folder / "pack.yaml").write_text(small("[]", "{class_path: WeightNormLogger, init_args: {every_n_steps: 1}}"))
    dlo("fit", "--config", "pack.yaml")
    events = (dlo.folder / "runs" / "pack" / "version_0").glob("events.*")
    assert any(b"weight_norm" in file.read_bytes() for file in events)
