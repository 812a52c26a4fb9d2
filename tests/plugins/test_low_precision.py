"""Int8 products are those of rounded factors, layers are chosen by the plan, and training on two ranks learns alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from dlo_plugins.appliers.low_precision import LowPrecision
from torch import nn

from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_framework.testing.training import leave_group, silence_lightning
from dlo_plugins.quantisation.int8_products import Int8Products, multiply_rows, round_rows
from dlo_plugins.strategies.mesh import MeshStrategy
from dlo_tasks.llm.adapters import Lora
from dlo_tasks.llm.causal_lm import CausalLM
from support.token_batches import FAMILIES, Tokens

CONFIG = {"model_type": "llama", **FAMILIES["llama"]}


def task(**options: Any) -> CausalLM:
    return CausalLM(config=dict(CONFIG), lr=3e-3, **options)


def test_a_product_is_that_of_the_rounded_factors() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(5, 24), torch.randn(7, 24)
    a[3] = 0
    (rounded_a, scales_a), (rounded_b, scales_b) = round_rows(a), round_rows(b)
    assert (rounded_a.dtype, int(rounded_a.abs().amax())) == (torch.int8, 127)
    expected = (rounded_a.double() * scales_a) @ (rounded_b.double() * scales_b).t()
    torch.testing.assert_close(multiply_rows(a, b), expected.float())
    assert float((multiply_rows(a, b) - a @ b.t()).norm() / (a @ b.t()).norm()) < 0.02


@pytest.mark.parametrize("weight_gradient", [True, False])
def test_outputs_and_gradients_are_near_those_of_the_layer(weight_gradient: bool) -> None:
    torch.manual_seed(0)
    layer, plain = nn.Linear(64, 48), nn.Linear(64, 48)
    plain.load_state_dict(layer.state_dict())
    Int8Products(weight_gradient).install(layer)
    found = []
    for module in (layer, plain):
        x = torch.randn(4, 9, 64, generator=torch.Generator().manual_seed(1)).requires_grad_()
        y = module(x)
        (y * torch.randn(y.shape, generator=torch.Generator().manual_seed(2))).sum().backward()
        found.append((y, x.grad, module.weight.grad, module.bias.grad))
    for mine, theirs in zip(*found, strict=True):
        assert mine.dtype == theirs.dtype
        assert float((mine - theirs).norm() / theirs.norm()) < 0.02
    assert not torch.equal(found[0][0], found[1][0])
    exact = float((found[0][2] - found[1][2]).norm() / found[1][2].norm()) < 1e-6
    assert exact == (not weight_gradient)


def test_the_layers_are_those_of_blocks_that_are_large_enough() -> None:
    twin: Any = task(lora=Lora(rank=4)).on_meta()
    plan = twin.parallel_plan()
    names = LowPrecision(min_features=32).choose_layers(twin.model, plan)
    assert len(names) == 2 * 5  # Keys and values have 16 features.
    assert not any("lm_head" in name or ".lora_" in name or "k_proj" in name for name in names)
    names = LowPrecision(min_features=1, skip=["model.layers.0", "*.*.*.*.down_proj"]).choose_layers(twin.model, plan)
    assert len(names) == 6
    with pytest.raises(DloError, match=r"skip must match linear layers in blocks, got 'model.layer.0'.*did you mean"):
        LowPrecision(skip=["model.layer.0"]).choose_layers(twin.model, plan)
    with pytest.raises(DloError, match=r"of at least 64 features in its blocks, outside skip, got none"):
        LowPrecision().choose_layers(twin.model, plan)
    with pytest.raises(DloError, match="min_features must be at least 1, got 0"):
        LowPrecision(min_features=0)


MESHES: dict[str, dict[str, Any]] = {
    "one": {},
    "tp": {"tp": 2, "dp_shard": 1},
    "tp, sequence": {"tp": 2, "dp_shard": 1, "sequence_parallel": True},
    "pp": {"pp": 2, "dp_shard": 1, "micro_batches": 2},
    "dp": {"dp_shard": 2},
    "cp": {"cp": 2, "dp_shard": 1},
}


def _train(rank: int, world_size: int, names: list[str], rounds: bool) -> dict[str, list[float]]:
    from lightning.pytorch import Callback, Trainer, seed_everything

    silence_lightning()
    losses: dict[str, list[float]] = {}

    class Note(Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            losses[name].append(float(outputs["loss"]))

    for name in names:
        losses[name] = []
        seed_everything(1, verbose=False)
        appliers = [LowPrecision(min_features=8)] if rounds else []
        trainer = Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=MeshStrategy(appliers=appliers, **MESHES[name]),
            max_steps=8,
            log_every_n_steps=1,
            callbacks=[Note()],
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(task(), datamodule=Tokens(1))
    leave_group()
    return losses


@pytest.mark.parametrize(
    "meshes",
    [["tp, sequence", "pp", "cp"], pytest.param([name for name in MESHES if name != "one"], marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_meshes_learn_as_one_process_within_a_hundredth(meshes: list[str]) -> None:
    (alone,) = run_distributed(_train, 1, ["one"], True, backend=None)
    (plain,) = run_distributed(_train, 1, ["one"], False, backend=None)
    ranks = run_distributed(_train, 2, meshes, True, backend=None)
    found = {name: [sum(pair) / 2 for pair in zip(*(rank[name] for rank in ranks), strict=True)] for name in meshes}
    assert alone["one"] != plain["one"]
    for name in meshes:
        assert found[name] == pytest.approx(alone["one"], rel=1e-2), name
        assert found[name] == pytest.approx(plain["one"], rel=1e-2), name
