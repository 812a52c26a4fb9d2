"""Does the mixture of the quick start reach a lower perplexity than the dense model of as many active parameters?

    python benchmarks/mixture_perplexity.py [--seeds 3] [--steps 420] [--runs runs.jsonl]

It trains `llm/moe_quickstart` and `llm/quickstart` on the same batches, for the same number of steps, and compares the
validation perplexity at the end, seed by seed. `--runs FILE` writes each finished run to a file, and reads those that
are there, so that a run that ends early goes on. Active parameters are those that a token uses, with 2 of 8
experts.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Trainer, seed_everything
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import PROCESS

from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.experts import MixtureOptions, find_mixtures
from dlo_tasks.llm.causal_lm import CausalLM
from dlo_tasks.llm.text_data import TextData

ROOT = Path(__file__).parent.parent
DENSE, MIXTURE = "dense", "mixture"
CONFIGS = {DENSE: "llm/quickstart.yaml", MIXTURE: "llm/moe_quickstart.yaml"}


def task_of(name: str, steps: int) -> CausalLM:
    """Returns the task of a quick start, with a warm-up of a tenth of the steps."""
    init = yaml.safe_load((ROOT / "configs" / CONFIGS[name]).read_text())["model"]["init_args"]
    for unused in ("prompts", "sampling"):
        init.pop(unused)
    init["warmup_steps"] = max(1, steps // 10)
    experts = init.pop("experts", None)
    return CausalLM(**init, experts=None if experts is None else MixtureOptions(**experts))


def active_parameters(model: Any) -> int:
    """Returns the number of parameters that a token uses."""
    mixtures = find_mixtures(model)
    idle = sum(mixture.count_parameters(model) - mixture.count_active(model) for mixture in mixtures)
    return sum(parameter.numel() for parameter in model.parameters()) - idle


def train(name: str, seed: int, steps: int, validated: int, folder: Path) -> dict[str, Any]:
    """Trains once; returns the perplexity, the CPU seconds of the fit, and the numbers of parameters."""
    seed_everything(seed, workers=True, verbose=False)
    task = task_of(name, steps)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = Trainer(
        **{"accelerator": "cpu", "devices": 1, "default_root_dir": folder, "num_sanity_val_steps": 0, **quiet},  # type: ignore[arg-type]
        **{"max_steps": steps, "val_check_interval": steps, "check_val_every_n_epoch": None},
        **{"limit_val_batches": validated, "gradient_clip_val": 1.0},
    )
    use_canonical_checkpoints(trainer)
    begin = PROCESS.now()
    trainer.fit(task, datamodule=TextData(seq_len=256, batch_size=4, seed=seed))
    return {
        "perplexity": math.exp(float(trainer.callback_metrics["val_loss"])),
        "seconds": PROCESS.now() - begin,
        "parameters": sum(parameter.numel() for parameter in task.model.parameters()),
        "active": active_parameters(task.model),
    }


class FinishedRuns:
    """Results by contestant, seed and steps, in a file of one JSON object a line; in memory without a file."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self._found = {(row["name"], row["seed"], row["steps"]): row for row in map(json.loads, lines)}

    def result(self, name: str, seed: int, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
        """Returns the result of a run, which is trained unless it is there."""
        key = (name, seed, options.steps)
        if key not in self._found:
            found = train(name, seed, options.steps, options.validated, folder)
            self._found[key] = {"name": name, "seed": seed, "steps": options.steps, **found}
            if self.path is not None:
                with self.path.open("a") as file:
                    file.write(json.dumps(self._found[key]) + "\n")
        return self._found[key]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=420)
    parser.add_argument("--validated", type=int, default=16, help="batches of the validation")
    parser.add_argument("--runs", type=Path, default=None, help="file of finished runs, which are not repeated")
    options = parse_options(parser, __file__)
    torch.set_num_threads(1)
    finished = FinishedRuns(options.runs)
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in CONFIGS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(options.seeds):
            for name in CONFIGS:
                found[name].append(finished.result(name, seed, options, Path(folder)))
    record = Record.of(__file__, __doc__, options)
    title = f"validation perplexity after {options.steps} steps"
    table = Table(title, "the dense model's of the same seed", "no clock: a metric")
    for name, results in found.items():
        values = [one["perplexity"] / other["perplexity"] for one, other in zip(results, found[DENSE], strict=True)]
        table.add(name, values, ours=name == MIXTURE, bar=1.0 if name == MIXTURE else None)
        each = ", ".join(f"{result['perplexity']:.1f}" for result in results)
        first, minutes = results[0], sum(result["seconds"] for result in results) / 60
        table.notes.append(
            f"{name}: perplexities {each}; {first['active']:,} active of {first['parameters']:,} parameters;"
            f" {minutes:.1f} CPU minutes"
        )
    record.add(table)
    record.finish()


if __name__ == "__main__":
    main()
