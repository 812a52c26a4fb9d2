"""ZeRO on two ranks trains as one process: stages, optimizers, accumulation, offload, and half precision's masters."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.errors import DloError
from dlo_framework.testing import Case, assert_parity, run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.imagenet.digits import DigitsData
from support.fsdp_nets import Module, WithAdafactor, differ, mine, trainer
from support.late import OnDevice
from support.plain_nets import plain


def zero(stage: int, **options):
    return partial(ZeroStrategy, stage, **options)


def test_every_stage_optimizer_accumulation_offload_and_clipping_is_one_process() -> None:
    cases = [
        Case(zero(stage), {"optimizer": optimizer}, {"accumulate_grad_batches": accumulate})
        for stage, optimizer, accumulate in (
            (1, "lookahead", 1),
            (2, "orthogonal", 4),
            (3, "lamb", 4),
        )
    ]
    cases += [
        Case(zero(2, offload="optimizer"), {}, {"gradient_clip_val": 0.1}),
        Case(zero(3, offload="parameters"), {}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        Case(zero(3, offload="both"), {"optimizer": "orthogonal"}, {"accumulate_grad_batches": 2}),
        Case(zero(1, bucket_mb=0.001), {"optimizer": "sgd"}, {"gradient_clip_val": 0.1}),
    ]
    cases.append(Case(zero(3, find_unused=True), {"unused": True}))
    cases += [Case(zero(stage), {}, {"precision": half}) for stage, half in ((2, "bf16-mixed"), (3, "bf16-true"))]
    assert_parity(plain, cases, steps=7)  # Lookahead's sixth step is its own.


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
    cases = [Case(strategy, {}, {"gradient_clip_val": 0.1}) for strategy in (partial(ZeroStrategy, 2), "ddp")]
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


def _fit(rank: int, world: int, module: Module, strategy: Any, **options: Any) -> Any:
    run = trainer(world, strategy, precision="bf16-mixed", gradient_clip_val=1.0, **options)
    use_canonical_checkpoints(run)
    run.fit(module, mine(rank, world), ckpt_path=options.pop("resume", None))
    return run


def _train(rank: int, world: int, folder: Path) -> dict[str, Any]:
    """Returns, of each case, losses, weights, their dtypes and how a run that is resumed differs."""
    found = {}
    for name, (kind, stage, offload) in CASES.items():
        seen: set[torch.dtype] = set()

        def make(**options: Any) -> ZeroStrategy:
            return OnDevice(stage, offload=offload, bucket_mb=2e-4, **options)  # noqa: B023

        window = {"accumulate_grad_batches": 2, "max_epochs": 2}
        plain = kind()
        exact = gather_full_weights(_fit(rank, world, plain, make(), **window))
        halves = kind()
        halves.net.head.register_forward_pre_hook(lambda head, _, seen=seen: seen.add(head.weight.dtype))
        run = _fit(rank, world, halves, make(param_dtype="bfloat16"), **window)
        weights = gather_full_weights(run)
        run.save_checkpoint(folder / name)
        module = kind()
        again = trainer(
            world, make(param_dtype="bfloat16"), precision="bf16-mixed", accumulate_grad_batches=2, max_epochs=3
        )
        use_canonical_checkpoints(again)
        again.fit(module, mine(rank, world), ckpt_path=folder / name)
        dtypes = {value.dtype for value in weights.values()}
        away = differ(weights, exact) if rank == 0 else 0.0
        found[name] = plain.losses, halves.losses, module.losses, seen, dtypes, away
    return found


def test_it_trains_as_autocast_on_single_precision_does(tmp_path: Path) -> None:
    found = run_distributed(_train, 2, tmp_path, timeout=280)[0]
    for name, (full, halves, resumed, seen, dtypes, away) in found.items():
        assert seen == {HALF}, name
        assert HALF not in dtypes, name  # Checkpoints are of the master weights.
        assert halves == pytest.approx(full, rel=0.03), name
        assert away < 0.05, name
        assert halves[-1] < halves[0], name
        assert resumed[0] < halves[0], name
        assert len(resumed) == STEPS, name


@pytest.mark.parametrize(
    ("options", "precision", "message"),
    [
        (
            {"param_dtype": "bfloat16"},
            "32-true",
            "the dtype that precision 32-true casts to, got bfloat16",
        ),
        ({"param_dtype": "float16"}, "bf16-mixed", "set the trainer's precision to 16-mixed"),
        ({"param_dtype": "bfloat61"}, "bf16-mixed", "got bfloat61; did you mean 'bfloat16'"),
        ({"reduce_dtype": "bfloat16"}, "bf16-mixed", "reduce_dtype must come with a param_dtype in half precision"),
    ],
)
def test_dtypes_that_do_not_fit_are_refused_before_processes_start(
    options: dict[str, Any], precision: Any, message: str
) -> None:
    with pytest.raises(DloError, match=message):
        trainer(2, ZeroStrategy(2, **options), precision=precision)
