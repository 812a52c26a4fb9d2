"""Weights that are pruned, those of linear layers and convolutions without skipped ones, and N:M patterns in them.

N:M sparsity: in each group of M consecutive weights along the input dim, N are kept.

Zhou et al., "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch", 2021, arXiv 2102.04010
(SR-STE). Groups are along the input features of a linear layer and the input channels of a convolution, as NVIDIA's
sparse tensor cores need them for 2:4.

Semi-structured (2:4) kernels: Mishra et al., "Accelerating Sparse Deep Neural Networks", 2021, arXiv 2104.08378. They
are torch's (``torch.sparse.to_sparse_semi_structured``), for NVIDIA GPUs from Ampere on, in half precision or int8.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dlo_framework.errors import DloError, shown_names
from dlo_framework.models.hugging_face import is_conv1d
from dlo_framework.plan import ParallelPlan, match_names
from dlo_framework.task import Task


@dataclass(frozen=True)
class NMPattern:
    """Pattern of N kept weights in each group of M.

    Attributes:
        n: Number of kept weights in a group.
        m: Size of a group.
    """

    n: int
    m: int

    @classmethod
    def parse(cls, text: str) -> NMPattern | None:
        """Returns the pattern of a config's value, such as ``2:4``; None for ``none``.

        Raises:
            DloError: If it has another form, or N is not in [1, M).
        """
        if text == "none":
            return None
        match = re.fullmatch(r"(\d+):(\d+)", str(text).strip())
        if match is None:
            # YAML 1.1 reads an unquoted 2:4 as the number 124.
            raise DloError(f"Prune: pattern must be none or n:m in quotes, such as '2:4', got {text!r}; write it so")
        n, m = int(match[1]), int(match[2])
        if not 1 <= n < m:
            raise DloError(f"Prune: pattern n:m must have 1 <= n < m, got {text}; '2:4' keeps two of four")
        return cls(n, m)

    @property
    def sparsity(self) -> float:
        """Fraction of the weights that is pruned."""
        return 1 - self.n / self.m

    def __str__(self) -> str:
        """Returns the config's form."""
        return f"{self.n}:{self.m}"


def keep_largest(scores: Tensor, n: int) -> Tensor:
    """Returns which elements are among the n largest of the last dim; of equal ones the first are kept.

    Args:
        scores: Scores, ``[..., m]``.
        n: Number of elements to keep.

    Returns:
        bool, in the shape of the scores.
    """
    order = scores.argsort(dim=-1, descending=True, stable=True)
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, order[..., :n], True)


def nm_mask(scores: Tensor, pattern: NMPattern, dim: int) -> Tensor:
    """Returns the mask of a tensor's N:M pattern.

    Args:
        scores: Scores, such as the weights' magnitudes, of any shape.
        pattern: Pattern.
        dim: Dimension along which groups are consecutive; its size is a multiple of M.

    Returns:
        bool, in the shape of the scores; True for kept elements.
    """
    moved = scores.movedim(dim, -1)
    assert moved.shape[-1] % pattern.m == 0
    groups = moved.reshape(*moved.shape[:-1], -1, pattern.m)
    return keep_largest(groups, pattern.n).reshape(moved.shape).movedim(-1, dim)


def follows_pattern(weight: Tensor, pattern: NMPattern, dim: int) -> bool:
    """Returns whether each group of M has at least M - N zeros."""
    moved = weight.movedim(dim, -1)
    groups = (moved == 0).reshape(*moved.shape[:-1], -1, pattern.m)
    return bool((groups.sum(-1) >= pattern.m - pattern.n).all())


#: Weights whose sizes are not multiples of this are not supported by the kernels in half precision.
_ROWS, _COLUMNS = 32, 64


def check_kernels(device: torch.device, precision: str) -> None:
    """Checks that the semi-structured kernels run on a device in a precision.

    Raises:
        DloError: If they do not; dense kernels run masked weights everywhere.
    """
    use_dense = "set kernels: dense, which runs masked weights everywhere"
    if device.type != "cuda" or torch.version.hip is not None:
        raise DloError(
            f"Prune: kernels: semi_structured must have an NVIDIA GPU, for which torch has them, got a {device.type}"
            f" device; {use_dense}"
        )
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        raise DloError(
            "Prune: kernels: semi_structured must have a GPU of compute capability 8.0 or later, got"
            f" {major}.{minor}; {use_dense}"
        )
    if precision not in ("bf16-true", "16-true"):
        raise DloError(
            "Prune: kernels: semi_structured must have weights in half precision, trainer.precision bf16-true or"
            f" 16-true, got {precision}; set it, or {use_dense.removeprefix('set ')}"
        )


def use_sparse_kernels(module: nn.Module, names: Sequence[str]) -> int:
    """Replaces the weights of linear layers by torch's compressed ones, in place, for inference.

    Args:
        module: Module with full parameters on a GPU.
        names: Names of the pruned weights; those of other layers, or in sizes without a kernel, stay dense.

    Returns:
        Number of layers with compressed weights.

    Raises:
        DloError: If a weight does not follow the 2:4 pattern.
    """
    from torch.sparse import to_sparse_semi_structured

    count = 0
    for name in names:
        owner = module.get_submodule(name.rpartition(".")[0])
        if not isinstance(owner, nn.Linear):
            continue
        weight = owner.weight
        if weight.shape[0] % _ROWS or weight.shape[1] % _COLUMNS:
            continue
        if not follows_pattern(weight.detach(), NMPattern(2, 4), 1):
            raise DloError(
                f"Prune: weights must follow 2:4 for kernels: semi_structured, got {name} with more than two nonzero in"
                " a group; evaluate a checkpoint of a run with pattern: '2:4', or set kernels: dense"
            )
        owner.weight = nn.Parameter(to_sparse_semi_structured(weight.detach()), requires_grad=False)
        count += 1
    return count


@dataclass(frozen=True)
class PrunableLayer:
    """Layer whose weight can be pruned.

    Attributes:
        name: Name of the weight.
        input_dim: Dimension of the weight along which input features or channels lie.
    """

    name: str
    input_dim: int


def prunable_layers(module: nn.Module) -> list[PrunableLayer]:
    """Returns the linear layers and convolutions of a module whose weights are its own, sorted by name.

    Embeddings, norms, biases, and a head that shares its weight with an embedding are left dense. The order is the same
    under every strategy.
    """
    owned = {id(parameter): name for name, parameter in module.named_parameters()}  # The first name of shared ones.
    layers = []
    for prefix, part in module.named_modules():
        weight = part._parameters.get("weight")
        if weight is None or owned.get(id(weight)) != (f"{prefix}.weight" if prefix else "weight"):
            continue
        dim = _input_dim(part)
        if dim is not None:
            layers.append(PrunableLayer(owned[id(weight)].replace("_orig_mod.", ""), dim))
    return sorted(layers, key=lambda layer: layer.name)


def _input_dim(part: nn.Module) -> int | None:
    """Returns the dim of a layer's weight with its input features; None for a layer of another kind."""
    if isinstance(part, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return 1
    return 0 if is_conv1d(part) else None


def last_linear(module: nn.Module) -> str | None:
    """Returns the name of the output layer: the last linear one, in the plan's head if it has any."""
    linear = [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]
    head: list[str] = []
    if isinstance(module, Task):
        try:
            plan = module.parallel_plan()
        except DloError:  # The plan has no blocks, and so no head.
            plan = ParallelPlan()
        head = [name for name in linear if "head" in plan.owners(name.removeprefix("model."))]
    return next(reversed(head or linear), None)


def match_or_last(patterns: Sequence[str] | None, names: Sequence[str], module: nn.Module, rule: str) -> set[str]:
    """Returns the names of parameters that patterns of them or of modules match.

    Args:
        patterns: Patterns; None for the output layer.
        names: Names of the parameters.
        module: Module that they are in.
        rule: Rule of the patterns, for the message.

    Raises:
        DloError: A pattern matches none.
    """
    if patterns is None:
        last = last_linear(module)
        return {name for name in names if last is not None and name.startswith(f"{last}.")}
    return set(match_names(patterns, names, [*names, *(name for name, _ in module.named_modules() if name)], rule))


def select_layers(module: nn.Module, skip: Sequence[str] | None) -> list[PrunableLayer]:
    """Returns the layers to prune.

    Args:
        module: Module with its model built; it may be on the meta device.
        skip: Patterns of layers or weights that stay dense; None for the output layer.

    Raises:
        DloError: If a pattern matches no layer that could be pruned, or no layer is left.
    """
    layers = prunable_layers(module)
    names = [layer.name for layer in layers]
    skipped = match_or_last(skip, names, module, "Prune: each pattern of skip must match a layer's weight")
    frozen = {name.replace("_orig_mod.", "") for name, p in module.named_parameters() if not p.requires_grad}
    left = [layer for layer in layers if layer.name not in skipped | frozen]
    if not left:
        raise DloError(
            f"Prune: the model must have linear layers or convolutions that train and are not skipped, got"
            f" {len(layers)} of which none is left; shorten skip, or remove Prune"
        )
    return left


def check_pattern(layers: Iterable[PrunableLayer], shapes: Mapping[str, Sequence[int]], pattern: NMPattern) -> None:
    """Checks that M divides the input dim of each layer.

    Args:
        layers: Layers to prune.
        shapes: Full shapes of the weights, by name.
        pattern: Pattern.

    Raises:
        DloError: If M does not divide it; the fix is the list to skip.
    """
    uneven = {
        layer.name: int(shapes[layer.name][layer.input_dim])
        for layer in layers
        if shapes[layer.name][layer.input_dim] % pattern.m
    }
    if uneven:
        sizes = ", ".join(f"{name.removesuffix('.weight')} with {size}" for name, size in list(uneven.items())[:3])
        raise DloError(
            f"Prune: the input size of each pruned layer must be divisible by {pattern.m} for pattern '{pattern}', got"
            f" {sizes}{', ...' if len(uneven) > 3 else ''}; add to skip:"
            f" {shown_names([name.removesuffix('.weight') for name in uneven])}"
        )
