"""Quantisation of a trained model in one process: calibration, conversion, export, and the report on it."""

from __future__ import annotations

import copy
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from torch import Tensor, nn
from torchmetrics import Metric

from dlo_framework.batches import batch_size, slice_batch
from dlo_framework.callback import PluginCallback
from dlo_framework.checkpoint import SafeCheckpointIO
from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.plan import NoBlocksError
from dlo_framework.task import Task, inner_model
from dlo_framework.units import format_bytes
from dlo_plugins.quantise.export import both_files, check_target, export_model, onnx_forward, to_cpu
from dlo_plugins.quantise.quantised_layers import (
    choose_layers,
    computes_in_bf16,
    convert,
    measure_bytes,
    observed_inputs,
)
from dlo_plugins.quantise.schemes import QuantisationOptions

#: Rounds of the latency measurement; the first one warms up.
ROUNDS = 30
#: Seconds after which it ends with fewer rounds.
MOST_SECONDS = 20.0


@dataclass(frozen=True)
class Latency:
    """Latency of a forward on the CPU, in ms; medians of rounds in which the models take turns.

    Attributes:
        batch_size: Number of samples.
        threads: Number of threads.
        before: Median of the float model.
        after: Median of the quantised model.
        control: Median of the float model, measured a second time in each round.
        rounds: Number of rounds.
        onnx: Median of the ONNX export in ONNX Runtime; None where there is none.
    """

    batch_size: int
    threads: int
    before: float
    after: float
    control: float
    rounds: int
    onnx: float | None = None


@dataclass
class QuantisationReport:
    """Report on a quantised model.

    Attributes:
        scheme: Name of the scheme.
        when: ``post`` or ``aware``.
        group_size: Number of input features of a group; None for schemes without groups.
        layers: Number of quantised layers.
        before: Metrics of the float model.
        after: Metrics of the quantised model.
        bytes_before: Bytes of the float model, [model, quantised layers' weights].
        bytes_after: Bytes of the quantised model.
        latency: Latencies on the CPU; empty where it has no kernels for the scheme.
        exported: Files or folders that were written.
    """

    scheme: str
    when: str
    group_size: int | None
    layers: int
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    bytes_before: tuple[int, int] = (0, 0)
    bytes_after: tuple[int, int] = (0, 0)
    latency: list[Latency] = field(default_factory=list)
    exported: list[str] = field(default_factory=list)

    def is_faster_in_onnx(self) -> bool:
        """Returns whether ONNX Runtime takes less time than torchao's kernels, over the measured batches together."""
        return sum(one.onnx or math.inf for one in self.latency) < sum(one.after for one in self.latency)

    def scalars(self) -> dict[str, float]:
        """Returns values for the logger."""
        scalars = {f"quantised/{name}": value for name, value in self.after.items()}
        scalars |= {f"quantised/{name}_before": value for name, value in self.before.items()}
        scalars["quantised/size_ratio"] = self.bytes_before[0] / self.bytes_after[0]
        scalars["quantised/weights_ratio"] = self.bytes_before[1] / self.bytes_after[1]
        for one in self.latency:
            scalars[f"quantised/latency_ms_batch_{one.batch_size}"] = one.after
            scalars[f"quantised/latency_ms_batch_{one.batch_size}_before"] = one.before
            if one.onnx is not None:
                scalars[f"quantised/latency_ms_batch_{one.batch_size}_onnx"] = one.onnx
        return scalars

    def files(self, folder: Path) -> str:
        """Returns a line with the exports in a folder; empty if there are none."""
        return f"\nexported: {', '.join(str(folder / name) for name in self.exported)}" if self.exported else ""

    def table(self) -> str:
        """Returns the report as a table of three columns."""
        head = f"quantised by {self.scheme}" + (f", groups of {self.group_size}" if self.group_size else "")
        rows = [(f"{head}, {self.when}", "before", "after")]
        rows += [(name, f"{value:.4f}", f"{self.after[name]:.4f}") for name, value in self.before.items()]
        sizes = (("model", 0), (f"weights of {self.layers} layers", 1))
        for name, number in sizes:
            before, after = self.bytes_before[number], self.bytes_after[number]
            rows.append((name, format_bytes(before), f"{format_bytes(after)}, {before / after:.2f} times smaller"))
        for one in self.latency:
            name = f"CPU latency, batch {one.batch_size}, {one.threads} thread{'s' if one.threads > 1 else ''}"
            for kind, milliseconds in ((name, one.after), (f"{name}, ONNX Runtime", one.onnx)):
                if milliseconds is not None:
                    times = f"{one.before / milliseconds:.2f} times as fast"
                    rows.append((kind, f"{one.before:.2f} ms", f"{milliseconds:.2f} ms, {times}"))
        widths = [max(len(row[column]) for row in rows) + 2 for column in (0, 1)]
        return "\n".join(f"{a:<{widths[0]}}{b:<{widths[1]}}{c}" for a, b, c in rows)


def measure_latency(
    before: Callable[[], Any],
    after: Callable[[], Any],
    batch_size: int,
    rounds: int = ROUNDS,
    onnx: Callable[[], Any] | None = None,
) -> Latency:
    """Measures forwards on the CPU, in turns.

    Args:
        before: Forward of the float model.
        after: Forward of the quantised model.
        batch_size: Number of samples of the forward.
        rounds: Number of rounds, besides the first.
        onnx: Forward of the quantised model's ONNX export.
    """
    contestants = {"before": before, "after": after, "control": before} | ({"onnx": onnx} if onnx else {})
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    began = time.perf_counter()
    with torch.inference_mode():
        for number in range(rounds + 1):
            for name, run in contestants.items():
                start = time.perf_counter()
                run()
                if number:
                    seconds[name].append(time.perf_counter() - start)
            if number >= 3 and time.perf_counter() - began > MOST_SECONDS:
                break
    medians = {name: statistics.median(values) * 1000 for name, values in seconds.items()}
    return Latency(batch_size, torch.get_num_threads(), rounds=len(seconds["before"]), **medians)


#: Largest batch of the latency measurement, besides a single sample.
_LARGEST = 32


@dataclass(frozen=True)
class EvaluationData:
    """Source of batches for one process: a datamodule, or loaders of the whole data.

    Attributes:
        datamodule: Datamodule; None without one.
        train: Training loader; None for the datamodule's or the module's own.
        val: Validation loader; None for the datamodule's or the module's own.
    """

    datamodule: LightningDataModule | None = None
    train: Any = None
    val: Any = None


def head_patterns(module: LightningModule) -> tuple[str, ...]:
    """Returns the patterns of the modules after the last block; empty for a module without a plan."""
    if not isinstance(module, Task):
        return ()
    try:
        return module.parallel_plan().head
    except NoBlocksError:
        return ()


def named_layers(module: LightningModule, options: QuantisationOptions, slices: int = 1) -> list[str]:
    """Returns the names of the layers to quantise, relative to the inner model; see :func:`.choose_layers`."""
    skip, head = options.skip, head_patterns(module)
    return choose_layers(inner_model(module), options.scheme, options.group_size, skip, head, slices)


def fresh_copy(module: LightningModule) -> LightningModule:
    """Returns a copy of a module without its trainer, and without the model of a task, which it builds again."""
    twin, left_out = copy.copy(module), ("model",) if isinstance(module, Task) else ()
    twin._modules = {name: part for name, part in module._modules.items() if name not in left_out}
    twin.trainer = None
    return copy.deepcopy(twin)


class PostTraining:
    """Quantises a trained module in one process, and reports on it.

    Args:
        options: Options of the quantisation.
        data: Source of batches.
        device: Device of the evaluation.
    """

    def __init__(self, options: QuantisationOptions, data: EvaluationData, device: torch.device) -> None:
        self.options, self.data, self.device = options, data, device
        self.trainer = self._make_trainer("32-true")

    def _make_trainer(self, precision: Any) -> Trainer:
        limit, device = self.options.limit_val_batches, self.device
        kwargs: dict[str, Any] = {} if limit is None else {"limit_val_batches": limit}
        trainer = Trainer(
            accelerator="cpu" if device.type == "cpu" else "gpu" if device.type == "cuda" else device.type,
            devices=[device.index or 0] if device.type == "cuda" else 1,
            precision=precision,
            logger=False,
            callbacks=[_OneProcess()],
            plugins=[SafeCheckpointIO()],
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **kwargs,
        )
        use_canonical_checkpoints(trainer)
        return trainer

    def run(self, module: LightningModule, checkpoint: Path | None, when: str, folder: Path) -> QuantisationReport:
        """Evaluates, quantises, evaluates again, measures, and exports.

        Args:
            module: Module to quantise, in place.
            checkpoint: Checkpoint of its weights; None for those that it has.
            when: ``post``, or ``aware`` for a model that was trained with rounding, for the report.
            folder: Folder for exports.

        Raises:
            DloError: If a layer cannot be quantised, calibrated or exported.
        """
        options, scheme = self.options, self.options.scheme
        before = self._evaluate(module, checkpoint)
        module.to(self.device)  # Lightning has moved it to the CPU after the evaluation.
        model, names = inner_model(module).eval(), named_layers(module, options)
        for target in options.targets:
            check_target(target, module, scheme)
        scales = self._calibrate(module, names) if scheme.activations == "static" else None
        float_model = _copy_on_cpu(module)
        report = QuantisationReport(
            scheme.name, when, options.group_size if scheme.is_grouped else None, len(names), before
        )
        report.bytes_before = measure_bytes(model, names)
        convert(model, names, scheme, options.group_size, self.device, scales)
        report.bytes_after = measure_bytes(model, names)
        if computes_in_bf16(scheme, self.device):  # Batches are not: autocast casts them.
            self.trainer = self._make_trainer("bf16-mixed")
        report.after = self._evaluate(module, None)
        cpu = torch.device("cpu")
        runs_on_cpu, inputs = not scheme.lacks(cpu), self._inputs(module)
        chooses = options.exports_faster and not options.targets and runs_on_cpu
        for target in both_files(module, inputs) if chooses else options.targets:
            path = folder / target
            path.parent.mkdir(parents=True, exist_ok=True)
            export_model(path, module, model, float_model, names, options, self.device, scales, inputs)
            report.exported.append(target)
        if runs_on_cpu:
            on_cpu = model
            if self.device.type != "cpu":
                on_cpu = copy.deepcopy(float_model)
                convert(on_cpu, names, scheme, options.group_size, cpu, to_cpu(scales))
            onnx = next((folder / target for target in report.exported if target.endswith(".onnx")), None)
            report.latency = self._measure(module, float_model, on_cpu, onnx)
        if chooses and report.exported:
            slower = report.exported.pop(report.is_faster_in_onnx())
            (folder / slower).unlink()
        return report

    def _evaluate(self, module: LightningModule, checkpoint: Path | None) -> dict[str, float]:
        """Returns the validation metrics of a module."""
        source: dict[str, Any] = {"datamodule": self.data.datamodule}
        if self.data.datamodule is None and self.data.val is not None:
            source = {"dataloaders": self.data.val}
        path = None if checkpoint is None else str(checkpoint)
        self.trainer.validate(module, ckpt_path=path, verbose=False, weights_only=False, **source)
        return {name: float(value) for name, value in self.trainer.callback_metrics.items()}

    def _batches(self, module: LightningModule, count: int) -> list[Any]:
        """Returns training batches on the device, as a step would get them."""
        loader, data = self.data.train, self.data.datamodule
        if data is not None:
            data.setup("fit")
            loader = data.train_dataloader()
        elif loader is None:
            loader = module.train_dataloader()
        strategy = self.trainer.strategy
        # As Lightning's loops (2.6) do: first the hooks on the host, then the transfer with its hooks.
        return [
            strategy.batch_to_device(module._on_before_batch_transfer(batch), self.device)
            for batch in itertools.islice(loader, count)
        ]

    @torch.no_grad()
    def _calibrate(self, module: LightningModule, names: Sequence[str]) -> dict[str, Tensor]:
        """Returns the scale of each layer's input over training batches."""
        model = inner_model(module)
        with observed_inputs(model, names) as scales:
            for batch in self._batches(module, self.options.calibration_batches):
                args, kwargs = model_inputs(module, batch)
                model(*args, **kwargs)
            return scales()

    def _inputs(self, module: LightningModule) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the model's arguments for a training batch, on the CPU."""
        return _on_cpu(model_inputs(module, _on_cpu(self._batches(module, 1)[0])))

    def _measure(
        self, module: LightningModule, before: nn.Module, after: nn.Module, onnx: Path | None
    ) -> list[Latency]:
        batch = _on_cpu(self._batches(module, 1)[0])
        sizes = dict.fromkeys((1, min(batch_size(batch), _LARGEST)))
        latencies = []
        for size in sizes:
            args, kwargs = _on_cpu(model_inputs(module, slice_batch(batch, 0, size)))
            of_onnx = None if onnx is None else onnx_forward(onnx, args)
            of_before, of_after = (partial(model, *args, **kwargs) for model in (before, after))
            latencies.append(measure_latency(of_before, of_after, size, onnx=of_onnx))
        return latencies


def model_inputs(module: LightningModule, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of :func:`inner_model` for a batch; a plain module gets a pair's first item."""
    if isinstance(module, Task):
        return module.inputs(batch)
    return (batch[0] if isinstance(batch, tuple | list) else batch,), {}


def _copy_on_cpu(module: LightningModule) -> nn.Module:
    if isinstance(module, Task):
        return copy.deepcopy(module.model).cpu()
    trainer, module.trainer = module.trainer, None
    try:
        return copy.deepcopy(module).cpu()
    finally:
        module.trainer = trainer


def _on_cpu(nest: Any) -> Any:
    from lightning.fabric.utilities import move_data_to_device

    return move_data_to_device(nest, "cpu")


class _OneProcess(PluginCallback):
    """Keeps metrics from joining those of other ranks, which are not evaluating."""

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Switches their synchronisation off."""
        for part in pl_module.modules():
            if isinstance(part, Metric):
                part.sync_on_compute = False
