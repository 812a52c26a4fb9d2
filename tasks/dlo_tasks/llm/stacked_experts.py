"""Stacks the experts of stored weights without reading them: files have each expert's matrices, models all in one.

transformers 5 stacks experts while it reads: `experts.*.w1.weight` and `experts.*.w3.weight`, each `[I, D]`, become
`experts.gate_up_proj` `[E, 2 I, D]`. Here a stacked tensor is described by boxes of the stored ones, so that each rank
reads the experts, or the rows of them, that it holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from dlo_framework.checkpoint.manifest import Chunk, SavedTensor
from dlo_framework.shards import Box


@dataclass(frozen=True)
class Stacking:
    """Rule that stacks the matrices of experts.

    Attributes:
        sources: Patterns of stored names, in which `*` is the number of the expert: the matrices that are joined along
            their rows, in their order.
        target: End of the stacked tensor's name.
    """

    sources: tuple[str, ...]
    target: str

    def find(self, name: str) -> tuple[str, int, int] | None:
        """Returns the stacked tensor of a stored name, the number of the matrix, and that of the expert."""
        for number, pattern in enumerate(self.sources):
            found = re.search(re.escape(pattern).replace(r"\*", r"(\d+)") + "$", name)
            if found is not None:
                return name[: found.start()] + self.target, number, int(found.group(1))
        return None


@dataclass
class _Parts:
    matrices: int
    tensors: dict[tuple[int, int], SavedTensor] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)


def read_stackings(conversions: Iterable[object]) -> list[Stacking]:
    """Returns the rules among transformers' conversions of a family that stack experts and do nothing else.

    A reach into transformers 5.24 (`core_model_loading.WeightConverter`), which documents none of these attributes.

    Args:
        conversions: Conversions of the family.
    """
    from transformers.core_model_loading import Concatenate, MergeModulelist, WeightConverter

    found = []
    for conversion in conversions:
        if not isinstance(conversion, WeightConverter):
            continue
        first, *more = conversion.operations
        stacks = type(first) is MergeModulelist and first.dim == 0
        joins = len(more) == 1 and type(more[0]) is Concatenate and more[0].dim == 1
        targets = conversion._original_target_patterns
        if stacks and (joins or not more) and len(targets) == 1:
            found.append(Stacking(tuple(conversion._original_source_patterns), targets[0]))
    return found


def stack_stored(stored: Mapping[str, SavedTensor], stackings: Iterable[Stacking]) -> dict[str, SavedTensor]:
    """Returns the stacked tensors of stored ones, by name; those with a gap among their experts are left out.

    Args:
        stored: Stored tensors by name.
        stackings: Rules.
    """
    groups: dict[str, _Parts] = {}
    for stacking in stackings:
        for name, tensor in stored.items():
            place = stacking.find(name)
            if place is not None:
                target, matrix, expert = place
                groups.setdefault(target, _Parts(len(stacking.sources))).tensors[matrix, expert] = tensor
    stacked = {name: _join(parts) for name, parts in groups.items()}
    return {name: tensor for name, tensor in stacked.items() if tensor is not None}


def _join(parts: _Parts) -> SavedTensor | None:
    count = 1 + max(expert for _, expert in parts.tensors)
    if len(parts.tensors) != count * parts.matrices:
        return None
    heights = [parts.tensors[matrix, 0].shape[0] for matrix in range(parts.matrices)]
    first = parts.tensors[0, 0]
    chunks = []
    for (matrix, expert), tensor in parts.tensors.items():
        above = sum(heights[:matrix])
        for chunk in tensor.chunks:
            offsets = (expert, above + chunk.box.offsets[0], *chunk.box.offsets[1:])
            chunks.append(Chunk(Box(offsets, (1, *chunk.box.sizes)), chunk.file, chunk.begin, chunk.end))
    return SavedTensor(first.dtype, (count, sum(heights), *first.shape[1:]), chunks)
