"""Reads and writes the file with all records of a machine and a day, and finds the newest one.

    {"hardware", "accelerator", "date", "finished", "quick", "runs": {entry's key: RUN}}

and a RUN: {"name", "command", "load", "seconds", "code", "record"}; ``record`` is None where the run failed, and
"error" says why.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from dlo_framework.atomic_file import write_atomic
from measuring.record import cores, hardware

Results = dict[str, Any]


def slug(text: str) -> str:
    """Returns text in the form that file names use."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def machine() -> tuple[str, str, bool]:
    """Returns a description of this machine, its name in file names, and whether it has an accelerator."""
    import torch

    if not torch.accelerator.is_available():
        return hardware(), f"cpu-{cores()}-core{'s' if cores() > 1 else ''}", False
    name = hardware(str(torch.accelerator.current_accelerator()))
    return f"{name}, {hardware()}", slug(name), True


def path_of(folder: Path, machine_slug: str, date: str) -> Path:
    """Returns the path of the results of a machine and a day.

    Raises:
        FileExistsError: If a report written by hand has that name.
    """
    path = folder / f"{machine_slug}_{date}.json"
    by_hand = path.with_suffix(".md")
    if by_hand.exists() and not path.exists():
        raise FileExistsError(
            f"--results must be another folder: {by_hand} was written by hand, without"
            f" {path.name}, and is not overwritten"
        )
    return path


def read(path: Path) -> Results:
    """Returns the results in a file."""
    return dict(json.loads(path.read_text(encoding="utf-8")))


def write(results: Results, path: Path) -> None:
    """Writes results atomically."""
    write_atomic(path, json.dumps(results, indent=1) + "\n")


def newest(folder: Path) -> list[tuple[Path, Results]]:
    """Returns the newest results without an accelerator and the newest with one, if there are any.

    Results of quick runs have no meaning, and are left out.
    """
    found: dict[bool, tuple[Path, Results]] = {}
    for path in sorted(folder.glob("*.json")):
        results = read(path)
        kind = bool(results["accelerator"])
        if results["quick"]:
            continue
        if kind not in found or results["finished"] > found[kind][1]["finished"]:
            found[kind] = (path, results)
    return [found[kind] for kind in sorted(found)]
