"""What helps the language models' quick start on a CPU: tokens a second of its training step, and its perplexity.

Each contestant is ``configs/llm/quickstart.yaml`` with one setting changed, on the same packed batches, in one process:
forward, loss, backward, clipping and the optimizer's step.

* ``plain``: no setting changed; the unit. ``plain again`` is the A/A control.
* ``fused``: ``optimizer_args: {fused: true}``.
* ``varlen``: ``attention: dlo_varlen``, which computes no dense mask.
* ``blocks``: the callback Compile with ``scope: blocks``. ``step``: with ``optimizer: true`` too.
* ``bf16``: ``precision: bf16-mixed``; ``int8``: the callback LowPrecision.
* ``sparse``: the mask of ``configs/llm/sparse_attention.yaml``.
* ``fastest``: those that help, together.

Packing is in all of them: without it, padding takes more. Time is the CPU time of the process with one thread.
``--seeds`` trains each contestant as the recipe does too, once a seed, and compares validation perplexities with those
of ``plain`` with the same seed. ``--train NAME`` trains one contestant alone, and prints its perplexity for each seed.

Run: ``python benchmarks/quickstart_speed.py [--rounds 15] [--only plain "plain again" fastest] [--seeds 42 43 44]``
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from lightning.pytorch import Trainer, seed_everything
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import all_ratios, clock_of, take_turns

from dlo_framework.attention import Attention, BSLongformer
from dlo_plugins.appliers.module_compilation import compile_in_place
from dlo_plugins.callbacks.compile import Compile
from dlo_plugins.callbacks.compile.compiled_step import CompiledOptimizer
from dlo_plugins.callbacks.low_precision import LowPrecision
from dlo_plugins.quantisation.low_precision_linear import LowPrecisionForward
from dlo_tasks.llm.causal_lm import CausalLM
from dlo_tasks.llm.text_data import TextData

RECIPE = Path(__file__).parents[1] / "configs" / "llm" / "quickstart.yaml"
#: Tokens a second over the quick start's that are to be reached, and the perplexity over its own that counts as equal.
BAR, PERPLEXITY_BAR = 1.25, 1.01


@dataclass(frozen=True)
class Contestant:
    """Settings beside the recipe's.

    Attributes:
        task: Arguments of the task.
        optimizer: Arguments of the optimizer.
        half: Whether the precision is ``bf16-mixed``.
        blocks: Whether the blocks are compiled.
        step: Whether the optimizer's step is compiled.
        int8: Whether the blocks' products are in int8.
    """

    task: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    half: bool = False
    blocks: bool = False
    step: bool = False
    int8: bool = False


FUSED = {"fused": True}
CONTESTANTS = {
    "plain": Contestant(),
    "plain again": Contestant(),
    "fused": Contestant(optimizer=FUSED),
    "varlen": Contestant({"attention": "dlo_varlen"}),
    "blocks": Contestant(blocks=True),
    "step": Contestant(blocks=True, step=True),
    "bf16": Contestant(half=True),
    "int8": Contestant(int8=True),
    "sparse": Contestant({"attention": Attention(mask=BSLongformer(32, 5, [0]))}),
    "fastest": Contestant({"attention": "dlo_varlen"}, FUSED, half=True, blocks=True),
}


def build(contestant: Contestant) -> CausalLM:
    """Returns the recipe's task with the contestant's settings."""
    init = yaml.safe_load(RECIPE.read_text())["model"]["init_args"]
    for name in ("prompts", "sampling"):
        init.pop(name)
    init["optimizer_args"] |= contestant.optimizer
    return CausalLM(**(init | contestant.task))


def data() -> TextData:
    """Returns the recipe's data."""
    return TextData(**yaml.safe_load(RECIPE.read_text())["data"]["init_args"])


def packed_batches() -> tuple[int, list[Any]]:
    """Returns the size of the recipe's vocabulary, and its first batches."""
    source = data()
    source.prepare_data()
    source.setup("fit")
    loader = iter(source.train_dataloader())
    return source.vocab_size, [next(loader) for _ in range(8)]


def random_batches() -> tuple[int, list[Any]]:
    """Returns a small vocabulary, and batches of random tokens."""
    ids = torch.randint(64, (2, 2, 33), generator=torch.Generator().manual_seed(0))
    return 64, [{"input_ids": rows[:, :-1], "labels": rows[:, 1:]} for rows in ids]


def make_step(contestant: Contestant, vocabulary: int, batches: list[Any]) -> Callable[[], float]:
    """Returns a function that takes a training step on the next batch, and returns the loss."""
    seed_everything(0, verbose=False)
    task = build(contestant)
    task.config.vocab_size = vocabulary
    task.configure_model()
    task.train()
    if contestant.int8:
        products, plan = LowPrecisionForward("int8"), task.parallel_plan()
        for name in LowPrecision().choose_layers(task.model, plan):
            products.install(task.model.get_submodule(name))
    if contestant.blocks:
        for name in task.parallel_plan().block_names(task.model):
            compile_in_place(task.model.get_submodule(name), dynamic=False)
    optimizer: Any = task._optimizer(task.model)
    if contestant.step:
        CompiledOptimizer(optimizer)
    parameters, place = list(task.parameters()), 0

    def step() -> float:
        nonlocal place
        batch = batches[place % len(batches)]
        place += 1
        half = torch.autocast("cpu", torch.bfloat16) if contestant.half else contextlib.nullcontext()
        optimizer.zero_grad()
        with half:
            loss = task.training_step(batch, 0)["loss"]
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        return float(loss.detach())

    return step


def train(contestant: Contestant, seed: int, steps: int | None = None) -> float:
    """Trains a contestant as the recipe does, or for fewer steps; returns the validation perplexity."""
    recipe = yaml.safe_load(RECIPE.read_text())
    seed_everything(seed, workers=True, verbose=False)
    limits = {key: value for key, value in recipe["trainer"].items() if key not in ("accelerator", "log_every_n_steps")}
    if steps is not None:
        limits |= {"max_steps": steps, "val_check_interval": steps}
    callbacks: list[Any] = [Compile(scope="blocks", optimizer=contestant.step)] if contestant.blocks else []
    callbacks += [LowPrecision()] if contestant.int8 else []
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        precision="bf16-mixed" if contestant.half else "32-true",
        num_sanity_val_steps=0,
        callbacks=callbacks,
        **quiet,
        **limits,
    )
    trainer.fit(build(contestant), datamodule=data())
    return math.exp(float(trainer.callback_metrics["val_loss"]))


def perplexities(names: list[str], seeds: list[int], steps: int | None) -> Table:
    """Trains contestants, `plain` among them, with each seed; returns the table of their validation perplexities."""
    found = {name: [train(CONTESTANTS[name], seed, steps) for seed in seeds] for name in dict.fromkeys(names)}
    what = f"after {'the recipe' if steps is None else f'{steps} steps'}, seeds {', '.join(map(str, seeds))}"
    table = Table(f"validation perplexity {what}", "plain", "perplexity with the same seed")
    for name, values in found.items():
        ratios = [value / plain for value, plain in zip(values, found["plain"], strict=True)]
        fastest, control = name == "fastest", name == "plain again"
        bar = PERPLEXITY_BAR if fastest else None
        table.add(name, ratios, bar=bar, ours=fastest, control=control, perplexity=statistics.median(values))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", nargs="+", default=list(CONTESTANTS))
    parser.add_argument("--random", action="store_true", help="few random tokens")
    parser.add_argument("--seeds", type=int, nargs="+", default=[], help="train each contestant with each seed")
    parser.add_argument("--steps", type=int, help="number of steps of a training; the recipe's by default")
    parser.add_argument("--train", metavar="NAME", choices=CONTESTANTS)
    options = parse_options(parser, __file__)
    torch.set_num_threads(1)
    if options.train:
        for seed in options.seeds or [yaml.safe_load(RECIPE.read_text())["seed_everything"]]:
            perplexity = train(CONTESTANTS[options.train], seed, options.steps)
            print(f"{options.train}, seed {seed}: validation perplexity {perplexity:.1f}", flush=True)
        return
    record = Record.of(__file__, __doc__, options, "cpu")
    vocabulary, batches = random_batches() if options.random else packed_batches()
    steps = {name: make_step(CONTESTANTS[name], vocabulary, batches) for name in options.only}
    losses = {name: [step() for _ in range(3)] for name, step in steps.items()}  # They compile meanwhile.
    for name, found in losses.items():
        assert abs(found[-1] - losses["plain"][-1]) < 0.05 * found[-1], (name, losses)
    clock = clock_of(torch.device("cpu"))
    seconds = take_turns(
        {name: (lambda step=step: clock.seconds(step, 2)) for name, step in steps.items()}, options.rounds
    )
    table = Table("time of a step of 1,024 tokens", "plain", clock)
    for name, ratios in all_ratios(seconds, "plain").items():
        fastest = name == "fastest"
        times = 1 / statistics.median(ratios)
        table.add(
            name,
            ratios,
            bar=1 / BAR if fastest else None,
            ours=fastest,
            control=name == "plain again",
            tokens_a_second_over_plain=times,
        )
    record.add(table)
    if options.seeds:
        record.add(perplexities(options.only, options.seeds, options.steps))
    record.finish()


if __name__ == "__main__":
    main()
