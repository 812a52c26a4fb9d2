"""Parity of a strategy with one process: trains the same model both ways, and compares the runs step by step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.strategies import Strategy

from dlo_framework.distributed.strategy import register_data_parallel
from dlo_framework.testing.compare import default_rtol
from dlo_framework.testing.comparison import Comparison
from dlo_framework.testing.record import Record, merge_records
from dlo_framework.testing.report import report
from dlo_framework.testing.spawn import RankFailed, run_distributed
from dlo_framework.testing.training import Setting, leave_group, record_training, silence_lightning
from dlo_framework.testing.verdict import verdict

Build = Callable[..., tuple[LightningModule, Any]]


@dataclass(frozen=True)
class Case:
    """Case of a parity test: a strategy and the options under which it must equal one process.

    Attributes:
        strategy: Name of the strategy, a strategy, or a function at a module's top level that makes one.
        arguments: Arguments of ``build``, such as the optimizer's name.
        trainer: Options of Lightning's ``Trainer`` in both runs: ``accumulate_grad_batches``, ``precision``,
            ``gradient_clip_val``.
        name: Name in messages; by default made of the other attributes.
    """

    strategy: str | Strategy | Callable[[], Strategy]
    arguments: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    name: str = ""

    @property
    def title(self) -> str:
        """Name of the case, by default its strategy and options."""
        if self.name:
            return self.name
        own = self.strategy if isinstance(self.strategy, str) else getattr(self.strategy, "__name__", None)
        options = [f"{key}={value}" for key, value in {**self.arguments, **self.trainer}.items()]
        return ", ".join([own or type(self.strategy).__name__, *options])


def assert_parity(build: Build, cases: Sequence[Case | str], **options: Any) -> list[Comparison]:
    """Trains each case on several ranks and in one process, on the same global batches, and asserts that they agree.

    ```python
    def build(optimizer: str = "adamw") -> tuple[LightningModule, LightningDataModule]:
        return MyModule(optimizer), DigitsData(image_size=16, batch_size=32)


    def test_my_strategy() -> None:
        assert_parity(build, ["ddp", Case(MyStrategy, {"optimizer": "sgd"}, {"accumulate_grad_batches": 4})])
    ```

    Args:
        build: Function that makes the model and its data; see :func:`compare_cases`.
        cases: Cases to train; see :func:`compare_cases`.
        **options: Further arguments of :func:`compare_cases`.

    Returns:
        Comparisons by case.

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
    """Trains each case on several ranks and in one process, on the same global batches, and returns the comparisons.

    It compares the loss and the gradient norm (before clipping, on every rank) of each optimizer step, and the weights,
    the optimizer state and the metrics of a validation at the end. All cases share one set of spawned ranks, and cases
    that differ only in their strategy share the run of one process.

    Dropout is switched off, and other randomness is made equal: see :mod:`dlo_framework.testing.randomness`. The batch
    size of a dlo datamodule is the global one. That of a plain ``DataLoader`` is each rank's; the one process gets the
    concatenated batches of all ranks.

    Args:
        build: Function at a module's top level that makes a new model and its data: a datamodule, a loader, or None
            where the model has its own. It is called in the ranks, seeded, with the case's ``arguments``.
        cases: Cases to train; a string is the name of a strategy.
        world_size: Number of ranks.
        steps: Number of optimizer steps.
        rtol: Largest relative difference of losses, norms and metrics, and a tenth of that of tensors; None for 1e-5,
            or for half precisions the spacing of the numbers (bf16: 2^-7, fp16: 2^-10).
        control: Whether to decide by further runs, where a case differs by more, if rounding explains it: runs in
            double precision, and runs of one process with other rounding; see :mod:`dlo_framework.testing.verdict`.
        seed: Seed of weights and data.
        accelerator: Accelerator of the trainers.
        timeout: Seconds for each set of ranks.

    Returns:
        Comparisons by case.

    Raises:
        RankFailed: if a rank raises.
    """
    asked = [Case(case) if isinstance(case, str) else case for case in cases]
    options = {"accelerator": accelerator, "devices": world_size}
    runs = []
    for case in asked:
        precision = case.trainer.get("precision")
        allowed = default_rtol(precision) if rtol is None else rtol
        setting = Setting(steps, seed, ranks=world_size)
        runs.append(verdict(case.title, setting, precision=precision, rtol=allowed, further=control))
    found: list[Comparison | None] = [None] * len(asked)
    wanted = {number: next(run) for number, run in enumerate(runs)}
    places: dict[int, int] = {}
    while wanted:
        answers = _train_wanted(build, asked, wanted, places, options, world_size, timeout)
        wanted = {}
        for number, records in answers.items():
            try:
                wanted[number] = runs[number].send(records)
            except StopIteration as end:
                found[number] = end.value
    return [comparison for comparison in found if comparison is not None]


@dataclass(frozen=True)
class _Run:
    """One training of one case.

    Attributes:
        case: Case to train.
        setting: Setting of the training; ``shares`` of 0 stands for those of the case's ranks.
        number: Number of the case.
        like: Number of the first case whose runs of one process are the same.
    """

    case: Case
    setting: Setting
    number: int
    like: int


def _train_wanted(
    build: Build,
    cases: list[Case],
    wanted: Mapping[int, list[Setting]],
    places: dict[int, int],
    options: dict[str, Any],
    world_size: int,
    timeout: float,
) -> dict[int, list[Any]]:
    """Trains the settings that verdicts ask for, in one set of ranks, and returns the records by case number.

    In double precision each case has its own set of ranks: it may be refused there, and the error is then its record.

    Args:
        build: Function that makes the model and its data.
        cases: All cases.
        wanted: Settings by case number.
        places: Number of data-parallel ranks by case number; filled here.
        options: Options of all trainers.
        world_size: Number of ranks.
        timeout: Seconds for each set of ranks.
    """
    asked = [
        _Run(cases[number], setting, number, _shared_with(cases, number))
        for number, settings in wanted.items()
        for setting in settings
    ]
    together = [run for run in asked if not run.setting.double]
    sets = [together] if together else []
    sets += [[run for run in asked if run.setting.double and run.number == number] for number in wanted]
    records: list[tuple[_Run, Any]] = []
    for runs in filter(None, sets):
        jobs = [(run, places.get(run.number, 0)) for run in runs]
        try:
            answers = run_distributed(_train_all, world_size, build, jobs, options, timeout=timeout, backend=None)
        except RankFailed as error:
            if not runs[0].setting.double:
                raise
            records += [(run, error.user_error or str(error).strip().splitlines()[-1]) for run in runs]
            continue
        for number, run in enumerate(runs):
            of_ranks = [answer[number] for answer in answers]
            if run.setting.ranks is not None:
                records.append((run, merge_records(of_ranks)))
                places[run.number] = records[-1][1].place[1]
            else:
                records.append((run, next(record for record in of_ranks if record is not None)))
    return {
        number: [next(record for run, record in records if (run.number, run.setting) == (number, s)) for s in settings]
        for number, settings in wanted.items()
    }


def _shared_with(cases: list[Case], number: int) -> int:
    """Returns the number of the first case that has the same run of one process."""
    case = cases[number]
    same = [(other.arguments, other.trainer) == (case.arguments, case.trainer) for other in cases]
    return same.index(True)


def _train_all(
    rank: int, world_size: int, build: Build, jobs: list[tuple[_Run, int]], options: dict[str, Any]
) -> list[Record | None]:
    """Trains the runs on ranks, and then, without a process group, some of the runs of one process on each rank.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        build: Function that makes the model and its data.
        jobs: Runs, each with the number of data-parallel ranks, 0 where it is not known yet.
        options: Options of all trainers.

    Returns:
        Records of this rank by run; None for a run of one process that another rank has trained.
    """
    silence_lightning()
    register_data_parallel()  # So that "ddp" is the same strategy as in `dlo fit`.
    found: list[Record | None] = [None] * len(jobs)
    places = {run.number: place for run, place in jobs}
    for number, (run, _) in enumerate(jobs):
        if run.setting.ranks is not None:
            record = found[number] = _train(build, run.case, run.setting, options)
            places[run.number] = record.place[1]
            if rank != 0:
                record.weights, record.optimizer = {}, {}
    if any(run.setting.ranks is not None for run, _ in jobs):
        leave_group()
    done: dict[tuple[int, Setting], int] = {}
    turn = 0
    for number, (run, _) in enumerate(jobs):
        if run.setting.ranks is not None:
            continue
        setting = replace(run.setting, shares=places[run.number])
        same = done.setdefault((run.like, setting), number)
        if same != number:
            found[number] = found[same]
            continue
        if turn % world_size == rank:
            found[number] = _train(build, run.case, setting, options)
        turn += 1
    return found


def _train(build: Build, case: Case, setting: Setting, common: dict[str, Any]) -> Record:
    seed_everything(setting.seed, workers=True, verbose=False)
    try:
        model, data = build(**case.arguments)
        options = {**common, **copy.deepcopy(dict(case.trainer))}
        strategy: Any = "auto"
        if setting.ranks is not None:
            strategy = case.strategy
            if not isinstance(strategy, str | Strategy):
                strategy = strategy()
        return record_training(model, data, options, setting, strategy)
    except Exception as error:
        error.add_note(f"in parity case '{case.title}', {f'{setting.ranks} ranks' if setting.ranks else 'one process'}")
        raise
