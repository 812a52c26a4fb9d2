"""Abilities of tasks: what one feature asks of a task beside its model, its inputs and its loss.

A task has an ability by deriving from its class too, ``class Segmenter(Task, Resizable)``, and overrides its methods.
A feature asks for it by ``task.ability(Resizable)``; see :mod:`dlo_framework.ability`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_deprecation
from torch import Tensor, nn

from dlo_framework.ability import Ability
from dlo_framework.batches import batch_size
from dlo_framework.distillation import Distilled, LogitLoss, agreements, logit_losses


class Distillable(Ability):
    """Outputs that can be compared with a teacher's. A task that declares none has these, of logits `[B, C]`."""

    has_default = True

    @property
    def class_count(self) -> int | None:
        """Number of classes of the logits, or of tokens of the vocabulary; None if it is not known (yet)."""
        return None

    def batch_mean(self, values: Tensor, batch: Any) -> Tensor:
        """Returns the mean of values over a batch, a scalar, over the same samples and in the same way as the loss.

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

        Args:
            outputs: Output of the model for a batch.
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


class CompletesBatches(Ability):
    """Completions of the model's own, on which it trains."""

    feature = "training on own samples"
    missing = "it does not generate; use a task that does, or leave on_policy out"

    @abstractmethod
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

        Args:
            batch: Batch on its device.
            prompt_tokens: Number of tokens of each sample's prompt; None for the tokens before its first target.
            max_new_tokens: Maximum number of tokens of a completion.
            temperature: Divisor of the logits before sampling.
            seed: Seed of the step's sampling. The completion of a sample must depend on it, on the sample and on the
                weights alone, so that it is the same on any number of ranks.
            multiple: Multiple to which the samples' lengths are padded.
        """


class Generates(Ability):
    """Predictions that run the model by themselves, as often as needed, and not once on the task's inputs."""

    #: Whether each of these forwards runs by the strategy's `pipelined` where it has one.
    generates_in_stages = False

    def after_validation_step(self, batch_idx: int) -> None:
        """Called by a pipeline after a validation batch, on all its ranks, in place of `validation_step`."""


class WeighsMicroBatches(Ability):
    """Weights of the losses of a batch's parts. A task that declares none has these, by samples."""

    has_default = True

    def micro_batch_weights(self, micro_batches: Sequence[Any]) -> Sequence[float | Tensor]:
        """Returns the weight of each micro-batch's loss, if a pipeline splits the batch.

        A weight that is computed on the device is a tensor of no dimension: a number of it would wait for the device.

        The weighted sum of the losses is the loss of the batch: the default's weights are the shares of the samples. A
        task whose loss is itself a share of the step's overrides it.
        """
        counts = [batch_size(part) for part in micro_batches]
        return [count / max(sum(counts), 1) for count in counts]


class Resizable(Ability):
    """The task's model in other sizes, which structured pruning leaves."""

    feature = "dlo prune"
    missing = "it does not say how its model is built in other sizes; derive it from Resizable too"

    @abstractmethod
    def resized(self, saved: Mapping[str, Any], **sizes: float) -> dict[str, Any]:
        """Returns the arguments of the class that build this task's model with fewer heads, hidden units or blocks.

        Structured pruning checks the shapes of the model that they build.

        Args:
            saved: Checkpoint of the larger model.
            sizes: New sizes, those that change: `heads`, with `kv_heads` and `head_width`, `hidden`, `blocks`; and
                `channels`, the fraction of :meth:`PrunesChannels.channel_groups` to keep.

        Raises:
            DloError: if the task cannot build such a model.
        """


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


class PrunesChannels(Ability):
    """Channels of convolutions that structured pruning may remove."""

    feature = "dlo prune --channels"
    missing = "it does not say which channels may go; derive it from PrunesChannels, or prune heads, hidden or blocks"

    @abstractmethod
    def channel_groups(self) -> list[ChannelGroup]:
        """Returns the channels, with the model built.

        Raises:
            DloError: if the task cannot say which, or a layer stands in the way.
        """


class CompileTarget(Ability):
    """A step that calls a submodule of the model: the unit of compilation if the full model is compiled."""

    @abstractmethod
    def compile_target(self) -> nn.Module:
        """Returns the submodule that `forward` runs in place of `self.model`."""


class BoundsLogits(Ability):
    """A loss that does not keep all logits at once, for estimates of memory."""

    @abstractmethod
    def max_logits(self, device: str) -> int | None:
        """Returns the number of logits that the loss keeps at once; None for all.

        Args:
            device: Type of the device, such as `cpu`.
        """


class LooksInside(Ability):
    """A loss of activations inside the model's blocks, of all of them and of full sequences.

    Strategies that split either over ranks refuse such a task.
    """

    needs_hidden_states = True

    @property
    def divided_by(self) -> tuple[str, ...]:
        """Axes of a mesh that would divide what the task needs: `pp`, `cp`, and `sequence_parallel`."""
        return ("pp", "cp", "sequence_parallel") if self.needs_hidden_states else ()

    #: What needs them, and a fix beside other axes, for messages.
    looks_inside_by = "its loss uses outputs of all blocks"
    looks_inside_fix = ""


class KeepsBuffers(Ability):
    """Buffers that keep their dtype under `precision: bf16-true` and `16-true`."""

    @abstractmethod
    def full_precision_buffers(self) -> Sequence[str]:
        """Returns their names."""


class FreezesUnused(Ability):
    """An option that freezes the parameters which get no gradient."""

    @property
    @abstractmethod
    def freezes_unused(self) -> str:
        """Fix in errors about such parameters, in the imperative; empty for the general one."""


class ReadsPlacedWeights(Ability):
    """Trained weights that the task reads after `configure_model`, each rank its shards."""

    @abstractmethod
    def read_placed_weights(self, shards: Mapping[str, Any], *, replaced: bool) -> None:
        """Reads the weights of a second model of a run that was built on the meta device.

        Args:
            shards: This rank's shards of the task's state, by name, to be filled.
            replaced: Whether a checkpoint's weights are loaded next, so that none need to be read.
        """


#: Abilities by the members that a Task had itself before version 0.3.
_BY_MEMBER: dict[str, type[Ability]] = {
    name: kind
    for kind in (
        *(Distillable, CompletesBatches, Generates, WeighsMicroBatches, Resizable, PrunesChannels, LooksInside),
        *(KeepsBuffers, FreezesUnused, ReadsPlacedWeights),
    )
    for name in vars(kind)
    if not name.startswith("_") and name not in Ability.__annotations__
} | {"generates": Generates, "called": CompileTarget}


def adopt_abilities(task_class: type) -> None:
    """Adds the abilities to a class's bases whose methods it overrides without deriving from them, with a warning."""
    for name in [name for name in vars(task_class) if name in _BY_MEMBER]:
        kind = _BY_MEMBER[name]
        if kind in task_class.__mro__ or (name == "generates" and not vars(task_class)[name]):
            continue
        task_class.__bases__ = (*task_class.__bases__, kind)
        if name == "called":
            task_class.compile_target = task_class.called  # type: ignore[attr-defined]
        rank_zero_deprecation(
            f"{task_class.__name__} has `{name}`, which is asked of a {kind.__name__}: derive it from"
            f" dlo_framework.task_abilities.{kind.__name__} too (Task alone does until version 0.4)"
        )
