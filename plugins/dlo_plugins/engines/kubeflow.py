"""Callback `TrainJobProgress`: tells Kubeflow Trainer how far a TrainJob is."""

from __future__ import annotations

import json
import os
import ssl
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib import request

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from dlo_framework.callback import PluginCallback
from dlo_framework.errors import check_number
from dlo_framework.progress import count_batches

#: Variables that the controller sets in a TrainJob's containers: the address, and files of certificate and token.
_URL, _CERTIFICATE, _TOKEN = (f"KUBEFLOW_TRAINER_SERVER_{name}" for name in ("URL", "CA_CERT", "TOKEN"))
#: Seconds after which a request that has no answer is given up.
_TIMEOUT = 10.0


class TrainJobProgress(PluginCallback):
    """Sends progress, remaining seconds and the latest metrics of a run to Kubeflow Trainer.

    ``kubectl get trainjob`` then shows them, by KEP-2779 (Kubeflow Trainer 2.2, feature gate ``TrainJobStatus``). Rank
    0 sends them in a thread of its own, so that training neither waits for the network nor ends with it: after an
    update that failed it warns once, and tries again with the next. Outside of a TrainJob it logs that it sends none.

    Args:
        every: Seconds between two updates; the controller limits how many it takes.

    Raises:
        DloError: `every` is not positive.
    """

    left_out_of_parity = ""

    def __init__(self, every: float = 30.0) -> None:
        check_number("TrainJobProgress: every", every, "above 0", "30 sends twice a minute")
        self.every = every
        self._url = os.environ.get(_URL, "")
        self._sent, self._began, self._before = 0.0, 0.0, 0  # seconds, and batches before the run began
        self._thread: threading.Thread | None = None
        self._warned = False

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock of the remaining time, and sends the first update."""
        if not self._url:
            rank_zero_info(f"TrainJobProgress: {_URL} is not set, as outside of a TrainJob; nothing is sent")
            return
        self._began, self._before = time.monotonic(), _batches_done(trainer)
        self._send(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Sends an update if it is time for one."""
        if self._url and time.monotonic() - self._sent >= self.every:
            self._send(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Sends the last update, and waits for it."""
        if self._url:
            self._wait()
            self._send(trainer)
            self._wait()

    def _send(self, trainer: Trainer) -> None:
        if not trainer.is_global_zero or (self._thread is not None and self._thread.is_alive()):
            return
        self._sent = time.monotonic()
        body = json.dumps({"trainerStatus": self._status(trainer)}).encode()
        self._thread = threading.Thread(target=self._post, args=(body,), name="trainjob-progress", daemon=True)
        self._thread.start()

    def _status(self, trainer: Trainer) -> dict[str, Any]:
        status: dict[str, Any] = {"lastUpdatedTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")}
        done, total = _batches_done(trainer), count_batches(trainer)
        if total:
            status["progressPercentage"] = min(100, 100 * done // total)
        if total and done > self._before:
            seconds = (time.monotonic() - self._began) / (done - self._before)
            status["estimatedRemainingSeconds"] = round(max(0, total - done) * seconds)
        metrics = {name: f"{float(value):.6g}" for name, value in trainer.callback_metrics.items()}
        metrics |= {"epoch": str(trainer.current_epoch), "step": str(trainer.global_step)}
        return status | {"metrics": [{"name": name, "value": value} for name, value in metrics.items()]}

    def _post(self, body: bytes) -> None:
        try:
            # The token is read each time: Kubernetes renews it.
            headers = {
                "Authorization": f"Bearer {Path(os.environ[_TOKEN]).read_text().strip()}",
                "Content-Type": "application/json",
            }
            context = ssl.create_default_context(cafile=os.environ[_CERTIFICATE])
            with request.urlopen(
                request.Request(self._url, body, headers), timeout=_TIMEOUT, context=context
            ) as answer:
                answer.read()
        except (OSError, KeyError, ValueError) as error:
            if not self._warned:
                self._warned = True
                rank_zero_warn(f"TrainJobProgress: an update could not be sent to {self._url}: {error}")

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join(2 * _TIMEOUT)


def _batches_done(trainer: Trainer) -> int:
    return trainer.fit_loop.epoch_loop.batch_progress.total.completed
