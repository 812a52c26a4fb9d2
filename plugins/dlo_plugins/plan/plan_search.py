"""Searches the layouts of a run: the fastest that fit in memory, and why each of the others does not.

Layouts are visited in the order of a lower bound of their time, computation without any communication. The search ends
when the bound exceeds the time of the slowest plan that is kept, so that nothing faster is missed. Of the ways to
recompute, the fastest that fits in memory is taken. Each plan that is kept has been simulated action by action, and the
best ones run on simulated ranks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from dlo_framework.errors import DloError
from dlo_framework.mesh import MeshSpec
from dlo_framework.units import format_bytes
from dlo_plugins.plan.layout import DELAYED, SCHEDULES, Layout, Request, StateFormat
from dlo_plugins.plan.machine import Machine
from dlo_plugins.plan.model_profile import ModelProfile
from dlo_plugins.plan.rank_memory import MemoryModel, RankMemory
from dlo_plugins.plan.rotor_model import RotorModel, round_budget
from dlo_plugins.plan.step_time import RotorPlan, StepTime, TimeModel


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


#: Ways to recompute, from none to the one that needs least memory.
_RECOMPUTE = (("none", 1), ("selective", 1), ("full", 4), ("full", 3), ("full", 2), ("full", 1))
#: Share of a step that offloading must be able to save to be tried, beside other ways that fit in memory.
_GAIN = 0.005
#: Number of plans that simulated ranks verify, and how often others take the place of refused ones.
_VERIFIED, _SEARCHES = 3, 4
#: Function that verifies a candidate, given the memory of each rank of its pipeline.
Verify = Callable[[Candidate, list[RankMemory]], Candidate | Rejection]


@dataclass
class SearchResult:
    """Result of a search.

    Attributes:
        candidates: Plans, the fastest first.
        rejections: Layouts that were not chosen, with the number that rejects each.
        count: Number of layouts that the request allows.
    """

    candidates: list[Candidate]
    rejections: list[Rejection]
    count: int


class PlanSearch:
    """Searches plans for a model on a machine.

    Args:
        profile: Profile of the model.
        machine: Machine.
        state: Bytes of the run's tensors.
        request: Resources and wishes.
    """

    def __init__(self, profile: ModelProfile, machine: Machine, state: StateFormat, request: Request) -> None:
        self.profile, self.machine, self.request = profile, machine, request
        self.times = TimeModel(profile, machine, state)
        self.memory = MemoryModel(self.times)
        self.rotor = RotorModel(self.times, self.memory)
        # On a CPU the callback's link is simulated.
        self._offloads = machine.host is not None and machine.device != "cpu"
        if request.fix.get("offload", "").lower() == "true" and not self._offloads:
            had = "of CPUs" if machine.device == "cpu" else "without"
            raise DloError(
                f"--fix offload=true must be for accelerators with links.host, got {machine.name} {had}; add links:"
                " {host: {bandwidth: {value: 25.0e+9, source: ...}, memory: {value: 64.0e+9, source: ...}}} to its file"
            )
        self._least: dict[tuple[int, ...], float] = {}
        self._tried = {"1F1B"}

    def run(self, verify: Verify | None = None) -> SearchResult:
        """Returns the fastest plans.

        Args:
            verify: Function that gets a candidate with the memory of each rank of its pipeline, and returns it, or why
                it cannot run. The best three are verified, and the first of each schedule but 1F1B; others take the
                place of refused ones.

        Raises:
            DloError: No layout is possible, none fits in memory, or none can run; the message says what is nearest.
        """
        refused: list[Rejection] = []
        for _ in range(_SEARCHES):
            result = self._search(refused)
            if verify is None:
                return result
            outcomes = [self._verified(candidate, n, verify) for n, candidate in enumerate(result.candidates)]
            new = [item for item in outcomes if isinstance(item, Rejection)]
            if not new:
                return replace(result, candidates=[item for item in outcomes if isinstance(item, Candidate)])
            refused += new
        passed = [item for item in outcomes[:_VERIFIED] if isinstance(item, Candidate)]
        if not passed:
            raise DloError(refused[0].why or str(refused[0]))
        return replace(result, candidates=passed, rejections=result.rejections + new)

    def _verified(self, candidate: Candidate, place: int, verify: Verify) -> Candidate | Rejection:
        """Returns a plan, verified if it is one of the first or its schedule has not been verified yet."""
        schedule = candidate.layout.schedule
        if place >= _VERIFIED and schedule in self._tried:
            return candidate
        self._tried.add(schedule)
        return verify(candidate, self._rank_memory(candidate))

    def _rank_memory(self, candidate: Candidate) -> list[RankMemory]:
        plan = self.rotor.plan(candidate.layout) if candidate.layout.recompute == "rotor" else None
        return self.memory.ranks(candidate.layout, plan)

    def _search(self, refused: Sequence[Rejection]) -> SearchResult:
        """Returns the fastest plans, without those on meshes that a simulated rank has refused."""
        layouts = list(self._layouts())
        if not layouts:
            raise self._no_layout()
        kept: dict[tuple[object, ...], Candidate] = {}
        rejections: list[Rejection] = []
        for layout in sorted(layouts, key=self._expected_time):
            limit = math.inf
            if len(kept) == self.request.top:
                limit = max(candidate.time.total for candidate in kept.values())
            bound = self.least_time(layout)
            if bound > limit:
                rejections.append(Rejection(layout, "time", bound, limit))
                continue
            outcome = self._refusal(layout, refused) or self._cheapest(layout, limit)
            if isinstance(outcome, Candidate) and outcome.layout.mesh.pp > 1 and outcome.time.total <= limit:
                outcome = self._candidate(outcome.layout, outcome.memory, exact=True)
            if isinstance(outcome, Rejection):
                rejections.append(outcome)
            elif outcome.time.total > limit:
                rejections.append(Rejection(outcome.layout, "time", outcome.time.total, limit))
            else:
                rejections += self._insert(kept, outcome)
        if not kept and refused:
            raise DloError(refused[0].why or str(refused[0]))
        if not kept:
            raise self._nothing_fits(rejections)
        best = sorted(kept.values(), key=lambda candidate: (round(candidate.time.total, 9), _axes(candidate.layout)))
        return SearchResult([replace(c, reason=explain(c, best[0])) for c in best], rejections, len(layouts))

    def _refusal(self, layout: Layout, refused: Sequence[Rejection]) -> Rejection | None:
        """Returns the rejection of a layout whose mesh a simulated rank has refused, or which its shards do not fit.

        A schedule other than 1F1B that a rank cannot run is refused on all meshes.
        """
        for refusal in refused:
            other = refusal.layout
            is_same = layout.schedule == other.schedule and (layout.schedule != "1F1B" or layout.mesh == other.mesh)
            if refusal.kind != "refused":
                ways: dict[str, Any] = {key: getattr(other, key) for key in ("recompute", "every", "budget", "offload")}
                is_same = replace(layout, **ways) == other
            if is_same:
                return replace(refusal, layout=layout)
        return None

    def _insert(self, kept: dict[tuple[object, ...], Candidate], plan: Candidate) -> list[Rejection]:
        """Adds a plan to those that are kept, and returns those that leave.

        Of plans that differ only in how data parallelism shards, the fastest is kept.
        """
        layout = plan.layout
        mesh = layout.mesh
        key = (mesh.pp, mesh.cp, mesh.tp, mesh.ep, layout.micro_batch, layout.schedule)
        rejections = []
        other = kept.get(key)
        if other is not None and other.time.total <= plan.time.total:
            return [Rejection(layout, "time", plan.time.total, other.time.total)]
        if other is not None:
            rejections.append(Rejection(other.layout, "time", other.time.total, plan.time.total))
        kept[key] = plan
        if len(kept) > self.request.top:
            worst = max(kept, key=lambda name: kept[name].time.total)
            out = kept.pop(worst)
            limit = max(candidate.time.total for candidate in kept.values())
            rejections.append(Rejection(out.layout, "time", out.time.total, limit))
        return rejections

    # --- layouts -------------------------------------------------------------------------------------------

    def _layouts(self) -> Iterator[Layout]:
        """Yields all layouts without recomputation that divide ranks, model and batch."""
        request = self.request
        for mesh in self._meshes():
            if request.global_batch % mesh.data_size:
                continue
            rows = request.global_batch // mesh.data_size
            for micro_batch in _divisors(rows):
                if not request.allows("micro_batch", micro_batch):
                    continue
                count = rows // micro_batch
                for schedule, chunks in self._schedules(mesh, count):
                    for zero, each in self._shardings(mesh, count, schedule):
                        shares = mesh.tp > 1 and self.profile.sequence_parallel
                        layout = Layout(mesh, micro_batch, count, schedule, chunks, None, zero, each, shares)
                        if not self.times.state.steps_in_backward or layout.allows_steps_in_backward:
                            yield layout

    def _shardings(self, mesh: MeshSpec, micro_batches: int, schedule: str) -> Iterator[tuple[int, bool]]:
        """Yields stages of ZeRO, and whether each micro-batch reduces its gradients.

        Stage 1 is ZeroStrategy's, which has data parallelism alone, and communicates as much as stage 2: it is planned
        only if it is asked for. It is that of schedules whose gradients have a delay, too: each rank has full weights.
        """
        if schedule in {name for name, _ in DELAYED}:
            if mesh.ep > 1:
                return  # Two versions of full weights: a plan has all experts in each.
            zero = int(mesh.dp_shard * mesh.cp > 1)
            if self.request.allows("zero", zero):
                yield zero, False
            return
        if self.request.fix.get("zero") == "1":
            if mesh.dp_shard == mesh.world_size > 1 and mesh.ep == 1:
                yield 1, micro_batches > 1 and self.times.state.has_masters
            return
        for zero in (2, 3) if mesh.dp_shard * mesh.cp > 1 else (0,):
            if self.request.allows("zero", zero):
                several = zero and mesh.pp == 1 and micro_batches > 1
                yield from ((zero, each) for each in ((False, True) if several else (False,)))

    def _meshes(self) -> Iterator[MeshSpec]:
        profile, request = self.profile, self.request
        for tp in _divisors(request.gpus):
            if tp not in profile.tp or not request.allows("tp", tp):
                continue
            for cp in _divisors(request.gpus // tp):
                if not request.allows("cp", cp) or (cp > 1 and not self._divides_sequence(cp, tp)):
                    continue
                for pp in _divisors(request.gpus // tp // cp):
                    if pp > profile.pp or not request.allows("pp", pp):
                        continue
                    rest = request.gpus // tp // cp // pp
                    for shard in _divisors(rest):
                        mesh = MeshSpec(pp=pp, dp_replicate=rest // shard, dp_shard=shard, cp=cp, tp=tp)
                        if request.allows("dp_shard", shard) and request.allows("dp_replicate", rest // shard):
                            sizes = (ep for ep in profile.ep if shard * cp % ep == 0 and request.allows("ep", ep))
                            yield from (replace(mesh, ep=ep) for ep in sizes)

    def _divides_sequence(self, cp: int, tp: int) -> bool:
        return self.profile.cp and self.profile.length is not None and self.profile.length % (2 * cp * tp) == 0

    def _schedules(self, mesh: MeshSpec, count: int) -> Iterator[tuple[str, int]]:
        pp, fix = mesh.pp, self.request.fix
        if pp == 1:
            if fix.get("schedule", "").lower() not in (name.lower() for name, _ in DELAYED):
                yield "1F1B", 1
            return
        if "schedule" in fix and mesh.dp_replicate == 1 and count >= pp:
            yield from ((name, n) for name, n in DELAYED if self.request.allows("schedule", name))
        for name, chunks in SCHEDULES:
            recomputes = fix.get("recompute", "none").lower() != "none" or fix.get("offload", "false").lower() == "true"
            if name == "Varuna" and recomputes:
                continue
            fits = pp * chunks <= len(self.profile.blocks) and self.request.allows("schedule", name)
            if fits and not (name == "Interleaved1F1B" and count % pp) and not (name == "ZBV" and count < 2 * pp):
                yield name, chunks

    # --- costs ---------------------------------------------------------------------------------------------

    def least_time(self, layout: Layout) -> float:
        """Returns a lower bound of a layout's time: passes without recomputation, and no reduction of gradients.

        Where each rank of a pipeline has one stage, the r-th waits for a pass of the stages before it. The split of the
        work T with the least time then has T / (1 - (1 - 1/m)^p), for m micro-batches on p ranks.
        """
        mesh, count = layout.mesh, layout.micro_batches
        # Parameters that are gathered once are gathered for all micro-batches together.
        gathers = (layout.sharers, count if layout.zero == 2 else 0) if layout.zero >= 2 else (1, 0)
        key = (mesh.tp, mesh.cp, mesh.ep, layout.micro_batch, *gathers)
        if key not in self._least:
            self._least[key] = self.times.least_pass(layout)
        if layout.stages_per_rank > 1 or layout.delays:
            return self._least[key] * count / mesh.pp
        return self._least[key] / (1 - (1 - 1 / count) ** mesh.pp)

    def _expected_time(self, layout: Layout) -> float:
        """Returns about the time of a layout, by which the search is ordered: the bound with a pipeline's bubble."""
        least = self.least_time(layout)
        if layout.stages_per_rank == 1:
            return least
        return least * (1 + (layout.mesh.pp - 1) / (layout.stages_per_rank * layout.micro_batches))

    def _cheapest(self, layout: Layout, limit: float) -> Candidate | Rejection:
        """Returns a layout with the fastest recomputation that fits in memory.

        Args:
            layout: Layout without recomputation.
            limit: Seconds of the slowest plan that is kept.
        """
        memory, allows = self.request.memory, self.request.allows
        value = self.memory.least_state(layout)
        if value > memory:
            return Rejection(layout, "memory", value, memory)
        candidates: list[Candidate] = []
        least: list[tuple[float, Layout]] = []
        alone = bool(self.times.recomputed_stages(layout))  # The schedule recomputes, and blocks need not.
        recomputes = self._recomputes(layout) and not alone
        for mode, every in _RECOMPUTE:
            if not allows("recompute", mode) or not allows("offload", False) or (mode != "none" and not recomputes):
                continue
            way = replace(layout, recompute=mode, every=every)
            needs = self.memory.largest(way)
            least.append((needs.total, way))
            if needs.total <= memory:
                candidates.append(self._candidate(way, needs))
                if mode == "none":  # Nothing is faster than not to recompute.
                    return candidates[0]
        slower: list[Rejection] = []
        if self.request.rotor and self.profile.blocks and allows("recompute", "rotor") and not alone:
            for offload in (False, True):
                if not allows("offload", offload) or (offload and not self._offloads):
                    continue
                margin = 1 - _GAIN if offload else 1.0
                shortest = min([limit, *(candidate.time.total * margin for candidate in candidates)])
                rotor = self._with_rotor(replace(layout, recompute="rotor", offload=offload), shortest)
                if isinstance(rotor, Candidate):
                    candidates.append(rotor)
                elif rotor.kind == "time":
                    slower.append(rotor)
                else:
                    least.append((rotor.value, rotor.layout))
        fastest = min(candidates, key=lambda candidate: candidate.time.total, default=None)
        if slower and (fastest is None or fastest.time.total > limit):  # Rotor may be faster, and is too slow as well.
            return min(slower, key=lambda rejection: rejection.value)
        if fastest is not None:
            return fastest
        if not least:
            raise DloError(
                f"--fix recompute must be none or rotor for {self.profile.model} and this strategy, got"
                f" {self.request.fix.get('recompute')}; leave it out"
            )
        value, way = min(least, key=lambda item: item[0])
        return Rejection(way, "memory", value, memory)

    def _recomputes(self, layout: Layout) -> bool:
        """Returns whether a layout's strategy can recompute blocks without Rotor: ZeroStrategy has no appliers."""
        return bool(self.profile.blocks) and not layout.uses_zero_strategy

    def _with_rotor(self, layout: Layout, limit: float) -> Candidate | Rejection:
        """Returns the layout with the largest budget that fits, unless it takes longer than a limit."""
        memory = self.request.memory
        least = self.rotor.least_memory(layout)
        if least > memory:
            return Rejection(layout, "memory", least, memory)
        budget = round_budget(self.memory.available(layout, memory))
        repeated = self.rotor.least_repeated(replace(layout, budget=budget))
        bound = RotorPlan((), repeated=repeated)
        seconds = self.times.step(layout, bound, exact=False).total if max(repeated) < math.inf else 0.0
        if seconds >= limit:
            return Rejection(layout, "time", seconds, limit)
        fitted = self.rotor.fit(layout, memory)
        return self._candidate(fitted) if isinstance(fitted, Layout) else Rejection(layout, "memory", fitted, memory)

    def _candidate(self, layout: Layout, memory: RankMemory | None = None, *, exact: bool = False) -> Candidate:
        request, profile = self.request, self.profile
        plan = self.rotor.plan(layout) if layout.recompute == "rotor" else None
        time = self.times.step(layout, plan, exact=exact)
        return Candidate(
            layout, self.times.split(layout), time,
            memory or self.memory.largest(layout, plan),
            profile.flops * request.global_batch, self.machine.rate(self.times.state.compute) * request.gpus,
            request.global_batch * (profile.length or 1), host_bytes=plan.host if plan else 0.0,
        )  # fmt: skip

    # --- errors --------------------------------------------------------------------------------------------

    def _no_layout(self) -> DloError:
        request, profile, fix = self.request, self.profile, self.request.fix
        why = profile.why_not.get(f"tp={fix.get('tp')}") or profile.why_not.get("tp")
        if why and "tp" in fix:
            return DloError(why)
        ep = int(fix.get("ep", 1))
        if ep not in profile.ep:
            nearest = min(profile.ep, key=lambda size: (abs(size - ep), size))
            if "ep" in profile.why_not:
                return DloError(f"--fix ep must be 1 for {profile.model}, got {ep}: {profile.why_not['ep']}")
            if profile.ep == (1,):
                return DloError(
                    f"--fix ep must come with a mixture of experts, got {ep} for {profile.model}, which has none; leave"
                    " it out"
                )
            return DloError(
                f"--fix ep must divide the {max(profile.ep)} experts of {profile.model}, got {ep}; use --fix"
                f" ep={nearest}"
            )
        for axis, most in {"tp": max(profile.tp), "pp": profile.pp, "cp": request.gpus if profile.cp else 1}.items():
            if int(fix.get(axis, 1)) > most:
                return DloError(
                    f"--fix {axis} must be at most {most} for {profile.model}, got {fix[axis]}; leave it out, or"
                    " describe in Task.parallel_plan how the model may be cut"
                )
        rows = int(fix.get("micro_batch", 1))
        if request.global_batch % rows:
            nearest = max(n for n in range(1, rows + 1) if request.global_batch % n == 0)
            return DloError(
                f"--fix micro_batch must divide the batch of {request.global_batch}, got {rows}; use --fix"
                f" micro_batch={nearest}, or --batch {request.global_batch // rows * rows or rows}"
            )
        fixed = ", ".join(f"{key}={value}" for key, value in fix.items()) or "nothing"
        if self.times.state.steps_in_backward:
            return DloError(
                "callbacks must be without OptimizerInBackward unless dp_shard, cp or tp is at least 2, pp is 1, and"
                f" a step has one micro-batch, got {request.gpus} ranks, a batch of {request.global_batch} and {fixed}"
                " fixed; leave it out, or set --gpus and --batch to larger numbers"
            )
        return DloError(
            f"axes must divide {request.gpus} ranks, a batch of {request.global_batch} and the model (tp in"
            f" {', '.join(map(str, profile.tp))}, pp up to {profile.pp}), got no such axes with {fixed} fixed; set"
            f" --batch {request.gpus}, or fix less"
        )

    def _nothing_fits(self, rejections: list[Rejection]) -> DloError:
        nearest = min(rejections, key=lambda rejection: rejection.value)
        gpus = 2 ** math.ceil(math.log2(max(nearest.value / self.request.memory, 1.01))) * self.request.gpus
        return DloError(
            f"--memory must hold a plan, got {format_bytes(self.request.memory)}, and the nearest,"
            f" {nearest.layout}, needs {format_bytes(nearest.value)}; set --memory"
            f" {math.ceil(nearest.value / 1e9)}GB, or try --gpus {gpus}, a smaller --batch, or shorter sequences"
        )


def _axes(layout: Layout) -> int:
    """Returns the number of axes of more than one rank; of equally fast plans, the simplest is first."""
    return sum(size > 1 for size in (*layout.mesh.sizes.values(), layout.mesh.ep))


def _divisors(number: int) -> list[int]:
    """Returns all divisors in ascending order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def summarise_rejections(rejections: Sequence[Rejection], seconds: float, shown: int = 8) -> list[Rejection]:
    """Returns, for the meshes that came nearest, the rejection that came nearest.

    Args:
        rejections: Rejections of a search.
        seconds: Seconds of the fastest plan, beside which times are shown.
        shown: Number of rejections by memory and by time.
    """
    best: dict[object, tuple[float, Rejection]] = {}
    for rejection in rejections:
        excess = rejection.value / (seconds if rejection.kind == "time" else rejection.limit)
        key = (rejection.kind, rejection.layout.mesh)
        if key not in best or excess < best[key][0]:
            best[key] = excess, rejection
    ordered = [rejection for _, rejection in sorted(best.values(), key=lambda item: item[0])]
    by_kind = [[r for r in ordered if r.kind == kind][: shown // 2] for kind in ("refused", "memory", "time")]
    return [replace(r, limit=seconds) if r.kind == "time" else r for r in itertools.chain.from_iterable(by_kind)]
