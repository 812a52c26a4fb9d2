"""A training step of Muon under dlo's FSDP and ZeRO, beside plain FSDP2 whose ranks each gather every matrix.

Muon: An optimizer for hidden layers in neural networks. Jordan et al., 2024, https://kellerjordan.github.io/posts/muon.

    python benchmarks/muon.py [--ranks 2] [--rounds 10] [--width 512] [--depth 4] [--deepspeed]

All contestants train one model of square and oblong matrices on the same batches, with the same Muon (five steps of
Newton-Schulz in single precision). Batches have one row a rank, so that the optimizer is most of the step.

* ``gather each``: plain FSDP2. Each rank keeps its shards of the momenta, gathers each matrix's update, orthogonalises
  it, and applies its own rows: every rank orthogonalises every matrix. The unit; ``gather each again`` is the control.
* ``dlo fsdp``, ``dlo zero1`` to ``zero3``: one rank orthogonalises each matrix, and sends the result.
* ``FSDP2, SGD``: plain FSDP2 with an elementwise optimizer: the step without Muon.
* ``DeepSpeed 1`` to ``3``: DeepSpeed's own Muon, with the standard iteration in single precision as for the others.
  Its updates have another scale, so that its weights are not compared.

With N ranks the orthogonalisation takes 1 / N of the time of ``gather each`` where it is divided evenly. Elapsed time,
for the ranks wait for each other. After the rounds all Muons must have the same weights.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import ELAPSED, RanksClock, all_ratios, take_turns
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.groups import MeshGroups
from dlo_framework.mesh import MeshSpec
from dlo_framework.testing import run_distributed
from dlo_plugins.appliers.fully_shard import FullyShard
from dlo_plugins.fsdp.sharded_optimizers import OptimizerShards
from dlo_plugins.fsdp.sharding import ShardedModule
from dlo_plugins.zero.zero_engine import ZeroEngine, ZeroOptions

CPU, BASE = torch.device("cpu"), "gather each"
#: Coefficients of the quintic iteration.
A, B, C = 3.4445, -4.7750, 2.0315
#: Step of each contestant's weights that may differ by rounding.
TOLERANCE = 1e-4


def orthogonalise(update: Tensor) -> Tensor:
    """Returns the nearest orthogonal matrix, by five steps of Newton-Schulz."""
    tall = update.shape[0] > update.shape[1]
    x = update.t() if tall else update
    x = x / (x.norm() + 1e-7)
    for _ in range(5):
        gram = x @ x.t()
        x = A * x + (B * gram + C * gram @ gram) @ x
    return x.t() if tall else x


class Muon(torch.optim.Optimizer):
    """Muon of full matrices; with DTensors it gathers each."""

    def __init__(self, params: Any, lr: float = 1e-3, momentum: float = 0.95) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Takes a step."""
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"], group["momentum"])
        return loss

    def _update(self, parameter: Tensor, lr: float, momentum: float) -> None:
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer = state["momentum_buffer"].lerp_(parameter.grad, 1 - momentum)
        update = parameter.grad.lerp(buffer, momentum)
        if not isinstance(update, DTensor):
            parameter.add_(orthogonalise(update), alpha=-lr)
            return
        found = orthogonalise(update.full_tensor())
        own = parameter.to_local()
        rows = -(-len(parameter) // dist.get_world_size())  # FSDP2's, as torch.chunk has them.
        first = min(rows * dist.get_rank(), len(parameter))
        own.add_(found[first : first + len(own)], alpha=-lr)


class Blocks(nn.Module):
    """Residual MLPs of matrices without biases."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, width, bias=False),
                nn.Linear(width, 4 * width, bias=False),
                nn.GELU(),
                nn.Linear(4 * width, width, bias=False),
            )
            for _ in range(depth)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


#: Step on a batch, and the module's full weights, on all ranks.
Contestant = tuple[Callable[[Tensor], None], Callable[[], list[Tensor]]]


def plain(options: argparse.Namespace, optimizer: Callable[[Any], torch.optim.Optimizer]) -> Contestant:
    """Returns plain FSDP2."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = Blocks(options.width, options.depth)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    stepped = optimizer(model.parameters())

    def step(batch: Tensor) -> None:
        stepped.zero_grad()
        model(batch).backward()
        stepped.step()

    return step, lambda: [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]


def fsdp(options: argparse.Namespace) -> Contestant:
    """Returns dlo's FSDP."""
    model = Blocks(options.width, options.depth)
    groups = MeshGroups(MeshSpec(dp_shard=dist.get_world_size()), "cpu")
    settings = FullyShard().options("32-true", groups.spec, CPU, model)
    sharded = ShardedModule(model, [f"blocks.{n}" for n in range(options.depth)], groups, CPU, settings, seed=0)
    optimizer = Muon(model.parameters())
    shares, names = OptimizerShards([optimizer], sharded), set(sharded.parameters)

    def step(batch: Tensor) -> None:
        shares.drop_gradients(lambda share: True)
        sharded.call(lambda: model(batch)).backward()
        shares.set_grads(names)
        optimizer.step()
        optimizer.zero_grad()

    def weights() -> list[Tensor]:
        sharded.reshard()
        return [p.full_tensor().detach() for p in model.parameters()]  # type: ignore[attr-defined]

    return step, weights


def zero(options: argparse.Namespace, stage: int) -> Contestant:
    """Returns dlo's ZeRO."""
    model = Blocks(options.width, options.depth)
    optimizer = Muon(model.parameters())
    units = [f"blocks.{number}" for number in range(options.depth)]
    engine = ZeroEngine(model, [optimizer], units, Communicator(), CPU, ZeroOptions(stage, 6_553_600))

    def step(batch: Tensor) -> None:
        optimizer.zero_grad()
        loss = model(batch)
        engine.before_backward(automatic=True)
        loss.backward()
        engine.after_backward(automatic=True)
        optimizer.step()

    def weights() -> list[Tensor]:
        return [] if stage == 3 else [p.detach().clone() for p in model.parameters()]

    return step, weights


def deepspeed(options: argparse.Namespace, stage: int) -> Contestant:
    """Returns DeepSpeed's Muon (0.19), which computes in half precision unless its function says otherwise."""
    import deepspeed as ds
    from deepspeed.runtime.zero.muon import original_muon

    original_muon.ns_compute_dtype = lambda method="gram": torch.float32
    model = Blocks(options.width, options.depth)
    for parameter in model.parameters():
        parameter.use_muon = True  # type: ignore[attr-defined]
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "Muon", "params": {"lr": 1e-3, "momentum": 0.95, "ns_method": "standard"}},
        "zero_optimization": {"stage": stage, "reduce_scatter": False},
    }
    engine, *_ = ds.initialize(model=model, model_parameters=list(model.parameters()), config=config)

    def step(batch: Tensor) -> None:
        engine.backward(engine(batch))
        engine.step()

    return step, list


def contestants(options: argparse.Namespace) -> dict[str, Callable[[], Contestant]]:
    found: dict[str, Callable[[], Contestant]] = {
        BASE: lambda: plain(options, Muon),
        f"{BASE} again": lambda: plain(options, Muon),
        "FSDP2, SGD": lambda: plain(options, lambda given: torch.optim.SGD(given, lr=1e-3)),
        "dlo fsdp": lambda: fsdp(options),
    }
    found |= {f"dlo zero{stage}": lambda stage=stage: zero(options, stage) for stage in (1, 2, 3)}
    if options.deepspeed:
        found |= {f"DeepSpeed {stage}": lambda stage=stage: deepspeed(options, stage) for stage in (1, 2, 3)}
    return found


def measure(rank: int, world_size: int, options: argparse.Namespace) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Returns the seconds of each round, and how far each contestant's weights are from the base's."""
    torch.set_num_threads(1)
    if options.deepspeed:
        os.environ.update(DS_ACCELERATOR="cpu", LOCAL_RANK=str(rank))
    built = {name: make() for name, make in contestants(options).items()}
    clock, now = RanksClock(CPU), {}

    def new_batch(number: int) -> None:
        generator = torch.Generator().manual_seed(number * world_size + rank)
        now["batch"] = torch.randn(1, options.width, generator=generator)

    runs = {name: (lambda step=step: clock.seconds(lambda: step(now["batch"]))) for name, (step, _) in built.items()}
    seconds = take_turns(runs, options.rounds, warm_up=2, order=random.Random(0), before_round=new_batch)
    ends = {name: weights() for name, (_, weights) in built.items()}
    apart = {
        name: max(float((one - other).abs().max()) for one, other in zip(found, ends[BASE], strict=True))
        for name, found in ends.items()
        if found and "SGD" not in name
    }
    return seconds, apart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--deepspeed", action="store_true")
    options = parse_options(parser, __file__)
    record = Record.of(__file__, __doc__, options, "cpu")
    record.without("torchtitan's DistMuon", "it takes CUDA devices alone (torchtitan of August 2026)")
    seconds, apart = run_distributed(measure, options.ranks, options, timeout=1800, group_timeout=600)[0]
    for name, difference in apart.items():
        assert difference < TOLERANCE, f"{name} ends with other weights: {difference}"
    matrices = sum(p.numel() for p in Blocks(options.width, options.depth).parameters())
    table = Table(f"a step of Muon, {matrices / 1e6:.1f} million elements, {options.ranks} ranks", BASE, ELAPSED)
    for name, ratios in all_ratios(seconds, BASE).items():
        table.add(
            name,
            ratios,
            ours=name.startswith("dlo"),
            control=name.endswith("again"),
            ms=statistics.median(seconds[name]) * 1e3,
        )
    record.add(table)
    record.finish()


if __name__ == "__main__":
    main()
