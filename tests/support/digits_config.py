"""Config of a small vision transformer on the digits, as text."""

from __future__ import annotations

SMALL = "patch_size: 4, embed_dim: 12, depth: 1, num_heads: 2"
WIDE = "patch_size: 8, embed_dim: 48, depth: 2, num_heads: 2"


def digits_config(trainer: str, sizes: str = SMALL, data: str = "image_size: 16", model: str = "") -> str:
    """Returns a config.

    Args:
        trainer: Keys of the trainer.
        sizes: Sizes of the model.
        data: Options of the data.
        model: Further options of the model, a line each.
    """
    return f"""
trainer: {{{trainer}}}
model:
  class_path: ImageClassifier
  init_args:
    model: vit_tiny_patch16_224
    model_args: {{{sizes}}}
    {model}
data: {{class_path: DigitsData, init_args: {{{data}}}}}
"""
