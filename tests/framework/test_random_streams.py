"""Random numbers on ranks: one process's weights from `setup` on, then a stream for each share of the samples."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor, nn

from dlo_framework import ParallelPlan, Task
from dlo_framework.distributed.strategy import register_data_parallel, use_canonical_checkpoints
from dlo_framework.run.resume import ExactResume
from dlo_framework.testing import run_distributed
from dlo_tasks.imagenet.digits import DigitsData
from support.runs import Watch
from support.strategies import STRATEGIES
from support.trainers import quiet_trainer

STEPS, FITS, WIDTH = 4, 2, 32


#: Ranks of these share their samples.
SHARED = ("tp", "pp")


class NoisySGD(torch.optim.SGD):
    """Adds noise to the weights, which replicas need to have in common."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(torch.randn_like(parameter), alpha=1e-3)
        return loss


def make_block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2), nn.Linear(WIDTH, WIDTH))


class Net(Task):
    """Builds a layer in ``__init__``, one in ``setup`` and the rest in ``configure_model``."""

    def __init__(self, noisy: bool) -> None:
        super().__init__()
        self.noisy = noisy
        self.stem: list[Any] = [nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, WIDTH))]
        self.weights: dict[str, Tensor] = {}
        self.draws: list[tuple[float, ...]] = []

    def setup(self, stage: str) -> None:
        self.stem.append(make_block())

    def configure_model(self) -> None:
        if not self.has_model:
            self.model = nn.Sequential(*self.stem, make_block(), nn.Linear(WIDTH, 10))
        self.weights = {name: tensor.clone() for name, tensor in self.state_dict().items()}

    def parallel_plan(self) -> ParallelPlan:
        return ParallelPlan(blocks=("[1-2]",), stem=("0",), head=("3",), tensor={"[1-2].0": "column", "[1-2].2": "row"})

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.draws.append((float(torch.rand(())), float(np.random.rand()), random.random()))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(outputs, batch[1])

    def configure_optimizers(self) -> Any:
        return (NoisySGD if self.noisy else torch.optim.SGD)(self.parameters(), lr=1e-2)


def fit(world_size: int, name: str, save: Path | None = None, resume: Path | None = None, steps: int = STEPS) -> Any:
    """Returns the net after a fit, and the trainer."""
    trainer = quiet_trainer(
        devices=world_size,
        strategy=STRATEGIES[name]() if world_size > 1 else "auto",
        max_steps=steps,
        max_epochs=-1,
        limit_val_batches=0,
        callbacks=[Watch(save, 2), ExactResume()],
    )
    use_canonical_checkpoints(trainer)
    net = Net(noisy=name == "ddp")
    trainer.fit(net, datamodule=DigitsData(image_size=16, batch_size=32), ckpt_path=resume)
    return net, trainer


def _fits(rank: int, world_size: int, names: list[str]) -> dict[str, list[Any]]:
    """Returns the first weights, the draws and, of ddp, the last weights of each fit; seeds once for each strategy."""
    register_data_parallel()
    found: dict[str, list[Any]] = {}
    for name in names:
        seed_everything(5, workers=True, verbose=False)
        nets = [fit(world_size, name)[0] for _ in range(FITS)]
        found[name] = [(net.weights, net.draws, net.state_dict() if name == "ddp" else None) for net in nets]
    return found


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["ddp", "zero3", "tp", "pp"], id="some"),
        pytest.param(["zero1", "fsdp", "deepspeed_2"], id="others", marks=pytest.mark.slow),
    ],
)
def test_all_strategies_draw_the_weights_of_one_process_and_then_numbers_of_their_own(names: list[str]) -> None:
    (alone,) = run_distributed(_fits, 1, ["ddp"], backend=None)
    one, two = run_distributed(_fits, 2, names, backend=None)
    for name in names:
        for number, ((weights, _, _), first, second) in enumerate(zip(alone["ddp"], one[name], two[name], strict=True)):
            for of_rank, draws, _ in (first, second):
                for key, tensor in weights.items():
                    assert torch.equal(of_rank[key], tensor), (name, number, key)
                assert len(draws) == STEPS
            if name in SHARED:
                assert first[1][0] == second[1][0], (name, number)
            else:
                for mine, theirs in zip(first[1], second[1], strict=True):
                    assert all(a != b for a, b in zip(mine, theirs, strict=True)), (name, number)
        everything = [draw for found in (one, two)[: 1 if name in SHARED else 2] for f in found[name] for draw in f[1]]
        assert len({draw[0] for draw in everything}) == len(everything), f"{name}: a stream has begun again"
    assert alone["ddp"][0][0]["model.0.1.weight"].std() > 0
    first = torch.cat([alone["ddp"][0][0][f"model.{key}.weight"].flatten()[:WIDTH] for key in ("1.0", "2.0")])
    assert abs(float(torch.corrcoef(first.view(2, -1))[0, 1])) < 0.9
    for of_first, of_second in zip(one.get("ddp", []), two.get("ddp", []), strict=True):
        assert all(torch.equal(of_second[2][key], tensor) for key, tensor in of_first[2].items()), "replicas differ"


def _unseeded(rank: int, world_size: int) -> tuple[dict[str, Tensor], Any]:
    register_data_parallel()
    torch.seed()
    net, _ = fit(world_size, "zero3")
    return net.weights, net.draws


def _resumed(rank: int, world_size: int, folder: Path, jobs: list[tuple[str, str | None, str | None]]) -> list[Any]:
    register_data_parallel()
    found = []
    for name, save, resume in jobs:
        seed_everything(5, workers=True, verbose=False)
        if save == "after":  # Saved when the fit has ended.
            _, trainer = fit(world_size, name, steps=2)
            trainer.save_checkpoint(folder / name)
            continue
        net, trainer = fit(world_size, name, save and folder / save, resume and folder / resume)
        found.append((net.draws, trainer.callbacks[0].losses))
    return found


def test_ranks_without_a_seed_agree_on_weights_from_setup_on() -> None:
    (one, draws), (two, others) = run_distributed(_unseeded, 2, backend=None)
    assert all(torch.equal(one[key], two[key]) for key in one if not key.startswith("model.0."))
    assert draws[0] != others[0]


def test_each_rank_goes_on_with_its_own_numbers(tmp_path: Path) -> None:
    names = ["ddp", "pp"]
    jobs: list[Any] = [(name, name, None) for name in names] + [(name, None, name) for name in names]
    jobs += [("ddp", "after", None), ("ddp", None, "ddp"), ("zero3", None, "pp")]
    one, two = run_distributed(_resumed, 2, tmp_path, jobs, backend=None)
    for rank in (one, two):
        for whole, rest in zip(rank[: len(names)], rank[len(names) :], strict=False):
            assert (rest[0], rest[1]) == (whole[0][2:], whole[1][2:])
        assert rank[2 * len(names)][0] == rank[0][0][2:], "saved after the fit"
    assert one[-1][0] != two[-1][0], "ranks of a pipeline had one stream"
    (alone,) = run_distributed(_resumed, 1, tmp_path, [("ddp", None, "ddp"), ("ddp", "one", None)], backend=None)
    assert alone[0][0][0] == one[0][0][2], "one process goes on with rank 0's"
    one, two = run_distributed(_resumed, 2, tmp_path, [("ddp", None, "one"), ("tp", None, "one")], backend=None)
    assert one[0][0] != two[0][0]
    assert one[1][0][0] == two[1][0][0] == alone[1][0][2]
