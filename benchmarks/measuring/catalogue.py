"""Lists the benchmarks, their command lines, and the rows of theirs that the README's table shows."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path

#: Files in benchmarks/ that are not benchmarks.
NOT_BENCHMARKS = ("run",)


@dataclass(frozen=True)
class Entry:
    """One run of a benchmark's file.

    Attributes:
        name: Name of the file, without its suffix.
        minutes: Approximate duration on two CPU cores.
        arguments: Command-line arguments of a full run.
        quick: Command-line arguments of a quick run, which takes seconds and checks only that the benchmark runs.
    """

    name: str
    minutes: float
    arguments: tuple[str, ...] = ()
    quick: tuple[str, ...] = ()

    @property
    def key(self) -> str:
        """Key of the run in results and reports: the name and the arguments."""
        return " ".join((self.name, *self.arguments))


def _entry(name: str, minutes: float, arguments: str = "", quick: str = "") -> Entry:
    return Entry(name, minutes, tuple(arguments.split()), tuple(quick.split()))


_SMALL_LOSS = "--rounds 1 --tokens 64 --width 32 --vocabularies 512"
ENTRIES = (
    _entry("overhead", 10, "", "--rounds 1 --model mlp"),
    _entry("callbacks", 4, "", "--rounds 1 --steps 20"),
    _entry("startup", 8, "", "--rounds 1"),
    _entry("data_path", 1, "--quality 75 --workers", "--rounds 1 --images 32 --quality 75 --workers"),
    _entry("data_path", 2, "--quality 90", "--rounds 1 --images 32"),
    _entry("batch_mix", 3, "", "--rounds 1 --calls 1"),
    _entry("progressive_resizing", 16, "", "--rounds 1 --seeds 1 --epochs 2"),
    _entry("race", 16, "", "--seeds 1 --epochs 1"),
    _entry("compile", 7, "--vit small", "--rounds 1 --starts 0 --steps 1 --vit tiny"),
    _entry("compile", 3, "--vit tiny --starts 0", "--rounds 1 --starts 0 --steps 1 --vit tiny"),
    _entry("packing", 5, "", "--rounds 1 --positions 1 --documents 2000"),
    _entry("vocabulary_loss", 3, "--rounds 9 --vocabularies 32768", _SMALL_LOSS),
    _entry("vocabulary_loss", 7, "--rounds 3 --vocabularies 131072", _SMALL_LOSS),
    _entry("vocabulary_loss", 2, "--rounds 9 --vocabularies 32768 --width 256", _SMALL_LOSS),
    _entry("collectives", 1, "", "--rounds 1 --elements 100000"),
    _entry("sharding", 5, "--deepspeed", "--deepspeed --rounds 1 --width 64 --depth 2"),
    _entry("deepspeed_bridge", 7, "", "--rounds 1 --width 64 --depth 2 --stages 1"),
    _entry("compression", 2, "", "--rounds 1 --width 64 --depth 2"),
    _entry("pipeline", 6, "", "--rounds 1 --micro-batches 4 --layers 4 --width 32 --tokens 1024 --schedules 1F1B ZBV"),
    _entry("remat_execution", 6, "", "--rounds 1 --budgets 1 --models resnet --rows 1"),
    _entry("planner_measured", 15, "", "--rounds 1 --ranks 1 2 --cases 2"),
    _entry("parity_verdicts", 60, "--seeds 10", "--seeds 1 --faults 7 --models gpt2 qwen2_moe vit"),
    _entry("chaos", 40, "--trials 50", "--trials 1"),
    _entry("accelerator", 0.2, "", "--size tiny --rounds 1"),
    _entry("breadth", 25, "", "--only gpt2 vit_tiny_patch16_224 --axes tp packing"),
)


@dataclass(frozen=True)
class Headline:
    """One row of the README's table.

    Attributes:
        what: Quantity that is measured.
        name: Name of the benchmark.
        table: Beginning of the table's title.
        ours: Name of dlo's row.
        peers: Names of peers' rows; the README shows the first that was measured.
        cost: Beginning of the note that is shown with the figure, such as a loss of accuracy.
        unit: Baseline, for which a ratio is 1; by default the unit in the results file.
    """

    what: str
    name: str
    table: str
    ours: str
    peers: tuple[str, ...] = ()
    cost: str = ""
    unit: str = ""


HEADLINES = (
    Headline("training step, everything on", "overhead", "small ViT", "dlo, all on", ("Lightning, all on",)),
    Headline(
        "overhead of that, tiny MLP",
        "overhead",
        "tiny MLP: what is added",
        "dlo, all on",
        ("plain Lightning, nothing on", "plain Lightning"),
    ),
    Headline(
        "overhead of five idle callbacks", "callbacks", "callbacks", "dlo, all callbacks", unit="a small ViT's step"
    ),
    Headline(
        "`dlo fit`, from start to the end of one step", "startup", "a fit", "dlo fit, one step", ("LightningCLI again",)
    ),
    Headline(
        "JPEGs to batches, images per CPU-second",
        "data_path",
        "from JPEGs of quality 75",
        "dlo",
        ("v2 tensors",),
        unit="torchvision's ImageFolder",
    ),
    Headline("CutMix", "batch_mix", "mixing", "dlo CutMix batch", ("timm CutMix batch",)),
    Headline("MixUp", "batch_mix", "mixing", "dlo MixUp batch", ("timm MixUp batch",)),
    Headline(
        "ProgressiveResizing, time at equal epochs",
        "progressive_resizing",
        "60 epochs",
        "dlo, ProgressiveResizing",
        cost="Accuracy differs",
    ),
    Headline(
        "samples to 97% on digits", "race", "samples", "dlo, race", unit="the constant rate that LRFinder suggests"
    ),
    Headline(
        "packing text, useful tokens per second",
        "packing",
        "useful tokens",
        "dlo, packing: best_fit",
        ("TRL", "padded to the longest"),
        unit="padding to the window",
    ),
    Headline(
        "loss over 32,768 tokens, time",
        "vocabulary_loss",
        "time: 2048 tokens, width 512",
        "dlo",
        ("torch",),
        unit="plain loss",
    ),
    Headline(
        "loss over 32,768 tokens, memory",
        "vocabulary_loss",
        "memory: 2048 tokens, width 512",
        "dlo",
        ("torch",),
        unit="plain loss",
    ),
    Headline("`zero1`, 2 gloo ranks", "sharding", "a step", "dlo zero1", ("DeepSpeed 1", "ZeroRedundancyOptimizer")),
    Headline("`zero3`, 2 gloo ranks", "sharding", "a step", "dlo zero3", ("FSDP2",)),
    Headline(
        "reduce-scatter on gloo",
        "collectives",
        "a buffer",
        "dlo reduce_scatter",
        ("torch reduce_scatter",),
        unit="all-reduce of the same buffer",
    ),
    Headline("`deepspeed_2`, 2 gloo ranks", "deepspeed_bridge", "a step of stage 2", "dlo, DeepSpeedBridge"),
    Headline(
        "1-bit Adam, bytes sent",
        "compression",
        "sent by a rank",
        "1-bit Adam",
        ("PowerSGD",),
        unit="bytes that DDP sends",
    ),
    Headline(
        "1F1B, 8 micro-batches, step time",
        "pipeline",
        "a step over theory, 8",
        "1F1B",
        ("GPipe",),
        unit="compute per rank, and the bubble of the papers",
    ),
    Headline(
        "ZBV, 8 micro-batches, idle time", "pipeline", "idle time, 8", "ZBV", ("1F1B again",), unit="idle time of 1F1B"
    ),
    Headline("ViT, bf16", "accelerator", "ViT", "dlo fit, compiled", ("loop, compiled",)),
    Headline("Llama, bf16", "accelerator", "Llama", "dlo fit, compiled", ("loop, compiled",)),
    Headline("`zero3`, bf16", "accelerator", "strategies", "dlo zero3", ("FSDP2",)),
    Headline("saving a checkpoint", "accelerator", "saving", "dlo", ("torch.save",)),
    Headline("loading a checkpoint", "accelerator", "loading", "dlo", ("torch.load",)),
)


def chosen(names: list[str] | None, quick: bool = False) -> list[Entry]:
    """Returns the entries with these names, or all entries for None, in the order of ``ENTRIES``.

    With ``quick``, entries whose quick arguments are equal are returned once.

    Raises:
        ValueError: If a name is unknown.
    """
    known = dict.fromkeys(entry.name for entry in ENTRIES)
    unknown = [name for name in names or [] if name not in known]
    if unknown:
        raise ValueError(f"--only must name benchmarks, got {', '.join(unknown)}; there are {', '.join(known)}")
    found = [entry for entry in ENTRIES if names is None or entry.name in names]
    if not quick:
        return found
    return list({(entry.name, entry.quick): entry for entry in reversed(found)}.values())[::-1]


def parse_options(parser: argparse.ArgumentParser, script: str) -> argparse.Namespace:
    """Returns a benchmark's options; ``--quick`` expands to its quick arguments, which other arguments override.

    Args:
        parser: Parser with the benchmark's own options.
        script: ``__file__`` of the benchmark.
    """
    parser.add_argument(
        "--quick", action="store_true", help="check in seconds that it runs; its figures have no meaning"
    )
    words = sys.argv[1:]
    if "--quick" in words:
        quick = next(entry.quick for entry in ENTRIES if entry.name == Path(script).stem)
        words = [*quick, *(word for word in words if word != "--quick")]
    options = parser.parse_args(words)
    del options.quick
    return options
