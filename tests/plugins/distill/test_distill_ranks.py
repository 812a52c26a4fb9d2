"""Distillation on two ranks equals one process: losses, gradients and weights of the student, under each strategy."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer

from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.frozen_model import FrozenModel
from dlo_framework.testing import Case, assert_parity
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.distill.callback import AttentionTransfer, Distill, HiddenStates, OnPolicy
from dlo_plugins.images.batch_mix import BatchMix
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from support.distill_runs import DistilledLM, DistilledViT, digits, lm, seeded, sharp, tokens, vit

DATA: dict[str, Any] = {
    "ddp": "ddp",
    "fsdp": FSDPStrategy,
    **{f"zero{stage}": partial(ZeroStrategy, stage) for stage in (1, 2, 3)},
}
TP = partial(MeshStrategy, tp=2)
PP = partial(MeshStrategy, pp=2, micro_batches=2)
CP = partial(MeshStrategy, cp=2)
SEQUENCES = partial(MeshStrategy, tp=2, sequence_parallel=True)


def text(
    family: str = "llama",
    loss: Any = "kl",
    hidden: Any = None,
    init_from: str | None = None,
    micro_batches: int = 1,
    checkpoint: str | None = None,
    samples: bool = False,
    maps: bool = False,
    length: int = 24,
    **options: Any,
) -> Any:
    found: Any = seeded(lm(2, family, DistilledLM))
    if maps:
        options["attention"] = AttentionTransfer({"model.layers.0": "model.layers.2"}, weight=10.0)
    if samples:
        found.model.generation_config.eos_token_id = list(range(0, 96, 8))  # Completions of 1 to 12 tokens.
        options["on_policy"] = OnPolicy(fraction=0.7, prompt_tokens=6, max_new_tokens=12)
    # Of the first blocks, between which sequence parallelism shards tokens, and of the last ones.
    layers = {f"model.layers.{number}": f"model.layers.{number}" for number in (0, 1)}
    states = None if hidden is None else HiddenStates(layers, loss=hidden, project=True)
    teacher = FrozenModel(checkpoint, task=lm(4)) if checkpoint else FrozenModel(task=sharp(lm(4, family)))
    temperature = 1.0 if loss in ("mse", "hard") else 2.0
    found.distill = Distill(teacher, loss, temperature, hidden=states, init_from=init_from, **options)
    return found, tokens(micro_batches, length)


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


def saved_teacher(folder: Path) -> str:
    """Returns the checkpoint of a language model with twice the student's blocks."""
    path = folder / "teacher.ckpt"
    if not path.exists():
        trainer = Trainer(accelerator="cpu", devices=1, max_steps=0, logger=False, enable_progress_bar=False)
        use_canonical_checkpoints(trainer)
        trainer.fit(sharp(lm(4)), datamodule=tokens())
        trainer.save_checkpoint(path)
    return str(path)


#: Strategies by name of the students' own samples; the first two each time.
SAMPLED = {"fsdp": FSDPStrategy, "pp": PP, "tp": TP} | DATA
SAMPLED |= {"hsdp": partial(FSDPStrategy, replicate=2, shard=1), "deepspeed_2": partial(DeepSpeedBridge, stage=2)}


def test_distilled_language_models_equal_one_process() -> None:
    """The other strategies are columns of tests/composition."""
    found = [case(DATA["zero3"], "zero3"), case(TP, "tp"), case(PP, "pp")]
    # Rows end early at different lengths, so that ranks finish at different steps of the generation.
    found += [case(SAMPLED[name], name, samples=True, loss="jsd") for name in [*SAMPLED][:2]]
    assert_parity(text, found, steps=2)


@pytest.mark.slow
def test_distilled_images_equal_one_process() -> None:
    """The other strategies are columns of tests/composition."""
    found = [case(DATA["zero3"], "zero3", mixed=True), case(PP, "pp, token", token=True, loss="hard")]
    assert_parity(images, found, steps=2, rtol=1e-5)


@pytest.mark.slow
def test_the_students_own_samples_equal_one_process() -> None:
    assert_parity(text, [case(made, name, samples=True, loss="jsd") for name, made in SAMPLED.items()], steps=2)


@pytest.mark.slow
def test_the_students_own_samples_equal_one_process_where_ranks_share_sequences() -> None:
    shared = {"cp": CP, "tp, sequence parallel": SEQUENCES}
    shared |= {f"deepspeed_{stage}": partial(DeepSpeedBridge, stage=stage) for stage in (0, 1)}
    found = [case(strategy, name, samples=True, loss="jsd") for name, strategy in shared.items()]
    assert_parity(text, found, steps=4, rtol=1e-5)


@pytest.mark.slow
def test_layers_initial_weights_and_accumulation_equal_one_process(tmp_path: Path) -> None:
    """Hidden states, attention maps, weights from every second block, uneven tokens of micro-batches."""
    inside = {**DATA, "tp": TP}
    found = [case(strategy, f"{name}, hidden", hidden="mse") for name, strategy in inside.items()]
    found += [
        case(strategy, f"{name}, every 2", init_from="every 2", checkpoint=saved_teacher(tmp_path))
        for name, strategy in {**DATA, "tp": TP, "pp": PP}.items()
    ]
    twice = {"accumulate_grad_batches": 2}
    found += [
        case(strategy, f"{name}, accumulation", twice, micro_batches=2, loss="jsd", hidden="cosine")
        for name, strategy in {"ddp": "ddp", "zero2": DATA["zero2"], "fsdp": FSDPStrategy}.items()
    ]
    found += [case(PP, "pp, accumulation", twice, micro_batches=2), case(TP, "tp, wasserstein", loss="wasserstein")]
    found += [case(strategy, "gemma2", family="gemma2") for strategy in (FSDPStrategy, TP)]
    assert_parity(text, found, steps=4, rtol=1e-5)


@pytest.mark.slow
def test_layers_of_images_equal_one_process() -> None:
    found = [case(strategy, f"{name}, layers", layers=True) for name, strategy in {**DATA, "tp": TP}.items()]
    assert_parity(images, found, steps=4, rtol=1e-5)


@pytest.mark.slow
def test_layers_equal_one_process_where_ranks_share_sequences() -> None:
    """Each rank has its tokens of the layers; under `cp` rows of 22 tokens are padded to 24."""
    shared = {"cp": CP, "tp, sequence parallel": SEQUENCES}
    found = [
        case(strategy, f"{name}, {loss}", hidden=loss, maps=True, length=22)
        for name, strategy in shared.items()
        for loss in ("mse", "cosine")
    ]
    assert_parity(text, found, steps=4, rtol=1e-5)


@pytest.mark.slow
def test_half_precision_equals_one_process_within_its_rounding() -> None:
    half = {"precision": "bf16-mixed"}
    found = [case(strategy, name, half) for name, strategy in {**DATA, "tp": TP, "pp": PP}.items()]
    assert_parity(text, found, steps=4, rtol=2**-7)
