"""A step that is run twice is as if it ran once, under every strategy; a bit that differs is named, with its rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, seed_everything
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn

from dlo_framework import DloError
from dlo_framework.distributed.strategy import register_data_parallel, use_canonical_checkpoints
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights, optimizer_tensors
from dlo_framework.watch.monitor import RunMonitor
from dlo_framework.watch.state_bytes import StateReport
from dlo_plugins.compression.gradient_compression import GradientCompression
from dlo_plugins.gradients.clipping_and_noise import AdaptiveGradientClipping, GradientNoise
from dlo_plugins.gradients.skip_spikes import SkipSpikes
from dlo_plugins.memory.optimizer_in_backward import OptimizerInBackward
from dlo_plugins.verify.verify_steps import VerifySteps, bit_sums
from support.fsdp_nets import Batches
from support.odd_modules import WIDTH, Block, Odd, batches
from support.strategies import STRATEGIES
from support.trainers import quiet_trainer

STEPS = 5


class Stateful(Block):
    """Draws numbers from two generators, and keeps statistics in a buffer and a number."""

    def more(self) -> None:
        self.dropout, self.own = nn.Dropout(0.2), torch.Generator().manual_seed(4)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.forwards = 0

    def act(self, hidden: Tensor) -> Tensor:
        self.forwards += 1
        noise = torch.randn((), generator=self.own).to(hidden)
        return self.dropout(nn.functional.gelu(hidden)) * (1 + 0.01 * noise + 0.001 * self.forwards)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().float().mean(0), 0.1)
        return super().forward(x + 0.1 * self.mean.to(x))


class Stately(Odd):
    block = Stateful


class Logging(Stately):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("seen", float(batch_idx), on_epoch=True, reduce_fx="sum")
        return super().training_step(batch, batch_idx)


class Watch(Callback):
    """Records what a run is to have once: losses, hooks, logged sums, weights and optimizer state."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(float(outputs["loss"]))

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.on_train_end(trainer, pl_module)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        tensors = gather_full_weights(trainer) | optimizer_tensors(trainer, trainer.strategy)
        self.seen += [torch.rand(()).item(), trainer.global_step, trainer.callback_metrics.get("seen", 0.0)]
        self.seen += [{name: bit_sums(value).tolist() for name, value in tensors.items()}]


def fit(name: str, callbacks: list[Any], kind: type[Odd] = Logging, **options: Any) -> list[Any]:
    """Trains the net under a strategy, and returns what :class:`Watch` has seen."""
    seed_everything(3, verbose=False)
    rank, world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    share = (0, 1) if name in ("tp", "pp", "cp") else (rank, world)  # Of these, ranks have the same batches.
    own = [(x.float().chunk(share[1])[share[0]], y.chunk(share[1])[share[0]]) for x, y in batches(STEPS)]
    watch = Watch()
    settings = {"devices": world, "max_epochs": 1, "num_sanity_val_steps": 0} | options
    trainer = quiet_trainer(strategy=STRATEGIES[name](), callbacks=[*callbacks, watch], **settings)
    use_canonical_checkpoints(trainer)
    trainer.fit(kind(), Batches(own))
    return watch.seen


ACCUMULATED: dict[str, Any] = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
#: Cases by name: the strategy, callbacks beside it, options.
CASES: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "ddp": ("ddp", lambda: [AdaptiveGradientClipping(0.05), GradientNoise(0.01), SkipSpikes(1.01, 2)], {}),
    "zero3": ("zero3", list, ACCUMULATED),
    "pp": ("pp", list, {}),
}
SLOW: dict[str, tuple[str, Any, dict[str, Any]]] = {
    **{name: (name, list, {}) for name in ("zero1", "zero2", "zero3_offload", "fsdp", "fsdp_offload", "tp")},
    **{f"{name}, accumulated": (name, list, ACCUMULATED) for name in ("ddp", "zero1", "fsdp", "pp", "deepspeed_2")},
    **{f"deepspeed_{stage}": (f"deepspeed_{stage}", list, {}) for stage in (1, 2, 3)},
    "zero2, in backward": ("zero2", lambda: [OptimizerInBackward()], {}),
    "ddp, bf16": ("ddp", lambda: [GradientCompression("bf16")], {}),
}


def _once(rank: int, world: int, cases: list[str]) -> dict[str, Any]:
    register_data_parallel()
    found = {}
    for case in cases:
        name, beside, options = (CASES | SLOW)[case]
        kind, verify = (Stately if name == "pp" else Logging), VerifySteps(every=2)
        reports = StateReport(), StateReport()
        without = fit(name, [*beside(), reports[0]], kind, **options)
        verified = fit(name, [*beside(), reports[1], verify], kind, **options)
        found[case] = [*without, reports[0].found], [*verified, reports[1].found], verify.checked
    return found


@pytest.mark.parametrize("cases", [pytest.param([*CASES]), pytest.param([*SLOW], marks=pytest.mark.slow)])
def test_a_run_is_the_one_without_it(cases: list[str]) -> None:
    for ranks in run_distributed(_once, 2, cases, timeout=600):
        for case, (without, verified, checked) in ranks.items():
            assert verified == without, case
            assert checked == (1 if "accumulate" in str((CASES | SLOW)[case][2]) else 2), case


def test_half_precision_with_a_scaler_is_the_run_without_it() -> None:
    half = lambda: [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**18))]
    without = fit("auto", [], plugins=half())
    assert fit("auto", [VerifySteps(every=1, copies="device")], plugins=half()) == without


# --- faults ----------------------------------------------------------------------------------------------------


class Fault:
    """Counts calls in this process, which no snapshot restores, and says when the fault is."""

    calls, at = 0, 3  # After one real step, the first of a check is call 2, and the second call 3.

    @classmethod
    def is_now(cls) -> bool:
        cls.calls += 1
        return cls.calls == cls.at and (not dist.is_initialized() or dist.get_rank() == 1)


class OneUlp(Block):
    def act(self, hidden: Tensor) -> Tensor:
        hidden = super().act(hidden)
        return torch.nextafter(hidden, hidden.new_tensor(torch.inf)) if Fault.is_now() else hidden


class Ulp(Stately):
    block = OneUlp

    def configure_model(self) -> None:
        super().configure_model()
        for number in (0, 1, 3):
            self.model.blocks[number].__class__ = Block  # The fault is in one block.


class Plant(Callback):
    """Counts calls from the first step on; flips a bit of the optimizer's state after a step, if asked to."""

    def __init__(self, flips: bool) -> None:
        self.flips = flips

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        Fault.calls = 0
        if self.flips:
            trainer.optimizers[0].register_step_post_hook(self.flip)

    @staticmethod
    def flip(optimizer: Any, *_: Any) -> None:
        if Fault.is_now():
            tensor = [p for group in optimizer.param_groups for p in group["params"] if p in optimizer.state][-1]
            optimizer.state[tensor]["exp_avg_sq"].view(torch.int32).view(-1)[:1] ^= 1


def _faulty(rank: int, world: int, strategies: list[str]) -> dict[str, Any]:
    register_data_parallel()
    found = {}
    for name in strategies:
        for kind in (Ulp, Stately):
            try:
                fit(name, [VerifySteps(every=2), Plant(kind is Stately)], kind)
            except DloError as error:
                found[f"{name} {kind.__name__}"] = str(error)
    return found


SHARDED = ["ddp", "zero3", "fsdp", "tp"]


@pytest.mark.parametrize("strategies", [["zero1"], pytest.param(SHARDED, marks=pytest.mark.slow)])
def test_a_rank_that_computes_something_else_is_named_with_its_tensors(strategies: list[str]) -> None:
    ranks = run_distributed(_faulty, 2, strategies, timeout=300)
    assert ranks[0] == ranks[1]
    for name in strategies:
        where = "ranks 0, 1" if name == "tp" else "rank 1"  # Ranks of tp add up each other's outputs.
        text = (
            f"VerifySteps: step 2, run twice from the same state, must give the same bits, got others on {where} of 2:"
        )
        assert ranks[0][f"{name} Ulp"].startswith(f"{text} the output of model.blocks.2.fc2, ")
        assert "an operation is not deterministic (trainer.deterministic: true" in ranks[0][f"{name} Ulp"]
        assert f"{text.replace('ranks 0, 1', 'rank 1')} exp_avg_sq of model." in ranks[0][f"{name} Stately"]


def test_a_difference_may_be_a_warning_and_hardware_is_the_cause_where_operations_are_deterministic() -> None:
    verify = VerifySteps(every=2, on_difference="warn")
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.warns(UserWarning, match="exp_avg_sq of .*; the hardware of that rank computes wrongly"):
            fit("auto", [verify, Plant(True)])
    finally:
        torch.use_deterministic_algorithms(False)
    assert (verify.checked, verify.differed) == (2, 1)
    assert Fault.calls == STEPS + verify.checked, "a check costs one step"


def test_after_a_difference_the_state_is_that_before_the_step() -> None:
    watch = Watch()
    with pytest.raises(DloError, match="VerifySteps: step 2, run twice"):
        fit("auto", [VerifySteps(every=2), Plant(True), watch])
    assert watch.seen == fit("auto", [], max_steps=1)


def test_a_step_that_cannot_be_repeated_is_refused() -> None:
    with pytest.raises(DloError, match="VerifySteps: a step must be repeatable from the same state: method powersgd"):
        fit("auto", [VerifySteps(), GradientCompression("powersgd")])


def test_sums_do_not_depend_on_the_place_in_memory() -> None:
    bucket = torch.randn(13)
    assert torch.equal(bit_sums(bucket[1:13]), bit_sums(bucket[1:13].clone()))
    assert torch.equal(bit_sums(bucket[1:12]), bit_sums(bucket[1:12].clone()))


def test_what_is_run_on_the_side_counts_in_no_rate() -> None:
    monitors = [RunMonitor(), RunMonitor()]
    for monitor, more in zip(monitors, ([], [VerifySteps(every=1)]), strict=True):
        fit("auto", [monitor, *more])
    (without, verified) = [monitor.flops.counts for monitor in monitors]
    assert verified == without
    assert sum(without.values()) > 0
