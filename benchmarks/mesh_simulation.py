"""Models of 405 billion and a trillion parameters on 512 to 3,072 ranks, in one process without memory.

    python benchmarks/mesh_simulation.py [--only 405B|1T] [--pp 16] [--no-traffic]

* Llama 3.1 405B: The Llama 3 Herd of Models. Grattafiori et al., 2024, arXiv 2407.21783, table 3; sequences of 8,192.
* 1T: Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM. Narayanan et al., 2021, arXiv
  2104.04473, table 1: the GPT of 128 layers, as GPT-NeoX; sequences of 2,048. Their 3,072 ranks are those here.

Each configuration cuts the model by the code that runs, for the first and the last rank, and counts one optimizer step
with one sequence a micro-batch. The bytes are single precision's: parameters, gradients, Adam's two moments. What the
fullest rank holds is beside the even share, total / (pp x dp_shard x cp x tp): a pipeline's blocks and a vocabulary do
not always divide evenly. Prints a table and one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from typing import Any

import torch

from dlo_framework.amounts import human
from dlo_framework.mesh import MeshSpec
from dlo_plugins.mesh.drawing import MeshDescription, describe
from dlo_plugins.mesh.simulation import SimulatedRank, simulate
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
#: The model, the mesh, the micro-batches of a step, the length of a sequence.
CONFIGURATIONS: list[tuple[str, dict[str, Any], dict[str, int], int, int]] = [
    ("405B", LLAMA, {"pp": 8, "dp_shard": 8, "tp": 8}, 16, 8192),
    ("405B", LLAMA, {"pp": 16, "dp_shard": 8, "tp": 8}, 32, 8192),
    ("405B", LLAMA, {"pp": 16, "dp_shard": 8, "cp": 2, "tp": 8}, 32, 8192),
    ("1T", GPT, {"pp": 64, "dp_shard": 6, "tp": 8}, 64, 2048),
]


def run(name: str, model: dict[str, Any], sizes: dict[str, int], parts: int, length: int, traffic: bool) -> dict:
    """Simulates one configuration, and prints what was found."""
    start, cpu = time.perf_counter(), time.process_time()
    spec = MeshSpec(**sizes)  # type: ignore[arg-type]
    task = CausalLM(config=dict(model)).on_meta()
    strategy = MeshStrategy(micro_batches=parts)
    described = describe(task, task.parallel_plan(), spec, micro_batches=parts)
    shape = (parts, length)
    batch = {key: torch.empty(shape, dtype=torch.long, device="meta") for key in ("input_ids", "labels")}
    ranks = simulate(task, strategy, spec, [0, spec.world_size - 1], batch if traffic else None)
    for rank in ranks:  # The arithmetic of `dlo mesh`, against what the code that runs has made.
        assert described.ranks[rank.rank].held == rank.held, (described.ranks[rank.rank].held, rank.held)
    took = time.perf_counter() - start, time.process_time() - cpu
    return _show(name, spec, parts, described, ranks, took)


def _show(
    name: str,
    spec: MeshSpec,
    parts: int,
    described: MeshDescription,
    ranks: list[SimulatedRank],
    took: tuple[float, float],
) -> dict[str, Any]:
    share = described.whole.total / (spec.pp * spec.dp_shard * spec.cp * spec.tp)
    totals = [rank.held.total for rank in described.ranks]
    mean, most = sum(totals) / len(totals), described.largest
    shown = [human(size) for size in (described.whole.total, share, mean, most.held.total)]
    print(
        f"\n### {name}, {described.parameters:,} parameters: {spec}, {spec.world_size:,} ranks, {parts} micro-batches\n"
    )
    print(f"{took[0]:.1f} s ({took[1]:.1f} s of a core). Parameters, gradients and Adam's state: {shown[0]} in all;")
    print(f"even share {shown[1]}; mean of ranks {shown[2]} ({mean / share - 1:+.2%}); the most {shown[3]}")
    print(f"({most.held.total / share - 1:+.2%}), rank {most.rank} with stage {most.stages[0]}.\n")
    print("| rank | stage | parameters | gradients | Adam | collective | axis | a step | elements | bytes |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for rank in ranks:
        held = [human(size) for size in (rank.held.parameters, rank.held.gradients, rank.held.optimizer)]
        first = [str(rank.rank), str(rank.place.pp), *held]
        rows = [[t.kind, t.axis, f"{t.count:,}", f"{t.elements:,}", human(t.bytes)] for t in rank.traffic]
        for row in rows or [[""] * 5]:
            print("| " + " | ".join([*first, *row]) + " |")
            first = [""] * 5
    return {
        "model": name,
        "parameters": described.parameters,
        "mesh": spec.sizes,
        "micro_batches": parts,
        "seconds": round(took[0], 1),
        "cpu_seconds": round(took[1], 1),
        "even_share": share,
        "mean": mean,
        "most": most.held.total,
        "ranks": [{"rank": r.rank, **asdict(r.held), "traffic": [asdict(t) for t in r.traffic]} for r in ranks],
    }


def main() -> None:
    """Runs the configurations."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="the model: 405B or 1T")
    parser.add_argument("--pp", type=int, help="only meshes with so many stages")
    parser.add_argument("--no-traffic", action="store_true", help="count bytes on ranks alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [
        each for each in CONFIGURATIONS if options.only in (None, each[0]) and options.pp in (None, each[2]["pp"])
    ]
    found = [run(*each, traffic=not options.no_traffic) for each in chosen]
    print(f"\n{sum(each['seconds'] for each in found):.0f} s in all\n")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
