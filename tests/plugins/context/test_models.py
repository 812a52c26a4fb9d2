"""Whole models of many families on 2 and 4 ranks: loss and summed gradients are one process's."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from dlo_framework.testing import run_distributed
from dlo_plugins.memory.activation_checkpoint import ActivationCheckpoint
from dlo_plugins.parallel.context.context_parallel import ContextParallel
from dlo_tasks.language.language_plans import plan_for
from support.causal_types import tiny

VOCABULARY, B, LENGTH = 97, 3, 43
SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA = {**SIZES, "intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "attention_dropout": 0.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen2": {**LLAMA, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    "qwen3": LLAMA,
    "mistral": {**LLAMA, "sliding_window": 11},
    "gemma2": {**LLAMA, "sliding_window": 7, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8},
    "gemma3_text": {**LLAMA, "sliding_window": 6},
    "gpt_neox": {**SIZES, "intermediate_size": 48, "max_position_embeddings": 64},
    "gpt2": {**SIZES, "n_positions": 64, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "phi3": LLAMA,
    "olmo2": LLAMA,
    "cohere": LLAMA,
    "granite": LLAMA,
    "flint": tiny("flint", dropout=False) | {"vocab_size": VOCABULARY},
}
#: Those that are tried in every combination; the others by each method once.
EVERY = ("llama", "mistral", "gemma2")
#: A family with attention sinks.
SINKS = "flint"


def built(family: str) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {name: value for name, value in FAMILIES[family].items() if name != "model_type"}
    config = AutoConfig.for_model(family, **{**SPECIAL, **settings})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager" if family in ("gemma2", SINKS) else "sdpa"
    )
    with torch.no_grad():  # Random weights of the usual size hardly attend to anything.
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    return model


def batch_of(kind: str) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    ids, labels = (torch.randint(0, VOCABULARY, (B, LENGTH), generator=generator) for _ in range(2))
    labels[:, ::5] = -100
    index = torch.arange(LENGTH)
    if kind == "packed":
        cuts = torch.rand(B, LENGTH, generator=generator) < 0.08
        cuts[:, 0] = True
        positions = index - torch.where(cuts, index, 0).cummax(1).values
        return {"input_ids": ids, "labels": labels, "position_ids": positions}
    lengths = torch.tensor([[LENGTH], [17], [30]])
    real = index < lengths if kind == "padded" else index >= LENGTH - lengths
    positions = index.expand(B, -1) if kind == "padded" else (real.long().cumsum(1) - 1).clamp(min=0)
    found = {"input_ids": ids, "labels": labels.masked_fill(~real, -100), "position_ids": positions}
    return found | {"attention_mask": real.long(), "tokens_in_step": torch.tensor(5)}


def loss_of(model: nn.Module, batch: dict[str, Tensor], tokens: int) -> Tensor:
    given = {name: batch[name] for name in ("input_ids", "position_ids", "attention_mask") if name in batch}
    logits = model(**given, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten(), reduction="sum") / tokens


def trained(model: nn.Module, batch: dict[str, Tensor], tokens: int, half: bool) -> tuple[Tensor, list[Tensor]]:
    """Returns the loss, and the gradients of all parameters."""
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss = loss_of(model, batch, tokens)
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def errors(found: list[Tensor], expected: list[Tensor]) -> float:
    """The relative error of all gradients together, and of the worst tensor."""
    whole = torch.stack([g.norm() for g in expected]).norm()
    apart = torch.stack([(a - b).norm() for a, b in zip(found, expected, strict=True)]).norm()
    worst = max(float((a - b).norm() / (b.norm() + 1e-3 * whole)) for a, b in zip(found, expected, strict=True))
    return max(float(apart / whole), worst)


def _compare(rank: int, ranks: int, families: list[str]) -> list[dict[str, Any]]:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("cp",))
    return [compared(mesh, family, *case) for family in families for case in cases_of(family)]


def compared(mesh: Any, family: str, method: str, kind: str, again: bool, half: bool) -> dict[str, Any]:
    """Returns how far the ranks' loss and gradients are from one process's.

    Args:
        mesh: with the axis `cp`.
        family: of the model.
        method: of context parallelism.
        kind: of batch.
        again: whether activations are recomputed.
        half: whether it is under bf16 autocast.
    """
    ranks, model, batch = mesh.size(), built(family), batch_of(kind)
    plan, tokens = plan_for(model), int((batch["labels"] != -100).sum())
    exact, exact_gradients = trained(model, batch, tokens, False)
    loss, gradients = trained(model, batch, tokens, half) if half else (exact, exact_gradients)
    applier = ContextParallel(method)  # type: ignore[arg-type]
    applier.check(model, plan, ranks)
    applier.apply(model, mesh, plan)
    if again:
        ActivationCheckpoint("full" if method == "ring" else "selective").apply(model, mesh, plan)
    part = applier.shard_batch(batch)
    assert part["labels"].shape[1] == -(-LENGTH // (2 * ranks)) * 2
    own, summed = trained(model, part, tokens, half)
    for tensor in (own, *summed):
        dist.all_reduce(tensor)
    return {
        "case": (family, method, kind, again, half),
        "loss": float((own - loss).abs() / exact),
        "gradients": errors(summed, exact_gradients),
        "theirs": errors(gradients, exact_gradients),
    }


def cases_of(family: str) -> list[tuple[str, str, bool, bool]]:
    """Returns method, kind of batch, recomputation and bf16 of each case of a family."""
    kinds = ("packed", "padded", "padded left")
    if family not in EVERY:
        padded = kinds[1 + len(family) % 2]
        return [("ring", "packed", False, False), ("ulysses", padded, True, False)]
    every = [
        (method, kind, again, False) for method in ("ring", "ulysses") for kind in kinds for again in (False, True)
    ]
    return [*every, ("ring", "packed", True, True), ("ulysses", "padded", False, True)]


def check(found: list[dict[str, Any]]) -> None:
    for case in found:
        if case["case"][-1]:  # bf16: no farther from the exact gradients than one process is
            assert case["loss"] < 2e-3, case
            assert case["gradients"] < 1.5 * case["theirs"], case
        else:
            assert case["loss"] < 1e-5, case
            assert case["gradients"] < 1e-5, case


@pytest.mark.parametrize(
    "families", [["llama", "mistral", "flint"], pytest.param([*FAMILIES][2:-1], marks=pytest.mark.slow)]
)
def test_loss_and_gradients_are_one_process_s(families: list[str]) -> None:
    for found in run_distributed(_compare, 2, families):
        check(found)


@pytest.mark.slow
def test_on_four_ranks() -> None:
    for found in run_distributed(_compare, 4, ["mistral", "qwen3", "gpt2"]):
        check(found)
