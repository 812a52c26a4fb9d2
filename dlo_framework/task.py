"""The task: a LightningModule that also describes how its model may be split, with ready-made steps.

Any plain LightningModule works with every strategy that does not split the model into stages. A `Task` adds what
splitting needs. It separates a step into `inputs`, the model, `loss` and `metrics`, so that a pipeline can run parts of
the model on different ranks and call the task for the rest.
"""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, Literal, Self

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn
from torchmetrics import Metric

from dlo_framework.ability import HasAbilities
from dlo_framework.batches import batch_size
from dlo_framework.checkpoint.loading import is_canonical, single_file
from dlo_framework.data import step_samples
from dlo_framework.models.experts.auxiliary_loss import follow_gradient
from dlo_framework.plan import ParallelPlan
from dlo_framework.random_streams import preserved_random_state
from dlo_framework.task_abilities import adopt_abilities

Stage = Literal["train", "val", "test", "predict"]

#: Attribute of a task with the modules that only training uses.
_TRAINING = "training_modules"

_STAGES: dict[RunningStage, Stage] = {
    RunningStage.TRAINING: "train",
    RunningStage.SANITY_CHECKING: "val",
    RunningStage.VALIDATING: "val",
    RunningStage.TESTING: "test",
    RunningStage.PREDICTING: "predict",
}


class Task(HasAbilities, LightningModule, ABC):
    """Training task: a model, its inputs, its loss and its metrics.

    What one feature asks beside these is an ability, see :mod:`dlo_framework.task_abilities`.

    A subclass sets `self.model` in :meth:`configure_model` and implements :meth:`loss`; the rest has defaults. Its
    :meth:`training_step` returns the loss and logs nothing: the run's monitor logs it, at intervals and without waiting
    for the device. Validation and test log the loss and each entry of :meth:`metrics`, once an epoch, as `val_loss`,
    `val_<name>` and `test_<name>`.

    Example:
        ```python
        class Regression(Task):
            def configure_model(self) -> None:
                if not self.has_model:
                    self.model = torch.nn.Linear(8, 1)

            def loss(self, outputs, batch):
                return torch.nn.functional.mse_loss(outputs, batch[1])

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=1e-3)
        ```
    """

    model: nn.Module
    #: Model outputs computed elsewhere: see :func:`given_outputs`.
    _given: tuple[Any] | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Adds abilities whose methods a class overrides without deriving from them."""
        super().__init_subclass__(**kwargs)
        adopt_abilities(cls)

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: Any, map_location: Any = None, hparams_file: Any = None, **kwargs: Any
    ) -> Self:
        """Returns the task of a checkpoint, like Lightning's method, from a canonical checkpoint (a folder) too.

        See :func:`dlo_framework.load_from_checkpoint`, which supports any LightningModule.
        """
        source = single_file(checkpoint_path) if is_canonical(checkpoint_path) else checkpoint_path
        return super().load_from_checkpoint(source, map_location=map_location, hparams_file=hparams_file, **kwargs)

    @property
    def has_model(self) -> bool:
        """Whether `self.model` has been built."""
        return "model" in self._modules

    @abstractmethod
    def configure_model(self) -> None:
        """Builds `self.model`.

        It is called more than once, and may run under the meta device or a strategy's context that shards what is
        built: so build only `if not self.has_model`, and read no weights' values here.
        """

    @abstractmethod
    def loss(self, outputs: Any, batch: Any) -> Tensor:
        """Returns the training loss, a scalar: the mean over the batch's samples.

        Args:
            outputs: Output of the model for `inputs(batch)`.
            batch: Batch on its device.
        """

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Drops the weights of modules that only training uses, if this task has none; an override calls it too."""
        state = checkpoint.get("state_dict", {})
        if _TRAINING not in self._modules:
            for name in [name for name in state if name.startswith(f"{_TRAINING}.")]:
                del state[name]

    def check(self, datamodule: LightningDataModule | None) -> None:
        """Checks the task against the data before any process starts; called by the command line.

        Raises:
            DloError: if they do not match; the message computes the fix.
        """

    def on_meta(self) -> Task:
        """Returns this task with its model on the meta device, for checks of its names and shapes alone.

        A task whose model exists is returned unchanged.
        """
        if self.has_model:
            return self
        twin = copy.deepcopy(self)
        with torch.device("meta"):
            twin.configure_model()
        return twin

    def example_batch(self, datamodule: LightningDataModule | None) -> Any | None:
        """Returns one sample as the data batch it, with any values; None if its shape is unknown.

        Pipelines measure the model's parts with it to balance the stages; without it they count parameters.

        Args:
            datamodule: Datamodule, which may know the shapes, but has read no data yet.
        """
        return None

    def inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the model's positional and keyword arguments for a batch.

        The default supports batches that are `(inputs, targets)` pairs, dicts (passed by keyword) or, in prediction,
        the inputs alone.
        """
        if isinstance(batch, dict):
            return (), batch
        return (batch[0] if isinstance(batch, tuple | list) else batch,), {}

    def metrics(self, outputs: Any, batch: Any) -> Mapping[str, Metric | Tensor | None]:
        """Updates the current stage's metrics with a batch, and returns the values to log at the epoch's end.

        Called in validation and test (:attr:`stage` is the current one), and never in training. Return a torchmetrics
        object, updated but not computed, for a value that is not a mean over samples; it must be an attribute of the
        task. A plain tensor is averaged over batches and ranks, each weighted by its samples. An entry `"loss"`
        replaces the mean of :meth:`loss`; None leaves it out.
        """
        return {}

    def parallel_plan(self) -> ParallelPlan:
        """Returns how `self.model` may be split; names are relative to `self.model`.

        The default finds the repeated blocks by itself and has no tensor rules.

        Raises:
            DloError: if the blocks cannot be found; name them in an override then.
        """
        return ParallelPlan.infer(self.model)

    @property
    def stage(self) -> Stage:
        """The current stage: `train`, `val` (the sanity check too), `test` or `predict`.

        Without a trainer, it is `train` or `val`, by the module's own training mode.
        """
        trainer = self._trainer
        stage = trainer.state.stage if trainer is not None else None
        return _STAGES[stage] if stage is not None else ("train" if self.training else "val")

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the model."""
        return self.model(*args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        """Returns `{"loss": loss}` of a batch; logs nothing."""
        return {"loss": follow_gradient(self.loss(self._outputs(batch), batch))}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Updates and logs the validation metrics as `val_<name>`."""
        self._evaluate(batch)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        """Updates and logs the test metrics as `test_<name>`."""
        self._evaluate(batch)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        """Returns the model's outputs for a batch."""
        return self._outputs(batch)

    def _outputs(self, batch: Any) -> Any:
        if self._given is not None:
            return self._given[0]
        args, kwargs = self.inputs(batch)
        return self.forward(*args, **kwargs)

    def _evaluate(self, batch: Any) -> None:
        log_measures(self, measure(self, self._outputs(batch), batch), batch)


def find_example(task: Task, datamodule: LightningDataModule | None) -> Any | None:
    """Returns :meth:`Task.example_batch`; random numbers that it draws change none of the run's.

    Args:
        task: Task.
        datamodule: Datamodule of the run, if any.
    """
    with preserved_random_state():
        return task.example_batch(datamodule)


# --- what pipelines call in place of a step ----------------------------------------------------------------------


@contextlib.contextmanager
def given_outputs(task: Task, outputs: Any) -> Iterator[None]:
    """Inside the block, a task's steps use these as the model's outputs, which a pipeline has computed."""
    task._given = (outputs,)
    try:
        yield
    finally:
        task._given = None


def measure(task: Task, outputs: Any, batch: Any) -> dict[str, Metric | Tensor]:
    """Returns a task's metrics of a batch, with its loss if they have none."""
    measures = task.metrics(outputs, batch)
    if "loss" not in measures:
        measures = {"loss": task.loss(outputs, batch), **measures}
    return {name: value for name, value in measures.items() if value is not None}


def log_measures(task: Task, measures: Mapping[str, Metric | Tensor], batch: Any) -> None:
    """Logs the metrics of a batch, once an epoch, as `val_<name>` or `test_<name>`, weighted by its samples."""
    samples = step_samples(task._trainer)
    if samples is None:
        samples = batch_size(batch)
    for name, value in measures.items():
        is_metric = isinstance(value, Metric)
        task.log(
            f"{task.stage}_{name}",
            value,
            on_step=False,
            on_epoch=True,
            prog_bar=True,
            sync_dist=not is_metric,
            batch_size=1 if is_metric else samples,
        )


# --- modules beside the model ------------------------------------------------------------------------------------


def add_training_module(task: Task, name: str, module: nn.Module) -> None:
    """Adds a module that only training uses, such as a projection in a loss; call it in `setup`.

    Its parameters are trained, sharded and saved like the model's, as `training_modules.<name>`. Exports leave them
    out, and a checkpoint that has them loads into a task without them. A task whose optimizer is not made from
    `self.parameters()` adds them to it: see :func:`training_parameters`.

    Args:
        task: Task that trains.
        name: Name of the module.
        module: Module; it replaces an earlier one of the same name.
    """
    if _TRAINING not in task._modules:
        task.add_module(_TRAINING, nn.ModuleDict())
    training_modules(task)[name] = module


def training_parameters(task: LightningModule) -> list[nn.Parameter]:
    """Returns the parameters of modules that only training uses, which belong in the optimizer beside the model's."""
    return list(training_modules(task).parameters())


def training_modules(task: LightningModule) -> nn.ModuleDict:
    """Returns the modules that only training uses, by name."""
    modules = task._modules.get(_TRAINING)
    return modules if isinstance(modules, nn.ModuleDict) else nn.ModuleDict()


def inner_model(module: LightningModule) -> nn.Module:
    """Returns a task's model; another LightningModule is its own."""
    return module.model if isinstance(module, Task) else module


def model_and_plan(module: LightningModule) -> tuple[nn.Module, ParallelPlan]:
    """Returns a task's model and its plan; of another LightningModule, itself and the inferred plan.

    Raises:
        NoBlocksError: The module is not a task, and repeats no class of block.
    """
    if isinstance(module, Task):
        return module.model, module.parallel_plan()
    return module, ParallelPlan.infer(module)


def checkable_module(module: LightningModule) -> LightningModule | None:
    """Returns what shows a module's names and shapes before the run: a task on the meta device, or the module.

    None for a LightningModule without parameters, which builds its model later.
    """
    if isinstance(module, Task):
        return module.on_meta()
    return None if next(module.parameters(), None) is None else module
