"""No step of training waits for the device, under any strategy, but where a pipeline has to learn a shape."""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision, Precision
from torch.utils.data import DataLoader

from dlo_framework.defaults import add_default_callbacks
from dlo_framework.testing import run_distributed
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.language import batches, vocabulary_loss
from dlo_tasks.language.causal_lm import CausalLM
from support.strategies import STRATEGIES
from support.token_batches import GROUPED, LENGTH, VOCABULARY, Batches, Tokens
from support.trainers import quiet_trainer
from support.waits import WaitsOfSteps

VIT = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 4}
STEPS, ROWS = 5, 4
#: What waits in the steps after those in which a run warms up.
NOTHING: list[list[str]] = [[]] * (STEPS - 3)


class Packed(Tokens):
    """Rows of two documents each, counted as TextData counts them."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.counts = batches.count_rows(batch)
        return batch

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batches.attach_counts(batch, self.counts)
        return batch


class Plain(Packed):
    """Rows of one document, each token with a target."""

    def train_dataloader(self) -> DataLoader:
        draw = torch.Generator().manual_seed(3)
        tokens = [torch.randint(VOCABULARY, (self.rows, LENGTH + 1), generator=draw) for _ in range(self.steps)]
        batches = [{"input_ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()} for ids in tokens]
        return DataLoader(Batches(batches), batch_size=None)


class Pictures(Tokens):
    """Random pictures."""

    def train_dataloader(self) -> DataLoader:
        pictures: Any = [(torch.randn(ROWS, 3, 16, 16), torch.randint(10, (ROWS,))) for _ in range(self.steps)]
        return DataLoader(Batches(pictures), batch_size=None)


def vit() -> Any:
    task = ImageClassifier("vit_tiny_patch16_224", model_args=VIT, num_classes=10, image_size=16, log_images=0)
    return task, Pictures(1, steps=STEPS)


def llm(data: type[Tokens], attention: str | None = None) -> Any:
    config = {"model_type": "llama", **GROUPED, "num_hidden_layers": 2}
    return CausalLM(config=config, attention=attention), data(1, rows=ROWS, steps=STEPS)


SUBJECTS: dict[str, Any] = {"vit": vit, "packed": partial(llm, Packed), "plain": partial(llm, Plain)}
ALL = {
    **SUBJECTS,
    # As on an accelerator, where `dlo_varlen` is the default.
    **{"varlen": partial(llm, Packed, "dlo_varlen"), "plain varlen": partial(llm, Plain, "dlo_varlen")},
}


def counter_of(
    subject: str, strategy: Any, ranks: int, allowed: tuple[str, ...], precision: Precision | None = None
) -> WaitsOfSteps:
    """Returns the counter of a fit that is set up as `dlo fit` does it, with accelerators' loss over the vocabulary."""
    torch.manual_seed(0)
    task, data = ALL[subject]()
    counter = WaitsOfSteps(allowed)
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(vocabulary_loss, "default_kernel", lambda device: "rows")
        trainer = quiet_trainer(
            enable_checkpointing=True,
            devices=ranks, strategy=strategy, max_steps=STEPS, max_epochs=1,
            callbacks=add_default_callbacks([counter], run_folder=Path(folder), model=task, progress_bar=False),
            gradient_clip_val=0.5, log_every_n_steps=1000, default_root_dir=folder,
            num_sanity_val_steps=0,
            use_distributed_sampler=False, plugins=[] if precision is None else [precision],
        )  # fmt: skip
        trainer.fit(task, datamodule=data)
    return counter


#: What waits all the same.
ALLOWED = (
    # transformers (5.23) looks for packed documents in each forward that it makes a mask for, as `sdpa` has it.
    "masking_utils.py:find_packed_sequence_indices",
)
#: The double of a kernel, which takes lengths from the device.
VARLEN = ("packed_attention.py:varlen_reference",)
#: What a pipeline's schedule needs: the layout of hidden states, once for each shape of micro-batches.
SCHEDULE = "item in exchange.py:receive_object"


#: Where the loss scaler of 16-mixed learns on the host whether gradients have overflown, to leave out the step.
SCALER = "grad_scaler.py:_maybe_opt_step"
#: How torch's sharded scaler updates a scale on a CPU; on an accelerator it calls an operator.
SCALE_ON_CPU = "sharded_grad_scaler.py:_amp_update_scale_cpu_"


def scaled(rank: int, world_size: int, strategy: str, subject: str) -> None:
    """Checks that nothing waits under 16-mixed but the loss scaler, once a step."""
    half = MixedPrecision("16-mixed", "cpu")  # Lightning makes it bf16 on a CPU where it chooses it.
    counter = counter_of(subject, STRATEGIES[strategy](), world_size, (*ALLOWED, SCALER, SCALE_ON_CPU), half)
    assert (counter.steps, counter.let[SCALER]) == (NOTHING, STEPS - 3)


def on_two(rank: int, world_size: int, names: list[str], subjects: list[str]) -> None:
    for name in names:
        for subject in subjects:
            if subject == "vit" and name in ("cp", "ulysses", "sp"):
                continue
            counter = counter_of(subject, STRATEGIES[name](), world_size, ALLOWED)
            assert counter.steps == NOTHING, (name, subject)
            assert counter.first.count(SCHEDULE) == (name == "pp" and rank == 1), (name, counter.first)


@pytest.mark.parametrize("subject", ALL)
def test_one_process_waits_for_nothing(subject: str) -> None:
    assert counter_of(subject, "auto", 1, VARLEN if "varlen" in subject else ALLOWED).steps == NOTHING


def test_two_ranks_wait_for_nothing() -> None:
    """Of each engine one, a mesh's beside a schedule: all is a slow test below."""
    run_distributed(on_two, 2, ["zero3", "pp"], ["packed"], timeout=280)


def test_the_loss_scaler_of_16_mixed_waits_once_a_step() -> None:
    scaled(0, 1, "auto", "vit")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ddp", "zero1", "zero2", "zero3", "fsdp", "tp", "sp", "cp", "ulysses", "pp"])
def test_no_strategy_waits(name: str) -> None:
    run_distributed(on_two, 2, [name], list(SUBJECTS), timeout=280)
    if name not in ("sp", "ulysses", "pp"):
        run_distributed(scaled, 2, name, "packed", timeout=280)
