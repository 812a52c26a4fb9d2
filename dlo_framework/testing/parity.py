"""Proof that a strategy changes nothing: the same training on several ranks and as one process, step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.strategies import Strategy

from dlo_framework.distributed.strategy import register_data_parallel
from dlo_framework.testing.compare import compare, default_rtol
from dlo_framework.testing.comparison import Comparison
from dlo_framework.testing.record import Record, merge
from dlo_framework.testing.report import report
from dlo_framework.testing.spawn import run_distributed
from dlo_framework.testing.training import Setting, leave_group, quiet, record_training

Build = Callable[..., tuple[LightningModule, Any]]


@dataclass(frozen=True)
class Case:
    """One way to train that is to be the same as one process.

    Attributes:
        strategy: its name, an object, or a function that makes one, at a module's top level.
        arguments: of ``build``, such as the optimizer's name.
        trainer: options of Lightning's ``Trainer``, in both runs: ``accumulate_grad_batches``, ``precision``,
            ``gradient_clip_val``.
        name: in messages; made of the others by default.
    """

    strategy: str | Strategy | Callable[[], Strategy]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    @property
    def title(self) -> str:
        """The case's name, or one made of what it consists of."""
        if self.name:
            return self.name
        own = self.strategy if isinstance(self.strategy, str) else getattr(self.strategy, "__name__", None)
        options = [f"{key}={value}" for key, value in {**self.arguments, **self.trainer}.items()]
        return ", ".join([own or type(self.strategy).__name__, *options])


def assert_parity(build: Build, cases: Sequence[Case | str], **options: Any) -> list[Comparison]:
    """Trains each case on ranks and as one process, on the same global batches, and asserts that the two agree.

    ```python
    def build(optimizer: str = "adamw") -> tuple[LightningModule, LightningDataModule]:
        return MyModule(optimizer), DigitsData(image_size=16, batch_size=32)


    def test_my_strategy() -> None:
        assert_parity(build, ["ddp", Case(MyStrategy, {"optimizer": "sgd"}, {"accumulate_grad_batches": 4})])
    ```

    Args:
        build: see :func:`compare_cases`.
        cases: likewise.
        **options: likewise.

    Returns:
        The comparisons, by case.

    Raises:
        AssertionError: if a case differs; the message names the step and the largest differences.
        RankFailed: if a rank raises.
    """
    found = compare_cases(build, cases, **options)
    broken = [comparison for comparison in found if not comparison.ok]
    if broken:
        texts = [report(comparison) for comparison in broken]
        raise AssertionError(f"{len(broken)} of {len(found)} cases differ from one process\n\n" + "\n\n".join(texts))
    return found


def compare_cases(
    build: Build,
    cases: Sequence[Case | str],
    *,
    world_size: int = 2,
    steps: int = 20,
    rtol: float | None = None,
    control: bool = True,
    seed: int = 42,
    accelerator: str = "cpu",
    timeout: float = 600.0,
) -> list[Comparison]:
    """Trains each case on ranks and as one process, on the same global batches, and returns the comparisons.

    Compared are the loss and the gradients' norm (before clipping, on every rank) of each optimizer step, and the
    weights at the end. All cases share one set of spawned ranks, and those that differ in their strategy alone share
    the run of one process.

    Dropout is switched off, and what else is random is made equal: see :mod:`dlo_framework.testing.randomness`.
    The batch size of a dlo datamodule is the global one; that of a plain ``DataLoader`` is each rank's, and the one
    process gets the batches of all ranks as one.

    Args:
        build: makes a new model and its data: a datamodule, a loader, or None where the model brings its own. It
            stands at a module's top level and is called in the ranks, seeded, with the case's ``arguments``.
        cases: what to try; a name is a strategy's.
        world_size: ranks.
        steps: optimizer steps.
        rtol: the largest relative difference of losses, norms and weights; None for 1e-5, and the spacing of the
            numbers where the case has a half precision (bf16: 2^-7, fp16: 2^-10).
        control: runs the one process once more, with the samples of each batch in the opposite order, and allows ten
            times what that changes where it is more than ``rtol``: parameters whose gradient is zero but for rounding,
            such as the bias of attention's keys under Adam, and half precision.
        seed: of weights and data.
        accelerator: of the trainers.
        timeout: seconds for everything.

    Returns:
        The comparisons, by case.

    Raises:
        RankFailed: if a rank raises.
    """
    asked = [Case(case) if isinstance(case, str) else case for case in cases]
    work = _Work(build, asked, steps, seed, control, {"accelerator": accelerator, "devices": world_size})
    answers = run_distributed(_run_cases, world_size, work, timeout=timeout, backend=None)
    alone: dict[int, Record] = {}
    controls: dict[int, Record] = {}
    for answer in answers:
        alone |= answer.alone
        controls |= answer.controls
    found = []
    for number, case in enumerate(asked):
        merged = merge([answer.cases[number] for answer in answers])
        shared = _shared_with(asked, number)
        allowed = default_rtol(case.trainer.get("precision")) if rtol is None else rtol
        found.append(compare(case.title, alone[shared], merged, rtol=allowed, control=controls.get(shared)))
    return found


@dataclass(frozen=True)
class _Work:
    """What the ranks are to do; it travels to them."""

    build: Build
    cases: list[Case]
    steps: int
    seed: int
    control: bool
    options: dict[str, Any]


@dataclass
class _Answer:
    """One rank's records, by the case's number: of the ranks, of one process, and of its control."""

    cases: list[Record]
    alone: dict[int, Record]
    controls: dict[int, Record]


def _shared_with(cases: list[Case], number: int) -> int:
    """Returns the first case that has the same run of one process."""
    case = cases[number]
    same = [(other.arguments, other.trainer) == (case.arguments, case.trainer) for other in cases]
    return same.index(True)


def _run_cases(rank: int, world_size: int, work: _Work) -> _Answer:
    """Runs all cases, and then this rank's share of the runs of one process, with no process group in the way."""
    quiet()
    register_data_parallel()  # So that "ddp" is what `dlo fit` makes of it.
    cases = []
    for number, case in enumerate(work.cases):
        record = _train(work, case, Setting(work.steps, work.seed, ranks=world_size))
        if rank != 0:
            record.weights = {}
        cases.append(record)
        if number == len(work.cases) - 1:
            leave_group()
    runs = sorted({_shared_with(work.cases, number) for number in range(len(work.cases))})
    jobs = [(number, False) for number in runs] + [(number, True) for number in runs if work.control]
    answer = _Answer(cases, {}, {})
    for place, (number, is_control) in enumerate(jobs):
        if place % world_size == rank:
            setting = Setting(work.steps, work.seed, shares=cases[number].place[1], reverse=is_control)
            record = _train(work, work.cases[number], setting)
            (answer.controls if is_control else answer.alone)[number] = record
    return answer


def _train(work: _Work, case: Case, setting: Setting) -> Record:
    seed_everything(setting.seed, workers=True, verbose=False)
    try:
        model, data = work.build(**case.arguments)
        options = {**work.options, **copy.deepcopy(dict(case.trainer))}
        strategy: Any = "auto"
        if setting.ranks is not None:
            strategy = case.strategy
            if not isinstance(strategy, str | Strategy):
                strategy = strategy()
        return record_training(model, data, options, setting, strategy)
    except Exception as error:
        error.add_note(f"in parity case '{case.title}', {f'{setting.ranks} ranks' if setting.ranks else 'one process'}")
        raise
