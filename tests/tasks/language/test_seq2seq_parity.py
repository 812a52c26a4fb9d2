"""Encoder-decoder models train on several ranks as in one process, also where stages divide both stacks."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from dlo_framework.checkpoint import load
from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.testing import Case, assert_parity, run_distributed
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.model_folders import write_folder
from dlo_tasks.language.seq2seq_lm import Seq2SeqLM
from support.checkpoints import check_same
from support.seq2seq import FAMILIES, Pairs, seq2seq_config
from support.strategies import PP, STRATEGIES
from support.trainers import quiet_trainer

DATA = ("ddp", "fsdp", "zero1", "zero2", "zero3", "tp", "pp", "deepspeed_1", "deepspeed_2", "deepspeed_3")
DOUBLE = {"precision": "64-true"}
CLIPPED = DOUBLE | {"gradient_clip_val": 0.1}


def build(family: str, lora: int = 0, packed: bool = False, **options: Any) -> tuple[Seq2SeqLM, Pairs]:
    more: dict[str, Any] = {"lr": 1e-3, "optimizer_args": {"eps": 1e-4}, **options}
    task = Seq2SeqLM(config=seq2seq_config(family), lora=Lora(rank=lora) if lora else None, **more)
    return task, Pairs(1, packed=packed)


def cases(family: str, names: Any, trainer: dict[str, Any] | None = None, **options: Any) -> list[Case]:
    arguments = {"family": family, **options}
    return [Case(STRATEGIES[name], arguments, trainer or {}, f"{name}, {arguments}") for name in names]


def staged(family: str, arguments: dict[str, Any] | None = None, **options: Any) -> Case:
    """A case in which stages divide both stacks."""
    given = {"family": family, **(arguments or {})}
    return Case(partial(PP, **options), given, CLIPPED, f"{given}, {options}")


def test_strategies_are_one_process() -> None:
    """Of each way to divide weights one, in double precision, with tied embeddings and biases of positions."""
    found = cases("t5", ("zero3", "tp", "pp"), DOUBLE) + cases("bart", ("fsdp",), DOUBLE)
    assert_parity(build, found, steps=2, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_strategy_is_one_process(family: str) -> None:
    found = cases(family, DATA) + cases(family, ("fsdp", "zero3", "tp", "pp"), recompute=True)
    found += cases(family, ("ddp", "fsdp", "zero3", "pp"), lora=4)
    assert_parity(build, found, steps=3, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_stages_of_both_stacks_are_one_process_on_two_ranks() -> None:
    schedules: list[dict[str, Any]] = [
        {"schedule": name} for name in ("1F1B", "GPipe", "ZBH1", "Interleaved1F1B", "ZBV")
    ]
    splits: list[dict[str, Any]] = [{"split": counts} for counts in ([1, 3], [3, 1])]
    found = [staged(family, **one) for family in ("t5", "bart") for one in (*schedules, *splits)]
    found += [staged("t5", {"packed": True}, **one) for one in splits]
    found += [staged(family, {"recompute": True}, split=[3, 1]) for family in ("mt5", "pegasus")]
    assert_parity(build, found, steps=2, rtol=1e-9)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_stages_of_both_stacks_are_one_process_on_four_ranks() -> None:
    deep = {"pp": 4, "micro_batches": 4}
    ways: list[dict[str, Any]] = [deep, deep | {"schedule": "ZBH1"}, {"dp_replicate": 2}, {"dp_shard": 2}, {"tp": 2}]
    found = [staged(family, **way) for family in ("t5", "bart") for way in ways]
    assert_parity(build, found, world_size=4, steps=2, rtol=1e-9)


def _train(rank: int, world_size: int, folder: Path, family: str) -> None:
    for name, steps, resumed in (("straight", 4, None), ("half", 2, None), ("resumed", 4, "half")):
        torch.manual_seed(0)
        trainer = quiet_trainer(
            devices=world_size,
            strategy=MeshStrategy(pp=2, micro_batches=2),
            max_steps=steps,
            default_root_dir=folder,
        )
        use_canonical_checkpoints(trainer)
        path = None if resumed is None else folder / f"{resumed}.ckpt"
        task, data = build(family, schedule="constant")
        data.steps = 2  # Of an epoch: these data begin anew with each.
        trainer.fit(task, datamodule=data, ckpt_path=path, weights_only=False)
        trainer.save_checkpoint(folder / f"{name}.ckpt")


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_stages_resume_bit_for_bit_and_are_read_by_transformers(tmp_path: Path, family: str) -> None:
    run_distributed(_train, 2, tmp_path, family, backend=None)
    check_same(tmp_path / "straight.ckpt", tmp_path / "resumed.ckpt")
    checkpoint = load(tmp_path / "resumed.ckpt")
    write_folder(checkpoint, tmp_path / "folder")
    read = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "folder")
    alone = build(family)[0]
    assert {f"model.{name}" for name in read.state_dict()} == set(checkpoint["state_dict"])
    alone.configure_model()
    alone.load_state_dict(checkpoint["state_dict"])
    ids = torch.randint(3, 60, (2, 9))
    models: list[Any] = [alone.model, read]
    logits = [one.eval()(input_ids=ids, decoder_input_ids=ids).logits for one in models]
    torch.testing.assert_close(*logits, rtol=0, atol=0)
