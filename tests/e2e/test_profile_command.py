"""`dlo profile`: its tables and files, on one rank and on two, and one-line errors."""

import importlib.util
import json

import pytest

from dlo_framework.cli.main import main
from support.digits_config import WIDE, digits_config
from support.texts import lines, sentences

TRAINER = "max_epochs: 1, accelerator: cpu, devices: 1, log_every_n_steps: 5"
CONFIG = digits_config(TRAINER, WIDE, "image_size: 16, batch_size: 32", "schedule: constant")
OWN = """
from lightning.pytorch import Callback

class NeedsEpochs(Callback):
    def on_fit_start(self, trainer, pl_module):
        assert trainer.max_epochs >= 10, "a point in percent needs a number of epochs"
"""
TEXT = """
trainer: {max_epochs: 1, accelerator: cpu, devices: 1}
data:
  class_path: TextData
  init_args:
    {train_files: words.jsonl, cache_dir: cache, seq_len: 32, batch_size: 8, vocab_size: 320, corpus_bytes: 60000}
model:
  class_path: CausalLM
  init_args:
    config: {model_type: gpt2, n_embd: 32, n_layer: 2, n_head: 4, n_positions: 128}
"""


def test_it_profiles_a_config_and_predicts_memory_over_the_batch(dlo) -> None:
    (dlo.folder / "small.yaml").write_text(CONFIG)
    (dlo.folder / "own.py").write_text(OWN)
    own = ["--plugins", "./own.py", "--trainer.callbacks+", "NeedsEpochs"]
    done = dlo("profile", "--config", "small.yaml", "--steps", "10", "--batches", "8,32", "--machine", "cpu", *own)
    out = done.stdout
    for words in ("where a step goes", "by module, each without its submodules", "sum", "memory of a rank over batch"):
        assert words in out, words
    assert "USDT" not in done.stderr  # what torch's profiler prints of itself
    run = dlo.folder / "runs" / "small" / "profile" / "version_0"
    assert not (dlo.folder / "runs" / "small" / "version_0").exists(), "the first fit takes it"
    assert not (run / "checkpoints").exists()
    report = json.loads((run / "profile" / "report.0.json").read_text())
    assert report["steps"] == [6, 8]
    assert report["peaks"]["source"] == "machine cpu"
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 10
    assert "energy" in summary
    rows = json.loads((run / "profile" / "memory_table.json").read_text())["rows"]
    assert [row["batch"] for row in rows] == [8, 32]
    assert rows[1]["activations"] == pytest.approx(4 * rows[0]["activations"], rel=1e-6)
    # The prediction is of the run that was measured: the same batch.
    measured = summary["state_bytes"]
    assert rows[1]["parameters"] == pytest.approx(measured["parameters"], rel=0.01)
    assert rows[1]["optimizer"] == pytest.approx(measured["optimizer"], rel=0.01)
    assert rows[1]["activations"] == pytest.approx(measured["activations"], rel=0.15)


@pytest.mark.slow
def test_ranks_lengths_and_the_graph_of_a_language_model(dlo) -> None:
    lines(dlo.folder / "words.jsonl", *({"text": text} for text in sentences(400)))
    (dlo.folder / "text.yaml").write_text(TEXT)
    words = ["--trainer.devices", "2", "--trainer.strategy", "zero3", "--steps", "9", "--lengths", "16,32"]
    graph = ["--graph"] if importlib.util.find_spec("torchview") is not None else []
    out = dlo("profile", "--config", "text.yaml", *words, *graph).stdout
    run = dlo.folder / "runs" / "text" / "profile" / "version_0" / "profile"
    report = json.loads((run / "report.0.json").read_text())
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert report["stragglers"]["text"] in out
    rows = json.loads((run / "memory_table.json").read_text())["rows"]
    assert {row["length"] for row in rows} == {16, 32}
    if graph:
        assert any(path.name.startswith("model_graph") for path in run.iterdir())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--steps", "5"), "--steps must be at least 7 to record 3, got 5; set 7"),
        (("--batches", "8,many"), "--batches must be positive numbers, got 8,many"),
        (("--machine", "h1000"), "machine must be one of"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capfd, words, message) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(CONFIG)
    assert main(["profile", "--config", "small.yaml", *words]) == 2
    err = capfd.readouterr().err
    assert message in err
    assert "Traceback" not in err
    assert not list(tmp_path.rglob("report*"))
