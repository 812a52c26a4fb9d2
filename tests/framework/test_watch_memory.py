"""The peak memory of a process is its own, whatever the process that has started it takes."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

_CODE = "from dlo_framework.local_memory import process_peak; print(process_peak())"


def test_a_process_does_not_count_the_memory_of_the_one_that_started_it() -> None:
    large = np.ones(2**28, dtype=np.uint8).repeat(4)  # 1 GiB
    found = int(subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=True).stdout)
    assert 10_000_000 < found < large.nbytes
