"""Quantises a model: rounds weights and inputs in training, and converts the trained model with torchao.

Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference. Jacob et al., 2017,
arXiv 1712.05877. ZeroQuant: Efficient and Affordable Post-Training Quantization for Large-Scale Transformers. Yao et
al., 2022, arXiv 2206.01861 (scales per token). The kernels and formats are torchao's.

Bits of a weight, one less after twice as many steps each time, and later in layers of large curvature: DeepSpeed's
Mixture of Quantization (MoQ), 2021, https://www.deepspeed.ai/tutorials/MoQ-tutorial/: with a period of p steps, a bit
is dropped after p, 2p, 4p, ... steps of quantised training. DeepSpeed 0.19 has no MoQ any more. It multiplied the
period of a layer by `1 + floor(4 e)`, where e is the largest eigenvalue of its Hessian over that of all layers.
HAWQ-V2, Dong et al., 2019, arXiv 1911.03852, ranks layers by the mean of the Hessian's diagonal instead. Departure:
that diagonal is estimated by squared gradients (the empirical Fisher information), which each step has already: power
iterations need second derivatives, which fused attention kernels and sharded parameters do not give. Bits are those of
a layer, not of a block.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from dlo_framework.atomic_file import write_atomic
from dlo_framework.callback import PluginCallback
from dlo_framework.data.description import run_datamodule
from dlo_framework.distributed.step_primitives import torch_optimizer
from dlo_framework.ema import WeightEMA
from dlo_framework.errors import DloError, agreed_errors, check_choice, check_number
from dlo_framework.progress import epochs_seen, fraction_seen, optimizer_steps, parse_position
from dlo_framework.shards import local_data
from dlo_framework.strategy_abilities import mesh_spec
from dlo_framework.strategy_contract import contract_of
from dlo_framework.task import Task, checkable_module, inner_model
from dlo_framework.watch.media import log_scalars
from dlo_plugins.parallel.stepped_gradients import (
    UnitNorms,
    accumulation_dtype,
    check_reachable,
    is_divided,
    scale_of,
    stepped_gradients,
)
from dlo_plugins.quantise.export import check_name, check_target
from dlo_plugins.quantise.post_training import (
    EvaluationData,
    PostTraining,
    QuantisationReport,
    fresh_copy,
    named_layers,
)
from dlo_plugins.quantise.quantised_layers import FakeQuantiser
from dlo_plugins.quantise.schemes import (
    QuantisationOptions,
    check_device,
    check_group_size,
    check_torchao,
    find_scheme,
)

WHEN = ("post", "aware")
#: Folder of reports and exports in a run's folder.
FOLDER = "quantised"
#: Most bits at the start of a schedule: fewer than a float32 has digits.
_MOST_BITS = 16
#: Steps in which the curvature of layers is measured.
_MEASURED_STEPS = 8


class Quantise(PluginCallback):
    """Quantises the linear layers of a model, and reports accuracy, bytes and CPU latency before and after.

    With `when: aware`, training rounds weights and inputs to the levels of the scheme from `start` on, and validation
    shows the metrics of the rounded model. Gradients pass the rounding unchanged. Checkpoints keep the float weights
    under the same names, under every strategy. When training ends, rank 0 evaluates the float model, converts it with
    torchao, evaluates the converted model, and writes the report to `quantised/report.json` in the run's folder, to the
    loggers and to the run's last lines. With `when: post`, training is unchanged.

    The model's head, and layers that share their weight with another module, stay in float.

    Args:
        scheme: Scheme: `int8` (weights and activations, scales of activations per token), `int8_static` (scales of
            activations from calibration data; `when: post` only), `int8_weights`, `int4_weights` (in groups), `fp8`.
        when: `aware` to train with rounding, `post` to convert after training.
        start: Point of training from which it rounds, for `aware`: a share such as `50%`, or a number of epochs.
        skip: Patterns of modules that stay in float, such as `blocks.0` or `*.attn.proj`.
        group_size: Number of input features that share a scale in `int4_weights`: 32, 64 or 128; by default 32.
        start_bits: Bits of a weight at `start`, from which a bit is dropped after `period`, 2 `period`, 4 `period`, ...
            optimizer steps until the scheme's bits are reached (DeepSpeed's MoQ); None for the scheme's bits at once.
        period: Number of optimizer steps before the first bit is dropped; by default such that the last is dropped in
            the middle of the rounded part of training.
        mixed_bits: Whether layers in whose weights the loss has more curvature lose their bits later, by up to five
            times the period (MoQ), so that layers have different bits. It is measured in the first steps with rounding.
        calibration_batches: Number of training batches that set the scales of `int8_static`.
        report: Whether to convert the model and to report when training ends.
        export: Files to write after conversion, in the run's folder `quantised`: `model.pt2`, `model.onnx`, or for
            language models the name of a folder that transformers loads.

    Attributes:
        quantiser: Forward of the rounded layers; None while training does not round.
        last_report: Report of the last fit, on rank 0.

    Raises:
        DloError: If an option is invalid, a pattern matches nothing, or the device has no kernels for the scheme.
    """

    example = "{scheme: int8_weights, when: aware, start: 30%, report: false}"

    def __init__(
        self,
        scheme: str = "int8",
        when: str = "post",
        start: str | float = "50%",
        skip: list[str] | None = None,
        group_size: int | None = None,
        start_bits: int | None = None,
        period: int | None = None,
        calibration_batches: int = 8,
        report: bool = True,
        export: list[str] | None = None,
        mixed_bits: bool = False,
    ) -> None:
        check_torchao()
        check_choice("Quantise: when", when, WHEN)
        known_scheme = find_scheme(scheme)
        self.replaces_products = when == "aware"
        self.when, self.export, self.reports = when, tuple(export or ()), report
        self.start = parse_position(start, "Quantise: start", in_samples=False)
        if known_scheme.activations == "static" and when == "aware":
            raise DloError(
                "Quantise: when must be post for scheme int8_static, got aware: its scales of activations come from the"
                " trained model; set scheme: int8"
            )
        check_number("Quantise: calibration_batches", calibration_batches, "at least 1", "set 8")
        for target in self.export:
            check_name(target)
        if self.export and not report:
            raise DloError("Quantise: report must be true to export, got false; remove it, or export")
        self.start_bits, self.period, self.mixed_bits = start_bits, period, mixed_bits
        #: Whether it reads gradients, which :class:`OptimizerInBackward` frees.
        self.needs_gradients = mixed_bits
        self._check_schedule(known_scheme.bits if known_scheme.grid != "float8" else None)
        self.options = QuantisationOptions(
            known_scheme,
            check_group_size(known_scheme, group_size),
            tuple(skip or ()),
            calibration_batches,
            targets=self.export,
        )
        self.quantiser: FakeQuantiser | None = None
        self.last_report: QuantisationReport | None = None
        self._reset()

    def _reset(self) -> None:
        self._twin: LightningModule | None = None
        self._saved: Path | None = None
        self._names: list[str] | None = None  # Of the layers, in the task's model or the module.
        self._began: int | None = None  # Optimizer step at which rounding began.
        self._seen = -1  # Optimizer step of the last batch.
        self._curvature: LayerCurvature | None = None
        self._saved_curvature: dict[str, Any] | None = None  # Of a checkpoint.
        self._factors: list[int] = []  # Of the layers' periods.
        self._last_bits: list[int] = []  # Of the layers' weights, or one number.

    def _check_schedule(self, bits: int | None) -> None:
        if self.start_bits is None:
            if self.period is not None:
                raise DloError(
                    f"Quantise: start_bits must be set with period, got {self.period} without; set start_bits: 8"
                )
            if self.mixed_bits:
                raise DloError("Quantise: start_bits must be set with mixed_bits, got none; set start_bits: 8")
            return
        if self.when != "aware":
            raise DloError(f"Quantise: when must be aware with start_bits, got {self.when}; set when: aware")
        if bits is None or not bits < self.start_bits <= _MOST_BITS:
            least = f"from {bits + 1} to {_MOST_BITS}" if bits is not None else "unset for fp8"
            fix = f"set {min(bits * 2, _MOST_BITS)}" if bits is not None else "remove it"
            raise DloError(f"Quantise: start_bits must be {least}, got {self.start_bits}; {fix}")
        check_number("Quantise: period", self.period, "at least 1", "leave it out")

    # --- before training -----------------------------------------------------------------------------------

    def check_run(self, trainer: Trainer, module: LightningModule, datamodule: Any = None) -> None:
        """Checks the run's device and model, before processes start.

        Raises:
            DloError: If the device has no kernels, a pattern matches nothing, or a layer has the wrong shape.
        """
        check_device(self.options.scheme, trainer.strategy.root_device)
        if self.mixed_bits:
            check_reachable("Quantise", trainer)
        if self.reports and not is_overridden("validation_step", module):
            raise DloError(
                f"Quantise: {type(module).__name__} must have a validation_step for the report, got none; add one, or"
                " set report: false"
            )
        for target in self.export:
            check_target(target, module, self.options.scheme)
        if (checkable := checkable_module(module)) is not None:
            named_layers(checkable, self.options, self._slices(trainer))

    def _slices(self, trainer: Trainer) -> int:
        """Returns the number of slices that tensor parallelism cuts a row into, in training with rounding."""
        spec = mesh_spec(contract_of(trainer.strategy))
        return 1 if spec is None or self.when != "aware" else spec.tp

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the run, and copies the module before its model is built and cut."""
        self._reset()
        if stage != "fit":
            return
        with agreed_errors():
            if isinstance(pl_module, Task):
                pl_module.check(run_datamodule(trainer))  # It may read sizes of the model from the data.
            self.check_run(trainer, pl_module)
            if isinstance(pl_module, Task):
                # Of the full model: tensor parallelism changes shapes, which the choice checks.
                full = pl_module.on_meta()
                self._names = named_layers(full, self.options, self._slices(trainer))
                self._curvature = self._make_curvature(full) if self.mixed_bits else None
        if self.reports and trainer.is_global_zero:
            self._twin = fresh_copy(pl_module)

    # --- rounding ------------------------------------------------------------------------------------------

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begins to round at `start`, and sets the bits of the weights."""
        if self.when != "aware" or trainer.global_step == self._seen:
            return  # The micro-batches of a step have the same bits.
        self._seen = trainer.global_step
        if self._began is None:
            seen = fraction_seen(trainer) if self.start.unit == "runs" else epochs_seen(trainer)
            if seen < self.start.value:
                return
            self._began = trainer.global_step
        if self.quantiser is None:
            self._round(pl_module)
        assert self.quantiser is not None
        bits = self._bits(trainer, self._began)
        if bits == self._last_bits:
            return
        self._set_bits(bits)
        shown = " to ".join(dict.fromkeys((str(min(bits)), str(max(bits)))))
        rank_zero_info(f"Quantise: weights have {shown} bits from step {trainer.global_step} on")
        log_scalars(trainer, {"quantised/bits": sum(bits) / len(bits)})

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Goes on rounding in a resumed run, which may begin with a validation."""
        if self._last_bits and self.quantiser is None:
            self._round(pl_module)
            self._set_bits(self._last_bits)

    def _set_bits(self, bits: list[int]) -> None:
        assert self.quantiser is not None
        self._last_bits = bits
        if self.mixed_bits:
            self.quantiser.set_bits(bits)
        else:
            self.quantiser.bits = bits[0]

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Measures the curvature of the layers in the first steps with rounding, for `mixed_bits`."""
        if self.mixed_bits and self._began is not None and self._is_measuring(trainer, self._began):
            self._measured_curvature(trainer, pl_module).add(trainer.strategy, optimizer)

    def _measured_curvature(self, trainer: Trainer, module: LightningModule) -> LayerCurvature:
        """Returns the measurement so far, of a resumed run too."""
        if self._curvature is None:
            self._curvature = self._make_curvature(module)
        if self._saved_curvature is not None:
            self._curvature.load_state(self._saved_curvature, trainer.strategy.root_device)
            self._saved_curvature = None
        return self._curvature

    def _make_curvature(self, module: LightningModule) -> LayerCurvature:
        """Returns the measurement of a full model's layers."""
        prefix = "model." if isinstance(module, Task) else ""
        model, names = inner_model(module), self._names or named_layers(module, self.options)
        return LayerCurvature(
            {f"{prefix}{name}.weight": model.get_parameter(f"{name}.weight").numel() for name in names}
        )

    def _is_measuring(self, trainer: Trainer, began: int) -> bool:
        """Returns whether the curvature is still measured, which ends before the first bit is dropped."""
        return trainer.global_step - began < min(_MEASURED_STEPS, self._period(trainer, began))

    def _bits(self, trainer: Trainer, began: int) -> list[int]:
        """Returns the bits of each layer's weight; a single number where they are the same."""
        target = self.options.scheme.bits
        if self.start_bits is None:
            return [target]
        period, steps = self._period(trainer, began), trainer.global_step - began
        if self.mixed_bits and not self._factors and not self._is_measuring(trainer, began):
            self._factors = self._measured_curvature(trainer, trainer.lightning_module).factors()
        layers = len(self._names or ()) if self.mixed_bits else 1
        factors = self._factors or [1] * max(layers, 1)
        return [scheduled_bits(self.start_bits, target, period * factor, steps) for factor in factors]

    def _period(self, trainer: Trainer, began: int) -> int:
        if self.period is not None:
            return self.period
        assert self.start_bits is not None
        steps = optimizer_steps(trainer) - began
        if not math.isfinite(steps):
            with agreed_errors():
                raise DloError("Quantise: period must be set for a run without an end, got none; set trainer.max_steps")
        slowest = MOST if self.mixed_bits else 1
        return max(1, fitting_period(self.start_bits, self.options.scheme.bits, steps) // slowest)

    def _round(self, module: LightningModule) -> None:
        """Makes the layers of this rank's model round."""
        if self._names is None:
            self._names = named_layers(module, self.options)
        model = inner_model(module)
        self.quantiser = FakeQuantiser(self.options.scheme, self.options.group_size)
        self.quantiser.install([model.get_submodule(name) for name in self._names])

    def _stop_rounding(self, *_: Any, **__: Any) -> None:
        """Makes the layers compute as they did before."""
        if self.quantiser is not None:
            self.quantiser.remove()
            self.quantiser, self._last_bits = None, []

    on_exception = _stop_rounding

    def state_dict(self) -> dict[str, Any]:
        """Returns the step at which rounding began, the bits, and the measured curvature, for a resumed run."""
        curvature = self._saved_curvature
        if curvature is None and self._curvature is not None:
            curvature = self._curvature.state()
        return {"began": self._began, "bits": self._last_bits} | ({"curvature": curvature} if curvature else {})

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the step at which rounding began, the bits, and the measured curvature."""
        self._began, self._last_bits = state_dict["began"], list(state_dict.get("bits", ()))
        self._saved_curvature = state_dict.get("curvature") if self.mixed_bits else None

    # --- evaluation without training -----------------------------------------------------------------------

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Rounds in ``dlo validate``, ``test`` and ``predict`` too, at the scheme's bits."""
        if self.when == "aware" and trainer.state.fn != TrainerFn.FITTING and self.quantiser is None:
            twin = fresh_copy(pl_module) if isinstance(pl_module, Task) else None
            self._names = named_layers(twin.on_meta(), self.options) if isinstance(twin, Task) else None
            self._round(pl_module)

    on_test_start = on_predict_start = on_validation_start

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends what an evaluation of its own began."""
        if trainer.state.fn != TrainerFn.FITTING:
            self._stop_rounding()

    on_test_end = on_predict_end = on_validation_end

    # --- conversion ----------------------------------------------------------------------------------------

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the weights for the conversion, and makes the layers compute as they did before."""
        self._warn_of_bits(trainer)
        self._stop_rounding()
        if not self.reports or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        folder = Path(trainer.strategy.broadcast(str(trainer.default_root_dir))) / FOLDER
        self._saved = folder / "weights.ckpt"
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, WeightEMA):
                callback.on_train_end(trainer, pl_module)  # The average is converted; a second call changes nothing.
        trainer.save_checkpoint(self._saved, weights_only=True)

    def _warn_of_bits(self, trainer: Trainer) -> None:
        """Warns if the schedule has not reached the scheme's bits, which the converted model has."""
        target = self.options.scheme.bits
        if self.quantiser is None or max(self._last_bits, default=target) <= target:
            return
        assert self.start_bits is not None
        assert self._began is not None
        slowest = max(self._factors, default=1) * 2 ** (self.start_bits - target - 1)
        most = max(1, (trainer.global_step - self._began - 1) // slowest)
        rank_zero_warn(
            f"Quantise: weights must have {target} bits at the end of training, got up to {max(self._last_bits)}: the"
            f" converted model loses the rest at once; set period: {most}, an earlier start, or fewer start_bits"
        )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Converts the model on rank 0, writes the report, and prints it; other ranks have nothing left to do."""
        twin, saved = self._twin, self._saved
        self._twin = self._saved = None
        if twin is None or saved is None:
            return
        data = evaluation_data(trainer)
        options = self.options.with_limit(trainer.limit_val_batches)
        try:
            conversion = PostTraining(options, data, trainer.strategy.root_device)
            report = conversion.run(twin, saved, self.when, saved.parent)
        finally:
            if data.datamodule is not None:
                data.datamodule.trainer = trainer
            shutil.rmtree(saved) if saved.is_dir() else saved.unlink()
        self.last_report = report
        write_report(report, saved.parent)
        log_scalars(trainer, report.scalars())
        print(f"\n{report.table()}{report.files(saved.parent)}", flush=True)


def evaluation_data(trainer: Trainer) -> EvaluationData:
    """Returns the source of a fit's batches: its datamodule, or the loaders that the user gave.

    The trainer's own loaders may hold a rank's share. Lightning (2.6) has no public name for the given ones.
    """
    datamodule = run_datamodule(trainer)
    if datamodule is not None:
        return EvaluationData(datamodule)
    sources = (trainer.fit_loop._data_source, trainer.fit_loop.epoch_loop.val_loop._data_source)
    given = [None if isinstance(each.instance, LightningModule) else each.instance for each in sources]
    return EvaluationData(None, *given)


def write_report(report: QuantisationReport, folder: Path) -> None:
    """Writes a report as ``report.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "report.json", json.dumps(asdict(report), indent=2) + "\n")


#: Largest factor of a layer's period.
MOST = 5


class LayerCurvature:
    """Mean squared gradients of weights, over elements, steps and ranks.

    Args:
        sizes: Number of elements of each weight by its name, in full and in the same order on all ranks.

    Attributes:
        steps: Number of steps that were added.
    """

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes, self.steps = dict(sizes), 0
        self._sums: Tensor | None = None  # of each weight, on the device
        self._norms: tuple[int, UnitNorms] | None = None  # of divided weights, by the optimizer's id

    @torch.no_grad()
    def add(self, strategy: Any, optimizer: Any) -> None:
        """Adds the gradients with which an optimizer is about to step; called on all ranks."""
        stepped = [one for one in stepped_gradients(strategy, optimizer) if one.name in self.sizes]
        device, inner = strategy.root_device, torch_optimizer(optimizer)
        dtype = accumulation_dtype(device)
        if is_divided(strategy, stepped):
            if self._norms is None or self._norms[0] != id(inner):
                self._norms = id(inner), UnitNorms(list(self.sizes), stepped, device)
            norms = self._norms[1]
            rows = norms.measure(stepped)[1].square()
            squares = torch.stack([part.sum() for part in rows.split(norms.sizes)])
        else:
            squares = torch.zeros(len(self.sizes), dtype=dtype, device=device)
            places = {name: number for number, name in enumerate(self.sizes)}
            for one in stepped:
                if one.gradient is not None:
                    squares[places[one.name]] = local_data(one.gradient).to(dtype).square().sum()
        elements = torch.tensor(list(self.sizes.values()), dtype=dtype, device=device)
        means = squares / elements / scale_of(strategy) ** 2
        means.nan_to_num_(nan=0, posinf=0)  # A step that a loss scaler leaves out.
        self._sums = means if self._sums is None else self._sums + means
        self.steps += 1

    def factors(self) -> list[int]:
        """Returns the factor of each weight's period, from 1 to :data:`MOST`."""
        values = self.state()["sums"]
        most = max(values, default=0.0)
        return [1 + int((MOST - 1) * value / most) if most else 1 for value in values]

    def state(self) -> dict[str, Any]:
        """Returns sums and steps as plain data."""
        return {"sums": [] if self._sums is None else self._sums.tolist(), "steps": self.steps}

    def load_state(self, state: dict[str, Any], device: torch.device) -> None:
        """Restores what :meth:`state` has returned."""
        self.steps = state["steps"]
        sums = torch.tensor(state["sums"], dtype=accumulation_dtype(device), device=device)
        self._sums = sums if state["sums"] else None


def scheduled_bits(start_bits: int, target_bits: int, period: int, steps: int) -> int:
    """Returns the bits of a weight in quantised training.

    Args:
        start_bits: Bits at the start of quantised training.
        target_bits: Bits at the end.
        period: Number of optimizer steps before the first bit is dropped.
        steps: Number of optimizer steps of quantised training so far.
    """
    return max(target_bits, start_bits - (steps // period).bit_length())


def fitting_period(start_bits: int, target_bits: int, steps: float) -> int:
    """Returns the period by which the target is reached after half of the steps of quantised training.

    Args:
        start_bits: Bits at the start.
        target_bits: Bits at the end.
        steps: Number of optimizer steps of quantised training.
    """
    last = 2 ** max(start_bits - target_bits - 1, 0)
    return max(1, int(steps / 2 / last))
