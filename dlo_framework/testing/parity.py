"""Parity of a strategy with one process: trains the same model both ways, and compares the runs step by step.

:func:`verdict` distinguishes a fault from rounding, by further runs where they are needed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.strategies import Strategy

from dlo_framework.distributed.strategy import register_data_parallel
from dlo_framework.testing.compare import RTOL, RTOL_DOUBLE, TENSORS_DOUBLE, Comparison, compare, default_rtol, report
from dlo_framework.testing.record import Record, merge_records
from dlo_framework.testing.spawn import RankFailed, run_distributed
from dlo_framework.testing.training import Setting, leave_group, record_training, silence_lightning

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
    comparisons = compare_cases(build, cases, **options)
    broken = [comparison for comparison in comparisons if not comparison.ok]
    if broken:
        texts = [report(comparison) for comparison in broken]
        raise AssertionError(
            f"{len(broken)} of {len(comparisons)} cases differ from one process\n\n" + "\n\n".join(texts)
        )
    return comparisons


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

    Dropout is switched off, and other randomness is made equal: see :mod:`dlo_framework.testing.training`. The batch
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
            double precision, and runs of one process with other rounding; see :func:`verdict`.
        seed: Seed of weights and data.
        accelerator: Accelerator of the trainers.
        timeout: Seconds for each set of ranks.

    Returns:
        Comparisons by case.

    Raises:
        RankFailed: if a rank raises.
    """
    asked = [Case(case) if isinstance(case, str) else case for case in cases]
    alone = [(case.arguments, case.trainer) for case in asked]
    trials = []
    for case in asked:
        precision = case.trainer.get("precision")
        allowed = default_rtol(precision) if rtol is None else rtol
        first = alone.index((case.arguments, case.trainer))
        trials.append(Trial(case.title, case, precision, allowed, first))
    train = functools.partial(_train_case, build, {"accelerator": accelerator, "devices": world_size})
    return judge(train, trials, Setting(steps, seed, ranks=world_size), timeout=timeout, further=control)


def _train_case(build: Build, common: dict[str, Any], case: Case, setting: Setting) -> Record:
    seed_everything(setting.seed, workers=True, verbose=False)
    try:
        model, data = build(**case.arguments)
        options = {**common, **copy.deepcopy(dict(case.trainer))}
        strategy: Any = "auto"
        if setting.ranks is not None:
            strategy = case.strategy() if callable(case.strategy) else case.strategy
        return record_training(model, data, options, setting, strategy)
    except Exception as error:
        error.add_note(f"in parity case '{case.title}', {f'{setting.ranks} ranks' if setting.ranks else 'one process'}")
        raise


# --- trainings -------------------------------------------------------------------------------------------------


class Trial(NamedTuple):
    """Strategy whose parity is judged.

    Attributes:
        title: Name in messages.
        source: Object that the training function gets, such as a case; pickled.
        precision: Lightning's name of the runs' precision.
        rtol: Relative difference to allow for losses, norms and metrics.
        first: Index of the first trial that has the same run of one process.
    """

    title: str
    source: Any
    precision: Any
    rtol: float
    first: int = 0


def judge(
    train: Callable[[Any, Setting], Record],
    trials: Sequence[Trial],
    setting: Setting,
    *,
    timeout: float,
    further: bool = True,
    threads: int = 1,
    announce: Callable[[Setting], None] = lambda setting: None,
) -> list[Comparison]:
    """Trains each trial on ranks and as one process, as often as its verdict asks for, and returns the comparisons.

    In double precision each trial has its own set of ranks: it may be refused there, and the error is then its record.

    Args:
        train: Function that trains a trial's source in a setting; it runs in the ranks.
        trials: Trials.
        setting: Setting of the ranks.
        timeout: Seconds for each set of ranks.
        further: Whether verdicts may ask for further runs.
        threads: Number of torch's threads on each rank.
        announce: Function that is called with each setting before it is trained.

    Raises:
        RankFailed: if a rank raises.
    """
    ranks = setting.ranks
    assert ranks is not None
    runs = [verdict(t.title, setting, precision=t.precision, rtol=t.rtol, further=further) for t in trials]
    comparisons: dict[int, Comparison] = {}
    wanted = {number: next(run) for number, run in enumerate(runs)}
    places: dict[int, int] = {}
    while wanted:
        jobs = [(number, each) for number, settings in wanted.items() for each in settings]
        sets = [[job for job in jobs if not job[1].double]]
        sets += [[job for job in jobs if job[1].double and job[0] == number] for number in wanted]
        records: dict[tuple[int, Setting], Any] = {}
        for own in filter(None, sets):
            for _, each in own:
                announce(each)
            arguments = train, trials, own, places
            try:
                answers = run_distributed(_train_all, ranks, *arguments, timeout=timeout, backend=None, threads=threads)
            except RankFailed as error:
                if not own[0][1].double:
                    raise
                records |= dict.fromkeys(own, error.user_error or str(error).strip().splitlines()[-1])
                continue
            for job, of_ranks in zip(own, zip(*answers, strict=True), strict=True):
                if job[1].ranks is None:
                    records[job] = next(record for record in of_ranks if record is not None)
                else:
                    records[job] = merge_records(list(of_ranks))
                    places[job[0]] = records[job].place[1]
        answered, wanted = wanted, {}
        for number, settings in answered.items():
            try:
                wanted[number] = runs[number].send([records[number, each] for each in settings])
            except StopIteration as end:
                comparisons[number] = end.value
    return [comparisons[number] for number in range(len(trials))]


def _train_all(
    rank: int,
    world_size: int,
    train: Callable[[Any, Setting], Record],
    trials: Sequence[Trial],
    jobs: list[tuple[int, Setting]],
    places: dict[int, int],
) -> list[Record | None]:
    """Trains the runs on ranks, and then, without a process group, some of the runs of one process on each rank.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        train: Function that trains a trial's source in a setting.
        trials: Trials.
        jobs: Runs, each with the index of its trial.
        places: Number of data-parallel ranks by trial, where it is known.

    Returns:
        Records of this rank by run; None for a run of one process that another rank has trained.
    """
    silence_lightning()
    register_data_parallel()  # So that "ddp" is the same strategy as in `dlo fit`.
    records: dict[int, Record] = {}
    together = [place for place, (_, setting) in enumerate(jobs) if setting.ranks is not None]
    for place in together:
        number, setting = jobs[place]
        record = records[place] = train(trials[number].source, setting)
        places[number] = record.place[1]
        if rank != 0:
            record.weights, record.optimizer = {}, {}
    if together:
        leave_group()
    alone: dict[tuple[int, Setting], list[int]] = {}
    for place, (number, setting) in enumerate(jobs):
        if setting.ranks is None:
            alone.setdefault((trials[number].first, replace(setting, shares=places[number])), []).append(place)
    for turn, ((number, setting), same) in enumerate(alone.items()):
        if turn % world_size == rank:
            records |= dict.fromkeys(same, train(trials[number].source, setting))
    return [records.get(place) for place in range(len(jobs))]


# --- the verdict -----------------------------------------------------------------------------------------------

#: Number of runs with other rounding: two beside double precision, and three where they decide.
_CONTROLS = 2
_CONTROLS_ALONE = 3
#: Factor on the differences from other rounding above which a difference is not rounding, if double precision agrees.
_FAR = 100.0
#: Relative difference of the first step's loss or gradient norm that rounding cannot cause; where the tolerance is that
#: of bf16, this multiple of the tolerance.
_HOPELESS, _HOPELESS_FACTOR = 1e-2, 8.0

#: Generator that yields settings and is sent their records: a string for a failed run, in double precision only.
Runs = Generator[list[Setting], list[Any], Comparison]


def verdict(name: str, setting: Setting, *, precision: Any, rtol: float, further: bool = True) -> Runs:
    """Yields the settings to train, is sent their records, and returns the comparison.

    1. Ranks and one process train with the config's precision. If they agree within the tolerance, that is parity.
    2. Else both train in double precision, where rounding is a billion times smaller: a difference there is a fault.
    3. If they agree there, one process trains with other rounding, to see whether single precision explains the first
       difference. If it does not, another seed decides: a router that chooses another expert by chance does not do so
       twice, and a strategy that is wrong only in single precision is wrong with each seed.

    In half precision, and where a model or strategy refuses double precision, the runs with other rounding decide.

    Args:
        name: Name of the case.
        setting: Setting of the ranks. Those of one process are yielded with ``shares=0``, for the ranks' number.
        precision: Lightning's name of the runs' precision.
        rtol: Relative difference to allow for losses, norms and metrics.
        further: Whether to ask for further runs; without them, rounding counts as a fault.
    """
    ranks, one = yield [setting, single_process_setting(setting)]
    comparison = compare(name, one, ranks, rtol=rtol)
    if comparison.within or not further or _is_certain(comparison, one, ranks):
        return comparison
    if is_single(precision):
        ranks_double, one_double = yield [
            replace(setting, double=True),
            replace(single_process_setting(setting), double=True),
        ]
        failed = next((answer for answer in (ranks_double, one_double) if isinstance(answer, str)), None)
        if failed is None:
            tensors = TENSORS_DOUBLE * max(1.0, rtol / RTOL)
            double = compare(
                name, one_double, ranks_double, rtol=RTOL_DOUBLE if rtol <= RTOL else rtol, tensor_rtol=tensors
            )
            if not double.within:
                comparison.double, comparison.decided, comparison.hints = double, False, double.hints
                return comparison
            controls = yield [single_process_setting(setting, number + 1) for number in range(_CONTROLS)]
            comparison = compare(name, one, ranks, rtol=rtol, controls=controls, factor=_FAR)
            comparison.double = double
            if not comparison.within:
                other = replace(setting, seed=setting.seed + 1)
                again = yield [
                    other,
                    single_process_setting(other),
                    *(single_process_setting(other, number + 1) for number in range(_CONTROLS)),
                ]
                comparison.decided = compare(
                    name, again[1], again[0], rtol=rtol, controls=again[2:], factor=_FAR
                ).within
            return comparison
        comparison.double_refusal = failed
    controls = yield [single_process_setting(setting, number + 1) for number in range(_CONTROLS_ALONE)]
    decided = compare(name, one, ranks, rtol=rtol, controls=controls)
    decided.double_refusal = comparison.double_refusal
    return decided


def single_process_setting(setting: Setting, control: int = 0) -> Setting:
    """Returns the setting of the one process that matches a setting of ranks."""
    return replace(setting, ranks=None, shares=0, control=control)


def is_single(precision: Any) -> bool:
    """Returns whether Lightning's ``precision`` is plain single precision."""
    return str(precision) in ("None", "32", "32-true")


def _is_certain(comparison: Comparison, one: Record, ranks: Record) -> bool:
    """Returns whether the runs differ so clearly that no further run can change the verdict."""
    if not comparison.comparable or one.initial != ranks.initial or one.drew is not None or ranks.drew is not None:
        return True
    if any(mine.digest != theirs.digest for mine, theirs in zip(one.steps, ranks.steps, strict=True)):
        return True
    first = comparison.rows[0]
    limit = max(_HOPELESS, _HOPELESS_FACTOR * comparison.rtol)
    return any(pair is not None and not pair.difference < limit for pair in (first.loss, first.norm))
