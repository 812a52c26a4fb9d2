"""Kinds of blocks: blocks of one kind have the same modules, settings and shapes."""

from __future__ import annotations

from typing import Any

from torch import nn

#: Attributes that number a block: two blocks that differ only in these are of one kind.
_NUMBERS = ("idx", "index", "id", "number")


def block_kind(block: nn.Module) -> Any:
    """Returns a key of a block's kind: its modules' classes, settings and parameters' shapes."""
    return tuple(
        (
            name,
            type(module),
            tuple(sorted((key, str(value)) for key, value in vars(module).items() if _is_setting(key, value))),
            tuple((key, tuple(tensor.shape)) for key, tensor in module._parameters.items() if tensor is not None),
        )
        for name, module in block.named_modules()
    )


def _is_setting(key: str, value: Any) -> bool:
    return isinstance(value, int | str) and not key.endswith(_NUMBERS)
