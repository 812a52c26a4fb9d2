"""Prints the results of a benchmark: tables to read, and a record as one line of JSON.

The record is plain data:

    {"benchmark", "question", "device", "versions", "options", "tables": [TABLE], "not_measured": [{"what", "why"}]}

and a TABLE:

    {"title", "unit": what 1.0 is, "clock", "better": "lower" or "higher", "notes": [text], "rows":
        {name: {"median", "min", "max", "n", "bar", "ours", "control", ... other columns}}}

``bar`` is the target of the median, ``ours`` marks dlo's rows, ``control`` the second measurement of the base. A count
has n = 1. Other columns of a row are counts and means: MB, calls, milliseconds.
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

from dlo_framework.atomic_file import write_atomic
from dlo_framework.extensions import versions
from measuring.rounds import Clock, spread

#: Packages that are compared, whose versions are recorded in addition.
PEERS = ("trl", "liger-kernel", "peft", "datasets", "safetensors")
#: Keys of every row; all others are its own columns.
COMMON = ("median", "min", "max", "n", "bar", "ours", "control")
KEYS = ("benchmark", "question", "device", "versions", "options", "tables", "not_measured")
DIGITS = 5


class BadRecord(ValueError):
    """Raised if a benchmark's output does not end in a record."""


@dataclass
class Table:
    """One comparison.

    Args:
        title: Title of the comparison, unique in a record.
        unit: Baseline, which has the value 1.0.
        clock: Clock, or its name.
        better: Direction of better values, ``lower`` or ``higher``.
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
            name: Name of the row.
            values: Values in the table's unit, one per round.
            bar: Target of the median.
            ours: Whether the row is dlo's.
            control: Whether the row is the second measurement of the base.
            **columns: Other columns, numbers or text, by heading with ``_`` for blanks.
        """
        assert name not in self.rows, name
        found = spread(values)
        row = {"median": found.median, "min": found.least, "max": found.most, "n": found.n}
        row |= {} if bar is None else {"bar": bar}
        row |= {key: True for key, flag in (("ours", ours), ("control", control)) if flag}
        row |= {key.replace("_", " "): value for key, value in columns.items() if value is not None}
        self.rows[name] = {key: rounded(value) for key, value in row.items()}

    def add_failed(self, name: str, why: str) -> None:
        """Adds a contestant that has no values."""
        self.rows[name] = {"median": None, "min": None, "max": None, "n": 0, "failed": why}

    def as_dict(self) -> dict[str, Any]:
        """Returns the table in the record's format."""
        clock = self.clock if isinstance(self.clock, str) else self.clock.name
        named = {"title": self.title, "unit": self.unit, "clock": clock, "better": self.better}
        return {**named, "rows": self.rows, "notes": self.notes}


@dataclass
class Record:
    """Results of one run of a benchmark; prints each table when it is added.

    Args:
        benchmark: Name of the benchmark's file.
        question: Question that it answers.
        device: Description of the device.
        options: Options of the run.
        path: File that is written after each table, so that a run that is cut off keeps those before; None for none.
    """

    benchmark: str
    question: str
    device: str
    options: dict[str, Any]
    path: Path | None = None
    tables: list[Table] = field(default_factory=list)
    not_measured: list[dict[str, str]] = field(default_factory=list)

    @classmethod
    def of(cls, file: str, doc: str | None, options: argparse.Namespace, device: str = "cpu") -> Record:
        """Returns an empty record.

        Args:
            file: Value of ``__file__`` in the benchmark.
            doc: Docstring of the benchmark, whose first paragraph is the question.
            options: Parsed options.
            device: Name of the device in torch.
        """
        question = " ".join((doc or "").split("\n\n")[0].split())
        public = {key: value for key, value in vars(options).items() if not key.startswith("_")}
        return cls(Path(file).stem, question, hardware(device), public)

    def add(self, table: Table) -> None:
        """Adds a finished table, and prints it."""
        assert table.title not in [other.title for other in self.tables], table.title
        self.tables.append(table)
        print(f"\n{as_text(table.as_dict())}", flush=True)
        self._write()

    def without(self, what: str, why: str) -> None:
        """Records a quantity that this run could not measure."""
        self.not_measured.append({"what": what, "why": why})
        print(f"\nnot measured: {what}: {why}", flush=True)
        self._write()

    def finish(self) -> None:
        """Prints the record as the last line."""
        print(self.as_json(), flush=True)

    def _write(self) -> None:
        if self.path is not None:
            write_atomic(self.path, self.as_json() + "\n")

    def as_json(self) -> str:
        """Returns the record so far as a line of JSON."""
        named = {"benchmark": self.benchmark, "question": self.question, "device": self.device}
        filled = {"tables": [table.as_dict() for table in self.tables], "not_measured": self.not_measured}
        record = {**named, "versions": versions(PEERS), "options": self.options, **filled}
        return json.dumps(record, default=str)


def rounded(value: Any) -> Any:
    """Returns a float rounded to ``DIGITS`` significant digits; any other value unchanged."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    return value


def cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def hardware(device: str = "cpu") -> str:
    """Returns a description of a device: its name and number."""
    if device.startswith("cpu"):
        count = cores()
        return f"{count} CPU core{'s' if count > 1 else ''} ({platform.machine()})"
    import torch

    kind, count = torch.device(device).type, torch.accelerator.device_count()
    name = torch.cuda.get_device_name(0) if kind == "cuda" else kind
    return f"{count} x {name}" if count > 1 else name


def parse(output: str) -> dict[str, Any]:
    """Returns the record at the end of a benchmark's output, which other lines may follow.

    Raises:
        BadRecord: If there is none, or it lacks a key.
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
    if row["median"] is None:  # It is not finite.
        return False
    return bool(row["median"] <= bar if better == "lower" else row["median"] >= bar)


def bar_in_words(row: Mapping[str, Any], better: str) -> str:
    """Returns a row's bar and whether it is met, as text; empty without a bar."""
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
