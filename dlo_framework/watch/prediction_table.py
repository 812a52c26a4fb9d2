"""Table of predictions, with the name, class and probability of each sample, as CSV, JSON lines or Parquet."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from dlo_framework.atomic_file import open_atomic, write_atomic
from dlo_framework.errors import DloError

Form = Literal["pt", "csv", "jsonl", "parquet"]
Row = dict[str, str | float]

#: Number of classes in a row, the most probable first.
_MOST = 5


def check_table(form: str, datamodule: Any) -> None:
    """Checks that a table can be written.

    Raises:
        DloError: If the datamodule has no names, or the package for the form is missing.
    """
    if not hasattr(datamodule, "prediction_names") or not hasattr(datamodule, "class_names"):
        raise DloError(
            f"run.predictions must be pt for {type(datamodule).__name__}, which has no prediction_names and"
            f" class_names, got {form}; set it to pt"
        )
    if form == "parquet":
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise DloError("run.predictions parquet needs pyarrow, which is missing; pip install pyarrow") from error


def describe_output(outputs: Any) -> str:
    """Returns what an output is, for a message."""
    if isinstance(outputs, Tensor):
        return f"a tensor of shape {list(outputs.shape)}"
    return f"a {type(outputs).__name__}"


def make_table(probabilities: Tensor, names: Sequence[str], classes: Sequence[str]) -> list[Row]:
    """Returns the rows of a table.

    Args:
        probabilities: Probabilities of the classes, ``[N, C]``.
        names: Names of the samples, N.
        classes: Names of the classes, C.

    Raises:
        DloError: If there is not a row for each name, or a column for each class.
    """
    if len(names) != len(probabilities):
        raise DloError(
            f"predictions must have a row for each of the {len(names)} samples, got {len(probabilities)}; set"
            " on_corrupt to raise, or limit_predict_batches to its default, so that none is left out"
        )
    if len(classes) != probabilities.shape[1]:
        raise DloError(
            f"predictions must have a column for each of the {len(classes)} classes of the data, got"
            f" {probabilities.shape[1]}; use the data that the checkpoint was trained on"
        )
    top = probabilities.float().topk(min(_MOST, len(classes)), dim=1)
    rows: list[Row] = []
    for name, values, indices in zip(names, top.values.tolist(), top.indices.tolist(), strict=True):
        row: Row = {"name": name}
        for number, (value, index) in enumerate(zip(values, indices, strict=True), 1):
            ending = "" if number == 1 else f"_{number}"
            row |= {f"class{ending}": classes[index], f"probability{ending}": round(value, 6)}
        rows.append(row)
    return rows


def write_table(rows: Sequence[Row], path: Path, form: str) -> None:
    """Writes a table atomically.

    Args:
        rows: Rows with the same columns, at least one.
        path: Path of the file.
        form: `csv`, `jsonl` or `parquet`.
    """
    if form == "parquet":
        import pyarrow
        import pyarrow.parquet

        with open_atomic(path) as partial:
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), partial)
        return
    text = io.StringIO()
    if form == "csv":
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        text.writelines(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
    write_atomic(path, text.getvalue())
