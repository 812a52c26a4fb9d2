"""What a classifier logs: exact means over samples, the confusion matrix, and pictures of it and of a batch's images.

Metrics are exact across ranks and partial batches, at the cost of a few sums per batch. Pictures are drawn with PIL, by
pure functions from tensors to `[3, H, W]` uint8 tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch import Trainer
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor
from torchmetrics import Metric

from dlo_framework.data.description import DataDescription, run_datamodule
from dlo_framework.watch.media import log_image


class SampleMean(Metric):
    """Mean of one value per sample, over all samples of all ranks.

    Ranks add their sums and counts and divide once, so the result does not depend on how samples are distributed over
    batches and ranks. Counts of hits are integers below 2**24, so an accuracy is exact to the last bit.
    """

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, values: Tensor, real: Tensor) -> None:
        """Adds the values, `[B]`, of the samples for which `real`, `[B]` of bool, is true."""
        self.total += torch.where(real, values, 0).sum(dtype=torch.float32)
        self.count += real.sum()

    def compute(self) -> Tensor:
        """Returns the mean as a float32 scalar; NaN if there were no samples."""
        return self.total / self.count


class Confusion(Metric):
    """Counts of (true class, predicted class) pairs over all ranks, `[C, C]` of int64.

    Equals torchmetrics' `MulticlassConfusionMatrix`, whose update costs O(C * C) per batch where this costs O(B): with
    1,000 classes this one is cheap enough to stay on.
    """

    full_state_update = False
    counts: Tensor

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.num_classes = num_classes
        self.add_state("counts", torch.zeros(num_classes**2, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, predicted: Tensor, targets: Tensor, real: Tensor) -> None:
        """Adds pairs of class indices, `[B]` each, where `real`, `[B]` of bool, is true."""
        cells = torch.where(real, targets * self.num_classes + predicted, 0)
        self.counts.index_add_(0, cells, real.long())

    def compute(self) -> Tensor:
        """Returns the counts, rows by true class."""
        return self.counts.view(self.num_classes, self.num_classes)


# --- pictures -----------------------------------------------------------------------------------------------------


def show_images(trainer: Trainer, batch: Any, count: int, num_classes: int) -> None:
    """Shows the first `count` images of a batch with their labels, as the model gets them."""
    data = DataDescription(run_datamodule(trainer))

    def make() -> Tensor:
        images = denormalise(batch[0][:count], data.mean, data.std).cpu()
        labels = target_labels(batch[1][:count], _class_names(trainer, num_classes))
        return image_grid(images, labels)

    log_image(trainer, "train/images", make)


def show_confusion(trainer: Trainer, confusion: Confusion, stage: str) -> None:
    """Shows the confusion matrix of all ranks, if it has counts; every rank must call this."""
    if not confusion.update_called:
        return
    counts = confusion.compute()  # Collective: rank 0 alone draws.
    names = _class_names(trainer, confusion.num_classes)
    log_image(trainer, f"{stage}/confusion", lambda: confusion_picture(counts, names))


def _class_names(trainer: Trainer, num_classes: int) -> list[str]:
    names = DataDescription(run_datamodule(trainer)).class_names
    return [str(name) for name in names] if names else [str(i) for i in range(num_classes)]


_INK = (20, 20, 20)
_PAPER = (255, 255, 255)
#: Width in pixels below which images are enlarged by an integer factor, so that labels fit.
_NARROWEST = 96
#: Largest number of classes for which counts and names are written.
_COUNTED = 20
#: Pixels of the longest class name of a confusion matrix; longer ones are shortened.
_LONGEST = 240


def denormalise(images: Tensor, mean: Sequence[float] | None, std: Sequence[float] | None) -> Tensor:
    """Returns normalised images, `[B, 3, H, W]` of float, as uint8 pixels.

    Args:
        images: Images as the model gets them; uint8 images are returned unchanged.
        mean: Mean of each channel, in 0..1; None stretches each image's own range to 0..255.
        std: Standard deviation of each channel.
    """
    if images.dtype == torch.uint8:
        return images
    images = images.detach().float().cpu()
    if mean is not None and std is not None:
        pixels = images * torch.tensor(std).view(1, -1, 1, 1) + torch.tensor(mean).view(1, -1, 1, 1)
    else:
        low, high = images.amin((1, 2, 3), keepdim=True), images.amax((1, 2, 3), keepdim=True)
        pixels = (images - low) / (high - low).clamp(min=1e-8)
    return (pixels * 255).round().clamp(0, 255).to(torch.uint8)


def image_grid(images: Tensor, labels: Sequence[str], columns: int = 4) -> Tensor:
    """Returns a grid of labelled images, `[3, H, W]` of uint8.

    Args:
        images: Images, `[B, 3, h, w]` of uint8.
        labels: Captions, one per image.
        columns: Number of images in a row.
    """
    factor = max(1, -(-_NARROWEST // images.shape[-1]))
    images = F.interpolate(images.float(), scale_factor=factor, mode="nearest").to(torch.uint8)
    height, width = images.shape[-2:]
    font, gap = _font(13), 4
    lines = ["\n".join(_wrap(label, width, font)) for label in labels]
    caption = 2 + 16 * max((text.count("\n") + 1 for text in lines), default=1)
    rows = -(-len(images) // columns)
    size = (columns * (width + gap) + gap, rows * (height + caption + gap) + gap)
    canvas = Image.new("RGB", size, _PAPER)
    draw = ImageDraw.Draw(canvas)
    for i, (image, text) in enumerate(zip(images, lines, strict=True)):
        x, y = gap + i % columns * (width + gap), gap + i // columns * (height + caption + gap)
        canvas.paste(Image.fromarray(image.cpu().permute(1, 2, 0).contiguous().numpy()), (x, y))
        draw.multiline_text((x, y + height + 1), text, fill=_INK, font=font, spacing=1)
    return _to_tensor(canvas)


def target_labels(targets: Tensor, class_names: Sequence[str]) -> list[str]:
    """Returns a caption per sample: its class, or the two largest classes of a soft target."""
    if not targets.is_floating_point():
        return [class_names[int(t)] if t >= 0 else "(padding)" for t in targets.tolist()]
    labels = []
    for shares, classes in zip(*targets.float().topk(min(2, targets.shape[1]), dim=1), strict=True):
        pairs = zip(shares.tolist(), classes.tolist(), strict=True)
        labels.append(" + ".join(f"{share:.0%} {class_names[c]}" for share, c in pairs if share >= 0.005))
    return labels


def confusion_picture(counts: Tensor, class_names: Sequence[str]) -> Tensor:
    """Returns the confusion matrix as an image, `[3, H, W]` of uint8.

    A cell is darker the larger its fraction of the row (of the true class), blue on the diagonal and red off it. Up to
    20 classes the cells contain the counts, with the names beside them; with more classes a cell is a few
    pixels or one, and its shade is the square root of the fraction, so that single mistakes still show.

    Args:
        counts: Counts, `[C, C]` of int, rows by true class.
        class_names: Names of the C classes.
    """
    counts = counts.detach().cpu()
    classes = len(counts)
    shares = counts.double() / counts.sum(1, keepdim=True).clamp(min=1)
    written = classes <= _COUNTED
    cell = 44 if written else max(1, 1000 // classes)
    shades = _shades(shares if written else shares.sqrt())  # [C, C, 3]
    body = Image.fromarray(np.repeat(np.repeat(shades, cell, axis=0), cell, axis=1))
    hits, total = int(counts.diagonal().sum()), int(counts.sum())
    title = f"{hits:,} of {total:,} right ({hits / max(total, 1):.2%}); rows: true class, columns: predicted"
    longest = min(_LONGEST, max(int(_font(13).getlength(name)) for name in class_names) + 1)
    left, top = (max(110, longest + 12), 46 if longest < cell else longest + 34) if written else (24, 46)
    width = max(left + body.width + 8, int(_font(14).getlength(title)) + 16)
    canvas = Image.new("RGB", (width, top + body.height + 26), _PAPER)
    canvas.paste(body, (left, top))
    draw = ImageDraw.Draw(canvas)
    draw.text((8, 6), title, fill=_INK, font=_font(14))
    if written:
        _write_cells(canvas, counts, shares, class_names, cell, (left, top))
    return _to_tensor(canvas)


def _write_cells(
    canvas: Image.Image,
    counts: Tensor,
    shares: Tensor,
    class_names: Sequence[str],
    cell: int,
    origin: tuple[int, int],
) -> None:
    left, top = origin
    font, draw = _font(13), ImageDraw.Draw(canvas)
    names = [_fit(name, _LONGEST, font) for name in class_names]
    upright = max(map(font.getlength, names)) < cell
    for row, name in enumerate(names):
        middle = row * cell + cell // 2
        draw.text((left - 6, top + middle), name, fill=_INK, font=font, anchor="rm")
        if upright:
            draw.text((left + middle, top - 4), name, fill=_INK, font=font, anchor="ms")
        else:  # Turned, from below to above.
            label = Image.new("RGB", (int(font.getlength(name)) + 1, 18), _PAPER)
            ImageDraw.Draw(label).text((0, 9), name, fill=_INK, font=font, anchor="lm")
            turned = label.rotate(90, expand=True)
            canvas.paste(turned, (left + middle - 9, top - 4 - turned.height))
        for column in range(len(counts)):
            count = int(counts[row, column])
            if count:
                ink = _PAPER if shares[row, column] > 0.5 else _INK
                at = (left + column * cell + cell // 2, top + middle)
                draw.text(at, str(count), fill=ink, font=font, anchor="mm")


def _shades(shares: Tensor) -> np.ndarray:
    """Returns colours, `[C, C, 3]` of uint8: white at 0; at 1 blue on the diagonal and red off it."""
    ends = torch.tensor([[178.0, 24.0, 43.0], [20.0, 72.0, 140.0]])
    full = ends[torch.eye(len(shares), dtype=torch.long)]
    colours = 255 + (full - 255) * shares[:, :, None].float()
    return colours.round().to(torch.uint8).numpy()


def _fit(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """Returns `text`, shortened with an ellipsis to at most `width` pixels."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…" if text else ""


def _wrap(text: str, width: int, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> list[str]:
    """Returns the lines of a text, broken at spaces; a word that is wider than `width` pixels is shortened."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if font.getlength(longer) <= width:
            lines[-1] = longer
        else:
            lines += [_fit(word, width, font)] if lines[-1] else []
            lines[-1] = _fit(word, width, font)
    return lines


def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _to_tensor(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()
