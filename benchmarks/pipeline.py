"""What a step of each pipeline schedule takes over the ideal: the work shared out, and the bubble of theory.

    python benchmarks/pipeline.py [--ranks 2] [--micro-batches 4 8] [--rounds 7] [--layers 8] [--width 256]

Ranks are pinned to a core each, one thread a rank; a Llama of equal blocks. All figures come from the spans of the step
itself, so another program on a core slows the step and its ideal alike:

- `over theory`: the step over (work of all ranks / ranks + bubble by the papers' formulas);
- `over schedule`: the step over the same actions, each as long as it was, if ranks waited for nothing but each other;
- `idle`: what ranks do not compute, over 1F1B's of the same round.

`1F1B again` is the A/A control.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
from typing import Any

import torch
import torch.distributed as dist
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import take_turns
from torch import nn

from dlo_framework.plan import ParallelPlan
from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.pipeline.pipeline_engine import Pipeline
from dlo_plugins.parallel.pipeline.pipeline_schedules import ActionKind, make_schedule, theoretical_bubble
from dlo_plugins.parallel.pipeline.simulation import MeasuredCosts
from dlo_plugins.parallel.pipeline.timeline import simulate_ideal

SCHEDULES = {"GPipe": "GPipe", "1F1B": "1F1B", "1F1B again": "1F1B"} | {
    name: name for name in ("Interleaved1F1B", "ZBH1", "ZBV")
}
VOCABULARY = 128
#: What is to be reached: a step over theory's; and, by one zero-bubble schedule, idle time over 1F1B's.
THEORY_BARS, IDLE_BARS = {"GPipe": 1.05, "1F1B": 1.05}, {"ZBV": 0.5}


def build(layers: int, width: int) -> nn.Module:
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=4096,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config)


PLAN = ParallelPlan(
    blocks=("model.layers.*",), stem=("model.embed_tokens", "model.rotary_emb"), head=("model.norm", "lm_head")
)


def measure(
    rank: int, world_size: int, micro_batches: int, rounds: int, layers: int, width: int, tokens: int, names: list[str]
) -> dict[str, list[dict[str, float]]]:
    """Returns each round's figures, by schedule; runs on each rank."""
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank % os.cpu_count()]})  # type: ignore[operator]
    batches = [torch.randint(VOCABULARY, (max(1, tokens // 256), 256)) for _ in range(micro_batches)]
    pipelines: dict[str, Any] = {}
    for name in names:
        schedule = SCHEDULES[name]
        model: Any = build(layers, width)
        stages = world_size * (1 if schedule in ("GPipe", "1F1B", "ZBH1") else 2)
        pipeline = Pipeline(model, PLAN, dist.group.WORLD, schedule=schedule, split=[layers // stages] * stages)
        pipeline.record = True
        pipelines[name] = pipeline, model

    def step(name: str) -> dict[str, float]:
        pipeline, model = pipelines[name]
        pipeline.train_step(
            batches,
            lambda ids: model.base_model(input_ids=ids, use_cache=False)[0],
            lambda hidden, ids: nn.functional.cross_entropy(model.lm_head(hidden).flatten(0, 1), ids.flatten()),
        )
        model.zero_grad()
        return figures(pipeline, micro_batches)

    return take_turns({name: (lambda name=name: step(name)) for name in pipelines}, rounds, order=random.Random(0))


def figures(pipeline: Pipeline, micro_batches: int) -> dict[str, float]:
    """Returns what the last step's spans say."""
    timeline = pipeline.timeline()
    where = pipeline.placement
    schedule = make_schedule(pipeline.schedule, where.ranks, micro_batches)
    step = max(item.end for row in timeline.rows for item in row)
    costs = MeasuredCosts.from_timeline(timeline)
    chunks = where.stages_per_rank
    forward = costs.mean(ActionKind.FORWARD) * chunks
    # Where backward is split in part, a full backward is both of its parts.
    input, weight = costs.mean(ActionKind.INPUT) * chunks, costs.mean(ActionKind.WEIGHT) * chunks
    if not input:
        input = costs.mean(ActionKind.BACKWARD) * chunks
    bubble = theoretical_bubble(schedule.name, where.ranks, micro_batches, (forward, input, weight), chunks)
    work = sum(timeline.busy)
    return {
        "step": step,
        "over theory": step / (work / where.ranks + bubble),
        "over schedule": step / simulate_ideal(timeline, schedule).makespan,
        "idle": step * where.ranks - work,
        "forward": forward,
        "input": input,
        "weight": weight,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=4096, help="of a step; 256 a micro-batch at least")
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=list(SCHEDULES))
    options = parse_options(parser, __file__)
    record = Record.of(__file__, __doc__, options)
    for number in options.micro_batches:
        found = run_distributed(
            measure,
            options.ranks,
            number,
            options.rounds,
            options.layers,
            options.width,
            options.tokens // number,
            options.schedules,
            timeout=1200,
            group_timeout=120,
        )[0]
        for table in tables(found, number, options.ranks):
            record.add(table)
        for name in options.schedules:
            if name not in found:
                needs = f"it needs {2 * options.ranks} micro-batches on {options.ranks} ranks"
                record.without(f"{name}, {number} micro-batches", needs)
    record.finish()


def tables(found: dict[str, list[dict[str, float]]], number: int, ranks: int) -> list[Table]:
    """Returns the step over the ideal, and the idle time over 1F1B's, for ``number`` micro-batches."""
    what = f"{number} micro-batches on {ranks} ranks"
    spans = "spans of the step itself"
    step = Table(f"a step over theory, {what}", "work of all ranks / ranks + the bubble by the papers", spans)
    idle = Table(f"idle time, {what}", "1F1B's", spans)
    for name, rounds in found.items():
        control = name.endswith("again")
        middle = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        step.add(
            name,
            [one["over theory"] for one in rounds],
            bar=THEORY_BARS.get(name),
            ours=True,
            control=control,
            ms=middle["step"] * 1e3,
            over_schedule=middle["over schedule"],
            forward_ms=middle["forward"] * 1e3,
        )
        if "1F1B" in found:
            over = [one["idle"] / base["idle"] for one, base in zip(rounds, found["1F1B"], strict=True)]
            idle.add(name, over, bar=IDLE_BARS.get(name), ours=True, control=control, ms=middle["idle"] * 1e3)
    return [step, idle] if idle.rows else [step]


if __name__ == "__main__":
    main()
