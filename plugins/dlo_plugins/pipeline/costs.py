"""Costs of a model's stem, blocks and head, in parameters or FLOPs; the balanced split uses them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dlo_framework.costs import OperatorCounter
from dlo_framework.fake_kernels import fake_places, fake_tensors, tensor_places, tensors_replaced
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
    blocks = plan.block_names(model, repeated=True)
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
    numbers: dict[nn.Module, list[int]] = {}  # of a block that is called several times: all of its
    for number, name in enumerate(plan.block_names(model, repeated=True)):
        numbers.setdefault(model.get_submodule(name), []).append(number)
    counts = [0.0] * sum(map(len, numbers.values()))
    counter = OperatorCounter()
    begins: list[int] = []

    def enter(*_: Any) -> None:
        begins.append(counter.get_total_flops())

    def leave(block: nn.Module, *_: Any) -> None:
        for number in numbers[block]:
            counts[number] += (counter.get_total_flops() - begins[-1]) / len(numbers[block])

    # Fake tensors of one element have values, and batch norm counts its batches in such a buffer.
    counters = [(buffer, buffer.clone()) for buffer in model.buffers() if buffer.numel() == 1]
    handles = [block.register_forward_pre_hook(enter) for block in numbers]
    handles += [block.register_forward_hook(leave) for block in numbers]
    on_meta = [place for place in tensor_places(model) if place[2].is_meta]
    try:
        with (
            fake_tensors(),
            tensors_replaced(fake_places(on_meta)),  # A forward's own tensors are on the CPU.
            torch.no_grad(),
            counter,
        ):
            run()
    except Exception:  # The rehearsal of the step reports by name what the model refuses.
        return None
    finally:
        for handle in handles:
            handle.remove()
        for buffer, value in counters:
            buffer.copy_(value)
    stem = begins[0] if begins else 0
    return PartCosts(tuple(counts), float(stem), counter.get_total_flops() - stem - sum(counts))
