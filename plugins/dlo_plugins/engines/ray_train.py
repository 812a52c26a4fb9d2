"""`dlo fit --engine ray`: Ray Train starts the ranks on a cluster, and starts them again when one is lost.

A worker of Ray is a rank, as a process of torchrun is: it runs ``dlo fit`` itself, with the devices and nodes that Ray
has chosen. All workers read and write the run's folder, which must be on a file system that they share, so that
``--ckpt_path auto`` continues from the newest whole checkpoint, on as many ranks as there are then.

From Python, call :func:`join_ray` first in the function that ``TorchTrainer`` gets, then train with
:class:`dlo_framework.Trainer` and :class:`RayReport`::

    def train():
        join_ray()
        trainer = Trainer(strategy="zero2", max_epochs=10, callbacks=[RayReport()], run_dir="/shared/runs")
        trainer.fit(model, datamodule=data, ckpt_path="auto")
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from dlo_framework.callback import PluginCallback
from dlo_framework.checkpoint import newest_valid
from dlo_framework.cli.config_scan import CommandParser
from dlo_framework.errors import DloError
from dlo_framework.run import runs

#: File with the message of a refused run, which Ray shall not start again.
_REFUSED = "refused.txt"
#: Variable of a worker of Ray that is a rank of dlo's.
_MARK = "DLO_RAY_RUN"
#: File of a checkpoint of Ray's, with the path of dlo's.
POINTER = "checkpoint.json"


def fit(argv: list[str]) -> int:
    """Runs ``dlo fit`` on the workers of a Ray cluster: that of ``RAY_ADDRESS``, or one on this machine.

    Examples:
        dlo fit --engine ray --workers 8 --max_restarts 3 --config my.yaml --ckpt_path auto

    Args:
        argv: Arguments after ``dlo fit``, without ``--engine ray``.

    Returns:
        Exit code: 0, or 1 if the training has failed more often than it may be started again.

    Raises:
        DloError: Ray is not installed, an option is invalid, or the run is refused on a worker.
    """
    parser = CommandParser("dlo fit --engine ray", description=fit.__doc__)
    parser.add_argument("--workers", required=True, help="number of ranks; MIN:MAX takes as many as there are")
    parser.add_argument("--worker_cpus", type=float, default=1, help="cores of a worker")
    parser.add_argument("--max_restarts", type=int, default=0, help="number of times that the ranks are started again")
    options, config_scan = parser.parse_with_run(argv)
    fewest, most = _workers(options.workers)
    try:
        import ray
        from ray.train import FailureConfig, RunConfig, ScalingConfig, TrainingFailedError
        from ray.train.torch import TorchTrainer
    except ImportError as error:
        raise DloError("dlo fit --engine ray needs Ray: pip install 'dlo_framework[ray]'") from error
    words = [*config_scan.argv[1:], "--trainer.callbacks+=RayReport", "--trainer.devices=auto"]
    ray.init(ignore_reinit_error=True, logging_level="ERROR")
    storage = Path("runs/ray").resolve() / str(time.time_ns())
    try:
        scaling = ScalingConfig(
            num_workers=most if fewest == most else (fewest, most),
            use_gpu=ray.cluster_resources().get("GPU", 0) >= fewest,
            resources_per_worker={"CPU": options.worker_cpus},
        )
        trainer = TorchTrainer(
            _fit_on_worker,
            train_loop_config={"words": words, "folder": os.getcwd(), "refused": str(storage / _REFUSED)},
            scaling_config=scaling,
            run_config=RunConfig(
                name=storage.name,
                storage_path=str(storage.parent),
                failure_config=FailureConfig(max_failures=options.max_restarts),
            ),
        )
        trainer.fit()
    except TrainingFailedError as error:
        print(f"dlo: the training on Ray has failed: {str(error).strip().splitlines()[-1]}", file=sys.stderr)
        return 1
    finally:
        ray.shutdown()
    if (storage / _REFUSED).exists():
        raise DloError((storage / _REFUSED).read_text())
    return 0


def _workers(given: str) -> tuple[int, int]:
    try:
        numbers = [int(number) for number in given.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2) or numbers[0] < 1 or numbers[-1] < numbers[0]:
        raise DloError(f"--workers must be a number, or MIN:MAX, got {given}; write --workers 8 or --workers 2:8")
    return numbers[0], numbers[-1]


def _fit_on_worker(settings: dict[str, Any]) -> None:
    """Runs ``dlo fit`` in a worker of Ray."""
    from dlo_framework.cli.run import run

    os.chdir(settings["folder"])
    join_ray()
    try:
        run(["fit", *settings["words"]])
    except DloError as error:
        Path(settings["refused"]).write_text(str(error))


def join_ray() -> None:
    """Makes this worker of Ray Train a rank of one run, as a process that torchrun has started is.

    Ray has set ``RANK``, ``WORLD_SIZE`` and the master's address, and has joined the process group.
    """
    from ray import train

    context = train.get_context()
    os.environ["TORCHELASTIC_RUN_ID"] = os.environ[_MARK] = context.get_experiment_name()
    os.environ["GROUP_RANK"] = str(context.get_node_rank())


class RayReport(PluginCallback):
    """Reports metrics and checkpoints to Ray Train after each validation; `dlo fit --engine ray` adds it.

    Checkpoints stay in the run's folder. Ray gets a file `checkpoint.json` with the `path` of the newest whole one, the
    form that it asks for where it shall not copy: ``Result.checkpoint`` is a folder with that file.
    """

    left_out_of_parity = ""

    def __init__(self) -> None:
        self._reports = self._due = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Finds whether this process is a worker of Ray Train; says so if it is not."""
        self._reports = _MARK in os.environ
        if stage == "fit" and not self._reports:
            rank_zero_info("RayReport: this process is not a worker of Ray Train; nothing is reported")

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Remembers to report once the checkpoint of this validation is saved."""
        self._due = self._reports and not trainer.sanity_checking

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Reports what the last validation has left."""
        if self._due:
            self._report(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reports the end of the run."""
        if self._reports:
            self._report(trainer)

    def _report(self, trainer: Trainer) -> None:
        from ray import train

        self._due = False
        metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
        metrics |= {"epoch": trainer.current_epoch, "step": trainer.global_step}
        run = getattr(trainer, "run_folder", None)
        saved = newest_valid(run / runs.CHECKPOINTS, "size") if run is not None and trainer.is_global_zero else None
        if saved is None:
            train.report(metrics)
            return
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / POINTER).write_text(json.dumps({"path": str(saved.resolve())}))
            train.report(metrics, train.Checkpoint.from_directory(folder))
