"""Abilities: what some strategies or tasks can do and others cannot, each a class in the folder that asks for it.

The one who has abilities declares them, and gives the reason for those that its options rule out::

    class SplitsSequences(Ability):
        feature = "context parallelism"
        missing = "it gives each rank full sequences; use MeshStrategy"

    class MyStrategy(StrategyContract, DDPStrategy):
        def abilities(self):
            without = "its `split` is off; set split: true"
            return super().abilities() | {SplitsSequences: MySplit(self) if self.split else without}

    strategy.ability(SplitsSequences)  # MySplit, or "context parallelism does not support MyStrategy: its `split` ..."

A class may also derive from an ability, and so have it, unless `abilities` gives another or a reason.
"""

from __future__ import annotations

from abc import ABC
from typing import ClassVar, TypeVar

from dlo_framework.errors import DloError


class Ability(ABC):
    """Base of abilities: the methods and options that its feature uses. Who has one must have its abstract methods."""

    #: Feature that needs it, which begins the error.
    feature: ClassVar[str]
    #: Reason and fix where nothing is declared: ``it has 1 copy of the model; use ddp``.
    missing: ClassVar[str]
    #: Whether those that declare nothing have the class's own methods.
    has_default: ClassVar[bool] = False


A = TypeVar("A", bound=Ability)


class HasAbilities:
    """Base of strategies and tasks, whose abilities others ask for."""

    def abilities(self) -> dict[type[Ability], Ability | str]:
        """Returns the abilities by class; for one that the options rule out, the reason and the fix.

        It is called at any time, also before processes start.
        """
        return {}

    def find_ability(self, kind: type[A]) -> A | None:
        """Returns an ability; None without it."""
        declared = self.abilities().get(kind, self)
        if isinstance(declared, kind):
            return declared
        return kind() if kind.has_default and not isinstance(declared, str) else None

    def ability(self, kind: type[A], feature: str = "") -> A:
        """Returns an ability.

        Args:
            kind: Class of the ability.
            feature: Feature that needs it; empty for the ability's own.

        Raises:
            DloError: This one does not have it; the message has the reason and the fix.
        """
        ability = self.find_ability(kind)
        if ability is not None:
            return ability
        reason = self.abilities().get(kind, kind.missing)
        raise DloError(f"{feature or kind.feature} does not support {self.ability_owner}: {reason}")

    @property
    def ability_owner(self) -> str:
        """Name in an error."""
        return type(self).__name__


def find_ability(owner: object, kind: type[A]) -> A | None:
    """Returns an ability of a strategy, a task or another LightningModule, which has none; None without it."""
    return owner.find_ability(kind) if isinstance(owner, HasAbilities) else None
