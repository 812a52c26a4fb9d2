"""What a model's parts cost to compute: the numbers by which its blocks are shared out to stages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from dlo_framework.plan import ParallelPlan
from dlo_plugins.fake_kernels import FakeKernels


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
        The costs; None if the forward cannot run without values, whatever the reason: a cost is no check.
    """
    blocks = plan.block_names(model)
    counts = [0.0] * len(blocks)
    # torch 2.11 does not count a CPU's attention by itself.
    attention = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    mapping = {attention: _attention_flops, torch.ops.aten._grouped_mm: _grouped_flops}  # nor experts' products
    counter = FlopCounterMode(display=False, custom_mapping=mapping)
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
        with FakeTensorMode(allow_non_fake_inputs=True), _off_meta(model), torch.no_grad(), FakeKernels(), counter:
            run()
    except Exception:  # What a model refuses, the rehearsal of its step says, by name.
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
    """Gives a model on the meta device fake tensors on the CPU inside the block: what a forward makes itself is there.

    To be entered inside a `FakeTensorMode`.
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


def _attention_flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query, key, value))


def _grouped_flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    groups = a[0] if len(a) == 3 and len(b) == 3 else 1
    return int(2 * groups * a[-2] * a[-1] * b[-1])
