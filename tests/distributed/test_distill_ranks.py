"""Distillation on two ranks equals one process: losses, gradients and weights of the student, under each strategy."""

from functools import partial
from typing import Any

from dlo_framework.frozen_model import FrozenModel
from dlo_framework.testing import Case, assert_parity
from dlo_plugins.callbacks.batch_mix import BatchMix
from dlo_plugins.callbacks.distill import AttentionTransfer, Distill, HiddenStates
from dlo_plugins.strategies.deepspeed import DeepSpeedBridge
from dlo_plugins.strategies.fsdp import FSDPStrategy
from dlo_plugins.strategies.mesh import MeshStrategy
from dlo_plugins.strategies.zero import ZeroStrategy
from support.distill_runs import DistilledLM, DistilledViT, digits, lm, seeded, sharp, tokens, vit

DATA: dict[str, Any] = {
    "ddp": "ddp",
    "fsdp": FSDPStrategy,
    **{f"zero{stage}": partial(ZeroStrategy, stage) for stage in (1, 2, 3)},
}
TP = partial(MeshStrategy, tp=2)
PP = partial(MeshStrategy, pp=2, micro_batches=2)
CP = partial(MeshStrategy, cp=2)
DEEPSPEED = {f"deepspeed_{stage}": partial(DeepSpeedBridge, stage=stage) for stage in (1, 2, 3)}


def text(
    family: str = "llama",
    loss: Any = "kl",
    hidden: Any = None,
    init_from: str | None = None,
    micro_batches: int = 1,
    **options: Any,
) -> Any:
    found: Any = seeded(lm(2, family, DistilledLM))
    states = None if hidden is None else HiddenStates(loss=hidden, project=True)
    teacher = FrozenModel(task=sharp(lm(4, family)))
    temperature = 1.0 if loss in ("mse", "hard") else 2.0
    found.distill = Distill(teacher, loss, temperature, hidden=states, init_from=init_from, **options)
    return found, tokens(micro_batches)


def images(
    token: bool = False, layers: bool = False, mixed: bool = False, init_from: str | None = None, **options: Any
) -> Any:
    name = "deit_tiny_distilled_patch16_224" if token else "vit_tiny_patch16_224"
    found: Any = seeded(vit(2, model=name, kind=DistilledViT))
    width = 32 if init_from else 64
    teacher = FrozenModel(task=sharp(vit(4, width)))
    if layers:
        options |= {"hidden": HiddenStates({"blocks.0": "blocks.1"}), "attention": AttentionTransfer()}
    found.distill = Distill(teacher, token=token, init_from=init_from, **options)
    if mixed:
        distill = found.distill
        found.configure_callbacks = lambda: [distill, BatchMix(mode="pair", group_size=2)]
    return found, digits()


def case(strategy: Any, name: str, trainer: dict[str, Any] | None = None, **arguments: Any) -> Case:
    return Case(strategy, arguments, trainer or {}, name)


def test_distilled_language_models_equal_one_process() -> None:
    found = [case(strategy, name) for name, strategy in {**DATA, "tp": TP, "pp": PP}.items()]
    found += [
        case(strategy, f"{name}, gemma2", family="gemma2")
        for name, strategy in {"fsdp": FSDPStrategy, "tp": TP}.items()
    ]
    assert_parity(text, found, steps=4, rtol=1e-5)


def test_distilled_images_equal_one_process() -> None:
    found = [case(strategy, name, mixed=True) for name, strategy in DATA.items()]
    found += [case(TP, "tp"), case(PP, "pp")]
    found += [case("ddp", "token", token=True, loss="hard"), case(PP, "pp, token", token=True, loss="hard")]
    assert_parity(images, found, steps=4, rtol=1e-5)
