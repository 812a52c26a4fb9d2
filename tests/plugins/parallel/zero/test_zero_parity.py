"""ZeRO on two ranks trains as one process: stages, optimizers, accumulation, offload, and half precision's masters;
parameters that go without a gradient, and steps that use weights outside their block."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.local_memory import memory_of
from dlo_framework.testing import Case, assert_parity, run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.user_code import OutsideUse
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_plugins.parallel.zero.zero_engine import ZeroEngine, ZeroOptions
from dlo_tasks.imagenet.digits import DigitsData
from support.fsdp_nets import WIDTH, Module, WithAdafactor, alone, check_fit, differ, fit, mine, trainer
from support.late import OnDevice
from support.on_ranks import on_ranks
from support.plain_nets import plain


def zero(stage: int, **options):
    return partial(ZeroStrategy, stage, **options)


def test_every_stage_optimizer_accumulation_offload_and_clipping_is_one_process() -> None:
    cases = [
        Case(zero(stage), {"optimizer": optimizer}, {"accumulate_grad_batches": accumulate})
        for stage, optimizer, accumulate in ((2, "orthogonal", 2), (3, "lamb", 2), (1, "lookahead", 1))
    ]
    cases += [
        Case(zero(2, offload="optimizer"), {}, {"gradient_clip_val": 0.1}),
        Case(zero(3, offload="parameters"), {}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        Case(zero(1, bucket_mb=0.001), {"optimizer": "sgd"}, {"gradient_clip_val": 0.1}),
    ]
    cases.append(Case(zero(3, find_unused=True), {"unused": True}))
    cases += [Case(zero(stage), {}, {"precision": half}) for stage, half in ((2, "bf16-mixed"), (3, "bf16-true"))]
    assert_parity(plain, cases, steps=4)  # Lookahead averages in the fourth; its second step makes its state.


OPTIMIZERS = ("adamw", "sgd", "lamb", "orthogonal")
EVERY = [
    Case(zero(stage, offload=offload), {"optimizer": optimizer}, {"accumulate_grad_batches": accumulate})
    for stage in (1, 2, 3)
    for offload in ((None, "optimizer", "both") if stage == 3 else (None, "optimizer"))
    for optimizer in OPTIMIZERS
    for accumulate in (1, 4)
]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_of_it_over_a_hundred_steps(ranks: int) -> None:
    assert_parity(plain, EVERY, world_size=ranks, steps=100, rtol=1e-5, timeout=3500)
    halves = [
        Case(zero(stage), {"optimizer": optimizer}, {"precision": "bf16-mixed"})
        for stage in (1, 2, 3)
        for optimizer in OPTIMIZERS
    ]
    assert_parity(plain, halves, world_size=ranks, steps=20, timeout=3500)
    muon = [Case(zero(stage), {"optimizer": "muon"}) for stage in (1, 2, 3)]
    assert_parity(plain, muon, world_size=ranks, steps=8, rtol=1e-3)


class Wide(LightningModule):
    """A large tensor whose gradients have a few large elements: torch's norm of it is off by 6e-5 on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1 << 20))
        generator = torch.Generator().manual_seed(0)
        size = torch.exp(2 * torch.randn(1 << 20, generator=generator))
        self.register_buffer("slope", size * torch.randn(1 << 20, generator=generator))

    def training_step(self, batch, batch_idx):
        return (batch[0].mean() + 1) * self.weight @ self.slope

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def wide() -> tuple[LightningModule, DigitsData]:
    return Wide(), DigitsData(image_size=16, batch_size=16)


def test_clipped_gradients_of_a_large_tensor_are_those_of_one_process() -> None:
    cases = [Case(strategy, {}, {"gradient_clip_val": 0.1}) for strategy in (zero(2), FSDPStrategy, "ddp")]
    assert_parity(wide, cases, steps=2, rtol=1e-5)


# ZeRO with parameters in half precision: training as autocast on full ones does


HALF = torch.bfloat16
STEPS = 4


class WithNorm(Module):
    """A batch norm, whose weights stay in single precision, and a frozen part."""

    @staticmethod
    def prepare(net: Any) -> None:
        net.stem = nn.Sequential(net.stem, nn.BatchNorm1d(6))
        net.blocks[0].one.requires_grad_(False)

    def configure_optimizers(self) -> Any:
        trained = [p for p in self.net.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=0.02, eps=1e-3, weight_decay=0.1)


CASES: dict[str, tuple[type[Module], int, str | None]] = {
    "stage 1": (WithNorm, 1, None),
    "stage 2, full tensors": (WithAdafactor, 2, None),
    "stage 2, offload": (WithNorm, 2, "optimizer"),
    "stage 3": (WithNorm, 3, None),
    "stage 3, offload both": (WithNorm, 3, "both"),
}


def _in_half_precision(rank: int, world: int, folder: Path, names: list[str]) -> None:
    for name in names:
        kind, stage, offload = CASES[name]
        seen: set[torch.dtype] = set()

        def make(**options: Any) -> ZeroStrategy:
            return OnDevice(stage, offload=offload, bucket_mb=2e-4, **options)  # noqa: B023

        window = {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 1.0}
        plain, halves, module = kind(), kind(), kind()
        exact = gather_full_weights(fit(rank, world, plain, make(), max_epochs=2, **window))
        halves.net.head.register_forward_pre_hook(lambda head, _, seen=seen: seen.add(head.weight.dtype))
        run = fit(rank, world, halves, make(param_dtype="bfloat16"), max_epochs=2, **window)
        weights = gather_full_weights(run)
        run.save_checkpoint(folder / name)
        fit(rank, world, module, make(param_dtype="bfloat16"), resume=folder / name, max_epochs=3, **window)
        assert seen == {HALF}, name
        assert HALF not in {value.dtype for value in weights.values()}, name  # Checkpoints are of the master weights.
        assert len(module.losses) == STEPS, name
        if rank == 0:  # The other's losses depend on its samples.
            assert differ(weights, exact) < 0.05, name
            assert halves.losses == pytest.approx(plain.losses, rel=0.03), name
            assert max(halves.losses[-1], module.losses[0]) < halves.losses[0], name


@pytest.mark.parametrize(
    "names", [["stage 2, full tensors", "stage 3, offload both"], pytest.param([*CASES], marks=pytest.mark.slow)]
)
def test_it_trains_as_autocast_on_single_precision_does(tmp_path: Path, names: list[str]) -> None:
    """Buckets and units, the optimizer's state on the device and in CPU memory; the slow one has all."""
    run_distributed(_in_half_precision, 2, tmp_path, names)


# --- parameters that go without a gradient ---------------------------------------------------------------------------


PARTS = 4
#: By case, which parts each of two ranks uses in each of two micro-batches, in which order.
USES: dict[str, tuple[tuple[str, str], tuple[str, str]]] = {
    "not in the last micro-batch": (("0123", "01"), ("0123", "01")),
    "not on both ranks": (("0123", "0"), ("13", "2")),
    "not on the second rank": (("0123", "0123"), ("", "")),
    "one by nobody": (("0", "1"), ("2", "0")),
    "in any order": (("0123", "3120"), ("2310", "02")),
    "in another order each time": (("0123", "3120"), ("0123", "3120")),
}


class Parts(nn.Module):
    """Linear layers, of which a forward uses some."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.parts = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(PARTS))

    def forward(self, x: Tensor, used: str) -> Tensor:
        x = self.first(x)
        for number in used:
            x = torch.tanh(self.parts[int(number)](x))
        return x.square().mean()


def _inputs(rank: int, micro: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * rank + micro))


def _alone(case: str) -> Parts:
    """Two steps of one process."""
    model = Parts()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    for _ in range(2):
        for rank, uses in enumerate(USES[case]):
            for micro, used in enumerate(uses):
                (model(_inputs(rank, micro), used) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _divided(rank: int, stage: int, case: str) -> float:
    """The same under ZeRO with a bucket a parameter; returns the largest difference."""
    model, expected = Parts(), _alone(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    options = ZeroOptions(stage, bucket_elements=1, find_unused=True)
    units = [f"parts.{number}" for number in range(PARTS)] if stage == 3 else []
    engine = ZeroEngine(model, [optimizer], units, Communicator(), torch.device("cpu"), options)
    for _ in range(2):
        for micro, used in enumerate(USES[case][rank]):
            engine.sync = micro == 1
            if engine.gathering:
                engine.gathering.begin_step()
            loss = model(_inputs(rank, micro), used) / 2
            engine.before_backward(automatic=True)
            loss.backward()
            engine.after_backward(automatic=True)
        left = [name for name, parameter in model.named_parameters() if parameter.grad is not None]
        assert not left, f"{left} keep a gradient after the step"
        nobody_s = [group.names for group in engine.groups if not engine.reducer.used.intersection(group.names)]
        assert all(group.gradient is None for group in engine.groups if group.names in nobody_s)
        optimizer.step()
        optimizer.zero_grad()
    engine.dissolve()
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return max(float((found - wanted).abs().max()) for found, wanted in pairs)


@on_ranks(2, group_timeout=60.0)
def test_each_micro_batchs_gradients_count_on_whichever_rank(rank: int, world: int) -> None:
    found = {f"{stage}, {case}": _divided(rank, stage, case) for stage in (1, 2, 3) for case in USES}
    assert found == pytest.approx(dict.fromkeys(found, 0.0), abs=1e-6)


class Sometimes(Module):
    """The net, whose second block the second rank leaves out."""

    def __init__(self, part: int = 0) -> None:
        super().__init__()
        self.part = part

    def loss(self, batch: Any) -> Tensor:
        x = self.net.stem(batch[0])
        for block in self.net.blocks[: 1 if self.part else 2]:
            x = block(x)
        return nn.functional.cross_entropy(self.net.head(x), batch[1])


class DuringAccumulation(Callback):
    """Looks at the gradients in the middle of an accumulation."""

    found: dict[str, Any] | None = None

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if self.found is None:
            fit = trainer.strategy.engine._state if isinstance(trainer.strategy, FSDPStrategy) else None
            # FSDP's full gradients are on parameters of its own.
            wholes = dict(module.named_parameters()) if fit is None else fit.usage.gathered
            self.own = {n: None if p.grad is None else p.grad.clone() for n, p in wholes.items()}
            self.found = trainer.strategy.accumulated_gradients()


@on_ranks(2, group_timeout=60.0)
def test_a_checkpoint_amid_a_step_has_the_gradients_that_one_rank_alone_has(rank: int, world: int) -> None:
    """What it saves of a parameter's gradient is the mean of the ranks'."""
    strategies = {
        "ddp": DataParallelStrategy(find_unused_parameters=True),
        "zero1": ZeroStrategy(1, find_unused=True),
        "fsdp": FSDPStrategy(find_unused=True, units=["net.stem"]),  # All ranks call what is gathered as one.
    }
    for kind, strategy in strategies.items():
        during, module = DuringAccumulation(), Sometimes(rank)
        fit(rank, world, module, strategy, accumulate_grad_batches=2, callbacks=[during])
        assert during.found is not None
        assert any(own is None for own in during.own.values()) is (rank == 1)
        for name, found in during.found.items():
            saved = found.full_tensor() if isinstance(found, DTensor) else found
            own = during.own.get(name)
            mean = torch.zeros_like(saved) if own is None else own
            dist.all_reduce(mean)
            assert float((saved - mean / world).abs().max()) < 1e-7, (kind, name)
        assert len(during.found) == len(list(module.parameters()))


@on_ranks(2, group_timeout=60.0)
def test_a_unit_that_one_rank_calls_trains_as_in_one_process(rank: int, world: int) -> None:
    strategy, expected = ZeroStrategy(3, find_unused=True), alone(Sometimes(), parts=world)
    check_fit(rank, world, Sometimes(rank), strategy, expected)


# --- stage 3 and steps that use a block's weights outside the block: they are found, gathered, and right -------------


def penalty(weights: Any) -> Tensor:
    return 0.01 * torch.stack([weight.square().sum() for weight in weights]).sum()


class AllPenalised(Module):
    """A penalty on all weights."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + penalty(self.parameters())


class OnePenalised(Module):
    """A penalty on one block's; of the other only what needs no values is asked."""

    def loss(self, batch: Any) -> Tensor:
        other = self.net.blocks[0].one.weight
        assert other.shape == other.size()
        assert (other.numel(), other.dtype, other.requires_grad) == (9 * WIDTH, torch.float32, True)
        return penalty(self.net.blocks[1].parameters()) + super().loss(batch)


class ByHand(AllPenalised):
    """Two backward passes a step, in manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(Module.loss(self, batch))
        self.manual_backward(penalty(self.parameters()))
        optimizer.step()


BLOCKS = ["net.blocks.0", "net.blocks.1"]
#: Which blocks each module's steps use outside of them.
USED = {Module: [], AllPenalised: BLOCKS, OnePenalised: BLOCKS[1:], ByHand: BLOCKS}


@on_ranks(2, group_timeout=60.0)
def test_what_a_step_uses_outside_its_block_is_kept_for_the_step(rank: int, world: int) -> None:
    for kind, used in USED.items():
        run, module = trainer(world, ZeroStrategy(3), max_epochs=2, limit_val_batches=1), kind()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            run.fit(module, mine(rank, world), mine(rank, world))
        said = [str(warning.message) for warning in told if "ZeRO stage 3" in str(warning.message)]
        assert [unit.name for unit in run.strategy.engine.gathering.units if unit.kept] == used, kind
        resting = sum(group.full.untyped_storage().nbytes() for group in run.strategy.engine.groups)
        assert resting == 0, kind  # Between steps nothing is gathered.
        assert len(said) == (rank == 0 and bool(used)), kind
        assert not said or all(block in said[0] for block in used), kind
        weights = gather_full_weights(run)
        assert rank or differ(weights, alone(kind(), epochs=2)) < 1e-6, kind


def test_only_what_needs_values_counts_as_use() -> None:
    weight, seen = nn.Parameter(torch.ones(3, 3)), []
    with OutsideUse({id(weight)}, lambda number, by_data: seen.append((number, by_data))):
        weight.shape, weight.dtype, weight.device, weight.grad, weight.requires_grad, weight.numel(), weight.size(0)
        weight.requires_grad_()
        weight.grad = None
        torch.ones(3, 3).sum()
        assert memory_of([weight]) == 9 * 4  # StateReport asks it during a step by hand with two optimizers.
        assert seen == []
        for use in (lambda: weight.sum(), lambda: weight.data, lambda: weight.T, lambda: torch.stack([weight, weight])):
            seen.clear()
            use()
            assert seen[0] == (id(weight), use.__code__.co_names[-1] == "data")
        seen.clear()
        nn.functional.linear(torch.ones(2, 3), weight=weight)
        assert seen
