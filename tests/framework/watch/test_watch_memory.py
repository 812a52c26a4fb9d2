"""The peak memory of a process is its own, whatever the process that has started it takes."""

from __future__ import annotations

import inspect
import subprocess
import sys

import numpy as np

from dlo_framework.local_memory import process_peak

#: The function alone: to import torch takes seconds, and more memory than the process that starts this one.
_CODE = f"""
import contextlib, resource, sys
from pathlib import Path

{inspect.getsource(process_peak)}
print(process_peak())
"""


def test_a_process_does_not_count_the_memory_of_the_one_that_started_it() -> None:
    large = np.ones(2**27, dtype=np.uint8)
    found = int(subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=True).stdout)
    assert 1_000_000 < found < large.nbytes
