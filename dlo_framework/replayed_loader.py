"""Plain DataLoaders that go on in mid-epoch: the order is drawn again, and the batches that were seen are skipped.

torch's DataLoader has no position. It draws an epoch's order when it is iterated, from the global generators or its
own. So the state of the generators at that moment is kept, and a resumed run iterates from it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from lightning.fabric.utilities.data import sized_len
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch.utils.data import DataLoader, IterableDataset

from dlo_framework.data.evaluation import DistributedEvalLoader
from dlo_framework.random_streams import random_state, raw_random_state, restore_random_state


class ReplayedLoader(DataLoader):
    """DataLoader that keeps the state from which an epoch is drawn, and iterates from it again."""

    _begun: dict[str, Any] | None = None
    _replay: tuple[dict[str, Any], int] | None = None
    #: Random state before the last batch, where the dataset draws from the generators of this process.
    before_batch: tuple[Any, ...] | None = None

    def __iter__(self) -> Any:
        replay, self._replay = self._replay, None
        if replay is not None:
            return self._again(*replay)
        self._begun = {
            "random_state": random_state(),
            "generators": self._generator_states(),
            "has_workers": self._iterator is not None,
            "batch_size": self.batch_size,
        }
        iterator = super().__iter__()
        # Lightning takes batches in advance from loaders without a length.
        return iterator if self.num_workers > 0 or sized_len(self) is None else self._watched(iterator)

    def _watched(self, iterator: Iterator[Any]) -> Iterator[Any]:
        while True:
            self.before_batch = raw_random_state()
            try:
                batch = next(iterator)
            except StopIteration:
                return
            yield batch

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the generators when the epoch began, and of the loader's own now."""
        return {"begun": self._begun, "generators": self._generator_states()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Does nothing: Lightning loads the state of rank 0. :class:`~dlo_framework.resume.ExactResume` replays."""

    def replay(self, state: dict[str, Any], batches: int | None) -> None:
        """Makes the next iteration go on.

        Args:
            state: State of :meth:`state_dict`.
            batches: Number of batches of the epoch to skip; None for a new epoch.
        """
        self._set_generators(state["generators"])
        if batches is not None and state["begun"] is not None:
            length = sized_len(self)
            if length is not None and batches > length:  # Beside a longer loader it is iterated more than once.
                batches = (batches - 1) % length + 1
            self._begun, self._replay = state["begun"], (state["begun"], batches)

    def _again(self, begun: dict[str, Any], batches: int) -> Iterator[Any]:
        """Yields the rest of an epoch; begins at the first request, when Lightning has told the sampler the epoch."""
        now = random_state()
        if self.persistent_workers:
            self._iterator = None
            if begun["has_workers"]:  # Their seed was drawn in an earlier epoch.
                super().__iter__()
        restore_random_state(begun["random_state"])
        self._set_generators(begun["generators"])
        iterator = iter(self)
        states = []
        for _ in range(batches):
            next(iterator, None)
            states.append(torch.get_rng_state())
        if isinstance(self.dataset, IterableDataset) and any(not torch.equal(states[0], each) for each in states):
            _warn("its IterableDataset draws from the global generator while it is iterated")
        if self.batch_size != begun["batch_size"]:
            _warn(f"its batch_size was {begun['batch_size']} and is {self.batch_size}")
        restore_random_state(now)
        yield from iterator

    def _own_generators(self) -> list[torch.Generator]:
        places = (self, self.sampler, self.batch_sampler, getattr(self.batch_sampler, "sampler", None))
        found = {id(each): each for place in places if (each := getattr(place, "generator", None)) is not None}
        return list(found.values())

    def _generator_states(self) -> list[torch.Tensor]:
        return [generator.get_state() for generator in self._own_generators()]

    def _set_generators(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._own_generators(), states, strict=False):
            generator.set_state(state)


def as_replayed(loader: Any) -> Any:
    """Returns a loader that can be replayed if it is torch's DataLoader, or of a class derived from it.

    The object stays: its class becomes :class:`ReplayedLoader`, or one that also derives from it.
    """
    if isinstance(loader, DataLoader) and not isinstance(loader, _Stateful):
        kind: Any = type(loader)
        loader.__class__ = _replayed_class(kind)
    return loader


def give_generator(loader: Any) -> None:
    """Gives a DataLoader that validates in a fit a generator, if it has none.

    Without one, each pass draws its seed from training's stream, before any hook could store that stream's state.
    """
    if isinstance(loader, DataLoader | DistributedEvalLoader):
        drawing: list[Any] = [loader, loader.sampler]
        for draws in drawing:
            if getattr(draws, "generator", loader) is None:
                draws.generator = torch.Generator().manual_seed(0)


@functools.cache
def _replayed_class(kind: type[DataLoader]) -> type[DataLoader]:
    if kind is DataLoader:
        return ReplayedLoader
    return type(kind.__name__, (ReplayedLoader, kind), {"__module__": kind.__module__})


def _warn(reason: str) -> None:
    rank_zero_warn(
        f"the rest of this epoch is not that of the run that was stopped: the training loader's order cannot be drawn"
        f" again, because {reason}; the next epochs are complete"
    )
