"""Settings of a sweep, in ``sweep.json`` of its folder: a process that joins has the same ones."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from dlo_framework.atomic_file import write_atomic
from dlo_framework.errors import DloError

FILE = "sweep.json"
TRIALS = "trials"
#: Settings that are kept as YAML.
_YAML = ("config", "space")
#: Settings that a later start of the same sweep may change.
_FREE = ("trials",)


@dataclass(frozen=True)
class SweepSettings:
    """Settings of a sweep.

    Attributes:
        config: Config that trials start from.
        words: Further options of ``dlo fit`` for all trials.
        space: Content of the space file.
        metric: Metric of the validation.
        direction: Direction of the metric: ``minimize`` or ``maximize``.
        trials: Number of trials.
        sampler: Name of the sampler.
        pruner: Name of the pruner.
        seed: Seed of the sampler; the trials' own seed is the config's.
        first: Number of validations before a trial can be pruned.
        factor: Reduction factor of the pruner.
        validations: Number of validations of a full trial; None if it is not known.
        storage: URL of the storage; empty for the journal in the folder.
    """

    config: dict[str, Any]
    space: dict[str, Any]
    metric: str
    direction: str
    trials: int
    words: list[str] = field(default_factory=list)
    sampler: str = "tpe"
    pruner: str = "none"
    seed: int = 0
    first: int = 1
    factor: int = 3
    validations: int | None = None
    storage: str = ""

    def write(self, folder: Path) -> None:
        """Writes the settings into a sweep's folder."""
        content = dataclasses.asdict(self)
        for name in _YAML:  # JSON would turn a key such as 0 into text.
            content[name] = yaml.safe_dump(content[name], sort_keys=False)
        write_atomic(folder / FILE, json.dumps(content, indent=1) + "\n")

    def check_same(self, folder: Path, own: SweepSettings) -> None:
        """Checks that a command's settings are those of the sweep in the folder.

        Args:
            folder: Folder of the sweep.
            own: Settings of the command.

        Raises:
            DloError: They differ in more than the number of trials.
        """
        for one in dataclasses.fields(self):
            before, now = getattr(self, one.name), getattr(own, one.name)
            if one.name not in _FREE and before != now:
                raise DloError(
                    f"sweep: {_OPTIONS.get(one.name, one.name)} must be that of the sweep in {folder}, got"
                    f" {_short(now)} after {_short(before)}; choose another --folder"
                )
        if own.trials < self.trials:
            raise DloError(
                f"sweep: --trials must be at least the {self.trials} of the sweep in {folder}, got {own.trials};"
                " raise it, or choose another --folder"
            )


_OPTIONS = {"config": "the config", "words": "the options of dlo fit", "space": "--space", "first": "--first"}


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) < 80 else f"{text[:77]}..."


def read_settings(folder: Path) -> SweepSettings | None:
    """Returns the settings of the sweep in a folder; None if it has none.

    Raises:
        DloError: The file cannot be read.
    """
    path = folder / FILE
    if not path.exists():
        return None
    try:
        content = json.loads(path.read_text())
        return SweepSettings(**content | {name: yaml.safe_load(content[name]) for name in _YAML})
    except (OSError, TypeError, KeyError, json.JSONDecodeError, yaml.YAMLError) as error:
        raise DloError(f"sweep: {path} must be the settings of a sweep, got {error}; choose another --folder") from None
