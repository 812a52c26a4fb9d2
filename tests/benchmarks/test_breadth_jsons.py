"""``benchmarks/breadth.py --deepspeed`` counts each DeepSpeed JSON once, by what dlo and DeepSpeed say of it."""

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TAKEN = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}


def test_the_jsons_are_counted(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(BENCHMARKS)
    breadth = importlib.import_module("breadth")
    contents = {
        "taken": TAKEN,
        "inner/the_same": dict(reversed(TAKEN.items())),
        "commented": TAKEN | {"_comment": "as it was"},
        "autotuned": TAKEN | {"autotuning": {"enabled": True}},
        "removed": TAKEN | {"compression_training": {}},
        "package": {"name": "no config", "version": "1"},
    }
    for name, content in contents.items():
        path = tmp_path / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))
    (tmp_path / "template.json").write_text('{"zero_optimization": {"stage": ${STAGE}}}')
    with pytest.warns(UserWarning, match="unknown key '_comment' does nothing"):
        table = breadth.count_deepspeed_jsons([str(tmp_path)])
    counts = {name: (row["files"], row["of"]) for name, row in table.rows.items()}
    assert counts == {"taken by dlo": (2, 4), "taken by DeepSpeed": (3, 4), "by both": (2, 3)}
    printed = capsys.readouterr().out
    assert f"{tmp_path}/autotuned.json: autotuning.enabled must be false" in printed
    assert "1 more files are not JSON (templates)" in printed
