"""The tree of a checkpoint: extraction of its tensors, their insertion on loading, and the file of what remains.

Lightning's checkpoint is a tree of mappings and sequences. The tensors that belong to the model and its optimizers (and
any that is sharded) are extracted into *groups*; a *mark* replaces each. The remaining tree is small and plain:
``state.pt`` holds it, which is read with ``weights_only=True``.
"""

from __future__ import annotations

import io
import pickle
import re
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dlo_framework.batches import is_named, rebuild, tree_leaves
from dlo_framework.checkpoint.store import HashedFile, store_of
from dlo_framework.errors import DloError
from dlo_framework.shards import FlatShard, Shard, SlicedShard
from dlo_framework.units import format_bytes

#: The key of a mark: ``{MARK: [group, name]}``.
MARK = "$dlo.tensor"
#: Key of a state dict's ``_metadata`` (the versions of torch's modules).
METADATA = "$dlo.metadata"
MODEL = "model"

Step = str | int
KeyPath = tuple[Step, ...]


class TensorLocation(NamedTuple):
    """Location of a tensor in a checkpoint.

    Attributes:
        path: Keys that lead to it from the top of the checkpoint.
        group: Group that it is stored in: ``model``, ``optimizer.0``, or its mapping's path.
        name: Name in the group: ``blocks.0.weight``, ``blocks.0.weight.exp_avg``.
    """

    path: KeyPath
    group: str
    name: str


def extract_tensors(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[TensorLocation, Shard]]]:
    """Extracts the tensors of model and optimizers, and all sharded ones, from a checkpoint, which stays unchanged.

    Returns:
        The remaining tree, with marks, and the tensors with their locations.
    """
    names = frozenset(checkpoint.get("state_dict") or ())
    tensors: list[tuple[TensorLocation, Shard]] = []

    def walk(node: Any, path: KeyPath, of_model: bool) -> Any:
        if isinstance(node, DTensor | FlatShard | SlicedShard) or (of_model and _is_plain(node)):
            key = _group_and_name(path)
            tensors.append((TensorLocation(path, *key), node))
            return make_mark(key)
        if isinstance(node, Mapping):
            # By names of the model's tensors: an average, gradients; `name@place` is a rank's own part of a sum.
            named = path and node and all(str(key).partition("@")[0] in names for key in node)
            is_state = path == ("state_dict",) or path[:1] + path[2:3] == ("optimizer_states", "state")
            here = bool(of_model or is_state or named)
            # With its own methods: a lazy mapping reads one tensor at a time.
            rest = {key: walk(node[key], (*path, key), here) for key in node}
            if versions := module_versions(node):
                rest[METADATA] = {key: dict(value) for key, value in versions.items()}
            return rest
        if isinstance(node, list | tuple):
            items = [walk(item, (*path, number), of_model) for number, item in enumerate(node)]
            return rebuild(node, items) if type(node) in (list, tuple, torch.Size) or is_named(node) else items
        # A NumPy scalar, such as a learning rate computed with NumPy, is not plain data.
        return node.item() if isinstance(node, np.generic) else node

    return walk(checkpoint, (), False), tensors


def plain_data(node: Any) -> Any:
    """Returns a tree with dicts for all mappings, and Python numbers for NumPy's."""
    if isinstance(node, Mapping):
        return {key: plain_data(node[key]) for key in node}
    if type(node) in (list, tuple):
        return type(node)([plain_data(item) for item in node])
    return node.item() if isinstance(node, np.generic) else node


def make_mark(key: tuple[str, str]) -> dict[str, list[str]]:
    """Returns the mark that replaces a tensor, which is stored under a group and a name."""
    return {MARK: list(key)}


def read_mark(node: Any) -> tuple[str, str] | None:
    """Returns the group and name of the tensor that a mark replaces; None for anything else."""
    if isinstance(node, dict) and len(node) == 1 and MARK in node:
        group, name = node[MARK]
        return str(group), str(name)
    return None


def insert_value(rest: dict[str, Any], path: KeyPath, value: Any) -> bool:
    """Inserts ``value`` at ``path`` if the path is free, with the mappings that lead to it; returns whether it did.

    A list is never lengthened: lists that differ between ranks have no common form.
    """
    node: Any = rest
    for number, step in enumerate(path[:-1]):
        if isinstance(node, dict):
            if node.get(step) is None:
                node[step] = {}
            node = node[step]
        else:
            assert isinstance(node, list), path[: number + 1]
            assert isinstance(step, int), path[: number + 1]
            assert step < len(node), path[: number + 1]
            node = node[step]
    if not isinstance(node, dict) or path[-1] in node:
        return False
    node[path[-1]] = value
    return True


def optimizer_extras(rest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns this rank's optimizer state that is not tensors: plain values by path, and each group's parameter names.

    The ranks of a sharded run may hold the states of different parameters, so rank 0's alone is incomplete.
    """
    values: list[tuple[KeyPath, Any]] = []
    groups: dict[tuple[int, int], list[Any]] = {}
    for number, optimizer in enumerate(rest.get("optimizer_states") or ()):
        for name, state in (optimizer.get("state") or {}).items():
            if isinstance(state, Mapping):
                path = ("optimizer_states", number, "state", name)
                values += [((*path, key), value) for key, value in state.items() if not _has_mark(value)]
        for index, group in enumerate(optimizer.get("param_groups") or ()):
            groups[number, index] = list(group.get("params") or ())
    return {"values": values, "groups": groups}


def merge_extras(rest: dict[str, Any], extra: dict[str, Any]) -> dict[str, Any]:
    """Adds another rank's :func:`optimizer_extras` to this rank's tree, without replacing entries.

    Returns:
        The entries that were added.
    """
    added: dict[str, Any] = {
        "values": [(path, value) for path, value in extra["values"] if insert_value(rest, path, value)]
    }
    added["groups"] = {}
    for (number, index), names in extra["groups"].items():
        groups = rest["optimizer_states"][number]["param_groups"]
        if index < len(groups):
            known = set(groups[index]["params"])
            added["groups"][number, index] = new = [name for name in names if name not in known]
            groups[index]["params"] += new
    return added


def insert_tensors(
    rest: Any, make: Callable[[dict[str, tuple[str, str]], dict[str, Any]], Any], read: Callable[..., Any]
) -> Any:
    """Inserts tensors in place of their marks.

    Args:
        rest: Tree that :func:`extract_tensors` returned.
        make: Function that creates a mapping from the marks in it, {key: (group, name)}, and its other entries.
        read: Function that reads the tensor of a group and name, for marks in sequences, which cannot be lazy.
    """
    place = read_mark(rest)
    if place is not None:
        return read(*place)
    if isinstance(rest, dict):
        tensors = {key: mark for key, value in rest.items() if (mark := read_mark(value)) is not None}
        others = {key: insert_tensors(value, make, read) for key, value in rest.items() if key not in tensors}
        return make(tensors, others) if tensors else others
    if isinstance(rest, list):
        return [insert_tensors(item, make, read) for item in rest]
    if isinstance(rest, tuple) and not is_named(rest):
        items = [insert_tensors(item, make, read) for item in rest]
        return type(rest)(items)
    return rest


def module_versions(state: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Returns the versions of torch's modules that a ``state_dict`` carries; None without them."""
    return getattr(state, "_metadata", None)


def _is_plain(node: Any) -> bool:
    """Returns whether a tensor is a dense block of memory, and not a subclass with its own representation."""
    if not isinstance(node, Tensor) or type(node) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return False
    assert node.device.type != "meta", "a tensor on the meta device holds nothing to save"
    return node.layout is torch.strided and not node.is_quantized


def _has_mark(node: Any) -> bool:
    if read_mark(node) is not None:
        return True
    if isinstance(node, Mapping):
        return any(_has_mark(value) for value in node.values())
    return isinstance(node, list | tuple) and any(_has_mark(item) for item in node)


def _group_and_name(path: KeyPath) -> tuple[str, str]:
    words = [str(step) for step in path]
    if path[0] == "state_dict":
        return MODEL, ".".join(words[1:])
    if path[0] == "optimizer_states":
        return f"optimizer.{path[1]}", ".".join(words[3:])
    return ".".join(words[:-1]) or "checkpoint", words[-1]


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
        with store_of(path).open(path) as file:
            content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # Damaged bytes raise anything.
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


def tensor_bytes(content: Any) -> int:
    """Returns the bytes of all tensors in a tree of mappings and sequences, shared storage counted once."""
    storages = [
        leaf.untyped_storage()
        for leaf in tree_leaves(content)
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided and leaf.device.type != "meta"
    ]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def make_refusal(path: Path, names: str) -> DloError:
    """Returns the error of a file whose pickle names globals that are not plain data."""
    return DloError(f"refusing {path}: pickle global {names} not allowed; nothing executed")


def make_read_error(path: Path, error: Exception) -> DloError:
    """Returns the error of a file that torch cannot or may not read: refused, or damaged."""
    class_name = re.search(r"(?:GLOBAL|global) ([\w.]+)", str(error))
    if isinstance(error, pickle.UnpicklingError) and class_name:
        return make_refusal(path, class_name.group(1))
    status = store_of(path).status(path)
    size = f" ({format_bytes(status.bytes)})" if status is not None else ""
    return DloError(
        f"cannot read the checkpoint {path}{size}: it is damaged, truncated, or not a checkpoint; try an earlier one"
    )
