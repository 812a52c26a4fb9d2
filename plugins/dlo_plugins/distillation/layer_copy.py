"""Initial weights of a student from every k-th layer of its teacher.

DistilBERT, a distilled version of BERT: smaller, faster, cheaper and lighter. Sanh et al., 2019, arXiv 1910.01108,
section 3: the student has the teacher's width, and is initialised from one layer out of two. Layers are the blocks of
the parallel plans, so that it works for every model with a plan.
"""

from __future__ import annotations

import re

import torch
from torch import Tensor

from dlo_framework.errors import DloError, shown_names
from dlo_framework.task import Task


def parse_every(text: str) -> int:
    """Returns the distance k of the copied layers from `every k`.

    Raises:
        DloError: The text is another.
    """
    found = re.fullmatch(r"every\s+([1-9]\d*)", text.strip())
    if found is None:
        raise DloError(f"Distill: init_from must be 'every' and a number of layers, got '{text}'; for example: every 2")
    return int(found[1])


def match_tensors(student: Task, teacher: Task, every: int, undecided: int | None = None) -> dict[str, str]:
    """Returns the teacher's tensor for each tensor of the student that has one, names relative to the tasks.

    Block i of the student gets the weights of the teacher's block `every * i`; other tensors those of the same name.
    Tensors that the teacher lacks, such as a distillation token, are left out.

    Args:
        student: Task with its model, which may be on the meta device.
        teacher: Task with its model, which may be on the meta device.
        every: Distance of the copied layers in the teacher.
        undecided: Size of the student's vocabulary that the data will replace; it fits any size of the teacher's.

    Raises:
        DloError: The teacher has another number of blocks, or blocks of other kinds or shapes.
    """
    ours, theirs = (task.parallel_plan().block_names(task.model) for task in (student, teacher))
    if len(ours) != -(-len(theirs) // every):
        raise DloError(
            f"Distill: init_from: every {every} must give the student's {len(ours)} blocks, got"
            f" {-(-len(theirs) // every)} of the teacher's {len(theirs)}; give the student"
            f" {-(-len(theirs) // every)} blocks, or a teacher with {len(ours) * every}"
        )
    sources = dict(zip(ours, theirs[::every], strict=True))
    own, others = _tensors(student), _tensors(teacher)
    pairs: dict[str, str] = {}
    resized = []
    for name, tensor in own.items():
        block = next((block for block in ours if name.startswith(f"model.{block}.")), None)
        source = name if block is None else f"model.{sources[block]}" + name.removeprefix(f"model.{block}")
        other = others.get(source)
        if other is None:
            if block is not None:
                raise DloError(
                    f"Distill: init_from must have a teacher with the student's kind of blocks, got one without"
                    f" '{source}' for '{name}'; remove init_from, or use a teacher of the student's family"
                )
            continue
        if not _fits(tensor.shape, other.shape, undecided):
            resized.append(f"{name} {list(tensor.shape)} for {list(other.shape)}")
        pairs[name] = source
    if resized:
        raise DloError(
            f"Distill: init_from must have a teacher with the student's shapes, got {shown_names(resized)}; give the"
            " student the teacher's width, or remove init_from"
        )
    return pairs


def _fits(shape: torch.Size, other: torch.Size, undecided: int | None) -> bool:
    """Returns whether two shapes are the same, but for a size that is undecided."""
    return len(shape) == len(other) and all(a in (b, undecided) for a, b in zip(shape, other, strict=True))


def _tensors(task: Task) -> dict[str, Tensor]:
    return {
        name.replace("_orig_mod.", ""): value
        for name, value in task.state_dict().items()
        if name.startswith("model.") and isinstance(value, Tensor)
    }
