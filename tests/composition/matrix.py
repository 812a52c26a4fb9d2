"""What is composed with what: callbacks and trainer options x strategies x tasks, each in a short run of its own.

A cell *works* if its losses, gradient norms, validation and weights are those of one process with the same callbacks;
it is *refused* if every rank says so, in a DloError, before the first step. Anything else is broken.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from lightning.pytorch import seed_everything
from PIL import Image
from torch import Tensor

from dlo_framework.defaults import add_default_callbacks
from dlo_framework.distributed.strategy import register_data_parallel, use_canonical_checkpoints
from dlo_framework.errors import DloError
from dlo_framework.frozen_model import FrozenModel
from dlo_framework.models.attention import Attention, SlidingWindow
from dlo_framework.models.experts import MixtureOptions
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import Record, Recorder, merge_records
from dlo_plugins.batches.dynamic_batch_size import DynamicBatchSize
from dlo_plugins.compile.callback import Compile
from dlo_plugins.compile.compile_blocks import CompileBlocks
from dlo_plugins.compression.diloco import DiLoCo
from dlo_plugins.curriculum.difficulty_order import DifficultyOrder
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.distill.callback import Distill
from dlo_plugins.memory.activation_checkpoint import ActivationCheckpoint
from dlo_plugins.memory.optimizer_in_backward import OptimizerInBackward
from dlo_plugins.memory.rotor_callback import Rotor
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_plugins.quantise.low_precision import LowPrecision
from dlo_plugins.weights.start_from import StartFrom
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.imagenet.digits import DigitsData
from dlo_tasks.imagenet.folder import ImageFolderData
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.text_data import TextData
from support.doc_pages import entry_points
from support.texts import lines, sentences
from support.trainers import quiet_trainer

BATCH, STEPS, EPOCHS = 8, 3, 2
#: Without a larger eps, Adam makes whole steps of the rounding of gradients that cancel to nothing.
_OPTIMIZER: dict[str, Any] = {"lr": 1e-3, "optimizer_args": {"eps": 1e-4}, "schedule": "constant"}
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


@dataclass(frozen=True)
class With:
    """What is put beside a strategy.

    Attributes:
        callbacks: makes them.
        trainer: further options of the trainer.
        tasks: for which it is made.
        batch_size: of the data.
        photographs: whether images come from a folder, in sizes of their own.
        alone: whether one process can have it too; else it is compared with one that has nothing beside it.
        rtol: of losses and norms; weights are compared where it is that of single precision.
        model_args: further arguments of the images' model, or settings of the texts'.
        task_args: further arguments of the task.
        joint: whether ranks have the gradients of all when the optimizer steps; else no norms are compared.
        options: options of the strategy.
        absent: why a class of strategy, by its name, has no such options; the empty name is for all others.
        single: makes the strategy of one process, which has the options too.
    """

    callbacks: Callable[[], list[Any]] = list
    trainer: tuple[tuple[str, Any], ...] = ()
    tasks: tuple[str, ...] = ("ImageClassifier", "CausalLM")
    batch_size: int = BATCH
    photographs: bool = False
    alone: bool = True
    rtol: float = 1e-5
    model_args: tuple[tuple[str, Any], ...] = ()
    task_args: tuple[tuple[str, Any], ...] = ()
    joint: bool = True
    options: tuple[tuple[str, Any], ...] = ()
    absent: tuple[tuple[str, str], ...] = ()
    single: Callable[[], Any] | None = None


def pictures(folder: Path, what: With) -> tuple[Any, Any]:
    data: Any = DigitsData(image_size=16, batch_size=what.batch_size)
    if what.photographs:
        data = ImageFolderData(root=str(folder / "photos"), image_size=16, batch_size=what.batch_size, num_workers=0)
    classes = 2 if what.photographs else 10
    args = VIT | dict(what.model_args)
    options = _OPTIMIZER | dict(what.task_args)
    return ImageClassifier("vit_tiny_patch16_224", model_args=args, num_classes=classes, **options), data


def words(folder: Path, what: With) -> tuple[Any, Any]:
    data = TextData(
        train_files=str(folder / "texts.jsonl"),
        cache_dir=str(folder / "cache"),
        seq_len=32,
        batch_size=what.batch_size,
        vocab_size=320,
        corpus_bytes=60_000,
    )
    return CausalLM(config=LLAMA | dict(what.model_args), **(_OPTIMIZER | dict(what.task_args))), data


TASKS: dict[str, Callable[[Path, With], tuple[Any, Any]]] = {"ImageClassifier": pictures, "CausalLM": words}


IMAGES, TEXTS = ("ImageClassifier",), ("CausalLM",)


#: LAMB's ratio of norms needs full tensors; the norm of all gradients, which clips them by default, all of them.
LAMB = (("optimizer", "lamb"), ("optimizer_args", {"max_grad_norm": None, "eps": 1e-4}))


def taught(teacher: Any) -> list[Any]:
    """Returns Distill with a teacher of random weights, the same in all runs."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        teacher.configure_model()
    return [Distill(FrozenModel(task=teacher), ce_weight=0.5)]


def image_teacher() -> ImageClassifier:
    return ImageClassifier("vit_tiny_patch16_224", model_args=VIT | {"depth": 2}, num_classes=10, **_OPTIMIZER)


def text_teacher() -> CausalLM:
    return CausalLM(config=LLAMA | {"num_hidden_layers": 2, "vocab_size": 320}, **_OPTIMIZER)


def bf16_weights(kind: str) -> With:
    """Returns the option of strategies with one of its values; random bits do not depend on the strategy."""
    absent = {
        "ddp": "each rank steps full weights in single precision, the masters of bf16-mixed; zero1 shards them",
        "DeepSpeedBridge": "its engine always has bf16 weights with sharded masters under bf16-mixed, and steps them"
        " itself; see the row bf16-mixed",
    }
    return With(
        trainer=(("precision", "bf16-mixed"),),
        tasks=TEXTS,
        rtol=2**-7,
        options=(("bf16_weights", kind),),
        absent=tuple(absent.items()),
        single=lambda: FSDPStrategy(bf16_weights=kind),
    )


#: Class paths of the callbacks that setup.cfg registers, whether or not the tree has been installed since.
CALLBACKS = {name: path for name, (kind, path) in entry_points().items() if kind == "callback"}


def import_class(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def example(name: str) -> list[Any]:
    """Returns a registered callback with the arguments of its example."""
    cls = import_class(CALLBACKS[name])
    return [cls(**yaml.safe_load(cls.example))]


EXPERTS = (("experts", MixtureOptions(count=4, aux_loss=0.0, z_loss=0.01)),)

#: What callbacks need beside their example: data, a model or a task of their own, or a comparison that allows for them.
NEEDS: dict[str, With] = {
    "BatchMix": With(tasks=IMAGES),
    "DifficultyOrder": With(tasks=TEXTS),
    # The ranks' mean after each step: plain SGD on all samples. Another period has no like in one process.
    "DiLoCo": With(
        lambda: [DiLoCo(period=1, outer_lr=1.0, outer_momentum=0.0)],
        task_args=(("optimizer", "momentum"), ("optimizer_args", {"momentum": 0.0})),
        joint=False,
    ),
    "Distill": With(lambda: taught(image_teacher()), tasks=IMAGES),
    "DynamicBatchSize": With(
        lambda: [DynamicBatchSize({0: 240, "50%": 480})], trainer=(("limit_train_batches", 1.0),), batch_size=240
    ),
    "ExpertBalance": With(task_args=EXPERTS),
    # Gradients are rounded, and one process has nothing to send.
    "GradientCompression": With(alone=False, rtol=2**-7),
    # Scales of slices and of a rank's tokens round differently.
    "LowPrecision": With(rtol=2**-5),
    # Backward has stepped the gradients: there is no norm to compare.
    "OptimizerInBackward": With(joint=False),
    "PipelineTimeline": With(alone=False),
    "ProgressiveResizing": With(tasks=IMAGES),
    "RectangularValidation": With(tasks=IMAGES, photographs=True),
    "ScheduleFree": With(task_args=(("optimizer", "adamw_schedulefree"),)),
    "SequenceLength": With(tasks=TEXTS),
    "StartFrom": With(lambda: [StartFrom("start.ckpt")], tasks=IMAGES),
    # Rates of 0 and 1 draw nothing: the second block is there in the first epoch, and left out in the second.
    "StochasticDepthSchedule": With(tasks=IMAGES, model_args=(("depth", 2), ("drop_path_rate", 1 - 1e-6))),
}

OPTIONS: dict[str, With] = {
    "accumulation, clipping": With(trainer=(("accumulate_grad_batches", 2), ("gradient_clip_val", 0.1))),
    "bf16-mixed": With(trainer=(("precision", "bf16-mixed"),), rtol=2**-7),
    "lamb, of full tensors": With(task_args=LAMB, tasks=TEXTS),
    # It iterates in bf16.
    "muon, of full tensors": With(task_args=(("optimizer", "muon"), ("optimizer_args", {})), tasks=TEXTS, rtol=2**-7),
    # A last bit of a moment may move its code of 8 bits.
    "adamw8bit, a quantised state": With(task_args=(("optimizer", "adamw8bit"),), tasks=TEXTS, rtol=2**-7),
    "attention, a sparse mask": With(task_args=(("attention", Attention("blocks", SlidingWindow(8, block=4))),)),
    "z-loss, smoothing, soft cap": With(
        task_args=(("z_loss", 1e-3), ("label_smoothing", 0.1), ("logit_softcap", 30.0)), tasks=TEXTS
    ),
    "loss_kernel, compiled": With(task_args=(("loss_kernel", "compiled"),), tasks=TEXTS),
    "async_tp": With(
        tasks=TEXTS,
        options=(("async_tp", 2),),
        absent=(("", "it has no tensor parallelism, whose collectives would overlap; use MeshStrategy with tp"),),
    ),
    "bf16_weights, masters": bf16_weights("masters"),
    "bf16_weights, stochastic": bf16_weights("stochastic"),
    "Compile, the loss": With(lambda: [Compile(scope="blocks", backend="aot_eager", loss=True)], tasks=TEXTS),
    "Compile, the optimizer": With(lambda: [Compile(scope="blocks", backend="aot_eager", optimizer=True)], tasks=TEXTS),
    "DifficultyOrder, scores": With(lambda: [DifficultyOrder("scores.txt", until=1)], tasks=IMAGES),
    "Distill, a vocabulary": With(lambda: taught(text_teacher()), tasks=TEXTS),
    # Blocks of 32 values also in slices of tp.
    "LowPrecision, mxfp8": With(
        lambda: [LowPrecision("mxfp8", min_features=8, emulate=True)],
        tasks=TEXTS,
        rtol=2**-4,
        model_args=(("hidden_size", 64), ("intermediate_size", 64), ("num_key_value_heads", 4)),
    ),
    "OptimizerInBackward, lamb": With(lambda: [OptimizerInBackward()], task_args=LAMB, tasks=TEXTS, joint=False),
    "Rotor, offloading": With(lambda: [Rotor("90%", offload=True, link="100GB/s")]),
    "experts": With(task_args=EXPERTS),
    "lora, a 4-bit base": With(task_args=(("lora", Lora(rank=4, base="nf4", base_block=8)),), tasks=TEXTS),
}

BESIDE: dict[str, With] = OPTIONS | {
    name: replace(what, callbacks=partial(example, name)) if what.callbacks is list else what
    for name in sorted(CALLBACKS, key=str.lower)
    for what in [NEEDS.get(name, With())]
}


#: Class of each strategy, and its options, made anew for each run.
STRATEGIES: dict[str, tuple[type[Any] | str, Callable[[], dict[str, Any]]]] = {
    "ddp": ("ddp", dict),
    "zero1": (ZeroStrategy, lambda: {"stage": 1}),
    "zero2": (ZeroStrategy, lambda: {"stage": 2}),
    "zero3": (ZeroStrategy, lambda: {"stage": 3}),
    "zero3_offload": (ZeroStrategy, lambda: {"stage": 3, "offload": "both"}),
    "fsdp": (FSDPStrategy, dict),
    "hsdp": (FSDPStrategy, lambda: {"replicate": 2, "shard": 2}),
    "deepspeed_1": (DeepSpeedBridge, lambda: {"stage": 1}),
    "deepspeed_2": (DeepSpeedBridge, lambda: {"stage": 2}),
    "deepspeed_3": (DeepSpeedBridge, lambda: {"stage": 3}),
    "mesh tp": (MeshStrategy, lambda: {"tp": 2}),
    "mesh pp": (MeshStrategy, lambda: {"pp": 2, "micro_batches": 2}),
    "mesh cp": (MeshStrategy, lambda: {"cp": 2}),
    "mesh, recomputed": (MeshStrategy, lambda: {"dp_shard": 2, "appliers": [ActivationCheckpoint()]}),
    "mesh, compiled": (MeshStrategy, lambda: {"dp_shard": 2, "appliers": [CompileBlocks(backend="aot_eager")]}),
}


# Others that setup.cfg registers, with their defaults.
STRATEGIES |= {
    name: (import_class(path), dict)
    for name, (kind, path) in entry_points().items()
    if kind == "strategy" and import_class(path) not in {cls for cls, _ in STRATEGIES.values()}
}

#: Ranks of a strategy that needs other than two: two copies of two shards.
RANKS = {"hsdp": 4}


def make_strategy(name: str, what: With) -> Any:
    """Returns a strategy with the row's options; the empty name is one process.

    Raises:
        DloError: The class has no such options; the message says why.
    """
    if not name:
        return "auto" if what.single is None else what.single()
    kind, options = STRATEGIES[name]
    text = kind if isinstance(kind, str) else kind.__name__
    for option, _ in what.options:
        if isinstance(kind, str) or option not in inspect.signature(kind).parameters:
            why = dict(what.absent)
            raise DloError(f"{option} is not an option of {text}: {why.get(text) or why['']}")
    return kind if isinstance(kind, str) else kind(**options(), **dict(what.options))


@dataclass
class Found:
    """What a rank saw of a cell.

    Attributes:
        record: its steps, and on rank 0 the weights at the end.
        measures: of the last validation.
        refusal: what it was refused with, before the first step.
        error: what went wrong otherwise.
    """

    record: Record
    measures: dict[str, float]
    refusal: str = ""
    error: str = ""


def run_cell(folder: Path, task: str, beside: str, strategy: str, world_size: int) -> Found:
    """Trains a task for two epochs of three batches, validating, under a strategy; the empty name is one process."""
    seed_everything(3, workers=True, verbose=False)
    recorder, measures = Recorder(), {}
    try:
        what = BESIDE[beside] if beside else With()
        module, data = TASKS[task](folder, what)
        callbacks = [recorder, *what.callbacks()]
        options = {
            "devices": world_size if strategy else 1,
            "strategy": make_strategy(strategy, what),
            "max_epochs": EPOCHS,
            "limit_train_batches": STEPS,
            "limit_val_batches": 2,
            "num_sanity_val_steps": 0,
            "log_every_n_steps": 1,
            "default_root_dir": folder,
            **dict(what.trainer),
        }
        run = folder / f"run-{torch.distributed.get_rank() if torch.distributed.is_initialized() else 0}"
        run.mkdir(exist_ok=True)
        callbacks = add_default_callbacks(
            callbacks, run_folder=run, model=module, progress_bar=False, checkpoints=False
        )
        with contextlib.redirect_stdout(io.StringIO()), contextlib.chdir(folder):
            trainer = quiet_trainer(callbacks=callbacks, **options)
            use_canonical_checkpoints(trainer)
            check = getattr(trainer.strategy, "check_model", None)
            if check is not None:
                module.check(data)
                check(module, data)
            trainer.fit(module, datamodule=data)
        measures = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("val")}
    except DloError as error:
        if recorder.record.steps:
            return Found(recorder.record, {}, error=f"in mid-run: {error}")
        return Found(recorder.record, {}, refusal=str(error))
    except Exception as error:
        return Found(recorder.record, {}, error=f"{type(error).__name__}: {error}")
    return Found(recorder.record, measures)


def run_cells(rank: int, world_size: int, folder: Path, task: str, strategy: str, names: list[str]) -> list[Found]:
    """Runs a strategy's cells one after the other; on one rank those of one process."""
    register_data_parallel()
    found = [run_cell(folder, task, name, strategy, world_size) for name in names]
    if rank != 0:
        for cell in found:
            cell.record.weights = {}
    return found


def prepare(folder: Path) -> None:
    """Makes what all cells read: texts, photographs of two classes in many sizes, digits' scores, and weights."""
    lines(folder / "texts.jsonl", *({"text": text} for text in sentences(200)))
    draw = np.random.default_rng(0)
    digits = len(DigitsData(image_size=16).train_dataloader().dataset)
    np.savetxt(folder / "scores.txt", draw.random(digits))
    task, _ = pictures(folder, With())
    task.configure_model()
    torch.save({"state_dict": task.state_dict(), "pytorch-lightning_version": "2.6"}, folder / "start.ckpt")
    for split, number in (("train", 12), ("val", 8)):
        for label in ("one", "two"):
            home = folder / "photos" / split / label
            home.mkdir(parents=True, exist_ok=True)
            for image in range(number):
                size = (int(draw.integers(20, 40)), int(draw.integers(20, 40)), 3)
                Image.fromarray(draw.integers(0, 255, size, dtype=np.uint8)).save(home / f"{image}.png")


def beside(task: str) -> list[str]:
    """Returns what is put beside a task's strategies; the empty name is nothing."""
    return ["", *(name for name, what in BESIDE.items() if task in what.tasks)]


def judge(name: str, ranks: list[Found], alone: Found) -> str:
    """Returns what has become of a cell: `works`, `refused: ...`, or what is wrong.

    Args:
        name: of what stands beside the strategy.
        ranks: what each rank saw.
        alone: what one process did.
    """
    errors = sorted({cell.error for cell in ranks if cell.error})
    if errors:
        return f"broken: {'; '.join(errors)}"
    refusals = {cell.refusal for cell in ranks}
    if refusals != {""}:
        return f"refused: {refusals.pop()}" if len(refusals) == 1 else f"broken: some ranks say {sorted(refusals)}"
    if alone.error:
        return f"broken: in one process: {alone.error}"
    rtol = BESIDE[name].rtol if name else 1e-5
    both, one = merge_records([cell.record for cell in ranks]), alone.record
    if not one.steps or len(both.steps) != len(one.steps):
        return f"broken: {len(both.steps)} steps, {len(one.steps)} in one process {alone.refusal or alone.error}"
    pairs = list(zip(both.steps, one.steps, strict=True))
    found = {
        "loss": max(_apart(mine.loss, theirs.loss) for mine, theirs in pairs),
        "gradient norm": max(
            (_apart(norm, theirs.norms[0]) for mine, theirs in pairs for norm in mine.norms), default=float("inf")
        ),
        "validation": max(_apart(cell.measures.get(key), of) for cell in ranks for key, of in alone.measures.items()),
    }
    if name and not BESIDE[name].joint:
        del found["gradient norm"]
    if rtol < 1e-4:  # Adam makes whole steps of the rounding of half precision.
        if both.weights.keys() != one.weights.keys():
            return f"broken: weights {sorted(both.weights.keys() ^ one.weights.keys())[:5]}"
        # An element of a weight may differ as its gradient's rounding does, which the largest value knows nothing of.
        found["weights"] = max(_difference(value, both.weights[key]) for key, value in one.weights.items()) / 10
    wrong = {what: size for what, size in found.items() if not size <= rtol}
    return f"broken: differs from one process by {wrong}" if wrong else "works"


def outcomes(
    task: str, strategy: str, names: list[str], folder: Path, alone: dict[str, dict[str, Found]]
) -> dict[str, str]:
    """Runs cells of a column, and returns what came of each; what one process does is kept in ``alone``."""
    own = alone.setdefault(task, {})
    wanted = ["" if name and not BESIDE[name].alone else name for name in names]
    if new := [name for name in dict.fromkeys(wanted) if name not in own]:
        (found,) = run_distributed(run_cells, 1, folder, task, "", new, backend=None, timeout=600)
        own.update(zip(new, found, strict=True))
    ranks = RANKS.get(strategy, 2)
    answers = run_distributed(run_cells, ranks, folder, task, strategy, names, backend=None, timeout=800)
    cells = zip(names, zip(*answers, strict=True), (own[name] for name in wanted), strict=True)
    found = {name: judge(name, list(cell), one) for name, cell, one in cells}
    broken = {name: text for name, text in found.items() if text.startswith("broken")}
    assert not broken, broken
    return found


def _apart(one: float | None, other: float | None) -> float:
    if one is None or other is None:
        return 0.0 if one is other else float("inf")
    return abs(one - other) / max(abs(other), 1e-6)


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max() / one.double().abs().max().clamp(min=1e-3))
