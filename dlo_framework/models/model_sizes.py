"""Support for images of other sizes than the one a model was built for.

A ViT has one position embedding for each patch of the size it was built for, a CoAtNet one bias for each relative
position in its feature maps. :func:`accept_any_size` does not change these parameters, so that optimizers, averages and
checkpoints are unaffected; the forward pass interpolates them to the size of its images, and gradients flow back
through the interpolation. At the size the model was built for, outputs are those of the plain model, bit for bit.
Convolutional networks do not need this.

How a model does so is known per library of models: a package adds a subclass of :class:`ImageModels` by an entry point
in the group ``dlo_framework.image_models``, named like the library's package::

    dlo_framework.image_models =
        timm = dlo_tasks.imagenet.timm_sizes:TimmModels

It serves models of that library anywhere in a module, also in a plain LightningModule. Models of other libraries are
only checked, by a forward pass.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from typing import TypeAlias

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from dlo_framework.errors import DloError, first_line
from dlo_framework.extensions import installed_points, load_instance
from dlo_framework.fake_kernels import tensor_places, tensors_replaced
from dlo_framework.placed_model import evaluation_mode

GROUP = "dlo_framework.image_models"

Size: TypeAlias = tuple[int, int]
"""Height and width of an image in pixels, or of a feature map in cells."""


class ImageModels(ABC):
    """Image sizes of a library's models.

    The methods are called with each module whose class is the library's, or derives from one that is.
    """

    @abstractmethod
    def accept_any_size(self, part: nn.Module) -> None:
        """Changes a module in place, so that it accepts any size that its stride divides; it may be called again.

        Parameters, buffers, keys of the state dict, and the outputs at the size it was built for must not change.
        """

    @abstractmethod
    def size_multiples(self, part: nn.Module) -> list[int]:
        """Returns the divisors of valid heights and widths that a module sets: the patch of a ViT; empty for none."""


@cache
def _load_image_models(library: str) -> ImageModels | None:
    for point in installed_points().select(group=GROUP, name=library):
        return load_instance(point, "image models of", ImageModels)
    return None


def _known_parts(module: nn.Module) -> Iterator[tuple[nn.Module, ImageModels]]:
    """Yields the modules in ``module`` of a library with an entry point."""
    for part in module.modules():
        for library in dict.fromkeys(base.__module__.partition(".")[0] for base in type(part).__mro__):
            models = _load_image_models(library)
            if models is not None:
                yield part, models
                break


def accept_any_size(module: nn.Module) -> None:
    """Makes every model of a known library in ``module`` accept images of any size that its stride divides.

    Parameters, buffers, the keys of the state dict and the outputs at the size it was built for do not change. It may
    be called again, and on modules without such models.
    """
    for part, models in list(_known_parts(module)):
        models.accept_any_size(part)


# --- checks ------------------------------------------------------------------------------------------------


def size_multiple(module: nn.Module) -> int | None:
    """Returns the divisor of valid heights and widths: the patch of a ViT, the stride of a CoAtNet; else None."""
    multiples = list(chain.from_iterable(models.size_multiples(part) for part, models in _known_parts(module)))
    return math.lcm(*multiples) if multiples else None


def check_sizes(module: nn.Module, sizes: Iterable[Size], base: Size) -> None:
    """Checks that a model accepts images of these sizes, without computing anything.

    The forward pass runs on meta tensors. If it cannot run so at ``base`` either, which need not mean anything for real
    images, and if parameters are sharded, only the rules of the model's family are checked.

    Args:
        module: Model of images, or a LightningModule: its ``model``, or itself if it has a ``forward``.
        sizes: Sizes of images to check, as (height, width) in pixels.
        base: Size that the model was built for, (height, width).

    Raises:
        DloError: if a size is not accepted; it names the model and the size, and the nearest sizes or another fix.
    """
    sizes = list(dict.fromkeys(sizes))
    model = _image_model(module)
    multiple = size_multiple(module)
    for side in dict.fromkeys(chain.from_iterable(sizes)):
        if multiple is not None and side % multiple:
            down = side // multiple * multiple
            near = " or ".join(str(fit) for fit in (down, down + multiple) if fit)
            raise DloError(
                f"{_name(model or module)}: height and width of images must be multiples of {multiple} pixels,"
                f" got {side}; use {near}"
            )
    if model is None or _sharded(model):
        return
    channels = next((number for number in _channels(model) if _objection(model, base, number) is None), None)
    if channels is None:
        return
    for size in sizes:
        why = _objection(model, size, channels)
        if why is not None:
            fix = "use a ViT, a CoAtNet or a convolutional network"
            if getattr(model, "dynamic_img_size", True) is False:
                fix = "build it with dynamic_img_size: true (of a task: in model_args)"
            raise DloError(
                f"{_name(model)}: images must have the size that it was built for, {base[0]} x {base[1]} pixels, got"
                f" {size[0]} x {size[1]} ({why}); {fix}, or set the size to {base[0]}"
            )


def _name(model: nn.Module) -> str:
    config = getattr(model, "pretrained_cfg", None) or {}
    return str(config.get("architecture") or type(model).__name__)


def _image_model(module: nn.Module) -> nn.Module | None:
    if not isinstance(module, LightningModule):
        return module
    inner = getattr(module, "model", None)
    if isinstance(inner, nn.Module):
        return inner
    return module if type(module).forward is not LightningModule.forward else None


def _sharded(model: nn.Module) -> bool:
    """Whether a strategy has sharded the parameters, so that the forward pass needs the other ranks."""
    return any(type(parameter) is not nn.Parameter for parameter in model.parameters())


def find_objection(model: nn.Module, size: Size) -> str | None:
    """Returns the reason why a model cannot take two images of ``size``, None if it can; nothing is computed."""
    objections = [_objection(model, size, channels) for channels in _channels(model)]
    return None if None in objections else objections[0]


def _channels(model: nn.Module) -> list[int]:
    """Returns the possible numbers of channels of a model's images: that of its first convolution, and three.

    The first convolution of a model that transforms images before (CSATv2: to frequencies) has another number.
    """
    first = next((part.in_channels for part in model.modules() if isinstance(part, nn.Conv2d)), 3)
    return list(dict.fromkeys((first, 3)))


def _objection(model: nn.Module, size: Size, channels: int) -> str | None:
    first = next((parameter for parameter in model.parameters() if parameter.is_floating_point()), None)
    images = torch.empty(2, channels, *size, dtype=None if first is None else first.dtype, device="meta")
    made: dict[int, Tensor] = {}  # tied tensors stay tied
    empty = [
        (entries, key, made.setdefault(id(tensor), torch.empty_like(tensor, device="meta")))
        for entries, key, tensor in tensor_places(model)
    ]
    eager = torch.compiler.set_stance("force_eager")
    with evaluation_mode(model), torch.no_grad(), eager, tensors_replaced(empty):
        try:
            model(images)
        except Exception as error:  # whatever it is, the model would raise it in training
            return first_line(error)
    return None
