"""What a model's parts cost to compute: the numbers by which its blocks are shared out to stages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from dlo_framework.plan import ParallelPlan


@dataclass(frozen=True)
class PartCosts:
    """Costs in one unit, any.

    Attributes:
        blocks: of each block.
        stem: of what comes before them.
        head: of what comes after.
    """

    blocks: tuple[float, ...]
    stem: float = 0.0
    head: float = 0.0


def parameter_costs(model: nn.Module, plan: ParallelPlan) -> PartCosts:
    """Returns the number of parameters of each part: a matrix product costs in proportion to them.

    Looking up an embedding costs nothing. A convolution's parameters say little: give :func:`flop_costs` a micro-batch.

    Args:
        model: may lie on the meta device.
        plan: names are relative to the model.
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
    """Returns the floating-point operations of each part in a forward, counted without computing anything.

    Args:
        model: whole, and not cut; on a device or the meta device.
        plan: names are relative to the model.
        run: calls the model on a micro-batch that lies where the model does; a loss may follow, and counts as head.

    Returns:
        The costs; None if the forward needs values, or an operation that torch cannot run without them.
    """
    blocks = plan.block_names(model)
    counts = [0.0] * len(blocks)
    # torch 2.11 does not count a CPU's attention by itself.
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    counter = FlopCounterMode(display=False, custom_mapping={attention: _attention_flops})
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

    # Fake tensors of one element have values, and batch norm counts the batches in such a buffer.
    counters = [(buffer, buffer.clone()) for buffer in model.buffers() if buffer.numel() == 1]
    handles = []
    for number, name in enumerate(blocks):
        block = model.get_submodule(name)
        handles += [block.register_forward_pre_hook(enter(name)), block.register_forward_hook(leave(number))]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad(), counter:
            run()
    except (DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException):
        return None
    finally:
        for handle in handles:
            handle.remove()
        for buffer, value in counters:
            buffer.copy_(value)
    stem = first_at[0] if first_at else 0
    return PartCosts(tuple(counts), float(stem), counter.get_total_flops() - stem - sum(counts))


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))
