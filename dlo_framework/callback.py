"""Base of dlo's callbacks: traits, by which strategies, other callbacks, parity and finders know what a callback does.

A trait is a class attribute; an option may set it in the constructor. A callback that derives from Lightning's class
alone has the defaults; those of Lightning's that need others have them here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import (
    Checkpoint,
    DeviceStatsMonitor,
    EarlyStopping,
    LambdaCallback,
    LearningRateMonitor,
    ModelPruning,
    ModelSummary,
    ProgressBar,
    StochasticWeightAveraging,
    Timer,
    WeightAveraging,
)


class PluginCallback(Callback):
    """Lightning callback that declares what others must know of it."""

    #: Its `init_args` as YAML, with which it does its work within six steps: tests run it so under every strategy.
    example = "{}"
    #: Whether its hooks need the gradients of a full step, or the step itself; None to tell by its hooks.
    needs_gradients: bool | None = None
    #: Whether gradients are stepped and dropped during backward, so that no hook finds them.
    drops_gradients = False
    #: Option that needs one step of all gradients: its rule, its value and the fix; "" without one.
    needs_full_step = ""
    #: Whether it replaces the products of layers by others, which only one callback can do.
    replaces_products = False
    #: Whether ranks must have equal weights and gradients in each step, which copies under DiLoCo have not.
    needs_equal_copies = False
    #: Whether it changes the shapes of batches during a run.
    changes_batch_shapes = False
    #: Whether it counts in fractions of the run's epochs, so that a shorter run has other values.
    needs_max_epochs = False
    #: Whether it loads trained weights of a checkpoint whose own are an average.
    loads_trained_weights = False
    #: Reason why a step cannot be repeated from the same state, and the fix; "" where it can.
    prevents_replay = ""
    #: Reason why `dlo parity` leaves it out, "" for one that needs no note; None if it takes part.
    left_out_of_parity: str | None = None
    #: Whether it reads weights of the module itself between a step and the next forward; None to tell by its hooks.
    #: False promises that it asks the strategy for weights and gradients, as dlo's own do: its hooks are not watched.
    reads_weights: bool | None = None

    @property
    def frozen_models(self) -> Sequence[Any]:
        """Second models that it uses (:class:`~dlo_framework.frozen_model.FrozenModel`), to be checked before a run."""
        return ()

    def area_factor(self, at: Any) -> float:
        """Returns the factor by which batches may be larger at a position in the data, as its samples are smaller."""
        return 1.0

    def aside(self) -> contextlib.AbstractContextManager[None]:
        """Returns a context in which steps are run on the side (:func:`~dlo_framework.rehearsal.trial_steps`).

        A callback overrides it if it measures steps, or keeps a state outside of its attributes, which alone are
        restored afterwards: hooks that it has registered, a clock.
        """
        return contextlib.nullcontext()

    def moment_of_error(self, trainer: Trainer) -> str:
        """Returns how far this rank has come; ranks where that is the same may save together. Empty if it cannot save.

        The default is for callbacks that save nothing.
        """
        return ""

    def check_run(self, trainer: Trainer, module: LightningModule, datamodule: Any = None) -> None:
        """Checks a fit before processes start; Lightning's own Trainer does not call it: check in `setup` too.

        Args:
            trainer: Trainer of the run; its strategy knows the ranks, and has started none.
            module: Module of the run, whose model may not be built.
            datamodule: Datamodule of the run, which has read no data; None without one.

        Raises:
            DloError: The callback does not fit the run.
        """


class _Reads(PluginCallback):
    """Traits of Lightning's callbacks that read weights, or call a user's functions, between steps."""

    reads_weights = True


class _Averages(_Reads):
    """Traits of Lightning's averages of weights."""

    loads_trained_weights = True


class _Watches(PluginCallback):
    """Traits of Lightning's callbacks that watch, save or end a run, which changes the result of no step."""

    left_out_of_parity = ""


_FOREIGN: tuple[tuple[Any, PluginCallback], ...] = (
    (WeightAveraging, _Averages()),
    (StochasticWeightAveraging | LambdaCallback | ModelPruning, _Reads()),
    (Checkpoint | DeviceStatsMonitor | EarlyStopping | LearningRateMonitor, _Watches()),
    (ModelSummary | ProgressBar | Timer, _Watches()),
    (Callback, PluginCallback()),
)


def traits_of(callback: Callback) -> PluginCallback:
    """Returns a callback with its traits; of one that derives from Lightning's class alone, its traits."""
    if isinstance(callback, PluginCallback):
        return callback
    return next(traits for kinds, traits in _FOREIGN if isinstance(callback, kinds))


def callbacks_of(trainer: Trainer) -> list[Callback]:
    """Returns the callbacks of a run, for which Lightning declares no type."""
    return trainer.callbacks  # type: ignore[attr-defined]


def needs_gradients(callback: Callback) -> bool:
    """Returns whether a callback needs gradients or steps; if it declares nothing, by its hooks."""
    declared = traits_of(callback).needs_gradients
    hooks = ("on_before_optimizer_step", "on_after_backward")
    overridden = (getattr(type(callback), hook) is not getattr(Callback, hook) for hook in hooks)
    return any(overridden) if declared is None else declared


def drops_gradients(trainer: Trainer) -> bool:
    """Returns whether backward steps and drops the gradients of a run."""
    return any(callback.drops_gradients for callback in callbacks_of(trainer) if isinstance(callback, PluginCallback))
