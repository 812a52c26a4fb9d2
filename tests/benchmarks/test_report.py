"""The report and the README's table: benchmarks/run.py, and measuring/{report,plots,readme,results,catalogue}.py."""

import argparse
import ast
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
FILES = sorted(path.stem for path in BENCHMARKS.glob("*.py"))


def a_record(name: str = "overhead", median: float = 1.1, **changes) -> dict:
    rows = {
        "loop": {"median": 1.0, "min": 1.0, "max": 1.0, "n": 3},
        "loop again": {"median": 1.0, "min": 0.9, "max": 1.1, "n": 3, "control": True},
        "dlo, all on": {"median": median, "min": 1.0, "max": 2.0, "n": 3, "bar": 1.03, "ours": True, "ms": 7.5},
    }
    named = {"title": "small ViT: a step", "unit": "the loop's step", "clock": "elapsed", "better": "lower"}
    table = {**named, "rows": rows, "notes": ["A note."]}
    record = {"benchmark": name, "question": "What does it cost?", "device": "2 CPU cores", "versions": {"torch": "9"}}
    return {**record, "options": {}, "tables": [table], "not_measured": []} | changes


# --- what there is -----------------------------------------------------------------------------------------


def test_every_benchmark_is_known_and_described(load):
    catalogue = load("measuring.catalogue")
    files = set(FILES) - set(catalogue.NOT_BENCHMARKS)
    assert {entry.name for entry in catalogue.ENTRIES} == files
    assert {headline.name for headline in catalogue.HEADLINES} <= files
    table = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert [name for name in files if f"| `{name}.py` |" not in table] == []
    assert [name for name in files if not (ast.get_docstring(_tree(name)) or "").strip()] == []


def _tree(name: str) -> ast.Module:
    return ast.parse((BENCHMARKS / f"{name}.py").read_text(encoding="utf-8"))


# --- the README --------------------------------------------------------------------------------------------


def test_the_readme_has_the_table_of_the_newest_results(load):
    text = (BENCHMARKS / "README.md").read_text(encoding="utf-8")
    assert text == load("measuring.readme").rewritten(text, BENCHMARKS / "results"), "python benchmarks/run.py --readme"


# --- running -----------------------------------------------------------------------------------------------

GOOD = """
import json, pathlib, sys
with open("count", "a") as file:
    file.write("x")
print("a table")
print(json.dumps({record}))
"""


@pytest.fixture
def run(load, monkeypatch, tmp_path):
    """run.py over two benchmarks of the test's own."""
    module = load("run")
    folder = tmp_path / "benchmarks"
    folder.mkdir()
    (folder / "good.py").write_text(GOOD.replace("{record}", repr(a_record("good"))))
    (folder / "bad.py").write_text("print('so far'); raise SystemExit('it cannot')")
    entries = [module.Entry("bad", 1), module.Entry("good", 1)]
    monkeypatch.setattr(module, "HERE", folder)
    monkeypatch.setattr(module, "LOGS", tmp_path / "logs")
    monkeypatch.setattr(module, "ENTRIES", entries)
    monkeypatch.setattr(module, "chosen", lambda names, quick: [e for e in entries if names is None or e.name in names])
    monkeypatch.setattr(module.results, "machine", lambda: ("a machine", "a-machine", False))
    return module


def options(tmp_path, **changes) -> argparse.Namespace:
    given = {"only": None, "quick": False, "resume": False, "results": tmp_path / "results", "minutes": 1.0}
    return argparse.Namespace(**given | changes)


def test_one_that_fails_is_told_and_stops_no_other(run, tmp_path, capsys):
    assert run.measure(options(tmp_path)) == 1
    (path,) = (tmp_path / "results").glob("*.json")
    found = json.loads(path.read_text())
    assert list(found["runs"]) == ["bad", "good"]
    assert found["runs"]["bad"]["record"] is None
    assert found["runs"]["bad"]["error"].startswith("exit code 1; no record among what was printed")
    assert found["runs"]["good"]["record"]["tables"] == a_record()["tables"]
    assert path.with_suffix(".md").read_text().startswith("# a machine, ")
    (log,) = (tmp_path / "logs").rglob("bad.log")
    assert log.read_text().splitlines() == ["so far", "it cannot"]
    assert "failed: bad" in capsys.readouterr().err
