"""What a benchmark prints at its end: benchmarks/measuring/record.py."""

import argparse
import json
from pathlib import Path

import pytest

DOC = """What does it
cost?

    python benchmarks/some.py
"""


@pytest.fixture
def record(load):
    return load("measuring.record")


def a_table(record):
    table = record.Table("a step", "the loop's step", "elapsed time")
    table.add("loop", [1.0, 1.0, 1.0], us_a_step=12.3456789)
    table.add("loop again", [0.98, 1.01, 1.02], control=True)
    table.add("dlo", [1.1, 1.0, 1.3], bar=1.2, ours=True, MB=7)
    return table


def test_the_last_line_is_the_record(record, capsys):
    options = argparse.Namespace(rounds=3, folder=Path("x"))
    made = record.Record.of("/somewhere/benchmarks/some.py", DOC, options)
    made.add(a_table(record))
    made.without("a peer", "it is not installed")
    made.finish()
    printed = capsys.readouterr().out
    found = record.parse(printed + "[W] a library says good-bye\n")
    assert json.loads(printed.splitlines()[-1]) == found
    assert list(found) == list(record.KEYS)
    assert (found["benchmark"], found["question"]) == ("some", "What does it cost?")
    assert found["options"] == {"rounds": 3, "folder": "x"}
    assert found["not_measured"] == [{"what": "a peer", "why": "it is not installed"}]
    assert found["tables"] == [a_table(record).as_dict()]
    assert {"torch", "python", "dlo_framework"} <= set(found["versions"])
    assert "CPU core" in found["device"]
    # What is to be read comes before it.
    assert "1 is the loop's step; elapsed time; 3 rounds" in printed
    assert "at most 1.200: met" in printed
