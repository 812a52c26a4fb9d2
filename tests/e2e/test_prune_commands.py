"""`dlo prune` and `dlo ticket`: their files, resuming, and one-line errors."""

import json
from pathlib import Path

import pytest
import torch
import yaml

from dlo_framework.checkpoint import load
from dlo_framework.cli.main import main
from dlo_framework.errors import DloError
from dlo_plugins.prune import ticket_command
from support.dlo_process import DloProcess
from support.sweep_config import CONFIG as SMALL

CONFIG = SMALL | {"trainer": SMALL["trainer"] | {"max_epochs": 1, "limit_train_batches": 6}}


def run(folder: Path, *words: str, code: int = 0) -> tuple[str, str]:
    process = DloProcess(list(words), folder, {"OMP_NUM_THREADS": "1"})
    out, err = process.communicate(timeout=280)
    assert process.returncode == code, out[-1500:] + err[-3000:]
    return out, err


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("commands")
    (folder / "tiny.yaml").write_text(yaml.safe_dump(CONFIG))
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
        (
            ("prune", "--ckpt_path", "last", "--hidden", "150%"),
            "--hidden must be a fraction in (0, 1), such as 25% or 0.25, got 150%",
        ),
        (("ticket", "--amount", "1.2"), "--amount must be a fraction in (0, 1), such as 25% or 0.25, got 1.2"),
        (("ticket", "--rounds", "0"), "--rounds must be at least 1, got 0"),
        (("ticket", "--rewind", "-1"), "--rewind must be at least 0 steps, got -1"),
        (("ticket", "--ckpt_path", "last"), "--ckpt_path must be left out, as the rounds set it"),
    ],
)
def test_bad_input_is_one_line(trained, words, message, monkeypatch, capfd):
    monkeypatch.chdir(trained)
    assert main([words[0], "--config", "tiny.yaml", *words[1:]]) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if "error" in line]
    assert len(lines) == 1
    assert message in lines[0]


def test_a_launcher_rank_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(yaml.safe_dump(CONFIG))
    with pytest.raises(DloError, match="must be started once, as each round starts its own ranks"):
        ticket_command.main(["--config", "tiny.yaml"])


def test_a_config_that_prunes_by_itself_is_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for entry in ("Prune", {"class_path": "Prune", "init_args": {"amount": 0.5}}):
        Path("tiny.yaml").write_text(yaml.safe_dump({**CONFIG, "trainer": {"callbacks": [entry]}}))
        with pytest.raises(
            DloError, match=r"must have no Prune, which the rounds add, got one in .*tiny.yaml; remove it"
        ):
            ticket_command.main(["--config", "tiny.yaml"])
