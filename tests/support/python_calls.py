"""A count of the Python functions that a piece of code calls: the host's work, which is steady where times are not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any


def count_python_calls(function: Callable[[], object]) -> int:
    """Returns how many Python functions a function calls in this thread, itself and those of autograd's hooks included.

    Args:
        function: Function that is called once, without arguments.
    """
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event == "call"

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls
