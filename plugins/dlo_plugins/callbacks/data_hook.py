"""Function of a callback that a datamodule calls, from the setup of a fit to its end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dlo_framework.data import ResumableDataModule
from dlo_framework.errors import DloError


class DataHook:
    """Function in an attribute of a datamodule, of which a run has one.

    A callback calls :meth:`set` in ``setup``, and :meth:`remove` in ``teardown`` and in ``on_exception``, as Lightning
    calls no ``teardown`` after an exception.

    Args:
        attribute: Name of the attribute, such as `order_at`.
        callback: Name of the callback, for errors.
        purpose: Verb and object of what the function does, for errors.
    """

    def __init__(self, attribute: str, callback: str, purpose: str) -> None:
        self._attribute, self._callback, self._purpose = attribute, callback, purpose
        self._datamodule: ResumableDataModule | None = None

    @property
    def is_set(self) -> bool:
        """Whether the function is in a datamodule."""
        return self._datamodule is not None

    def set(self, datamodule: ResumableDataModule, function: Callable[..., Any]) -> None:
        """Sets the function.

        Raises:
            DloError: If another callback has set one.
        """
        if getattr(datamodule, self._attribute) is not None:
            raise DloError(f"{self._callback}: only one callback must {self._purpose}, got two; remove one of them")
        setattr(datamodule, self._attribute, function)
        self._datamodule = datamodule

    def remove(self) -> None:
        """Removes the function, if it is set."""
        if self._datamodule is not None:
            setattr(self._datamodule, self._attribute, None)
        self._datamodule = None
