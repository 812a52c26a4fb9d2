"""`dlo profile`, `lr-find` and the commands that prune, as a user runs them."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import yaml

from dlo_framework.checkpoint import load
from dlo_framework.cli.main import main
from dlo_framework.errors import DloError
from dlo_plugins.prune import ticket_command
from support.digits_config import WIDE, digits_config
from support.dlo_process import DloProcess
from support.sweep_config import CONFIG as SMALL
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


# --- ``dlo lr-find``: the sweep alone, on one rank and on two --------------------------------------------------------


SWEPT = digits_config(
    "max_epochs: 2, accelerator: cpu, log_every_n_steps: 1, accumulate_grad_batches: 2",
    WIDE,
    "image_size: 16, batch_size: 32",
    "schedule: constant",
)


def report(dlo, name):
    return json.loads((dlo.folder / "runs" / name / "version_0" / "lr_find.json").read_text())


SUGGESTION = """
from dlo_plugins.schedules.lr_finder import SUGGESTIONS

@SUGGESTIONS.register("Middle")
def middle(rates, losses):
    return rates[len(rates) // 2]
"""


def test_it_sweeps_prints_and_leaves_a_curve_and_no_checkpoint(dlo):
    """The suggestion that the config names is of a user's file."""
    (dlo.folder / "small.yaml").write_text(SWEPT)
    (dlo.folder / "lr_middle.py").write_text(SUGGESTION)
    named = "[{class_path: LRFinder, init_args: {num_steps: 20, suggestion: %s}}]"
    arguments = ("lr-find", "--config", "small.yaml", "--plugins", "[./lr_middle.py]", "--trainer.callbacks")
    out = dlo(*arguments, named % "Middle").stdout
    found = report(dlo, "small/lr-find")
    kept = [point["lr"] for point in found["points"]][2:-5]
    assert found["suggestion"] == "Middle"
    assert found["lr"] == kept[len(kept) // 2]
    assert f"Middle   {found['lr']:.3g} <- suggested" in out
    assert set(found["suggestions"]) == {"valley", "steep", "minimum", "slide", "Middle"}
    assert "curve    runs/small/lr-find/version_0/lr_find.png" in out
    assert found["applied"] is False
    assert found["points"][0]["lr"] == 1e-7
    folder = dlo.folder / "runs" / "small" / "lr-find" / "version_0"
    assert not (dlo.folder / "runs" / "small" / "version_0").exists(), "the first fit takes it"
    names = {path.name.partition(".out")[0] for path in folder.rglob("*")}
    assert names == {"config.yaml", "hparams.yaml", "lr_find.json", "lr_find.png", "events"}
    assert yaml.safe_load((folder / "config.yaml").read_text())["data"]["class_path"].endswith("DigitsData")


def test_what_makes_no_sense_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "small.yaml").write_text(SWEPT)
    unknown = ["--trainer.callbacks", "[{class_path: LRFinder, init_args: {suggestion: steepp}}]"]
    for words, message in (
        (["--trainer.fast_dev_run", "true"], "lr-find: trainer.fast_dev_run must be unset; remove it: a sweep has"),
        (["--ckpt_path", "last"], "lr-find: --ckpt_path must be unset; remove it: a sweep starts from"),
        (unknown, "unknown LRFinder suggestion 'steepp'; did you mean 'steep'?"),
    ):
        assert main(["lr-find", "--config", "small.yaml", *words]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


# --- `dlo prune` and `dlo ticket`: their files, resuming, and one-line errors ----------------------------------------


PRUNED = SMALL | {"trainer": SMALL["trainer"] | {"max_epochs": 1, "limit_train_batches": 6}}


def run(folder: Path, *words: str, code: int = 0) -> tuple[str, str]:
    process = DloProcess(list(words), folder, {"OMP_NUM_THREADS": "1"})
    out, err = process.communicate(timeout=280)
    assert process.returncode == code, out[-1500:] + err[-3000:]
    return out, err


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(PRUNED))
    run(folder, "fit", "--config", "tiny.yaml")
    return folder


@pytest.mark.timeout(600)
def test_a_smaller_model_is_written_trained_and_exported(trained):
    out, _ = run(trained, "prune", "--config", "tiny.yaml", "--ckpt_path", "last", "--heads", "50%", "--hidden", "0.5")
    assert "heads: 4 -> 2 in each of 2 blocks" in out
    assert "hidden: 128 -> 64 in each of 2 blocks" in out
    smaller = trained / "runs" / "tiny" / "pruned"
    config = yaml.safe_load((smaller / "config.yaml").read_text())
    args = config["model"]["init_args"]["model_args"]
    assert (args["num_heads"], args["attn_head_dim"], args["mlp_ratio"]) == (2, 8, 2.0)
    run(trained, "fit", "--config", str(smaller / "config.yaml"), "--run.name", "again")
    begun = load(smaller / "pruned.ckpt")["state_dict"]
    last = load(trained / "runs" / "again" / "version_0" / "checkpoints" / "last.ckpt")["state_dict"]
    assert set(begun) == set(last)
    assert begun["model.blocks.0.attn.qkv.weight"].shape == (3 * 16, 32)
    # Six small steps from the pruned weights, not from random ones.
    assert float((last["model.head.weight"] - begun["model.head.weight"]).abs().max()) < 0.05
    run(trained, "checkpoint", "export", str(smaller / "pruned.ckpt"), "small.safetensors")
    from safetensors.torch import load_file

    assert torch.equal(load_file(trained / "small.safetensors")["head.weight"], begun["model.head.weight"])


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("more", [(), ("--reinit",)], ids=["", "reinit"])
def test_a_search_for_tickets_is_resumed_and_reported(trained, more):
    out = f"t{len(more)}"
    words = ("ticket", "--config", "tiny.yaml", "--rounds", "1", "--amount", "50%", "--rewind", "2", "--output", out)
    run(trained, *words)
    report = json.loads((trained / out / "ticket.json").read_text())
    assert [(point["round"], round(point["kept"], 2)) for point in report["points"]] == [(0, 1.0), (1, 0.5)]
    assert (trained / out / "ticket.png").stat().st_size > 1000
    assert list((trained / out / "report").glob("events*"))
    masks = load(trained / out / "round_1" / "version_0" / "checkpoints" / "last.ckpt")["pruning"]["masks"]
    kept = sum(int(masks[name].sum()) for name in masks) / sum(masks[name].numel() for name in masks)
    assert kept == pytest.approx(0.5, abs=1e-3)
    assert "model.head.weight" not in masks
    _, err = run(trained, *words, *more)  # The rounds are kept; only a new kind of run is added.
    assert err.count("dlo ticket: round") == len(more)
    assert ("round 1 reinit" in err) == bool(more)
    assert not (trained / out / "round_1" / "version_1").exists()
    _, err = run(trained, *(word if word != "50%" else "40%" for word in words), code=2)
    assert f"options must be those of the search in {out}, got another amount: 0.4 after 0.5" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("prune", "--ckpt_path", "last"), "--heads, --hidden, --channels or --blocks must be set, got none"),
        (("prune", "--hidden", "50%"), "--ckpt_path must name a checkpoint to prune, got none"),
        (("prune", "--ckpt_path", "last", "--hidden", "150%"), "--hidden must be a fraction in (0, 1), such as 25%"),
        (("ticket", "--amount", "1.2"), "--amount must be a fraction in (0, 1), such as 25% or 0.25, got 1.2"),
        (("ticket", "--rounds", "0"), "--rounds must be at least 1, got 0"),
        (("ticket", "--rewind", "-1"), "--rewind must be at least 0 steps, got -1"),
        (("ticket", "--ckpt_path", "last"), "--ckpt_path must be left out, as the rounds set it"),
    ],
)
def test_bad_input_of_pruning_is_one_line(trained, words, message, monkeypatch, capfd):
    monkeypatch.chdir(trained)
    assert main([words[0], "--config", "tiny.yaml", *words[1:]]) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
    assert len(lines) == 1
    assert message in lines[0]


def test_a_launcher_rank_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(yaml.safe_dump(PRUNED))
    with pytest.raises(DloError, match="must be started once, as each round starts its own ranks"):
        ticket_command.main(["--config", "tiny.yaml"])


def test_a_config_that_prunes_by_itself_is_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for entry in ("Prune", {"class_path": "Prune", "init_args": {"amount": 0.5}}):
        Path("tiny.yaml").write_text(yaml.safe_dump({**PRUNED, "trainer": {"callbacks": [entry]}}))
        with pytest.raises(
            DloError, match=r"must have no Prune, which the rounds add, got one in .*tiny.yaml; remove it"
        ):
            ticket_command.main(["--config", "tiny.yaml"])
