"""Writes the weights of a model alone, for other libraries: to a safetensors file, or to one of ``torch.save``."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from dlo_framework.checkpoint.formats.safetensors_file import check_new_file, write_safetensors
from dlo_framework.checkpoint.formats.torch_file import SafeCheckpointIO, read_file
from dlo_framework.checkpoint.loading import LazyStateDict, as_lazy_state_dict, load
from dlo_framework.checkpoint.verify import verify
from dlo_framework.errors import DloError

#: Endings of files that ``torch.save`` writes.
TORCH_ENDINGS = (".pt", ".pth", ".bin")
#: Prefix of a Task's model; a library that loads the weights uses the model's own names.
PREFIX = "model."


def model_weights(checkpoint: Mapping[str, Any], prefix: str | None = None) -> LazyStateDict:
    """Returns the weights of the model alone, under the names that the model's own library uses.

    Exporters to other formats, for example a Hugging Face folder, read them from here.

    Args:
        checkpoint: Loaded checkpoint.
        prefix: Prefix of the names, which is removed; other names are left out. By default ``model.``, the prefix of a
            Task's model, and none if no name begins with it.

    Raises:
        DloError: if no name begins with ``prefix``.
    """
    state = checkpoint["state_dict"]
    weights = as_lazy_state_dict(state).copy()
    if prefix is None:
        prefix = PREFIX if any(name.startswith(PREFIX) for name in weights) else ""
    for name in list(weights):
        if not name.startswith(prefix) or not weights.is_tensor(name):
            del weights[name]
        elif prefix:
            weights.rename(name, name.removeprefix(prefix))
    if not weights:
        first = next(iter(state), None)
        raise DloError(f"prefix must begin the name of a weight, got '{prefix}'; the first weight is '{first}'")
    return weights


def export_weights(
    source: Path, target: Path, *, prefix: str | None = None, dtype: torch.dtype | None = None
) -> tuple[int, int]:
    """Writes the model's weights alone to a safetensors file, as timm and others load it, or to a ``torch.save`` file.

    Args:
        source: Checkpoint, a folder or a single file of Lightning's.
        target: File to write. With an ending of :data:`TORCH_ENDINGS` it holds a plain dict of tensors, for
            ``torch.load`` and ``load_state_dict``, and is assembled in memory.
        prefix: Prefix of the names; see :func:`model_weights`.
        dtype: Type that floating-point weights are converted to; None keeps their own.

    Returns:
        The number of tensors written, and the number left out.

    Raises:
        DloError: if the source is damaged, or the target cannot be written.
    """
    check_new_file(target)
    opened = verify(source)
    checkpoint = read_file(opened.path, mmap=True) if opened.manifest is None else load(source, level=None)
    weights = model_weights(checkpoint, prefix)
    if target.suffix in TORCH_ENDINGS:
        stored = {name: weights[name] for name in weights}
        floats = {name for name, tensor in stored.items() if dtype is not None and tensor.is_floating_point()}
        plain = {name: tensor.to(dtype) if name in floats else tensor for name, tensor in stored.items()}
        SafeCheckpointIO().save_checkpoint(plain, target)
    else:
        write_safetensors(weights, target, {"format": "pt"}, dtype=dtype)
    return len(weights), len(checkpoint["state_dict"]) - len(weights)
