"""What parity verdicts are tried on: small models, strategies on two and four ranks, faults planted on the ranks.

Ranks and the one process are forked once and train case after case, so that a training costs what its steps do.
"""

from __future__ import annotations

import dataclasses
import itertools
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, seed_everything
from torch import Tensor
from torch.utils.data import Dataset

from dlo_framework.data import ResumableDataModule, data_parallel_coordinates
from dlo_framework.testing import Comparison, run_distributed
from dlo_framework.testing.compare import RTOL
from dlo_framework.testing.parity import verdict
from dlo_framework.testing.record import Record, merge_records
from dlo_framework.testing.training import Setting, record_training, silence_lightning
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from dlo_tasks.language.causal_lm import CausalLM

STEPS, ROWS, LENGTH, VOCABULARY = 6, 8, 24, 96
#: Trainings after which ranks are forked again, because each training leaves process groups and their threads.
RENEW = 60

_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
#: GPT-2 has 185,000 parameters; the others are those of transformers that gave false alarms.
MODELS: dict[str, dict[str, Any] | None] = {
    "gpt2": {"vocab_size": 256, "n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 256},
    "glm4": {**_SIZES, "head_dim": 16},
    "qwen2_moe": {
        **_SIZES,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
    },
    "lfm2": {**_SIZES, "layer_types": ["conv", "full_attention"]},
    "starcoder2": _SIZES,
    "vit": None,
}
#: Number of ranks, and the strategy.
STRATEGIES: dict[str, tuple[int, Callable[[], Any]]] = {
    "ddp": (2, lambda: "ddp"),
    "zero3": (2, partial(ZeroStrategy, stage=3)),
    "tp": (2, partial(MeshStrategy, dp_shard=1, tp=2)),
    "pp": (2, partial(MeshStrategy, dp_shard=1, pp=2, micro_batches=4)),
    "cp": (2, partial(MeshStrategy, dp_shard=1, cp=2)),
    "pp x tp": (4, partial(MeshStrategy, dp_shard=1, pp=2, tp=2, micro_batches=4)),
}


class RandomTokens(Dataset):
    """Random tokens, those of one number as likely as its inverse."""

    def __init__(self, rows: int, seed: int) -> None:
        weights = 1.0 / torch.arange(1, VOCABULARY)
        draw = torch.Generator().manual_seed(seed)
        self.ids = 1 + torch.multinomial(weights, rows * (LENGTH + 1), True, generator=draw).view(rows, LENGTH + 1)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[index, :-1].clone(), "labels": self.ids[index, 1:].clone()}


class TokensData(ResumableDataModule):
    """Random tokens for training and validation, the same number of targets in each row."""

    def __init__(self, seed: int) -> None:
        super().__init__(batch_size=ROWS, num_workers=0)
        self.rows_seed = seed

    def train_dataloader(self) -> Any:
        return self.train_loader(RandomTokens(ROWS * STEPS, self.rows_seed))

    def val_dataloader(self) -> Any:
        return self.eval_loader(RandomTokens(2 * ROWS, self.rows_seed + 1))


def build(model: str, seed: int) -> tuple[Any, Any]:
    """Returns a model with random weights, and its data."""
    recipe: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.1}
    config = MODELS[model]
    if config is not None:
        return CausalLM(config={"model_type": model, **config}, **recipe), TokensData(seed)
    args = {"img_size": 16, "patch_size": 4, "embed_dim": 64, "depth": 2, "num_heads": 4}
    task = ImageClassifier("vit_tiny_patch16_224", model_args=args, num_classes=10, **recipe)
    return task, DigitsData(image_size=16, batch_size=2 * ROWS, num_workers=0)


# --- faults ----------------------------------------------------------------------------------------------------


class SeenTokens(Callback):
    """Keeps a buffer that each step changes, as a norm keeps its statistics; with a fault, one change is lost."""

    def __init__(self, stale: bool) -> None:
        self.stale = stale

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Registers the buffer."""
        if "seen" not in dict(pl_module.named_buffers(recurse=False)):
            pl_module.register_buffer("seen", torch.zeros(()))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Counts a step."""
        if not (self.stale and trainer.world_size > 1 and batch_idx == STEPS - 1):
            pl_module.seen += batch_idx / 7


class Fault(Callback):
    """Plants a fault on the ranks, and does nothing in one process.

    Args:
        kind: Kind of fault; see :data:`FAULTS`.
        number: Index of the parameter, direction or step.
        names: All trained parameters of the full model.
    """

    def __init__(self, kind: str, number: int, names: list[str]) -> None:
        self.kind, self.number, self.names = kind, number, names

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Replaces the training step."""
        if trainer.world_size == 1 or self.kind not in ("share", "dropout"):
            return
        inner = pl_module.training_step

        def training_step(batch: Any, batch_idx: int) -> Any:
            if self.kind == "share":  # This rank's gradients are lost in one step; its loss is as it was.
                loss = inner(batch, batch_idx)
                lost = trainer.global_rank == 1 and batch_idx == 1 + self.number % 4
                return _without_gradient(loss) if lost else loss
            embedding = next(m for m in pl_module.modules() if isinstance(m, torch.nn.Embedding | torch.nn.Conv2d))
            hook = embedding.register_forward_hook(lambda *all_of: torch.nn.functional.dropout(all_of[-1], 0.05))
            try:
                return inner(batch, batch_idx)
            finally:
                hook.remove()

        pl_module.training_step = training_step

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Sets what the run is to be told wrongly."""
        if trainer.world_size == 1:
            return
        if self.kind == "weight_decay":
            for group in (group for optimizer in trainer.optimizers for group in optimizer.param_groups):
                group["weight_decay"] *= (0.0, 0.5, 0.9, 1.1)[self.number % 4]
        if self.kind == "clip":
            trainer.gradient_clip_val *= (0.9, 0.99, 1.01, 1.1)[self.number % 4]

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Skips one sample of one batch."""
        if self.kind != "sample" or trainer.world_size == 1:
            return
        skips = data_parallel_coordinates(trainer)[0] == 0  # All ranks that share the batch, or collectives differ.
        if skips and batch_idx == 1 + self.number % 4:
            batch["labels"][0] = -100

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Scales one gradient by a thousandth."""
        if self.kind != "scale" or trainer.world_size == 1:
            return
        wanted = self.names[self.number * 7 % len(self.names)]
        for name, tensor in trainer.strategy.optimizer_tensors(optimizer).items():
            if name == wanted and tensor.grad is not None:
                tensor.grad.mul_(1 + 1e-3 if self.number % 2 else 1 - 1e-3)


def _without_gradient(outputs: Any) -> Any:
    if isinstance(outputs, dict):
        return {**outputs, "loss": _without_gradient(outputs["loss"])}
    return outputs * 0 + outputs.detach()


#: What cannot be: images have no sequence to share, and lfm2's convolutions are not cut.
UNSERVED = {("vit", "cp"), ("lfm2", "tp"), ("lfm2", "cp"), ("lfm2", "pp x tp")}
#: Kinds of faults: on which strategies each is planted, and how many of 60.
FAULTS: dict[str, tuple[tuple[str, ...], int]] = {
    "scale": (tuple(STRATEGIES), 20),
    "share": (("ddp", "zero3"), 6),
    "buffer": (("ddp", "zero3"), 6),
    "clip": (tuple(STRATEGIES), 8),
    "weight_decay": (tuple(STRATEGIES), 8),
    "dropout": (("ddp", "zero3"), 6),
    "sample": (("ddp", "zero3", "tp", "cp"), 6),
}


# --- cases -----------------------------------------------------------------------------------------------------


class Trial(NamedTuple):
    """One verdict to ask for.

    Attributes:
        model: Name of the model.
        strategy: Name of the strategy.
        seed: Seed of weights and data.
        fault: Kind of the fault, and its number; None for none.
    """

    model: str
    strategy: str
    seed: int
    fault: tuple[str, int] | None = None


def clean_trials(seeds: range) -> Iterator[Trial]:
    """Yields trials without a fault, seed by seed."""
    for seed, model, strategy in itertools.product(seeds, MODELS, STRATEGIES):
        if (model, strategy) not in UNSERVED:
            yield Trial(model, strategy, seed)


def faulty_trials(part: float = 1.0) -> Iterator[Trial]:
    """Yields trials with faults: 60, or a part of each kind."""
    models = list(MODELS)
    for place, (kind, (strategies, count)) in enumerate(FAULTS.items()):
        for number in range(max(1, round(count * part))):
            model = models[(number + place) % (len(models) - (kind == "sample"))]
            strategy = strategies[number % len(strategies)]
            if (model, strategy) in UNSERVED or (model == "qwen2_moe" and "pp" in strategy):
                model = "gpt2"
            yield Trial(model, strategy, 1000 + number, (kind, number))


def _train(rank: int, trial: Trial, setting: Setting) -> Record:
    seed_everything(setting.seed, workers=True, verbose=False)
    model, data = build(trial.model, setting.seed)
    callbacks: list[Callback] = [SeenTokens(trial.fault is not None and trial.fault[0] == "buffer")]
    if trial.fault is not None:
        names = sorted(name for name, parameter in model.on_meta().named_parameters() if parameter.requires_grad)
        callbacks.append(Fault(*trial.fault, names))
    options = {"accelerator": "cpu", "gradient_clip_val": 0.5, "callbacks": callbacks}
    strategy = STRATEGIES[trial.strategy][1]() if setting.ranks is not None else "auto"
    record = record_training(model, data, options, setting, strategy)
    if rank:
        record.weights, record.optimizer = {}, {}
    return record


def serve(rank: int, world_size: int, address: str) -> None:
    """Trains what is asked for over a connection, until it is closed; runs on a rank."""
    from dlo_framework.distributed.strategy import register_data_parallel

    silence_lightning()
    register_data_parallel()
    with Client(address) as connection:
        connection.send(rank)
        while True:
            try:
                trial, setting = connection.recv()
            except EOFError:
                return
            try:
                answer = _train(rank, trial, setting)
            except Exception as error:
                connection.send(f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}")
                return  # With it go its links, so that no other rank waits for it.
            connection.send(answer)


def _received(connection: Connection) -> Any:
    try:
        return connection.recv()
    except EOFError:
        return "the rank has ended"


class Workers:
    """Processes that train one case after another, in one process group.

    Args:
        count: Number of ranks; 1 trains as one process.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._connections: list[Connection] = []
        self._done = 0

    def train(self, trial: Trial, setting: Setting) -> Any:
        """Returns the record of all ranks; a string where one failed."""
        if self._done % RENEW == 0:
            self.close()
            self._start()
        self._done += 1
        for connection in self._connections:
            connection.send((trial, setting))
        answers = [_received(connection) for connection in self._connections]
        failed = next((answer for answer in answers if isinstance(answer, str)), None)
        if failed is not None:
            self.close()
            self._done = 0
        return failed if failed is not None else merge_records(answers) if setting.ranks is not None else answers[0]

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        address = str(Path(self._folder.name) / "socket")
        with Listener(address) as listener:
            self._thread = threading.Thread(
                target=run_distributed, args=(serve, self.count, address), kwargs={"timeout": 1e6, "backend": None}
            )
            self._thread.start()
            found = [listener.accept() for _ in range(self.count)]
            self._connections = [c for _, c in sorted((c.recv(), c) for c in found)]

    def close(self) -> None:
        """Ends the processes."""
        for connection in self._connections:
            connection.close()
        if self._connections:
            self._thread.join()  # What it may raise is a rank's end, of which the answer has told.
            self._folder.cleanup()
        self._connections = []


class Judge:
    """Asks for verdicts; runs of one process are shared by the strategies that are compared with them."""

    def __init__(self) -> None:
        self.alone = Workers(1)
        self.ranks = {count: Workers(count) for count in {count for count, _ in STRATEGIES.values()}}
        self._kept: dict[Any, Any] = {}
        self.trainings = 0

    def judge(self, trial: Trial) -> Comparison | str:
        """Returns the comparison; a string where the strategy refuses the model."""
        setting = Setting(STEPS, trial.seed, ranks=STRATEGIES[trial.strategy][0])
        runs = verdict(f"{trial.model} {trial.strategy}", setting, precision=None, rtol=RTOL)
        wanted, shares = next(runs), 1
        while True:
            records = []
            for setting in wanted:
                answer = self._train(trial, setting, shares)
                if isinstance(answer, str) and not setting.double:
                    return answer
                records.append(answer)
                if setting.ranks is not None and isinstance(answer, Record):
                    shares = answer.place[1]
            try:
                wanted = runs.send(records)
            except StopIteration as end:
                comparison: Comparison = end.value
                return comparison

    def _train(self, trial: Trial, setting: Setting, shares: int) -> Any:
        if setting.ranks is not None:
            self.trainings += 1
            return self.ranks[setting.ranks].train(trial, setting)
        # The datamodules' batches are the global ones, whatever their shares; a fault is the ranks'.
        key = (trial.model, setting)
        if key not in self._kept:
            if len(self._kept) > 40:
                self._kept.clear()
            self.trainings += 1
            self._kept[key] = self.alone.train(trial._replace(fault=None), dataclasses.replace(setting, shares=shares))
        return self._kept[key]

    def close(self) -> None:
        """Ends all processes."""
        for workers in (*self.ranks.values(), self.alone):
            workers.close()
