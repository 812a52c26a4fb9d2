"""`dlo quantise` on a checkpoint of a short fit; training with rounded weights on ranks as in one process."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from composition import matrix
from dlo_framework.cli.main import main
from dlo_framework.errors import DloError
from dlo_framework.run import runs
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import merge_records
from dlo_plugins.compile.compile_blocks import CompileBlocks
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.quantise import post_training as reports
from dlo_plugins.quantise.callback import Quantise
from dlo_plugins.quantise.schemes import affine_grid, fake_quantise, symmetric_grid
from support.texts import lines, sentences
from support.trainers import quiet_trainer

CONFIG = """
trainer: {accelerator: cpu, max_steps: 4, limit_val_batches: 2, enable_progress_bar: false, logger: false}
model:
  class_path: CausalLM
  init_args:
    config: {model_type: llama, hidden_size: 64, intermediate_size: 96, num_hidden_layers: 2, num_attention_heads: 4,
      num_key_value_heads: 2, max_position_embeddings: 64, tie_word_embeddings: true}
data:
  class_path: TextData
  init_args: {train_files: texts.jsonl, cache_dir: cache, seq_len: 32, batch_size: 4, vocab_size: 320,
    corpus_bytes: 60000}
"""

IMAGES = """
trainer: {accelerator: cpu, max_steps: 1, limit_val_batches: 1, enable_progress_bar: false, logger: false}
model: {class_path: ImageClassifier, init_args: {model: vit_tiny_patch16_224, model_args: {depth: 1, patch_size: 4}}}
data: {class_path: DigitsData, init_args: {image_size: 16, batch_size: 8}}
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a config and its run."""
    home = tmp_path_factory.mktemp("run")
    before = Path.cwd()
    os.chdir(home)
    try:
        lines(home / "texts.jsonl", *({"text": text} for text in sentences(200)))
        (home / "tiny.yaml").write_text(CONFIG)
        assert main(["fit", "--config", "tiny.yaml"]) == 0
    finally:
        os.environ.pop(runs.ENVIRONMENT, None)
        os.chdir(before)
    return home


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ends each measurement of the latency after four rounds."""
    monkeypatch.setattr(reports, "MOST_SECONDS", 0.0)


def quantise(*words: str) -> int:
    try:
        return main(["quantise", "--config", "tiny.yaml", "--ckpt_path", "last", *words])
    finally:
        os.environ.pop(runs.ENVIRONMENT, None)


@pytest.mark.parametrize(
    "scheme", [*(pytest.param(one, marks=pytest.mark.slow) for one in ("int8", "int8_weights")), "int4_weights"]
)
def test_transformers_loads_the_folder(trained: Path, scheme: str, monkeypatch, capfd) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(trained)
    assert quantise("--scheme", scheme, "--skip", "model.layers.0.mlp", "--export", "model", "--json") == 0
    report = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert report["layers"] == 11
    assert report["after"]["val_perplexity"] == pytest.approx(report["before"]["val_perplexity"], rel=1e-2)
    folder = trained / "runs" / "tiny" / "version_0" / f"quantised-{scheme}"
    assert json.loads((folder / "report.json").read_text()) == report
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    kinds = {name: type(parameter).__name__ for name, parameter in model.named_parameters()}
    expected = "IntxUnpackedToInt8Tensor" if scheme == "int4_weights" else "Int8Tensor"
    chosen = [name for name, kind in kinds.items() if kind == expected]
    assert chosen == [name for name in kinds if name.endswith("proj.weight") and "layers.0.mlp" not in name]
    assert len(AutoTokenizer.from_pretrained(folder / "model")("abc")["input_ids"]) > 0
    # The folder of `dlo checkpoint export` holds the same model in float.
    checkpoint = trained / "runs" / "tiny" / "version_0" / "checkpoints" / "last.ckpt"
    assert main(["checkpoint", "export", str(checkpoint), str(trained / f"float-{scheme}")]) == 0
    plain = AutoModelForCausalLM.from_pretrained(trained / f"float-{scheme}").eval()
    ids = torch.arange(40)[None] + 5
    with torch.no_grad():
        found, of_floats = model(ids).logits, plain(ids).logits
        torch.testing.assert_close(found, of_floats, rtol=0, atol=0.2 if scheme == "int4_weights" else 0.02)
        for name in chosen:
            weight = plain.get_parameter(name)
            grid = affine_grid(weight, 4, 32) if scheme == "int4_weights" else symmetric_grid(weight, 8)
            weight.copy_(fake_quantise(weight, grid))
        of_levels = plain(ids).logits
    if scheme != "int8":  # Whose inputs are rounded too.
        torch.testing.assert_close(found, of_levels, rtol=0, atol=1e-5)
    assert (of_floats - of_levels).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--scheme", "fp8"), "set scheme: int8"),
        (("--skip", "model.layer.0"), "got 'model.layer.0', which matches none; did you mean 'model.layers.0'"),
        (("--export", "model.onnx"), "export must be a folder for CausalLM"),
        (("--schema", "int8"), "schema"),
        (("--embeddings",), "embeddings.*removed in 0.2: tables of embeddings stay in float"),
    ],
)
def test_bad_input(trained: Path, words: tuple[str, ...], message: str, monkeypatch, capfd) -> None:
    monkeypatch.chdir(trained)
    assert quantise(*words) == 2
    error = capfd.readouterr().err
    assert "Traceback" not in error
    assert re.search(message, error.strip().splitlines()[-1])


@pytest.mark.slow
def test_images_are_exported_to_the_faster_file(tmp_path: Path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    Path("tiny.yaml").write_text(IMAGES)
    assert main(["fit", "--config", "tiny.yaml"]) == 0
    capfd.readouterr()
    assert quantise("--json") == 0
    report = json.loads(capfd.readouterr().out.splitlines()[-1])
    kinds = {"model.pt2": "after", "model.onnx": "onnx"}
    faster = min(kinds, key=lambda name: sum(one[kinds[name]] for one in report["latency"]))
    assert report["exported"] == [faster]
    written = tmp_path / "runs" / "tiny" / "version_0" / "quantised-int8"
    assert {path.name for path in written.iterdir()} == {faster, "report.json"}


# --- training with rounded weights and inputs on two ranks has the losses of one process -----------------------------
#
# Rounded weights alone are compared in `tests/composition` in single precision, weights at the end included. With
# rounded inputs, a value that differs in its last bit may get another level, so that losses differ by about 1e-5 in
# single precision: these runs are in double precision, where no value is that near to the middle of two levels.


#: Options of meshes that the composition table does not have.
MESHES: dict[str, Callable[[], dict[str, Any]]] = {
    "sequence parallel": lambda: {"tp": 2, "dp_shard": 1, "sequence_parallel": True},
    "tp, compiled": lambda: {"tp": 2, "dp_shard": 1, "appliers": [CompileBlocks(backend="aot_eager")]},
    "zero bubble": lambda: {"pp": 2, "dp_shard": 1, "micro_batches": 2, "schedule": "ZBH1"},
}


def run(rank: int, world_size: int, folder: Path, task: str, strategy: str, *rounding: Any) -> list[matrix.Found]:
    """Trains six steps, of which the last four round, by each scheme, bits at the start, and whether they are mixed."""
    matrix.register_data_parallel()
    matrix.STRATEGIES.update({name: (MeshStrategy, options) for name, options in MESHES.items()})
    # No group of 32 divides the 48 features of this layer.
    skip = ["**.down_proj"] if task == "CausalLM" else []
    found = []
    for scheme, bits, mixed in rounding:
        options: dict[str, Any] = {"start_bits": bits or None, "skip": skip}
        if mixed:  # Each layer drops its bits after one to five steps.
            options |= {"mixed_bits": True, "period": 1}
        quantise = partial(Quantise, scheme, when="aware", start="30%", report=False, **options)
        precision = ("precision", "32-true" if bits else "64-true")
        callbacks: Any = (lambda make=quantise: [make()]) if scheme else list
        matrix.BESIDE["tested"] = matrix.With(callbacks, trainer=(precision,))
        found.append(matrix.run_cell(folder, task, "tested", strategy, world_size))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("texts")
    matrix.prepare(home)
    return home


#: Task, strategy, scheme and bits at the start; with those, in single precision.
ORDINARY = [("ImageClassifier", "mesh tp", "int8", 0)]
SLOW = [
    ("CausalLM", "fsdp", "int4_weights", 8),
    *(("ImageClassifier", name, "int8", 0) for name in ("ddp", "zero3", "fsdp", "mesh pp", "zero bubble")),
    *(("ImageClassifier", name, "int8", 0) for name in ("sequence parallel", "mesh, compiled", "tp, compiled")),
    *(("CausalLM", name, "int8", 0) for name in ("mesh tp", "mesh cp", "mesh pp", "sequence parallel")),
    ("ImageClassifier", "deepspeed_3", "int4_weights", 8),
    ("ImageClassifier", "zero3", "int4_weights", 8),
]


@pytest.mark.parametrize(
    ("task", "strategy", "scheme", "bits"),
    [*ORDINARY, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_losses_are_those_of_one_process(folder: Path, task: str, strategy: str, scheme: str, bits: int) -> None:
    rounded, plainly = (scheme, bits, False), ("", bits, False)
    ((alone, plain),) = run_distributed(run, 1, folder, task, "", rounded, plainly, backend=None, timeout=250)
    ranks = [cell for (cell,) in run_distributed(run, 2, folder, task, strategy, rounded, backend=None, timeout=250)]
    assert [cell.error or cell.refusal for cell in [*ranks, alone]] == [""] * 3
    merged = merge_records([cell.record for cell in ranks])
    assert len(merged.steps) == len(alone.record.steps) == 6
    for mine, theirs in zip(merged.steps, alone.record.steps, strict=True):
        assert mine.loss == pytest.approx(theirs.loss, rel=1e-5 if bits else 1e-7)
        assert all(norm == pytest.approx(theirs.norms[0], rel=1e-3 if bits else 1e-6) for norm in mine.norms)
    losses = [[step.loss for step in cell.record.steps] for cell in (alone, plain)]
    assert losses[0][:2] == losses[1][:2]
    assert all(abs(one / other - 1) > 2e-6 for one, other in zip(losses[0][2:], losses[1][2:], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "strategies"), [("CausalLM", ["fsdp", "mesh pp", "deepspeed_3"]), ("ImageClassifier", ["zero3"])]
)
def test_bits_by_curvature_are_those_of_one_process(folder: Path, task: str, strategies: list[str]) -> None:
    mixed, alike = ("int4_weights", 8, True), ("int4_weights", 8, False)
    (cells,) = run_distributed(run, 1, folder, task, "", mixed, alike, backend=None, timeout=250)
    curves = [[step.loss for step in cell.record.steps] for cell in cells]
    assert curves[0][:3] == curves[1][:3]
    assert curves[0][3:] != curves[1][3:]
    for strategy in strategies:
        found = [one for (one,) in run_distributed(run, 2, folder, task, strategy, mixed, backend=None, timeout=250)]
        assert [cell.error or cell.refusal for cell in found] == [""] * 2
        merged = merge_records([cell.record for cell in found])
        assert [step.loss for step in merged.steps] == pytest.approx(curves[0], rel=1e-5)


def test_a_group_larger_than_a_slice_of_a_row_is_refused(folder: Path) -> None:
    """A row of 32 features is cut into two slices of 16."""
    task, _ = matrix.pictures(folder, matrix.With())
    trainer, quantise = quiet_trainer(devices=2, strategy=MeshStrategy(tp=2)), Quantise("int4_weights", when="aware")
    with pytest.raises(DloError, match=r"got 32 for 32 / 2 input features of blocks.0.attn.qkv.*set tp=1$"):
        quantise.check_run(trainer, task)
