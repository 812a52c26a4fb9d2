"""Costs of a model's stem, blocks and head, in parameters or FLOPs; the balanced split uses them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dlo_framework.costs import OperatorCounter
from dlo_framework.fake_kernels import FakeKernels
from dlo_framework.plan import ParallelPlan


@dataclass(frozen=True)
class PartCosts:
    """Costs of a model's parts, all in the same unit.

    Attributes:
        blocks: Cost of each block.
        stem: Cost of the modules before the first block.
        head: Cost of the modules after the last block.
    """

    blocks: tuple[float, ...]
    stem: float = 0.0
    head: float = 0.0


def parameter_costs(model: nn.Module, plan: ParallelPlan) -> PartCosts:
    """Returns the number of parameters of each part; the cost of a matrix product is proportional to it.

    An embedding's look-up costs nothing. The cost of a convolution does not follow from its parameters: use
    :func:`flop_costs` with a micro-batch.

    Args:
        model: Model, on any device; the meta device will do.
        plan: Plan of the model; its names are relative to the model.
    """
    lookups = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
    blocks = plan.block_names(model)
    costs = [0.0] * len(blocks)
    around = {"stem": 0.0, "head": 0.0}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        number = next((n for n, block in enumerate(blocks) if name.startswith(block + ".")), None)
        if number is not None:
            costs[number] += parameter.numel()
        else:
            part = next(iter(plan.owners(name)), "head")
            if not (part == "stem" and id(parameter) in lookups):
                around[part] += parameter.numel()
    return PartCosts(tuple(costs), around["stem"], around["head"])


def flop_costs(model: nn.Module, plan: ParallelPlan, run: Callable[[], Any]) -> PartCosts | None:
    """Returns the floating-point operations of each part in a forward, counted on fake tensors.

    Args:
        model: Full model, not yet cut, on any device; the meta device will do.
        plan: Plan of the model; its names are relative to the model.
        run: Function that calls the model on a micro-batch on the model's device. It may compute a loss too, which
            counts as head.

    Returns:
        The costs; None if the forward fails on fake tensors for any reason, since a cost estimate is not a check.
    """
    blocks = plan.block_names(model)
    counts = [0.0] * len(blocks)
    counter = OperatorCounter()
    begins: dict[str, int] = {}
    first_at: list[int] = []

    def enter(name: str) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            begins[name] = counter.get_total_flops()
            first_at.append(begins[name])

        return hook

    def leave(number: int) -> Callable[..., None]:
        def hook(*_: Any) -> None:
            counts[number] += counter.get_total_flops() - begins[blocks[number]]

        return hook

    # Fake tensors of one element have values, and batch norm counts its batches in such a buffer.
    counters = [(buffer, buffer.clone()) for buffer in model.buffers() if buffer.numel() == 1]
    handles = []
    for number, name in enumerate(blocks):
        block = model.get_submodule(name)
        handles += [block.register_forward_pre_hook(enter(name)), block.register_forward_hook(leave(number))]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), _off_meta(model), torch.no_grad(), FakeKernels(), counter:
            run()
    except Exception:  # The rehearsal of the step reports by name what the model refuses.
        return None
    finally:
        for handle in handles:
            handle.remove()
        for buffer, value in counters:
            buffer.copy_(value)
    stem = first_at[0] if first_at else 0
    return PartCosts(tuple(counts), float(stem), counter.get_total_flops() - stem - sum(counts))


@contextlib.contextmanager
def _off_meta(model: nn.Module) -> Iterator[None]:
    """Replaces a model's meta tensors by fake CPU tensors inside the block, as a forward's own tensors are on the CPU.

    Enter it inside a `FakeTensorMode`.
    """
    made: dict[int, Tensor] = {}
    replaced: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in model.modules():
        of_module: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for entries in of_module:
            for key, tensor in entries.items():
                if tensor is not None and tensor.is_meta:
                    replaced.append((entries, key, tensor))
    try:
        for entries, key, tensor in replaced:
            if id(tensor) not in made:
                new = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
                is_parameter = isinstance(tensor, nn.Parameter)
                made[id(tensor)] = nn.Parameter(new, tensor.requires_grad) if is_parameter else new
            entries[key] = made[id(tensor)]
        yield
    finally:
        for entries, key, tensor in replaced:
            entries[key] = tensor
