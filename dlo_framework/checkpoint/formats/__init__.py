"""Checkpoint formats of other programs: what reads them, and what writes them; plug-ins add importers.

An importer is a class and one line of metadata, an entry point whose name is shown in messages::

    [options.entry_points]
    dlo_framework.checkpoint_formats =
        MyTrainer = my_package.my_trainer:MyTrainerFormat

``dlo checkpoint convert`` asks the importers about every path but canonical checkpoints and safetensors files, in the
order of their names.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, NamedTuple

from dlo_framework.checkpoint.formats.safetensors_file import refuse_existing
from dlo_framework.checkpoint.saving import save
from dlo_framework.errors import DloError
from dlo_framework.extensions import installed_points, load_instance

#: Entry-point group of the importers.
GROUP = "dlo_framework.checkpoint_formats"


class ForeignCheckpoint(NamedTuple):
    """Checkpoint of another program.

    Attributes:
        content: Lightning's dict, with ``state_dict`` and ``pytorch-lightning_version``; under ``optimizer_states``
            each ``state`` maps parameter names to their tensors and values.
        notes: Sentences on parts of the state that could not be converted.
    """

    content: dict[str, Any]
    notes: list[str]


class CheckpointFormat(ABC):
    """Importer of the checkpoints of another program; it is constructed without arguments."""

    @abstractmethod
    def recognises(self, path: Path) -> bool:
        """Returns whether the file or folder is of this format; it must not execute anything in it."""

    @abstractmethod
    def read(self, path: Path) -> ForeignCheckpoint:
        """Reads a checkpoint that this format recognises; it must not execute anything in it.

        Raises:
            DloError: if a file is missing, damaged or unsafe.
        """


class Importer(NamedTuple):
    """Format that recognises a path.

    Attributes:
        name: Name of its entry point.
        format: Format itself.
    """

    name: str
    format: CheckpointFormat

    def convert(self, source: Path, target: Path) -> list[str]:
        """Converts a checkpoint to a canonical one; returns sentences on parts that could not be converted.

        Raises:
            DloError: if the source cannot be read, or the target exists or cannot be written.
        """
        refuse_existing(target)
        content, notes = self.format.read(source)
        save(content, target, about={"strategy": "imported", "imported_from": f"{source.name} ({self.name})"})
        return notes


def find_importer(path: Path) -> Importer | None:
    """Returns the importer that recognises a path; None if there is none.

    Raises:
        DloError: if no importer recognises it and one cannot be loaded, with its distribution and the cause.
    """
    failed = None
    for point in sorted(installed_points().select(group=GROUP), key=lambda point: point.name):
        try:
            made = load_instance(point, "checkpoint format", CheckpointFormat)
        except DloError as error:
            failed = failed or error
            continue
        if made.recognises(path):
            return Importer(point.name, made)
    if failed is not None:
        raise failed
    return None
