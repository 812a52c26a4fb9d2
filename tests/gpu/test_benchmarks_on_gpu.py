"""benchmarks/accelerator.py on an accelerator, at its smallest."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "accelerator.py"


LANGUAGE = ("llm", "llama_lora", "qwen_lora", "llama_full")


@pytest.mark.parametrize("part", ["vit", *LANGUAGE, "loss", "strategies", "batch_mix", "checkpoints"])
def test_a_part_runs_and_tells(part):
    words = [sys.executable, str(SCRIPT), "--size", "tiny", "--rounds", "2", "--parts", part]
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    record = json.loads(done.stdout.splitlines()[-1])
    assert record["tables"]
    for table in record["tables"]:
        assert table["clock"] != "CPU time of one thread"
        assert all(row["median"] > 0 and row["n"] == 2 for row in table["rows"].values())
        if part in ("vit", *LANGUAGE):
            assert all(row["peak GB"] > 0 for row in table["rows"].values())
