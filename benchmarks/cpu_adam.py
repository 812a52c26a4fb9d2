"""dlo's CPU Adam against DeepSpeed's CPUAdam and torch's fused one: the step of state that is offloaded to CPU memory.

`zero2_offload`, `zero3_offload` and `fsdp_offload` step with a kernel of `cpu_adam.c`, compiled for the machine when a
run starts. DeepSpeed compiles one too, ahead of the first run; without a C++ compiler that it accepts, it is not
measured. All read weight, gradient and two moments, and write three of them: 28 bytes an element in fp32, so that a
kernel that computes fast enough takes the memory's time. torch's has vectors of 256 bits and divides twice.

``torch, compiled`` is the step that ``optimizer: true`` of the callback Compile makes, in machine code for this CPU.

    python benchmarks/cpu_adam.py [--elements 4000000] [--rounds 30] [--threads 1]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import all_ratios, clock_of, take_turns

from dlo_framework.distributed.cpu_adam import use_cpu_kernel
from dlo_plugins.callbacks.compile.compiled_step import CompiledOptimizer

SHAPES = (1.0, 0.25, 0.25, 1e-3)  # fractions of the elements: a large matrix, two small ones, a vector


def parameters(elements: int) -> list[torch.nn.Parameter]:
    """Returns the tensors of one optimizer, with gradients."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for share in SHAPES:
        parameter = torch.nn.Parameter(torch.randn(int(elements * share / sum(SHAPES)), generator=generator))
        parameter.grad = torch.randn(parameter.shape, generator=generator)
        made.append(parameter)
    return made


def contestants(elements: int) -> tuple[dict[str, Any], str | None]:
    """Returns the optimizers by name, and why DeepSpeed's is not among them."""
    names = ("torch, fused", "torch, fused again")
    found: dict[str, Any] = {
        name: torch.optim.AdamW(parameters(elements), lr=1e-3, weight_decay=0.01, fused=True) for name in names
    }
    found["torch, compiled"] = torch.optim.AdamW(parameters(elements), lr=1e-3, weight_decay=0.01, foreach=True)
    CompiledOptimizer(found["torch, compiled"])
    for name in ("dlo", "dlo again"):
        found[name] = torch.optim.AdamW(parameters(elements), lr=1e-3, weight_decay=0.01, fused=True)
        if not use_cpu_kernel(found[name]):
            del found[name]
    found["torch, loop"] = torch.optim.AdamW(parameters(elements), lr=1e-3, weight_decay=0.01, foreach=False)
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        found["DeepSpeed"] = DeepSpeedCPUAdam(parameters(elements), lr=1e-3, weight_decay=0.01, adamw_mode=True)
    except Exception as error:  # A compiler that is missing or that DeepSpeed refuses, with errors of many types.
        return found, f"its kernel cannot be built here: {type(error).__name__}: {str(error)[:200]}"
    return found, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--elements", type=int, default=4_000_000)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=1)
    options = parse_options(parser, __file__)
    torch.set_num_threads(options.threads)
    # Frees a large block, after which glibc keeps smaller ones in its heap: else tensors made before a contestant's
    # temporaries begin at one offset of their pages, those made later do not, which changed ratios by up to a tenth.
    torch.empty(7_500_000)
    record = Record.of(__file__, __doc__, options, "cpu")
    optimizers, absent = contestants(options.elements)
    if absent is not None:
        record.without("DeepSpeed", absent)
    clock = clock_of(torch.device("cpu"))
    for optimizer in optimizers.values():
        for _ in range(2):
            optimizer.step()  # It makes its state, and compiles.
    steps: dict[str, Callable[[], Any]] = {
        name: (lambda step=optimizer.step: clock.seconds(step)) for name, optimizer in optimizers.items()
    }
    seconds = take_turns(steps, options.rounds)
    weights = {name: optimizer.param_groups[0]["params"][0].detach() for name, optimizer in optimizers.items()}
    for name, weight in weights.items():
        difference = float((weight - weights["torch, fused"]).abs().max())
        assert difference < 1e-4, f"{name} steps otherwise: {difference}"
    base = "torch, fused"
    table = Table(f"a step of {options.elements:,} elements, {options.threads} threads", base, clock)
    for name, ratios in all_ratios(seconds, base).items():
        milliseconds = statistics.median(seconds[name]) * 1e3
        bar = statistics.median(all_ratios(seconds, base)["DeepSpeed"]) if name == "dlo" and absent is None else None
        table.add(name, ratios, bar=bar, ours=name == "dlo", control=name.endswith("again"), ms=milliseconds)
    record.add(table)
    record.finish()


if __name__ == "__main__":
    main()
