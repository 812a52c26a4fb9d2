"""Report of a profile: tables of time, roofline, memory and waits as text and JSON, and plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from dlo_framework.units import format_bytes
from dlo_plugins.profile.operations import DATA, EXPOSED, HIDDEN, HOST, KINDS, OPTIMIZER
from dlo_plugins.profile.rank_profile import (
    MachinePeaks,
    RankProfile,
    RooflinePoint,
    StragglerReport,
    group_modules,
    group_name,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ROWS = 14
#: Most ranks in the plot: those with the most time of their own.
_MOST_RANKS = 16
#: Colour of each kind in plots.
COLOURS = dict(
    zip(
        KINDS,
        ("#3f6ad8", "#a05195", "#2e8b57", "#d9822b", "#6a8a82", "#c2a000", "#c0392b", "#7a5195", "#8d6e63", "#9e9e9e"),
        strict=True,
    )
)


@dataclass
class ProfileReport:
    """Profile of a run's steps on all profiled ranks.

    Attributes:
        steps: Numbers of the first and the last profiled optimizer step.
        world_size: Number of ranks of the run.
        ranks: Profiles by rank; the first one's tables are shown.
        stragglers: Comparison of the ranks.
        peaks: Peaks of the machine; None if unknown.
        usual: Median seconds of a step outside the window; None if unknown.
    """

    steps: tuple[int, int]
    world_size: int
    ranks: Sequence[RankProfile]
    stragglers: StragglerReport
    peaks: MachinePeaks | None
    usual: float | None

    @property
    def own(self) -> RankProfile:
        """Profile whose tables are shown."""
        return self.ranks[0]

    def to_json(self) -> dict[str, Any]:
        """Returns the report as JSON data; times are seconds of a step, work is that of a step."""
        return {
            "steps": list(self.steps),
            "world_size": self.world_size,
            "peaks": asdict(self.peaks) if self.peaks is not None else None,
            "usual_step_seconds": self.usual,
            "ranks": [self._rank(profile) for profile in self.ranks],
            "stragglers": self.stragglers.to_json(),
        }

    def _rank(self, profile: RankProfile) -> dict[str, Any]:
        breakdown = profile.breakdown
        return {
            "rank": profile.rank,
            "host": profile.host,
            "device": profile.device,
            "step_seconds": profile.measured,
            "explained": profile.explained,
            "kinds": {kind: breakdown.kind(kind) for kind in KINDS},
            HIDDEN: breakdown.hidden,
            "steps": [{"number": s.number, "seconds": s.wall, "kinds": s.kinds} for s in breakdown.steps],
            "modules": {
                name: {"forward": m.forward / len(breakdown.steps), "backward": m.backward / len(breakdown.steps)}
                for name, m in breakdown.modules.items()
            },
            "roofline": {
                "kinds": [asdict(point) for point in profile.kind_points(self.peaks).values()],
                "modules": [asdict(point) for point in profile.module_points(self.peaks).values()],
            },
            "memory": asdict(profile.memory) if profile.memory is not None else None,
            "state": profile.state,
            "waits": [asdict(wait) for wait in profile.waits] if profile.waits is not None else None,
            "synchronisations": profile.synchronisations,
            "trace": profile.trace,
            "note": profile.note,
        }

    def text(self) -> str:
        """Returns all tables."""
        own = self.own
        usual = f"; outside of profiling it takes {self.usual * 1e3:.1f} ms" if self.usual else ""
        first, last = self.steps
        lines = [
            f"profile of steps {first} to {last} on rank {own.rank} of {self.world_size}, {own.device}:"
            f" {own.measured * 1e3:.1f} ms a step{usual}",
            "",
            *self._kind_lines(),
            "",
            *self._module_lines(),
        ]
        for more in (self._memory_lines(), self._wait_lines(), self._rank_lines()):
            lines += ["", *more] if more else []
        if own.note:
            lines += ["", own.note]
        return "\n".join(lines)

    def _kind_lines(self) -> list[str]:
        own, points = self.own, self.own.kind_points(self.peaks)
        lines = [f"{'where a step goes':<26}{'ms':>9}{'share':>8}{'GFLOP':>10}{'GFLOP/s':>10}{'GB/s':>8}  of the roof"]
        for kind in KINDS:
            seconds = own.breakdown.kind(kind)
            if seconds > 0:
                lines.append(_row(kind, seconds, own.measured, points.get(kind)))
        total = sum(own.breakdown.kind(kind) for kind in KINDS)
        lines.append(f"{'sum':<26}{total * 1e3:>9.2f}{own.explained:>8.1%}  of the step by the host's clock")
        if own.breakdown.hidden > 0:
            lines.append(f"{HIDDEN:<26}{own.breakdown.hidden * 1e3:>9.2f}  while the rank works, not in the sum")
        if self.peaks is not None:
            rates = ", ".join(f"{rate / 1e9:,.0f} GFLOP/s in {name}" for name, rate in self.peaks.flops.items())
            lines.append(f"roof: {rates}; {self.peaks.bandwidth / 1e9:,.1f} GB/s ({self.peaks.source})")
        return lines

    def _module_lines(self) -> list[str]:
        own, points = self.own, self.own.module_points(self.peaks)
        count = len(own.breakdown.steps)
        lines = [
            f"{'by module, each without its submodules':<42}{'forward':>9}{'backward':>10}{'share':>8}{'GFLOP/s':>10}"
            "  of the roof"
        ]
        groups = list(group_modules(own.breakdown.modules).items())
        for name, group in groups[:_ROWS]:
            point = points[name]
            share = group.seconds / count / own.measured if own.measured else 0.0
            rate = f"{point.flops_rate / 1e9:,.1f}" if point.flops else ""
            lines.append(
                f"{name[-41:]:<42}{group.forward / count * 1e3:>9.2f}{group.backward / count * 1e3:>10.2f}{share:>8.1%}"
                f"{rate:>10}  {_roof(point)}"
            )
        if groups[_ROWS:]:
            forward = sum(group.forward for _, group in groups[_ROWS:]) / count
            backward = sum(group.backward for _, group in groups[_ROWS:]) / count
            share = (forward + backward) / own.measured if own.measured else 0.0
            name = f"{len(groups) - _ROWS} others"
            lines.append(f"{name:<42}{forward * 1e3:>9.2f}{backward * 1e3:>10.2f}{share:>8.1%}")
        return lines

    def _memory_lines(self) -> list[str]:
        memory, state = self.own.memory, self.own.state
        lines = []
        if state:
            lines.append("state: " + ", ".join(f"{name} {format_bytes(size)}" for name, size in state.items()))
        if memory is not None:
            lines.append(
                f"memory: at most {format_bytes(memory.peak)} beyond what a step begins with, in {memory.phase}; of it:"
            )
            groups = _grouped_bytes(memory.at_peak)
            lines += [f"  {name:<40}{format_bytes(size):>10}" for name, size in list(groups.items())[:8]]
        return lines

    def _wait_lines(self) -> list[str]:
        own = self.own
        if own.waits is None and not own.synchronisations:
            return []
        lines = ["waits for the device in a step:" if own.waits else "no line of a step waits for the device"]
        for wait in (own.waits or [])[:10]:
            lines.append(
                f"  {wait.operation} x {wait.count}, {wait.seconds * 1e3:.2f} ms: {wait.place} in {wait.function}"
            )
            if wait.source:
                lines.append(f"    {wait.source}")
        for name, (count, seconds) in list(own.synchronisations.items())[:5]:
            lines.append(f"  {name} x {count}, {seconds * 1e3:.2f} ms a step")
        return lines

    def _rank_lines(self) -> list[str]:
        stragglers = self.stragglers
        if len(stragglers.ranks) < 2:
            return []
        lines = [f"{'rank':<6}{'step':>9}{'own':>9}{'compute':>9}{'data':>9}{'host':>9}{'waits':>9}  ms"]
        shown = sorted(stragglers.ranks, key=lambda rank: -rank.own)
        for rank in shown[:8]:
            values = (rank.wall, rank.own, rank.compute, rank.data, rank.host, rank.wait)
            lines.append(f"{rank.rank:<6}" + "".join(f"{value * 1e3:>9.2f}" for value in values))
        if shown[8:]:
            lines.append(f"and {len(shown) - 8} ranks with less time of their own")
        lines.append(stragglers.text)
        return lines

    # --- plots -------------------------------------------------------------------------------------------------

    def figure(self) -> Figure:
        """Returns a plot of the time by kind on each rank, by module, and of the roofline."""
        from matplotlib.figure import Figure

        own = {each.rank: each.own for each in self.stragglers.ranks}
        busiest = sorted(self.ranks, key=lambda profile: -own.get(profile.rank, 0.0))[:_MOST_RANKS]
        shown = sorted(busiest, key=lambda profile: profile.rank)
        figure = Figure(figsize=(11, 5.2 + 0.22 * len(shown)), layout="constrained")
        grid = figure.add_gridspec(2, 2, height_ratios=[1 + 0.25 * len(shown), 5], width_ratios=[1.3, 1])
        self._draw_ranks(figure.add_subplot(grid[0, :]), shown)
        self._draw_modules(figure.add_subplot(grid[1, 0]))
        self._draw_roofline(figure.add_subplot(grid[1, 1]))
        return figure

    def _draw_ranks(self, axes: Axes, shown: Sequence[RankProfile]) -> None:
        left = [0.0] * len(shown)
        for kind in KINDS:
            values = [profile.breakdown.kind(kind) * 1e3 for profile in shown]
            if max(values) > 0:
                axes.barh(range(len(shown)), values, 0.8, left=left, color=COLOURS[kind], label=kind)
                left = [at + value for at, value in zip(left, values, strict=True)]
        axes.set(
            yticks=range(len(shown)), yticklabels=[f"rank {profile.rank}" for profile in shown], xlabel="ms of a step"
        )
        axes.invert_yaxis()
        axes.legend(ncols=5, fontsize=7, frameon=False, loc="lower left", bbox_to_anchor=(0, 1.0))
        _plain(axes)

    def _draw_modules(self, axes: Axes) -> None:
        own, count = self.own, len(self.own.breakdown.steps)
        groups = list(group_modules(own.breakdown.modules).items())[:_ROWS]
        forward = [group.forward / count * 1e3 for _, group in groups]
        backward = [group.backward / count * 1e3 for _, group in groups]
        axes.barh(range(len(groups)), forward, 0.8, color="#3f6ad8", label="forward")
        axes.barh(range(len(groups)), backward, 0.8, left=forward, color="#a05195", label="backward")
        axes.set_yticks(range(len(groups)), [_shorten(name, 34) for name, _ in groups], fontsize=7)
        axes.invert_yaxis()
        axes.set_xlabel("ms of a step")
        axes.set_title(f"by module, rank {own.rank}", fontsize=9, loc="left")
        axes.legend(fontsize=7, frameon=False)
        _plain(axes)

    def _draw_roofline(self, axes: Axes) -> None:
        points = {
            name: point
            for name, point in self.own.kind_points(self.peaks).items()
            if point.flops and point.bytes and point.seconds and name not in (DATA, HOST, EXPOSED, OPTIMIZER)
        }
        modules = [p for p in self.own.module_points(self.peaks).values() if p.flops and p.bytes and p.seconds]
        axes.set_title("roofline", fontsize=9, loc="left")
        axes.set(xscale="log", yscale="log", xlabel="FLOPs a byte", ylabel="GFLOP/s")
        if self.peaks is not None and self.peaks.flops:
            peak = max(self.peaks.flops.values())
            ridge = peak / self.peaks.bandwidth
            reach = [p.flops / p.bytes for p in [*points.values(), *modules]] or [ridge]
            ends = sorted((min(reach) / 4, ridge, max(max(reach), ridge) * 4))
            axes.plot(ends, [min(peak, at * self.peaks.bandwidth) / 1e9 for at in ends], color="#808080", linewidth=1)
        for point in modules[:_ROWS]:
            axes.plot(point.flops / point.bytes, point.flops_rate / 1e9, ".", color="#9e9e9e")
        for name, point in points.items():
            axes.plot(point.flops / point.bytes, point.flops_rate / 1e9, "o", color=COLOURS[name], label=name)
        if points:
            axes.legend(fontsize=7, frameon=False)
        _plain(axes)

    def memory_figure(self) -> Figure | None:
        """Returns a plot of the memory over the steps; None if it was not recorded."""
        memory = self.own.memory
        if memory is None or not memory.points:
            return None
        from matplotlib.figure import Figure

        figure = Figure(figsize=(10, 3.2), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=[2, 1])
        start = memory.points[0][0]
        left.plot(
            [(at - start) * 1e3 for at, _ in memory.points],
            [size / 1e6 for _, size in memory.points],
            linewidth=0.8,
            drawstyle="steps-post",
        )
        left.set(xlabel="ms", ylabel="MB beyond the start")
        groups = list(_grouped_bytes(memory.at_peak).items())[:10]
        right.barh(range(len(groups)), [size / 1e6 for _, size in groups], color="#d9822b")
        right.set_yticks(range(len(groups)), [_shorten(name, 30) for name, _ in groups], fontsize=7)
        right.invert_yaxis()
        right.set_xlabel("MB at the peak")
        for axes in (left, right):
            _plain(axes)
        return figure


def _shorten(name: str, length: int) -> str:
    """Returns the end of a module's name, after an ellipsis where it is longer."""
    return name if len(name) <= length else f"…{name[1 - length :]}"


def _plain(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(labelsize=7)


def _grouped_bytes(sizes: dict[str, int]) -> dict[str, int]:
    groups: dict[str, int] = {}
    for name, size in sizes.items():
        groups[group_name(name)] = groups.get(group_name(name), 0) + size
    return dict(sorted(groups.items(), key=lambda item: -item[1]))


def _row(name: str, seconds: float, step: float, point: RooflinePoint | None) -> str:
    line = f"{name:<26}{seconds * 1e3:>9.2f}{seconds / step if step else 0:>8.1%}"
    if point is None or not (point.flops or point.bytes) or name in (DATA, HOST):
        return line
    flops = (f"{point.flops / 1e9:,.2f}", f"{point.flops_rate / 1e9:,.1f}") if point.flops else ("", "")
    return f"{line}{flops[0]:>10}{flops[1]:>10}{point.bytes_rate / 1e9:>8.1f}  {_roof(point)}".rstrip()


def _roof(point: RooflinePoint) -> str:
    return f"{point.fraction:.0%} ({point.bound})" if point.fraction is not None else ""
