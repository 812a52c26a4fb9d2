"""Trainings on two ranks beside one process: those that are the same, those that are not, and faults of others."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, LightningModule
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset, default_collate

from dlo_framework.data import ResumableDataModule
from dlo_framework.distributed.collectives import Communicator, Pending
from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.norms import collect_gradients, total_norm
from dlo_framework.testing import Case, RankFailed, assert_parity, compare_cases, parity
from dlo_framework.testing.compare import report
from dlo_plugins.parallel.fsdp.sharded_optimizers import OptimizerShards
from dlo_plugins.parallel.fsdp.sharding import ShardedModule
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.mesh_engine import MeshEngine
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_plugins.parallel.zero.zero_engine import ZeroEngine
from dlo_tasks.language import vocabulary_loss
from dlo_tasks.language.causal_lm import CausalLM
from support.strategies import STRATEGIES
from support.token_batches import FAMILIES, Tokens


class Points(Dataset):
    """48 points on which each epoch is another noise, by all three libraries' generators."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.linspace(-1, 1, 8) * (index + 1) / 48 + 0.1 * torch.randn(8) + 0.1 * random.random()
        return x, x.roll(index % 3).sin().sum(0, keepdim=True)


class PointsData(ResumableDataModule):
    """dlo's kind of datamodule: its batch size is the global one."""

    def train_dataloader(self):
        return self.train_loader(Points())

    def val_dataloader(self):
        return self.eval_loader(Points())


class ForeignData(LightningDataModule):
    """Anybody's datamodule: its batch size is each rank's. 48 samples in batches of 2 x 10: the last is smaller."""

    def __init__(self, workers: int = 0) -> None:
        super().__init__()
        self.workers = workers

    def train_dataloader(self):
        return DataLoader(Points(), batch_size=10, num_workers=self.workers)


class Model(LightningModule):
    def __init__(self, flaw: str = "", optimizer: str = "sgd") -> None:
        super().__init__()
        self.flaw, self.optimizer = flaw, optimizer
        norm = nn.BatchNorm1d(16) if flaw == "batch_norm" else nn.LayerNorm(16)
        self.net = nn.Sequential(nn.Linear(8, 16), norm, nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 1))

    def configure_model(self):
        if self.device_mesh is not None:
            fully_shard(self.net[0])
            fully_shard(self.net)

    def training_step(self, batch, batch_idx):
        x, y = batch
        if self.flaw == "noise":
            x = x + 0.1 * torch.randn_like(x)
        error = nn.functional.mse_loss(self.net(x), y, reduction="sum" if self.flaw == "sum" else "mean")
        self.log("loss", error, sync_dist=True)
        if self.flaw == "raise" and batch_idx == 2 and self.trainer.global_rank == 1:
            raise ZeroDivisionError("rank 1 stumbles")
        return error * 0 if self.flaw == "dead" else error

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("val_loss", nn.functional.mse_loss(self.net(x), y), sync_dist=self.flaw != "val")

    def configure_optimizers(self):
        if self.optimizer == "adamw":
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        if self.optimizer == "plateau":
            optimizer = torch.optim.SGD(self.parameters(), lr=0.02)
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}
        optimizer = torch.optim.SGD(self.parameters(), lr=0.02, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 3)]


def build(data: str = "dlo", workers: int = 0, **options):
    made = {
        "dlo": lambda: PointsData(batch_size=12, num_workers=0),
        "foreign": lambda: ForeignData(workers),
        "loader": lambda: DataLoader(Points(), batch_size=6, shuffle=True, collate_fn=default_collate),
    }
    return Model(**options), made[data]()


def static_graph() -> DDPStrategy:
    return DDPStrategy(static_graph=True)


def test_what_is_the_same_is_found_to_be():
    """DDP, with two optimizers, accumulation, clipping, and three kinds of data, of which one ends in mid-batch."""
    found = assert_parity(
        build,
        [
            "ddp",
            Case(static_graph),
            Case("ddp", {"optimizer": "adamw"}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.01}),
            Case("ddp", {"data": "foreign", "workers": 1}),
            Case("ddp", {"data": "loader"}, {"accumulate_grad_batches": 3}, name="a loader"),
            Case(ModelParallelStrategy, {"optimizer": "adamw"}),
            Case("ddp", {}, {"precision": "bf16-mixed"}),
            Case("ddp", {"optimizer": "plateau"}),
        ],
        steps=6,
    )
    assert [comparison.name for comparison in found][:5:2] == [
        "ddp",
        "ddp, optimizer=adamw, accumulate_grad_batches=2, gradient_clip_val=0.01",
        "a loader",
    ]
    for comparison in found:
        assert comparison.ok
        assert len(comparison.rows) == 6
        assert len(comparison.tensors) >= 6
        assert set(comparison.validation) == (
            {"val_loss"} if "data=" not in comparison.name and "loader" not in comparison.name else set()
        )
        losses = [row.loss.one for row in comparison.rows]
        assert len(set(losses)) == 6, "the model learns"
        assert "model: no dropout (1 Dropout)" in comparison.notes
    strict = found[:6]
    assert max(row.loss.difference for comparison in strict for row in comparison.rows) < 1e-5
    assert max(row.norm.difference for comparison in strict for row in comparison.rows) < 1e-5
    assert max(comparison.spread for comparison in strict) < 1e-5
    # Half precision rounds so much that only the control can tell.
    assert max(row.loss.difference for row in found[6].rows) > 1e-5
    # The two first cases share the run of one process.
    assert [row.loss.one for row in found[0].rows] == [row.loss.one for row in found[1].rows]
    assert any("seed, epoch and index" in note for note in found[0].notes)
    assert any("Points draws random numbers seeded by its index" in note for note in found[3].notes)


class Unsynced(DDPStrategy):
    """Averages no gradients, which is what a strategy's bug may come to."""

    def configure_ddp(self) -> None:
        super().configure_ddp()
        self.model.require_backward_grad_sync = False

    def pre_backward(self, closure_loss):
        """Leaves the reducer alone."""


class Late(Callback):
    """Changes the weights of one rank, a little, late."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.world_size > 1 and trainer.global_step == 4:
            with torch.no_grad():
                pl_module.net[4].bias += 1e-3


class StateOfARank(Callback):
    """Changes the optimizer state of the last rank after the last step."""

    def __init__(self, key: str) -> None:
        self.key = key

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.world_size > 1 and trainer.global_rank == 1 and trainer.global_step == 6:
            next(iter(trainer.optimizers[0].state.values()))[self.key] += 1


def test_what_is_not_the_same_is_told_with_what_is_likely(monkeypatch):
    flaws = compare_cases(
        build,
        [
            Case("ddp", {"flaw": "batch_norm"}),
            Case("ddp", {"flaw": "sum"}),
            Case("ddp", {"flaw": "noise"}),
            Case("ddp", {"flaw": "val"}),
            Case("ddp", {"flaw": "dead"}),
            Case(Unsynced),
            Case("ddp", {}, {"callbacks": [Late()]}, name="late"),
            Case("ddp", {}, {"use_distributed_sampler": False}, name="whole data"),
            Case("ddp", {"data": "loader"}, {"use_distributed_sampler": False}, name="no sampler"),
            Case(DataParallelStrategy, {"optimizer": "adamw"}, {"callbacks": [StateOfARank("step")]}, name="a step"),
            Case(FSDPStrategy, {"optimizer": "adamw"}, {"callbacks": [StateOfARank("step")]}, name="a step of fsdp"),
        ],
        steps=6,
    )
    by_name = {comparison.name: comparison for comparison in flaws}
    assert [name for name, comparison in by_name.items() if comparison.ok] == ["whole data"]
    hints = {name: " ".join(comparison.hints) for name, comparison in by_name.items()}
    assert "BatchNorm statistics are per rank (1 layers): use sync_batchnorm: true" in hints["ddp, flaw=batch_norm"]
    assert "2 times that of 2 ranks: a sum over the batch" in hints["ddp, flaw=sum"]
    assert "training_step draws random numbers (first at step 0)" in hints["ddp, flaw=noise"]
    assert "the first step differs already" in hints["Unsynced"]
    assert "the batches of step 0 are not the same" in hints["no sampler"]
    val, dead = by_name["ddp, flaw=val"], by_name["ddp, flaw=dead"]
    assert all(row.ok for row in val.rows)
    assert val.validation["val_loss"].difference > 1e-3
    assert "log with sync_dist=True" in hints["ddp, flaw=val"]
    assert dead.untrained == "every gradient is zero"
    late = by_name["late"]
    assert [row.ok for row in late.rows] == [True, True, True, True, False, False]
    assert late.culprits[0] == "net.4.bias"
    for name in ("a step", "a step of fsdp"):
        assert by_name[name].culprits[0].startswith("step of net.")
        assert by_name[name].culprits[0].endswith(" on another rank")
    assert "the first step's loss and gradients agree" in hints["late"]
    monkeypatch.setattr(parity, "compare_cases", lambda *_: flaws)
    with pytest.raises(AssertionError, match=r"10 of 11 cases differ") as caught:
        assert_parity(build, [])
    text = str(caught.value).partition("NO PARITY: late: ")[2]
    assert text.startswith("differs from step 4 on")
    assert "loss: largest difference" in text
    assert "net.4.bias" in text


def test_a_case_that_raises_is_named():
    with pytest.raises(
        RankFailed,
        match=r"rank 1 of 2[\s\S]*ZeroDivisionError: rank 1 stumbles\s+in parity case 'ddp, flaw=raise', 2 ranks",
    ):
        compare_cases(build, [Case("ddp", {"flaw": "raise"})], steps=6)


class DeafDDP(DataParallelStrategy):
    """Averages gradients of the first bucket only."""

    def configure_ddp(self) -> None:
        super().configure_ddp()
        self.model.register_comm_hook(None, self._reduce)  # type: ignore[union-attr, operator]

    def _reduce(self, state: None, bucket):
        gradients = bucket.buffer()
        if bucket.index() == 0:
            torch.distributed.all_reduce(gradients)
            gradients /= 2
        done = torch.futures.Future()
        done.set_result(gradients)
        return done


class DeafRanks(Communicator):
    """Reduces nothing that is smaller than all of a model's gradients."""

    def reduce_scatter(self, buffer, *, average=False):
        if buffer.numel() >= WHOLE:
            return super().reduce_scatter(buffer, average=average)
        return Pending([], lambda: self.segment(buffer))


WHOLE = sum(parameter.numel() for parameter in Model().parameters())


class DeafZero(ZeroStrategy):
    def _build(self, communicator, initialise):
        return super()._build(DeafRanks(communicator.group), initialise)


def test_a_fault_between_buckets_of_a_small_model_is_found() -> None:
    """By default one bucket has room for all; a size that a user sets stays."""
    big = partial(DeafZero, 2, bucket_mb=24.0)
    cases = [Case(DeafDDP), Case(partial(DeafZero, 1), name="zero1"), Case(partial(DeafZero, 2), name="zero2")]
    *found, single = compare_cases(build, [*cases, Case(big, name="set")], steps=4)
    assert [comparison.ok for comparison in found] == [False] * 3
    assert single.ok, report(single)
    pattern = (
        r"the first difference is the gradient norm of step [01]: .* on the ranks; at the end 'net\..*' .* differs most"
    )
    assert re.fullmatch(pattern, found[0].hints[0])  # torch divides again after its first step.


# --- faults that other frameworks have shipped, planted on the ranks alone: each is found, and where ----------------


# Each case is the fault, a strategy under which it is planted, and what the report says. Beside it the same strategy
# trains without the fault, and is parity.
_PLANTED: list[tuple[Any, str, Any]] = []


def put(target: Any, name: str, value: Any) -> None:
    """Replaces an attribute until the next run begins."""
    _PLANTED.append((target, name, getattr(target, name)))
    setattr(target, name, value)


def wrap(target: Any, name: str, change: Callable[..., Any]) -> None:
    """Replaces a function by one that gets it first."""
    was = getattr(target, name)
    put(target, name, lambda *args, **options: change(was, *args, **options))


def faulty_build(optimizer: str = "adamw", micro_batches: int = 1) -> tuple[CausalLM, Tokens]:
    while _PLANTED:
        setattr(*_PLANTED.pop())
    config = {"model_type": "llama", **FAMILIES["llama"]}
    more: dict[str, Any] = {} if optimizer == "muon" else {"optimizer_args": {"eps": 1e-4}}
    return CausalLM(config=config, optimizer=optimizer, lr=1e-3, **more), Tokens(micro_batches)


def planted(name: str) -> Any:
    """Plants a fault, and returns its strategy: called on the ranks, after `faulty_build`, and not in one process."""
    fault = FAULTS[name]
    fault.plant()
    return STRATEGIES[fault.strategy]()


# --- faults ----------------------------------------------------------------------------------------------------


def unsummed() -> None:
    put(ShardedModule, "reduce_partial", lambda self, gradients=None: None)


def summed_twice() -> None:
    wrap(ShardedModule, "reduce_partial", lambda was, *args: (was(*args), was(*args)))


def averaged_over_no_ranks() -> None:
    put(DataParallelStrategy, "separates", True)  # As DiLoCo asks for, whose copies train apart.


def scaled_by_the_group() -> None:
    wrap(MeshEngine, "reduce_gradients", lambda was, self: (was(self), double(self.sharded.parameters.values())))


def double(parameters: Any) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(2)


def own_shards_norm() -> None:
    put(OptimizerShards, "gradient_norm", lambda self, optimizer: total_norm(collect_gradients(optimizer)))


def muon_off() -> None:
    def configure(was: Any, self: Any) -> Any:
        found = was(self)
        for group in (found["optimizer"] if isinstance(found, dict) else found).param_groups:
            group["use_fallback"] = True  # AdamW, which timm's Muon has for vectors and the head.
        return found

    wrap(CausalLM, "configure_optimizers", configure)


def update_of_each_micro_batch() -> None:
    def normalise(self: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(parameter.grad.norm() + 1e-12)

    put(CausalLM, "on_after_backward", normalise)


def slope_of_own_vocabulary() -> None:
    def losses(was: Any, values: Tensor, *args: Any) -> Any:
        found, _, log_total = was(values, *args)
        return found, values.sum(dim=1, keepdim=True), log_total

    wrap(vocabulary_loss, "exp_and_losses", losses)


def bf16_weights() -> None:
    def configure(was: Any, self: Any) -> None:
        was(self)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(parameter.bfloat16())

    wrap(CausalLM, "configure_model", configure)


def no_gradients_on_rank_1() -> None:
    def after(was: Any, self: Any, automatic: bool) -> None:
        was(self, automatic)
        for tensor in self.shares[0].local_params.values() if dist.get_rank() == 1 else ():
            tensor.grad = None if tensor.grad is None else torch.zeros_like(tensor.grad)

    wrap(ZeroEngine, "after_backward", after)


class Fault(NamedTuple):
    """Fault that was shipped, and what finds it.

    Attributes:
        shipped: Issue.
        plant: Function that plants it in this process.
        strategy: Strategy under which it is planted.
        says: Pattern in the report.
        options: Options of the trainer, and arguments of :func:`faulty_build`.
        rtol: Tolerance.
    """

    shipped: str
    plant: Callable[[], None]
    strategy: str
    says: str
    options: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    rtol: float = 1e-5


ALL, NORMS = "after the first step, all 21 parameters differ", r"after the first step, model.*layernorm.weight differ"
ACCUMULATED = {"accumulate_grad_batches": 2}, {"micro_batches": 2}
MEGATRON, AUTOMODEL = "Megatron #7452", "AutoModel #3816, #577, #3817"
FAULTS = {
    "a gradient that ranks have parts of is not summed": Fault(MEGATRON, unsummed, "sp", NORMS),
    "it is summed twice": Fault(MEGATRON, summed_twice, "sp", NORMS),
    "gradients are averaged over no ranks": Fault(MEGATRON, averaged_over_no_ranks, "ddp", ALL),
    "gradients are scaled by a group's size": Fault(MEGATRON, scaled_by_the_group, "cp", ALL),
    "a rank's shards get no gradients": Fault(
        MEGATRON, no_gradients_on_rank_1, "zero2", "after the first step, the parameters that rank 1 steps differ"
    ),
    "Muon's matrices are stepped by AdamW": Fault(
        "DeepSpeed #8438", muon_off, "zero1", "after the first step, ", ({}, {"optimizer": "muon"}), 2**-7
    ),
    "each micro-batch is an update": Fault("DeepSpeed #8600", update_of_each_micro_batch, "ddp", ALL, ACCUMULATED),
    "clipping by a norm over one axis": Fault(AUTOMODEL, own_shards_norm, "sp", ALL, ({"gradient_clip_val": 0.05}, {})),
    "the gradient of a split vocabulary": Fault("pytorch #190746", slope_of_own_vocabulary, "tp", ALL),
    "weights come in bf16 for fp32": Fault("NeMo-RL #3842", bf16_weights, "fsdp", "weights differ before the first"),
}
ORDINARY = ["a rank's shards get no gradients", "weights come in bf16 for fp32"]


@pytest.mark.parametrize("names", [pytest.param(ORDINARY), pytest.param([*FAULTS], marks=pytest.mark.slow)])
def test_parity_finds_what_others_have_shipped(names: list[str]) -> None:
    for rtol in {FAULTS[name].rtol for name in names}:
        faults = {name: FAULTS[name] for name in names if FAULTS[name].rtol == rtol}
        cases = [Case(partial(planted, name), f.options[1], f.options[0], name) for name, f in faults.items()]
        cases += [Case(STRATEGIES[f.strategy], f.options[1], f.options[0]) for f in faults.values()]
        found = compare_cases(faulty_build, cases, steps=3, control=False, rtol=rtol)
        for (name, fault), faulty, clean in zip(faults.items(), found, found[len(faults) :], strict=False):
            assert clean.ok, report(clean)
            assert not faulty.ok, name
            assert re.search(fault.says, report(faulty)), report(faulty)
