"""Experts divided over ranks against one process: losses, norms and weights, for families, axes and strategies."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch.utils.data import DataLoader

from dlo_framework.models.experts import MixtureOptions
from dlo_framework.testing import Case, assert_parity
from dlo_plugins.compile.compile_blocks import CompileBlocks
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.memory.activation_checkpoint import ActivationCheckpoint
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.language.causal_lm import CausalLM
from support.causal_types import tiny
from support.token_batches import FAMILIES, VOCABULARY, Tokens

#: The routers' logits are in single precision in any precision of the model.
DOUBLE = {"precision": "64-true"}
RTOL = 1e-6
#: dlo's own mixtures, with all losses and dropped tokens.
OWN: dict[str, Any] = {"count": 6, "aux_loss": 0.5, "bias_rate": 0.01, "capacity_factor": 1.5}


class Rows(Tokens):
    """Rows of one document each, for families that ignore restarting positions."""

    def train_dataloader(self) -> DataLoader:
        loader = super().train_dataloader()
        for batch in loader.dataset.batches:  # type: ignore[attr-defined]
            del batch["position_ids"]
        return loader


def moe(
    family: str = "mixtral",
    layers: int | None = None,
    micro_batches: int = 1,
    experts: int | None = None,
    steps: int = 8,
    packed: bool = True,
    own: dict[str, Any] | None = None,
    routers: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    more = {} if layers is None else {"num_hidden_layers": layers}
    more |= {} if experts is None else {"num_local_experts": experts}
    config = tiny(family, dropout=False, vocab_size=VOCABULARY, **more)
    if own is not None:  # dlo's own mixtures in a dense model.
        config = {"model_type": "llama", **FAMILIES["llama"], "mlp_bias": True}
        options = {**options, "experts": MixtureOptions(**own)}
    if routers is not None:  # Losses and capacities of transformers' own.
        options = {**options, "experts": MixtureOptions(**routers)}
    task = CausalLM(config=config, **{"lr": 1e-3, "optimizer_args": {"eps": 1e-4}, **options})
    return task, (Tokens if packed else Rows)(micro_batches, rows=8, steps=steps)


def cases(*axes: dict[str, Any], trainer: dict[str, Any] | None = None, **arguments: Any) -> list[Case]:
    trainer = {**DOUBLE, **(trainer or {})}
    return [
        Case(partial(MeshStrategy, **{"dp_shard": 1, **of}), arguments, trainer, f"{of} {arguments} {trainer}")
        for of in axes
    ]


def test_two_ranks_with_half_of_the_experts_train_as_one_process() -> None:
    ep: dict[str, Any] = {"dp_shard": 2, "ep": 2}
    found = [
        *cases(ep, trainer={"gradient_clip_val": 0.5}, layers=2),
        *cases(
            {**ep, "appliers": [ActivationCheckpoint()]},
            trainer={"accumulate_grad_batches": 2},
            **{"micro_batches": 2, "family": "deepseek_v3", "layers": 3},
            routers={"aux_loss": 0.5, "bias_rate": 0.01, "capacity_factor": 1.0},
        ),
        # Three experts, which two ranks share along another dim; steps of full tensors.
        *cases({"dp_shard": 2}, trainer={"gradient_clip_val": 0.5}, layers=2, experts=3, optimizer="adafactor"),
        *cases(ep, trainer={"accumulate_grad_batches": 2}, micro_batches=2, own=OWN),
    ]
    assert_parity(moe, found, steps=2, rtol=RTOL)


@pytest.mark.slow
def test_four_ranks_of_data_axes_train_as_one_process() -> None:
    axes: list[dict[str, Any]] = [
        {"dp_shard": 4, "ep": 4},
        {"dp_shard": 4, "ep": 2},
        {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
        {"dp_shard": 2, "cp": 2, "ep": 4},
        {"dp_shard": 2, "cp": 2, "ep": 2, "cp_method": "ulysses"},
    ]
    found = cases(*axes, trainer={"gradient_clip_val": 0.5}, family="qwen3_moe", layers=2)
    found += cases({"dp_shard": 4, "ep": 2, "appliers": [CompileBlocks()]}, layers=2)
    assert_parity(moe, found, steps=2, rtol=RTOL, world_size=4, timeout=1200)


@pytest.mark.slow
def test_more_ranks_than_experts_train_as_one_process() -> None:
    axes: list[dict[str, Any]] = [{"dp_shard": 4, "ep": 2}, {"dp_shard": 2, "cp": 2, "ep": 2}]
    found = cases(*axes, trainer={"gradient_clip_val": 0.5}, layers=2, experts=2)
    found += cases({"dp_shard": 4}, layers=2, experts=2, optimizer="adafactor")
    found += cases({"dp_shard": 4}, layers=2, experts=2)
    found += cases({"dp_shard": 4, "ep": 2}, layers=2, experts=2, optimizer="adafactor")
    found += cases(
        {"dp_shard": 4, "ep": 2}, layers=2, experts=2, trainer={"accumulate_grad_batches": 2}, micro_batches=2
    )
    assert_parity(moe, found, steps=2, rtol=RTOL, world_size=4, timeout=1200)


@pytest.mark.slow
def test_four_ranks_of_axes_that_cut_the_model_train_as_one_process() -> None:
    axes: list[dict[str, Any]] = [
        {"dp_shard": 2, "tp": 2, "ep": 2},
        {"dp_shard": 2, "tp": 2},
        {"pp": 2, "tp": 2, "micro_batches": 2},
        {"pp": 2, "dp_shard": 2, "ep": 2, "micro_batches": 2},
        {"pp": 2, "cp": 2, "ep": 2, "micro_batches": 2, "schedule": "ZBH1"},
        {"pp": 2, "dp_shard": 2, "ep": 2, "micro_batches": 4, "schedule": "ZBV"},
    ]
    found = cases(*axes, trainer={"gradient_clip_val": 0.5}, family="mixtral")
    assert_parity(moe, found, steps=2, rtol=RTOL, world_size=4, timeout=1200)


@pytest.mark.slow
def test_optimizers_of_full_tensors_step_experts_of_tp_and_ep_as_in_one_process() -> None:
    axes: dict[str, Any] = {"dp_shard": 2, "tp": 2, "ep": 2}
    clipped = {"gradient_clip_val": 0.5}
    found = [case for name in ("adafactor", "muon", "lamb") for case in cases(axes, layers=2, optimizer=name)]
    found += cases(axes, trainer=clipped, own={**OWN, "capacity_factor": None}, optimizer="adafactor")
    found += cases(axes, trainer=clipped, layers=2, experts=2, optimizer="muon")  # One expert a rank.
    found += cases({"pp": 2, "cp": 2, "ep": 2, "micro_batches": 2}, optimizer="muon")
    assert_parity(moe, found, steps=2, rtol=RTOL, world_size=4, timeout=1200)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["deepseek_v2", "glm4_moe", "granitemoe", "olmoe", "ernie4_5_moe", "qwen2_moe"])
def test_a_family_trains_for_fifty_steps_as_one_process(family: str) -> None:
    assert_parity(moe, cases({"dp_shard": 2, "ep": 2}, family=family, steps=50), steps=50, rtol=1e-5)


@pytest.mark.slow
def test_experts_under_tp_and_those_of_llama4_train_as_in_one_process() -> None:
    ep = {"dp_shard": 2, "ep": 2}
    found = cases({"tp": 2}, trainer={"gradient_clip_val": 0.5}, layers=2) + cases({"tp": 2}, family="deepseek_v3")
    found += cases(ep, family="llama4_text", packed=False) + cases(ep, family="qwen3_moe", layers=3)
    found += cases({"cp": 2, "ep": 2}, layers=2) + cases(ep, family="gpt_oss", packed=False)
    found += cases(ep, layers=2, optimizer="adafactor") + cases({"dp_shard": 2}, layers=2, experts=3)
    assert_parity(moe, found, steps=2, rtol=RTOL)


@pytest.mark.slow
def test_experts_without_tokens_train_under_other_strategies_as_in_one_process() -> None:
    few: dict[str, Any] = {"experts": 32, "layers": 2}
    strategies = ["ddp", FSDPStrategy, *(partial(ZeroStrategy, stage) for stage in (1, 2, 3))]
    strategies += [partial(DeepSpeedBridge, stage) for stage in (1, 2, 3)]
    found = [Case(strategy, few, {"gradient_clip_val": 0.5}) for strategy in strategies]
    found += cases({"dp_shard": 2, "ep": 2}, **few)
    assert_parity(moe, found, steps=3, timeout=1200)
