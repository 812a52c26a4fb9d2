"""Implements expert parallelism as an applier: each rank of `ep` gets some of the experts of each mixture.

GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding. Lepikhin et al., 2020,
arXiv 2006.16668. Departures: see :mod:`dlo_plugins.parallel.experts`.

Shapes: T tokens of this rank, k experts of a token, E experts, S = rows that this rank sends (k T, without skipped
ones), R = rows that it gets, D features.

Gradients: each rank's loss is that of its own tokens, and a strategy averages gradients over all data ranks. The
gradient of an expert sums over the tokens of all ranks of `ep`, and is averaged only over the ranks that have the same
expert: the mean would be too large by the size of `ep`. So the gradient of the experts' outputs is divided by that
size, and the gradient of their inputs is multiplied by it again. Both are exact where the size is a power of two.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dlo_framework.distributed.collectives import with_backward
from dlo_framework.errors import DloError
from dlo_framework.fake_kernels import FakeTensor
from dlo_framework.mesh import nearest_divisor
from dlo_framework.models.autocast import autocast_dtype
from dlo_framework.models.experts import Mixture, find_mixtures
from dlo_framework.models.experts.expert_mixtures import COUNTS
from dlo_framework.plan import Applier, ParallelPlan, Phase
from dlo_framework.shards import get_layout, make_equal_slice
from dlo_plugins.parallel.tensor.expert_slices import SlicedExperts

AXIS = "ep"


class ExpertParallel(Applier):
    """Divides the experts of each mixture over the ranks of `ep`, to which tokens travel and from which they return.

    The stacked parameters of the experts are replaced by this rank's slices, which
    :func:`dlo_framework.shards.get_layout` describes. Routers and shared experts stay on each rank.

    Attributes:
        exchanges: Exchange of tokens of each mixture, by the name of its experts; empty before :meth:`apply`.
    """

    phase = Phase.EXPERTS
    axis = AXIS

    def __init__(self) -> None:
        self.exchanges: dict[str, TokenExchange] = {}

    def apply(self, module: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
        """Divides a model's experts in place; it may be on the meta device.

        Args:
            module: Full model, the same on each rank of the axis.
            mesh: Mesh with an axis `ep`.
            plan: Plan of the model, with names relative to it.

        Raises:
            DloError: The ranks cannot share the experts.
        """
        self._divide(module, mesh[AXIS].get_group(), plan)

    def apply_to_run(self, run: Any) -> None:
        """Divides the experts of a run's model; `ep` divides the ranks of two axes of its mesh."""
        self._divide(run.model, run.groups.expert_group, run.plan)

    def _divide(self, module: nn.Module, group: Any, plan: ParallelPlan) -> None:
        mixtures = divisible_mixtures(module, plan, group.size())
        self.exchanges = {mixture.experts: divide_experts(module, mixture, group) for mixture in mixtures}

    def check(self, module: nn.Module, plan: ParallelPlan, ep: int) -> None:
        """Checks that ranks can share a model's experts, before any process starts.

        Args:
            module: Model, which may be on the meta device; it is not changed.
            plan: Plan of the model.
            ep: Number of ranks of the axis.

        Raises:
            DloError: They cannot; the message computes the nearest size that works.
        """
        if ep > 1:
            divisible_mixtures(module, plan, ep)


#: Function that computes rows `[R, D]` with this rank's experts, whose numbers are `[R]`.
Compute = Callable[[Tensor, Tensor], Tensor]


class TokenExchange:
    """All-to-all of tokens over `ep`, with a count of the elements that leave this rank.

    Args:
        group: Process group of `ep`.
        experts: Number of experts of all ranks, a multiple of the group's size. Each rank has consecutive ones.

    Attributes:
        size: Number of ranks.
        sent: Number of elements that this rank has sent to others so far, in forward and backward.
        sent_bytes: Bytes of these elements.
    """

    def __init__(self, group: dist.ProcessGroup, experts: int) -> None:
        self.group, self.experts = group, experts
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)
        self.sent = self.sent_bytes = 0
        assert experts % self.size == 0

    @property
    def local(self) -> int:
        """Number of experts of a rank."""
        return self.experts // self.size

    def __call__(self, tokens: Tensor, index: Tensor, compute: Compute, dtype: torch.dtype | None = None) -> Tensor:
        """Computes tokens with their experts, wherever these are.

        Args:
            tokens: Tokens `[T, D]`.
            index: Experts of each token `[T, k]`; for a number outside of the experts, the result is zero.
            compute: Function of this rank's experts.
            dtype: Dtype in which tokens are sent; None for their own. Outputs are sent in the dtype of `compute`, and
                gradients in that of forward. The gradients of a token's k copies are summed in the token's dtype.

        Returns:
            Outputs `[T, k, D]`, in the order of `index`.
        """
        count, choices, own_dtype = tokens.shape[0], index.shape[-1], tokens.dtype
        flat = index.reshape(-1)
        order, counts = self._sort(flat)
        sent, received, per_expert = self._agree(counts, len(flat))
        order = order[: sum(sent)]  # [S], places among the choices [T * k]
        there, back = (functools.partial(self.exchange, *lengths) for lengths in ((sent, received), (received, sent)))

        def sum_choices(gradient: Tensor) -> Tensor:
            """Sums without atomics, in the tokens' dtype."""
            full = gradient.new_zeros(count * choices, gradient.shape[-1], dtype=own_dtype)
            full.index_copy_(0, order, gradient.to(own_dtype))
            return full.view(count, choices, -1).sum(1) * float(self.size)

        def place(rows: Tensor) -> Tensor:
            return rows.new_zeros(count * choices, rows.shape[-1]).index_copy_(0, order, rows)

        rows = with_backward(tokens, lambda given: given.to(dtype or own_dtype)[order // choices], sum_choices)
        rows = with_backward(rows, there, back)  # [R, D], by source and expert
        owned = self._expert_numbers(per_expert, sum(received), flat)
        out = with_backward(compute(rows, owned), back, lambda grad: there(grad) / self.size)  # [S, D]
        return with_backward(out, place, lambda grad: grad[order]).view(count, choices, -1)

    def _sort(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the places of all choices by expert, skipped ones last `[T * k]`, and the experts' counts."""
        if has_no_values(flat):  # Balanced: each expert gets the same number.
            return flat.new_empty(len(flat), dtype=torch.long), flat.new_empty(self.experts, dtype=torch.long)
        routed = (flat >= 0) & (flat < self.experts)
        keys = torch.where(routed, flat, self.experts)
        counts = torch.bincount(keys, minlength=self.experts + 1)
        return torch.sort(keys, stable=True).indices, counts[: self.experts]

    def _agree(self, counts: Tensor, rows: int) -> tuple[list[int], list[int], Tensor]:
        """Returns the rows to each rank, those from each rank, and those from each rank for each expert `[ep, e]`."""
        if has_no_values(counts):
            even = [rows // self.size + (rank < rows % self.size) for rank in range(self.size)]
            return even, even, counts.view(self.size, self.local)
        theirs = torch.empty_like(counts)
        dist.all_to_all_single(theirs, counts.contiguous(), group=self.group)
        both = torch.stack([counts, theirs]).view(2, self.size, self.local)
        sent, received = both.sum(-1).tolist()  # The one wait for the device.
        return sent, received, both[1]

    def _expert_numbers(self, per_expert: Tensor, rows: int, like: Tensor) -> Tensor:
        """Returns the number of each received row's expert among this rank's own `[R]`."""
        if has_no_values(per_expert):
            return like.new_zeros(rows)
        numbers = torch.arange(self.local, device=like.device, dtype=like.dtype).repeat(self.size)
        return numbers.repeat_interleave(per_expert.flatten(), output_size=rows)

    def exchange(self, sent: Sequence[int], received: Sequence[int], rows: Tensor) -> Tensor:
        """Sends rows to each rank, and returns those that this rank gets."""
        elements = (sum(sent) - sent[self.rank]) * rows.shape[1:].numel()
        self.sent += elements
        self.sent_bytes += elements * rows.element_size()
        out, rows = rows.new_empty(sum(received), *rows.shape[1:]), rows.contiguous()
        dist.all_to_all_single(out, rows, list(received), list(sent), group=self.group)
        return out


def has_no_values(tensor: Tensor) -> bool:
    """Returns whether a tensor has a shape alone, as in a rehearsal."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def divisible_mixtures(model: nn.Module, plan: ParallelPlan, ep: int) -> list[Mixture]:
    """Returns the mixtures of a model whose experts `ep` ranks can share.

    Args:
        model: Full model, on any device; the meta device will do.
        plan: Plan of the model.
        ep: Number of ranks.

    Raises:
        DloError: The model has no mixtures, or one that these ranks cannot share.
    """
    mixtures = find_mixtures(model, plan)
    if not mixtures:
        raise DloError(
            f"ep must have mixtures of experts to divide, got {ep} for {type(model).__name__}, in which none was found"
            " (modules with a router, and with experts called with tokens, indices and weights); set ep to 1"
        )
    for mixture in mixtures:
        _check_mixture(model, mixture, ep)
    return mixtures


def _check_mixture(model: nn.Module, mixture: Mixture, ep: int) -> None:
    if not mixture.is_stacked:
        raise DloError(
            f"experts under ep must be stacked in parameters [experts, ...], got a list of modules '{mixture.experts}';"
            " stack them, or set ep to 1"
        )
    if mixture.count % ep:
        raise DloError(
            f"ep must divide the {mixture.count} experts of '{mixture.name}', got {ep}; set"
            f" ep={nearest_divisor(ep, mixture.count)}"
        )
    names = [name for name, _ in model.get_submodule(mixture.experts).named_parameters(mixture.experts)]
    other = next((name for name in names if name not in mixture.stacked), None)
    if other is not None:
        raise DloError(
            f"experts under ep must have parameters of one entry an expert, got '{other}', which they share; set ep"
            " to 1"
        )
    own = {id(model.get_parameter(name)) for name in mixture.stacked}
    outside = (name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in own and name not in names)
    tied = next(outside, None)
    if tied is not None:
        raise DloError(f"experts under ep must not be tied to other parameters, got '{tied}'; untie it, or set ep to 1")


@torch.no_grad()
def divide_experts(model: nn.Module, mixture: Mixture, group: dist.ProcessGroup) -> TokenExchange:
    """Keeps this rank's experts of a mixture, and makes their module exchange tokens with the other ranks.

    Args:
        model: Full model, on any device; the meta device will do. Its layout records the slices.
        mixture: Mixture with stacked experts.
        group: Process group of `ep`.
    """
    layout, ranks = get_layout(model), TokenExchange(group, mixture.count)
    for name, dim in mixture.stacked.items():
        full = model.get_parameter(name)
        cut = make_equal_slice(dim, full.shape[dim], ranks.size, ranks.rank)
        part = nn.Parameter(cut.slice_tensor(full), requires_grad=full.requires_grad)
        part.__dict__.update(full.__dict__)  # Attributes by which optimizers group parameters.
        owner, _, key = name.rpartition(".")
        setattr(model.get_submodule(owner), key, part)
        known = layout.slices.get(name)  # of tp
        layout.slices[name] = cut if known is None else replace(known, inner=cut)
        layout.experts.add(name)
    layout.expert_modules.append(mixture.experts)
    experts = model.get_submodule(mixture.experts)
    for module in experts.modules():
        for attribute in COUNTS:
            if getattr(module, attribute, None) == mixture.count:
                setattr(module, attribute, ranks.local)
    sliced = inspect.unwrap(experts.forward)
    if isinstance(sliced, SlicedExperts):  # Tensor parallelism sums the ranks' outputs after the exchange.
        sliced.wrap_compute(lambda compute: DividedExperts(experts, compute, ranks, mixture))
    else:
        # A compiled block calls it uncompiled: the numbers of rows are known only as it runs.
        forward: Any = torch.compiler.disable(DividedExperts(experts, experts.forward, ranks, mixture))
        experts.forward = forward
    return ranks


class DividedExperts:
    """Forward of a module of experts that other ranks share.

    Under autocast, tokens are sent in its dtype, to which the experts' products cast them anyway. Outputs are too,
    unless the experts have biases, which transformers adds in the tokens' dtype. So no value is rounded once more.

    Args:
        module: Module with this rank's experts.
        compute: Forward of the module.
        ranks: Exchange of tokens.
        mixture: Mixture of the experts.
    """

    def __init__(
        self, module: nn.Module, compute: Callable[..., Tensor], ranks: TokenExchange, mixture: Mixture
    ) -> None:
        self.module, self.compute, self.ranks, self.mixture = module, compute, ranks, mixture
        self._has_biases = any(parameter.ndim < 3 for parameter in module.parameters(recurse=False))

    def __call__(self, tokens: Tensor, *routing: Any, **named: Any) -> Tensor:
        """Returns the outputs of the experts of all ranks, in the shape of the tokens."""
        if self.mixture.form == "dense":
            return self._dense(tokens)
        index, weights = self._routing(routing, named)
        flat = tokens.reshape(-1, tokens.shape[-1])
        out = self.ranks(flat, index.reshape(len(flat), -1), self._in_dtype(self._routed, flat), self.sent_dtype(flat))
        weighted = (out * weights.reshape(len(flat), -1, 1)).to(tokens.dtype)  # [T, k, D]
        # Not a view: FSDP2 warns of views among a unit's outputs.
        return weighted.view(*tokens.shape[:-1], -1, tokens.shape[-1]).sum(-2)

    @staticmethod
    def sent_dtype(tokens: Tensor) -> torch.dtype:
        """Returns the dtype in which tokens are sent: that of their products."""
        dtype = autocast_dtype(tokens.device.type)
        return tokens.dtype if dtype is None or tokens.dtype != torch.float32 else dtype

    def _in_dtype(self, compute: Compute, tokens: Tensor) -> Compute:
        """Returns a function of received rows whose outputs have one dtype on all ranks, with or without rows."""

        def computed(rows: Tensor, numbers: Tensor) -> Tensor:
            rows = rows.to(tokens.dtype) if self._has_biases else rows
            return compute(rows, numbers).to(rows.dtype)

        return computed

    @staticmethod
    def _routing(routing: Sequence[Any], named: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Returns indices and weights `[T, k]`: the integers and the numbers among the arguments after the tokens."""
        given = [value for value in [*routing, *named.values()] if isinstance(value, Tensor)]
        index = next(value for value in given if not value.is_floating_point())
        return index, next(value for value in given if value.is_floating_point())

    def _routed(self, rows: Tensor, numbers: Tensor) -> Tensor:
        if not len(rows):
            return rows + self._no_gradient()
        ones = torch.ones(len(rows), 1, dtype=rows.dtype, device=rows.device)
        return self.compute(rows, numbers[:, None], ones).view(rows.shape)

    def _dense(self, tokens: Tensor) -> Tensor:
        """Computes copies of all tokens for each expert `[E * T, D]`, of which all but the chosen ones are zero.

        Experts without biases map zeros to zeros, also in backward, so that only the others are sent.
        """
        rows, experts = len(tokens), self.ranks.experts
        numbers = torch.arange(experts, device=tokens.device).repeat_interleave(rows // experts)
        chosen = (tokens != 0).any(-1)
        index = torch.where(chosen, numbers, experts)
        return self.ranks(tokens, index[:, None], self._in_dtype(self._padded, tokens), self.sent_dtype(tokens)).sum(1)

    def _padded(self, rows: Tensor, numbers: Tensor) -> Tensor:
        """Computes rows by a forward that takes the same number of rows for each expert."""
        if not len(rows):
            return rows + self._no_gradient()
        counts = torch.bincount(numbers, minlength=self.ranks.local)
        longest = -(-len(rows) // self.ranks.local) if has_no_values(counts) else int(counts.max())
        order = torch.sort(numbers, stable=True).indices
        starts = counts.cumsum(0) - counts
        within = torch.arange(len(rows), device=rows.device) - starts[numbers[order]]
        places = numbers[order] * longest + within
        padded = rows.new_zeros(self.ranks.local * longest, rows.shape[-1]).index_copy(0, places, rows[order])
        out = self.compute(padded)[places]
        return torch.empty_like(out).index_copy(0, order, out)

    def _no_gradient(self) -> Tensor:
        """Returns a zero whose backward gives the experts zero gradients, where no token came to this rank."""
        parts = [parameter.reshape(-1)[:0].sum() for parameter in self.module.parameters() if parameter.requires_grad]
        return torch.stack(parts).sum() if parts else torch.zeros(())
