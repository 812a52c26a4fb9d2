"""``dlo predict`` as a table: of a flat folder of images its files and classes, of prompts their completions."""

import csv
import json
import os
import shutil
from pathlib import Path

import lightning.pytorch  # noqa: F401  Its log handler keeps the stream it is imported with: not a test's.
import pytest
import torch

from dlo_framework.cli.main import main
from dlo_framework.errors import DloError
from dlo_framework.run import runs
from dlo_framework.watch.predictions import check_output
from support.texts import CHATML

CONFIG = """
trainer: {{max_epochs: 1, accelerator: cpu, limit_train_batches: 1, limit_val_batches: 1, enable_progress_bar: false}}
model:
  class_path: ImageClassifier
  init_args:
    model: vit_tiny_patch16_224
    model_args: {{patch_size: 16, embed_dim: 12, depth: 1, num_heads: 2}}
data: {{class_path: ImageFolderData, init_args: {{root: {root}, image_size: 32, batch_size: 4, num_workers: 0}}}}
"""


TEXT = """
trainer: {accelerator: cpu, enable_progress_bar: false, max_steps: 1, limit_val_batches: 0}
model:
  class_path: CausalLM
  init_args:
    config: {model_type: llama, hidden_size: 16, intermediate_size: 32, num_hidden_layers: 1, num_attention_heads: 2}
    sampling: {max_new_tokens: 4, temperature: 1.0}
data:
  class_path: TextData
  init_args: {train_files: text.txt, vocab_size: 300, seq_len: 32, batch_size: 2, cache_dir: cache, chat_template: chat}
"""


def test_a_flat_folder_is_predicted(photos, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(CONFIG.format(root=photos))
    assert main(["fit", "--config", "x.yaml"]) == 0
    os.environ.pop(runs.ENVIRONMENT, None)
    Path("flat/deep").mkdir(parents=True)
    images = sorted((photos / "train" / "flower").iterdir())[:5]
    for number, image in enumerate(images):
        shutil.copy(image, Path("flat", "deep" if number == 0 else "", f"image{number}{image.suffix}"))
    Path("bare").mkdir()
    Path("bare/classes.txt").write_text("china\nflower\n")
    words = ["predict", "--config", "x.yaml", "--ckpt_path", "last", "--data.predict_folder", "flat"]
    found = {}
    for form, more in (("pt", []), ("csv", ["--data.root", "bare"]), ("parquet", [])):
        assert main([*words, "--run.predictions", form, *more]) == 0, capfd.readouterr().err
        os.environ.pop(runs.FOUND, None)
        found[form] = Path(f"runs/x/version_0/predictions-last.{form}")
        assert found[form].is_file()
    names = [f"deep/image0{images[0].suffix}", *(f"image{n}{images[n].suffix}" for n in range(1, 5))]
    probabilities = torch.load(found["pt"], weights_only=True)
    rows = list(csv.DictReader(found["csv"].open()))
    assert [row["name"] for row in rows] == names
    best = probabilities.argmax(dim=1).tolist()
    assert [row["class"] for row in rows] == [["china", "flower"][number] for number in best]
    assert [float(row["probability"]) for row in rows] == pytest.approx(probabilities.amax(dim=1).tolist(), abs=1e-5)
    parquet = pytest.importorskip("pyarrow.parquet").read_table(found["parquet"]).to_pylist()
    assert [{key: str(value) for key, value in row.items()} for row in parquet] == rows
    Path("empty").mkdir()
    for folder, message in (("empty", "must have images"), ("none", "no such folder; set it to one")):
        assert main([*words[:-1], folder]) == 2
        assert message in capfd.readouterr().err


def test_a_table_needs_names_before_ranks_start(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    text = CONFIG.format(root="x").partition("data:")[0]
    Path("x.yaml").write_text(f"{text}data: {{class_path: DigitsData, init_args: {{image_size: 16}}}}\n")
    assert main(["predict", "--config", "x.yaml", "--run.predictions", "csv"]) == 2
    assert "run.predictions must be pt for DigitsData, which has neither prediction_rows" in capfd.readouterr().err


@pytest.mark.slow
def test_prompts_are_completed_in_a_table(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("x.yaml").write_text(TEXT)
    Path("chat").write_text(CHATML)
    Path("text.txt").write_text("the loss falls, and the model learns. " * 20)
    talk = [{"role": "user", "content": 'wie "groß", und\nwarum?'}]
    asked = ["the loss, and", talk, "größe", "the model", "falls"]
    keys = ["messages" if isinstance(prompt, list) else "prompt" for prompt in asked]
    pairs = zip(keys, asked, strict=True)
    Path("asked.jsonl").write_text("".join(json.dumps({key: prompt}) + "\n" for key, prompt in pairs))
    assert main(["fit", "--config", "x.yaml"]) == 0
    found = {}
    words = ["predict", "--config", "x.yaml", "--ckpt_path", "last"]
    for form, file in (("pt", "asked"), ("csv", "asked"), ("jsonl", "asked"), ("jsonl", "again")):
        os.environ.pop(runs.FOUND, None)
        options = ["--data.predict_files", f"{file}.jsonl", "--run.predictions", form]
        assert main([*words, *options]) == 0, capfd.readouterr().err
        found[form, file] = Path(f"runs/x/version_0/predictions-last.{form}")
        if (form, file) == ("jsonl", "asked"):
            lines = [json.loads(line) for line in found[form, file].read_text().splitlines()]
            shutil.copy(found[form, file], "again.jsonl")
    written = [row for batch in torch.load(found["pt", "asked"], weights_only=True) for row in batch]
    assert [line["prompt"] for line in lines] == asked
    completions = {row["index"]: row["completion"] for row in written}
    assert lines == [{"index": n, "prompt": asked[n], "completion": completions[n]} for n in range(5)]
    cells = [{**line, "prompt": json.dumps(talk, ensure_ascii=False)} if line["index"] == 1 else line for line in lines]
    assert list(csv.DictReader(found["csv", "asked"].open(newline=""))) == [
        {key: str(value) for key, value in row.items()} for row in cells
    ]
    again = [json.loads(line) for line in found["jsonl", "again"].read_text().splitlines()]
    assert again == lines, "a table's prompts are read as the file that they are from"


def test_outputs_that_are_no_rows_are_refused():
    class Rows:
        def prediction_rows(self, outputs):
            return outputs

    check_output([{"index": 0}], Rows(), "csv")
    check_output(torch.zeros(1, 2), object(), "csv")
    with pytest.raises(DloError, match="not dicts, one for each sample, got csv and a tensor of shape"):
        check_output(torch.zeros(1, 2), Rows(), "csv")
    with pytest.raises(DloError, match=r"not probabilities \[n, classes\], got jsonl and list; set it to pt"):
        check_output([{"index": 0}], object(), "jsonl")
