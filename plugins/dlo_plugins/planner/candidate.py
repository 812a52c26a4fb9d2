"""Candidate: a layout with its predicted time and memory; rejection: a layout with the number that rejects it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from dlo_framework.units import format_bytes
from dlo_plugins.planner.layout import Layout
from dlo_plugins.planner.rank_memory import RankMemory
from dlo_plugins.planner.step_time import StepTime


@dataclass(frozen=True)
class Candidate:
    """Layout that fits in memory.

    Attributes:
        layout: Layout of the run.
        split: Number of blocks of each stage.
        time: Predicted time of a step.
        memory: Predicted memory of the rank that needs most.
        flops: Floating-point operations of a step, as MFU counts them.
        peak: Floating-point operations a second of all ranks together.
        tokens: Tokens of a step, or rows where these have no length.
        reason: Sentence that compares it with the first.
        is_verified: Whether simulated ranks have run a step of it.
        host_bytes: Bytes of activations in the host's memory, of the rank with most.
    """

    layout: Layout
    split: tuple[int, ...]
    time: StepTime
    memory: RankMemory
    flops: float
    peak: float
    tokens: int
    reason: str = ""
    is_verified: bool = False
    host_bytes: float = 0.0

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation."""
        return self.flops / self.time.total / self.peak

    @property
    def throughput(self) -> float:
        """Tokens or rows a second."""
        return self.tokens / self.time.total

    @property
    def caveat(self) -> str:
        """What of the plan no run has confirmed; empty without such a thing."""
        if not self.layout.offload:
            return ""
        return (
            "offloading has run on one GPU, in a small model, and its speed has not been measured; --fix offload=false"
            " plans without it"
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the candidate as JSON data: seconds and bytes."""
        return {
            "layout": {
                **asdict(self.layout),
                "mesh": {**self.layout.mesh.sizes, "ep": self.layout.mesh.ep},
                "split": self.split,
            },
            "step_seconds": self.time.total,
            "throughput": self.throughput,
            "mfu": self.mfu,
            "bubble": self.time.bubble / self.time.total,
            "seconds": asdict(self.time),
            "memory_bytes": {**asdict(self.memory), "total": self.memory.total},
            "host_bytes": self.host_bytes,
            "verified": self.is_verified,
            "reason": self.reason,
            "caveat": self.caveat,
        }


@dataclass(frozen=True)
class Rejection:
    """Layout that was not chosen.

    Attributes:
        layout: Layout.
        kind: Resource that rejects it, `memory` or `time`; or `refused`, where a simulated rank cannot run it.
        value: Bytes of the rank that needs most, or seconds of a step: at least this; 1 where it is refused.
        limit: Bytes of memory, or seconds of the slowest plan that was kept; 1 where it is refused.
        why: Message of a simulated rank.
    """

    layout: Layout
    kind: str
    value: float
    limit: float
    why: str = ""

    def __str__(self) -> str:
        if self.kind == "refused":
            return f"{self.layout}: {self.why}"
        if self.kind == "memory":
            return f"{self.layout}: needs {format_bytes(self.value)}, more than {format_bytes(self.limit)}"
        return f"{self.layout}: a step takes at least {self.value:.3g} s, {self.value / self.limit - 1:+.0%}"


def explain(candidate: Candidate, best: Candidate) -> str:
    """Returns the sentence that says why a candidate is where it is."""
    if candidate is best:
        largest = sorted(fields(StepTime), key=lambda part: -getattr(best.time, part.name))
        lost = [
            p.name for p in largest if p.name != "compute" and getattr(best.time, p.name) >= 0.005 * best.time.total
        ][:2]
        words = " and ".join(f"{_WORDS[name]} ({getattr(best.time, name) / best.time.total:.0%})" for name in lost)
        return f"the fastest that fits; it loses most to {words}" if lost else "the fastest that fits"
    slower = candidate.time.total / best.time.total - 1
    parts = {p.name: getattr(candidate.time, p.name) - getattr(best.time, p.name) for p in fields(StepTime)}
    worst = max(parts, key=lambda name: parts[name])
    share = parts[worst] / best.time.total
    memory = candidate.memory.total - best.memory.total
    less = f", with {format_bytes(-memory)} less memory" if memory < 0 else ""
    if slower < 0.0005:
        return f"as fast as the first{less}"
    return f"{slower:.1%} slower than the first, {share:.1%} by {_WORDS[worst]}{less}"


_WORDS = {
    "compute": "computation",
    "recompute": "recomputation",
    "tensor": "communication of tp",
    "context": "communication of cp",
    "gathering": "gathering of parameters",
    "gradients": "reduction of gradients",
    "bubble": "the pipeline's bubble",
    "optimizer": "the optimizer's step",
    "experts": "the exchange of tokens between the ranks of ep",
    "copies": "waits for copies of activations to and from the host",
}
