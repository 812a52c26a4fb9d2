"""Converts between Lightning's single-file checkpoints and canonical ones.

Lightning numbers the optimizer states; a canonical checkpoint names them by parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dlo_framework.checkpoint.formats.safetensors_file import check_new_file, make_file_manifest, refuse_existing
from dlo_framework.checkpoint.loading import SafeCheckpointIO, load, read_file
from dlo_framework.checkpoint.manifest import Manifest, SavedTensor, dtype_name
from dlo_framework.checkpoint.saving import save
from dlo_framework.checkpoint.state_tree import extract_tensors, plain_data
from dlo_framework.checkpoint.verify import verify

Shape = tuple[int, ...]
#: Number of assigned entries of each group.
Done = tuple[int, ...]
_MOST_STATES = 20_000
#: Names of the statistics of torch's batch norms: floating-point, but never in an optimizer.
_BUFFERS = ("running_mean", "running_var")


def import_lightning(source: Path, target: Path) -> list[str]:
    """Converts Lightning's single-file checkpoint to a canonical one; nothing in it is executed.

    Returns:
        Warnings, one sentence for each part of the state that could not be converted.

    Raises:
        DloError: if the file is damaged or unsafe, or the target cannot be written.
    """
    refuse_existing(target)
    verify(source)
    checkpoint = read_file(source, mmap=True)
    notes = name_optimizer_states(checkpoint)
    save(checkpoint, target, about={"strategy": "imported", "imported_from": source.name})
    return notes


def to_lightning(source: Path, target: Path) -> None:
    """Converts a canonical checkpoint to a single file that Lightning's own ``Trainer`` resumes from.

    The optimizer states are numbered in the order of their groups, as in torch. The file is assembled in memory.

    Raises:
        DloError: if the source is damaged, or the target cannot be written.
    """
    check_new_file(target)
    SafeCheckpointIO().save_checkpoint(as_lightning(load(source)), target)


def as_lightning(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a checkpoint as Lightning's own strategies write it; all tensors must be full tensors.

    Lazy mappings become dicts, and the optimizer states are numbered as in torch.
    """
    plain: dict[str, Any] = plain_data(checkpoint)
    for optimizer in plain.get("optimizer_states") or ():
        groups = optimizer.get("param_groups", [])
        numbers = {name: number for number, name in enumerate(name for group in groups for name in group["params"])}
        state = {numbers[name]: state for name, state in optimizer.get("state", {}).items() if name in numbers}
        if groups:
            optimizer["state"] = state | optimizer.pop("beside", {})
        for group in groups:
            group["params"] = [numbers[name] for name in group["params"]]
    return plain


def manifest_of_lightning(checkpoint: dict[str, Any], path: Path) -> Manifest:
    """Returns the content of a loaded single-file checkpoint in the form of a checkpoint's manifest."""
    manifest = make_file_manifest(path, weights_only="optimizer_states" not in checkpoint)
    manifest.step, manifest.epoch = int(checkpoint.get("global_step", 0)), int(checkpoint.get("epoch", 0))
    manifest.versions = {"lightning": str(checkpoint["pytorch-lightning_version"])}
    for place, tensor in extract_tensors(checkpoint)[1]:
        saved = SavedTensor(dtype_name(tensor.dtype), tuple(tensor.shape))
        manifest.tensors.setdefault(place.group, {})[place.name] = saved
    return manifest


def name_optimizer_states(checkpoint: dict[str, Any]) -> list[str]:
    """Replaces parameter numbers in the optimizer states by names, in place, where the match is unambiguous.

    Lightning's single-file checkpoints number the parameters in the order of the optimizer's groups. Within a group
    that is the order of the model's own, so numbers and names can be matched by their shapes.

    Args:
        checkpoint: Lightning's dict, with plain tensors.

    Returns:
        A sentence with the reason for each optimizer that could not be matched; its state stays unchanged.
    """
    notes = []
    weights = {n: tuple(t.shape) for n, t in checkpoint["state_dict"].items() if isinstance(t, Tensor)}
    floating = [
        name for name in weights if checkpoint["state_dict"][name].is_floating_point() and not name.endswith(_BUFFERS)
    ]
    for index, optimizer in enumerate(checkpoint.get("optimizer_states") or ()):
        numbers = [number for group in optimizer.get("param_groups", ()) for number in group["params"]]
        if not all(isinstance(number, int) for number in numbers):
            continue
        shapes = {number: _shape(optimizer["state"].get(number, {})) for number in numbers}
        groups = [[shapes[number] for number in group["params"]] for group in optimizer["param_groups"]]
        match = match_by_shape([weights[name] for name in floating], groups)
        if isinstance(match, str):
            notes.append(f"optimizer {index}: {match}; its state stays numbered")
            continue
        names = dict(zip(numbers, (floating[place] for group in match for place in group), strict=True))
        optimizer["state"] = {names[number]: state for number, state in optimizer["state"].items()}
        for group in optimizer["param_groups"]:
            group["params"] = [names[number] for number in group["params"]]
    return notes


def match_by_shape(shapes: Sequence[Shape], groups: Sequence[Sequence[Shape | None]]) -> list[list[int]] | str:
    """Matches the entries of an optimizer's groups to a model's tensors by shape.

    Args:
        shapes: Shapes of the model's tensors, in its order; some may be in no group (buffers, frozen weights).
        groups: Shapes of each group's entries, in the model's order; None for an unknown shape.

    Returns:
        For each group the indices into ``shapes``; or the reason why no match, or more than one, was found.
    """
    wanted, start = sum(map(len, groups)), (0,) * len(groups)
    if wanted > len(shapes):
        return f"it has {wanted} parameters, and the model {len(shapes)}"
    # For each tensor: how many entries of each group are assigned, in how many ways (2 means several), and from where.
    reached: list[dict[Done, tuple[int, Done]]] = [{start: (1, start)}]
    for at, shape in enumerate(shapes):
        following: dict[Done, tuple[int, Done]] = {}
        for done, (ways, _) in reached[-1].items():
            if wanted - sum(done) < len(shapes) - at:  # Enough tensors are left to skip this one.
                _add(following, done, ways, done)
            for number, group in enumerate(groups):
                if done[number] < len(group) and group[done[number]] in (shape, None):
                    _add(following, (*done[:number], done[number] + 1, *done[number + 1 :]), ways, done)
        if len(following) > _MOST_STATES:
            return "too many assignments to the parameters fit"
        reached.append(following)
    end = tuple(map(len, groups))
    if end not in reached[-1]:
        return "no assignment to the parameters fits the shapes"
    if reached[-1][end][0] > 1:
        return "more than one assignment to the parameters fits"
    result: list[list[int]] = [[] for _ in groups]
    for at in range(len(shapes), 0, -1):
        before = reached[at][end][1]
        for number in range(len(groups)):
            if before[number] < end[number]:
                result[number].insert(0, at - 1)
        end = before
    return result


def _add(states: dict[Done, tuple[int, Done]], done: Done, ways: int, before: Done) -> None:
    states[done] = (min(2, ways + states.get(done, (0, done))[0]), before)


def _shape(state: Mapping[str, Any]) -> Shape | None:
    """Returns a parameter's shape from its moments; None if there are none."""
    shapes = {tuple(value.shape) for value in state.values() if isinstance(value, Tensor) and value.ndim > 0}
    return shapes.pop() if len(shapes) == 1 else None
