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
from dlo_framework.testing.training import leave_group
from dlo_plugins.compression.compressed_all_reduce import CompressedAllReduce
from dlo_plugins.compression.gradient_compression import GradientCompression
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_plugins.schedules.lr_curves import OneCycle
from support.compression_by_definition import average_in_one_process
from support.compression_nets import FREEZE, Net, fit, same, same_on_all_ranks, train, weights
from support.strategies import STRATEGIES

# --- the all-reduce ----------------------------------------------------------------------------------------

SHAPES = [(100, 33), (7,), (300, 64), (), (0,)]


def _by_definition(rank: int, world_size: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(5)
    reduce = CompressedAllReduce(block=64)
    workers, servers = [], []
    apart, first = 0.0, torch.empty(0)
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
        apart = max([apart, *(float((a - b).abs().max()) for a, b in pairs if a.numel())])
        first = torch.cat([tensor.view(-1) for tensor in mine])
        dist.broadcast(first, 0)
        assert torch.equal(first, torch.cat([tensor.view(-1) for tensor in mine]))
    return {"apart": apart, "sent": reduce.bytes_sent / 4, "plain": 2 * 4 * (world_size - 1) / world_size}


def test_the_mean_on_ranks_is_its_definition_and_the_same_on_all() -> None:
    elements = sum(torch.Size(shape).numel() for shape in SHAPES)
    for found in run_distributed(_by_definition, 4):
        assert found["apart"] == 0.0
        assert found["sent"] < found["plain"] * elements / 20  # a bit an element, scales of 64, padding


# --- strategies that reduce gradients themselves -----------------------------------------------------------


def _halved(rank: int, world_size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("plain", "ddp", "zero3", "fsdp"):
        strategy, callbacks = (STRATEGIES[name](), [GradientCompression("bf16")]) if name != "plain" else ("ddp", [])
        seed_everything(3, workers=True, verbose=False)
        found[name] = gather_full_weights(fit(Net("adamw"), callbacks, strategy=strategy, steps=4))
    with pytest.raises(DloError, match="reduce_dtype must be bfloat16 or unset beside a callback"):
        fit(Net("adamw"), [GradientCompression("bf16")], strategy=FSDPStrategy(reduce_dtype="float32"))
    return found


def test_other_strategies_round_what_they_send_as_ddp_does() -> None:
    """The mean of two ranks in bf16 is the same whoever computes it, and its rounding moves the weights."""
    found, *_ = run_distributed(_halved, 2)

    def apart(one: str, other: str) -> float:
        return max(float((value - found[other][name]).abs().max()) for name, value in found[one].items())

    assert apart("plain", "ddp") > 1e-4
    assert apart("zero3", "ddp") < 1e-6
    assert apart("fsdp", "ddp") < 1e-6


# --- training ----------------------------------------------------------------------------------------------


#: Methods, with optimizers and settings. The first ones are tried each time; the others are slow.
METHODS: list[tuple[str, str, dict[str, Any]]] = [
    ("powersgd", "adamw", {"start_step": 10, "matrix_rank": 2}),
    ("post_local_sgd", "adamw", {"start_step": 10, "period": 4}),
    ("one_bit", "later_adam", {}),
    ("bf16", "adamw", {}),
    ("fp16", "adamw", {}),
    ("post_local_sgd", "adamw", {"start_step": 10, "period": 4, "node_size": 2}),
    ("one_bit", "refreshed", {}),
    ("one_bit", "later_lamb", {}),
]


def _methods(rank: int, world_size: int, methods: list[tuple[str, str, dict[str, Any]]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    plain, _ = train("adamw", None, steps=60)
    found["plain"] = sum(plain.losses[-10:]) / 10
    for method, optimizer, settings in methods:
        module, callback = train(optimizer, method, steps=60, settings=settings)
        sent = callback.bytes_sent() / callback.hook.plain_bytes
        loss = sum(module.losses[-10:]) / 10
        found[f"{method} {optimizer} {settings.get('node_size', 1)}"] = (loss, sent, same_on_all_ranks(module))
        if "lamb" in optimizer:
            lamb, _ = train("lamb", None, steps=60)
            found["plain lamb"] = sum(lamb.losses[-10:]) / 10
    return found


@pytest.mark.parametrize(
    "methods", [METHODS[:3], pytest.param(METHODS[3:], marks=pytest.mark.slow)], ids=["some", "others"]
)
def test_every_method_trains_sends_less_and_leaves_all_ranks_with_the_same_weights(methods: list[Any]) -> None:
    (found, *others) = run_distributed(_methods, 2, methods)
    count = len(found)
    plain, lamb = found.pop("plain"), found.pop("plain lamb", 0.0)
    shares = {
        "bf16 adamw 1": 0.5,
        "fp16 adamw 1": 0.5,
        "powersgd adamw 1": 0.35,
        "post_local_sgd adamw 1": 1 / 6 + 0.25 * 5 / 6 + 0.01,
        "post_local_sgd adamw 2": 1.25,
        "one_bit later_adam 1": 15 / 60 + 0.05,
        "one_bit refreshed 1": (15 + 5) / 60 + 0.05,
        "one_bit later_lamb 1": 30 / 60 + 0.05,
    }
    assert list(found) == [f"{method} {name} {settings.get('node_size', 1)}" for method, name, settings in methods]
    for name, (loss, sent, equal) in found.items():
        assert equal, name
        assert sent <= shares[name] + 1e-6, (name, sent)
        reference = lamb if "lamb" in name else plain
        assert loss < max(1.3 * reference, reference + 0.05), (name, loss, reference)
    assert all(len(other) == count for other in others)


#: What else a run has, beside the second stage, each time; the slow test has all.
BESIDE = ("accumulation", "skipped")


def _stages(rank: int, world_size: int, every: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for one_bit, reference in (("never_frozen", "adamw"), ("never_frozen_lamb", "lamb"))[: 2 if every else 1]:
        ours, _ = train(one_bit, "one_bit", accumulate_grad_batches=2)
        plain, _ = train(reference, None, accumulate_grad_batches=2)
        found[reference] = max(float((a - b).abs().max()) for a, b in zip(weights(ours), weights(plain), strict=True))
    ours, _ = train("never_frozen", "one_bit", gradient_clip_val=0.05)
    plain, _ = train("adamw", None, gradient_clip_val=0.05)
    found["clipped"] = max(float((a - b).abs().max()) for a, b in zip(weights(ours), weights(plain), strict=True))
    # After the freeze: a bit an element each way, and scales.
    _, at_freeze = train("one_bit_adam", "one_bit", steps=FREEZE)
    module, callback = train("one_bit_adam", "one_bit", steps=FREEZE + 5)
    per_step = callback.hook.plain_bytes / (FREEZE + 5)
    found["share"] = (callback.bytes_sent() - at_freeze.bytes_sent()) / (5 * per_step)
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
        loss = torch.tensor(module.losses[-5:]).nanmean()
        finite = all(bool(torch.isfinite(tensor).all()) for tensor in weights(module))
        found[name] = (same_on_all_ranks(module) and finite, module.losses[0], float(loss))
    return found


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "all"])
def test_the_first_stage_is_plain_training_and_the_second_goes_with_what_else_a_run_has(every: bool) -> None:
    for found in run_distributed(_stages, 2, every):
        assert found.pop("adamw") == 0.0
        assert found.pop("lamb", 0.0) < 1e-5
        assert found.pop("clipped") < 1e-5  # The norm is summed in another order.
        assert found.pop("share") < 1 / 20
        for name, (right, first, last) in found.items():
            assert right, name
            assert last < first, name


def _clipped(rank: int, world_size: int) -> tuple[float, float, float]:
    """The norm of each rank's clipped gradient, of their mean, and of what it was clipped from."""
    norms: list[float] = []
    means: list[float] = []

    class Watch(GradientCompression):
        def watch(self, optimizer: Any) -> None:
            gradient = torch.cat([p.grad.view(-1) for g in optimizer.param_groups for p in g["params"]])
            norms.append(float(gradient.norm()))
            mean = gradient.clone()
            dist.all_reduce(mean)
            means.append(float(mean.norm()) / world_size)

        def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            super().on_fit_start(trainer, pl_module)
            average = self.all_reduce.average  # type: ignore[union-attr]
            self.all_reduce.average = lambda tensors: (  # type: ignore[union-attr, method-assign]
                self.watch(trainer.optimizers[0]),
                average(tensors),
            )[1]

    seed_everything(3, workers=True, verbose=False)
    fit(Net("one_bit_adam"), [Watch("one_bit")], gradient_clip_val=0.05)
    leave_group()
    gathered: list[Any] = norms
    return max(gathered), max(means), min(gathered)


def test_after_the_freeze_ranks_clip_alike_and_the_mean_is_never_longer_than_the_limit() -> None:
    ranks = run_distributed(_clipped, 2)
    assert len(ranks) == 2
    assert all(mean <= 0.05 * (1 + 1e-4) for _, mean, _ in ranks)
    # One scale for both: their norms' mean is the limit, so one is longer than it and one shorter.
    assert max(longest for longest, _, _ in ranks) > 0.05 > min(shortest for _, _, shortest in ranks)


# --- resuming ----------------------------------------------------------------------------------------------

#: The first two each time; the others are slow.
RESUMED: list[tuple[str, str, dict[str, Any], int]] = [
    ("one_bit_lamb", "one_bit", {"block": 64}, FREEZE + 3),
    ("adamw", "powersgd", {"start_step": 3, "matrix_rank": 2}, FREEZE),
    ("one_bit_adam", "one_bit", {}, FREEZE - 2),
    ("one_bit_adam", "one_bit", {}, FREEZE + 3),
    ("adamw", "bf16", {}, FREEZE),
]


def _resumes(rank: int, world_size: int, folder: Path, cases: list[Any]) -> list[bool]:
    found = []
    for number, (optimizer, method, settings, stop) in enumerate(cases):
        path = folder / f"{number}-{world_size}"
        whole, _ = train(optimizer, method, settings=settings)
        train(optimizer, method, settings=settings, steps=stop, save=path)
        resumed, _ = train(optimizer, method, settings=settings, resume=path, seed=77)
        found.append(same(weights(whole), weights(resumed)))
    return found


@pytest.mark.parametrize(
    "cases", [RESUMED[:2], pytest.param(RESUMED[2:], marks=pytest.mark.slow)], ids=["some", "others"]
)
def test_a_resumed_run_is_the_same_to_the_last_bit(tmp_path: Path, cases: list[Any]) -> None:
    for found in run_distributed(_resumes, 2, tmp_path, cases):
        assert found == [True] * len(cases)


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
            module, _ = train(
                optimizer, method, settings=settings, strategy="ddp", resume=folder / name, steps=30, seed=5
            )
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


def _local_checkpoint(rank: int, world_size: int, folder: Path) -> bool:
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
    drifted = not same_on_all_ranks(module)
    resumed, _ = train("adamw", "post_local_sgd", settings=settings, resume=folder / "local")
    right = same(callback.mean, weights(resumed))
    return drifted and right


def test_post_local_sgd_saves_the_mean_of_the_ranks(tmp_path: Path) -> None:
    assert run_distributed(_local_checkpoint, 2, tmp_path) == [True, True]


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


def _refused(rank: int, world_size: int) -> None:
    for message, (optimizer, method, callbacks, options) in REFUSED.items():
        with pytest.raises((DloError, RuntimeError), match=re.escape(message)):
            train(optimizer, method, *callbacks, **options)


def test_what_cannot_work_is_refused_with_the_fix() -> None:
    run_distributed(_refused, 2)


def test_one_process_trains_as_without_it(tmp_path: Path) -> None:
    alone, callback = train("one_bit_adam", "one_bit", strategy="auto", save=tmp_path / "one")
    reference, _ = train("adamw", None, strategy="auto")
    assert same(weights(alone), weights(reference))
    assert callback.hook is None
