"""Short runs for tests of schedules: small models whose blocks any strategy can cut, and their last state."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer, seed_everything
from torch import Tensor

from dlo_framework.checkpoint import load
from dlo_framework.distributed.strategy import register_data_parallel, use_canonical_checkpoints
from dlo_framework.errors import DloError
from dlo_framework.run.resume import ExactResume
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.text_data import TextData
from support.runs import Watch
from support.strategies import STRATEGIES
from support.texts import lines, sentences
from support.trainers import quiet_trainer

VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 4, "num_heads": 4}
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


def images(kind: type[ImageClassifier] = ImageClassifier, **options: Any) -> tuple[Any, Any]:
    """Returns a small ViT and the digits."""
    batch = options.pop("batch_size", 8)
    given = {"lr": 1e-2, "optimizer_args": {"eps": 1e-4}, "schedule": "constant", "log_images": 0, **options}
    given["model_args"] = {**VIT, **given.get("model_args", {})}
    task = kind("vit_tiny_patch16_224", num_classes=10, **given)
    return task, DigitsData(image_size=16, batch_size=batch)


def prepare_texts(folder: Path) -> None:
    """Writes the texts that :func:`texts` reads."""
    lines(folder / "texts.jsonl", *({"text": text} for text in sentences(200)))


def texts(folder: Path, kind: type[CausalLM] = CausalLM, **options: Any) -> tuple[Any, Any]:
    """Returns a small Llama and packed texts."""
    data = {
        "train_files": str(folder / "texts.jsonl"),
        "cache_dir": str(folder / "cache"),
        "seq_len": 32,
        "batch_size": 8,
        "vocab_size": 320,
        "corpus_bytes": 60_000,
        **options.pop("data", {}),
    }
    given = {"lr": 1e-2, "optimizer_args": {"eps": 1e-4}, "schedule": "constant", **options}
    return kind(config={**LLAMA, **given.pop("config", {})}, **given), TextData(**data)


def fit(
    folder: Path,
    made: tuple[Any, Any],
    strategy: str,
    world_size: int,
    callbacks: Sequence[Callback],
    *,
    epochs: int = 2,
    batches: int = 4,
    max_steps: int = -1,
    ckpt_path: Path | None = None,
    check: bool = True,
    **options: Any,
) -> tuple[list[float], Trainer]:
    """Trains, saves `last.ckpt` in the folder, and returns the losses, means over the ranks, and the trainer."""
    register_data_parallel()
    module, data = made
    watch = Watch()
    given = {
        "devices": world_size,
        "strategy": STRATEGIES[strategy](),
        "max_epochs": epochs,
        "max_steps": max_steps,
        "limit_train_batches": batches,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "default_root_dir": folder,
        **options,
    }
    with contextlib.redirect_stdout(io.StringIO()):
        trainer = quiet_trainer(callbacks=[*callbacks, watch, ExactResume()], **given)
        use_canonical_checkpoints(trainer)
        module.check(data)
        if hasattr(trainer.strategy, "check_model"):
            trainer.strategy.check_model(module, data)
        for callback in callbacks if check else ():
            if hasattr(callback, "check_run"):
                callback.check_run(trainer, module, data)
        trainer.fit(module, datamodule=data, ckpt_path=None if ckpt_path is None else str(ckpt_path))
        trainer.save_checkpoint(folder / "last.ckpt")
    return watch.losses, trainer


def seeded(seed: int = 3) -> None:
    """Seeds a run."""
    seed_everything(seed, workers=True, verbose=False)


def refusal(call: Callable[[], Any]) -> str:
    """Returns the message of the DloError that a call raises; empty if it raises none."""
    try:
        call()
    except DloError as error:
        return str(error)
    return ""


def assert_refused(message: str, folder: Path, made: tuple[Any, Any], *callbacks: Callback, **options: Any) -> None:
    """Asserts that a run of one process with some callbacks is refused with a message that has these words."""
    assert message in refusal(lambda: fit(folder, made, "auto", 1, callbacks, **options))


def saved_state(path: Path) -> dict[str, Tensor]:
    """Returns the weights and the optimizer's state of a checkpoint, each as a full tensor."""
    found = load(path)
    state = {name: found["state_dict"][name].clone() for name in found["state_dict"]}
    for number, optimizer in enumerate(found["optimizer_states"]):
        for name, values in optimizer["state"].items():
            for key, value in values.items():
                if isinstance(value, Tensor):
                    state[f"optimizer {number}: {name}.{key}"] = value.clone()
    return state


def apart(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    """Returns the largest differences of two states, relative to a tensor's largest value; infinite for other keys."""
    found = dict.fromkeys(one.keys() ^ other.keys(), float("inf"))
    for name in one.keys() & other.keys():
        scale = one[name].double().abs().max().clamp(min=1e-3)
        found[name] = float((one[name].double() - other[name].double()).abs().max() / scale)
    return {name: value for name, value in found.items() if value}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Returns whether two states are equal to the bit."""
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def check_resume(
    folder: Path, make: Callable[[], Callback], data: Callable[[], tuple[Any, Any]], **options: Any
) -> list[float]:
    """Checks that a run which stops after its fifth batch goes on to the bit; returns the losses of the whole run.

    Args:
        folder: Folder for the checkpoints.
        make: Function that returns the callback of each run.
        data: Function that returns task and data of each run.
        options: Options of :func:`fit`.
    """
    for name in ("whole", "part", "rest"):
        (folder / name).mkdir(parents=True)
    checkpoint = folder / "part.ckpt"
    seeded()
    whole, _ = fit(folder / "whole", data(), "auto", 1, [make()], **options)
    seeded()
    fit(folder / "part", data(), "auto", 1, [make(), Watch(checkpoint, batch=5, stops=True)], **options)
    seeded(9)
    rest, _ = fit(folder / "rest", data(), "auto", 1, [make()], ckpt_path=checkpoint, **options)
    assert rest == whole[5:]
    assert same(saved_state(folder / "whole" / "last.ckpt"), saved_state(folder / "rest" / "last.ckpt"))
    return whole
