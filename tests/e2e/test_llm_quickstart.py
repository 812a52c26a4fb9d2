"""The language model's quick start as a user runs it: small in every run of the tests, whole where slow ones run."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

#: Makes the quick start a matter of seconds.
SMALL = {
    "trainer.max_steps": 100,
    "trainer.val_check_interval": 50,
    "trainer.limit_val_batches": 2,
    "model.init_args.lr": 3e-3,
    "model.init_args.config.hidden_size": 64,
    "model.init_args.config.intermediate_size": 128,
    "model.init_args.config.num_hidden_layers": 2,
    "model.init_args.sampling.max_new_tokens": 8,
    "data.init_args.seq_len": 64,
    "data.init_args.batch_size": 8,
    "data.init_args.vocab_size": 400,
    "data.init_args.corpus_bytes": 300_000,
    "data.init_args.cache_dir": "cache",
}
WORDS = [word for name, value in SMALL.items() for word in (f"--{name}", str(value))]


@pytest.fixture(scope="module")
def trained(shared_dlo):
    done = shared_dlo("fit", "--config", "llm/quickstart", *WORDS)
    folder = shared_dlo.folder / "runs" / "llm_quickstart" / "version_0"
    return done, folder, json.loads((folder / "summary.json").read_text())


def test_it_learns_and_shows_what_it_writes(trained):
    done, _, summary = trained
    assert summary["status"] == "finished"
    assert summary["metrics"]["val_perplexity"] < 400 / 4
    assert summary["metrics"]["val_perplexity_per_byte"] == pytest.approx(
        2 ** summary["metrics"]["val_bits_per_byte"], rel=1e-4
    )
    assert "samples, each a prompt⟶completion:\n---\nimport ⟶" in done.stdout
    assert "Traceback" not in done.stderr


def test_the_best_checkpoint_is_validated_and_goes_on_where_it_stopped(trained, shared_dlo):
    _, _, summary = trained
    done = shared_dlo("validate", "--config", "llm/quickstart", *WORDS, "--ckpt_path", "best")
    shown = float(re.search(r"val_perplexity[ │]+([\d.]+)", done.stdout)[1])
    assert shown == pytest.approx(summary["metrics"]["val_perplexity"], rel=1e-3)
    more = [*WORDS, "--trainer.max_steps", "102", "--ckpt_path", "last"]
    done = shared_dlo("fit", "--config", "llm/quickstart", *more)
    assert "Traceback" not in done.stderr


def test_it_completes_prompts_of_a_file(trained, shared_dlo):
    """What it makes of them goes to the checkpoint's run, whatever this config's runs are called."""
    _, folder, summary = trained
    (shared_dlo.folder / "prompts.txt").write_text("def add(\nimport os\nclass A:\n")
    checkpoint = str(folder / summary["best_checkpoint"])
    words = ["--ckpt_path", checkpoint, "--run.name", "prompts", "--data.init_args.predict_files", "prompts.txt"]
    done = shared_dlo("predict", "--config", "llm/quickstart", *WORDS, *words)
    file = folder / f"predictions-{Path(checkpoint).stem}.pt"
    assert f"predictions: {file}\n" in done.stdout
    (rows,) = torch.load(file, weights_only=True)
    assert [row["prompt"] for row in rows] == ["def add(", "import os", "class A:"]
    assert all(1 <= len(row["tokens"]) <= 8 for row in rows)
    assert f"---\nimport os⟶{rows[1]['completion']}" in done.stdout


def test_it_is_exported_for_transformers(trained, shared_dlo):
    _, folder, summary = trained
    checkpoint = folder / summary["best_checkpoint"]
    shared_dlo("checkpoint", "export", str(checkpoint), "model")
    model = AutoModelForCausalLM.from_pretrained(shared_dlo.folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(shared_dlo.folder / "model")
    text = 'import os\n\n\ndef main(self):\n    """Return the name of the file."""\n    return self.name\n'
    ids = tokenizer(text, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert math.exp(loss) < 400 / 3


@pytest.mark.slow
def test_perplexity_falls_tenfold_in_three_minutes(dlo):
    dlo.fresh = True
    done = dlo("fit", "--config", "llm/quickstart", "--data.init_args.cache_dir", "cache")
    summary = json.loads((dlo.folder / "runs" / "llm_quickstart" / "version_0" / "summary.json").read_text())
    assert summary["metrics"]["val_perplexity"] < 4096 / 10  # A model that knows nothing has a perplexity of 4,096.
    assert "samples, each a prompt⟶completion:" in done.stdout
