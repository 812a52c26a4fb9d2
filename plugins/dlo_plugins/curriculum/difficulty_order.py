"""Callback that orders the samples of an epoch from easy to hard, each sample once.

Competence-based Curriculum Learning for Neural Machine Translation. Platanios, Stretcu, Neubig, Poczos & Mitchell,
2019, arXiv 1903.09848. Departure: samples are drawn from the easiest without replacement, so that an epoch still
visits each sample once; what is left of an epoch is in random order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from lightning.pytorch import LightningModule, Trainer

from dlo_framework.callback import PluginCallback
from dlo_framework.data import Draw, Position, ResumableDataModule
from dlo_framework.data.description import DataDescription
from dlo_framework.errors import DloError, agreed_errors, check_choice, check_number, check_one_of
from dlo_framework.progress import DataHook, any_percentage, check_max_epochs, parse_position

METRICS = ("rarity", "targets")
#: Samples whose tokens are read at once.
_AT_ONCE = 256


class DifficultyOrder(PluginCallback):
    """Orders the samples of an epoch by difficulty: a run begins with the easiest, and ends with all of them.

    At a point of the run, samples are drawn from the easiest fraction of the data, which grows from `start` to 1 at
    `until`. Each epoch still has each sample once, in an order that is a function of the seed and the epoch: the same
    on any number of ranks, and after a resume. So the order matters most in the first epoch.

    The data is a datamodule of dlo, or one that derives from `ResumableDataModule`. The difficulty of each training
    sample is the number in a file, or a metric of its tokens.

    Args:
        scores: File with the difficulty of each training sample, in the order of the dataset: `.npy`, or text with a
            number per line. For packed text, a sample is a window.
        metric: Metric of packed text, in place of a file: `rarity`, the mean of minus the log of the frequency of a
            sample's tokens in the training data; `targets`, the number of targets.
        start: Fraction of the data, the easiest, at the start.
        until: Point of the run from which samples are drawn from all data.
        growth: Growth of the fraction: `root` of the progress, as in the paper, or `linear`.

    Raises:
        DloError: If a value is out of range, the data cannot be ordered or has no such metric, or the file has another
            number of scores than the data has samples.
    """

    example = "{metric: rarity, until: 1}"

    def __init__(
        self,
        scores: str | None = None,
        metric: Literal["rarity", "targets"] | None = None,
        start: float = 0.1,
        until: str | float = "50%",
        growth: Literal["root", "linear"] = "root",
    ) -> None:
        check_one_of("DifficultyOrder", scores=scores, metric=metric)
        check_choice("DifficultyOrder: metric", metric, METRICS, "set one")
        check_number("DifficultyOrder: start", start, "above 0 and at most 1", "the paper has 0.01")
        check_choice("DifficultyOrder: growth", growth, ("root", "linear"), "leave it out for root")
        self.scores, self.metric, self.start, self.growth = scores, metric, start, growth
        self.until = parse_position(until, "DifficultyOrder: until", at_zero=False)
        self.needs_max_epochs = any_percentage([self.until])
        self._max_epochs = float("inf")
        self._known: np.ndarray | None = None
        self._trainer: Trainer | None = None
        self._hook = DataHook("order_at", "DifficultyOrder", "order the samples")

    # --- before training -----------------------------------------------------------------------------------

    def check_run(self, trainer: Trainer, module: LightningModule, datamodule: Any = None) -> None:
        """Checks the data and the file, before processes start.

        Raises:
            DloError: If the data cannot be ordered, or the file cannot be read.
        """
        check_max_epochs([self.until], trainer.max_epochs, "DifficultyOrder")
        if not isinstance(datamodule, ResumableDataModule):
            raise DloError(
                "DifficultyOrder: the data must be a datamodule of dlo, or one that derives from ResumableDataModule,"
                f" got {type(datamodule).__name__}; use TextData, ImageFolderData or your own"
            )
        if DataDescription(datamodule).packing == "none":
            raise DloError(
                "DifficultyOrder: packing must be best_fit, got none, which orders samples by length; set packing:"
                " best_fit"
            )
        if trainer.overfit_batches:  # type: ignore[attr-defined]
            raise DloError("DifficultyOrder: overfit_batches must be 0, got an order that never changes; leave it out")
        if self.scores is not None:
            read_scores(self.scores)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Sets the order in the datamodule."""
        self._known = None
        if stage != "fit":
            return
        datamodule = trainer.datamodule  # type: ignore[attr-defined]
        with agreed_errors():
            self.check_run(trainer, pl_module, datamodule)
            self._max_epochs = check_max_epochs([self.until], trainer.max_epochs, "DifficultyOrder")
            self._hook.set(datamodule, self._order)
        self._trainer = trainer

    def teardown(self, *_: Any, **__: Any) -> None:
        """Removes the order from the datamodule."""
        self._hook.remove()
        self._trainer = None

    on_exception = teardown

    # --- the order -----------------------------------------------------------------------------------------

    def _order(self, shuffled: np.ndarray, epoch: int) -> np.ndarray:
        size = len(shuffled)

        def pool(place: float) -> float:
            at = Position(epoch, int(place * size), size)
            end = self.until.epochs(size, self._max_epochs)
            return competence(at.epochs / end, self.start, self.growth == "root")

        if pool(0.0) >= 1:
            return shuffled
        return paced_order(shuffled, self._difficulty(size), pool)

    def _difficulty(self, size: int) -> np.ndarray:
        if self._known is None:
            assert self._trainer is not None
            loader: Any = self._trainer.train_dataloader
            dataset: Any = loader.dataset
            scores = read_scores(self.scores) if self.scores is not None else self._measure(dataset)
            if len(scores) != size:
                raise DloError(
                    f"DifficultyOrder: scores must have one number for each of the {size} training samples, got"
                    f" {len(scores)}; write the file for this data"
                )
            self._known = scores
        return self._known

    def _measure(self, dataset: Any) -> np.ndarray:
        targets = getattr(dataset, "targets", None)
        if not hasattr(dataset, "fetch") or not isinstance(targets, np.ndarray):
            raise DloError(
                f"DifficultyOrder: metric must be left out for data without tokens, got {self.metric} for"
                f" {type(dataset).__name__}; set scores to a file"
            )
        return targets.astype(np.float64) if self.metric == "targets" else token_rarity(dataset)


def read_scores(path: str) -> np.ndarray:
    """Returns the numbers of a file, float64 `[N]`.

    Args:
        path: Path of a `.npy` file, or of a text file with a number per line.

    Raises:
        DloError: If it cannot be read, or holds something else.
    """
    try:
        scores = np.load(path, allow_pickle=False) if Path(path).suffix == ".npy" else np.loadtxt(path, ndmin=1)
    except (OSError, ValueError) as error:
        raise DloError(
            f"DifficultyOrder: scores must be a .npy file, or text with a number per line, got {path}: {error}"
        ) from error
    if scores.ndim != 1 or not np.issubdtype(scores.dtype, np.number) or not np.isfinite(scores).all():
        raise DloError(
            f"DifficultyOrder: scores must be finite numbers, one per sample, got {scores.dtype} of shape"
            f" {list(scores.shape)} in {path}; write one number per sample"
        )
    return scores.astype(np.float64)


def token_rarity(dataset: Any) -> np.ndarray:
    """Returns the mean of minus the log of the frequency of each sample's tokens, float64 `[N]`.

    Args:
        dataset: Dataset whose `fetch` returns a batch with `input_ids` and `labels` for some draws.
    """
    counts = np.zeros(0, dtype=np.int64)
    for tokens, _ in _batches(dataset):
        batch_counts = np.bincount(tokens)
        longer = max(len(counts), len(batch_counts))
        counts = np.pad(counts, (0, longer - len(counts))) + np.pad(batch_counts, (0, longer - len(batch_counts)))
    surprise = np.log(counts.sum()) - np.log(np.maximum(counts, 1))
    means = []
    for tokens, rows in _batches(dataset):
        number = np.bincount(rows)
        means.append(np.bincount(rows, surprise[tokens]) / np.maximum(number, 1))
    return np.concatenate(means)


def _batches(dataset: Any) -> Any:
    """Yields the tokens with a target of some samples, and the sample of each, both flat."""
    for first in range(0, len(dataset), _AT_ONCE):
        draws = [Draw(index, 0, True) for index in range(first, min(first + _AT_ONCE, len(dataset)))]
        batch = dataset.fetch(draws)
        is_target = (batch["labels"] >= 0).numpy()
        rows = np.broadcast_to(np.arange(len(draws))[:, None], is_target.shape)
        yield batch["input_ids"].numpy()[is_target], rows[is_target]


#: Number of parts of an epoch in which the pool of samples stays the same.
STAGES = 100


def competence(progress: float, start: float, root: bool) -> float:
    """Returns the fraction of the samples, the easiest ones, that may be drawn.

    Args:
        progress: Progress of the curriculum, 0 to 1.
        start: Fraction at the start.
        root: Whether the fraction grows by the root of the progress, fast at first, and not in proportion to it.
    """
    progress = min(1.0, progress)
    if root:
        return float(np.sqrt(progress * (1 - start**2) + start**2))
    return start + (1 - start) * progress


def paced_order(shuffled: np.ndarray, scores: np.ndarray, pool_at: Callable[[float], float]) -> np.ndarray:
    """Returns a permutation in which each sample is among the easiest at its place in the epoch.

    The epoch has :data:`STAGES` parts. A part's samples are the first unused ones, in the shuffled order, of the
    easiest `pool_at(place)` of all, or of as many as are needed.

    Args:
        shuffled: Indices of the samples in random order, int64 `[N]`.
        scores: Difficulty of each sample, `[N]`; equal scores keep the random order.
        pool_at: Function from the fraction of the epoch before a part to the fraction of the samples in its pool.
    """
    size = len(shuffled)
    easiest = np.argsort(scores[shuffled], kind="stable")  # places in the shuffled order, by difficulty
    rank = np.empty(size, dtype=np.int64)
    rank[easiest] = np.arange(size)  # rank of each place
    edges = np.linspace(0, size, min(STAGES, size) + 1).astype(np.int64)
    used = np.zeros(size, dtype=bool)
    order = np.empty(size, dtype=np.int64)
    for first, stop in itertools.pairwise(edges):
        pool = max(int(np.ceil(pool_at(first / size) * size)), int(stop))
        free = np.flatnonzero(~used & (rank < pool))
        chosen = free[: stop - first]
        used[chosen] = True
        order[first:stop] = chosen
    return shuffled[order]
