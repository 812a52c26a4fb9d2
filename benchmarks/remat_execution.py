"""How fast, and in how much memory, do plans of recomputation and offloading run, beside uniform recomputation?

    python benchmarks/remat_execution.py [--rounds 5] [--budgets 8] [--models vit coatnet resnet]

Each model is surveyed, and planned for budgets between the least of uniform recomputation and keeping everything. At
each budget run the fastest uniform schedule that fits (full, every nth block, segments, selective), Rotor's, and
Rotor's with offloading: steps take turns, and a step's time is this process's CPU time plus the waits of a simulated
link. The link copies a share of the bytes that a step keeps in the time of a step: the shares of ViT-L on a V100 with
PCIe 3, and of ResNet-50 with PCIe 4. Memory is that of the step's tensors without the host's. Executed forwards are
checked.
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import functools
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import PROCESS, all_ratios, take_turns
from measuring.uniform_recomputation import selective_schedules, uniform_schedules
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_plugins.memory.block_survey import AllocationLog, BlockSurvey
from dlo_plugins.memory.offload import solve_offload
from dlo_plugins.memory.rotor import keep_fastest, solve
from dlo_plugins.memory.schedule import Chain, Link, Mode, Schedule, Stage
from dlo_plugins.memory.scheduled_blocks import ScheduledBlocks, SimulatedLink
from dlo_tasks.imagenet.classifier import ImageClassifier

MODELS = {
    "vit": ("vit_tiny_patch16_224", {"img_size": 96, "patch_size": 8}, 96),
    "coatnet": ("coatnet_0_rw_224", {"img_size": 96, "embed_dim": (32, 64, 128, 256), "stem_width": 32}, 96),
    "resnet": ("resnet50", {}, 96),
}
RELATIVE_RATES = {"vit": 0.86, "coatnet": 0.86, "resnet": 0.66}
SURVEYS = 4
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # malloc.h


@dataclass
class VirtualClock:
    """This process's CPU time, to which waits are added in place of sleeping: other programs do not disturb it."""

    def __init__(self) -> None:
        self.waited = 0.0

    def perf_counter(self) -> float:
        """Returns the seconds of the clock."""
        return time.process_time() + self.waited

    def sleep(self, seconds: float) -> None:
        """Adds a wait."""
        self.waited += seconds


class Model:
    """Model with a batch, and its surveyed chain.

    Attributes:
        task: Task of the model.
        names: Names of its blocks.
        batch: Images and labels.
        chain: Chain of the blocks.
        stem: Bytes beside the chain.
    """

    task: ImageClassifier
    names: list[str]
    batch: tuple[Tensor, Tensor]
    chain: Chain
    stem: int

    @property
    def blocks(self) -> list[nn.Module]:
        """Blocks of the model."""
        return [self.task.model.get_submodule(name) for name in self.names]

    def step(self, executed: ScheduledBlocks | None = None) -> None:
        """Runs forward and backward."""
        self.task.zero_grad(set_to_none=True)
        images, labels = self.batch
        loss = nn.functional.cross_entropy(self.task.model(images), labels)
        if executed is not None:
            executed.begin_backward()
        loss.backward()

    def run(self, schedule: Schedule, link: Link | None = None) -> float:
        """Runs a step by a schedule; returns its seconds."""
        clock = VirtualClock()
        executed = ScheduledBlocks(self.blocks, self.names, schedule, SimulatedLink(link, clock) if link else None)
        self.step(executed)  # Each block's guard of buffers is made in the first step.
        executed.reset_counts()
        begin = clock.perf_counter()
        self.step(executed)
        seconds = clock.perf_counter() - begin
        executed.remove()
        assert tuple(executed.forwards) == schedule.forwards[:-1]
        return seconds

    def peak(self, schedule: Schedule, link: Link | None = None) -> int:
        """Returns the largest memory of a step by a schedule, without gradients of parameters."""
        host = SimulatedLink(link, VirtualClock()) if link else None
        executed = ScheduledBlocks(self.blocks, self.names, schedule, host)
        with AllocationLog() as log:
            self.step(executed)
            gradients = [p.grad for p in self.task.parameters() if p.grad is not None]
            found = log.usage(0, without=log.numbers(gradients)).peak
        executed.remove()
        return found


def keep_freed_memory() -> None:
    """Makes glibc keep freed memory, as an accelerator's allocator does: else a step waits for thousands of new pages,
    more of them with one schedule than with another."""
    mallopt = ctypes.CDLL(None).mallopt
    for parameter in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
        mallopt(parameter, 2**31 - 1)


def survey(name: str, rows: int) -> Model:
    """Returns a model with its chain: bytes of one step, and the least seconds of several."""
    kind, args, size = MODELS[name]
    torch.manual_seed(0)
    task = ImageClassifier(kind, model_args=dict(args), num_classes=100)
    task.configure_model()
    task.train()
    names = task.parallel_plan().block_names(task.model)
    batch = torch.randn(rows, 3, size, size), torch.randint(100, (rows,))
    model = Model(task, names, batch, Chain((Stage("none", 0, (Mode("all", 0, 0, 0),)),), 0), 0)
    chains = []
    for _ in range(SURVEYS):
        found = BlockSurvey(model.blocks, names, True, lambda: list(task.parameters()), clock=PROCESS.mark)
        log = AllocationLog()
        found.begin_bytes(log)
        with log:
            model.step()
            found.end_bytes([p.grad for p in task.parameters() if p.grad is not None])
        found.times_blocks = True
        model.step()
        chains.append(found.chain())
        model.stem = found.stem
        found.remove()
    model.chain = functools.reduce(fastest, chains)
    return model


def fastest(one: Chain, other: Chain) -> Chain:
    """Returns a chain with the shorter times of two."""
    stages = []
    for mine, theirs in zip(one.stages, other.stages, strict=True):
        modes = tuple(
            dataclasses.replace(a, forward=min(a.forward, b.forward), backward=min(a.backward, b.backward))
            for a, b in zip(mine.modes, theirs.modes, strict=True)
        )
        stages.append(dataclasses.replace(mine, modes=modes))
    return Chain(tuple(stages), one.input)


def contestants(chain: Chain, budgets: int, link: Link) -> dict[str, Schedule]:
    """Returns schedules by name: of each budget the fastest uniform one, Rotor's, and Rotor's with offloading."""
    kept, uniform = keep_fastest(chain), [*uniform_schedules(chain), *selective_schedules(chain)]
    least = min(schedule.peak for schedule in uniform)
    found = {"keep everything": kept, "keep everything again": kept}
    for number in range(1, budgets + 1):
        budget = least + (kept.peak - least) * number // (budgets + 1)
        share = f"{budget / kept.peak:.0%}"
        found[f"{share}: uniform"] = min((s for s in uniform if s.peak <= budget), key=lambda s: s.time)
        found[f"{share}: Rotor"] = solve(chain, budget)
        try:
            found[f"{share}: Rotor, offloading"] = solve_offload(chain, budget, link)
        except DloError:
            continue
    return found


def measure(name: str, options: argparse.Namespace) -> Table:
    """Returns the step times of a model's schedules."""
    model = survey(name, options.rows)
    chain = model.chain
    rate = RELATIVE_RATES[name] * (chain.input + sum(stage.modes[0].saved for stage in chain.stages)) / chain.kept_time
    link = Link(rate, rate)
    schedules = contestants(chain, options.budgets, link)

    def runner(schedule: Schedule) -> Callable[[], float]:
        return functools.partial(model.run, schedule, link if schedule.transfers else None)

    times = take_turns({label: runner(schedule) for label, schedule in schedules.items()}, options.rounds)
    base = "keep everything"
    step = min(times[base])
    table = Table(f"{name}: executed step time within a budget", base, "CPU time, and waits of a simulated link")
    for label, values in all_ratios(times, base).items():
        schedule = schedules[label]
        measured = model.peak(schedule, link if schedule.transfers else None)
        table.add(
            label,
            values,
            ours="Rotor" in label,
            control=label.endswith("again"),
            least_ratio=round(min(times[label]) / step, 3),
            predicted=round(1 + (schedule.time - chain.kept_time) / step, 3),
            MB=round(measured / 1e6, 1),
            predicted_MB=round((schedule.peak + model.stem) / 1e6, 1),
            again=sum(schedule.forwards) - len(schedule.forwards),
        )
    table.notes += notes(schedules, chain, {label: min(values) for label, values in times.items()})
    return table


def notes(schedules: dict[str, Schedule], chain: Chain, seconds: dict[str, float]) -> list[str]:
    """Returns what the plans save of recomputation, by the blocks' measured times, and by the steps'."""
    shares = [label.removesuffix(": Rotor") for label in schedules if label.endswith(": Rotor")]
    kept = seconds["keep everything"]

    def extra(label: str) -> float:
        return schedules[label].time - chain.kept_time

    def less(one: str, other: str, of: Callable[[str], float]) -> list[float]:
        found = []
        for share in shares:
            base = of(f"{share}: {other}")
            label = f"{share}: {one}"
            found.append(1 - of(label) / base if label in schedules and base > 0 else 0.0)
        return found

    def line(text: str, values: list[float], bar: float) -> str:
        reached = sum(value >= bar for value in values)
        listed = ", ".join(f"{value:.0%} at {share}" for value, share in zip(values, shares, strict=True))
        return f"{text}: at least {bar:.0%} less at {reached} of {len(shares)} budgets ({listed})."

    def took(label: str) -> float:
        return seconds[label] - kept

    return [
        line(
            "Recomputation of Rotor and of the best uniform schedule, blocks' times",
            less("Rotor", "uniform", extra),
            0.1,
        ),
        line("The same, steps' least times", less("Rotor", "uniform", took), 0.1),
        line("Overhead with offloading and without, blocks' times", less("Rotor, offloading", "Rotor", extra), 0.3),
        line("The same, steps' least times", less("Rotor, offloading", "Rotor", took), 0.3),
    ]


def main() -> None:
    """Runs the plans of each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budgets", type=int, default=8)
    parser.add_argument("--rows", type=int, default=16, help="images of a batch; with few, Python's time shows")
    parser.add_argument("--models", nargs="+", choices=[*MODELS], default=[*MODELS])
    options = parse_options(parser, __file__)
    torch.set_num_threads(1)
    keep_freed_memory()
    record = Record.of(__file__, __doc__, options)
    for name in options.models:
        record.add(measure(name, options))
    record.finish()


if __name__ == "__main__":
    main()
