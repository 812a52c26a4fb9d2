"""Distances between a student and its teacher: of their logits, and of the outputs of layers.

Logits have gradients in closed form. With the teacher's probabilities `p = softmax(t / T)` and the student's
`q = softmax(s / T)` at a temperature T:

| name | distance | source |
|---|---|---|
| `kl` | `T^2 KL(p, q)` | Distilling the Knowledge in a Neural Network, Hinton et al., 2015, arXiv 1503.02531 |
| `cross_entropy` | `T^2 H(p, q)`; the same gradient as `kl` | the same |
| `reverse_kl` | `T^2 KL(q, p)` | MiniLLM, Gu et al., 2023, arXiv 2306.08543 |
| `jsd` | `T^2 (b KL(p, m) + (1 - b) KL(q, m))`, `m = b p + (1 - b) q` | GKD, Agarwal et al., 2024, arXiv 2306.13649 |
| `wasserstein` | `T sum_i abs(p_(i) - q_(i))`, in descending order | ULD, Boizard et al., 2024, arXiv 2402.12030 |
| `mse` | `mean (s - t)^2` over classes | Do Deep Nets Really Need to be Deep?, Ba & Caruana, 2014, arXiv 1312.6184 |
| `hard` | cross-entropy with the teacher's most probable class | DeiT, Touvron et al., 2021, arXiv 2012.12877 |

Departures: `reverse_kl` and `jsd` have Hinton's factor T^2 too, and `wasserstein` T, so that their gradients do not
shrink with the temperature. ULD is the 1-Wasserstein distance for a uniform cost of transport, and does not ask which
class has a probability: use it with cross-entropy to the targets.

Where the classes are split over ranks, three all-reduces of one or two numbers per sample replace those over the
classes; `wasserstein`, which sorts all classes, gathers the logits instead.

Layers have outputs that are recorded in a forward, and may have copied weights:

* Hidden states: FitNets: Hints for Thin Deep Nets, Romero et al., 2014, arXiv 1412.6550: the mean squared difference
  between the teacher's states and a trained projection of the student's. DistilBERT, Sanh et al., 2019, arXiv
  1910.01108: one minus their cosine. Departure: FitNets' regressor is a convolution; here it is linear, over features.
* Attention transfer: Paying More Attention to Attention, Zagoruyko & Komodakis, 2017, arXiv 1612.03928: a map is
  the sum over features of its squared activations, at each position, divided by the map's norm. Departure: for a
  transformer, positions are tokens.
* Initial weights from every k-th layer: DistilBERT, section 3: the student has the teacher's width, and is initialised
  from one layer out of two. Layers are the blocks of the parallel plans, so that it works for every model with a plan.

Shapes: n samples, C classes, c classes of this rank's shard; of layers B samples, N positions (pixels or tokens), D
features of the student, E of the teacher.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from dlo_framework.batches import tree_map
from dlo_framework.distillation import LogitLoss
from dlo_framework.distributed.collectives import sum_over_ranks
from dlo_framework.distributed.vocab_parallel import VocabularyShard
from dlo_framework.errors import DloError, check_choice, check_number, did_you_mean, shown_names
from dlo_framework.fake_kernels import fake_copy, fake_like, fake_tensors
from dlo_framework.task import Task

#: Names of the distances.
LogitLossName = Literal["kl", "cross_entropy", "reverse_kl", "jsd", "wasserstein", "mse", "hard"]

#: Losses `[n, 1]`, and their gradients with respect to the student's logits over T, `[n, c]`.
Losses = tuple[Tensor, Tensor | None]
Shard = VocabularyShard | None

#: Distances that do not use the temperature.
WITHOUT_TEMPERATURE = ("mse", "hard")


@dataclass(frozen=True)
class LogitDistance(LogitLoss):
    """Distance between logits by name.

    Args:
        name: Name of the distance.
        temperature: Divisor of both models' logits, T; must be 1 for `mse` and `hard`, which do not use it.
        beta: Weight of the teacher in `jsd`'s mixture; near 0 it behaves as `kl` does, near 1 as `reverse_kl`.

    Raises:
        DloError: If a value is out of range, or has no effect.
    """

    name: LogitLossName = "kl"
    temperature: float = 1.0
    beta: float = 0.5

    def __post_init__(self) -> None:
        check_choice("Distill: loss", self.name, get_args(LogitLossName))
        check_number("Distill: temperature", self.temperature, "above 0", "1 to 4 is usual")
        if self.name in WITHOUT_TEMPERATURE and self.temperature != 1:
            raise DloError(
                f"Distill: temperature must be 1 with loss: {self.name}, which does not use it, got"
                f" {self.temperature}; remove it, or set loss: kl"
            )
        check_number("Distill: beta", self.beta, "above 0 and below 1", "loss: kl for 0, loss: reverse_kl for 1")

    def losses_and_slope(
        self, student: Tensor, teacher: Tensor, shard: Shard = None, *, need_slope: bool
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the losses, `[n, 1]`, and their gradients, `[n, c]`; overwrites the logits."""
        if self.name == "mse":
            return _mse(student, teacher, shard, need_slope)
        if self.name == "hard":
            return _hard(student, teacher, shard, need_slope)
        for logits in (student, teacher):
            logits.div_(self.temperature)
        if self.name == "wasserstein":
            return _wasserstein(student, teacher, self.temperature, shard, need_slope)
        log_q, log_p = _log_softmax_of_both(student, teacher, shard)
        losses, slope = _DIVERGENCES[self.name](log_q, log_p, self.beta, shard, need_slope)
        return losses * self.temperature**2, None if slope is None else slope.mul_(self.temperature)


def _log_softmax_of_both(student: Tensor, teacher: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
    """Returns the log-probabilities of both, written over the logits."""
    highest = torch.cat([student.amax(dim=1, keepdim=True), teacher.amax(dim=1, keepdim=True)], dim=1)
    if shard is not None:
        highest = shard.communicator.maximum(highest)
    for logits, most in zip((student, teacher), highest.split(1, dim=1), strict=True):
        logits.sub_(most)
    totals = [logits.exp().sum(dim=1, keepdim=True) for logits in (student, teacher)]
    for logits, total in zip((student, teacher), _sum(torch.cat(totals, dim=1), shard).split(1, dim=1), strict=True):
        logits.sub_(total.log())
    return student, teacher


def _sum(partial: Tensor, shard: Shard) -> Tensor:
    """Returns sums over this rank's classes, `[n, k]`, summed over the ranks."""
    return partial if shard is None else shard.communicator.sum(partial)


def _sum_classes(values: Tensor, shard: Shard) -> Tensor:
    """Returns the sum over all classes of values `[n, c]`, `[n, 1]`."""
    return _sum(values.sum(dim=1, keepdim=True), shard)


# Each takes the log-probabilities of student and teacher, beta, the shard, and whether to compute the gradient with
# respect to s / T.


def _kl(log_q: Tensor, log_p: Tensor, beta: float, shard: Shard, need_slope: bool) -> Losses:
    p = log_p.exp()
    losses = _sum_classes(log_p.sub_(log_q).mul_(p), shard)
    return losses, log_q.exp_().sub_(p) if need_slope else None


def _cross_entropy(log_q: Tensor, log_p: Tensor, beta: float, shard: Shard, need_slope: bool) -> Losses:
    p = log_p.exp_()
    losses = -_sum_classes(p * log_q, shard)
    return losses, log_q.exp_().sub_(p) if need_slope else None


def _reverse_kl(log_q: Tensor, log_p: Tensor, beta: float, shard: Shard, need_slope: bool) -> Losses:
    q = log_q.exp()
    ratio = log_q.sub_(log_p)
    losses = _sum_classes(q * ratio, shard)
    return losses, q.mul_(ratio.sub_(losses)) if need_slope else None


def _jsd(log_q: Tensor, log_p: Tensor, beta: float, shard: Shard, need_slope: bool) -> Losses:
    p, q = log_p.exp(), log_q.exp()
    log_m = (beta * p + (1 - beta) * q).log_().clamp_(min=-torch.finfo(p.dtype).max)
    to_student = log_q.sub_(log_m).mul_(q)  # 0, not NaN, where q underflows: log_q and log_m are finite.
    to_teacher = log_p.sub_(log_m).mul_(p)
    both = _sum(torch.cat([part.sum(dim=1, keepdim=True) for part in (to_teacher, to_student)], dim=1), shard)
    losses = beta * both[:, :1] + (1 - beta) * both[:, 1:]
    if not need_slope:
        return losses, None
    # d/dq is (1 - beta) (log q - log m); the softmax's Jacobian subtracts its mean under q.
    return losses, to_student.sub_(q.mul_(both[:, 1:])).mul_(1 - beta)


_DIVERGENCES: dict[str, Callable[..., Losses]] = {
    "kl": _kl,
    "cross_entropy": _cross_entropy,
    "reverse_kl": _reverse_kl,
    "jsd": _jsd,
}


def _wasserstein(student: Tensor, teacher: Tensor, temperature: float, shard: Shard, need_slope: bool) -> Losses:
    if shard is not None:
        student, teacher = shard.gather(student), shard.gather(teacher)
    q = torch.softmax(student, dim=1)
    sorted_q, order = q.sort(dim=1, descending=True)
    apart = sorted_q.sub_(torch.softmax(teacher, dim=1).sort(dim=1, descending=True).values)
    losses = apart.abs().sum(dim=1, keepdim=True) * temperature
    if not need_slope:
        return losses, None
    signs = torch.empty_like(q).scatter_(1, order, apart.sign_())
    slope = q * signs.sub_((q * signs).sum(dim=1, keepdim=True))
    return losses, slope if shard is None else slope.narrow(1, shard.first, shard.count)


def _mse(student: Tensor, teacher: Tensor, shard: Shard, need_slope: bool) -> Losses:
    classes = student.shape[1] if shard is None else shard.size
    apart = student.sub_(teacher)
    losses = _sum_classes(apart.square(), shard) / classes
    return losses, apart.mul_(2 / classes) if need_slope else None


def _hard(student: Tensor, teacher: Tensor, shard: Shard, need_slope: bool) -> Losses:
    if shard is None:
        columns = teacher.argmax(dim=1, keepdim=True)
        own = torch.ones_like(columns, dtype=torch.bool)
    else:
        columns, own = (part[:, None] for part in shard.locate_targets(shard.argmax(teacher)))
    log_q, _ = _log_softmax_of_both(student, teacher, shard)
    at_target = torch.where(own, log_q.gather(1, columns), 0)
    losses = -_sum(at_target, shard)
    return losses, log_q.exp_().scatter_add_(1, columns, -own.to(log_q.dtype)) if need_slope else None


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
        outputs, self.values = self.values, {}
        return outputs

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
        shapes = {name: tensor.shape for name, tensor in outputs.pop().items()}
        outputs.remove()
    for name in wanted:
        if name not in shapes:
            raise DloError(
                f"Distill: layers must return tensors in the forward of {type(task.model).__name__}, got '{name}',"
                " which does not, or is not called; name the layer around it"
            )
    return shapes


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
    match = re.fullmatch(r"every\s+([1-9]\d*)", text.strip())
    if match is None:
        raise DloError(f"Distill: init_from must be 'every' and a number of layers, got '{text}'; for example: every 2")
    return int(match[1])


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
