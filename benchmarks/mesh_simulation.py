"""Models of 405 billion and a trillion parameters on 512 to 3,072 ranks, in one process without memory.

    python benchmarks/mesh_simulation.py [--only 405B|1T] [--pp 16] [--no-traffic]

* Llama 3.1 405B: The Llama 3 Herd of Models. Grattafiori et al., 2024, arXiv 2407.21783, table 3; sequences of 8,192.
* 1T: Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM. Narayanan et al., 2021, arXiv
  2104.04473, table 1: the GPT of 128 layers, as GPT-NeoX; sequences of 2,048. Their 3,072 ranks are those here.

Each configuration cuts the model by the code that runs, for the first and the last rank, and counts one optimizer step
with one sequence a micro-batch. The bytes are single precision's: parameters, gradients, Adam's two moments. What the
fullest rank holds is beside the even share, total / (pp x dp_shard x cp x tp): a pipeline's blocks and a vocabulary do
not always divide evenly. Nothing here is timed but the simulation itself.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from typing import Any

import torch
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import ELAPSED, PROCESS

from dlo_framework.distributed.traffic import Traffic
from dlo_framework.mesh import MeshSpec
from dlo_framework.units import format_bytes
from dlo_plugins.mesh.mesh_description import MeshDescription, describe_mesh
from dlo_plugins.mesh.mesh_simulation import SimulatedRank, simulate_ranks
from dlo_plugins.strategies.mesh import MeshStrategy
from dlo_tasks.llm.causal_lm import CausalLM

LLAMA = {
    **{"model_type": "llama", "vocab_size": 128_256, "hidden_size": 16_384, "intermediate_size": 53_248},
    **{"num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8},
    **{"max_position_embeddings": 131_072, "tie_word_embeddings": False},
}
GPT = {
    **{"model_type": "gpt_neox", "vocab_size": 51_200, "hidden_size": 25_600, "intermediate_size": 102_400},
    **{"num_hidden_layers": 128, "num_attention_heads": 160, "max_position_embeddings": 2048},
    **{"tie_word_embeddings": False},
}
HELD_BAR = 1.02  # of the fullest rank's bytes, over an even share
#: The model, the mesh, the micro-batches of a step, the length of a sequence.
CONFIGURATIONS: list[tuple[str, dict[str, Any], dict[str, int], int, int]] = [
    ("405B", LLAMA, {"pp": 8, "dp_shard": 8, "tp": 8}, 16, 8192),
    ("405B", LLAMA, {"pp": 16, "dp_shard": 8, "tp": 8}, 32, 8192),
    ("405B", LLAMA, {"pp": 16, "dp_shard": 8, "cp": 2, "tp": 8}, 32, 8192),
    ("1T", GPT, {"pp": 64, "dp_shard": 6, "tp": 8}, 64, 2048),
]


@dataclass(frozen=True)
class Found:
    """What came of one configuration; bytes where nothing else is said.

    Attributes:
        name: Name of the model, the mesh and the micro-batches.
        ranks: Number of ranks.
        share: Bytes of an even share.
        mean: Mean bytes over all ranks.
        most: Bytes of the fullest rank.
        cpu_seconds: CPU time of this process for the simulation.
        traffic: Traffic of the first rank in an optimizer step.
    """

    name: str
    ranks: int
    share: float
    mean: float
    most: float
    cpu_seconds: float
    traffic: tuple[Traffic, ...]


def run(name: str, model: dict[str, Any], sizes: dict[str, int], parts: int, length: int, traffic: bool) -> Found:
    """Simulates one configuration, and prints what was found."""
    start, cpu = ELAPSED.now(), PROCESS.now()
    spec = MeshSpec(**sizes)  # type: ignore[arg-type]
    task = CausalLM(config=dict(model)).on_meta()
    strategy = MeshStrategy(micro_batches=parts)
    described = describe_mesh(task, task.parallel_plan(), spec, micro_batches=parts)
    shape = (parts, length)
    batch = {key: torch.empty(shape, dtype=torch.long, device="meta") for key in ("input_ids", "labels")}
    ranks = simulate_ranks(task, strategy, spec, [0, spec.world_size - 1], batch if traffic else None)
    for rank in ranks:  # The arithmetic of `dlo mesh`, against what the code that runs has made.
        assert described.ranks[rank.rank].state_bytes == rank.state_bytes, (
            described.ranks[rank.rank].state_bytes,
            rank.state_bytes,
        )
    took = ELAPSED.now() - start, PROCESS.now() - cpu
    return _show(name, spec, parts, described, ranks, took)


def _show(
    name: str,
    spec: MeshSpec,
    parts: int,
    described: MeshDescription,
    ranks: list[SimulatedRank],
    took: tuple[float, float],
) -> Found:
    share = described.unsharded.total / (spec.pp * spec.dp_shard * spec.cp * spec.tp)
    totals = [rank.state_bytes.total for rank in described.ranks]
    mean, most = sum(totals) / len(totals), described.largest
    shown = [format_bytes(size) for size in (described.unsharded.total, share, mean, most.state_bytes.total)]
    print(
        f"\n### {name}, {described.parameters:,} parameters: {spec}, {spec.world_size:,} ranks, {parts} micro-batches\n"
    )
    print(f"{took[0]:.1f} s ({took[1]:.1f} s of a core). Parameters, gradients and Adam's state: {shown[0]} in all;")
    print(f"even share {shown[1]}; mean of ranks {shown[2]} ({mean / share - 1:+.2%}); the most {shown[3]}")
    print(f"({most.state_bytes.total / share - 1:+.2%}), rank {most.rank} with stage {most.stages[0]}.\n")
    print("| rank | stage | parameters | gradients | Adam | collective | axis | a step | elements | bytes |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for rank in ranks:
        held = [
            format_bytes(size)
            for size in (rank.state_bytes.parameters, rank.state_bytes.gradients, rank.state_bytes.optimizer)
        ]
        first = [str(rank.rank), str(rank.place.pp), *held]
        rows = [[t.kind, t.axis, f"{t.count:,}", f"{t.elements:,}", format_bytes(t.bytes)] for t in rank.traffic]
        for row in rows or [[""] * 5]:
            print("| " + " | ".join([*first, *row]) + " |")
            first = [""] * 5
    label = f"{name}, {spec}, {parts} micro-batches"
    return Found(label, spec.world_size, share, mean, most.state_bytes.total, took[1], ranks[0].traffic)


def tables(found: list[Found]) -> list[Table]:
    """Returns the tables of what ranks hold, and of what the first rank passes."""
    held = Table("what the fullest rank holds", "an even share", "bytes, counted")
    passed = Table("what the first rank passes in an optimizer step", "1 GB", "bytes, counted")
    for one in found:
        names = {"ranks": one.ranks, "even_share": format_bytes(one.share), "mean": f"{one.mean / one.share - 1:+.2%}"}
        held.add(one.name, [one.most / one.share], bar=HELD_BAR, ours=True, **names, core_seconds=one.cpu_seconds)
        for item in one.traffic:
            row = f"{one.name}: {item.axis} {item.kind}"
            passed.add(row, [item.bytes / 1e9], ours=True, count=item.count, elements=item.elements)
    held.notes.append("A pipeline's last stage has the head beside its blocks, which may be more than an even share.")
    return [held, passed] if passed.rows else [held]


def main() -> None:
    """Runs the configurations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="the model: 405B or 1T")
    parser.add_argument("--pp", type=int, help="number of stages of the meshes to simulate")
    parser.add_argument("--no-traffic", action="store_true", help="count only bytes on ranks")
    options = parse_options(parser, __file__)
    torch.set_num_threads(1)
    chosen = [
        each for each in CONFIGURATIONS if options.only in (None, each[0]) and options.pp in (None, each[2]["pp"])
    ]
    found = [run(*each, traffic=not options.no_traffic) for each in chosen]
    record = Record.of(__file__, __doc__, options)
    if found:
        for table in tables(found):
            record.add(table)
    record.finish()


if __name__ == "__main__":
    main()
