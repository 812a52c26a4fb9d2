"""Models whose attention has a mask with a layout per head train on several ranks as in one process.

A mask that another rank's heads or chunks got would change every loss: BigBird draws other blocks for each head.
"""

from functools import partial
from typing import Any

import pytest

from dlo_framework.models.attention import Attention, BigBird, BSLongformer, Prefix, SparsityPattern
from dlo_framework.testing import Case, assert_parity
from dlo_plugins.compile.compile_blocks import CompileBlocks
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.memory.activation_checkpoint import ActivationCheckpoint
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from dlo_tasks.language.causal_lm import CausalLM
from support.token_batches import FAMILIES, Tokens

ROWS = 8
VIT = {"img_size": 16, "patch_size": 2, "embed_dim": 32, "depth": 2, "num_heads": 4}


def make_pattern() -> BigBird:
    return BigBird(block=3, different_layout_per_head=True, num_sliding_window_blocks=1, seed=3)


def llm(pattern: SparsityPattern | None = None) -> tuple[Any, Any]:
    config = {"model_type": "llama", **FAMILIES["llama"]}
    # Without a larger eps, Adam makes whole steps of the rounding of gradients that cancel to nothing.
    more: dict[str, Any] = {"lr": 1e-3, "optimizer_args": {"eps": 1e-4}}
    return CausalLM(config=config, attention=Attention(mask=pattern or make_pattern()), **more), Tokens(1, rows=ROWS)


def vit() -> tuple[Any, Any]:
    task = ImageClassifier(
        "vit_tiny_patch16_224",
        model_args=VIT,
        num_classes=10,
        lr=1e-3,
        optimizer_args={"eps": 1e-4},
        attention=Attention(mask=make_pattern()),
    )
    return task, DigitsData(image_size=16, batch_size=ROWS, val_fraction=0.01)


def mesh(pattern: SparsityPattern | None = None, **options: Any) -> Case:
    more = {"micro_batches": 4} if options.get("pp", 1) > 1 else {}
    arguments = {} if pattern is None else {"pattern": pattern}
    return Case(partial(MeshStrategy, **{"dp_shard": 1, **more, **options}), arguments, name=f"{pattern} {options}")


MESHES = ({"tp": 2, "sequence_parallel": True}, {"pp": 2})
SHARED = ({"cp": 2}, {"cp": 2, "cp_method": "ulysses"})


def test_a_language_model_trains_on_two_ranks_as_in_one_process() -> None:
    # Keys of a prefix come after queries, in the same chunk and in later ones; its targets have no loss.
    prefix = mesh(Prefix(13, block=3), **SHARED[1])
    assert_parity(llm, [*(mesh(**axes) for axes in (*MESHES, SHARED[0])), prefix], steps=2)


@pytest.mark.slow
def test_a_vit_trains_on_two_ranks_as_in_one_process() -> None:
    """Heads are divided under tp alone; where each rank has all of a layer, a pipeline stands for the others."""
    assert_parity(vit, [mesh(tp=2), mesh(pp=2)], steps=2, rtol=1e-5)


@pytest.mark.slow
def test_four_ranks_deepspeed_compiled_and_recomputed_blocks_are_one_process() -> None:
    pairs = ({"tp": 2, "cp": 2}, {"tp": 2, "cp": 2, "cp_method": "ulysses"}, {"pp": 2, "cp": 2}, {"pp": 2, "tp": 2})
    assert_parity(llm, [mesh(**axes) for axes in pairs], steps=2, world_size=4, rtol=1e-5)
    found = [Case(partial(DeepSpeedBridge, stage), name=f"deepspeed_{stage}") for stage in (1, 3)]
    for applier in (CompileBlocks, ActivationCheckpoint):
        for axes in ({"tp": 2}, {"cp": 2}, {"cp": 2, "cp_method": "ulysses"}):
            found.append(mesh(**axes, appliers=[applier()]))
    assert_parity(llm, found, steps=2, rtol=1e-5)


def test_the_meshes_would_notice_a_mask_of_other_heads() -> None:
    layout = make_pattern().layout(4, 8)
    assert not (layout[:2] == layout[2:]).all()
    assert (BSLongformer(3).layout(4, 8)[:2] == BSLongformer(3).layout(4, 8)[2:]).all()
