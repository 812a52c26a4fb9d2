"""Trains with low-precision products of the blocks' linear layers: int8, float8 and MX float8.

SwitchBack: Stable and low-precision training for large-scale vision-language models. Wortsman et al., 2023,
arXiv 2304.13013 (int8). FP8 Formats for Deep Learning. Micikevicius et al., 2022, arXiv 2209.05433. Microscaling Data
Formats for Deep Learning. Rouhani et al., 2023, arXiv 2310.10537. Departures: see
:mod:`dlo_plugins.quantise.low_precision_linear`.

It is a callback, because every strategy has finished its work on the model when training starts: layers are cut and
sharded, and blocks are compiled at their first call. So one mechanism serves the strategies.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from dlo_framework.callback import PluginCallback
from dlo_framework.data.description import run_datamodule
from dlo_framework.errors import DloError, agreed_errors, check_choice, check_number
from dlo_framework.plan import ParallelPlan
from dlo_framework.task import Task, checkable_module, model_and_plan
from dlo_plugins.parallel.mesh.parallelize import ParallelState
from dlo_plugins.quantise.quantised_layers import leave_out, linear_layers
from dlo_plugins.quantise.schemes import Kernels

if TYPE_CHECKING:
    from torch import nn

    from dlo_framework.distributed.collectives import Communicator
    from dlo_plugins.quantise.low_precision_linear import LowPrecisionForward


@dataclass(frozen=True)
class ProductScheme(Kernels):
    """Scheme of the three matrix products of a linear layer.

    Attributes:
        multiple: Number that must divide the input and the output features of a layer.
        emulated: Whether torchao can emulate it on any device.
    """

    multiple: int
    emulated: bool = True


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        ProductScheme("int8", "int8, a scale per row", (7, 5), ("cuda", "cpu"), 1, emulated=False),
        ProductScheme("fp8", "float8, a scale per tensor", (8, 9), ("cuda",), 16),
        ProductScheme("fp8_rowwise", "float8, a scale per row", (9, 0), ("cuda",), 16),
        ProductScheme("mxfp8", "float8, a scale per 32 elements", (10, 0), ("cuda",), 32),
    )
}
#: Schemes to name in place of one that a device lacks, the nearest first.
_NEAREST = ("fp8_rowwise", "fp8", "int8")


class LowPrecision(PluginCallback):
    """Computes the products of linear layers in 8 bits, forward and backward; weights and gradients keep their dtypes.

    Only layers inside the plan's blocks are changed, so head and stem stay as they are. So do layers with fewer than
    `min_features`, layers whose sizes the scheme's kernels do not take, layers that share their weight, adapters of
    LoRA and frozen 4-bit weights.

    Args:
        scheme: Scheme of the products: `int8` (a scale per row), `fp8` (float8, a scale per tensor), `fp8_rowwise`, or
            `mxfp8` (a scale per 32 elements of a row).
        weight_gradient: Whether the product of the weights' gradients is in 8 bits too, whose sums are over tokens;
            false computes it in the Trainer's precision.
        skip: Patterns of modules that stay as they are, such as `model.layers.0` or `*.*.*.down_proj`.
        min_features: Least number of input and of output features of a layer, in this rank's slice of it.
        emulate: Whether float8 is emulated on any device: the factors are rounded, and multiplied in single precision.
            It is slower than training without the callback, and shows the numerics.

    Raises:
        DloError: An option is invalid, or the device has no kernels for the scheme.
    """

    def __init__(
        self,
        scheme: str = "int8",
        weight_gradient: bool = True,
        skip: list[str] | None = None,
        min_features: int = 64,
        emulate: bool = False,
    ) -> None:
        check_choice("LowPrecision: scheme", scheme, SCHEMES)
        self.scheme, self.emulate = SCHEMES[scheme], emulate
        if emulate and not self.scheme.emulated:
            raise DloError(
                f"LowPrecision: emulate must be false for scheme {scheme}, which runs on CPUs, got true; remove it"
            )
        if scheme != "int8" and importlib.util.find_spec("torchao") is None:
            raise DloError(
                f"LowPrecision: torchao must be installed for scheme {scheme}, got none; run `pip install"
                " dlo_framework[quantisation]`"
            )
        check_number("LowPrecision: min_features", min_features, "at least 1", "64 is usual")
        self.weight_gradient, self.skip, self.min_features = weight_gradient, tuple(skip or ()), min_features
        self._installed: LowPrecisionForward | None = None

    # --- the layers ----------------------------------------------------------------------------------------

    def choose_layers(self, module: nn.Module, plan: ParallelPlan) -> list[str]:
        """Returns the names of the layers to change.

        Raises:
            DloError: A pattern of `skip` matches no layer, or none is left.
        """
        linear = self._linear_layers(module, plan)
        left = leave_out(list(linear), self.skip, "LowPrecision: skip must match linear layers in blocks")
        chosen = [name for name in left if self._takes(linear[name])]
        if not chosen:
            multiple = self.scheme.multiple
            sizes = f"of at least {self.min_features} features" + (
                f" in multiples of {multiple}" if multiple > 1 else ""
            )
            raise DloError(
                f"LowPrecision: {type(module).__name__} must have linear layers {sizes} in its blocks, outside skip,"
                " got none; lower min_features, or leave LowPrecision out"
            )
        return chosen

    def _linear_layers(self, module: nn.Module, plan: ParallelPlan) -> dict[str, nn.Linear]:
        blocks = tuple(f"{block}." for block in plan.block_names(module))
        return {name: layer for name, layer in linear_layers(module).items() if name.startswith(blocks)}

    def _takes(self, layer: nn.Linear) -> bool:
        """Returns whether a layer has sizes for the scheme; those of its weight are no longer there in DeepSpeed."""
        sizes = layer.in_features, layer.out_features
        return min(sizes) >= self.min_features and not any(size % self.scheme.multiple for size in sizes)

    def _install(self, module: nn.Module, plan: ParallelPlan, state: ParallelState | None, prefix: str) -> None:
        from dlo_plugins.quantise.low_precision_linear import LowPrecisionForward

        names, linear = self.choose_layers(module, plan), self._linear_layers(module, plan)
        self._installed = LowPrecisionForward(self.scheme.name, self.weight_gradient, self.emulate)
        tp = None if state is None else state.sharded.tensor_parallel
        if state is None or tp is None or tp.size == 1:
            for name in names:
                self._installed.install(linear[name])
        else:
            names = _agree(names, list(linear), tp, state.sharded.device)
            assert tp.group is not None
            for name in names:
                cut = state.sharded.layout.slices.get(f"{prefix}{name}.weight")
                sliced: Any = None if cut is None else cut.dim  # 0 or 1: a weight has two dims.
                self._installed.install(linear[name], sliced, tp.group.group_name)
        count = f"{len(names)} of the blocks' {len(linear)}"
        rank_zero_info(f"LowPrecision: {count} linear layers compute in {self.scheme.text}")

    # --- hooks ---------------------------------------------------------------------------------------------

    def check_run(self, trainer: Trainer, module: LightningModule, datamodule: Any = None) -> None:
        """Checks the run's device and model, before processes start.

        Raises:
            DloError: The device has no kernels, a pattern matches no layer, or no layer is left.
        """
        self._check_device(trainer)
        self._check_callbacks(trainer)
        if (checkable := checkable_module(module)) is not None:
            self.choose_layers(*model_and_plan(checkable))

    def _check_device(self, trainer: Trainer) -> None:
        also = ", or emulate: true, which is slow and shows the numerics" if self.scheme.emulated else ""
        if not self.emulate:
            others = [SCHEMES[name] for name in _NEAREST]
            self.scheme.check("LowPrecision", trainer.strategy.root_device, others, also)

    def _check_callbacks(self, trainer: Trainer) -> None:
        for other in trainer.callbacks:  # type: ignore[attr-defined]
            is_second = isinstance(other, LowPrecision) and other is not self
            # By its name: its module imports torchao, which int8 does not need.
            if is_second or (type(other).__name__ == "Quantise" and getattr(other, "when", "") == "aware"):
                raise DloError(
                    f"LowPrecision must be the only callback that replaces the layers' products, got"
                    f" {type(other).__name__} too; leave one of the two out"
                )

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the run."""
        self._remove()
        if stage != "fit":
            self._check_device(trainer)
        else:
            with agreed_errors():
                if isinstance(pl_module, Task):
                    pl_module.check(run_datamodule(trainer))  # It may read sizes from the data.
                self.check_run(trainer, pl_module)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Installs the products, after the strategy has cut and sharded the model; so in an evaluation of its own."""
        if self._installed is not None:
            return
        prefix = "model." if isinstance(pl_module, Task) else ""
        self._install(*model_and_plan(pl_module), ParallelState.of(pl_module), prefix)

    on_validation_start = on_test_start = on_predict_start = on_fit_start

    def _remove(self, *_: Any, **__: Any) -> None:
        """Makes the layers compute as they did before."""
        if self._installed is not None:
            self._installed.remove()
            self._installed = None

    on_fit_end = on_test_end = on_predict_end = on_exception = _remove

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends what a validation of its own began."""
        if trainer.state.fn != TrainerFn.FITTING:
            self._remove()


def _agree(names: list[str], all_names: list[str], ranks: Communicator, device: torch.device) -> list[str]:
    """Returns the layers that all ranks of tensor parallelism choose: their slices may differ in size."""
    refused = torch.tensor([float(name not in names) for name in all_names], device=device)
    return [name for name, flag in zip(all_names, ranks.maximum(refused).tolist(), strict=True) if not flag]
