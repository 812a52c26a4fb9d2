"""Compares models whose sequence ranks share with one process: outputs and gradients, many types in one spawn."""

from __future__ import annotations

import copy
import traceback
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from dlo_plugins.parallel.context.context_parallel import ContextParallel
from dlo_plugins.parallel.context.sequence_layout import shard_sequence
from dlo_tasks.language.causal_lm import CausalLM
from support.causal_types import tiny

LENGTH, ROWS = 16, 2


def batch_of(kind: str) -> dict[str, Tensor]:
    """Returns a batch of rows of one document (`plain`), of several (`packed`), or with padding on either side."""
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(3, 60, (ROWS, LENGTH), generator=draw)
    index = torch.arange(LENGTH).expand(ROWS, LENGTH)
    found = {"input_ids": ids, "position_ids": index}
    if kind == "packed":
        found["position_ids"] = torch.cat([index[:, :6], index[:, : LENGTH - 6]], 1)
    if kind == "padded":
        found["attention_mask"] = (index < torch.tensor([[LENGTH], [11]])).long()
    if kind == "padded left":  # and of a length that ranks cannot share evenly
        found["attention_mask"] = (index >= torch.tensor([[0], [5]])).long()
        found["position_ids"] = (found["attention_mask"].cumsum(1) - 1).clamp(min=0)
        return {name: tensor[:, :-1] for name, tensor in found.items()}
    return found


def _shard(whole: Tensor, rank: int, ranks: int) -> Tensor:
    return shard_sequence(F.pad(whole, (0, 0) * (whole.ndim - 2) + (0, LENGTH - whole.shape[1])), rank, ranks)


def compare(rank: int, ranks: int, types: list[tuple[str, str, str]]) -> dict[str, Any]:
    """Returns, by type, kind of batch and method, the largest difference from one process, or the error."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    found: dict[str, Any] = {}
    for name, kind, method in types:
        try:
            found[f"{name} {kind} {method}"] = difference(mesh, name, kind, method)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            found[f"{name} {kind} {method}"] = (
                f"{type(error).__name__}: {str(error)[:300]} ({last.filename[-40:]}:{last.lineno})"
            )
    return found


def difference(mesh: Any, name: str, kind: str, method: str, gather: str = "auto") -> float:
    """Returns the largest difference of a type's outputs and gradients from one process, relative to the largest."""
    torch.manual_seed(0)
    task: Any = CausalLM(config=tiny(name, dropout=False))
    task.configure_model()
    with torch.no_grad():  # Random weights of the usual size hardly attend to anything.
        for parameter in task.model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    task = task.double().eval()
    batch = batch_of(kind)
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"]))
    alone = copy.deepcopy(task)
    try:
        expected, weights = _trained(alone, batch, real, None)
    except RuntimeError:  # Products of experts have no double precision.
        task, alone = task.float(), copy.deepcopy(task.float())
        expected, weights = _trained(alone, batch, real, None)
    applier = ContextParallel(method, gather)  # type: ignore[arg-type]
    plan = task.parallel_plan()
    applier.check(task.model, plan, mesh.size())
    applier.apply(task.model, mesh, plan)
    rank, ranks = mesh.get_local_rank(), mesh.size()
    own = _shard(weights, rank, ranks)
    output, _ = _trained(task, applier.shard_batch(batch), real, own)
    seen = _shard(real, rank, ranks).bool()
    worst = _apart(output[seen], _shard(expected, rank, ranks)[seen], float(expected.abs().max()))
    grads = {key: parameter.grad for key, parameter in alone.model.named_parameters()}
    least = 1e-2 * max(float(grad.abs().max()) for grad in grads.values() if grad is not None)
    for key, parameter in task.model.named_parameters():
        if grads[key] is None:
            continue
        summed = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        dist.all_reduce(summed)
        worst = max(worst, _apart(summed, grads[key], max(least, float(grads[key].abs().max()))))
    return worst


def _trained(task: Any, batch: Any, real: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """Computes gradients of a fixed function of the outputs; returns the outputs, and the function's weights."""
    args, kwargs = task.inputs(batch)
    found = task.forward(*args, **kwargs)
    output = found[0] if isinstance(found, tuple) else found
    if weights is None:
        weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2)).to(output) * real[..., None]
    (output * weights).sum().backward()
    return output.detach(), weights


def _apart(found: Tensor, expected: Tensor, scale: float) -> float:
    return float((found - expected).abs().max()) / max(scale, 1e-30)


def inspect_sequence(rank: int, ranks: int) -> tuple[dict[str, int], bool]:
    """Returns what two ranks send for a mamba, and whether it runs alone on full sequences as before."""
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    torch.manual_seed(0)
    task: Any = CausalLM(config=tiny("mamba", dropout=False))
    task.configure_model()
    batch = {"input_ids": batch_of("plain")["input_ids"]}
    expected = task.model(**batch, use_cache=False).logits
    applier = ContextParallel()
    applier.apply(task.model, mesh, task.parallel_plan())
    own = applier.shard_batch(batch)["input_ids"]
    task.model(input_ids=own, use_cache=False).logits.sum().backward()
    sequence = applier.sequence
    assert sequence is not None
    elements = dict(sequence.ring.elements)
    with applier.use_full_sequences():
        found = task.model(**batch, use_cache=False).logits
    return elements, bool(torch.equal(found, expected))
