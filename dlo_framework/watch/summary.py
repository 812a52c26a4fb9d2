"""Record of a run, `RunRecord`: ``config.yaml`` at the start, ``summary.json`` and a printed table at the end."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import yaml
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, ModelSummary
from lightning.pytorch.loggers import Logger

from dlo_framework.atomic_file import write_atomic
from dlo_framework.callback import PluginCallback, callbacks_of
from dlo_framework.checkpoint import locate, note_resumption, resumptions
from dlo_framework.checkpoint.loading import RUN_FOLDER, Best, relocate_paths
from dlo_framework.errors import first_line
from dlo_framework.extensions import versions
from dlo_framework.local_memory import memory_peak
from dlo_framework.run import runs
from dlo_framework.run.resume import KEY
from dlo_framework.strategy_abilities import CanonicalCheckpoints
from dlo_framework.strategy_contract import contract_of
from dlo_framework.units import format_bytes
from dlo_framework.watch.monitor import RunMonitor, is_tensorboard
from dlo_framework.watch.state_bytes import StateReport, TrafficReport


class ModelTable(ModelSummary):
    """Table of a model's parts at the start of a run, in place of Lightning's default one.

    Lightning (2.6) shows FLOPs of 0 unless the module has an ``example_input_array``. RunMonitor logs those of a step.
    """

    @staticmethod
    def summarize(
        summary_data: list[tuple[str, list[str]]],
        total_parameters: int,
        trainable_parameters: int,
        model_size: float,
        total_training_modes: dict[str, int],
        total_flops: int = 0,
        **summarize_kwargs: Any,
    ) -> None:
        """Prints the parts with their types and parameters, and the sums.

        Args:
            summary_data: Names of columns, each with the entries of the parts.
            total_parameters: Number of parameters.
            trainable_parameters: Number of those that train.
            model_size: Bytes of the parameters, in MB.
            total_training_modes: Number of modules by mode; unused.
            total_flops: FLOPs of a forward of ``example_input_array``; 0 without one.
            summarize_kwargs: Further options of the callback; unused.
        """
        dropped = {" ", "Mode", *(() if total_flops else ("FLOPs",))}
        columns = [[name.lower(), *entries] for name, entries in summary_data if name not in dropped]
        widths = [max(map(len, column)) for column in columns]
        for row in zip(*columns, strict=True):
            print("  ".join(entry.ljust(width) for entry, width in zip(row, widths, strict=True)).rstrip())
        print(
            f"{total_parameters:,} parameters, {trainable_parameters:,} of them train,"
            f" {format_bytes(model_size * 1e6)}\n",
            flush=True,
        )


@runtime_checkable
class RunFacts(Protocol):
    """Callback that adds entries to ``summary.json``."""

    def summary_facts(self, trainer: Trainer) -> dict[str, Any]:
        """Returns JSON values by name; called on rank 0 alone, also after an interruption.

        Args:
            trainer: Trainer of the run.
        """


class RunRecord(PluginCallback):
    """Writes the run's config at the start, and its summary at the end; on by default.

    ``config.yaml`` is the config of the run with every default filled in: ``dlo fit --config`` takes it.
    ``summary.json`` holds metrics, steps, samples, seconds, samples/s, the median step time, peak memory, strategy,
    world size (with the step of each change), versions, communication of a step and the best checkpoint's path, and
    what callbacks add (:class:`RunFacts`). A number that is NaN or infinite is null. It is also written for an
    interrupted run, with that status.

    Args:
        folder: Folder of the run.
        config: Resolved config, as YAML.
        monitor: Monitor that counts samples, seconds and memory.
        state: Report of the bytes of parameters, gradients and optimizer state; None to leave them out.
        traffic: Report of the communication of a step; None to leave it out.
    """

    def __init__(
        self, folder: Path, config: str, monitor: RunMonitor, state: StateReport | None = None,
        traffic: TrafficReport | None = None,
    ) -> None:  # fmt: skip
        self.folder = Path(folder)
        self.config = config
        self.monitor = monitor
        self.state, self.traffic = state, traffic
        self._began = time.perf_counter()
        self._before = 0.0  # seconds of the runs that this run resumes
        self._world_sizes: list[list[int]] = []  # each as the step from which on it holds, and the ranks
        self._place = ""  # path of the folder, without links
        self._goes_on_from: Path | None = None
        self._metrics: dict[str, Any] = {}  # of the run that this run resumes
        self._trains = False

    @property
    def seconds(self) -> float:
        """Seconds since the start of training, those before an interruption included."""
        return self._before + time.perf_counter() - self._began

    def state_dict(self) -> dict[str, Any]:
        """Returns the seconds and the numbers of ranks, for a resumed run to continue."""
        return {"seconds": self.seconds, "world_sizes": self._world_sizes}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the seconds and the numbers of ranks of the run that is resumed."""
        self._before = state_dict["seconds"]
        self._world_sizes = state_dict.get("world_sizes", [])  # Older checkpoints have none.

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Adds the run's folder: other callbacks save paths in it, and the folder may be moved."""
        checkpoint[RUN_FOLDER] = self._place

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Updates the ModelCheckpoints' saved paths, which they load after this, if the run was moved or copied."""
        self._metrics = dict(checkpoint.get(KEY, {}).get("metrics", {}))
        path = Path(trainer.ckpt_path) if trainer.ckpt_path and trainer.state.fn == "fit" else None
        if path is not None and path.parent.resolve() == (self.folder / runs.CHECKPOINTS).resolve():
            self._goes_on_from = path
            relocate_paths(checkpoint, self._place)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Writes ``config.yaml``, and logs the config as hyperparameters."""
        place = (str(self.folder), os.path.realpath(self.folder))
        folder, self._place = trainer.strategy.broadcast(place)
        self.folder = Path(folder)
        if not trainer.is_global_zero:
            return
        runs.check_space(self.folder)
        path = self.folder / "config.yaml"
        if path.exists() and path.read_text() != self.config:
            resumed = len(list(self.folder.glob("config.resumed-*.yaml"))) + 1
            path = self.folder / f"config.resumed-{resumed}.yaml"
        path.write_text(self.config)
        for logger in trainer.loggers:
            options = _flat(yaml.safe_load(self.config) or {})
            if is_tensorboard(logger):
                logger.hparams.update(options)  # Logged with the model's own.
                logger.experiment.add_text("config", f"```yaml\n{self.config}\n```")
            else:
                logger.log_hyperparams(options)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts the run's clock, and records a resumption and its ranks, now that the run has loaded its state."""
        self._began, self._trains = time.perf_counter(), True
        earlier = [entry for entry in self._world_sizes if entry[0] < trainer.global_step]
        if not earlier or earlier[-1][1] != trainer.world_size:
            earlier.append([trainer.global_step, trainer.world_size])
        self._world_sizes = earlier
        path, self._goes_on_from = self._goes_on_from, None
        if path is not None and trainer.is_global_zero:
            note_resumption(path)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the summary, and prints the table and the command for the curves."""
        summary = self.write(trainer, "finished")
        if trainer.is_global_zero and summary is not None:
            for logger in trainer.loggers:
                if is_tensorboard(logger):
                    # With a prefix: under the curves' names they would be points of the curves.
                    final = {f"final/{name}": value for name, value in summary["metrics"].items()}
                    known = {**logger.hparams, **_flat(yaml.safe_load(self.config))}  # Callbacks may have added some.
                    logger.log_hyperparams(known, final, step=summary["steps"])
            print_table(self.folder, summary)
            _print_curves(self.folder, trainer.loggers)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Writes the summary of a run that failed; an error in doing so is printed, and does not hide the first one."""
        if trainer.state.fn != "fit" or not trainer.is_global_zero or not self.folder.is_dir():
            return
        if not self._trains and any((self.folder / runs.CHECKPOINTS).glob("*")):
            return  # It could not go on: what the run has reached stands in its summary and its checkpoints.
        why = ""
        for _ in range(2):  # torch's signal handler may raise here, once, that a loading process was killed.
            try:
                self.write(trainer, f"interrupted: {type(exception).__name__}")
                return
            except Exception as error:  # A full disk, or an accelerator that has failed.
                why = first_line(error)
        print(f"dlo: the summary of this run could not be written: {why}", file=sys.stderr, flush=True)

    def write(self, trainer: Trainer, status: str) -> dict[str, Any] | None:
        """Writes ``summary.json`` atomically on rank 0, and returns its content.

        Raises:
            DloError: if the file cannot be written.
        """
        if not trainer.is_global_zero:
            return None
        summary = self.summary(trainer, status)
        finite = json.loads(json.dumps(summary), parse_constant=lambda _: None)  # JSON has neither NaN nor infinity.
        write_atomic(self.folder / runs.SUMMARY, json.dumps(finite, indent=2) + "\n")
        return summary

    def summary(self, trainer: Trainer, status: str) -> dict[str, Any]:
        """Returns the summary; paths are relative to the run's folder, which may be moved."""
        kept = [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint) and c.monitor]
        monitored = kept[0].monitor if kept else None
        best = self._best(trainer, kept[0]) if kept else None
        samples, seconds, train_loss = self.monitor.totals()
        # With those of the resumed run: one that was complete when it was killed logs nothing more.
        metrics = {**self._metrics, **trainer.callback_metrics}
        facts = [each.summary_facts(trainer) for each in callbacks_of(trainer) if isinstance(each, RunFacts)]
        added = {name: value for each in facts for name, value in each.items()}
        return {
            **added,
            "status": status,
            "metrics": {name: float(value) for name, value in sorted(metrics.items())},
            "train_loss": train_loss,
            "best_checkpoint": os.path.relpath(os.path.realpath(best.path), self._place) if best else None,
            "best_metric": {monitored: best.score} if best and monitored and best.score is not None else None,
            "resumptions": resumptions(self.folder / runs.CHECKPOINTS),
            "epochs": trainer.current_epoch,
            "steps": trainer.global_step,
            "samples": samples,
            "corrupt_samples": int(self.monitor.latest.get("data/corrupt_samples", 0)),
            "seconds": round(self.seconds, 3),
            "training_seconds": round(seconds, 3),
            "samples_per_second": round(samples / seconds, 3) if seconds else None,
            "step_seconds": self.monitor.step_seconds,
            "flops_per_sample": (self.monitor.flops.per_sample or None) if self.monitor.flops else None,
            "peak_memory_bytes": memory_peak(trainer.strategy.root_device),
            "state_bytes": self.state.summary() if self.state else None,
            "traffic": self.traffic.summary() if self.traffic else None,
            "strategy": type(trainer.strategy).__name__,
            "accelerator": type(trainer.accelerator).__name__,
            "precision": str(trainer.precision),
            "world_size": trainer.world_size,
            "world_sizes": [{"from_step": step, "ranks": ranks} for step, ranks in self._world_sizes],
            "versions": versions(),
        }

    def _best(self, trainer: Trainer, checkpoint: ModelCheckpoint) -> Best | None:
        """Returns the best checkpoint on disk.

        Lightning (2.6) sets the path of a new one before it is saved. If the save failed, the previous one is still on
        disk, and the newest checkpoint names it. One that is being written in the background counts as saved.
        """
        path, score = checkpoint.best_model_path, checkpoint.best_model_score
        if not path:
            return None
        saver = contract_of(trainer.strategy).find_ability(CanonicalCheckpoints)
        if locate(path) is None and not (saver is not None and saver.is_saving):
            return runs.best_until_newest(self.folder)
        return Best(Path(path), None if score is None else float(score))


def print_table(folder: Path, summary: dict[str, Any]) -> None:
    """Prints the table of a run that has ended, one line for each entry, so that paths can be copied."""
    rows = {name: f"{value:.4f}" for name, value in summary["metrics"].items()}
    rows |= {f"best {name}": f"{value:.4f}" for name, value in (summary["best_metric"] or {}).items()}
    rows["epochs, steps"] = f"{summary['epochs']}, {summary['steps']:,}"
    rate = summary["samples_per_second"]
    if rate:
        rows["samples"] = f"{summary['samples']:,} at {rate:,.0f} a second"
    if summary["corrupt_samples"]:
        rows["corrupt samples"] = f"{summary['corrupt_samples']:,} skipped"
    rows["time"] = f"{summary['seconds']:.0f} s, {summary['training_seconds']:.0f} s of it in training steps"
    rows["peak memory"] = format_bytes(summary["peak_memory_bytes"])
    if summary["state_bytes"]:
        rows |= _state_rows(summary["state_bytes"])
    sizes = ", then ".join(str(entry["ranks"]) for entry in summary["world_sizes"])
    rows["strategy"] = f"{summary['strategy']} on {sizes} rank(s), {summary['precision']}"
    folder = runs.shown(folder)
    rows["run folder"] = str(folder)
    if summary["best_checkpoint"]:
        rows["best checkpoint"] = str(folder / summary["best_checkpoint"])
    width = max(map(len, rows)) + 2
    print("\n" + "\n".join(f"{name:<{width}}{value}" for name, value in rows.items()), flush=True)


def _print_curves(folder: Path, loggers: Sequence[Logger]) -> None:
    """Prints the command that shows TensorBoard's curves, or else the folder of another logger."""
    board = next((logger for logger in loggers if is_tensorboard(logger)), None)
    others = [str(place) for logger in loggers if (place := logger.log_dir)]
    if board is not None:
        own = Path(board.log_dir).resolve() == folder.resolve()
        print(f"\nlook at it:  tensorboard --logdir {runs.shown(folder.parent) if own else board.root_dir}", flush=True)
    elif others:
        print(f"\nlook at it:  {' '.join(others)}", flush=True)


def _state_rows(state: dict[str, Any]) -> dict[str, str]:
    """Returns table rows with the measured bytes of each kind of state, beside those of the ZeRO paper's formula."""
    rows = {}
    for name in ("parameters", "gradients", "optimizer", "activations", "second_models"):
        if state.get(name) is not None:
            expected = (state["formula"] or {}).get(name)
            beside = f" (formula: {format_bytes(expected)})" if expected is not None else ""
            rows[f"  {name.replace('_', ' ')}"] = format_bytes(state[name]) + beside
    return rows


def _flat(content: Any, prefix: str = "") -> dict[str, Any]:
    """Returns nested mappings as one level of dotted keys, and lists as text, for a table."""
    if not isinstance(content, dict):
        simple = content if isinstance(content, int | float | str | bool) else str(content)
        return {prefix: simple} if content is not None else {}
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= _flat(value, f"{prefix}.{key}" if prefix else str(key))
    return flat
