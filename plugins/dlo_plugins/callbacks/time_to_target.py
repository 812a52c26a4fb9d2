"""How long a recipe takes to a given quality: MLPerf's question, and its log.

Mattson et al., "MLPerf Training Benchmark", 2019 (arXiv 1910.01500): the measure of a training system is the time to
a target of a validation metric. A run stops there. The lines written are of mlcommons' ``mllog`` format; they are no
submission, which has more keys and rules of its own.
"""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np
from lightning.pytorch import Callback, LightningModule, Trainer

from dlo_framework.errors import DloError, did_you_mean
from dlo_framework.progress import epochs_seen
from dlo_framework.rehearsal import run_folder
from dlo_framework.watch.monitor import batch_size, data_parallel_size
from dlo_framework.whole_file import write_whole
from dlo_plugins.callbacks.compile import Compile

Direction = Literal["max", "min"]
Evaluation = dict[str, float]

RESULT = "time_to_target.json"
LOG = "mlperf.log"
#: Words in a metric's name that tell which way is better.
RISES = {"acc", "acc1", "acc5", "accuracy", "auc", "auroc", "bleu", "f1", "iou", "miou", "map", "psnr", "recall"}
FALLS = {"loss", "err", "error", "mae", "mse", "rmse", "nll", "perplexity", "ppl", "wer", "cer", "fid"}


def reaches(value: float, target: float, mode: Direction) -> bool:
    """Returns whether a metric is at its target or past it; a NaN never is.

    In single precision, which metrics are computed in: 7 of 10 is 0.7 there, and less than 0.7 in double precision.
    """
    single, goal = np.float32(value), np.float32(target)
    return bool(single >= goal if mode == "max" else single <= goal)


def first_reaching(evaluations: list[Evaluation], target: float, mode: Direction) -> Evaluation | None:
    """Returns the first evaluation whose ``value`` is at the target or past it."""
    return next((one for one in evaluations if reaches(one["value"], target, mode)), None)


def best_of(evaluations: list[Evaluation], mode: Direction) -> Evaluation | None:
    """Returns the evaluation with the best ``value``, the earliest of equals; None if none has a number."""
    numbers = [one for one in evaluations if not math.isnan(one["value"])]
    return (max if mode == "max" else min)(numbers, key=lambda one: one["value"]) if numbers else None


def mllog_line(
    key: str, value: Any, time_ms: int, event: str = "POINT_IN_TIME", metadata: dict[str, Any] | None = None
) -> str:
    """Returns a line of MLPerf's log.

    Args:
        key: what is logged, ``run_start`` say.
        value: a JSON value.
        time_ms: milliseconds since 1970.
        event: ``INTERVAL_START``, ``INTERVAL_END`` or ``POINT_IN_TIME``.
        metadata: more about it.
    """
    line = {
        "namespace": "",
        "time_ms": time_ms,
        "event_type": event,
        "key": key,
        "value": value,
        "metadata": metadata or {},
    }
    return f":::MLLOG {json.dumps(line)}"


class TimeToTarget(Callback):
    """Stops the run when a validation metric reaches its target, and reports what it took to get there.

    That is MLPerf's way to judge a recipe (arXiv 1910.01500). Reported are seconds, samples of all ranks and epochs.
    The seconds are of training and validation together, from the first batch on. The clock goes on after a resume,
    without the time in between. What building and compiling take is given beside it (compiling, where the Compile
    callback counts it).

    The run folder gets ``time_to_target.json`` with all of that and each evaluation on the way, and ``mlperf.log`` in
    the format of MLPerf; TensorBoard gets ``time_to_target/*`` once the target is reached. A run that ends without
    reaching it says how near it came.

    Args:
        metric: name of a validation metric, ``val_acc1`` say. Rank 0's value decides for all ranks.
        target: the value to reach.
        mode: ``max`` if higher is better, ``min`` if lower is.

    Raises:
        DloError: on a metric that validation does not log, a mode that is not the metric's, or a run without
            validation.
    """

    def __init__(self, metric: str, target: float, mode: Direction = "max") -> None:
        if mode not in ("max", "min"):
            raise DloError(f"TimeToTarget: mode is max or min, but was {mode!r}")
        better = direction(metric)
        if better not in (None, mode):
            raise DloError(f"TimeToTarget: {metric} is better {_WORDS[better or mode]}; set mode: {better}")
        if not math.isfinite(target):
            raise DloError(f"TimeToTarget: target is a number that can be reached, but was {target}")
        self.metric = metric
        self.target = target
        self.mode = mode
        self.evaluations: list[Evaluation] = []
        self._folder: Path | None = None
        self._built = time.time(), time.perf_counter()
        self._init_seconds = 0.0
        self._before = 0.0  # seconds of the runs that this one resumes
        self._began: float | None = None
        self._samples = 0
        self._epochs = 0.0
        self._world = 1
        self._open = False
        self._in_epoch = False

    @property
    def seconds(self) -> float:
        """Seconds of training and validation so far, those before an interruption included."""
        return self._before + (0.0 if self._began is None else time.perf_counter() - self._began)

    def state_dict(self) -> dict[str, Any]:
        """The clock, the samples, and the evaluations on the way."""
        return {
            "seconds": self.seconds,
            "init_seconds": self._init_seconds,
            "samples": self._samples,
            "evaluations": [dict(one) for one in self.evaluations],
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes up the clock and the counts of the run that is resumed."""
        self._before, self._init_seconds = state_dict["seconds"], state_dict["init_seconds"]
        self._samples = state_dict["samples"]
        self.evaluations = [dict(one) for one in state_dict["evaluations"]]

    # --- the run -------------------------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks that the run validates, and that the model agrees on what is better."""
        if stage != "fit":
            return
        if not trainer.enable_validation:
            raise DloError(
                f"TimeToTarget waits for {self.metric}, but this run does not validate; give it validation data, a"
                " validation_step, and trainer.limit_val_batches above 0"
            )
        best, better = getattr(pl_module, "best_metric", None) or (None, None)
        if best == self.metric and better != self.mode:
            raise DloError(
                f"TimeToTarget: {type(pl_module).__name__} says that {best} is better {_WORDS[str(better)]}; set"
                f" mode: {better}"
            )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the clock; a run that is resumed past its target stops at once."""
        self._folder = run_folder(trainer)
        self._world = data_parallel_size(trainer)
        self._init_seconds += time.perf_counter() - self._built[1]
        self._began, self._in_epoch = time.perf_counter(), False
        self._log_start(trainer)
        if first_reaching(self.evaluations, self.target, self.mode) is not None:
            trainer.should_stop = True

    def _log_start(self, trainer: Trainer) -> None:
        self._log(trainer, "init_start", None, "INTERVAL_START", time_s=self._built[0])
        batch = getattr(trainer.train_dataloader, "batch_size", None)
        steps = trainer.accumulate_grad_batches
        if isinstance(batch, int):
            self._log(trainer, "global_batch_size", batch * self._world * steps)
        self._log(trainer, "gradient_accumulation_steps", steps)
        seed = os.environ.get("PL_GLOBAL_SEED")
        if seed is not None:
            self._log(trainer, "seed", int(seed))
        self._log(trainer, "init_stop", None, "INTERVAL_END")
        metadata = {"metric": self.metric, "target": self.target, "seconds_before": self._before}
        self._log(trainer, "run_start", None, "INTERVAL_START", metadata)
        self._open = True

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the epoch's start."""
        self._in_epoch = True
        self._log(trainer, "epoch_start", None, "INTERVAL_START", {"epoch_num": trainer.current_epoch + 1})

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Logs the start of an epoch that is resumed in the middle, which Lightning does not."""
        if not self._in_epoch:
            self.on_train_epoch_start(trainer, pl_module)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the epoch's end."""
        self._in_epoch = False
        self._log(trainer, "epoch_stop", None, "INTERVAL_END", {"epoch_num": trainer.current_epoch + 1})

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Counts samples and epochs."""
        self._samples += batch_size(batch) * self._world
        self._epochs = epochs_seen(trainer, with_this_batch=True)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Logs the validation's start."""
        if self._open:
            self._log(trainer, "eval_start", None, "INTERVAL_START", self._place())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reads the metric, and stops the run if it is at its target."""
        if not self._open or trainer.state.fn != "fit":
            return
        value = self._value(trainer)
        if value is not None:
            reached_before = first_reaching(self.evaluations, self.target, self.mode) is not None
            self.evaluations.append({"value": value, **self._spent(trainer), "steps": trainer.global_step})
            self._log(trainer, "eval_accuracy", value, metadata={**self._place(), "metric": self.metric})
        self._log(trainer, "eval_stop", None, "INTERVAL_END", self._place())
        if value is not None and not reached_before and reaches(value, self.target, self.mode):
            trainer.should_stop = True
            self._tell(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the result, and says so where the target was not reached."""
        self._close(trainer)
        if first_reaching(self.evaluations, self.target, self.mode) is None:
            self._tell(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Writes how far the run has come."""
        self._close(trainer)

    # --- what is told --------------------------------------------------------------------------------------

    def _value(self, trainer: Trainer) -> float | None:
        """Returns the metric, rank 0's on all ranks; None if this one of several validations has not logged it."""
        metrics = trainer.callback_metrics
        if self.metric in metrics:
            return float(trainer.strategy.broadcast(float(metrics[self.metric])))
        if self.evaluations:
            return None
        raise DloError(
            f"TimeToTarget: validation logs no '{self.metric}'{did_you_mean(self.metric, metrics) or ';'} it logs:"
            f" {', '.join(sorted(metrics)) or 'none'}"
        )

    def _spent(self, trainer: Trainer) -> Evaluation:
        """Returns what the run has cost so far."""
        compiling = [one.seconds for one in trainer.callbacks if isinstance(one, Compile)]  # type: ignore[attr-defined]
        spent = {"seconds": self.seconds, "samples": self._samples, "epochs": self._epochs}
        return spent | ({"compile_seconds": sum(compiling)} if compiling else {})

    def _place(self) -> dict[str, Any]:
        return {"epoch_num": self._epochs, "samples_count": self._samples}

    def result(self) -> dict[str, Any]:
        """Returns what ``time_to_target.json`` holds: the cost of the target, or of the whole run if it is not met."""
        reached = first_reaching(self.evaluations, self.target, self.mode)
        best = best_of(self.evaluations, self.mode)
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

    def _tell(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Prints the result; logs it if the target was reached."""
        reached = first_reaching(self.evaluations, self.target, self.mode)
        sign = ">=" if self.mode == "max" else "<="
        goal = f"{self.metric} {sign} {self.target:g}"
        if reached is None:
            best = best_of(self.evaluations, self.mode)
            near = f"the best was {best['value']:.6g} after {_cost(best)}" if best else "it was never measured"
            pl_module.print(f"target not reached: {goal}; {near}")
            return
        pl_module.print(f"target reached: {goal} ({reached['value']:.6g}) after {_cost(reached)}")
        scalars = {f"time_to_target/{name}": value for name, value in reached.items() if name != "value"}
        for logger in trainer.loggers:
            logger.log_metrics(scalars, step=trainer.global_step)

    def _close(self, trainer: Trainer) -> None:
        """Ends the log and writes the result, once."""
        if not self._open:
            return
        self._before, self._began = self.seconds, None
        result = self.result()
        status = "success" if result["reached"] else "aborted"
        self._log(trainer, "run_stop", None, "INTERVAL_END", {"status": status, **self._place()})
        self._open = False
        if trainer.is_global_zero and self._folder is not None:
            write_whole(self._folder / RESULT, f"{json.dumps(result, indent=2)}\n")

    def _log(
        self,
        trainer: Trainer,
        key: str,
        value: Any,
        event: str = "POINT_IN_TIME",
        metadata: dict[str, Any] | None = None,
        time_s: float | None = None,
    ) -> None:
        """Adds a line to ``mlperf.log``, on rank 0."""
        if trainer.is_global_zero and self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            line = mllog_line(key, value, int(1000 * (time.time() if time_s is None else time_s)), event, metadata)
            with (self._folder / LOG).open("a") as file:
                file.write(line + "\n")


_WORDS = {"max": "the higher it is", "min": "the lower it is"}


def direction(metric: str) -> Direction | None:
    """Returns which way a metric is better, where a word of its name tells."""
    words = set(metric.lower().replace("/", "_").replace("-", "_").split("_"))
    if words & FALLS:
        return "min"
    return "max" if words & RISES else None


def _cost(spent: Evaluation) -> str:
    compiling = f" ({spent['compile_seconds']:.1f} s of it compiling)" if "compile_seconds" in spent else ""
    return f"{spent['seconds']:.1f} s{compiling}, {spent['samples']:,} samples, {spent['epochs']:.2f} epochs"
