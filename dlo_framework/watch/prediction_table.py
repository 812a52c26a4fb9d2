"""Table of predictions as CSV, JSON lines or Parquet: a class of each image, a completion of each prompt."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from dlo_framework.atomic_file import open_atomic, write_atomic
from dlo_framework.errors import DloError

Form = Literal["pt", "csv", "jsonl", "parquet"]
Row = dict[str, Any]

#: Number of classes in a row, the most probable first.
_MOST = 5


def check_table(form: str, datamodule: Any) -> None:
    """Checks that a table can be written.

    Raises:
        DloError: If the datamodule makes no rows and has no names, or the package for the form is missing.
    """
    has_names = hasattr(datamodule, "prediction_names") and hasattr(datamodule, "class_names")
    if not has_names and not hasattr(datamodule, "prediction_rows"):
        raise DloError(
            f"run.predictions must be pt for {type(datamodule).__name__}, which has neither prediction_rows, nor"
            f" prediction_names and class_names, got {form}; set it to pt"
        )
    if form == "parquet":
        try:
            import pyarrow  # noqa: F401
        except ImportError as error:
            raise DloError("run.predictions parquet needs pyarrow, which is missing; pip install pyarrow") from error


def check_output(outputs: Any, datamodule: Any, form: str) -> None:
    """Checks that a batch's outputs can be rows of a table.

    Args:
        outputs: Outputs of `predict_step`; None for a batch without samples.
        datamodule: Datamodule of the run.
        form: Form of the table.

    Raises:
        DloError: If they are not of the kind that the datamodule's rows are made of.
    """
    if hasattr(datamodule, "prediction_rows"):
        fits = isinstance(outputs, list) and all(isinstance(row, dict) for row in outputs)
        kind = "dicts, one for each sample"
    else:
        fits = isinstance(outputs, Tensor) and outputs.ndim == 2
        kind = "probabilities [n, classes]"
    if not fits and outputs is not None:
        found = f"a tensor of shape {list(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
        raise DloError(
            f"run.predictions must be pt for outputs of predict_step that are not {kind}, got {form} and {found}; set"
            " it to pt"
        )


def rows_of(batches: Sequence[Any], datamodule: Any) -> list[Row]:
    """Returns the rows of a table.

    Args:
        batches: Outputs of all batches in the order of the data: lists of dicts where the datamodule has
            `prediction_rows`, else probabilities ``[n, C]``.
        datamodule: Datamodule of the run.

    Raises:
        DloError: If there is not a row for each sample, or a column for each class.
    """
    if hasattr(datamodule, "prediction_rows"):
        return list(datamodule.prediction_rows([row for batch in batches for row in batch]))
    return make_table(torch.cat(list(batches)), datamodule.prediction_names(), datamodule.class_names)


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
        rows: Rows with the same columns, at least one. A list or dict is JSON text in CSV and Parquet.
        path: Path of the file.
        form: `csv`, `jsonl` or `parquet`.
    """
    if form != "jsonl":
        rows = [{name: _as_cell(value) for name, value in row.items()} for row in rows]
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


def _as_cell(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, list | dict) else value
