"""Writes and reads ``state.pt``: a checkpoint's plain data, read with ``weights_only=True``."""

from __future__ import annotations

import io
import pickle
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlo_framework.checkpoint.tensor_file import HashedFile
from dlo_framework.checkpoint.torch_file import make_read_error
from dlo_framework.errors import DloError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device, Tensor)
#: Lightning's keys for the arguments of a model and its data; dlo never reads them.
_INFORMATIVE = ("hyper_parameters", "datamodule_hyper_parameters")


def write_state(file: HashedFile, rest: dict[str, Any]) -> None:
    """Writes the plain data."""
    torch.save(rest, file)  # type: ignore[arg-type]  # torch only needs ``write`` and ``flush``.


def read_state(path: Path) -> dict[str, Any]:
    """Reads a file of :func:`write_state`.

    Raises:
        DloError: if it is damaged, or contains anything that would execute.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as error:
        raise make_read_error(path, error) from None
    if not isinstance(content, dict):
        raise DloError(f"{path} must hold a checkpoint's state, a dict, got a {type(content).__name__}")
    return content


def refuse_unreadable(rest: dict[str, Any]) -> None:
    """Refuses values that could be written but not read with ``weights_only=True``.

    Hyperparameters, which are only informative, are replaced by their text instead.

    Raises:
        DloError: if there is such a value; it names the entry.
    """
    for key in _INFORMATIVE:
        values = rest.get(key)
        for name, value in list(values.items()) if isinstance(values, dict) else ():
            if next(_unreadable(value, ()), None) is not None:
                text = f"the hyperparameter '{name}' is saved as text: a {type(value).__name__} is not plain data"
                warnings.warn(text, stacklevel=2)
                values[name] = repr(value)  # type: ignore[index]
    for path, value in _unreadable(rest, ()):
        where = "".join(f"[{step!r}]" for step in path)
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise DloError(
            f"checkpoint{where} must be plain data, got a {kind}, which could not be read back safely; in the"
            " state_dict or on_save_checkpoint that adds it, save numbers, text, tensors, and lists and dicts of them"
        )


def _unreadable(node: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """Yields path and value of each node that the restricted unpickler would refuse."""
    if type(node) in _PLAIN:
        return
    if type(node) in (dict, OrderedDict):
        for key, value in node.items():
            if type(key) not in _PLAIN and not _can_read_back(key):
                yield (*path, key), key
            yield from _unreadable(value, (*path, key))
    elif type(node) in (list, tuple):
        for number, item in enumerate(node):
            yield from _unreadable(item, (*path, number))
    elif not _can_read_back(node):
        yield path, node


def _can_read_back(value: Any) -> bool:
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # Whatever its pickling or unpickling raises, it cannot be read back.
        return False
    return True
