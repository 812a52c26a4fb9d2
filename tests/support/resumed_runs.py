"""Random runs that are killed or stopped at random places and resumed, and the same run undisturbed.

A run is a :class:`Scenario`, drawn from a seed. :func:`differences` runs it twice, and lists what is not equal to the
bit.
"""

from __future__ import annotations

import contextlib
import io
import math
import random
import shutil
import signal
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping, GradientAccumulationScheduler
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset, WeightedRandomSampler
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, SumMetric

import dlo_framework as dlo
from dlo_framework.checkpoint import load
from dlo_framework.data import ResumableDataModule
from dlo_framework.ema import WeightEMA
from dlo_framework.errors import DloError
from dlo_framework.run import runs
from dlo_framework.run.resume import mid_accumulation
from dlo_tasks.optim import build_optimizer
from support.curricula_runs import images, prepare_texts, texts
from support.strategies import STRATEGIES

SAMPLES, BATCH = 30, 4  # 7 batches an epoch, 8 of a loader that keeps the last sample
FEATURES, CLASSES = 6, 3


@dataclass(frozen=True)
class Event:
    """Interruption of a run at the ``count``-th call of a hook: by a `kill` after a save, a SIGTERM or an `error`."""

    kind: str
    hook: str
    count: int


@dataclass(frozen=True)
class Scenario:
    """Options of a run, and its interruptions."""

    seed: int
    workload: str = "plain"
    precision: str = "32-true"
    optimizer: str = "adamw"
    schedule: str = "none"
    accumulate: int = 1
    manual: bool = False
    loader: str = "dlo"
    epochs: int = 3
    max_steps: int = -1
    min_steps: int = 0
    check: float | int = 1.0
    reload: int = 0
    callbacks: tuple[str, ...] = ()
    events: tuple[Event, ...] = ()
    strategy: str = "auto"
    ranks: int = 1


OURS = ("one_cycle", "wsd", "restarts")
SCHEDULES = ("none", *OURS, "torch one_cycle", "step_lr", "cosine")
PLATEAUS = ("plateau", "plateau train", "plateau step")
LOADERS = (
    *("dlo", "dlo", "dlo workers"),
    *("plain", "shuffled", "shuffled", "workers", "persistent", "generator", "weighted"),
)
OPTIMIZERS = ("adamw", "sgd", "adam", "rmsprop", "lookahead_adamw", "lion", "adamw_schedulefree")
PRECISIONS = ("32-true", "32-true", "bf16-mixed", "bf16-true", "64-true", "16-mixed")
IMAGES = ("resize", "mix", "freeze", "drop tokens", "drop layers", "prune", "quantise", "noise")
KILLS = (*["on_train_batch_end"] * 4, "on_validation_end", "on_train_epoch_end", "on_train_epoch_start")
ERRORS = ("on_train_batch_start", "on_before_backward")
STOPS = ("on_train_batch_start", "on_train_batch_end", *KILLS[-2:], "on_validation_batch_start")


def choose(seed: int) -> Scenario:
    """Returns a random scenario of one process."""
    draw = random.Random(seed)
    one, chance = draw.choice, draw.random
    workload = one(["plain", "plain", "plain", "image", "text"])
    manual = workload == "plain" and chance() < 0.2
    callbacks: list[str] = []
    accumulate = one([1, 1, 2, 3])
    if chance() < 0.25:
        callbacks.append("ema")
    if chance() < 0.3:
        callbacks.append(one(["early train", "early val", "early limit"]))
    if not manual and chance() < 0.2:
        callbacks.append(one(["growing batch", "gas"]))
        accumulate = 1
    if workload == "image":
        callbacks += draw.sample(IMAGES, 2)
    if workload == "text":
        callbacks.append(one(["lengths", "drop layers"]))
    optimizer = one(OPTIMIZERS)
    if "schedulefree" in optimizer:  # It is an average of the weights itself.
        callbacks = [name for name in callbacks if name != "ema"]
    schedule = one([*SCHEDULES, *PLATEAUS])
    if workload != "plain" and schedule not in OURS:
        schedule = "none"
    if manual and schedule in PLATEAUS:
        schedule = "cosine"
    events = []
    for _ in range(one([1, 1, 2, 3])):
        kills, raises = chance() < 0.4, chance() < 0.2
        hook = one(ERRORS if raises else KILLS if kills else STOPS)
        calls = 14 if "batch" in hook or "backward" in hook else 2
        kind = "error" if raises else "kill" if kills else "stop"
        events.append(Event(kind, hook, draw.randint(1, calls)))
    return Scenario(
        seed,
        workload,
        one(PRECISIONS),
        optimizer,
        schedule,
        accumulate,
        manual,
        one(LOADERS) if workload == "plain" else "dlo",
        max_steps=one([-1, -1, -1, 11, 17]),
        check=one([1.0, 1.0, 0.5, 3, 0 if workload == "plain" else 1.0]),
        reload=one([0, 0, 0, 1, 2]),
        callbacks=tuple(callbacks),
        events=tuple(events),
    )


def choose_ranks(seed: int) -> Scenario:
    """Returns a random scenario of two ranks."""
    draw = random.Random(f"ranks {seed}")
    strategy = draw.choice(["ddp", "ddp", "zero2", "zero3", "fsdp", "pp"])
    one = choose(draw.randrange(10**9))
    manual = one.manual and strategy == "ddp"
    workload = "image" if strategy == "pp" else "plain"
    left_out = ("prune", "quantise", "noise", "drop tokens", "freeze", "growing batch", "gas", "drop layers", "lengths")
    callbacks = tuple(name for name in one.callbacks if workload == one.workload or name not in (*IMAGES, "lengths"))
    if strategy == "pp":
        callbacks = tuple(name for name in callbacks if name not in left_out)
    can_raise = strategy != "pp" and one.accumulate == 1  # Stages raise one by one, and windows agree to rounding.
    events = tuple(
        event if can_raise or event.kind != "error" else replace(event, kind="kill", hook="on_train_batch_end")
        for event in one.events
    )
    return replace(
        one,
        seed=seed,
        strategy=strategy,
        ranks=2,
        workload=workload,
        manual=manual,
        callbacks=callbacks,
        events=events,
        loader="dlo" if workload == "image" else one.loader if one.workload == "plain" else "shuffled",
        precision="32-true" if one.precision == "64-true" and strategy != "ddp" else one.precision,
        check=one.check if one.check != 3 else 1.0,
        optimizer="adamw" if one.optimizer in ("lookahead_adamw", "adamw_schedulefree") else one.optimizer,
    )


# --- what is trained -----------------------------------------------------------------------------------------------


class Samples(Dataset):
    """Samples whose augmentation draws from torch's and Python's global generators."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.full((FEATURES,), index / SAMPLES) + 0.1 * torch.randn(FEATURES) + 0.1 * random.random(), index % 3


class Quiet(Dataset):
    """Samples without augmentation: what persistent workers have drawn cannot be restored."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.sin(torch.arange(1.0, FEATURES + 1) * index), index % 3


class Data(ResumableDataModule):
    """Plain loaders, or those of the framework."""

    def __init__(self, kind: str) -> None:
        super().__init__(batch_size=BATCH, num_workers=2 if kind == "dlo workers" else 0, seed=3)
        self.kind = kind
        self.draws = torch.Generator().manual_seed(5)

    def train_dataloader(self) -> Any:
        if self.kind.startswith("dlo"):
            return self.train_loader(Samples())
        options: dict[str, Any] = {"shuffle": self.kind != "plain"}
        if self.kind == "weighted":
            options = {"sampler": WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), SAMPLES)}
        if self.kind == "generator":
            options["generator"] = self.draws
        if self.kind in ("workers", "persistent"):
            options |= {"num_workers": 2, "persistent_workers": self.kind == "persistent"}
        return DataLoader(Quiet() if self.kind == "persistent" else Samples(), batch_size=BATCH, **options)

    def val_dataloader(self) -> Any:
        return self.eval_loader(Quiet()) if self.kind.startswith("dlo") else DataLoader(Quiet(), batch_size=BATCH)


class Net(LightningModule):
    """Draws random numbers in its steps, logs in all of Lightning's ways, and counts in its last hooks of a batch."""

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self.net = nn.Sequential(
            # Statistics of a batch norm are each rank's own, and a checkpoint holds the first one's.
            nn.Linear(FEATURES, 8),
            nn.BatchNorm1d(8) if scenario.ranks == 1 else nn.LayerNorm(8),
            nn.Tanh(),
            nn.Dropout(0.2),
            nn.Linear(8, CLASSES),
        )
        self.scenario = scenario
        self.automatic_optimization = not scenario.manual
        self.mean = MeanMetric()
        self.several = MetricCollection({"sum": SumMetric(), "max": MaxMetric()})
        self.register_buffer("teacher", torch.zeros(CLASSES))
        self.register_buffer("scale", torch.full((FEATURES,), 1.25), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x.to(self.dtype) * (1 + 0.1 * random.random())
        logits = self.net(x * self.scale) + 0.1 * self.teacher
        loss = nn.functional.cross_entropy(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("least", loss.detach(), on_step=False, on_epoch=True, reduce_fx="min")
        self.log("steps", torch.ones(()), on_step=False, on_epoch=True, reduce_fx="sum")
        self.mean(loss.detach().float())
        self.log("metric", self.mean, on_step=False, on_epoch=True)
        self.several.update(loss.detach().float())
        if batch_idx % 3 == 0:
            self.log("sometimes", loss.detach() * 2, on_step=True, on_epoch=True)
        if self.scenario.manual:
            optimizer: Any = self.optimizers()
            self.manual_backward(loss)
            if (batch_idx + 1) % max(2, self.scenario.accumulate) == 0 or self.trainer.is_last_batch:
                optimizer.step()
                optimizer.zero_grad()
                schedule: Any = self.lr_schedulers()
                if schedule is not None:
                    schedule.step()
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        # What the module does in this hook is not in a checkpoint that a callback saves in it.
        if not any((event.kind, event.hook) == ("kill", "on_train_batch_end") for event in self.scenario.events):
            self.teacher += 0.01 * (torch.randn(CLASSES, dtype=torch.float32) if self.scenario.ranks == 1 else 1)

    def on_train_epoch_end(self) -> None:
        self.log_dict({f"all_{name}": value for name, value in self.several.compute().items()})
        self.several.reset()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.rand(3)
        self.log("val_loss", nn.functional.cross_entropy(self.net(batch[0].to(self.dtype)).float(), batch[1]))

    def configure_optimizers(self) -> Any:
        return with_schedule(self.scenario, build_optimizer(self, self.scenario.optimizer, lr=0.01, weight_decay=0.01))


def with_schedule(scenario: Scenario, optimizer: Any) -> Any:
    """Returns an optimizer with one of torch's schedules, if the scenario has one."""
    made = {
        "torch one_cycle": lambda: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps=300),
        "step_lr": lambda: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40),
        "plateau": lambda: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5),
    }
    name = scenario.schedule
    if name not in made and not name.startswith("plateau"):
        return optimizer
    config = {"scheduler": made["plateau" if name.startswith("plateau") else name]()}
    config["interval"] = "step" if name in ("torch one_cycle", "cosine", "plateau step") else "epoch"
    config["monitor"] = "val_loss" if name == "plateau" and scenario.check else "train_loss"
    return {"optimizer": optimizer, "lr_scheduler": config}


class TrainLoss(Callback):
    """Logs the training loss, of which tasks log none."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *_: Any) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        pl_module.log("train_loss", loss.detach().float(), on_step=True, on_epoch=True)


class Pictures(ResumableDataModule):
    """Random images."""

    num_classes, image_size = 10, 16

    def __init__(self) -> None:
        super().__init__(batch_size=BATCH, num_workers=0, seed=3)
        draw = torch.Generator().manual_seed(1)
        self.samples = TensorDataset(torch.randn(SAMPLES, 3, 16, 16, generator=draw), torch.arange(SAMPLES) % 10)

    def train_dataloader(self) -> Any:
        return self.train_loader(self.samples)

    def val_dataloader(self) -> Any:
        return self.eval_loader(self.samples)


# --- what is recorded ----------------------------------------------------------------------------------------------


class Trail(Checkpoint):
    """Records losses, learning rates and metrics by their place in the run; a place that is redone is overwritten."""

    def __init__(self, seen: dict[Any, Any]) -> None:
        self.seen = seen

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
        loss = float(outputs["loss"] if isinstance(outputs, dict) else outputs)
        self.seen["batch", trainer.current_epoch, batch_idx] = (loss, trainer.global_step, *rates)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            at = trainer.fit_loop.epoch_loop.batch_progress.current.ready
            self.seen["validation", trainer.current_epoch, at] = _numbers(trainer.callback_metrics, "val")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen["epoch", trainer.current_epoch] = _numbers(trainer.callback_metrics, "")


def _numbers(metrics: Any, prefix: str) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items() if name.startswith(prefix)}


class Logged(Logger):
    """Records what is logged, by step and name."""

    def __init__(self, seen: dict[Any, Any]) -> None:
        super().__init__()
        self.seen = seen

    name, version = "logged", 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        for name, value in metrics.items():
            if not name.startswith(TIMES):
                self.seen["logged", step, name] = value


#: Measured values, which differ from run to run.
TIMES = ("time/", "memory/", "perf/", "speed/", "throughput", "device/")


# --- interruptions -------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process is killed here."""


class Failed(Exception):
    """The user's code has an error here."""


#: Hooks at which a run is interrupted, or ends after a save.
HOOKS = {*KILLS, *ERRORS, *STOPS, "on_train_batch_end", "on_train_epoch_end", "on_train_end"}


class Interrupt(Checkpoint):
    """Interrupts the run at an event; a :class:`Checkpoint`, so that it comes after all other callbacks.

    A kill comes at the next hook after the save: what the save's own hook logs has then been logged.
    """

    def __init__(self, event: Event | None, aside: Path) -> None:
        self.event, self.aside, self.calls, self.is_saved = event, aside, 0, False
        for hook in HOOKS:
            setattr(self, hook, partial(self._at, hook))

    state_key = "Interrupt"

    def _at(self, hook: str, trainer: Trainer, *_: Any) -> None:
        # A checkpoint inside an accumulation window of several ranks agrees to rounding only.
        in_window = hook == "on_train_batch_end" and trainer.world_size > 1 and mid_accumulation(trainer)
        if self.is_saved:
            raise Killed
        event = self.event
        if event is None or hook != event.hook or trainer.sanity_checking or in_window:
            return
        self.calls += 1
        if self.calls != event.count:
            return
        if event.kind == "error":
            raise Failed
        if event.kind == "kill":
            trainer.save_checkpoint(self.aside)
            self.is_saved = True
        else:
            signal.raise_signal(signal.SIGTERM)

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        if self.event is not None and self.event.hook == "training_step":
            # In the middle of a forward pass, while a sharded layer's weights may be gathered.
            pl_module.net[-1].register_forward_pre_hook(lambda *_: self._at("training_step", trainer))


# --- runs ----------------------------------------------------------------------------------------------------------


def build(scenario: Scenario, folder: Path) -> tuple[Any, Any, list[Callback]]:
    """Returns module, data and callbacks."""
    callbacks: list[Callback] = []
    schedules = {
        "one_cycle": lambda: dlo.OneCycle(0.02),
        "wsd": lambda: dlo.WSD(0.02, warmup=0.2, decay=0.3),
        "restarts": lambda: dlo.WarmRestarts(0.02, cycles=3),
    }
    if scenario.schedule in schedules:
        callbacks.append(schedules[scenario.schedule]())
    made = {
        "ema": lambda: WeightEMA(0.8),
        "early train": lambda: EarlyStopping("train_loss", patience=0, min_delta=0.01),
        "early val": lambda: EarlyStopping("val_loss", patience=1, strict=False),
        "early limit": lambda: EarlyStopping("train_loss", stopping_threshold=1.2, strict=False),
        "growing batch": lambda: dlo.DynamicBatchSize({0: 4, 1: 8, 2: 12}),
        "gas": lambda: GradientAccumulationScheduler({0: 1, 1: 3, 2: 2}),
        "resize": lambda: dlo.ProgressiveResizing(start_size=8, end_size=16, begin="20%", end="60%"),
        "mix": lambda: dlo.BatchMix(mixup_alpha=0.8, cutmix_alpha=1.0),
        "freeze": lambda: dlo.Freeze(t0=0.3),
        "drop tokens": lambda: dlo.TokenDrop(multiple=1),
        "drop layers": lambda: dlo.LayerDrop(),
        "prune": lambda: dlo.Prune(amount=0.5, begin="10%", end="80%", every=2),
        "quantise": lambda: dlo.Quantise(when="aware", start="30%", report=False),
        "noise": lambda: dlo.GradientNoise(),
        "lengths": lambda: dlo.SequenceLength(start=8, until="60%"),
    }
    callbacks += [dlo.ScheduleFree()] if "schedulefree" in scenario.optimizer else []
    callbacks += [made[name]() for name in scenario.callbacks if name in made]
    if scenario.workload == "plain":
        return Net(scenario), Data(scenario.loader), callbacks
    options = {"optimizer": scenario.optimizer, "schedule": "constant", "weight_decay": 0.01}
    callbacks.append(TrainLoss())
    if scenario.workload == "image":
        task, _ = images(model_args={"depth": 3, "proj_drop_rate": 0.1}, **options)
        data: Any = Pictures()
    else:
        folder.mkdir(parents=True, exist_ok=True)
        prepare_texts(folder)
        task, data = texts(folder, config={"num_hidden_layers": 2}, data={"batch_size": 16}, **options)
    return task, data, callbacks


def run(scenario: Scenario, folder: Path, seen: dict[Any, Any], event: Event | None, resumes: bool) -> bool:
    """Trains until the event or the end; returns whether it came to its end."""
    last = folder / "run" / "version_0" / runs.CHECKPOINTS / runs.LAST
    resumes = resumes and last.exists()  # After an error before the first step the run starts again.
    seed_everything(1, workers=True, verbose=False)
    if resumes:  # A resumed process comes from elsewhere.
        torch.rand(17), random.random()
    module, data, callbacks = build(scenario, folder)
    aside = folder / "aside.ckpt"
    trainer = dlo.Trainer(
        run_name="run",
        run_dir=folder,
        accelerator="cpu",
        devices=scenario.ranks,
        strategy=STRATEGIES[scenario.strategy]() if scenario.ranks > 1 else "auto",
        **precision(scenario.precision),
        max_epochs=scenario.epochs,
        max_steps=scenario.max_steps,
        min_steps=scenario.min_steps or None,
        accumulate_grad_batches=1 if scenario.manual else scenario.accumulate,
        val_check_interval=scenario.check or 1.0,
        limit_val_batches=1.0 if scenario.check else 0,
        reload_dataloaders_every_n_epochs=scenario.reload,
        log_every_n_steps=2,
        logger=Logged(seen),
        callbacks=[Trail(seen), *callbacks, Interrupt(event, aside)],
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0 if scenario.seed % 2 else 1,
    )
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            trainer.fit(module, datamodule=data, ckpt_path=last if resumes else None)
    except Killed:
        if trainer.is_global_zero:
            shutil.rmtree(last, ignore_errors=True)
            shutil.copytree(aside, last)
        if scenario.ranks > 1:
            dist.barrier()
        return False
    except Failed:
        if scenario.ranks > 1:
            dist.barrier()
        if not last.exists():
            shutil.rmtree(folder / "run", ignore_errors=True)
        return False
    except SystemExit as ended:
        if ended.code != 143:
            raise
        return False
    return True


def precision(name: str) -> dict[str, Any]:
    """Returns the Trainer's options for a precision; on the CPU Lightning takes 16-mixed as a plug-in only.

    Its scaler begins so high that steps are skipped, and grows every few steps.
    """
    if name != "16-mixed":
        return {"precision": name}
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**18, growth_interval=3)
    return {"plugins": [MixedPrecision(name, "cpu", scaler)]}


def final_state(folder: Path) -> dict[str, Any]:
    """Returns the parts of the last checkpoint's state."""
    saved = load(folder / "run" / "version_0" / runs.CHECKPOINTS / runs.LAST)
    parts = ("state_dict", "optimizer_states", "lr_schedulers", "current_model_state", "global_step")
    return {part: saved[part] for part in parts if part in saved}


#: Answer for a run that ended before its first interruption.
UNDISTURBED = "not interrupted"


def differences(scenario: Scenario, folder: Path) -> list[str]:
    """Returns what differs between the run undisturbed and interrupted; empty if nothing."""
    whole: dict[Any, Any] = {}
    parts: dict[Any, Any] = {}
    try:
        run(scenario, folder / "whole", whole, None, False)
    except DloError:  # Its parts do not go together.
        return [UNDISTURBED]
    interruptions = 0
    for number, event in enumerate([*scenario.events, None]):
        if run(scenario, folder / "parts", parts, event, bool(number)):
            break
        interruptions += 1
    found = []
    for key in dict.fromkeys([*whole, *parts]):
        if not same(whole.get(key), parts.get(key)):
            found += [f"{key}: {line}" for line in _compared(whole.get(key), parts.get(key))]
    one, other = final_state(folder / "whole"), final_state(folder / "parts")
    ends = [key for key in {**one, **other} if not same(one.get(key), other.get(key))]
    found += [f"{key} differs at the end: {str(one.get(key))[:60]} {str(other.get(key))[:60]}" for key in ends]
    return found if interruptions else [UNDISTURBED]


def _compared(one: Any, other: Any) -> list[str]:
    if isinstance(one, dict) and isinstance(other, dict):
        names = [name for name in {**one, **other} if not same(one.get(name), other.get(name))]
        return [f"{name} {one.get(name)} undisturbed, {other.get(name)} resumed" for name in names]
    return [f"{one} undisturbed, {other} resumed"]


def same(one: Any, other: Any) -> bool:
    """Returns whether two values are equal to the bit; NaN equals NaN."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.dtype == other.dtype and torch.equal(one.nan_to_num(7.25), other.nan_to_num(7.25))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float) and isinstance(other, float):
        return one == other or (math.isnan(one) and math.isnan(other))
    return bool(one == other)


def differences_on_ranks(rank: int, world_size: int, seeds: list[int], folder: str) -> dict[int, list[str]]:
    """Returns :func:`differences` of scenarios of two ranks, each as a rank sees them, by seed."""
    return {seed: differences(choose_ranks(seed), Path(folder) / str(seed)) for seed in seeds}
