"""Time that a recipe takes to reach a target of a validation metric, as MLPerf measures and logs it.

Mattson et al., "MLPerf Training Benchmark", 2019 (arXiv 1910.01500): the measure of a training system is the time to
a target of a validation metric. The run stops there. The log has the format of mlcommons' ``mllog``. It is not a
submission, which needs more keys and has rules of its own.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
from lightning.pytorch import LightningModule, Trainer

from dlo_framework.atomic_file import write_atomic
from dlo_framework.batches import batch_size
from dlo_framework.callback import PluginCallback
from dlo_framework.defaults import find_best_metric
from dlo_framework.errors import DloError, check_choice
from dlo_framework.progress import epochs_seen, loader_batch_size
from dlo_framework.rehearsal import run_folder
from dlo_framework.watch.media import log_scalars
from dlo_framework.watch.monitor import check_logged, check_validates, data_parallel_size
from dlo_plugins.compile.callback import Compile

Direction = Literal["max", "min"]
Evaluation = dict[str, float]

RESULT = "time_to_target.json"
LOG = "mlperf.log"
#: Words in a metric's name that show whether higher or lower is better.
RISES = {"acc", "acc1", "acc5", "accuracy", "auc", "auroc", "bleu", "f1", "iou", "miou", "map", "psnr", "recall"}
FALLS = {"loss", "err", "error", "mae", "mse", "rmse", "nll", "perplexity", "ppl", "wer", "cer", "fid"}


def reaches(value: float, target: float, mode: Direction) -> bool:
    """Returns whether a metric is at its target or past it; a NaN never is.

    It compares in single precision, like metrics: 7 of 10 is 0.7 there, but less than 0.7 in double precision.
    """
    single, goal = np.float32(value), np.float32(target)
    return bool(single >= goal if mode == "max" else single <= goal)


def best_of(evaluations: list[Evaluation], mode: Direction) -> Evaluation | None:
    """Returns the earliest evaluation with the best ``value``; None if all values are NaN."""
    numbers = [one for one in evaluations if not math.isnan(one["value"])]
    return (max if mode == "max" else min)(numbers, key=lambda one: one["value"]) if numbers else None


class TimeToTarget(PluginCallback):
    """Stops the run when a validation metric reaches its target, and reports the time and data that it took.

    MLPerf judges a recipe in this way (arXiv 1910.01500). The callback reports seconds, samples of all ranks and
    epochs. The seconds include training and validation from the first batch on; after a resume the clock continues,
    without the time in between. The times of building and compiling are reported separately (compiling if the Compile
    callback counts it).

    The run folder gets ``time_to_target.json`` with these values and all evaluations, and ``mlperf.log`` in MLPerf's
    format. TensorBoard gets ``time_to_target/*`` when the target is reached. A run that ends before reports its best
    value.

    Args:
        metric: Name of a validation metric, for example ``val_acc1``. Rank 0's value decides for all ranks.
        target: Value to reach.
        mode: Direction: ``max`` if higher is better, ``min`` if lower is better.

    Raises:
        DloError: If validation does not log the metric, the mode is not the metric's, or the run has no validation.
    """

    example = "{metric: val_loss, target: 1.0, mode: min}"

    def __init__(self, metric: str, target: float, mode: Direction = "max") -> None:
        check_choice("TimeToTarget: mode", mode, ("max", "min"), "max is the default")
        better = metric_direction(metric)
        if better not in (None, mode):
            raise DloError(f"TimeToTarget: mode must be {better} for {metric}, got {mode}; set mode: {better}")
        if not math.isfinite(target):
            raise DloError(f"TimeToTarget: target must be a finite number, got {target}; set a value of {metric}")
        self.metric = metric
        self.target = target
        self.mode = mode
        self.evaluations: list[Evaluation] = []
        self._folder: Path | None = None
        self._built = time.time(), time.perf_counter()
        self._init_seconds = 0.0
        self._before = 0.0  # seconds of the resumed runs
        self._began: float | None = None
        self._samples = 0
        self._epochs = 0.0
        self._world = 1
        self._open = False
        self._in_epoch = False

    @property
    def seconds(self) -> float:
        """Seconds of training and validation so far, including those before an interruption."""
        return self._before + (0.0 if self._began is None else time.perf_counter() - self._began)

    def state_dict(self) -> dict[str, Any]:
        """Returns the clock, the samples and the evaluations so far."""
        return {
            "seconds": self.seconds,
            "init_seconds": self._init_seconds,
            "samples": self._samples,
            "evaluations": [dict(one) for one in self.evaluations],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the clock and the counts of the resumed run."""
        self._before, self._init_seconds = state_dict["seconds"], state_dict["init_seconds"]
        self._samples = state_dict["samples"]
        self.evaluations = [dict(one) for one in state_dict["evaluations"]]

    @property
    def reached(self) -> Evaluation | None:
        """First evaluation whose value is at the target or past it."""
        return next((one for one in self.evaluations if reaches(one["value"], self.target, self.mode)), None)

    # --- the run -------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks that the run validates, and that ``mode`` is the model's."""
        if stage != "fit":
            return
        check_validates("TimeToTarget", self.metric, trainer)
        best, better = find_best_metric(pl_module) or (None, None)
        if best == self.metric and better != self.mode:
            raise DloError(
                f"TimeToTarget: mode must be {better} for {best}, the best_metric of {type(pl_module).__name__}, got"
                f" {self.mode}; set mode: {better}"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock; a run that has reached its target before a resume stops at once."""
        self._folder = run_folder(trainer)
        self._world = data_parallel_size(trainer)
        self._init_seconds += time.perf_counter() - self._built[1]
        self._began, self._in_epoch = time.perf_counter(), False
        self._log_start(trainer)
        trainer.should_stop |= self.reached is not None

    def _log_start(self, trainer: Trainer) -> None:
        self._log(trainer, "init_start", time_s=self._built[0])
        batch, steps = loader_batch_size(trainer), trainer.accumulate_grad_batches
        if batch is not None:
            self._log(trainer, "global_batch_size", batch * self._world * steps)
        self._log(trainer, "gradient_accumulation_steps", steps)
        seed = os.environ.get("PL_GLOBAL_SEED")
        if seed is not None:
            self._log(trainer, "seed", int(seed))
        self._log(trainer, "init_stop")
        metadata = {"metric": self.metric, "target": self.target, "seconds_before": self._before}
        self._log(trainer, "run_start", metadata=metadata)
        self._open = True

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the epoch's start."""
        self._in_epoch = True
        self._log(trainer, "epoch_start", metadata={"epoch_num": trainer.current_epoch + 1})

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Logs the start of an epoch that is resumed in the middle, for which Lightning calls no hook."""
        if not self._in_epoch:
            self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the epoch's end."""
        self._in_epoch = False
        self._log(trainer, "epoch_stop", metadata={"epoch_num": trainer.current_epoch + 1})

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts samples and epochs."""
        self._samples += batch_size(batch) * self._world
        self._epochs = epochs_seen(trainer, with_this_batch=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the validation's start."""
        if self._open:
            self._log(trainer, "eval_start", metadata=self._place())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reads the metric, and stops the run if it is at its target."""
        if not self._open or trainer.state.fn != "fit":
            return
        value, reached_before = self._value(trainer), self.reached
        if value is not None:
            self.evaluations.append({"value": value, **self._spent(trainer), "steps": trainer.global_step})
            self._log(trainer, "eval_accuracy", value, metadata={**self._place(), "metric": self.metric})
        self._log(trainer, "eval_stop", metadata=self._place())
        if reached_before is None and self.reached is not None:
            trainer.should_stop = True
            self._report(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the result, and reports a target that was not reached."""
        self._close(trainer)
        if self.reached is None:
            self._report(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Writes the result so far."""
        self._close(trainer)

    # --- reports -------------------------------------------------------------------------------------------

    def _value(self, trainer: Trainer) -> float | None:
        """Returns rank 0's metric on all ranks; None if a later validation has not logged it."""
        metrics = trainer.callback_metrics
        if self.metric not in metrics and self.evaluations:
            return None
        check_logged("TimeToTarget", self.metric, trainer)
        return float(trainer.strategy.broadcast(float(metrics[self.metric])))

    def _spent(self, trainer: Trainer) -> Evaluation:
        """Returns the cost of the run so far."""
        compiling = [one.seconds for one in trainer.callbacks if isinstance(one, Compile)]  # type: ignore[attr-defined]
        spent = {"seconds": self.seconds, "samples": self._samples, "epochs": self._epochs}
        return spent | ({"compile_seconds": sum(compiling)} if compiling else {})

    def _place(self) -> dict[str, Any]:
        return {"epoch_num": self._epochs, "samples_count": self._samples}

    def result(self) -> dict[str, Any]:
        """Returns the content of ``time_to_target.json``: the cost of the target, or of the full run if not reached."""
        reached, best = self.reached, best_of(self.evaluations, self.mode)
        at = reached or (self.evaluations[-1] if self.evaluations else {})
        return {
            "metric": self.metric,
            "target": self.target,
            "mode": self.mode,
            "reached": reached is not None,
            "best": best["value"] if best else None,
            **at,
            "init_seconds": self._init_seconds,
            "evaluations": self.evaluations,
        }

    def _report(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the result, and logs it if the target was reached."""
        reached, sign = self.reached, ">=" if self.mode == "max" else "<="
        goal = f"{self.metric} {sign} {self.target:g}"
        if reached is None:
            best = best_of(self.evaluations, self.mode)
            near = f"the best was {best['value']:.6g} after {_cost(best)}" if best else "it was never measured"
            pl_module.print(f"target not reached: {goal}; {near}")
            return
        pl_module.print(f"target reached: {goal} ({reached['value']:.6g}) after {_cost(reached)}")
        scalars = {f"time_to_target/{name}": value for name, value in reached.items() if name != "value"}
        log_scalars(trainer, scalars)

    def _close(self, trainer: Trainer) -> None:
        """Ends the log and writes the result, once."""
        if not self._open:
            return
        self._before, self._began = self.seconds, None
        result = self.result()
        status = "success" if result["reached"] else "aborted"
        self._log(trainer, "run_stop", metadata={"status": status, **self._place()})
        self._open = False
        if trainer.is_global_zero and self._folder is not None:
            write_atomic(self._folder / RESULT, f"{json.dumps(result, indent=2)}\n")

    def _log(
        self,
        trainer: Trainer,
        key: str,
        value: Any = None,
        metadata: dict[str, Any] | None = None,
        time_s: float | None = None,
    ) -> None:
        """Adds a line to ``mlperf.log``, on rank 0; a key that ends in ``_start`` or ``_stop`` bounds an interval."""
        if not trainer.is_global_zero or self._folder is None:
            return
        event = {"start": "INTERVAL_START", "stop": "INTERVAL_END"}.get(key.rpartition("_")[2], "POINT_IN_TIME")
        line = {
            "namespace": "",
            "time_ms": int(1000 * (time.time() if time_s is None else time_s)),
            "event_type": event,
            "key": key,
            "value": value,
            "metadata": metadata or {},
        }
        self._folder.mkdir(parents=True, exist_ok=True)
        with (self._folder / LOG).open("a") as file:
            file.write(f":::MLLOG {json.dumps(line)}\n")


def metric_direction(metric: str) -> Direction | None:
    """Returns whether higher or lower is better, by the words of the metric's name; None if no word shows it."""
    words = set(metric.lower().replace("/", "_").replace("-", "_").split("_"))
    if words & FALLS:
        return "min"
    return "max" if words & RISES else None


def _cost(spent: Evaluation) -> str:
    compiling = f" ({spent['compile_seconds']:.1f} s of it compiling)" if "compile_seconds" in spent else ""
    return f"{spent['seconds']:.1f} s{compiling}, {spent['samples']:,} samples, {spent['epochs']:.2f} epochs"
