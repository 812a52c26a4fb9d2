"""Distillation on two ranks equals one process: losses, gradients and weights of the student, under each strategy."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer

from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.frozen_model import FrozenModel
from dlo_framework.testing import Case, assert_parity
from dlo_plugins.distill.callback import AttentionTransfer, Distill, HiddenStates, OnPolicy
from dlo_plugins.images.batch_mix import BatchMix
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from support.distill_runs import DistilledLM, DistilledViT, digits, lm, seeded, sharp, tokens, vit
from support.strategies import named_cases

DATA = ("ddp", "fsdp", "zero1", "zero2", "zero3")


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


def images(token: bool = False, layers: bool = False, mixed: bool = False, **options: Any) -> Any:
    name = "deit_tiny_distilled_patch16_224" if token else "vit_tiny_patch16_224"
    found: Any = seeded(vit(2, model=name, kind=DistilledViT))
    if layers:
        options |= {"hidden": HiddenStates({"blocks.0": "blocks.1"}), "attention": AttentionTransfer()}
    found.distill = Distill(FrozenModel(task=sharp(vit(4, 64))), token=token, **options)
    if mixed:
        distill = found.distill
        found.configure_callbacks = lambda: [distill, BatchMix(mode="pair", group_size=2)]
    return found, digits()


def saved_teacher(folder: Path) -> str:
    """Returns the checkpoint of a language model with twice the student's blocks."""
    path = folder / "teacher.ckpt"
    if not path.exists():
        trainer = Trainer(accelerator="cpu", devices=1, max_steps=0, logger=False, enable_progress_bar=False)
        use_canonical_checkpoints(trainer)
        trainer.fit(sharp(lm(4)), datamodule=tokens())
        trainer.save_checkpoint(path)
    return str(path)


@pytest.mark.parametrize(
    ("names", "sampled"),
    [(["zero3", "pp"], "fsdp"), pytest.param(["tp"], "pp", marks=pytest.mark.slow)],
    ids=["some", "others"],
)
def test_distilled_language_models_equal_one_process(names: list[str], sampled: str) -> None:
    """The other strategies are columns of tests/composition."""
    # Rows end early at different lengths, so that ranks finish at different steps of the generation.
    samples = named_cases([sampled], samples=True, loss="jsd")
    assert_parity(text, [*named_cases(names), *samples], steps=2)


@pytest.mark.slow
def test_distilled_images_equal_one_process() -> None:
    """The other strategies are columns of tests/composition."""
    found = named_cases(["zero3"], mixed=True) + named_cases(["pp"], token=True, loss="hard")
    assert_parity(images, found + named_cases((*DATA, "tp"), layers=True), steps=4, rtol=1e-5)


@pytest.mark.slow
def test_the_students_own_samples_equal_one_process() -> None:
    found = named_cases((*DATA, "tp", "deepspeed_2"), samples=True, loss="jsd")
    hsdp = Case(partial(FSDPStrategy, replicate=2, shard=1), {"samples": True, "loss": "jsd"}, name="hsdp")
    assert_parity(text, [*found, hsdp], steps=2)


@pytest.mark.slow
def test_ranks_that_share_sequences_equal_one_process() -> None:
    """Of samples and of layers, of which each rank has its tokens; under `cp` rows of 22 tokens are padded to 24."""
    found = named_cases(("cp", "sp", "deepspeed_1"), samples=True, loss="jsd")
    found += [
        case for loss in ("mse", "cosine") for case in named_cases(("cp", "sp"), hidden=loss, maps=True, length=22)
    ]
    assert_parity(text, found, steps=4, rtol=1e-5)


@pytest.mark.slow
def test_layers_initial_weights_and_accumulation_equal_one_process(tmp_path: Path) -> None:
    """Hidden states, attention maps, weights from every second block, uneven tokens of micro-batches."""
    found = named_cases((*DATA, "tp"), hidden="mse")
    found += named_cases((*DATA, "tp", "pp"), init_from="every 2", checkpoint=saved_teacher(tmp_path))
    twice = {"accumulate_grad_batches": 2}
    found += named_cases(("ddp", "zero2", "fsdp"), twice, micro_batches=2, loss="jsd", hidden="cosine")
    found += named_cases(["pp"], twice, micro_batches=2) + named_cases(["tp"], loss="wasserstein")
    assert_parity(text, found + named_cases(("fsdp", "tp"), family="gemma2"), steps=4, rtol=1e-5)
