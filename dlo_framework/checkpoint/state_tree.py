"""Extraction of a checkpoint's tensors, and their insertion on loading.

Lightning's checkpoint is a tree of mappings and sequences. The tensors that belong to the model and its optimizers (and
any that is sharded) are extracted into *groups*; a *mark* replaces each, and the remaining tree is small and plain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dlo_framework.checkpoint.shards import FlatShard, Shard, SlicedShard

#: The key of a mark: ``{MARK: [group, name]}``.
MARK = "$dlo.tensor"
#: Key of a state dict's ``_metadata`` (the versions of torch's modules).
METADATA = "$dlo.metadata"
MODEL = "model"

Step = str | int
Path = tuple[Step, ...]


class TensorLocation(NamedTuple):
    """Location of a tensor in a checkpoint.

    Attributes:
        path: Keys that lead to it from the top of the checkpoint.
        group: Group that it is stored in: ``model``, ``optimizer.0``, or its mapping's path.
        name: Name in the group: ``blocks.0.weight``, ``blocks.0.weight.exp_avg``.
    """

    path: Path
    group: str
    name: str


def extract_tensors(checkpoint: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[TensorLocation, Shard]]]:
    """Extracts the tensors of model and optimizers, and all sharded ones, from a checkpoint, which stays unchanged.

    Returns:
        The remaining tree, with marks, and the tensors with their locations.
    """
    names = frozenset(checkpoint.get("state_dict") or ())
    found: list[tuple[TensorLocation, Shard]] = []

    def walk(node: Any, path: Path, of_model: bool) -> Any:
        if _is_stored(node, of_model):
            place = TensorLocation(path, *_group_and_name(path))
            found.append((place, node))
            return make_mark(place)
        if isinstance(node, Mapping):
            here = of_model or _is_of_model_or_optimizer(path) or (_tensors_by_name(node, names) and len(path) > 0)
            # With its own methods: a lazy mapping reads one tensor at a time.
            rest = {key: walk(node[key], (*path, key), here) for key in node}
            if getattr(node, "_metadata", None):
                rest[METADATA] = {key: dict(value) for key, value in node._metadata.items()}  # type: ignore[attr-defined]
            return rest
        if isinstance(node, list | tuple):
            items = [walk(item, (*path, number), of_model) for number, item in enumerate(node)]
            if hasattr(node, "_fields"):
                return type(node)(*items)
            return type(node)(items) if type(node) in (list, tuple, torch.Size) else items
        # A NumPy scalar, such as a learning rate computed with NumPy, is not plain data.
        return node.item() if isinstance(node, np.generic) else node

    return walk(checkpoint, (), False), found


def plain_data(node: Any) -> Any:
    """Returns a tree with dicts for all mappings, and Python numbers for NumPy's."""
    if isinstance(node, Mapping):
        return {key: plain_data(node[key]) for key in node}
    if type(node) in (list, tuple):
        return type(node)([plain_data(item) for item in node])
    return node.item() if isinstance(node, np.generic) else node


def make_mark(place: TensorLocation) -> dict[str, list[str]]:
    """Returns the mark that replaces a tensor."""
    return {MARK: [place.group, place.name]}


def read_mark(node: Any) -> tuple[str, str] | None:
    """Returns the group and name of the tensor that a mark replaces; None for anything else."""
    if isinstance(node, dict) and len(node) == 1 and MARK in node:
        group, name = node[MARK]
        return str(group), str(name)
    return None


def add_marks(rest: dict[str, Any], places: Iterator[TensorLocation]) -> None:
    """Adds marks for tensors that have no shard on this rank."""
    for place in places:
        insert_value(rest, place.path, make_mark(place))


def insert_value(rest: dict[str, Any], path: Path, value: Any) -> bool:
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
    values: list[tuple[Path, Any]] = []
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
        tensors = {key: found for key, value in rest.items() if (found := read_mark(value)) is not None}
        others = {key: insert_tensors(value, make, read) for key, value in rest.items() if key not in tensors}
        return make(tensors, others) if tensors else others
    if isinstance(rest, list):
        return [insert_tensors(item, make, read) for item in rest]
    if isinstance(rest, tuple) and not hasattr(rest, "_fields"):
        items = [insert_tensors(item, make, read) for item in rest]
        return type(rest)(items)
    return rest


def _is_of_model_or_optimizer(path: Path) -> bool:
    return path == ("state_dict",) or (len(path) >= 3 and path[0] == "optimizer_states" and path[2] == "state")


def _is_stored(node: Any, of_model: bool) -> bool:
    if isinstance(node, DTensor | FlatShard | SlicedShard):
        return True
    return of_model and _is_plain(node)


def _is_plain(node: Any) -> bool:
    """Returns whether a tensor is a dense block of memory, and not a subclass with its own representation."""
    if not isinstance(node, Tensor) or type(node) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return False
    assert node.device.type != "meta", "a tensor on the meta device holds nothing to save"
    return node.layout is torch.strided and not node.is_quantized


def _tensors_by_name(node: Mapping[Any, Any], names: frozenset[str]) -> bool:
    """Returns whether a mapping's keys are names of the model's tensors: an average of them, their gradients."""
    return bool(node) and all(key in names for key in node)


def _has_mark(node: Any) -> bool:
    if read_mark(node) is not None:
        return True
    if isinstance(node, Mapping):
        return any(_has_mark(value) for value in node.values())
    return isinstance(node, list | tuple) and any(_has_mark(item) for item in node)


def _group_and_name(path: Path) -> tuple[str, str]:
    words = [str(step) for step in path]
    if path[0] == "state_dict":
        return MODEL, ".".join(words[1:])
    if path[0] == "optimizer_states":
        return f"optimizer.{path[1]}", ".".join(words[3:])
    return ".".join(words[:-1]) or "checkpoint", words[-1]
