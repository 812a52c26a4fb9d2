"""A step of DualPipeV whose exchanges of experts overlap with computation, beside the same step without overlap.

    python benchmarks/expert_overlap.py [--rounds 9] [--share 0.5 1.0]

Two ranks share the experts of each mixture, and each has all stages of a pipeline of its own: the pairs of the schedule
are those of any number of ranks. Each rank has a CPU core of its own, where there are as many, and one thread.

The ranks' own memory is faster than any network, so the link is simulated: an exchange ends no earlier than its bytes
take at the link's rate, after the exchanges before it; a rank that waits for it does not compute. The rate is such that
all exchanges of a step take a share of the time that the step takes without the link.

* ``one after the other``: the pairs of the schedule without overlap; the unit. ``one after the other, again`` is the
  A/A control.
* ``overlap``: the pairs take turns.
* ``without the link``: without overlap, and without the simulated link: no overlap can be faster.

`exposed` is the time that a rank waits for exchanges, over that of the unit in the same round.
"""

from __future__ import annotations

import argparse
import os
import random
import threading
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import ELAPSED, RanksClock, ratios, spread, take_turns
from torch import Tensor, nn

from dlo_framework.experts import find_mixtures
from dlo_framework.plan import ParallelPlan
from dlo_framework.testing import run_distributed
from dlo_plugins.experts.local_experts import divide_experts
from dlo_plugins.experts.token_exchange import TokenExchange
from dlo_plugins.pipeline.pipeline_engine import Pipeline
from dlo_plugins.pipeline.turns import Turns

RANKS, VOCABULARY = 2, 128
UNIT, AGAIN, OVERLAP, BOUND = "one after the other", "one after the other, again", "overlap", "without the link"
PLAN = ParallelPlan(
    blocks=("model.layers.*",), stem=("model.embed_tokens", "model.rotary_emb"), head=("model.norm", "lm_head")
)


class SlowLink:
    """Simulated link for all-to-all exchanges, in place of :func:`torch.distributed.all_to_all_single`.

    Attributes:
        rate: Bytes per second; None for no link.
        waited: Seconds that this rank has waited for exchanges.
    """

    def __init__(self) -> None:
        self.rate: float | None = None
        self.waited = 0.0
        self._exchange: Any = dist.all_to_all_single
        self._free = 0.0

    def __call__(self, out: Tensor, rows: Tensor, *splits: Any, group: Any, async_op: bool = False) -> Any:
        """Exchanges rows over the link."""
        work = self._exchange(out, rows, *splits, group=group, async_op=True)
        now = ELAPSED.now()
        if self.rate is not None:
            self._free = max(now, self._free) + rows.nbytes / RANKS / self.rate
        started = _Started(self, work, self._free if self.rate is not None else now)
        if async_op:
            return started
        started.wait()
        return None


class _Started:
    """Exchange under way over a slow link."""

    def __init__(self, link: SlowLink, work: Any, end: float) -> None:
        self._link, self._work, self._end = link, work, end

    def wait(self) -> None:
        """Waits until the link has sent the rows."""
        begin = ELAPSED.now()
        self._work.wait()
        threading.Event().wait(max(0.0, self._end - ELAPSED.now()))
        self._link.waited += ELAPSED.now() - begin


def build(options: argparse.Namespace) -> tuple[Any, list[TokenExchange]]:
    """Returns a mixture with this rank's experts, and the exchanges of its layers."""
    from transformers import AutoModelForCausalLM, MixtralConfig

    torch.manual_seed(0)
    config = MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=options.width, intermediate_size=2 * options.width,
        num_hidden_layers=options.layers, num_local_experts=options.experts, num_attention_heads=4,
        num_key_value_heads=4, max_position_embeddings=options.length,
    )  # fmt: skip
    model: Any = AutoModelForCausalLM.from_config(config)
    world = dist.group.WORLD
    assert world is not None
    return model, [divide_experts(model, mixture, world) for mixture in find_mixtures(model)]


def measure(rank: int, world_size: int, options: argparse.Namespace, share: float) -> dict[str, Any]:
    """Returns each round's seconds and waits by contestant, and the fraction of bytes that overlap."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[rank % len(cores)]})
    model, exchanges = build(options)
    alone: Any = [dist.new_group([number]) for number in range(world_size)][rank]
    pipeline = Pipeline(model, PLAN, alone, schedule="DualPipeV", split=[options.layers // 2] * 2)
    turns, link, clock = Turns(torch.device("cpu")), SlowLink(), RanksClock(torch.device("cpu"))
    for found in exchanges:
        found.turns = turns
    draw = torch.Generator().manual_seed(rank)
    batches = [torch.randint(VOCABULARY, (1, options.length), generator=draw) for _ in range(options.micro_batches)]
    rate: list[float] = []
    bytes_of: dict[str, int] = {}

    def step() -> None:
        pipeline.train_step(
            batches,
            lambda ids: model.base_model(input_ids=ids, use_cache=False)[0],
            lambda hidden, ids: nn.functional.cross_entropy(model.lm_head(hidden).flatten(0, 1), ids.flatten()),
        )
        model.zero_grad()

    def timed(name: str) -> tuple[float, float]:
        pipeline.turns = turns if name == OVERLAP else None
        link.rate, link.waited = (None if name == BOUND or not rate else rate[0]), 0.0
        sent = sum(found.sent_bytes for found in exchanges)
        overlapped = sum(found.overlapped_bytes for found in exchanges)
        seconds = clock.seconds(step)
        bytes_of["sent"] = sum(found.sent_bytes for found in exchanges) - sent
        bytes_of[name] = sum(found.overlapped_bytes for found in exchanges) - overlapped
        return seconds, link.waited

    def choose_rate(number: int) -> None:
        """Chooses the rate of the link before each round, by a step without it."""
        rate.clear()
        seconds = torch.tensor(timed(BOUND)[0], dtype=torch.double)
        bytes_ = torch.tensor(bytes_of["sent"], dtype=torch.double)
        dist.all_reduce(seconds)
        dist.all_reduce(bytes_, dist.ReduceOp.MAX)
        rate.append(float(bytes_ / (share * seconds / world_size)))

    names = (UNIT, AGAIN, OVERLAP, BOUND)
    with mock.patch.object(dist, "all_to_all_single", link):
        runs = {name: (lambda name=name: timed(name)) for name in names}
        found_ = take_turns(runs, options.rounds, order=random.Random(0), before_round=choose_rate)
    return {"rounds": found_, "fraction": bytes_of[OVERLAP] / bytes_of["sent"]}


def table(ranks: list[dict[str, Any]], options: argparse.Namespace, share: float) -> Table:
    """Returns the table of what all ranks measured."""
    rounds = ranks[0]["rounds"]
    what = f"{options.layers} mixtures of {options.experts} experts, {options.micro_batches} micro-batches"
    found = Table(f"a step of {what}, exchanges of {share:g} of its time", f"{UNIT}: its step", ELAPSED)
    unit = [seconds for seconds, _ in rounds[UNIT]]
    waits = [waited for _, waited in rounds[UNIT]]
    for name, pairs in rounds.items():
        exposed = spread(ratios([waited for _, waited in pairs], waits)).median
        found.add(
            name, ratios([seconds for seconds, _ in pairs], unit), ours=name == OVERLAP, control=name == AGAIN,
            exposed=exposed,
        )  # fmt: skip
    fractions = [rank["fraction"] for rank in ranks]
    found.notes.append(f"Bytes of exchanges that overlap: {min(fractions):.1%} of a step's.")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--share", type=float, nargs="+", default=[0.5, 1.0])
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--experts", type=int, default=4)
    options = parse_options(parser, __file__)
    record = Record.of(__file__, __doc__, options, "cpu")
    for share in options.share:
        record.add(table(run_distributed(measure, RANKS, options, share, timeout=900), options, share))
    record.finish()


if __name__ == "__main__":
    main()
