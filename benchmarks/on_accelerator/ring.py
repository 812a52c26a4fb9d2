"""The kernels of ring attention: a block of attention with its log-sum-exp, and the merge of two blocks.

A rank of ring attention computes causal blocks, of its own chunk, and full ones, of chunks before it. Each kernel that
fits computes both, forward and backward, beside torch's `scaled_dot_product_attention`, which keeps its log-sum-exp to
itself. The merge goes over the output once; its roofline is a copy of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from measuring.record import Table
from measuring.rounds import all_ratios, clock_of, take_turns
from torch import Tensor

from dlo_plugins.parallel.context.block_attention import (
    KERNELS,
    Block,
    Kernel,
    Result,
    Score,
    _torch_backward,
    _torch_forward,
    merge,
)


def ring_tables(size_name: str, device: torch.device, rounds: int, backend: str) -> Iterator[Table]:
    """Yields the tables of causal and full blocks, and of the merge.

    Args:
        size_name: ``tiny`` for blocks of 32 tokens; others have 4,096 of Llama 3 8B.
        device: Device of the run.
        rounds: Rounds beside the one that warms up, and compiles.
        backend: Backend of torch.compile.
    """
    heads, length, width, calls = (2, 32, 8, 1) if size_name == "tiny" else (32, 4096, 128, 5)
    draw = functools.partial(torch.randn, 1, heads, length, width, device=device, dtype=torch.bfloat16)
    q, k, v, grad = (draw() for _ in range(4))
    for causal in (True, False):
        runs = {"sdpa": functools.partial(_sdpa, q, k, v, grad, causal)}
        runs["sdpa again"] = runs["sdpa"]
        fitting = [kernel for kernel in KERNELS if kernel.fits(q, v, False)]
        for kernel in fitting:
            runs[f"dlo {kernel.name}"] = functools.partial(_fused, kernel, q, k, v, grad, causal)
        runs["dlo written out"] = functools.partial(_written, q, k, v, grad, causal)
        title = f"{'causal' if causal else 'full'} block, {heads} heads, {length} tokens, forward and backward, bf16"
        table = _timed(title, "torch's scaled_dot_product_attention", runs, "sdpa", device, rounds, calls)
        table.notes.append(f"A ring takes {fitting[0].name if fitting else 'what is written out'} here.")
        yield table
    total, known = torch.randn(1, heads, length, width, device=device), torch.randn(1, heads, length, device=device)
    lse, into = torch.randn_like(known), torch.empty_like(total)
    merges: dict[str, Callable[[], Any]] = {
        "copy_": lambda: into.copy_(total),
        "copy_ again": lambda: into.copy_(total),
    }
    merges["dlo"] = lambda: merge(total, known, q, lse)
    compiled = torch.compile(merge, backend=backend)
    merges["dlo, compiled"] = lambda: compiled(total, known, q, lse)
    what = f"merge of two blocks, {heads} heads, {length} tokens"
    yield _timed(what, "a copy of the output in float32", merges, "copy_", device, rounds, calls)


def _timed(
    title: str,
    unit: str,
    runs: dict[str, Callable[[], Any]],
    base: str,
    device: torch.device,
    rounds: int,
    calls: int,
) -> Table:
    clock = clock_of(device)
    found = take_turns({name: functools.partial(clock.seconds, run, calls) for name, run in runs.items()}, rounds)
    table = Table(title, unit, clock)
    for name, values in all_ratios(found, base).items():
        milliseconds = 1e3 * sorted(found[name])[len(found[name]) // 2]
        table.add(name, values, ours=name.startswith("dlo"), control=name.endswith("again"), ms=milliseconds)
    return table


def _sdpa(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool) -> tuple[Tensor, ...]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = F.scaled_dot_product_attention(leaves[0], leaves[1], leaves[2], is_causal=causal)
    return out, *torch.autograd.grad(out, leaves, grad)


def _fused(kernel: Kernel, q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool) -> tuple[Tensor, ...]:
    block = Block(q, k, v, Score(q.shape[-1] ** -0.5), causal)
    out, lse, *_ = kernel.forward(block)
    return out, *kernel.backward(block, Result(grad, out, lse))[:3]


def _written(q: Tensor, k: Tensor, v: Tensor, grad: Tensor, causal: bool) -> tuple[Tensor, ...]:
    block = Block(q, k, v, Score(q.shape[-1] ** -0.5), causal)
    out, lse = _torch_forward(block)
    return out, *_torch_backward(block, Result(grad, out, lse))
