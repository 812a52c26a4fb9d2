"""Images or tokens a second and MFU of one device in bf16: a loop by hand and dlo, eager and compiled."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from measuring.record import Table
from measuring.rounds import Clock, all_ratios, clock_of, take_turns

from dlo_plugins.compile.callback import Compile
from on_accelerator.subjects import BATCHES, Size, Subject, blocks_of, build_network, draw_weights_on, pinned
from on_accelerator.training import Trained, Work, by_dlo, by_hand

BASE = "loop"
BY_BLOCK = "loop, compiled by block"


def throughput(subject: Subject, size: Size, device: torch.device, rounds: int, backend: str) -> Table:
    """Measures one subject.

    Args:
        subject: Model and data to train.
        size: Size, with the number of steps.
        device: Device of the run.
        rounds: Rounds after the first, which warms up and compiles.
        backend: Backend of torch.compile.
    """
    torch.manual_seed(0)
    clock = clock_of(device)
    work = Work(device, clock, [pinned(subject.batch(), device) for _ in range(BATCHES)], size.warm, size.steps)
    return rates_table(subject, take_turns(contestants(subject, work, backend), rounds), clock)


def rates_table(
    subject: Subject, found: dict[str, list[Trained]], clock: Clock, base: str = BASE, unit: str = "a loop by hand"
) -> Table:
    """Returns the table of what turns have found, by contestant; ratios are to the one that is called ``base``.

    A contestant without turns is out of memory; where it is the base, ratios are to the first of the others.

    Raises:
        torch.OutOfMemoryError: If no contestant of dlo has turns.
    """
    fitting = {name: turns for name, turns in found.items() if turns}
    counted = next((turns[0] for name, turns in fitting.items() if name.startswith("dlo")), None)
    if counted is None:
        raise torch.OutOfMemoryError("neither run of dlo fits the device")
    if base not in fitting:
        base = unit = next(iter(fitting))
    table = Table(f"{subject.title}, bf16", f"the {subject.item} a second of {unit}", clock, better="higher")
    rates = {name: [subject.items / turn.seconds for turn in turns] for name, turns in fitting.items()}
    # A batch takes the same FLOPs whoever trains it; dlo's monitor counts them, uncompiled.
    flops, peak = subject.samples * counted.flops, counted.peak_flops
    for name, values in all_ratios(rates, base).items():
        seconds = statistics.median(turn.seconds for turn in found[name])
        held = [turn.peak_bytes for turn in found[name] if turn.peak_bytes is not None]
        columns: dict[str, Any] = {
            f"{subject.item} a second": statistics.median(rates[name]),
            "ms": seconds * 1e3,
            "TFLOP/s": flops / seconds / 1e12,
            "MFU": f"{flops / seconds / peak:.1%}" if peak and flops else None,
            "peak GB": max(held) / 1e9 if held else None,
        }
        table.add(name, values, ours=name.startswith("dlo"), control=name.endswith("again"), **columns)
    for name in found.keys() - fitting.keys():
        table.add_failed(name, "out of memory")
    table.notes.append(
        f"{flops / 1e9:.4g} GFLOP a batch, counted by dlo's monitor; the device's peak:"
        f" {f'{peak / 1e12:.0f} TFLOP/s' if peak else 'not known'}."
    )
    return table


def contestants(subject: Subject, work: Work, backend: str) -> dict[str, Callable[[], Trained]]:
    """Returns who takes part. Networks stay from round to round, with the code that was compiled for them."""
    nets = {name: build_network(work.device, subject.net) for name in (BASE, "loop again", "loop, compiled")}
    nets["loop, compiled"].compile(backend=backend)
    if subject.scope == "blocks":  # What dlo compiles: each call of a block costs the host its guards.
        nets[BY_BLOCK] = build_network(work.device, subject.net)
        for block in blocks_of(nets[BY_BLOCK]):
            block.compile(backend=backend)
    tasks = {name: draw_weights_on(work.device, subject.task()) for name in ("dlo fit", "dlo fit, compiled")}

    def compiled() -> Trained:
        return by_dlo(subject, tasks["dlo fit, compiled"], work, [Compile(scope=subject.scope, backend=backend)])  # type: ignore[arg-type]

    def looped(name: str) -> Trained:
        found = by_hand(subject, nets[name], work)
        nets[name].cpu()  # As Lightning does after a fit: whose turn it is has the device for itself.
        return found

    loops = {name: (lambda name=name: looped(name)) for name in nets}
    eager = {"dlo fit": lambda: by_dlo(subject, tasks["dlo fit"], work, [])}
    return {**loops, **eager, "dlo fit, compiled": compiled}
