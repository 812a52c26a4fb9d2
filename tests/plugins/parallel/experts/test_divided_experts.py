"""Experts divided over ranks against one process: losses, norms, weights and checkpoints, for families and axes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.models.experts import MixtureOptions
from dlo_framework.testing import Case, assert_parity, run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.compile.compile_blocks import CompileBlocks
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.memory.activation_checkpoint import ActivationCheckpoint
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.language.causal_lm import CausalLM
from support.causal_types import tiny
from support.checkpoints import Again, check_same, tensors
from support.runs import Watch
from support.token_batches import FAMILIES, VOCABULARY, Batches, Tokens
from support.trainers import quiet_trainer

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
    made = [(partial(MeshStrategy, **{"dp_shard": 1, **of}), f"{of} {arguments} {trainer}") for of in axes]
    return [Case(strategy, arguments, trainer, name) for strategy, name in made]


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


CLIPPED: dict[str, Any] = {"gradient_clip_val": 0.5}
FEW: dict[str, Any] = {"layers": 2, "experts": 2}
MICRO: dict[str, Any] = {"micro_batches": 2}
DATA_AXES: tuple[dict[str, Any], ...] = (
    {"dp_shard": 4, "ep": 4},
    {"dp_shard": 4, "ep": 2},
    {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    {"dp_shard": 2, "cp": 2, "ep": 4},
    {"dp_shard": 2, "cp": 2, "ep": 2, "cp_method": "ulysses"},
)
CUTS: tuple[dict[str, Any], ...] = (
    {"dp_shard": 2, "tp": 2, "ep": 2},
    {"dp_shard": 2, "tp": 2},
    {"pp": 2, "tp": 2, **MICRO},
    {"pp": 2, "dp_shard": 2, "ep": 2, **MICRO},
    {"pp": 2, "cp": 2, "ep": 2, **MICRO, "schedule": "ZBH1"},
    {"pp": 2, "dp_shard": 2, "ep": 2, "micro_batches": 4, "schedule": "ZBV"},
)
ON_FOUR: dict[str, list[Case]] = {
    "data axes": [
        *cases(*DATA_AXES, trainer=CLIPPED, family="qwen3_moe", layers=2),
        *cases({**DATA_AXES[1], "appliers": [CompileBlocks()]}, layers=2),
    ],
    "more ranks than experts": [
        *cases(DATA_AXES[1], {"dp_shard": 2, "cp": 2, "ep": 2}, trainer=CLIPPED, **FEW),
        *cases({"dp_shard": 4}, DATA_AXES[1], optimizer="adafactor", **FEW),
        *cases(DATA_AXES[1], trainer={"accumulate_grad_batches": 2}, **FEW, **MICRO),
    ],
    "axes that cut the model": cases(*CUTS, trainer=CLIPPED),
    "optimizers of full tensors": [
        *(case for name in ("adafactor", "muon", "lamb") for case in cases(CUTS[0], layers=2, optimizer=name)),
        *cases(CUTS[0], trainer=CLIPPED, own={**OWN, "capacity_factor": None}, optimizer="adafactor"),
        *cases(CUTS[0], trainer=CLIPPED, layers=2, experts=2, optimizer="muon"),  # One expert a rank.
        *cases({"pp": 2, "cp": 2, "ep": 2, **MICRO}, optimizer="muon"),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("what", ON_FOUR)
def test_four_ranks_train_as_one_process(what: str) -> None:
    assert_parity(moe, ON_FOUR[what], steps=2, rtol=RTOL, world_size=4, timeout=1200)


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


# --- checkpoints of divided experts: full tensors by name, which one process and any other division take up ----------


STRATEGIES: dict[str, Callable[[], Any]] = {
    "one": lambda: "auto",
    "ep": partial(MeshStrategy, dp_shard=2, ep=2),
    "ep over cp": partial(MeshStrategy, dp_shard=1, cp=2, ep=2),
    "tp": partial(MeshStrategy, dp_shard=1, tp=2),
    "zero3": partial(ZeroStrategy, 3),
    "ep, tp": partial(MeshStrategy, dp_shard=2, tp=2, ep=2),
    "fsdp of four": partial(MeshStrategy, dp_shard=4),
}
SAVED, STEPS = 2, 4


def train(world_size: int, optimizer: str, name: str, save: Path, resume: Path | None) -> list[float]:
    seed_everything(7, workers=True, verbose=False)
    watch = Watch(save if resume is None else None, SAVED)
    config = tiny("qwen3_moe", dropout=False, vocab_size=VOCABULARY, num_hidden_layers=2)
    trainer = quiet_trainer(
        devices=world_size,
        strategy=STRATEGIES[name](),
        max_steps=STEPS,
        max_epochs=-1,
        limit_val_batches=0,
        precision="64-true",
        callbacks=[watch, *([Again(save)] if resume is not None else [])],
        use_distributed_sampler=False,
    )
    use_canonical_checkpoints(trainer)
    model = CausalLM(config=config, lr=1e-3, optimizer=optimizer, optimizer_args={"eps": 1e-4})
    trainer.fit(model, datamodule=Tokens(1, rows=8, steps=STEPS), ckpt_path=resume)
    return watch.losses


def runs(
    rank: int, world_size: int, jobs: list[tuple[str, Path, Path | None]], optimizer: str = "adamw"
) -> list[list[float]]:
    return [train(world_size, optimizer, *job) for job in jobs]


@pytest.mark.parametrize("name", ["ep", pytest.param("ep over cp", marks=pytest.mark.slow)])
def test_experts_are_saved_in_full_shape_and_go_on_under_any_division(tmp_path: Path, name: str) -> None:
    one = [("one", tmp_path / "one", None), ("one", tmp_path / "again", tmp_path / "one")]
    alone = runs(0, 1, one)
    divided = tmp_path / "divided"
    jobs = [(name, divided, None), (name, tmp_path / "from one", tmp_path / "one")]
    jobs += [(other, tmp_path / other, divided) for other in ("zero3", "tp")]
    found = run_distributed(runs, 2, jobs, backend=None)[0]
    for (strategy, save, resume), losses in zip(jobs, found, strict=True):
        # A resumed run begins with the data's first batch again.
        assert losses == pytest.approx(alone[resume is not None], rel=1e-6), (strategy, resume)
        if resume is not None:
            check_same(resume, save)
    losses = train(1, "adamw", "one", tmp_path / "back", divided)
    assert losses == pytest.approx(alone[1], rel=1e-6)
    check_same(divided, tmp_path / "back")
    saved = tensors(divided)
    names = [name for name in saved if name.startswith("model/") and name.endswith("mlp.experts.down_proj")]
    assert len(names) == 2
    assert all(saved[name].shape == torch.Size([4, 32, 48]) for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_experts_that_ep_and_tp_both_cut_are_saved_in_full_shape(tmp_path: Path, optimizer: str) -> None:
    one = [("one", tmp_path / "one", None), ("one", tmp_path / "again", tmp_path / "one")]
    alone = runs(0, 1, one, optimizer)
    jobs = [("ep, tp", tmp_path / "both", None), ("ep, tp", tmp_path / "both from one", tmp_path / "one")]
    jobs += [("fsdp of four", tmp_path / "fsdp from both", tmp_path / "both")]
    found = run_distributed(runs, 4, jobs, optimizer, backend=None)[0]
    for (name, save, resume), losses in zip(jobs, found, strict=True):
        assert losses == pytest.approx(alone[resume is not None], rel=1e-6), (name, resume)
        if resume is not None:
            check_same(resume, save)


# A router's losses and bias over micro-batches: a pipeline's are those of one process that accumulates as many


MICRO_BATCHES, UPDATES = 4, 3
OPTIONS: dict[str, Any] = {"count": 6, "every": 2, "aux_loss": 0.5, "z_loss": 0.1, "bias_rate": 0.01}


class Joined(Tokens):
    """Steps of one batch, which has the rows of all micro-batches of :class:`Tokens`."""

    def train_dataloader(self) -> DataLoader:
        batches = super().train_dataloader().dataset.batches  # type: ignore[attr-defined]
        steps = [batches[at : at + self.micro_batches] for at in range(0, len(batches), self.micro_batches)]
        joined = [{name: _join([part[name] for part in step]) for name in step[0]} for step in steps]
        return DataLoader(Batches(joined), batch_size=None)


def _join(values: list[Tensor]) -> Tensor:
    return torch.cat(values) if values[0].ndim else values[0]


def fitted(folder: Path, strategy: Any, devices: int, data: type[Tokens], **options: Any) -> dict[str, Tensor]:
    seed_everything(0, verbose=False)
    config = {"model_type": "llama", **FAMILIES["llama"], "num_hidden_layers": 4}
    settings: dict[str, Any] = {"optimizer": "sgd", "lr": 0.5, "schedule": "constant"}
    task = CausalLM(config=config, experts=MixtureOptions(**{**OPTIONS, **options.pop("experts", {})}), **settings)
    trainer = quiet_trainer(
        devices=devices,
        strategy=strategy,
        max_steps=UPDATES,
        default_root_dir=folder,
        precision="64-true",
        **options,
    )
    trainer.fit(task, datamodule=data(MICRO_BATCHES, rows=2, steps=UPDATES))
    return gather_full_weights(trainer)


def on_ranks(rank: int, world_size: int, folder: Path) -> list[dict[str, Tensor]]:
    pipeline: dict[str, Any] = {"pp": 2, "dp_shard": 1, "micro_batches": MICRO_BATCHES}
    strategies = [MeshStrategy(**pipeline, schedule="ZBV"), MeshStrategy(**pipeline, appliers=[ActivationCheckpoint()])]
    return [fitted(folder, strategy, world_size, Joined) for strategy in strategies]


def test_a_pipeline_has_the_router_losses_of_one_process_that_accumulates(tmp_path: Path) -> None:
    def alone(data: type[Tokens], accumulated: int, **experts: Any) -> dict[str, Tensor]:
        return fitted(tmp_path, "auto", 1, data, accumulate_grad_batches=accumulated, experts=experts)

    expected = alone(Tokens, MICRO_BATCHES)
    router = next(name for name in expected if name.endswith("mlp.gate.weight"))
    bias = router.replace("weight", "e_score_correction_bias")
    assert expected[bias].abs().max() > 0
    undivided = alone(Joined, 1)
    assert (expected[router] - undivided[router]).abs().max() > 1e-6  # Its fractions are those of all rows.
    for weights in run_distributed(on_ranks, 2, tmp_path, backend=None)[0]:
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-6, atol=1e-9)
    # Without the load-balancing loss, a division of the batch changes nothing, the bias included.
    divided, undivided = (alone(data, count, aux_loss=0.0) for data, count in ((Tokens, MICRO_BATCHES), (Joined, 1)))
    assert divided[bias].abs().max() > 0
    for name, tensor in undivided.items():
        torch.testing.assert_close(divided[name], tensor, rtol=1e-6, atol=1e-9)
