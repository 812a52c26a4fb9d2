"""Strategies on two and four ranks of one GPU, over NCCL, train as one process does on that GPU.

The ranks share the GPU and communicate over the loopback interface, so that one accelerator is enough: what is computed
and sent is what several GPUs would, the time is not.
"""

from functools import partial
from typing import Any

import pytest

from dlo_framework.models.experts.mixture_options import MixtureOptions
from dlo_framework.testing import Case, assert_parity
from dlo_plugins.memory.activation_checkpoint import ActivationCheckpoint
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from dlo_tasks.language.causal_lm import CausalLM
from support.shared_gpu import SharedGPU, share_gpu
from support.token_batches import FAMILIES, GROUPED, Tokens

ROWS = 8
VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 4}
#: Without a larger eps, Adam makes whole steps of the rounding of gradients that cancel to nothing.
ADAM: dict[str, Any] = {"lr": 1e-3, "optimizer_args": {"eps": 1e-4}}
HALF, TOGETHER = {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}


def llm(family: str = "llama", micro_batches: int = 1, **options: Any) -> tuple[Any, Any]:
    share_gpu()
    config = {"model_type": family, **FAMILIES[family], "num_hidden_layers": 4}
    return CausalLM(config=config, **{**ADAM, **options}), Tokens(micro_batches, rows=ROWS)


def vit() -> tuple[Any, Any]:
    share_gpu()
    task = ImageClassifier("vit_tiny_patch16_224", model_args=VIT, num_classes=10, **ADAM)
    return task, DigitsData(image_size=16, batch_size=ROWS, val_fraction=0.01)


def mixture() -> tuple[Any, Any]:
    share_gpu()
    config = {"model_type": "mixtral", **GROUPED, "num_local_experts": 6, "sliding_window": None}
    return CausalLM(config=config, experts=MixtureOptions(), **ADAM), Tokens(1)


def mesh(**options: Any) -> Any:
    more = {"micro_batches": 4} if options.get("pp", 1) > 1 else {}
    return partial(MeshStrategy, **{"dp_shard": 1, **more, **options})


def cases(strategies: dict[str, Any], trainer: dict[str, Any] | None = None, **arguments: Any) -> list[Case]:
    return [Case(make, arguments, trainer or {}, name=name) for name, make in strategies.items()]


SHARDED = {
    "ddp": "ddp",
    "zero1": partial(ZeroStrategy, 1),
    "zero2": partial(ZeroStrategy, 2),
    "zero3": partial(ZeroStrategy, 3),
    "fsdp": FSDPStrategy,
}
OFFLOADED = {
    "zero2, offloaded": partial(ZeroStrategy, 2, offload="optimizer"),
    "zero3, offloaded": partial(ZeroStrategy, 3, offload="both"),
    "fsdp, offloaded": partial(FSDPStrategy, offload=True),
}
AXES = {
    "dp_shard": mesh(dp_shard=2),
    "tp": mesh(tp=2),
    "sequence parallel": mesh(tp=2, sequence_parallel=True),
    "ring": mesh(cp=2),
    "ulysses": mesh(cp=2, cp_method="ulysses"),
    "recomputed": mesh(tp=2, appliers=[ActivationCheckpoint()]),
}
SCHEDULES = {name: mesh(pp=2, schedule=name) for name in ("GPipe", "1F1B", "Interleaved1F1B", "ZBV")}
PAIRS = {
    "hsdp": mesh(dp_replicate=2, dp_shard=2),
    "pp and tp": mesh(pp=2, tp=2),
    "cp and dp_shard": mesh(cp=2, dp_shard=2),
    "dp_shard and tp": mesh(dp_shard=2, tp=2, sequence_parallel=True),
    "zero3 on four": partial(ZeroStrategy, 3),
}


@pytest.mark.parametrize(
    "strategies", [SHARDED, OFFLOADED, AXES, SCHEDULES], ids=["sharded", "offloaded", "axes", "pp"]
)
def test_two_ranks_train_a_language_model_as_one_process(strategies: dict[str, Any]) -> None:
    assert_parity(llm, cases(strategies), steps=3, accelerator=SharedGPU())


def test_accumulation_and_clipping_go_with_each_kind() -> None:
    some = {name: SHARDED[name] for name in ("zero2", "zero3", "fsdp")} | {"1F1B": SCHEDULES["1F1B"]}
    assert_parity(llm, cases(some, TOGETHER, micro_batches=2), steps=2, accelerator=SharedGPU())


def test_half_precision_differs_by_its_rounding() -> None:
    some = {**SHARDED, "tp": AXES["sequence parallel"], "ring": AXES["ring"], "1F1B": SCHEDULES["1F1B"]}
    assert_parity(llm, cases(some, HALF), steps=3, rtol=0.02, accelerator=SharedGPU())


def test_two_ranks_train_a_vit_as_one_process() -> None:
    some = {**SHARDED, "tp": AXES["tp"], "1F1B": SCHEDULES["1F1B"]}
    assert_parity(vit, cases(some), steps=3, accelerator=SharedGPU())


def test_four_ranks_train_as_one_process() -> None:
    assert_parity(llm, cases(PAIRS), world_size=4, steps=2, accelerator=SharedGPU())


def test_experts_train_on_two_ranks_as_in_one_process() -> None:
    some = {"zero3": SHARDED["zero3"], "ep": mesh(dp_shard=2, ep=2)}
    assert_parity(mixture, cases(some, {"precision": "64-true"}), steps=2, accelerator=SharedGPU())


def test_asynchronous_tensor_parallelism_trains_as_one_process() -> None:
    assert_parity(
        llm, cases({"async_tp": mesh(tp=2, sequence_parallel=True, async_tp=True)}), steps=2, accelerator=SharedGPU()
    )
