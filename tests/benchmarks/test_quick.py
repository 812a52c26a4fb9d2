"""Every benchmark runs to its last line by ``--quick``, alone and by benchmarks/run.py."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("*.py") if path.stem != "run")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_quick_run_ends_in_its_record(name, load):
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1100)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    found = load("measuring.record").parse(done.stdout)
    assert found["benchmark"] == name
    tables = {table["title"]: table["rows"] for table in found["tables"]}
    assert all(tables.values())
    assert tables or found["not_measured"]
