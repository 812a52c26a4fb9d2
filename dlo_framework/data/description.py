"""What a datamodule says of its data: attributes that any datamodule may have, none of which it must."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch import Trainer


class DataDescription:
    """Attributes of a datamodule; None for those that it does not have.

    They are read when they are asked for: a datamodule may compute them from files.

    Args:
        datamodule: Datamodule of a run; None without one.

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
        seq_len: Tokens of a row.
        packing: Whether rows hold several documents: `none`, or the way in which they are chosen.
        tokenizer: Tokenizer of transformers, after setup.
        trains_on_chats: Whether samples are conversations.
        unpaired: Whether answers have a verdict each, and no better or worse one.
        corrupt_images: Count of images that could not be read.
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
    packing: str | None
    tokenizer: Any
    trains_on_chats: bool | None
    unpaired: bool | None
    corrupt_images: Any
    check_template: Callable[..., Any] | None
    check_predict: Callable[..., Any] | None
    check_shares: Callable[..., Any] | None

    def __init__(self, datamodule: Any) -> None:
        self._datamodule = datamodule

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the datamodule."""
        if name not in type(self).__annotations__:
            raise AttributeError(f"no attribute {name!r} of datamodules is declared")
        return getattr(self._datamodule, name, None)


def run_datamodule(trainer: Trainer | None) -> Any:
    """Returns the datamodule of a run; None without one."""
    return getattr(trainer, "datamodule", None)
