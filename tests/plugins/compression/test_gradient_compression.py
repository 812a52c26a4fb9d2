"""Compressed communication on ranks: its definition, equal weights, exact resuming, bytes, and what is refused."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything

from dlo_framework.ema import WeightEMA
from dlo_framework.errors import DloError
from dlo_framework.finite import FiniteLoss
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.compression.compressed_all_reduce import CompressedAllReduce
from dlo_plugins.compression.gradient_compression import GradientCompression
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_plugins.schedules.lr_curves import OneCycle
from support.compression_by_definition import average_in_one_process
from support.compression_nets import FREEZE, Net, fit, same, same_on_all_ranks, train, weights
from support.fsdp_nets import differ
from support.on_ranks import on_ranks
from support.strategies import STRATEGIES

# --- the all-reduce ----------------------------------------------------------------------------------------

SHAPES = [(100, 33), (7,), (300, 64), (), (0,)]


@on_ranks(4)
def test_the_mean_on_ranks_is_its_definition_and_the_same_on_all(rank: int, world_size: int) -> None:
    generator = torch.Generator().manual_seed(5)
    reduce = CompressedAllReduce(block=64)
    workers, servers = [], []
    for step in range(4):
        everyones = [
            [torch.randn(shape, generator=generator) * (number + step) for number, shape in enumerate(SHAPES)]
            for _ in range(world_size)
        ]
        mine = [tensor.clone() for tensor in everyones[rank]]
        reduce.average(mine)
        layout = reduce.layout
        assert layout is not None
        workers = workers or [torch.zeros(layout.numel)] * world_size
        servers = servers or [torch.zeros(layout.chunk)] * world_size
        flat = []
        for tensors in everyones:
            buffer = torch.zeros(layout.numel)
            torch._foreach_copy_(layout.views(buffer, tensors), tensors)
            flat.append(buffer)
        mean, workers, servers = average_in_one_process(flat, workers, servers, layout)
        pairs = [*zip(mine, layout.views(mean, mine), strict=True)]
        pairs += [(reduce.worker_error, workers[rank]), (reduce.server_error, servers[rank])]
        assert all(torch.equal(a, b) for a, b in pairs)
        first = torch.cat([tensor.view(-1) for tensor in mine])
        dist.broadcast(first, 0)
        assert torch.equal(first, torch.cat([tensor.view(-1) for tensor in mine]))
    plain = sum(torch.Size(shape).numel() for shape in SHAPES) * 2 * 4 * (world_size - 1) / world_size
    assert reduce.bytes_sent / 4 < plain / 20  # a bit an element, scales of 64, padding


# --- strategies that reduce gradients themselves -----------------------------------------------------------


@on_ranks(2)
def test_other_strategies_round_what_they_send_as_ddp_does(rank: int, world_size: int) -> None:
    """The mean of two ranks in bf16 is the same whoever computes it, and its rounding moves the weights."""
    found: dict[str, Any] = {}
    for name in ("plain", "ddp", "zero3", "fsdp"):
        strategy, callbacks = (STRATEGIES[name](), [GradientCompression("bf16")]) if name != "plain" else ("ddp", [])
        seed_everything(3, workers=True, verbose=False)
        found[name] = gather_full_weights(fit(Net("adamw"), callbacks, strategy=strategy, steps=4))
    with pytest.raises(DloError, match="reduce_dtype must be bfloat16 or unset beside a callback"):
        fit(Net("adamw"), [GradientCompression("bf16")], strategy=FSDPStrategy(reduce_dtype="float32"))
    assert rank or differ(found["plain"], found["ddp"]) > 1e-4
    assert rank or max(differ(found[name], found["ddp"]) for name in ("zero3", "fsdp")) < 1e-6


# --- training ----------------------------------------------------------------------------------------------


#: Methods, with optimizers and settings. The first two are tried each time; the others are slow.
METHODS: list[tuple[str, str, dict[str, Any]]] = [
    ("powersgd", "adamw", {"start_step": 10, "matrix_rank": 2}),
    ("one_bit", "later_adam", {}),
    ("post_local_sgd", "adamw", {"start_step": 10, "period": 4}),
    ("bf16", "adamw", {}),
    ("fp16", "adamw", {}),
    ("post_local_sgd", "adamw", {"start_step": 10, "period": 4, "node_size": 2}),
    ("one_bit", "refreshed", {}),
    ("one_bit", "later_lamb", {}),
]


#: Largest shares of the bytes that plain averages send.
SHARES = {
    "bf16 adamw 1": 0.5,
    "fp16 adamw 1": 0.5,
    "powersgd adamw 1": 0.35,
    "post_local_sgd adamw 1": 1 / 6 + 0.25 * 5 / 6 + 0.01,
    "post_local_sgd adamw 2": 1.25,
    "one_bit later_adam 1": 15 / 60 + 0.05,
    "one_bit refreshed 1": (15 + 5) / 60 + 0.05,
    "one_bit later_lamb 1": 30 / 60 + 0.05,
}


def _methods(rank: int, world_size: int, methods: list[tuple[str, str, dict[str, Any]]]) -> None:
    plain: dict[str, float] = {}
    for method, optimizer, settings in methods:
        name, base = f"{method} {optimizer} {settings.get('node_size', 1)}", "lamb" if "lamb" in optimizer else "adamw"
        if base not in plain:
            plain[base] = sum(train(base, None, steps=60)[0].losses[-10:]) / 10
        module, callback = train(optimizer, method, steps=60, settings=settings)
        assert same_on_all_ranks(module), name
        assert callback.bytes_sent() / callback.hook.plain_bytes <= SHARES[name] + 1e-6, name
        loss = sum(module.losses[-10:]) / 10
        assert loss < max(1.3 * plain[base], plain[base] + 0.05), (name, loss, plain)


@pytest.mark.parametrize(
    "methods", [METHODS[:2], pytest.param(METHODS[2:], marks=pytest.mark.slow)], ids=["some", "others"]
)
def test_every_method_trains_sends_less_and_leaves_all_ranks_with_the_same_weights(methods: list[Any]) -> None:
    run_distributed(_methods, 2, methods)


def apart(one: Net, other: Net) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(weights(one), weights(other), strict=True))


#: What else a run has, beside the second stage, each time; the slow test has all.
BESIDE = ("accumulation", "skipped")


def _stages(rank: int, world_size: int, every: bool) -> None:
    for one_bit, reference in (("never_frozen", "adamw"), ("never_frozen_lamb", "lamb"))[: 2 if every else 1]:
        ours, _ = train(one_bit, "one_bit", accumulate_grad_batches=2)
        plain, _ = train(reference, None, accumulate_grad_batches=2)
        assert apart(ours, plain) <= (0.0 if reference == "adamw" else 1e-5)
    ours, _ = train("never_frozen", "one_bit", gradient_clip_val=0.05)
    plain, _ = train("adamw", None, gradient_clip_val=0.05)
    assert apart(ours, plain) < 1e-5  # The norm is summed in another order.
    # After the freeze: a bit an element each way, and scales.
    _, at_freeze = train("one_bit_adam", "one_bit", steps=FREEZE)
    module, callback = train("one_bit_adam", "one_bit", steps=FREEZE + 5)
    per_step = callback.hook.plain_bytes / (FREEZE + 5)
    assert (callback.bytes_sent() - at_freeze.bytes_sent()) / (5 * per_step) < 1 / 20
    scenes: dict[str, tuple[list[Any], dict[str, Any]]] = {
        "accumulation": ([], {"accumulate_grad_batches": 3}),
        "bf16": ([], {"precision": "bf16-mixed"}),
        "clipping": ([], {"gradient_clip_val": 0.05}),
        "by value": ([], {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"}),
        "one cycle": ([OneCycle(3e-3)], {}),
        "ema": ([WeightEMA(0.8)], {}),
        "skipped": ([FiniteLoss("skip")], {"module": {"bad_step": FREEZE + 2}}),
    }
    for name in scenes if every else BESIDE:
        callbacks, options = scenes[name]
        module, callback = train("one_bit_adam", "one_bit", *callbacks, steps=3 * FREEZE, **options)
        assert same_on_all_ranks(module), name
        assert all(bool(torch.isfinite(tensor).all()) for tensor in weights(module)), name
        assert torch.tensor(module.losses[-5:]).nanmean() < module.losses[0], name


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"])
def test_the_first_stage_is_plain_training_and_the_second_goes_with_what_else_a_run_has(every: bool) -> None:
    run_distributed(_stages, 2, every)


@on_ranks(2)
def test_after_the_freeze_ranks_clip_alike_and_the_mean_is_never_longer_than_the_limit(rank: int, world: int) -> None:
    norms, means = list[float](), list[float]()

    class Watch(GradientCompression):
        def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            super().on_fit_start(trainer, pl_module)
            average = self.all_reduce.average  # type: ignore[union-attr]

            def watched(tensors: Any) -> Any:
                gradient = torch.cat([p.grad.view(-1) for g in trainer.optimizers[0].param_groups for p in g["params"]])
                each = [torch.empty_like(gradient) for _ in range(world)]
                dist.all_gather(each, gradient)
                norms.extend(float(one.norm()) for one in each)
                means.append(float(torch.stack(each).mean(0).norm()))
                return average(tensors)

            self.all_reduce.average = watched  # type: ignore[union-attr, method-assign]

    seed_everything(3, workers=True, verbose=False)
    fit(Net("one_bit_adam"), [Watch("one_bit")], gradient_clip_val=0.05)
    assert max(means) <= 0.05 * (1 + 1e-4)
    # One scale for both: their norms' mean is the limit, so one is longer than it and one shorter.
    assert max(norms) > 0.05 > min(norms)


# --- resuming ----------------------------------------------------------------------------------------------

#: The first two each time; the others are slow.
RESUMED: list[tuple[str, str, dict[str, Any], int]] = [
    ("one_bit_lamb", "one_bit", {"block": 64}, FREEZE + 3),
    ("adamw", "powersgd", {"start_step": 3, "matrix_rank": 2}, FREEZE),
    ("one_bit_adam", "one_bit", {}, FREEZE - 2),
    ("one_bit_adam", "one_bit", {}, FREEZE + 3),
    ("adamw", "bf16", {}, FREEZE),
]


def _resumes(rank: int, world_size: int, folder: Path, cases: list[Any]) -> None:
    for number, (optimizer, method, settings, stop) in enumerate(cases):
        path = folder / f"{number}-{world_size}"
        whole, _ = train(optimizer, method, settings=settings)
        train(optimizer, method, settings=settings, steps=stop, save=path)
        resumed, _ = train(optimizer, method, settings=settings, resume=path, seed=77)
        assert same(weights(whole), weights(resumed)), cases[number]


@pytest.mark.parametrize(
    "cases", [RESUMED[:2], pytest.param(RESUMED[2:], marks=pytest.mark.slow)], ids=["some", "others"]
)
def test_a_resumed_run_is_the_same_to_the_last_bit(tmp_path: Path, cases: list[Any]) -> None:
    run_distributed(_resumes, 2, tmp_path, cases)


def _elsewhere(rank: int, world_size: int, folder: Path) -> list[Any]:
    """Goes on from two ranks' checkpoints in other ways, and says what was warned of."""
    found = []
    for optimizer, method, name in (
        ("one_bit_adam", "one_bit", "one_bit_adam"),
        ("one_bit_adam", "bf16", "one_bit_adam"),
        ("adamw", "powersgd", "powersgd"),
    ):
        settings = {"start_step": 3} if method == "powersgd" else {}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            module, _ = train(optimizer, method, settings=settings, resume=folder / name, steps=30, seed=5)
        told = [str(warning.message) for warning in caught if "compression errors" in str(warning.message)]
        found.append((told, same_on_all_ranks(module), module.losses[0], sum(module.losses[-5:]) / 5))
    return found


def _checkpoints(rank: int, world_size: int, folder: Path) -> None:
    train("one_bit_adam", "one_bit", steps=FREEZE + 6, save=folder / "one_bit_adam")
    train("adamw", "powersgd", settings={"start_step": 3}, steps=FREEZE + 6, save=folder / "powersgd")


@pytest.mark.slow
def test_other_ranks_and_methods_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    run_distributed(_checkpoints, 2, tmp_path)
    for number, of_rank in enumerate(run_distributed(_elsewhere, 4, tmp_path)):
        told = [text for text, *_ in of_rank]
        if number == 0:
            assert "ranks was 2 and is 4" in told[0][0]
            assert "it is one_bit's" in told[1][0]
            assert "ranks was 2 and is 4" in told[2][0]
        for _, equal, first, last in of_rank:
            assert equal
            assert first < 2.0  # Not from the start, which is ln 10 and more.
            assert last < 1.2


@on_ranks(2)
def test_post_local_sgd_saves_the_mean_of_the_ranks(rank: int, world_size: int, folder: Path) -> None:
    settings = {"start_step": 2, "period": 100}

    class Stop(GradientCompression):
        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            own = weights(pl_module)
            trainer.save_checkpoint(folder / "local")
            assert same(own, weights(pl_module))  # Saving changes nothing.
            for tensor in own:
                dist.all_reduce(tensor)
                tensor /= world_size
            self.mean = own

    seed_everything(3, workers=True, verbose=False)
    callback = Stop("post_local_sgd", **settings)  # type: ignore[arg-type]
    module = Net()
    fit(module, [callback])
    assert not same_on_all_ranks(module)
    resumed, _ = train("adamw", "post_local_sgd", settings=settings, resume=folder / "local")
    assert same(callback.mean, weights(resumed))


# --- what is refused ---------------------------------------------------------------------------------------


#: By a part of the error, the optimizer, the method, callbacks beside it, and options of the run.
REFUSED: dict[str, tuple[str, str, list[Any], dict[str, Any]]] = {
    "method: powersgd) does not support ZeroStrategy: its ranks have shards of the gradients": (
        "adamw", "powersgd", [], {"strategy": ZeroStrategy(2)},
    ),
    "OneBitAdam or OneBitLamb for method one_bit, got AdamW": ("adamw", "one_bit", [], {}),
    "optimizer": ("two", "one_bit", [], {"module": {"by_hand": False}}),
    "automatic for method one_bit, got Net, which optimizes manually": (
        "one_bit_adam", "one_bit", [], {"module": {"by_hand": True}},
    ),
    "must not be post_local_sgd with WeightEMA": ("adamw", "post_local_sgd", [WeightEMA()], {}),
    "node_size must divide the 2 ranks, got 3; set 1": ("adamw", "post_local_sgd", [], {"settings": {"node_size": 3}}),
}  # fmt: skip


@on_ranks(2)
def test_what_cannot_work_is_refused_with_the_fix(rank: int, world_size: int) -> None:
    for message, (optimizer, method, callbacks, options) in REFUSED.items():
        with pytest.raises((DloError, RuntimeError), match=re.escape(message)):
            train(optimizer, method, *callbacks, **options)


def test_one_process_trains_as_without_it(tmp_path: Path) -> None:
    alone, callback = train("one_bit_adam", "one_bit", strategy="auto", save=tmp_path / "one")
    reference, _ = train("adamw", None, strategy="auto")
    assert same(weights(alone), weights(reference))
    assert callback.hook is None
