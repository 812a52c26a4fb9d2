"""Picture of a schedule: what is kept and recomputed over the time of a step, and the memory that it takes."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from dlo_plugins.remat.chain import Chain, Link
from dlo_plugins.remat.schedule import OperationKind, Schedule
from dlo_plugins.remat.schedule_simulation import Simulation, simulate
from dlo_plugins.remat.transfer_plan import node_costs

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COLORS = {
    **{"forward": "#4c78a8", "kept": "#72b7b2", "again": "#f58518", "backward": "#b279a2"},
    **{"copy": "#9d755d", "wait": "#e45756"},
}
_LABELS = {
    "forward": "forward, nothing kept",
    "kept": "forward, activations kept",
    "again": "forward again",
    "backward": "backward",
    "copy": "copy to the host, and back",
    "wait": "wait for a copy",
}
_COPIES = {OperationKind.OFFLOAD: "to host", OperationKind.PREFETCH: "to device"}
_WAITS = (OperationKind.RELEASE, OperationKind.ARRIVE)


def draw_schedule(
    chain: Chain,
    schedule: Schedule,
    stem: int = 0,
    budget: int | None = None,
    link: Link | None = None,
    measured: int = 0,
) -> Figure:
    """Returns a figure of a schedule: the operations of each stage over time, and the memory over time.

    Below the stages are the copies of each direction, where there are any; below the device's memory, the host's.

    Args:
        chain: Chain that the schedule is of.
        schedule: Schedule.
        stem: Bytes that the step keeps beside the chain.
        budget: Budget in bytes, with the stem; None draws no line.
        link: Link of the schedule's copies.
        measured: Peak bytes that a step has taken; 0 draws no line.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    found = simulate(chain, schedule, link)
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    upper, lower = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    scale, rows, kinds = 1e3, len(chain), []
    for item in found.operations:
        kind, row = _kind(item.operation.kind, item.operation.run), item.operation.stage
        if item.end <= item.start and kind == "wait":
            continue
        if kind == "copy":
            row = rows + (item.operation.kind is OperationKind.PREFETCH)
        kinds.append(kind)
        width = max(item.end - item.start, 1e-12) * scale
        upper.barh(row, width, left=item.start * scale, height=0.85, color=_COLORS[kind])
    if schedule.transfers:
        stages = range(0, rows, -(-rows // 10))
        upper.set_yticks([*stages, rows, rows + 1], [*map(str, stages), *_COPIES.values()])
        upper.axhline(rows - 0.5, color="0.6", linewidth=0.8)
    upper.set_ylim(rows + (1.6 if schedule.transfers else -0.4), -0.6)
    upper.set_ylabel("stage")
    upper.legend(
        handles=[Patch(color=_COLORS[kind], label=label) for kind, label in _LABELS.items() if kind in kinds],
        loc="upper center",
        bbox_to_anchor=(0.5, 1.2 if schedule.transfers else 1.13),
        ncols=4 if not schedule.transfers else 3,
        frameon=False,
    )
    issued = [item for item in found.operations if item.operation.kind not in _COPIES]
    edges = [item.start * scale for item in issued] + [found.time * scale]
    lower.stairs([(item.peak + stem) / 1e6 for item in issued], edges, fill=True, color="#9ecae9")
    if schedule.transfers:
        times, held = _host_bytes(chain, schedule, found)
        lower.step([each * scale for each in times], [each / 1e6 for each in held], where="post", label="on the host")
    if budget is not None:
        lower.axhline(budget / 1e6, color="#e45756", linestyle="--", label="budget")
    if measured:
        lower.axhline(measured / 1e6, color="#54a24b", linestyle=":", label="measured peak")
    if budget is not None or schedule.transfers:
        lower.legend(frameon=False)
    lower.set_xlabel("time of forward and backward (ms)")
    lower.set_ylabel("activations (MB)")
    return figure


def _host_bytes(chain: Chain, schedule: Schedule, found: Simulation) -> tuple[list[float], list[int]]:
    """Returns the seconds at which the bytes on the host change, and the bytes from then on."""
    changes = []
    for item in found.operations:
        if item.operation.kind in _COPIES:
            bundle = node_costs(chain, schedule.nodes[item.operation.node]).bundle
            is_stored = item.operation.kind is OperationKind.OFFLOAD
            changes.append((item.start, bundle) if is_stored else (item.end, -bundle))
    changes.sort()
    return [0.0, *(at for at, _ in changes)], [0, *itertools.accumulate(size for _, size in changes)]


def _kind(kind: OperationKind, run: int) -> str:
    if kind is OperationKind.BACKWARD:
        return "backward"
    if kind in _COPIES:
        return "copy"
    if kind in _WAITS:
        return "wait"
    if run > 0:
        return "again"
    return "kept" if kind is OperationKind.SAVE else "forward"
