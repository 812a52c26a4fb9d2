"""Pipes between a trial and the worker that has started it: one JSON object a line, a report and its answer."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

#: Descriptors of the pipes in the trial's process: the one that it reads, a comma, and the one that it writes.
PIPES = "DLO_SWEEP_PIPES"


class WorkerPipe:
    """Pipes to the worker that has started this process.

    Args:
        reads: Descriptor of the answers.
        writes: Descriptor of the reports.
    """

    def __init__(self, reads: int, writes: int) -> None:
        self._answers, self._writes = os.fdopen(reads), writes

    @classmethod
    def from_environment(cls) -> WorkerPipe | None:
        """Returns the pipes of this process, and removes them from its environment; None if it has none."""
        pipes = os.environ.pop(PIPES, "")
        if not pipes:
            return None
        reads, writes = (int(number) for number in pipes.split(","))
        return cls(reads, writes)

    def ask(self, report: dict[str, Any]) -> dict[str, Any]:
        """Sends a report and returns the answer; `lost` if the worker has died."""
        with contextlib.suppress(BrokenPipeError):
            os.write(self._writes, json.dumps(report).encode() + b"\n")
            line = self._answers.readline()
            if line:
                answer: dict[str, Any] = json.loads(line)
                return answer
        return {"stop": False, "lost": True}
