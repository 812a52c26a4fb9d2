"""Pipelines of a mesh: who gets which blocks, what ranks tell each other, and what the last stage alone has."""

from __future__ import annotations

import random
from collections import namedtuple
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanSquaredError, Metric, PearsonCorrCoef
from transformers import DynamicCache
from transformers.modeling_outputs import ImageClassifierOutput

from dlo_framework import ParallelPlan, Task
from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.ema import WeightEMA
from dlo_framework.errors import DloError
from dlo_framework.mesh import MeshSpec
from dlo_framework.run.resume import ExactResume
from dlo_framework.strategy_abilities import Pipelined
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.parallel.mesh import pipelined_task
from dlo_plugins.parallel.mesh.pipelined_task import (
    PipelinedTask,
    PipelineOptions,
    check_task,
    concat_batches,
    forward_costs,
)
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.language.causal_lm import CausalLM
from support import fsdp_nets
from support.runs import Watch

Pair = namedtuple("Pair", "logits aux")


@dataclass
class Found:
    logits: Tensor
    aux: Tensor


#: Kinds of outputs; `losses_of` has the pair.
KINDS: dict[str, Any] = {
    "transformers": lambda logits, aux: ImageClassifierOutput(logits=logits),
    "pair": Pair,
    "dataclass": Found,
}


class Net(nn.Module):
    """Statistics in the stem, in the head, with parameters and without."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.scale = nn.BatchNorm1d(8, affine=False)
        self.stem = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)])
        self.norm = nn.BatchNorm1d(8)
        self.plain = nn.BatchNorm1d(8, affine=False)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Any:
        hidden = self.scale(self.stem(x))
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(self.plain(self.norm(hidden)))
        return KINDS[self.kind](logits, logits.square().mean(-1))


class LastMean(Metric):
    """The mean over ranks of what each has seen last, which a rank that counts nothing would halve."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("value", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, values: Tensor) -> None:
        self.value = values.float().mean()

    def compute(self) -> Tensor:
        return self.value  # type: ignore[return-value]


class Classify(Task):
    """Its loss keeps a count in a buffer of the task's own."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("seen", torch.zeros(3))
        self.last, self.error, self.correlation = LastMean(), MeanSquaredError(), PearsonCorrCoef()

    def configure_model(self) -> None:
        if not self.has_model:
            torch.manual_seed(0)
            self.model = Net(self.kind)

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(blocks=("blocks.*",), stem=("stem", "scale"), head=("norm", "plain", "head"))

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        if self.training:
            self.seen += torch.bincount(batch[1], minlength=3)
        return nn.functional.cross_entropy(outputs.logits, batch[1])

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Any]:
        first, targets = outputs.logits[:, 0].contiguous(), batch[1].float()
        self.last.update(first)
        self.error.update(first, targets)
        self.correlation.update(first, targets)
        return {"last": self.last, "error": self.error, "correlation": self.correlation}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(size: int) -> DataLoader[Any]:
    """22 samples: with 8 in a batch, the last has 6."""
    generator = torch.Generator().manual_seed(1)
    inputs, targets = torch.randn(22, 6, generator=generator) * 3 + 2, torch.randint(3, (22,), generator=generator)
    return DataLoader(TensorDataset(inputs, targets), batch_size=size)


def trainer(world_size: int, strategy: Any, **options: Any) -> Trainer:
    run = fsdp_nets.trainer(world_size, strategy, **{"max_epochs": 2, "limit_val_batches": 1.0, **options})
    use_canonical_checkpoints(run)
    return run


def pipeline(**options: Any) -> MeshStrategy:
    return MeshStrategy(pp=2, dp_shard=1, **options)


def statistics_of(world_size: int, strategy: Any, kind: str, folder: Path) -> tuple[Any, dict[str, Tensor]]:
    """Fits with batches that go through the pipeline whole, as statistics of a batch ask for."""
    run = trainer(world_size, strategy, callbacks=[WeightEMA(0.5)])
    run.fit(Classify(kind), batches(8), batches(8))
    run.save_checkpoint(folder / f"{kind}-{world_size}.ckpt")
    return {name: float(value) for name, value in run.callback_metrics.items()}, gather_full_weights(run)


class NoOldGradients(Callback):
    """Checks, in the forward of this rank's first block, that the last step's gradients have been freed."""

    def __init__(self) -> None:
        self.seen = 0

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        blocks = pl_module.model.blocks
        own = next(block for block in blocks if next(block.parameters()).device.type != "meta")
        own.register_forward_pre_hook(lambda *_: self.check(trainer))

    def check(self, trainer: Trainer) -> None:
        groups = trainer.optimizers[0].param_groups
        stepped = [tensor for group in groups for tensor in group["params"]]
        in_model = {id(tensor) for tensor in trainer.lightning_module.parameters()}
        shares = [tensor for tensor in stepped if id(tensor) not in in_model]
        assert shares
        assert all(tensor.grad is None for tensor in shares)
        self.seen += 1


def losses_of(world_size: int, strategy: Any, loader: DataLoader[Any]) -> dict[str, Tensor]:
    task = Classify("pair")
    task.configure_model()
    for name, module in task.model.named_modules():
        if isinstance(module, nn.BatchNorm1d):  # Statistics would be of parts of a batch.
            task.model.set_submodule(name, nn.Identity())
    check = NoOldGradients()
    run = trainer(world_size, strategy, limit_val_batches=0, callbacks=[check] if world_size > 1 else [])
    run.fit(task, loader)
    assert world_size == 1 or check.seen > 1
    return gather_full_weights(run)


def on_ranks(rank: int, world_size: int, folder: str) -> Any:
    found: dict[str, Any] = {}
    for kind in ("transformers", "dataclass"):
        found[kind] = statistics_of(world_size, pipeline(micro_batches=1), kind, Path(folder))
    found["ZBV"] = losses_of(world_size, pipeline(schedule="ZBV", micro_batches=8), batches(8))
    with pytest.raises(DloError, match=r"PipeDream2BW on 2 ranks cannot run .* set drop_last=True"):
        losses_of(world_size, pipeline(schedule="PipeDream2BW", micro_batches=8), batches(21))
    for hook in ("on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"):
        clipping = Classify("pair")
        setattr(clipping, hook, lambda *_, task=clipping, **__: nn.utils.clip_grad_norm_(task.parameters(), 1.0))
        with pytest.raises(DloError, match=r"several gradients in a hook does not support pp=2: .*gradient_clip_val"):
            trainer(world_size, pipeline(micro_batches=2), limit_val_batches=0).fit(clipping, batches(8))
    task = Classify("pair")
    task.configure_gradient_clipping = lambda optimizer, *_, **__: task.clip_gradients(optimizer, 1.0, "norm")  # type: ignore[method-assign]
    trainer(world_size, pipeline(micro_batches=2), limit_val_batches=0).fit(task, batches(8))
    again = pipeline(micro_batches=3)
    trainer(world_size, again, limit_val_batches=0).fit(task, batches(8))
    assert again.ability(Pipelined).micro_batches == 3
    other = trainer(world_size, pipeline(micro_batches=2, schedule="GPipe"), limit_val_batches=1)
    other.validate(task, batches(8), verbose=False)  # Forward alone has no schedule.
    with pytest.raises(DloError, match=r"cut by an earlier run with schedule=1F1B, got schedule=GPipe"):
        other.fit(task, batches(8))
    return found


@pytest.mark.timeout(280)
def test_what_the_last_stage_alone_has_is_as_in_one_process(tmp_path: Path) -> None:
    found = run_distributed(on_ranks, 2, str(tmp_path), backend=None, timeout=280, group_timeout=60)
    for kind in ("transformers", "dataclass"):
        measured, weights = statistics_of(1, "auto", kind, tmp_path)
        saved = {}
        for world_size in (1, 2):
            run, fresh = trainer(1, "auto"), Classify(kind)
            fresh.configure_model()
            run.validate(fresh, batches(8), ckpt_path=tmp_path / f"{kind}-{world_size}.ckpt", verbose=False)
            saved[world_size] = fresh.state_dict()
        for expected, others in ((weights, found[0][kind][1]), (saved[1], saved[2])):
            assert others.keys() == expected.keys()
            for name, value in expected.items():
                torch.testing.assert_close(others[name], value, rtol=1e-4, atol=1e-6, msg=lambda text, n=name: n + text)
        for of_rank in found:
            assert of_rank[kind][0] == pytest.approx(measured, rel=1e-4)
    expected = losses_of(1, "auto", batches(8))
    for name, value in expected.items():
        torch.testing.assert_close(found[0]["ZBV"][name], value, rtol=1e-4, atol=1e-6)


# --- noise, tables that blocks make, scalars -----------------------------------------------------------------------


class Shifted(nn.Module):
    """Block that makes a table in its first forward, and drops features."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.drop = nn.Linear(6, 6), nn.Dropout(0.2)
        self.table: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.arange(6, dtype=x.dtype) / 6
        return x + self.drop(torch.tanh(self.dense(x))) + self.table


class Noised(nn.Module):
    """Returns the noise and its learned temperature."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(6, 6), nn.Linear(6, 6)
        self.blocks = nn.ModuleList(Shifted() for _ in range(4))
        self.temperature = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor, noise: Tensor) -> Any:
        hidden = self.stem(x + noise)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden), noise, self.temperature


class Denoise(Task):
    """Predicts the noise that `inputs` adds."""

    def configure_model(self) -> None:
        if not self.has_model:
            torch.manual_seed(0)
            self.model = Noised()

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(blocks=("blocks.*",), stem=("stem",), head=("head", "temperature"))

    def example_batch(self, datamodule: Any) -> Any:
        return torch.zeros(1, 6), torch.zeros(1, dtype=torch.long)

    def inputs(self, batch: Any) -> Any:
        self.noise = torch.randn_like(batch[0]) * random.choice((1.0, 2.0)) + np.random.rand()
        return (batch[0], self.noise), {}

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        predicted, noise, temperature = outputs
        assert not self.training or torch.equal(noise, self.noise)
        return nn.functional.mse_loss(predicted * temperature, noise)

    def metrics(self, outputs: Any, batch: Any) -> dict[str, Any]:
        assert outputs[2].shape == ()
        return {"temperature": outputs[2]}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def denoised(strategy: Any, rate: float, save: Path | None = None, resume: Path | None = None) -> Any:
    task, watch = Denoise(), Watch(save, batch=3)
    task.configure_model()
    for module in task.model.modules():
        if isinstance(module, nn.Dropout):
            module.p = rate
    torch.manual_seed(3)
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "precision": "64-true", "limit_val_batches": 1}
    run = trainer(2, strategy, callbacks=[ExactResume(), watch], **options)
    run.fit(task, fsdp_nets.Batches([*batches(4)]), batches(4), ckpt_path=resume)
    return watch.losses, gather_full_weights(run)


def noise_on_ranks(rank: int, world_size: int, folder: str) -> Any:
    found: dict[str, Any] = {}
    for name, split in (("1F1B", None), ("Interleaved1F1B", None), ("ZBV", None), ("1F1B", [1, 3])):
        found[f"{name} {split}"] = denoised(pipeline(micro_batches=2, schedule=name, split=split), 0.0)
    path = Path(folder) / "ZBV"
    whole = denoised(pipeline(micro_batches=2, schedule="ZBV"), 0.3, save=path)
    resumed = denoised(pipeline(micro_batches=2, schedule="ZBV"), 0.3, resume=path)
    found["resumed"] = whole, resumed
    return found


def test_all_stages_have_one_noise_and_a_resume_amid_an_accumulation_equals_to_the_bit(tmp_path: Path) -> None:
    found = run_distributed(noise_on_ranks, 2, str(tmp_path), backend=None, timeout=280, group_timeout=60)[0]
    whole, after = found.pop("resumed")
    losses, weights = found.pop("1F1B None")
    assert len(set(losses)) == len(losses) > 5
    for name, (others, other_weights) in found.items():
        assert others == pytest.approx(losses, rel=1e-12), name
        for key, value in weights.items():
            torch.testing.assert_close(other_weights[key], value, rtol=1e-11, atol=1e-13, msg=f"{name}: {key}")
    assert whole[0][-len(after[0]) :] == after[0]
    for key, value in whole[1].items():
        assert torch.equal(after[1][key], value), key


# --- what the ranks of a pipeline tell each other of a batch, and what they wait for ---------------------------------


class Placed:
    """Something that can be moved, as a tensor of an accelerator's; a CPU has no second device for tensors."""

    def __init__(self, device: str) -> None:
        self.device = device

    def to(self, device: Any, **_: Any) -> Placed:
        return Placed(str(device))


class Told(Task):
    """Gives back the model's outputs."""

    def configure_model(self) -> None: ...

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return torch.zeros(())


def pipelined(is_last: bool, device: str, outputs: Any = None) -> PipelinedTask:
    placement = SimpleNamespace(ranks=2, stages=2, rank_of=lambda stage: stage)
    found: Any = SimpleNamespace(placement=placement, is_last=is_last, device=torch.device(device), group=None)
    found.without_other_stages = nullcontext
    found.evaluate = lambda parts, forward, stream: [outputs] if is_last else None
    return PipelinedTask(Told(), found, micro_batches=2)


def test_outputs_are_told_from_the_cpu_and_the_last_stage_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(dist, "broadcast_object_list", lambda objects, **_: sent.extend(objects))
    outputs = {"logits": Placed("cuda:1"), "pair": (Placed("cuda:1"), Placed("cuda:1"))}
    found = pipelined(True, "cuda:1", outputs).predict((torch.zeros(1, 2),), 0)
    assert [item.device for item in (sent[0]["logits"], *sent[0]["pair"])] == ["cpu"] * 3
    assert [item.device for item in (found["logits"], *found["pair"])] == ["cuda:1"] * 3


def test_measures_reach_all_stages_in_single_precision_whatever_the_default_dtype(
    monkeypatch: pytest.MonkeyPatch, default_dtype: None
) -> None:
    told = ({"val_loss": 2.2987654}, {})
    monkeypatch.setattr(dist, "broadcast_object_list", lambda objects, **_: objects.__setitem__(0, told))
    stage = pipelined(False, "cpu")
    logged: dict[str, Tensor] = {}
    monkeypatch.setattr(pipelined_task, "log_measures", lambda task, measures, batch: logged.update(measures))
    stage.evaluate((torch.zeros(1, 2),))
    assert logged["val_loss"].item() == pytest.approx(2.2987654, rel=1e-6)


def test_outputs_that_cannot_be_joined_are_named() -> None:
    parts = [
        {"all": [torch.ones(rows), None, "x", torch.tensor(0.07), torch.tensor(value), 2.0 * value, 3]}
        for rows, value in ((2, 1.0), (1, 4.0))
    ]
    rows, *plain = concat_batches(parts, [2 / 3, 1 / 3])["all"]
    assert rows.shape == (3,)
    # A learned temperature is that of one process, and a term of a loss its mean.
    assert plain == [None, "x", torch.tensor(0.07), torch.tensor(2.0), 4.0, 3]
    with pytest.raises(DloError, match=r"got different values of int; leave it out"):
        concat_batches([{"count": 2}, {"count": 3}], [0.5, 0.5])
    with pytest.raises(DloError, match=r"got a DynamicCache; leave it out .*use_cache=False"):
        concat_batches([{"past": DynamicCache()}, {"past": DynamicCache()}], [0.5, 0.5])


# --- who gets which blocks of a pipeline: by the work that the data will make, on one process as on many -------------


LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 6}


def causal(vocab_size: int = 100, **more: Any) -> CausalLM:
    sizes = {"intermediate_size": 128, "vocab_size": vocab_size, "max_position_embeddings": 4096}
    return CausalLM(config={**LLAMA, **sizes, **more})


def split(task: Any, ranks: int = 2, datamodule: Any = None, **options: Any) -> Any:
    task = task.on_meta()
    return PipelineOptions(**options).choose_split(task, task.parallel_plan(), ranks, datamodule)


def test_blocks_of_one_size_are_shared_out_with_the_head_counted() -> None:
    assert split(causal()) == [3, 3]
    assert split(causal(vocab_size=10_000)) == [4, 2]
    assert split(causal(), split=[1, 5]) == [1, 5]
    assert sum(split(causal(), schedule="ZBV")) == 6
    assert len(split(causal(), schedule="ZBV")) == 4


def test_the_data_tell_how_long_sequences_are() -> None:
    task = causal().on_meta()
    short, long = (forward_costs(task, task.parallel_plan(), SimpleNamespace(seq_len=at)) for at in (64, 1024))
    assert short is not None
    assert long is not None
    assert long.head == 16 * short.head == 2 * 64 * 100 * 1024
    assert long.blocks[0] > 16 * short.blocks[0]  # Attention grows with the square.


def test_the_mesh_that_is_drawn_is_the_one_that_runs() -> None:
    task = causal(vocab_size=10_000)
    strategy = MeshStrategy(pp=2, dp_shard=1, micro_batches=2)
    strategy.parallel_devices = [torch.device("cpu")] * 2
    assert strategy.mesh_spec() == MeshSpec(pp=2, dp_shard=1)
    drawn = strategy.describe(task, SimpleNamespace(seq_len=64))
    assert [len(stage.blocks) for stage in drawn.stages] == split(task, datamodule=SimpleNamespace(seq_len=64))


def test_a_task_that_generates_without_the_pipeline_is_refused_before_it_starts() -> None:
    class Alone(CausalLM):
        generates_in_stages = False

    strategy = MeshStrategy(pp=2, dp_shard=1, micro_batches=2)
    strategy.parallel_devices = [torch.device("cpu")] * 2
    strategy.check_predict(CausalLM(config=LLAMA))
    with pytest.raises(DloError, match=r"must set generates_in_stages under pp > 1, got Alone; run its forwards by"):
        strategy.check_predict(Alone(config=LLAMA))


def test_parameters_outside_of_the_model_are_refused() -> None:
    task = ImageClassifier("vit_tiny_patch16_224", num_classes=10, image_size=32)
    task.temperature = torch.nn.Parameter(torch.ones(()))
    twin = task.on_meta()
    spec = MeshSpec(pp=2, dp_shard=1)
    with pytest.raises(DloError, match=r"got 'temperature' of ImageClassifier; make it a part of"):
        PipelineOptions().check(twin, twin.parallel_plan(), spec, None)
    twin.temperature.requires_grad = False
    PipelineOptions().check(twin, twin.parallel_plan(), spec, None)


@pytest.mark.parametrize("own", ["training_step", "backward"])
def test_a_task_with_a_step_of_its_own_is_refused(own: str) -> None:
    """A schedule runs forward and backward, and would leave the task's out."""
    task = type("Own", (CausalLM,), {own: lambda self, *args: None})(config=LLAMA)
    with pytest.raises(DloError, match=rf"by inputs\(\) and loss\(\), got a {own} of Own"):
        check_task(task)
