"""Test tools for distributed code: functions run on several ranks, and parity of a strategy with one process.

* :func:`run_distributed` calls a function on spawned ranks and returns each rank's result.
* :func:`assert_parity` trains on several ranks and in one process, and compares the two step by step.

The names are loaded when first used, so that a rank that tests a collective need not wait for Lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dlo_framework.testing.compare import Comparison
    from dlo_framework.testing.parity import Case, assert_parity, compare_cases
    from dlo_framework.testing.spawn import RankFailed, run_distributed

__all__ = ["Case", "Comparison", "RankFailed", "assert_parity", "compare_cases", "run_distributed"]

_HOMES = {
    "Case": "dlo_framework.testing.parity",
    "Comparison": "dlo_framework.testing.compare",
    "RankFailed": "dlo_framework.testing.spawn",
    "assert_parity": "dlo_framework.testing.parity",
    "compare_cases": "dlo_framework.testing.parity",
    "run_distributed": "dlo_framework.testing.spawn",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'dlo_framework.testing' has no attribute {name!r}")
