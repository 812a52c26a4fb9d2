"""Draws docs/images/batch-mix.jpg with the plug-in's own functions: ``python docs/pictures/batch_mix.py``.

The photographs ship with scikit-learn under CC BY 2.0: china.jpg by danielbuechele, flower.jpg by vultilion (Flickr).
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from sklearn.datasets import load_sample_images
from torch import Tensor

from dlo_plugins.images.batch_mix import (
    MixPlan,
    clipped_boxes,
    mix_images,
    mix_targets,
    to_device,
)

FILE = Path(__file__).parents[1] / "images" / "batch-mix.jpg"
HEIGHT, WIDTH, GAP, CAPTION = 200, 300, 12, 28  # in pixels
CLASSES = ("palace", "flower")
LAM = 0.6
CENTRE = (160, 230)  # of the box, y and x; the box is clipped at the border


def photographs() -> Tensor:
    """Returns the two photographs, float32 [2, 3, HEIGHT, WIDTH]."""
    small = [Image.fromarray(photo).resize((WIDTH, HEIGHT)) for photo in load_sample_images().images]
    return torch.stack([torch.from_numpy(np.array(photo)).permute(2, 0, 1).float() for photo in small])


def plans() -> dict[str, MixPlan]:
    """Returns each technique's plan for the same lambda."""
    partner, lam, weight = np.array([1, 0]), np.full(2, LAM), np.full(2, 1 - LAM)
    boxes = clipped_boxes(lam, *(np.full(2, place) for place in CENTRE), HEIGHT, WIDTH)
    cut_lam = 1 - (boxes[:, 1] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 2]) / (HEIGHT * WIDTH)
    return {"MixUp": MixPlan(partner, lam, weight, None), "CutMix": MixPlan(partner, cut_lam, np.ones(2), boxes)}


def draw() -> Image.Image:
    """Returns the picture: one row per image; columns: the original, MixUp and CutMix."""
    images = photographs()
    columns = [("", images, torch.eye(2))]
    for name, plan in plans().items():
        on_device = to_device(plan, images.device)
        mixed = mix_images(images, plan, on_device, in_place=False)
        columns.append((f"{name}: ", mixed, mix_targets(torch.eye(2), on_device)))
    size = 3 * WIDTH + 4 * GAP, 2 * (HEIGHT + CAPTION) + GAP
    picture = Image.new("RGB", size, "white")
    pen, font = ImageDraw.Draw(picture), ImageFont.load_default(15)
    for column, (name, mixed, targets) in enumerate(columns):
        for row in range(2):
            left, top = GAP + column * (WIDTH + GAP), GAP + row * (HEIGHT + CAPTION)
            pixels = mixed[row].permute(1, 2, 0).round().clamp(0, 255).byte().numpy()
            picture.paste(Image.fromarray(pixels), (left, top))
            shares = [
                f"{share:.2f} {label}" for share, label in zip(targets[row].tolist(), CLASSES, strict=True) if share
            ]
            pen.text((left, top + HEIGHT + 5), name + " + ".join(shares), fill="#404040", font=font)
    return picture


def encode(picture: Image.Image) -> bytes:
    """Returns the picture as a JPEG."""
    file = io.BytesIO()
    picture.save(file, "JPEG", quality=88, optimize=True)
    return file.getvalue()


if __name__ == "__main__":
    FILE.write_bytes(encode(draw()))
