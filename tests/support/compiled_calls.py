"""Back end of torch.compile that counts its runs, and a compiler as a new process has it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

#: Number of arguments of each run of compiled code.
CALLS: list[int] = []


def traced(graph: Any, inputs: Any) -> Any:
    """Runs the graph as it is, counts the runs, and scales the outputs a little: losses tell what ran compiled."""

    def run(*arguments: Any) -> tuple[Any, ...]:
        CALLS.append(len(arguments))
        return tuple(
            out * 1.01 if torch.is_tensor(out) and out.is_floating_point() else out for out in graph(*arguments)
        )

    return run


def fresh_compiler() -> Iterator[None]:
    """Resets torch's compiler around a test, with the back end ``traced`` among the known; for a fixture."""
    torch.compiler.reset()
    CALLS.clear()
    if "traced" not in torch.compiler.list_backends(exclude_tags=()):
        torch._dynamo.register_backend(traced, name="traced")
    # Its own limits: another test's libraries may have lifted them in this process.
    with torch._dynamo.config.patch(recompile_limit=8, accumulated_recompile_limit=256):
        yield
    torch.compiler.reset()
