"""The task: a LightningModule that also describes how its model may be split, with ready-made steps.

Any plain LightningModule works with every strategy that does not split the model into stages. A `Task` adds what
splitting needs. It separates a step into `inputs`, the model, `loss` and `metrics`, so that a pipeline can run parts of
the model on different ranks and call the task for the rest.
"""

from __future__ import annotations

import contextlib
import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor, nn
from torchmetrics import Metric

from dlo_framework.batches import batch_size
from dlo_framework.checkpoint.loading import is_canonical, single_file
from dlo_framework.data import step_samples
from dlo_framework.distillation import Distilled, LogitLoss, agreements, logit_losses
from dlo_framework.errors import DloError
from dlo_framework.models.experts.auxiliary_loss import follow_gradient
from dlo_framework.plan import ParallelPlan

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


class Task(LightningModule, ABC):
    """Training task: a model, its inputs, its loss and its metrics.

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
    training_modules: nn.ModuleDict
    #: Whether :meth:`predict_step` runs the model by itself, as often as needed, and not once on :meth:`inputs`.
    generates = False
    #: Whether a task that :attr:`generates` runs these forwards by the strategy's `pipelined` where it has one.
    generates_in_stages = False
    #: Number of logits that :meth:`loss` keeps at once on an accelerator, for estimates of memory; None for all.
    max_logits: int | None = None
    #: The same number on a CPU.
    max_logits_on_cpu: int | None = None
    #: Model outputs computed elsewhere: see :meth:`given_outputs`.
    _given: tuple[Any] | None = None

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

    # --- distillation --------------------------------------------------------------------------------------

    @property
    def class_count(self) -> int | None:
        """Number of classes of the logits, or of tokens of the vocabulary; None if it is not known (yet)."""
        return None

    def batch_mean(self, values: Tensor, batch: Any) -> Tensor:
        """Returns the mean of values over a batch, a scalar, over the same samples and in the same way as :meth:`loss`.

        The default is the plain mean; override it where some samples do not count, or where the loss is a share of
        the step's.

        Args:
            values: One value per sample, `[B]`, or per position, `[B, N]`.
            batch: Batch on its device.
        """
        return values.mean()

    def distillation_loss(
        self, outputs: Any, teacher_outputs: Any, teacher: Any, batch: Any, loss: LogitLoss
    ) -> Distilled:
        """Returns the mean distance of the outputs from a teacher's, and how often both predict the same class.

        The mean is over the same samples as that of :meth:`loss`. The default's outputs are logits, `[B, C]`; override
        it for others.

        Args:
            outputs: Output of the model for `inputs(batch)`.
            teacher_outputs: Output of the teacher's model for the same batch; of more classes, the first are compared.
            teacher: Frozen model that computed them.
            batch: Batch on its device.
            loss: Distance between logits.
        """
        theirs = teacher_outputs[:, : outputs.shape[1]]
        apart = logit_losses(loss, outputs, theirs)
        agreed = agreements(outputs.detach(), theirs).to(apart.dtype)
        return Distilled(self.batch_mean(apart, batch), self.batch_mean(agreed, batch))

    def use_distillation_token(self, on: bool = True) -> bool:
        """Makes the model return a pair of logits in training: of its class token, and of its distillation token.

        Args:
            on: Whether it returns both; False for their mean, as in evaluation.

        Returns:
            Whether the model has a distillation token; the default has none.
        """
        return False

    def complete_batch(
        self,
        batch: Any,
        *,
        prompt_tokens: int | None,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        multiple: int = 1,
    ) -> Any:
        """Returns a batch of the model's own completions of a batch's prompts, whose targets are the completions.

        The default has none: only tasks that generate override it.

        Args:
            batch: Batch on its device.
            prompt_tokens: Number of tokens of each sample's prompt; None for the tokens before its first target.
            max_new_tokens: Maximum number of tokens of a completion.
            temperature: Divisor of the logits before sampling.
            seed: Seed of the step's sampling. The completion of a sample must depend on it, on the sample and on the
                weights alone, so that it is the same on any number of ranks.
            multiple: Multiple to which the samples' lengths are padded.

        Raises:
            DloError: The task does not generate.
        """
        raise DloError(
            f"{type(self).__name__} must have complete_batch to train on its own samples, got a task without; leave"
            " on_policy out"
        )

    @property
    def freezes_unused(self) -> str:
        """Fix in errors about parameters without a gradient, in the imperative; empty for the general one."""
        return ""

    def add_training_module(self, name: str, module: nn.Module) -> None:
        """Adds a module that only training uses, such as a projection in a loss; call it in `setup`.

        Its parameters are trained, sharded and saved like the model's, as `training_modules.<name>`. Exports leave them
        out, and a checkpoint that has them loads into a task without them. A task whose optimizer is not made from
        `self.parameters()` adds them to it: see :attr:`training_parameters`.

        Args:
            name: Name of the module.
            module: Module; it replaces an earlier one of the same name.
        """
        if _TRAINING not in self._modules:
            self.training_modules = nn.ModuleDict()
        self.training_modules[name] = module

    @property
    def training_parameters(self) -> list[nn.Parameter]:
        """Parameters of the modules that only training uses, which belong in the optimizer beside the model's."""
        modules = self._modules.get(_TRAINING)
        return [] if modules is None else list(modules.parameters())

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

    def read_placed_weights(self, shards: Mapping[str, Any], *, replaced: bool) -> None:
        """Reads the model's own trained weights, as a second model of a run that was built on the meta device.

        The default does nothing: :meth:`configure_model` has read them, or there are none.

        Args:
            shards: This rank's shards of the task's state, by name, to be filled.
            replaced: Whether a checkpoint's weights are loaded next, so that none need to be read.
        """

    def inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the model's positional and keyword arguments for a batch.

        The default supports batches that are `(inputs, targets)` pairs, dicts (passed by keyword) or, in prediction,
        the inputs alone.
        """
        if isinstance(batch, dict):
            return (), batch
        return (batch[0] if isinstance(batch, tuple | list) else batch,), {}

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Metric | Tensor]:
        """Updates the current stage's metrics with a batch, and returns the values to log at the epoch's end.

        Called in validation and test (:attr:`stage` is the current one), and never in training. Return a torchmetrics
        object, updated but not computed, for a value that is not a mean over samples; it must be an attribute of the
        task. A plain tensor is averaged over batches and ranks, each weighted by its samples. An entry `"loss"`
        replaces the mean of :meth:`loss`.
        """
        return {}

    def micro_batch_weights(self, micro_batches: Sequence[Any]) -> Sequence[float | Tensor]:
        """Returns the weight of each micro-batch's loss, if a pipeline splits the batch.

        A weight that is computed on the device is a tensor of no dimension: a number of it would wait for the device.

        The weighted sum of the losses is the loss of the batch: the default's weights are the shares of the samples. A
        task whose loss is itself a share of the step's overrides it.
        """
        counts = [batch_size(part) for part in micro_batches]
        return [count / max(sum(counts), 1) for count in counts]

    def parallel_plan(self) -> ParallelPlan:
        """Returns how `self.model` may be split; names are relative to `self.model`.

        The default finds the repeated blocks by itself and has no tensor rules.

        Raises:
            DloError: if the blocks cannot be found; name them in an override then.
        """
        return ParallelPlan.infer(self.model)

    def resized(self, saved: Mapping[str, Any], **sizes: float) -> dict[str, Any]:
        """Returns the arguments of the class that build this task's model with fewer heads, hidden units or blocks.

        Structured pruning calls it, and checks the shapes of the model that they build.

        Args:
            saved: Checkpoint of the larger model.
            sizes: New sizes, those that change: `heads`, with `kv_heads` and `head_width`, `hidden`, `blocks`; and
                `channels`, the fraction of :meth:`channel_groups` to keep.

        Raises:
            DloError: if the task cannot build such a model.
        """
        raise DloError(
            f"{type(self).__name__} must say how its model is built in other sizes, got no method resized;"
            f" override it to return its arguments for {', '.join(sizes)}"
        )

    def channel_groups(self) -> list[ChannelGroup]:
        """Returns the channels of convolutions that structured pruning may remove, with the model built.

        Raises:
            DloError: if the task cannot say which, or a layer stands in the way.
        """
        raise DloError(
            f"prune: {type(self).__name__} must have channel_groups for --channels, got none; override it to return"
            " them, or prune heads, hidden units or blocks"
        )

    def called(self) -> nn.Module:
        """Returns the module that a step calls: `self.model`, or the submodule that :meth:`forward` runs instead.

        It is the unit of compilation if the full model is compiled.
        """
        return self.model

    @property
    def looks_inside(self) -> bool:
        """Whether :meth:`loss` needs activations inside the model's blocks, of all of them and of full sequences.

        Strategies that split either over ranks refuse such a task.
        """
        return False

    def full_precision_buffers(self) -> Sequence[str]:
        """Returns the names of buffers that keep their dtype under `precision: bf16-true` and `16-true`; none."""
        return ()

    def flops_per_sample(self) -> int | None:
        """Returns the FLOPs of training on one sample, forward and backward; None lets the monitor count them.

        Override it if the operations cannot be counted, for example with custom kernels.
        """
        return None

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

    def after_validation_step(self, batch_idx: int) -> None:
        """Called by a pipeline after a validation batch, on all its ranks, in place of :meth:`validation_step`."""

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

    @contextlib.contextmanager
    def given_outputs(self, outputs: Any) -> Iterator[None]:
        """Inside the block, the steps use these as the model's outputs, which a pipeline has computed."""
        self._given = (outputs,)
        try:
            yield
        finally:
            self._given = None

    def _evaluate(self, batch: Any) -> None:
        self.log_measured(self.measured(self._outputs(batch), batch), batch)

    def measured(self, outputs: Any, batch: Any) -> dict[str, Metric | Tensor]:
        """Returns :meth:`metrics` of a batch, with its loss if they have none."""
        found = self.metrics(outputs, batch)
        return found if "loss" in found else {"loss": self.loss(outputs, batch), **found}

    def log_measured(self, found: Mapping[str, Metric | Tensor], batch: Any) -> None:
        """Logs the metrics of a batch, once an epoch, as `val_<name>` or `test_<name>`, weighted by its samples."""
        samples = step_samples(self._trainer)
        if samples is None:
            samples = batch_size(batch)
        for name, value in found.items():
            is_metric = isinstance(value, Metric)
            self.log(
                f"{self.stage}_{name}",
                value,
                on_step=False,
                on_epoch=True,
                prog_bar=True,
                sync_dist=not is_metric,
                batch_size=1 if is_metric else samples,
            )


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


@dataclass(frozen=True)
class ChannelGroup:
    """Channels of one tensor inside a block, which no residual addition uses. Names are relative to the model.

    Attributes:
        block: Name of the block.
        count: Number of channels.
        writers: Layers whose output channels they are.
        channelwise: Depthwise convolutions, and norms with statistics of each channel, in their order.
        readers: Layers whose input channels they are.
    """

    block: str
    count: int
    writers: tuple[str, ...]
    channelwise: tuple[str, ...]
    readers: tuple[str, ...]
