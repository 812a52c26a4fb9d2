"""Precision plug-in through which Lightning's loop drives DeepSpeed's engine: backward, clipping, step and state."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.fabric.utilities.types import Steppable
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.utilities import GradClipAlgorithmType
from torch import Tensor, nn
from torch.optim import Optimizer

from dlo_framework.distributed.precision import GuardedHooks
from dlo_framework.errors import DloError, shown_names
from dlo_plugins.deepspeed.deepspeed_engine import DeepSpeedEngine

#: Counters of the engine that its schedules (curriculum, layer drop, profiler) use.
COUNTERS = ("global_steps", "global_samples", "micro_steps", "skipped_steps")
#: State of a dynamic loss scale.
SCALE = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class EnginePrecision(GuardedHooks, DeepSpeedPrecision):
    """Lightning's precision for DeepSpeed, with Lightning's gradient accumulation.

    DeepSpeed keeps parameters in half precision and steps master weights in single precision. Under a mixed precision
    the forward pass also runs in autocast, as in other strategies: operations that need single precision get it, and
    modules without support for half precision run.

    Lightning divides each loss by the window's micro-batches and marks the last of them, so that a window may be
    shorter at an epoch's end, or change; DeepSpeed is told not to divide again.

    Args:
        precision: Lightning's name of the precision.
        bridge: DeepSpeedBridge, the strategy.
    """

    def __init__(self, precision: Any, bridge: Any) -> None:
        super().__init__(precision)
        self._bridge, self.guard_hooks = bridge, bridge.guard_hooks

    def _engine(self) -> DeepSpeedEngine:
        engine = self._bridge.engine
        assert engine is not None, "DeepSpeed's engine runs"
        return engine

    def convert_module(self, module: nn.Module) -> nn.Module:
        """Converts the parameters, which must be real: a conversion would drop imaginary parts (Lightning 2.6)."""
        names = [name for name, parameter in module.named_parameters() if parameter.is_complex()]
        if names:
            raise DloError(
                f"parameters under DeepSpeed must be real, got {shown_names(names)}; store it as"
                " torch.view_as_real(), or use strategy zero1 to zero3"
            )
        return super().convert_module(module)

    def autocast(self) -> AbstractContextManager[Any]:
        """Returns the context of a forward pass: autocast under a mixed precision."""
        if not self.precision.endswith("mixed"):
            return nullcontext()
        return torch.autocast(self._bridge.root_device.type, dtype=self._desired_dtype)

    def forward_context(self) -> AbstractContextManager[Any]:
        """Returns the context of a step outside the engine; inside it, ``ForwardInAutocast`` has one."""
        return self.autocast() if self._bridge.model is self._bridge.lightning_module else nullcontext()

    def convert_input(self, data: Any) -> Any:
        """Casts a batch if the model is in half precision; autocast casts it where needed."""
        return data if self.precision.endswith("mixed") else super().convert_input(data)

    def backward(  # type: ignore[override]
        self, tensor: Tensor, model: LightningModule, optimizer: Steppable | None, *args: Any, **kwargs: Any
    ) -> None:
        """Computes gradients, and reduces them as the stage requires."""
        self._engine().deepspeed.backward(tensor, *args, scale_wrt_gas=False, **kwargs)

    def optimizer_step(  # type: ignore[override]
        self, optimizer: Steppable, model: LightningModule, closure: Callable[[], Any], **kwargs: Any
    ) -> Any:
        """Runs forward and backward, then DeepSpeed's step, unless a callback has dropped the gradients."""
        result = closure()
        self._after_closure(model, optimizer)
        if model.automatic_optimization and result is None:
            raise DloError(
                "training_step must return a loss under DeepSpeed, where all ranks take part in each backward pass, got"
                " None; return a loss times 0, or use strategy ddp"
            )
        self._engine().step()
        return result

    def clip_gradients(
        self,
        optimizer: Optimizer,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        """Leaves clipping to DeepSpeed's step.

        Raises:
            DloError: If a module's own ``configure_gradient_clipping`` asks for another clipping.
        """
        ours = self._engine().deepspeed.gradient_clipping()
        if clip_val and (gradient_clip_algorithm != GradClipAlgorithmType.NORM or float(clip_val) != float(ours)):
            raise DloError(
                f"configure_gradient_clipping must clip by norm to {ours}, as DeepSpeed does in its step, got"
                f" {gradient_clip_algorithm} to {clip_val}; set trainer.gradient_clip_val, or use strategy zero2"
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the engine's counters and its loss scale; empty without a training engine."""
        engine: DeepSpeedEngine | None = self._bridge.engine
        if engine is None or not engine.trains:
            return {}
        state = {name: int(getattr(engine.deepspeed, name)) for name in COUNTERS}
        scaler = getattr(engine.deepspeed.optimizer, "loss_scaler", None)
        return {**state, "loss_scale": {name: getattr(scaler, name) for name in SCALE if hasattr(scaler, name)}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores the engine's counters and its loss scale."""
        engine: DeepSpeedEngine | None = self._bridge.engine
        if engine is None or not engine.trains or not state_dict:
            return
        for name in COUNTERS:
            setattr(engine.deepspeed, name, state_dict[name])
        scaler = getattr(engine.deepspeed.optimizer, "loss_scaler", None)
        for name, value in state_dict["loss_scale"].items():
            if hasattr(scaler, name):
                setattr(scaler, name, value)
