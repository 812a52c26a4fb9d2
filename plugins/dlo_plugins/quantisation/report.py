"""Report on a quantised model: the task's validation metrics, bytes, and CPU latency, before and after."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dlo_framework.units import format_bytes

#: Rounds of the latency measurement; the first one warms up.
ROUNDS = 30
#: Seconds after which it ends with fewer rounds.
MOST_SECONDS = 20.0


@dataclass(frozen=True)
class Latency:
    """Latency of a forward on the CPU, in ms; medians of rounds in which the models take turns.

    Attributes:
        batch_size: Number of samples.
        threads: Number of threads.
        before: Median of the float model.
        after: Median of the quantised model.
        control: Median of the float model, measured a second time in each round.
        rounds: Number of rounds.
        onnx: Median of the ONNX export in ONNX Runtime; None where there is none.
    """

    batch_size: int
    threads: int
    before: float
    after: float
    control: float
    rounds: int
    onnx: float | None = None


@dataclass
class QuantisationReport:
    """Report on a quantised model.

    Attributes:
        scheme: Name of the scheme.
        when: ``post`` or ``aware``.
        group_size: Number of input features of a group; None for schemes without groups.
        layers: Number of quantised layers.
        before: Metrics of the float model.
        after: Metrics of the quantised model.
        bytes_before: Bytes of the float model, [model, quantised layers' weights].
        bytes_after: Bytes of the quantised model.
        latency: Latencies on the CPU; empty where it has no kernels for the scheme.
        exported: Files or folders that were written.
    """

    scheme: str
    when: str
    group_size: int | None
    layers: int
    before: dict[str, float] = field(default_factory=dict)
    after: dict[str, float] = field(default_factory=dict)
    bytes_before: tuple[int, int] = (0, 0)
    bytes_after: tuple[int, int] = (0, 0)
    latency: list[Latency] = field(default_factory=list)
    exported: list[str] = field(default_factory=list)

    def is_faster_in_onnx(self) -> bool:
        """Returns whether ONNX Runtime takes less time than torchao's kernels, over the measured batches together."""
        return sum(one.onnx or math.inf for one in self.latency) < sum(one.after for one in self.latency)

    def scalars(self) -> dict[str, float]:
        """Returns values for the logger."""
        found = {f"quantised/{name}": value for name, value in self.after.items()}
        found |= {f"quantised/{name}_before": value for name, value in self.before.items()}
        found["quantised/size_ratio"] = self.bytes_before[0] / self.bytes_after[0]
        found["quantised/weights_ratio"] = self.bytes_before[1] / self.bytes_after[1]
        for one in self.latency:
            found[f"quantised/latency_ms_batch_{one.batch_size}"] = one.after
            found[f"quantised/latency_ms_batch_{one.batch_size}_before"] = one.before
            if one.onnx is not None:
                found[f"quantised/latency_ms_batch_{one.batch_size}_onnx"] = one.onnx
        return found

    def table(self) -> str:
        """Returns the report as a table of three columns."""
        head = f"quantised by {self.scheme}" + (f", groups of {self.group_size}" if self.group_size else "")
        rows = [(f"{head}, {self.when}", "before", "after")]
        rows += [(name, f"{value:.4f}", f"{self.after[name]:.4f}") for name, value in self.before.items()]
        sizes = (("model", 0), (f"weights of {self.layers} layers", 1))
        for name, number in sizes:
            before, after = self.bytes_before[number], self.bytes_after[number]
            rows.append((name, format_bytes(before), f"{format_bytes(after)}, {before / after:.2f} times smaller"))
        for one in self.latency:
            name = f"CPU latency, batch {one.batch_size}, {one.threads} thread{'s' if one.threads > 1 else ''}"
            for kind, milliseconds in ((name, one.after), (f"{name}, ONNX Runtime", one.onnx)):
                if milliseconds is not None:
                    times = f"{one.before / milliseconds:.2f} times as fast"
                    rows.append((kind, f"{one.before:.2f} ms", f"{milliseconds:.2f} ms, {times}"))
        widths = [max(len(row[column]) for row in rows) + 2 for column in (0, 1)]
        return "\n".join(f"{a:<{widths[0]}}{b:<{widths[1]}}{c}" for a, b, c in rows)


def measure_latency(
    before: Callable[[], Any],
    after: Callable[[], Any],
    batch_size: int,
    rounds: int = ROUNDS,
    onnx: Callable[[], Any] | None = None,
) -> Latency:
    """Measures forwards on the CPU, in turns.

    Args:
        before: Forward of the float model.
        after: Forward of the quantised model.
        batch_size: Number of samples of the forward.
        rounds: Number of rounds, besides the first.
        onnx: Forward of the quantised model's ONNX export.
    """
    contestants = {"before": before, "after": after, "control": before} | ({"onnx": onnx} if onnx else {})
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    began = time.perf_counter()
    with torch.inference_mode():
        for number in range(rounds + 1):
            for name, run in contestants.items():
                start = time.perf_counter()
                run()
                if number:
                    seconds[name].append(time.perf_counter() - start)
            if number >= 3 and time.perf_counter() - began > MOST_SECONDS:
                break
    found = {name: statistics.median(values) * 1000 for name, values in seconds.items()}
    return Latency(batch_size, torch.get_num_threads(), rounds=len(seconds["before"]), **found)


def forward_of(model: nn.Module, inputs: tuple[tuple[Any, ...], dict[str, Any]]) -> Callable[[], Any]:
    """Returns a function that runs a model on inputs."""
    args, kwargs = inputs
    return lambda: model(*args, **kwargs)


def layer_weights(model: nn.Module, names: Sequence[str]) -> list[torch.Tensor]:
    """Returns the weights of layers."""
    return [model.get_submodule(name).weight for name in names]  # type: ignore[misc]
