"""A step of a mixture whose experts `ep` divides over two ranks, beside the same mixture under ddp.

    python benchmarks/expert_parallel.py [--rounds 5] [--steps 4]

Each round fits each contestant once, in a random order, for some steps after one to warm up; a contestant's time is
that of a step. `ddp again` is the A/A control. Each rank has a CPU core of its own, where there are as many, and one
thread.

* ``ddp``: the mixture on both ranks, whose gradients ddp averages; the unit.
* ``FSDP``: ``MeshStrategy(dp_shard=2)``, which gathers all experts of a layer for each use.
* ``ep 2``: ``MeshStrategy(dp_shard=2, ep=2)``: half of the experts on each rank.
* ``ep 2, without its bytes``: the same less the time of the exchanges alone, measured in the same round: as many
  all-to-all calls of as many bytes as the rank that sends most has sent, between ranks that do nothing else.
"""

from __future__ import annotations

import argparse
import os
import random
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import ELAPSED, RanksClock, ratios, take_turns
from measuring.stopwatch import Stopwatch
from torch.utils.data import DataLoader

from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.testing import run_distributed
from dlo_framework.testing.training import silence_lightning
from dlo_plugins.appliers.expert_parallel import ExpertParallel
from dlo_plugins.strategies.mesh import MeshStrategy
from dlo_tasks.llm.causal_lm import CausalLM

RANKS, VOCABULARY, WARM_UP = 2, 512, 1
UNIT, EP, REST = "ddp", "ep 2", "ep 2, without its bytes"
#: Time of a step that is to be reached, over that of ddp.
BAR = 1.05
#: Exchanges of rows that a mixture makes in a step: tokens and outputs, and their gradients.
EXCHANGES = 4


class Tokens(LightningDataModule):
    """The same batches of random tokens for each contestant, others on each rank."""

    def __init__(self, rows: int, length: int, steps: int, rank: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(rank)
        self.batches = [torch.randint(VOCABULARY, (rows, length + 1), generator=draw) for _ in range(steps)]

    def train_dataloader(self) -> DataLoader:
        """Returns the batches."""
        found = [{"input_ids": ids[:, :-1].clone(), "labels": ids[:, 1:].clone()} for ids in self.batches]
        return DataLoader(found, batch_size=None, shuffle=False)  # type: ignore[arg-type]


class LastLoss(Callback):
    """Keeps the loss of the last batch."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        """Keeps the loss."""
        self.loss = outputs["loss"].detach()


def mixture(options: argparse.Namespace) -> CausalLM:
    seed_everything(0, verbose=False)
    config = {
        **{"model_type": "mixtral", "vocab_size": VOCABULARY, "num_hidden_layers": options.layers},
        **{"hidden_size": options.width, "intermediate_size": 2 * options.width, "num_local_experts": options.experts},
        **{"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": options.length},
    }
    return CausalLM(config=config, schedule="constant", lr=1e-4)


def fit(strategy: Any, options: argparse.Namespace, rank: int) -> tuple[float, float]:
    """Returns the seconds of a step, and the last loss."""
    watch, last = Stopwatch(RanksClock(torch.device("cpu")), WARM_UP, options.steps), LastLoss()
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = Trainer(
        **{"accelerator": "cpu", "devices": RANKS, "strategy": strategy, "callbacks": [watch, last], **quiet},  # type: ignore[arg-type]
        **{"max_steps": WARM_UP + options.steps, "use_distributed_sampler": False},
    )
    trainer.fit(mixture(options), datamodule=Tokens(options.rows, options.length, WARM_UP + options.steps, rank))
    loss = last.loss.clone()
    dist.all_reduce(loss)
    return watch.seconds_of_a_step, float(loss) / RANKS


def exchange(elements: int, layers: int) -> None:
    """Exchanges as many elements of each mixture as a step has sent."""
    rows = torch.ones(2 * elements)  # A rank keeps half of its rows.
    received = torch.empty_like(rows)
    for _ in range(layers * EXCHANGES):
        dist.all_to_all_single(received, rows)


def measure(rank: int, world_size: int, options: argparse.Namespace) -> dict[str, Any]:
    """Returns the seconds of each round by contestant, the losses and the sent bytes; runs on each rank."""
    silence_lightning()
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    losses: dict[str, float] = {}
    sent: list[int] = []

    def timed(name: str) -> float:
        applier = ExpertParallel()
        strategies: dict[str, Any] = {
            "FSDP": lambda: MeshStrategy(dp_shard=RANKS),
            EP: lambda: MeshStrategy(dp_shard=RANKS, ep=RANKS, appliers=[applier]),
        }
        seconds, losses[name] = fit(strategies.get(name, DataParallelStrategy)(), options, rank)
        if name == EP:
            sent.append(sum(found.sent for found in applier.exchanges.values()) // (WARM_UP + options.steps))
        return seconds

    def alone() -> float:
        if not sent:  # In the warm-up round, perhaps.
            return 0.0
        most = torch.tensor(sent[-1] // (options.layers * EXCHANGES))
        dist.all_reduce(most, dist.ReduceOp.MAX)  # The routers of the ranks send different numbers.
        elements = int(most)
        return RanksClock(torch.device("cpu")).seconds(lambda: exchange(elements, options.layers), calls=options.steps)

    runs = {name: (lambda name=name: timed(name)) for name in (UNIT, f"{UNIT} again", "FSDP", EP)}
    seconds = take_turns({**runs, "bytes": alone}, options.rounds, order=random.Random(0))
    return {"seconds": seconds, "losses": losses, "sent": sent[-1] * 4}


def table(ranks: list[dict[str, Any]], options: argparse.Namespace) -> Table:
    """Returns the table of what all ranks measured."""
    seconds = ranks[0]["seconds"]
    expected = ranks[0]["losses"][UNIT]
    for name, loss in ranks[0]["losses"].items():
        assert abs(loss - expected) <= 1e-3 * expected, f"{name}: the last loss is {loss}, and {expected} under ddp"
    what = f"{options.layers} mixtures of {options.experts} experts, width {options.width}"
    found = Table(f"a step of {what}, {options.rows * options.length} tokens a rank", "ddp's step", ELAPSED)
    for name in (UNIT, f"{UNIT} again", "FSDP", EP):
        found.add(name, ratios(seconds[name], seconds[UNIT]), ours=name == EP, control=name.endswith("again"))
    rest = [step - bytes_ for step, bytes_ in zip(seconds[EP], seconds["bytes"], strict=True)]
    found.add(REST, ratios(rest, seconds[UNIT]), ours=True, bar=BAR)
    sent = [rank["sent"] / 2**20 for rank in ranks]
    even = EXCHANGES * 2 * options.rows * options.length * options.width * options.layers * (1 - 1 / RANKS) * 4 / 2**20
    found.notes.append(f"MiB that a rank sends in a step: {max(sent):.2f} at most; {even:.2f} with a balanced router.")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=8)
    options = parse_options(parser, __file__)
    record = Record.of(__file__, __doc__, options, "cpu")
    record.add(table(run_distributed(measure, RANKS, options, timeout=1800, backend=None), options))
    record.finish()


if __name__ == "__main__":
    main()
