"""What a benchmark says at its end: tables to read, and the same as one line of JSON.

The record, all of it plain data:

    {"benchmark", "question", "device", "versions", "options", "tables": [TABLE], "not_measured": [{"what", "why"}]}

and a TABLE:

    {"title", "unit": what 1.0 is, "clock", "better": "lower" or "higher", "notes": [text], "rows":
        {name: {"median", "min", "max", "n", "bar", "ours", "control", ... columns of its own}}}

``bar`` is what the median is to reach, ``ours`` marks what dlo does, ``control`` the base measured twice. What was
counted once has n = 1. Columns of a row's own hold counts and means: MB, calls, milliseconds here.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dlo_framework.versions import versions
from measuring.rounds import Clock, spread

#: What is compared, beside the packages that matter to every run.
PEERS = ("trl", "liger-kernel", "peft", "datasets", "safetensors")
#: What every row has; all others are its own columns.
COMMON = ("median", "min", "max", "n", "bar", "ours", "control")
KEYS = ("benchmark", "question", "device", "versions", "options", "tables", "not_measured")
DIGITS = 5


class BadRecord(ValueError):
    """A benchmark's output does not end in a record."""


@dataclass
class Table:
    """One comparison.

    Args:
        title: what is compared, unique within a record.
        unit: what 1.0 is.
        clock: what was measured, or its name.
        better: whether lower or higher values are.
    """

    title: str
    unit: str
    clock: Clock | str
    better: Literal["lower", "higher"] = "lower"
    rows: dict[str, dict[str, Any]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(
        self,
        name: str,
        values: Sequence[float],
        *,
        bar: float | None = None,
        ours: bool = False,
        control: bool = False,
        **columns: Any,
    ) -> None:
        """Adds a contestant.

        Args:
            name: the row's.
            values: in the table's unit, one a round.
            bar: what their median is to reach.
            ours: whether this is dlo's.
            control: whether this is the base once more.
            **columns: counts and means of its own: numbers or words, by the column's heading with ``_`` for blanks.
        """
        assert name not in self.rows, name
        found = spread(values)
        row = {"median": found.median, "min": found.least, "max": found.most, "n": found.n}
        row |= {} if bar is None else {"bar": bar}
        row |= {key: True for key, given in (("ours", ours), ("control", control)) if given}
        row |= {key.replace("_", " "): value for key, value in columns.items() if value is not None}
        self.rows[name] = {key: rounded(value) for key, value in row.items()}

    def as_dict(self) -> dict[str, Any]:
        """Returns the table as the record has it."""
        clock = self.clock if isinstance(self.clock, str) else self.clock.name
        named = {"title": self.title, "unit": self.unit, "clock": clock, "better": self.better}
        return {**named, "rows": self.rows, "notes": self.notes}


@dataclass
class Record:
    """What one run of a benchmark found; tables are printed as they are added.

    Args:
        benchmark: the name of its file.
        question: what it answers.
        device: in words, what it ran on.
        options: what it was told.
    """

    benchmark: str
    question: str
    device: str
    options: dict[str, Any]
    tables: list[Table] = field(default_factory=list)
    not_measured: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, file: str, doc: str | None, options: argparse.Namespace, device: str = "cpu") -> Record:
        """Returns a record to be filled.

        Args:
            file: the benchmark's ``__file__``.
            doc: its docstring, whose first paragraph is the question.
            options: parsed.
            device: torch's name of what is measured.
        """
        question = " ".join((doc or "").split("\n\n")[0].split())
        told = {key: value for key, value in vars(options).items() if not key.startswith("_")}
        return cls(Path(file).stem, question, hardware(device), told)

    def add(self, table: Table) -> None:
        """Takes up a table that is finished, and prints it."""
        assert table.title not in [other.title for other in self.tables], table.title
        self.tables.append(table)
        print(f"\n{as_text(table.as_dict())}", flush=True)

    def without(self, what: str, why: str) -> None:
        """Notes what this run could not measure."""
        self.not_measured.append({"what": what, "why": why})
        print(f"\nnot measured: {what}: {why}", flush=True)

    def finish(self) -> None:
        """Prints the record as the last line."""
        named = {"benchmark": self.benchmark, "question": self.question, "device": self.device}
        filled = {"tables": [table.as_dict() for table in self.tables], "not_measured": self.not_measured}
        record = {**named, "versions": versions(PEERS), "options": self.options, **filled}
        print(json.dumps(record, default=str), flush=True)


def rounded(value: Any) -> Any:
    """Returns a number with as many digits as are worth telling; anything else as it is."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value


def cores() -> int:
    """Returns how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hardware(device: str = "cpu") -> str:
    """Returns a device in words: its name, and how many there are."""
    if device.startswith("cpu"):
        count = cores()
        return f"{count} CPU core{'s' if count > 1 else ''} ({platform.machine()})"
    import torch

    kind, count = torch.device(device).type, torch.accelerator.device_count()
    name = torch.cuda.get_device_name(0) if kind == "cuda" else kind
    return f"{count} x {name}" if count > 1 else name


def parse(output: str) -> dict[str, Any]:
    """Returns the record at the end of what a benchmark printed; libraries may have said good-bye after it.

    Raises:
        BadRecord: if there is none, or it lacks a part.
    """
    lines = [line for line in output.splitlines() if line.startswith('{"benchmark"')]
    if not lines:
        raise BadRecord(f"no record among what was printed, which ends in {output[-80:]!r}")
    try:
        record = json.loads(lines[-1])
    except json.JSONDecodeError as error:
        raise BadRecord(f"the record is cut off: it ends in {lines[-1][-80:]!r}") from error
    missing = [key for key in KEYS if key not in record]
    if missing:
        raise BadRecord(f"the record lacks {', '.join(missing)}")
    return dict(record)


def reached(row: Mapping[str, Any], better: str) -> bool | None:
    """Returns whether a row's median reaches its bar; None where there is none."""
    bar = row.get("bar")
    if bar is None:
        return None
    return bool(row["median"] <= bar if better == "lower" else row["median"] >= bar)


def bar_in_words(row: Mapping[str, Any], better: str) -> str:
    """Returns what a row is to reach, and whether it does; nothing where there is no bar."""
    met = reached(row, better)
    if met is None:
        return ""
    return f"{'at most' if better == 'lower' else 'at least'} {number(row['bar'])}: {'met' if met else 'missed'}"


def own_columns(table: Mapping[str, Any]) -> list[str]:
    """Returns the headings of the columns that are a table's own, in the order of their first row."""
    return list(dict.fromkeys(key for row in table["rows"].values() for key in row if key not in COMMON))


def number(value: Any) -> str:
    """Returns a cell: three decimals of what is around 1, else four digits, thousands set off; words as they are."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if isinstance(value, int) or abs(value) >= 1000:
        return f"{value:,.0f}"
    if 0.1 <= abs(value) < 10:
        return f"{value:.3f}"
    return f"{value:.4g}"


def cells(table: Mapping[str, Any]) -> list[list[str]]:
    """Returns a table as text, its heading first."""
    own = own_columns(table)
    bars = any("bar" in row for row in table["rows"].values())
    lines = [["", "median", "min", "max", *(["bar"] if bars else []), *own]]
    for name, row in table["rows"].items():
        told = [number(row[key]) if row["n"] > 1 or key == "median" else "" for key in ("median", "min", "max")]
        words = [bar_in_words(row, table["better"])] if bars else []
        lines.append([name, *told, *words, *(number(row.get(key)) for key in own)])
    return lines


def as_text(table: Mapping[str, Any]) -> str:
    """Returns a table for a terminal."""
    lines = cells(table)
    wide = [max(len(line[place]) for line in lines) for place in range(len(lines[0]))]
    most = max(row["n"] for row in table["rows"].values())
    head = f"{table['title']}\n1 is {table['unit']}; {table['clock']}; {most} round{'s' if most > 1 else ''}"
    drawn = [
        "  ".join([line[0].ljust(wide[0]), *(cell.rjust(size) for cell, size in zip(line[1:], wide[1:], strict=True))])
        for line in lines
    ]
    return "\n".join([head, *drawn, *table["notes"]])
