"""Draws docs/images/plan.svg: plans of Llama 3 8B on 64 H100 by `dlo plan`'s code; ``python docs/pictures/plan.py``."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt

from dlo_plugins.plan.layout import Layout, Request, StateFormat
from dlo_plugins.plan.machine import load_machine
from dlo_plugins.plan.model_profile import profile_model
from dlo_plugins.plan.plan_search import PlanSearch
from dlo_plugins.plan.rank_memory import RankMemory
from dlo_plugins.plan.step_time import StepTime
from dlo_tasks.language.causal_lm import CausalLM

FILE = Path(__file__).parents[1] / "images" / "plan.svg"
GPUS, MEMORY, BATCH, LENGTH = 64, 80e9, 1024, 8192
LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": LENGTH,
}
#: Fixed values of the plans that are compared.
SHOWN = (
    {"tp": "1", "pp": "1", "cp": "1"},
    {"tp": "1", "pp": "1", "cp": "1", "recompute": "full"},
    {"tp": "2", "pp": "1", "cp": "1"},
    {"tp": "8", "pp": "1", "cp": "1"},
    {"tp": "1", "pp": "4", "cp": "1"},
    {"tp": "2", "pp": "4", "cp": "1"},
)


def main() -> None:
    """Draws memory by part, step time by part, and the fastest plan for each memory."""
    task = CausalLM(config=LLAMA).on_meta()
    batch = task.example_batch(SimpleNamespace(seq_len=LENGTH))  # type: ignore[arg-type]
    profile = profile_model(task, batch, task.parallel_plan())
    machine = load_machine("h100")

    def search(memory: float, fix: dict[str, str]) -> PlanSearch:
        request = Request(GPUS, memory, BATCH, {"offload": "false", **fix}, top=1)
        return PlanSearch(profile, machine, StateFormat(), request)

    plans = [search(MEMORY, fix).run().candidates[0] for fix in SHOWN]
    sizes = [12e9, 14e9, 16e9, 20e9, 24e9, 32e9, 40e9, 56e9, 80e9]
    front = [search(size, {}).run().candidates[0] for size in sizes]

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12.5, 4.6))
    names = [_name(plan.layout) for plan in plans]
    _stack(left, names, [{f.name: getattr(p.memory, f.name) / 1e9 for f in fields(RankMemory)} for p in plans])
    left.axvline(MEMORY / 1e9, color="black", linewidth=0.8)
    left.set_xlabel("GB a GPU")
    _stack(middle, [""] * len(plans), [{f.name: getattr(p.time, f.name) for f in fields(StepTime)} for p in plans])
    middle.set_xlabel("seconds a step")
    right.plot([p.memory.total / 1e9 for p in front], [p.time.total for p in front], "o-", color="tab:blue")
    right.set_xlabel("GB a GPU")
    right.set_ylabel("seconds a step, fastest plan that fits")
    figure.suptitle(f"Llama 3 8B on {GPUS} H100, {BATCH} rows of {LENGTH} tokens a step")
    figure.tight_layout()
    figure.savefig(FILE)


def _name(layout: Layout) -> str:
    words = str(replace(layout, micro_batches=1)).replace(" x 1,", ",").replace(", reduce each micro-batch", "")
    for word in ("micro-batch", "recompute", "Rotor"):
        words = words.replace(f", {word}", f"\n{word}")
    return words


def _stack(axes: plt.Axes, names: list[str], rows: list[dict[str, float]]) -> None:
    """Draws a horizontal bar for each plan, stacked by part; parts of under 0.5% of all bars are left out."""
    total = sum(sum(row.values()) for row in rows)
    parts = [part for part in rows[0] if sum(row[part] for row in rows) > 0.005 * total]
    ends = [0.0] * len(rows)
    for part in parts:
        axes.barh(range(len(rows)), [row[part] for row in rows], left=ends, label=part)
        ends = [end + row[part] for end, row in zip(ends, rows, strict=True)]
    axes.set_yticks(range(len(rows)), names, fontsize=7)
    axes.invert_yaxis()
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4, frameon=False)


if __name__ == "__main__":
    main()
