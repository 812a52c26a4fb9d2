"""Reads the checkpoint folders that DeepSpeed itself saves, without DeepSpeed and without executing their pickles.

``FOLDER/latest`` names a folder ``global_stepN`` (Lightning's strategy calls it ``checkpoint``) that holds

- stages 0 to 2: ``mp_rank_00_model_states.pt``: the module's state, in the precision of the computation;
- stage 3: ``zero_pp_rank_R_mp_rank_00_model_states.pt``, one a rank: buffers, and segments of frozen parameters;
- stages 1 to 3: ``[bf16_]zero_pp_rank_R_mp_rank_00_optim_states.pt``, one a rank: flat partitions in fp32, and their
  optimizer state, in the layout of :mod:`dlo_plugins.deepspeed.partitions`.

The layout is that of DeepSpeed 0.15 to 0.19.
"""

from __future__ import annotations

import math
import pickle
import re
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dlo_framework.checkpoint.formats import CheckpointFormat, ForeignCheckpoint
from dlo_framework.checkpoint.formats.lightning_file import name_optimizer_states
from dlo_framework.checkpoint.state_tree import make_read_error
from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.partitions import Stage3Layout, Stage12Layout
from dlo_plugins.parallel.flat_slices import FlatSlice

_MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<part>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:[a-z0-9]+_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<part>\d+)_optim_states\.pt")
#: Keys that DeepSpeed writes to a model's file; all others are the client state, such as Lightning's.
_OWN = frozenset(
    (
        *("module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "frozen_param_fragments"),
        *("shared_params", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps"),
        *("global_samples", "dp_world_size", "mp_world_size", "ds_config", "ds_version", "checkpoint_parallel_dims"),
        *("sparse_tensor_module_names", "csr_tensor_module_names"),
    )
)


class _Placeholder:
    """Placeholder for one of DeepSpeed's objects: it keeps the attributes, and does nothing."""


class _PlaceholderNumber(int):
    """Placeholder for an enumeration of DeepSpeed's."""


#: DeepSpeed's classes whose objects are in its files, and their placeholders.
_PLACEHOLDERS: list[tuple[type, str]] = [
    (_Placeholder, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (_Placeholder, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (_Placeholder, "deepspeed.utils.tensor_fragment.fragment_address"),
    (_PlaceholderNumber, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


class DeepSpeedFormat(CheckpointFormat):
    """Folder that DeepSpeed has saved, or a folder inside it."""

    def recognises(self, path: Path) -> bool:
        """Returns whether the path is such a folder."""
        return path.is_dir() and ((path / "latest").is_file() or any(_MODEL.fullmatch(f.name) for f in path.iterdir()))

    def read(self, path: Path) -> ForeignCheckpoint:
        """Reads a folder; nothing in it is executed.

        Raises:
            DloError: if a file is missing, damaged or unsafe, or if tensor or pipeline parallelism has split the model.
        """
        folder = _find_tagged_folder(path)
        models, optimizers = _files(folder, _MODEL), _files(folder, _OPTIMIZER)
        if not models:
            raise DloError(f"{folder} holds no *_model_states.pt; choose a folder that DeepSpeed has saved")
        states = [_read(path) for path in (models if len(optimizers) > 1 else models[:1])]
        partitions = [_read(path)["optimizer_state_dict"] for path in optimizers]
        first = states[0]
        if partitions and len(partitions) != int(first.get("dp_world_size", len(partitions))):
            raise DloError(
                f"{folder} must hold the optimizer's files of {first['dp_world_size']} ranks, which saved it, got"
                f" {len(partitions)}; copy the others there"
            )
        weights, optimizer = _weights(first), _full_optimizer(first)
        if partitions:
            masters, optimizer = _join_partitions(partitions, first)
            weights |= masters | _frozen(states)
        for name, holder in dict(first.get("shared_params") or {}).items():
            weights[name] = weights[holder]
        checkpoint = {key: value for key, value in first.items() if key not in _OWN}
        checkpoint.setdefault("pytorch-lightning_version", metadata.version("lightning"))
        checkpoint.setdefault("global_step", int(first.get("global_steps", 0)))
        checkpoint.setdefault("epoch", 0)
        checkpoint.setdefault("lr_schedulers", [])
        checkpoint["state_dict"] = {_strip_wrappers(name): value for name, value in weights.items()}
        checkpoint["optimizer_states"] = [optimizer] if optimizer is not None else []
        notes = name_optimizer_states(checkpoint)
        if first.get("lr_scheduler") is not None:
            notes.append("the state of DeepSpeed's own learning-rate scheduler is dropped")
        if "loops" not in first:
            notes.append(
                "it has no state of epochs, batches and Lightning's schedules: a run that resumes from it has weights"
                " and optimizer, and restarts everything else"
            )
        return ForeignCheckpoint(checkpoint, notes)


# --- files ---------------------------------------------------------------------------------------------------


def _find_tagged_folder(source: Path) -> Path:
    latest = source / "latest"
    if not latest.is_file():
        return source
    folder = source / latest.read_text().strip()
    if not folder.is_dir():
        raise DloError(f"{latest} names the folder {folder.name}, which is not beside it; copy it there")
    return folder


def _files(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    """Returns the files of all ranks, by rank."""
    by_rank: dict[int, Path] = {}
    for path in folder.iterdir():
        match = pattern.fullmatch(path.name)
        if match is None:
            continue
        if int(match["part"]) != 0:
            raise DloError(
                f"{folder} must hold the full model, got a part that tensor or pipeline parallelism has split"
                f" ({path.name}); save the full model in the program that split it"
            )
        by_rank[int(match["rank"] or 0)] = path
    missing = sorted(set(range(max(by_rank, default=-1) + 1)) - by_rank.keys())
    if missing:
        raise DloError(
            f"{folder} has no file of rank {missing[0]} beside {next(iter(by_rank.values())).name}; copy it there"
        )
    return [by_rank[rank] for rank in sorted(by_rank)]


def _read(path: Path) -> dict[str, Any]:
    """Reads a file's tensors and plain data; DeepSpeed's own objects become placeholders."""
    try:
        with torch.serialization.safe_globals(list(_PLACEHOLDERS)):
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError) as error:
        raise make_read_error(path, error) from None
    if not isinstance(content, dict):
        raise DloError(f"{path} must hold a dict, as DeepSpeed writes it, got a {type(content).__name__}")
    return content


# --- weights -------------------------------------------------------------------------------------------------


def _weights(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Returns the full tensors in the model's file: in stage 3, the buffers."""
    module = state.get("module") or {}
    trained = {name for shapes in state.get("param_shapes") or [] for name in shapes}
    cut = trained | set(state.get("frozen_param_shapes") or {})
    empty = {name for name in cut if name in module and module[name].numel() != math.prod(_shapes(state)[name])}
    return {name: value for name, value in module.items() if isinstance(value, Tensor) and name not in empty}


def _shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    trained = {name: tuple(shape) for shapes in state.get("param_shapes") or [] for name, shape in shapes.items()}
    return trained | {name: tuple(shape) for name, shape in dict(state.get("frozen_param_shapes") or {}).items()}


def _frozen(states: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
    """Returns stage 3's frozen parameters, concatenated from all ranks' segments."""
    parameters: dict[str, Tensor] = {}
    for name, shape in dict(states[0].get("frozen_param_shapes") or {}).items():
        parts = [dict(state.get("frozen_param_fragments") or {}).get(name) for state in states]
        held = [part.view(-1) for part in parts if part is not None]
        if held and held[0].numel() < math.prod(shape):
            parameters[name] = torch.cat(held)[: math.prod(shape)].view(tuple(shape)).clone()
    return parameters


def _full_optimizer(state: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns stage 0's optimizer state, whose parameters are numbered."""
    optimizer = state.get("optimizer")
    whole = isinstance(optimizer, dict) and {"state", "param_groups"} <= optimizer.keys()
    return optimizer if whole else None


def _join_partitions(partitions: Sequence[Any], model: Mapping[str, Any]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Returns the fp32 weights, and the optimizer's state by name, from all ranks' partitions."""
    stage, shapes = int(partitions[0]["zero_stage"]), [dict(group) for group in model["param_shapes"]]
    weights: dict[str, Tensor] = {}
    states: dict[str, dict[str, Any]] = {}
    for rank, part in enumerate(partitions):
        flats = part["fp32_flat_groups"] if stage == 3 else part["single_partition_of_fp32_groups"]
        kept = part["optimizer_state_dict"] if stage == 3 else part["base_optimizer_state"]
        for number, (flat, named) in enumerate(zip(flats, shapes, strict=True)):
            pieces = _layout(stage, named, len(partitions), part, number, model).slices(rank)
            state = kept[number] if isinstance(kept, list) else kept["state"].get(number, {})
            _scatter_partition(pieces, named, flat, state, weights, states)
    kept = partitions[0]["optimizer_state_dict" if stage == 3 else "base_optimizer_state"]
    return weights, {"state": states, "param_groups": _groups(kept, shapes)}


def _layout(
    stage: int, named: Mapping[str, Any], ranks: int, part: Mapping[str, Any], number: int, model: Mapping[str, Any]
) -> Stage12Layout | Stage3Layout:
    numels = tuple(math.prod(shape) for shape in named.values())
    if stage == 3:
        return Stage3Layout(numels, ranks)
    padded = part.get("param_alignment_paddings")
    if padded is None or not any(padded[number]):
        return Stage12Layout(numels, ranks)
    element = model["module"][next(iter(named))].element_size()
    return Stage12Layout(numels, ranks, 16 // math.gcd(16, element))


def _scatter_partition(
    pieces: Sequence[FlatSlice],
    named: Mapping[str, Any],
    flat: Tensor,
    state: Mapping[str, Any],
    weights: dict[str, Tensor],
    states: dict[str, dict[str, Any]],
) -> None:
    """Copies one rank's partition of a group into the full tensors."""
    names = list(named)
    for piece in pieces:
        name = names[piece.parameter]
        shape = tuple(named[name])
        _copy_slice(weights, name, shape, flat, piece)
        entries = states.setdefault(_strip_wrappers(name), {})
        for key, value in state.items():
            if isinstance(value, Tensor) and value.ndim > 0 and value.numel() >= piece.offset + piece.length:
                _copy_slice(entries, key, shape, value, piece)
            else:
                entries[key] = value


def _copy_slice(into: dict[str, Any], name: str, shape: tuple[int, ...], flat: Tensor, piece: FlatSlice) -> None:
    if name not in into:
        into[name] = torch.zeros(shape, dtype=flat.dtype)
    values = flat.detach().view(-1)[piece.offset : piece.offset + piece.length]
    into[name].view(-1)[piece.start : piece.start + piece.length] = values


def _groups(kept: Any, shapes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the optimizer's parameter groups, with names; in stage 3 a group may have several flat tensors."""
    if isinstance(kept, list):
        return [{"params": list(named)} for named in shapes]
    return [
        {**group, "params": [name for number in group["params"] for name in _names(shapes, number)]}
        for group in kept["param_groups"]
    ]


def _names(shapes: Sequence[Mapping[str, Any]], number: int) -> Iterator[str]:
    yield from (_strip_wrappers(name) for name in shapes[number])


def _strip_wrappers(name: str) -> str:
    """Returns a parameter's name without the prefixes of Lightning's and torch.compile's wrappers."""
    return name.removeprefix("_forward_module.").replace("_orig_mod.", "")
