"""What datamodules, loaders and modules say of themselves: attributes that each may have, none of which it must."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from dlo_framework.config_only import skip_missing

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import Trainer


class _Description:
    """Declared attributes of another object, read when they are asked for; None for those that it does not have.

    Args:
        owner: Object that is described; None without one.
    """

    def __init__(self, owner: Any) -> None:
        self._owner = owner

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the object."""
        if name not in type(self).__annotations__:
            raise AttributeError(f"no attribute {name!r} is declared by {type(self).__name__}")
        with skip_missing():
            return getattr(self._owner, name, None)
        return None


class LoaderDescription(_Description):
    """Attributes of a loader, its sampler or its batch sampler, which a user may have written.

    Attributes:
        batch_sampler: Sampler of batches.
        generator: Generator that it draws from.
        makes_new_batches: Whether each batch has memory of its own.
        sampler: Sampler of single samples.
    """

    batch_sampler: Any
    generator: torch.Generator | None
    makes_new_batches: bool | None
    sampler: Any


class ModuleDescription(_Description):
    """Attributes of a LightningModule, which need not be a task of dlo's; a callback or a datamodule may have some too.

    Attributes:
        check: Function of the datamodule that checks the module's options.
        config: Config of transformers.
        frozen_models: Second models that it uses.
        isolates_documents: Whether documents in one row do not attend to each other.
        makes_new_batches: Whether its data hooks return batches with memory of their own.
        recompute: Whether its blocks are computed again in backward.
        schedule: Name of its learning-rate schedule.
        tokenizer_source: Folder or hub name of its tokenizer.
        warmup_epochs: Epochs of the schedule's warm-up.
        warmup_steps: Steps of the schedule's warm-up.
    """

    check: Callable[..., Any] | None
    config: Any
    frozen_models: Sequence[Any] | None
    isolates_documents: bool | None
    makes_new_batches: bool | None
    recompute: bool | None
    schedule: str | None
    tokenizer_source: str | None
    warmup_epochs: float | None
    warmup_steps: int | None


class DataDescription(_Description):
    """Attributes of a datamodule, which may compute them from files.

    Attributes:
        batch_size: Samples of a batch, over all ranks.
        class_names: Names of the classes, in their order.
        num_classes: Number of classes.
        channels: Channels of the images.
        image_size: Side of the training images in pixels.
        eval_image_size: Side of the images of validation and test.
        mean: Mean of each channel that was subtracted.
        std: Standard deviation of each channel by which was divided.
        root: Folder of the data.
        seq_len: Tokens of a row; of a source, where there are targets too.
        target_len: Tokens of a target.
        mask_fraction: Fraction of a row's tokens that are masked and predicted.
        model_kind: Kind of the language models that the batches are for: `causal`, `masked` or `seq2seq`.
        packing: Whether rows hold several documents: `none`, or the way in which they are chosen.
        tokenizer: Tokenizer of transformers, after setup.
        trains_on_chats: Whether samples are conversations.
        unpaired: Whether answers have a verdict each, and no better or worse one.
        corrupt_images: Count of images that could not be read.
        prediction_names: Function that returns the names of the samples that are predicted.
        prediction_rows: Function that returns the rows of a table of predictions, given a list of outputs.
        rectangular_val_dataloader: Function that returns a loader whose batches have images of one shape each.
        check: Function that checks the options.
        check_template: Function that checks that a tokenizer has the template that the data need.
        check_predict: Function that checks that there are data to predict.
        check_shares: Function that checks each rank's share.
    """

    batch_size: int | None
    class_names: Sequence[str] | None
    num_classes: int | None
    channels: int | None
    image_size: int | None
    eval_image_size: int | None
    mean: Sequence[float] | None
    std: Sequence[float] | None
    root: Any
    seq_len: int | None
    target_len: int | None
    mask_fraction: float | None
    model_kind: str | None
    packing: str | None
    tokenizer: Any
    trains_on_chats: bool | None
    unpaired: bool | None
    corrupt_images: Any
    prediction_names: Callable[[], Sequence[str]] | None
    prediction_rows: Callable[[list[Any]], Sequence[dict[str, Any]]] | None
    rectangular_val_dataloader: Callable[..., Any] | None
    check: Callable[..., Any] | None
    check_template: Callable[..., Any] | None
    check_predict: Callable[..., Any] | None
    check_shares: Callable[..., Any] | None


def run_datamodule(trainer: Trainer | None) -> Any:
    """Returns the datamodule of a run; None without one."""
    return getattr(trainer, "datamodule", None)
