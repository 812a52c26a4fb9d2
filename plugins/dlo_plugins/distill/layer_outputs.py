"""Layers of a student and its teacher: options, outputs in a forward, the distances between them, and copied weights.

* Hidden states: FitNets: Hints for Thin Deep Nets, Romero et al., 2014, arXiv 1412.6550: the mean squared difference
  between the teacher's states and a trained projection of the student's. DistilBERT, Sanh et al., 2019, arXiv
  1910.01108: one minus their cosine. Departure: FitNets' regressor is a convolution; here it is linear, over features.
* Attention transfer: Paying More Attention to Attention, Zagoruyko & Komodakis, 2017, arXiv 1612.03928: a map is
  the sum over features of its squared activations, at each position, divided by the map's norm. Departure: for a
  transformer, positions are tokens.
* Initial weights from every k-th layer: DistilBERT, section 3: the student has the teacher's width, and is initialised
  from one layer out of two. Layers are the blocks of the parallel plans, so that it works for every model with a plan.

Shapes: B samples, N positions (pixels or tokens), D features of the student, E of the teacher.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dlo_framework.batches import tree_map
from dlo_framework.distributed.collectives import sum_over_ranks
from dlo_framework.errors import DloError, check_choice, check_number, did_you_mean, shown_names
from dlo_framework.fake_kernels import fake_copy, fake_like, fake_tensors
from dlo_framework.task import Task


def check_layers(option: str, model: nn.Module, names: Iterable[str]) -> None:
    """Checks that a model has layers of these names.

    Args:
        option: Option that names them, for the error.
        model: Model, which may be on the meta device.
        names: Names of modules, relative to the model.

    Raises:
        DloError: It has not; the message has the nearest name.
    """
    known = [name for name, _ in model.named_modules() if name]
    for name in names:
        if name not in known:
            raise DloError(
                f"Distill: {option} must name layers of {type(model).__name__}, got '{name}'{did_you_mean(name, known)}"
            )


def output_tensor(output: Any) -> Tensor | None:
    """Returns the hidden states among a layer's outputs: the output itself, or its first tensor."""
    if isinstance(output, Tensor):
        return output
    parts = output.values() if isinstance(output, dict) else output if isinstance(output, tuple | list) else ()
    return next((part for part in parts if isinstance(part, Tensor)), None)


class LayerOutputs:
    """Keeps the outputs of named layers from one forward to the next :meth:`pop`.

    Only the first call of a layer is kept, so that recomputation in backward changes nothing.

    Args:
        model: Model with the layers.
        names: Names of the layers.
    """

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        self.values: dict[str, Tensor] = {}
        self._handles: list[RemovableHandle] = []
        for name in dict.fromkeys(names):
            self._handles.append(model.get_submodule(name).register_forward_hook(partial(self._keep, name)))

    def _keep(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        tensor = output_tensor(output)
        if tensor is not None:
            self.values.setdefault(name, tensor)

    def pop(self) -> dict[str, Tensor]:
        """Returns the outputs by name, and forgets them."""
        found, self.values = self.values, {}
        return found

    def remove(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles, self.values = [], {}


def layer_shapes(task: Task, batch: Any, names: Iterable[str]) -> dict[str, torch.Size]:
    """Returns the shapes of layers' outputs for a batch, from a forward without values; no memory is allocated.

    Args:
        task: Task with its model, which may be on the meta device; it is not changed.
        batch: Batch of one sample.
        names: Names of the layers.

    Raises:
        DloError: A layer was not called, or has no tensor as its output.
    """
    wanted = list(dict.fromkeys(names))
    with fake_tensors(), torch.no_grad():
        copied = fake_copy(task).eval()
        outputs = LayerOutputs(copied.model, wanted)
        args, kwargs = copied.inputs(tree_map(fake_like, batch))
        copied.forward(*args, **kwargs)
        found = {name: tensor.shape for name, tensor in outputs.pop().items()}
        outputs.remove()
    for name in wanted:
        if name not in found:
            raise DloError(
                f"Distill: layers must return tensors in the forward of {type(task.model).__name__}, got '{name}',"
                " which does not, or is not called; name the layer around it"
            )
    return found


#: Distance of hidden states.
HiddenLossName = Literal["mse", "cosine"]


def as_sequence(activation: Tensor) -> Tensor:
    """Returns an activation `[B, N, D]` from `[B, D, H, W]`, `[B, N, D]` or `[B, D]`."""
    if activation.ndim == 4:
        return activation.flatten(2).transpose(1, 2)
    return activation if activation.ndim == 3 else activation[:, None]


def pool_to_same_grid(student: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Averages the larger of two grids, `[B, D, H, W]`, to the size of the smaller one, in each direction."""
    if student.ndim != 4 or student.shape[2:] == teacher.shape[2:]:
        return student, teacher
    size = (min(student.shape[2], teacher.shape[2]), min(student.shape[3], teacher.shape[3]))
    return F.adaptive_avg_pool2d(student, size), F.adaptive_avg_pool2d(teacher, size)


def hidden_distances(projected: Tensor, teacher: Tensor, kind: HiddenLossName) -> Tensor:
    """Returns the distance at each position, `[B, N]` in float32 at least.

    Args:
        projected: Student's states, projected to the teacher's width, `[B, N, E]`.
        teacher: Teacher's states, `[B, N, E]`.
        kind: `mse`, the mean over features of the squared difference; `cosine`, one minus the cosine.
    """
    dtype = torch.promote_types(projected.dtype, torch.float32)
    ours, theirs = projected.to(dtype), teacher.to(dtype)
    if kind == "mse":
        return (ours - theirs).square().mean(dim=-1)
    return 1 - F.cosine_similarity(ours, theirs, dim=-1)


def attention_map(activation: Tensor, counted: Tensor | None = None, group: Any = None) -> Tensor:
    """Returns the map of an activation, `[B, N]` in float32 at least, of norm 1 over all positions.

    Args:
        activation: Activation, `[B, D, H, W]` or `[B, N, D]`.
        counted: Positions that belong to the map, 1 or 0, `[B, N]`; None for all.
        group: Process group of the ranks that share the positions; None for one rank.
    """
    states = as_sequence(activation)
    values = states.to(torch.promote_types(states.dtype, torch.float32)).square().mean(dim=-1)
    if counted is not None:
        values = values * counted
    if group is None:
        return F.normalize(values, dim=1)
    squares = sum_over_ranks(values.square().sum(dim=1, keepdim=True), group)
    return values / (squares + torch.finfo(values.dtype).tiny).sqrt().clamp_min(1e-12)


def attention_distances(student: Tensor, teacher: Tensor, counted: Tensor | None = None, group: Any = None) -> Tensor:
    """Returns the norm of the difference of both maps, `[B]`.

    Args:
        student: Activation of the student, `[B, D, H, W]` or `[B, N, D]`.
        teacher: Activation of the teacher, with as many positions.
        counted: Positions that belong to the maps, 1 or 0, `[B, N]`; None for all.
        group: Process group of the ranks that share the positions; None for one rank.
    """
    apart = attention_map(student, counted, group) - attention_map(teacher, counted, group)
    squares = sum_over_ranks(apart.square().sum(dim=1), group)
    return (squares + torch.finfo(apart.dtype).tiny).sqrt()


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


@dataclass
class OnPolicy:
    """Distillation on the student's own completions, in a share of the steps.

    On-Policy Distillation of Language Models: Learning from Self-Generated Mistakes. Agarwal et al., 2024, arXiv
    2306.13649. In a share of the steps the student completes the batch's prompts, and the loss is the distance from the
    teacher on these completions alone. No gradient goes through the sampling. Departure: the share is of optimizer
    steps, so that all micro-batches of a step are of one kind.

    Args:
        fraction: Share of optimizer steps that train on the student's samples, lambda; 0.5 mixes both, 1 uses no
            answers of the data.
        prompt_tokens: Number of tokens of each row's prompt, for packed text; None for the tokens before the first
            target, for prompts and answers.
        max_new_tokens: Maximum number of tokens of a completion.
        temperature: Divisor of the student's logits in sampling; the paper uses 1.
        seed: Seed of the choice of steps and of the sampling.
        multiple: Multiple to which rows are padded. A larger one makes fewer shapes, each of which a pipeline and
            compiled code prepare once.

    Raises:
        DloError: A value is out of range.
    """

    fraction: float = 0.5
    prompt_tokens: int | None = None
    max_new_tokens: int = 64
    temperature: float = 1.0
    seed: int = 0
    multiple: int = 8

    def __post_init__(self) -> None:
        check_number("Distill: on_policy.fraction", self.fraction, "above 0 and at most 1", "leave on_policy out")
        for name, value in (
            ("prompt_tokens", self.prompt_tokens),
            ("max_new_tokens", self.max_new_tokens),
            ("multiple", self.multiple),
        ):
            check_number(f"Distill: on_policy.{name}", value, "at least 1")
        check_number("Distill: on_policy.temperature", self.temperature, "above 0", "1 is usual")

    def samples_at(self, step: int) -> bool:
        """Returns whether an optimizer step trains on samples; the same on all ranks."""
        return float(np.random.default_rng([self.seed, step]).random()) < self.fraction

    def seed_of(self, step: int) -> int:
        """Returns the seed of the samples of an optimizer step, the same on all ranks."""
        return int(np.random.default_rng([self.seed, 1, step]).integers(2**31))


@dataclass
class HiddenStates:
    """Distance between hidden states of pairs of layers, with a trained projection to the teacher's width.

    Args:
        layers: Layers of the student, each with the teacher's; names are relative to the models. By default the last
            block of each parallel plan.
        loss: `mse`, the mean squared difference (FitNets); `cosine`, one minus the cosine (DistilBERT).
        weight: Factor of the distance's mean.
        project: Whether to project the student's states also where both models have the same width.

    Raises:
        DloError: A value is out of range.
    """

    layers: dict[str, str] = field(default_factory=dict)
    loss: Literal["mse", "cosine"] = "mse"
    weight: float = 1.0
    project: bool = False

    def __post_init__(self) -> None:
        check_choice("Distill: hidden.loss", self.loss, ("mse", "cosine"))
        check_number("Distill: hidden.weight", self.weight, "above 0", "leave hidden out to switch it off")


@dataclass
class AttentionTransfer:
    """Distance between the attention maps of pairs of layers: squared activations, summed over features.

    Args:
        layers: Layers of the student, each with the teacher's; names are relative to the models. By default the last
            block of each parallel plan. Their outputs must have positions: `[B, D, H, W]` or `[B, N, D]`.
        weight: Factor of the distance's mean; the paper's is 1000 over the number of samples and positions.

    Raises:
        DloError: A value is out of range.
    """

    layers: dict[str, str] = field(default_factory=dict)
    weight: float = 1.0

    def __post_init__(self) -> None:
        check_number("Distill: attention.weight", self.weight, "above 0", "leave attention out to switch it off")


def layer_pairs(layers: dict[str, str], student: Task, teacher: Task) -> dict[str, str]:
    """Returns the pairs of layers: those named, or by default the last blocks of both plans."""
    if layers:
        return dict(layers)
    last = [task.parallel_plan().block_names(task.model)[-1] for task in (student, teacher)]
    return {last[0]: last[1]}
