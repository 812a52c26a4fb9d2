"""Adapters, frozen and 4-bit weights: only what trains has gradients and optimizer state, and backward is shorter."""

import functools
from typing import Any

import pytest

from dlo_framework.mesh import MeshSpec
from dlo_plugins.plan.layout import Layout, StateFormat
from dlo_plugins.plan.machine import load_machine
from dlo_plugins.plan.model_profile import ModelProfile
from dlo_plugins.plan.rank_memory import MemoryModel, RankMemory
from dlo_plugins.plan.run_memory import profile_formats
from dlo_plugins.plan.step_time import TimeModel
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.causal_lm import CausalLM

CONFIG = {
    **{"model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 512},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64},
}
MIXED = StateFormat("bfloat16", 4, 2, 4, 4, 8.0, autocasts=True)


class _Windows:
    seq_len = 64


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": {"lora": Lora(rank=4), "dtype": "bfloat16"},
    "qlora": {"lora": Lora(rank=4, base="nf4"), "dtype": "bfloat16"},
    "freeze": {"freeze": ["model.embed_tokens", "model.layers.0", "model.layers.1"]},
}


@functools.cache
def _profile(name: str = "plain") -> tuple[ModelProfile, Any]:
    task = CausalLM(config=dict(CONFIG), **OPTIONS[name]).on_meta()
    batch = task.example_batch(_Windows())  # type: ignore[arg-type]
    return profile_formats(task, batch, task.parallel_plan(), MIXED, "cuda"), task


def _memory(profile: ModelProfile, layout: Layout) -> RankMemory:
    return MemoryModel(TimeModel(profile, load_machine("h100"), MIXED)).largest(layout)


@pytest.mark.parametrize("name", ["qlora", "freeze"])
def test_state_is_that_of_the_parameters_that_a_run_has(name: str) -> None:
    profile, task = _profile(name)
    parameters = list(task.model.parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    assert profile.parameters == sum(p.numel() for p in parameters)
    for ranks in (1, 4):
        found = _memory(profile, Layout(MeshSpec(dp_shard=ranks), zero=3 if ranks > 1 else 0))
        assert found.parameters == pytest.approx(sum(p.nbytes for p in parameters) / ranks)
        assert found.optimizer == 8 * trained / ranks
        assert ranks > 1 or found.gradients == 4 * trained


def test_backward_computes_no_gradients_of_frozen_weights() -> None:
    full, _ = _profile()
    adapted, _ = _profile("lora")
    first, last = (sum(one.backward.flops for one in (p.blocks[0], p.blocks[-1])) for p in (full, adapted))
    assert 0.5 < last / first < 0.75  # Gradients of inputs and of adapters; attention has both.


def test_backward_ends_at_the_first_trained_block() -> None:
    profile, _ = _profile("freeze")
    assert [block.backward.flops > 0 for block in profile.blocks] == [False, False, True, True]
    assert [block.modes["none"].saved.total > 0 for block in profile.blocks] == [False, False, True, True]
    full, _ = _profile()
    assert profile.blocks[3].backward.flops == full.blocks[3].backward.flops
    # Norms come first in a block, so that products need the gradients of their inputs, and the block does not.
    assert profile.blocks[2].backward.flops == profile.blocks[3].backward.flops
    assert profile.blocks[2].backward.eager.moved.total < profile.blocks[3].backward.eager.moved.total
    assert len({block.gathered for block in profile.blocks}) == 1


def test_autocast_keeps_casts_where_nothing_gathers_half_precision() -> None:
    profile, _ = _profile()
    alone, gathered = (_memory(profile, Layout(MeshSpec(dp_shard=n), zero=3 if n > 1 else 0)) for n in (1, 4))
    uncast = [512 * 128, *[128] * 9]  # The table of embeddings and the norms' weights stay in single precision.
    assert alone.gathered == 2 * (profile.parameters - sum(uncast))
    assert gathered.gathered < alone.gathered
    # Hidden states have twice the bytes, and rows as many.
    assert 1.1 * gathered.activations < alone.activations < 2 * gathered.activations
