"""Models with mixtures of experts train on several ranks as in one process, also where a rank does not use an expert.

Four tokens an image, and two images a rank: of the 12 experts of a layer, each rank uses some only.
"""

from functools import partial
from typing import Any

import pytest

from dlo_framework.models.experts.mixture_options import MixtureOptions
from dlo_framework.testing import Case, assert_parity
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.memory.activation_checkpoint import ActivationCheckpoint
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from dlo_tasks.language.causal_lm import CausalLM
from support.token_batches import FAMILIES, GROUPED, SIZES, Tokens

ROWS = 4
VIT = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "depth": 4, "num_heads": 2, "class_token": False}
DOUBLE = {"precision": "64-true"}
#: All losses of the routers, and dropped tokens.
ALL: dict[str, Any] = {"aux_loss": 0.5, "z_loss": 0.1, "bias_rate": 0.01, "capacity_factor": 2.0}


def vit(**options: Any) -> tuple[Any, Any]:
    task = ImageClassifier(
        "vit_tiny_patch16_224",
        model_args={**VIT, "global_pool": "avg"},
        num_classes=10,
        lr=1e-2,
        optimizer_args={"eps": 1e-4},
        experts=MixtureOptions(count=12, **options),
    )
    return task, DigitsData(image_size=16, batch_size=ROWS)


MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {**GROUPED, "num_local_experts": 6, "sliding_window": None},
    "deepseek_v3": {
        **SIZES,
        "n_routed_experts": 8,
        "moe_intermediate_size": 16,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "kv_lora_rank": 8,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 4,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}


def llm(family: str = "llama", **options: Any) -> tuple[Any, Any]:
    more: dict[str, Any] = {"lr": 1e-2, "optimizer_args": {"eps": 1e-4}}
    return CausalLM(
        config={"model_type": family, **{**FAMILIES, **MIXTURES}[family]}, experts=MixtureOptions(**options), **more
    ), Tokens(1)


def case(strategy: Any, name: str, **options: Any) -> Case:
    return Case(strategy, options, DOUBLE, name=name)


def mesh(**options: Any) -> Any:
    more = {"micro_batches": 2} if options.get("pp", 1) > 1 else {}
    return partial(MeshStrategy, **{"dp_shard": 1, **more, **options})


def sharded(**options: Any) -> list[Case]:
    zero3 = partial(ZeroStrategy, 3)
    return [
        case("ddp", "ddp", **options),
        Case("ddp", options, {**DOUBLE, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}, name="accumulation"),
        case(partial(ZeroStrategy, 1), "zero1", **options),
        case(zero3, "zero3", **options),
        case(FSDPStrategy, "fsdp", **options),
        case(mesh(dp_shard=2, appliers=[ActivationCheckpoint()]), "dp_shard, recomputed", **options),
        case(mesh(tp=2), "tp", **options),
    ]


#: The fractions of a pipeline's load-balancing loss grow with its micro-batches, as those of a process that accumulates
#: as many (tests/distributed/test_router_losses_of_micro_batches.py), and so differ from one batch's.
STAGES = {"aux_loss": 0.0, "z_loss": 0.1, "bias_rate": 0.01}


@pytest.mark.slow
def test_a_vit_with_mixtures_trains_on_two_ranks_as_in_one_process() -> None:
    cases = [*sharded(top_k=2, **ALL), case(mesh(pp=2), "pp", top_k=2, **STAGES)]
    assert_parity(vit, cases, steps=4, rtol=1e-6)


@pytest.mark.slow
def test_language_models_with_mixtures_train_on_two_ranks_as_in_one_process() -> None:
    upcycled: dict[str, Any] = {"count": 6, "every": 2, "aux_loss": 0.5, "z_loss": 0.1, "bias_rate": 0.01}
    cases = [
        case("ddp", "ddp", **upcycled),
        case(partial(ZeroStrategy, 3), "zero3", **upcycled),
        case(mesh(tp=2), "tp", **upcycled),
        case(mesh(cp=2), "cp", **upcycled),
        case(mesh(pp=2), "pp", **{**upcycled, "aux_loss": 0.0}),
        # Mixtures of transformers, which have a plan, losses and a bias of their own.
        case("ddp", "deepseek_v3, ddp", family="deepseek_v3", bias_rate=0.01, z_loss=0.1),
        case(mesh(tp=2), "deepseek_v3, tp", family="deepseek_v3", bias_rate=0.01, z_loss=0.1),
        case(mesh(pp=2), "mixtral, pp", family="mixtral", aux_loss=0.0, z_loss=0.1),
    ]
    assert_parity(llm, cases, steps=3, rtol=1e-6)


@pytest.mark.slow
def test_deepspeed_trains_experts_that_a_rank_does_not_use() -> None:
    options = {"top_k": 2, **ALL}
    cases = [Case(partial(DeepSpeedBridge, stage), options, name=f"deepspeed_{stage}") for stage in (1, 2, 3)]
    assert_parity(vit, cases, steps=3, rtol=1e-4)
