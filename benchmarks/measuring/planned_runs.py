"""Small runs of chosen layouts on this machine's cores: what `dlo plan` predicts for each, and what is measured.

A run has the strategy that `dlo plan --out` would write for its layout, and Lightning's training loop around it.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from dlo_framework.local_memory import local_tensor
from dlo_framework.mesh import MeshSpec
from dlo_framework.testing.training import silence_lightning
from dlo_plugins.memory.activation_checkpoint import ActivationCheckpoint
from dlo_plugins.parallel.fsdp.fully_shard import FullyShard
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.plan.layout import Layout, StateFormat
from dlo_plugins.plan.machine import Machine
from dlo_plugins.plan.model_profile import ModelProfile
from dlo_plugins.plan.plan_config import candidate_config
from dlo_plugins.plan.plan_search import Candidate
from dlo_plugins.plan.rank_memory import MemoryModel
from dlo_plugins.plan.run_memory import measure_optimizer, profile_formats, state_format
from dlo_plugins.plan.step_time import TimeModel
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.causal_lm import CausalLM

_TIMED_STEPS = 8
LENGTH, VOCABULARY, PIXELS, CLASSES = 128, 2048, 64, 100
LLAMA: dict[str, Any] = {
    **{"model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 768},
    **{"num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": LENGTH},
}
GPT: dict[str, Any] = {
    **{"model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": 256, "n_layer": 6, "n_head": 8},
    **{"n_positions": LENGTH, "bos_token_id": 0, "eos_token_id": 0},
}
VIT = {"img_size": PIXELS, "patch_size": 8, "embed_dim": 192, "depth": 8, "num_heads": 4}
#: Options of the Llama that trains adapters, or with a quantised state of the optimizer.
ADAPTED: dict[str, dict[str, Any]] = {
    "lora": {"lora": Lora(rank=8)},
    "qlora": {"lora": Lora(rank=8, base="nf4")},
    "adamw8bit": {"optimizer": "adamw8bit"},
}
MIXTURE: dict[str, Any] = {
    **{"model_type": "qwen3_moe", "vocab_size": VOCABULARY, "hidden_size": 256, "moe_intermediate_size": 256},
    **{"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32},
    **{"num_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": LENGTH},
}
MIXTRAL: dict[str, Any] = {
    **{"model_type": "mixtral", "vocab_size": VOCABULARY, "hidden_size": 192, "intermediate_size": 512},
    **{"num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "num_local_experts": 4},
    **{"num_experts_per_tok": 2, "max_position_embeddings": LENGTH},
}
MODELS = {"gpt": GPT, "mixture": MIXTURE, "mixtral": MIXTRAL}
_LANGUAGE = ("llama", *MODELS, *ADAPTED)
_MIXED = " bf16"
COATNET = {"img_size": PIXELS, "embed_dim": (48, 96, 192, 384), "depths": (2, 2, 3, 2), "stem_width": 32}


def precision_of(kind: str) -> str:
    """Returns the Trainer's precision of a kind of run; ` bf16` at its end selects `bf16-mixed`."""
    return "bf16-mixed" if kind.endswith(_MIXED) else "32-true"


def make_task(kind: str) -> Any:
    """Returns a task with random weights: `llama`, `vit`, `coatnet`, or one of `MODELS` or `ADAPTED`."""
    kind = kind.removesuffix(_MIXED)
    if kind in _LANGUAGE:
        config = dict(MODELS.get(kind, LLAMA))
        return CausalLM(config=config, lr=1e-3, schedule="constant", **ADAPTED.get(kind, {}))
    name, args = {"vit": ("vit_tiny_patch16_224", VIT), "coatnet": ("coatnet_0_rw_224", COATNET)}[kind]
    return ImageClassifier(name, model_args=dict(args), num_classes=CLASSES, lr=1e-3, schedule="constant")


def make_batch(kind: str, rows: int) -> Any:
    """Returns a random batch of a kind of task."""
    generator = torch.Generator().manual_seed(rows)
    if kind.removesuffix(_MIXED) in _LANGUAGE:
        tokens = torch.randint(VOCABULARY, (rows, LENGTH), generator=generator)
        return {"input_ids": tokens, "labels": tokens.clone()}
    images = torch.randn(rows, 3, PIXELS, PIXELS, generator=generator)
    return images, torch.randint(CLASSES, (rows,), generator=generator)


class _OneBatch(LightningDataModule):
    """The same batch again and again."""

    def __init__(self, batch: Any, rows: int, count: int) -> None:
        super().__init__()
        self.batch, self.batch_size, self.count = batch, rows, count

    def train_dataloader(self) -> Any:
        """Returns a loader of equal batches, which share their memory."""
        return DataLoader([self.batch] * self.count, batch_size=None)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Case:
    """Run of a model in a layout."""

    kind: str
    layout: Layout

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.layout.mesh.world_size

    def __str__(self) -> str:
        return f"{self.kind}, {self.layout}"


def case(kind: str, rows: int, count: int = 1, zero: int = 3, recompute: str = "none", **options: Any) -> Case:
    """Returns a run of `count` micro-batches of `rows` rows; further options are axes, or fields of the layout."""
    known = ("pp", "dp_replicate", "dp_shard", "cp", "tp", "ep")
    axes = {axis: options.pop(axis) for axis in known if axis in options}
    mesh = MeshSpec(**({"dp_shard": 1} | axes))
    zero = zero if mesh.dp_shard * mesh.cp > 1 else 0
    layout = Layout(mesh, rows, count, zero=zero, recompute=recompute, sequence_parallel=mesh.tp > 1, **options)
    return Case(kind, layout)


@functools.cache
def profile_of(kind: str) -> ModelProfile:
    """Returns the profile of a kind of model."""
    task = make_task(kind).on_meta()
    return profile_formats(task, make_batch(kind, 2), task.parallel_plan(), state_of(kind), "cpu")


@functools.cache
def state_of(kind: str) -> StateFormat:
    """Returns the bytes of the tensors of a kind of run."""
    moments = measure_optimizer(make_task(kind).on_meta(), torch.float32).moments
    state = state_format(precision_of(kind), fused=False)
    return replace(state, state=moments * state.parameter)


def predicted(one: Case, machine: Machine) -> Candidate:
    """Returns a run with its predictions."""
    profile, layout = profile_of(one.kind), one.layout
    machine = replace(machine, ranks_per_node=one.ranks)
    times = TimeModel(profile, machine, state_of(one.kind))
    return Candidate(
        layout, times.split(layout), times.step(layout), MemoryModel(times).largest(layout), profile.flops, 1.0, 1
    )


def make_trainer(kind: str, candidate: Candidate, steps: int, callbacks: Iterable[Callback]) -> tuple[Trainer, int]:
    """Returns the trainer of a candidate's run, and the rows of a rank's batch."""
    config = {"trainer": {}, "data": {"class_path": "Data", "init_args": {}}}
    found = candidate_config(candidate, config, 1, state_of(kind))
    options = dict(found["trainer"]["strategy"]["init_args"])
    classes = {"ActivationCheckpoint": ActivationCheckpoint, "FullyShard": FullyShard}
    chosen = options.pop("appliers", [])
    appliers = [classes[entry["class_path"]](**entry.get("init_args", {})) for entry in chosen]
    mesh = candidate.layout.mesh
    alone: Any = "auto" if mesh.world_size == 1 and not appliers else MeshStrategy(appliers=appliers, **options)
    trainer = Trainer(
        accelerator="cpu", devices=mesh.world_size, strategy=alone, precision=precision_of(kind), max_steps=steps,
        max_epochs=1,
        accumulate_grad_batches=found["trainer"]["accumulate_grad_batches"], callbacks=list(callbacks), logger=False,
        enable_model_summary=False, enable_checkpointing=False, enable_progress_bar=False, limit_val_batches=0,
        use_distributed_sampler=False, default_root_dir=tempfile.mkdtemp(prefix="planned-"),
    )  # fmt: skip
    return trainer, found["data"]["init_args"]["batch_size"] // mesh.data_size


class _HeapStatistics(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and later."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "top",
        )
    )


@functools.cache
def _mallinfo() -> Callable[[], _HeapStatistics]:
    function = ctypes.CDLL("libc.so.6").mallinfo2
    function.restype = _HeapStatistics
    return function


def heap_bytes() -> int:
    """Returns the bytes that this process has allocated from glibc, in all threads, and not yet freed."""
    found = _mallinfo()()
    return int(found.uordblks + found.hblkhd)


def live_tensors() -> list[Tensor]:
    """Returns the tensors of this process."""
    gc.collect()
    found = [item for item in gc.get_objects() if issubclass(type(item), Tensor)]
    return found + [tensor.grad for tensor in found if tensor.is_leaf and tensor.grad is not None]


def storage_sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Returns the bytes of the storages of tensors in this process's memory, by address."""
    local = [local_tensor(tensor) for tensor in tensors if tensor.layout is torch.strided]
    # A subclass that wraps tensors has no memory of its own; they are among the others.
    local = [tensor for tensor in local if not hasattr(tensor, "__tensor_flatten__")]
    storages = [tensor.untyped_storage() for tensor in local if tensor.device.type == "cpu"]
    return {storage._cdata: storage.nbytes() for storage in storages}


class _PeakAfterOperators(TorchDispatchMode):
    """Mode that reads the heap after each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator."""
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, heap_bytes())
        return result


class _PeakOfStep(Callback):
    """Measures the peak of one optimizer step: the tensors at its start, and by how much the heap grows beyond it.

    Args:
        step: Number of the step.
        left_out: Tensors that are left out, such as the batch and those of an earlier run.
    """

    def __init__(self, step: int, left_out: list[Tensor]) -> None:
        self.step, self.peak, self._left_out = step, 0, left_out
        self._mode: _PeakAfterOperators | None = None

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Begins with the first micro-batch of the step."""
        if trainer.global_step == self.step and self._mode is None:
            others = storage_sizes(self._left_out)
            sizes = storage_sizes(live_tensors())
            self._held = sum(size for address, size in sizes.items() if address not in others)
            self._began = heap_bytes()
            self._mode = _PeakAfterOperators()
            self._mode.__enter__()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Ends with the last one."""
        if trainer.global_step == self.step + 1 and self._mode is not None and not self.peak:
            self._mode.__exit__(None, None, None)
            self.peak = self._held + self._mode.peak - self._began


class _BalancedRouters(Callback):
    """Gives each expert as many tokens as the others, as predictions assume; random weights do not."""

    def on_fit_start(self, trainer: Trainer, pl_module: Any) -> None:
        """Replaces the experts that routers choose."""
        for module in pl_module.modules():
            if type(module).__name__.endswith("TopKRouter"):
                module.register_forward_hook(functools.partial(self._balance, module.num_experts))

    @staticmethod
    def _balance(experts: int, module: Any, args: Any, output: Any) -> Any:
        *others, index = output
        numbers = torch.arange(index.numel(), device=index.device, dtype=index.dtype)
        return *others, (numbers % experts).view(index.shape)


def measure_peaks(rank: int, world_size: int, candidates: list[tuple[str, Candidate]]) -> list[int]:
    """Returns the peak of each run's third step on this rank, in bytes: all tensors, and what the heap has beyond them.

    Memory that a kernel allocates and frees inside one operator is not seen. The batch is left out.
    """
    return [_measure_peak(kind, candidate) for kind, candidate in candidates]


def _measure_peak(kind: str, candidate: Candidate) -> int:
    silence_lightning()
    seed_everything(0, workers=True, verbose=False)
    steps = 3
    rows = candidate.layout.micro_batch * (candidate.layout.micro_batches if candidate.layout.mesh.pp > 1 else 1)
    batch = make_batch(kind, rows)
    found = _PeakOfStep(steps - 1, live_tensors())
    trainer, _ = make_trainer(kind, candidate, steps, [_BalancedRouters(), found])
    trainer.fit(make_task(kind), _OneBatch(batch, rows, steps * trainer.accumulate_grad_batches))
    del trainer
    gc.collect()
    return found.peak


class _StepTimes(Callback):
    """Measures the time between optimizer steps, from the third on."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Notes the end of a step."""
        if trainer.global_step > len(self.times):
            self.times.append(time.perf_counter())

    @property
    def seconds(self) -> list[float]:
        """Seconds of the steps."""
        return [end - begin for begin, end in itertools.pairwise(self.times[1:])]


def measure_steps(
    rank: int, world_size: int, candidates: list[tuple[str, Candidate]], rounds: int
) -> list[list[float]]:
    """Returns, for each run, the median step time of each round; runs take turns in each round."""
    found: list[list[float]] = [[] for _ in candidates]
    silence_lightning()
    for number in range(rounds):
        order = list(range(len(candidates)))
        random.Random(number).shuffle(order)
        for at in order:
            kind, candidate = candidates[at]
            seed_everything(0, workers=True, verbose=False)
            times = _StepTimes()
            trainer, rows = make_trainer(kind, candidate, _TIMED_STEPS, [_BalancedRouters(), times])
            data = _OneBatch(make_batch(kind, rows), rows, _TIMED_STEPS * trainer.accumulate_grad_batches)
            trainer.fit(make_task(kind), data)
            found[at].append(statistics.median(times.seconds))
    return found
