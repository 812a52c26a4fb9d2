"""Workers of a sweep on one machine: processes that share its cores and GPUs; one that is killed is replaced."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from types import FrameType

from dlo_framework.process_setup import end_with_parent
from dlo_plugins.sweep.sweep_worker import MORE, environment_of_job
from dlo_plugins.sweep.trial_queue import TrialQueue

_POLL = 0.2


class WorkerPool:
    """Workers of a sweep on this machine.

    Args:
        queue: Trials of the sweep.
        jobs: Number of workers.
        waits: Whether workers wait for the trials of others before they end.
    """

    def __init__(self, queue: TrialQueue, jobs: int, *, waits: bool = True) -> None:
        self._queue, self._jobs, self._waits = queue, jobs, waits
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._signum = 0

    def run(self) -> int:
        """Runs the workers until all have ended; returns the exit code: 0, the first failure's, or 128 + a signal."""
        signums = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
        previous = {signum: signal.signal(signum, self._on_signal) for signum in signums}
        try:
            for index in range(self._jobs):
                self._start(index)
            return self._watch()
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def _start(self, index: int) -> None:
        command = [sys.executable, "-m", "dlo_plugins.sweep.sweep_worker", str(self._queue.folder)]
        environment = {**os.environ, MORE: json.dumps(environment_of_job(index, self._jobs))}
        self._workers[index] = subprocess.Popen(
            [*command, *([] if self._waits else ["--no-wait"])],
            env=environment,
            stdin=subprocess.DEVNULL,
            preexec_fn=end_with_parent(os.getpid(), signal.SIGTERM),
        )

    def _watch(self) -> int:
        code = 0
        while self._workers:
            for index, worker in list(self._workers.items()):
                ended = worker.poll()
                if ended is None:
                    continue
                del self._workers[index]
                if ended < 0 and not self._signum and self._queue.unfinished():
                    print(
                        f"dlo sweep: worker {index} was killed by signal {-ended}; another one takes its trial",
                        file=sys.stderr,
                        flush=True,
                    )
                    self._start(index)
                elif ended > 0:
                    code = code or ended
            time.sleep(_POLL)
        if self._signum:
            return 128 + (signal.SIGINT if self._signum == signal.SIGINT else signal.SIGTERM)
        return code

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._signum = signum
        for worker in self._workers.values():
            if worker.poll() is None:
                worker.send_signal(signum)
