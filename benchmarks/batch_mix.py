"""What MixUp and CutMix cost, as a ratio to copying the batch, beside timm, torchvision and the textbook.

Every contestant is given images [128, 3, 224, 224] and class indices [128], and makes mixed images and soft targets
[128, 1000], its random numbers included. All draw lambda from Beta(1, 1).

* ``copy_``: the batch copied into another one that exists; the unit. Roofline of anything that touches all of it.
* ``copy_ again``: the same once more, the A/A control: how far its ratio is from 1 is the noise.
* ``dlo``: BatchMix's functions. On a CPU they change the batch in place, which is what a training run does whose
  batches are its own (torch's default collation, ImageFolderData, DigitsData).
* ``dlo, kept batch``: the batch is cloned first, because other code may own its memory. On an accelerator
  both are equal: ``dlo`` never writes to the batch there.
* ``timm``: ``timm.data.mixup.Mixup`` (always in place). ``torchvision``: ``v2.MixUp`` and ``v2.CutMix``.
* ``where``: CutMix as textbooks have it, ``where(mask, images[perm], images)``.

A round calls each contestant a few times, for CutMix costs what its box is large. On a CPU the time is that of the
process, with one thread; on an accelerator events on the stream measure it.

Run: ``python benchmarks/batch_mix.py [--rounds 25] [--device cuda]``
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import numpy as np
import torch
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import all_ratios, clock_of, take_turns
from timm.data.mixup import Mixup
from torch import Tensor
from torchvision.transforms import v2

from dlo_plugins.images.batch_mix import (
    MODES,
    MixRecipe,
    draw_plan,
    mix_images,
    mix_targets,
    soft_targets,
    to_device,
)

BATCH, CLASSES = 128, 1000
MIXUP, CUTMIX = {"mixup_alpha": 1.0, "cutmix_alpha": 0.0}, {"mixup_alpha": 0.0, "cutmix_alpha": 1.0}
#: Ratios that are to be reached on a CPU.
BARS = {"dlo CutMix batch": 0.7, "dlo MixUp batch": 1.6}
PER_SAMPLE_BAR = 1.5  # of pair and elem, to batch

Run = Callable[[Tensor, Tensor], object]


def ours(alphas: dict[str, float], mode: str, in_place: bool) -> Run:
    recipe, generator = MixRecipe(**alphas, mode=mode), np.random.default_rng(0)  # type: ignore[arg-type]

    def run(images: Tensor, targets: Tensor) -> object:
        plan = draw_plan(recipe, len(images), *images.shape[-2:], generator)
        on_device = to_device(plan, images.device)
        soft = soft_targets(targets, CLASSES, 0.1)
        return mix_images(images, plan, on_device, in_place=in_place), mix_targets(soft, on_device)

    return run


def textbook(images: Tensor, targets: Tensor) -> object:
    height, width = images.shape[-2:]
    order = torch.randperm(len(images), device=images.device)
    side = (1 - np.random.beta(1.0, 1.0)) ** 0.5
    y, x = np.random.randint(height), np.random.randint(width)
    rows, columns = torch.arange(height, device=images.device), torch.arange(width, device=images.device)
    inside = ((rows - y).abs() * 2 < side * height)[:, None] & ((columns - x).abs() * 2 < side * width)
    lam = 1 - inside.float().mean()
    soft = torch.nn.functional.one_hot(targets, CLASSES).float()
    return torch.where(inside, images[order], images), lam * soft + (1 - lam) * soft[order]


def contestants(device: torch.device) -> dict[str, Run]:
    copied = torch.empty(BATCH, 3, 224, 224, device=device)
    copy: Run = lambda images, targets: copied.copy_(images)
    runs: dict[str, Run] = {"copy_": copy, "copy_ again": copy}
    for name, alphas in (("CutMix", CUTMIX), ("MixUp", MIXUP)):
        for mode in MODES:
            runs[f"dlo {name} {mode}"] = ours(alphas, mode, in_place=True)
        runs[f"dlo, kept batch {name} batch"] = ours(alphas, "batch", in_place=False)
        for mode in MODES:
            runs[f"timm {name} {mode}"] = Mixup(**alphas, mode=mode, num_classes=CLASSES)
        runs[f"torchvision {name}"] = getattr(v2, name)(num_classes=CLASSES, alpha=1.0)
    return runs | {"where CutMix": textbook}


def table(device: torch.device, rounds: int, calls: int) -> Table:
    """Measures all contestants."""
    torch.manual_seed(0)
    np.random.seed(0)
    fresh, targets = torch.randn(BATCH, 3, 224, 224, device=device), torch.randint(CLASSES, (BATCH,), device=device)
    images, clock = fresh.clone(), clock_of(device)

    def timed(run: Run) -> float:
        images.copy_(fresh)
        return clock.seconds(lambda: run(images, targets), calls)

    runs = {name: (lambda run=run: timed(run)) for name, run in contestants(device).items()}
    seconds = take_turns(runs, rounds)
    found = all_ratios(seconds, "copy_")
    told = Table(f"mixing a batch of {BATCH} x 3 x 224 x 224", "copy_ of the batch", clock)
    for name, values in found.items():
        ours, bar = name.startswith("dlo"), BARS.get(name)
        if name.startswith("dlo ") and name.endswith((" pair", " elem")):
            bar = PER_SAMPLE_BAR * statistics.median(found[f"{name.rpartition(' ')[0]} batch"])
        told.add(
            name,
            values,
            bar=bar if device.type == "cpu" else None,
            ours=ours,
            control=name == "copy_ again",
            ms=statistics.median(seconds[name]) * 1e3,
        )
    return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=25)
    parser.add_argument("--calls", type=int, default=4, help="calls of each contestant in a round")
    parser.add_argument("--device", default="cpu")
    options = parse_options(parser, __file__)
    torch.set_num_threads(1)
    record = Record.of(__file__, __doc__, options, options.device)
    record.add(table(torch.device(options.device), options.rounds, options.calls))
    record.finish()


if __name__ == "__main__":
    main()
