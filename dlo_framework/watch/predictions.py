"""Predictions of ``dlo predict``: the outputs of all ranks in the order of the data, as tensors or as a table.

A table is CSV, JSON lines or Parquet: a class of each image, a completion of each prompt.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.utils.data import DistributedSampler

from dlo_framework.atomic_file import open_atomic, write_atomic
from dlo_framework.callback import PluginCallback
from dlo_framework.data.description import DataDescription, LoaderDescription
from dlo_framework.distributed.groups import control_group
from dlo_framework.errors import DloError, mark_agreed
from dlo_framework.strategy_contract import data_share


class SavePredictions(PluginCallback):
    """Writes the outputs of ``predict_step`` to one file; on by default in ``dlo predict``.

    The file holds one tensor ``[N, ...]`` where every batch's output is a tensor ``[n, ...]`` with the same further
    dims, else the list of the batches' outputs; ``torch.load(path, weights_only=True)`` reads it. The outputs of
    several ranks are put in the order of the data. With dlo's loaders rank r has the r-th slice of each global batch.
    With others, to which Lightning gives a DistributedSampler, rank r of R has every R-th sample; where the batches'
    outputs cannot be one tensor, a warning says that the list is in another order.

    A table has a row for each sample. Of probabilities ``[n, classes]`` the row has the sample's name, its class and
    probability, and up to four further classes; the datamodule has ``prediction_names()`` and ``class_names``. Of lists
    of dicts, such as completions of prompts, the datamodule's ``prediction_rows(outputs)`` returns the rows.

    Args:
        path: Path of the file.
        form: Form of the file: `pt`, or a table as `csv`, `jsonl` or `parquet`.
    """

    def __init__(self, path: Path, form: Form = "pt") -> None:
        self.path, self.form = Path(path), form
        self._batches: list[Any] = []

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Checks before the first batch that the file can be written.

        Raises:
            DloError: on all ranks, if it cannot.
        """
        problem = _why_not_writable(self.path) if trainer.is_global_zero else None
        problem = trainer.strategy.broadcast(problem)
        if problem is not None:
            raise mark_agreed(DloError(f"cannot write the predictions {self.path}: {problem}; set another --run.dir"))

    def on_predict_batch_end(self, trainer: Trainer, pl_module: LightningModule, outputs: Any, *args: Any) -> None:
        """Copies a batch's outputs to the CPU, and keeps them.

        Raises:
            DloError: If they cannot be rows of a table.
        """
        if self.form != "pt":
            try:
                check_output(outputs, trainer.datamodule, self.form)  # type: ignore[attr-defined]
            except DloError as error:
                raise mark_agreed(error) from None
        self._batches.append(move_data_to_device(outputs, torch.device("cpu")))

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the file on rank 0, and prints its path."""
        share = data_share(trainer.strategy)[0]  # On a mesh, ranks of one replica have the same.
        shares, self._batches = gather_batches(self._batches, share, control_group(trainer)), []
        batches = interleave_batches(shares)
        if not trainer.is_global_zero or not batches:
            return
        if len(shares) > 1 and deals_samples(trainer):
            if _fit_together(batches):
                batches = [interleaved([torch.cat(share) for share in shares if share])]
            else:
                rank_zero_warn(
                    f"the batches' outputs in {self.path} are not in the order of the data: a DistributedSampler gave"
                    f" {len(shares)} ranks samples in turn, and outputs of several shapes stay a list of batches;"
                    " predict on one rank, or use a dlo datamodule"
                )
        earlier = " (in place of an earlier file)" if self.path.exists() else ""
        if self.form == "pt":
            _write(torch.cat(batches) if _fit_together(batches) else batches, self.path)
        else:
            rows = rows_of(batches, trainer.datamodule)  # type: ignore[attr-defined]
            write_table(rows, self.path, self.form)
        print(f"predictions: {self.path}{earlier}")


def gather_batches(batches: list[Any], share: int, group: dist.ProcessGroup | None) -> list[list[Any]]:
    """Gathers the batches of all data-parallel ranks on rank 0, in their order; other ranks get an empty list.

    Of ranks with the same data-parallel rank, the batches of the first are used.

    Args:
        batches: Batches of this rank.
        share: Data-parallel rank of this rank.
        group: Gloo group of all ranks, None for a single process. On NCCL all batches would go through the first rank's
            accelerator at once.
    """
    if group is None:
        return [batches]
    gathered: list[Any] = [None] * dist.get_world_size(group)
    first = dist.get_rank(group) == 0
    dist.gather_object((share, batches), gathered if first else None, group=group)
    if not first:
        return [[]]
    of_shares = dict(reversed(gathered))  # for each share, the first rank's batches win
    return [of_shares[number] for number in sorted(of_shares)]


def interleave_batches(ranks: list[list[Any]]) -> list[Any]:
    """Returns the batches of all ranks as one list: the first batch of each rank, then the second of each, and so on.

    Outputs of a rank without a sample in a batch (None, or no rows) are left out.
    """
    longest = max(map(len, ranks))
    listed = [batches[number] for number in range(longest) for batches in ranks if number < len(batches)]
    return [batch for batch in listed if not _is_empty(batch)]


def deals_samples(trainer: Trainer) -> bool:
    """Returns whether ranks get samples in turn, as from torch's DistributedSampler, and not slices of batches."""
    loaders = trainer.predict_dataloaders
    loaders = list(loaders) if isinstance(loaders, list | tuple) else [loaders]
    # Lightning (2.6) keeps it in the batch sampler, which it rebuilds for predictions.
    holders = [holder for loader in loaders for holder in (loader, LoaderDescription(loader).batch_sampler)]
    return any(isinstance(LoaderDescription(holder).sampler, DistributedSampler) for holder in holders)


def interleaved(shares: list[torch.Tensor]) -> torch.Tensor:
    """Returns the rows of all ranks in the order of a DistributedSampler: one row of each rank in turn."""
    rows = shares[0].new_empty((sum(map(len, shares)), *shares[0].shape[1:]))
    for number, share in enumerate(shares):
        rows[number :: len(shares)] = share
    return rows


def _is_empty(batch: Any) -> bool:
    """Whether a batch's outputs contain no sample."""
    if isinstance(batch, dict | tuple):
        return bool(batch) and all(map(_is_empty, batch.values() if isinstance(batch, dict) else batch))
    if isinstance(batch, torch.Tensor):
        return batch.ndim > 0 and not len(batch)
    return batch is None or (isinstance(batch, list) and not batch)


def _fit_together(batches: list[Any]) -> bool:
    """Whether batches are tensors that can be concatenated; outputs for several sizes of images or texts cannot."""
    if not all(isinstance(batch, torch.Tensor) and batch.ndim > 0 for batch in batches):
        return False
    return len({(batch.shape[1:], batch.dtype) for batch in batches}) == 1


def _write(predictions: Any, path: Path) -> None:
    """Writes the file atomically: an earlier file stays until the new one is complete.

    Raises:
        DloError: if the file cannot be written.
    """
    try:
        with open_atomic(path) as partial:
            torch.save(predictions, partial)
    except (OSError, RuntimeError) as error:  # torch's writer (2.11 to 2.15) raises the latter where a disk is full.
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error).splitlines()[0]
        raise DloError(
            f"cannot write the predictions {path}: {reason}; free some space, or set another --run.dir"
        ) from error


def _why_not_writable(path: Path) -> str | None:
    """Makes a file's folder, and returns why the file cannot be written there; None if it can."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        probe = path.with_name(f".{path.name}.{os.getpid()}")
        probe.touch()
        probe.unlink()
    except OSError as error:
        return error.strerror or str(error)
    return None


Form = Literal["pt", "csv", "jsonl", "parquet"]
Row = dict[str, Any]

#: Number of classes in a row, the most probable first.
_MOST = 5


def check_table(form: str, datamodule: Any) -> None:
    """Checks that a table can be written.

    Raises:
        DloError: If the datamodule makes no rows and has no names, or the package for the form is missing.
    """
    data = DataDescription(datamodule)
    if data.prediction_rows is None and (data.prediction_names is None or data.class_names is None):
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
    if DataDescription(datamodule).prediction_rows is not None:
        fits = isinstance(outputs, list) and all(isinstance(row, dict) for row in outputs)
        kind = "dicts, one for each sample"
    else:
        fits = isinstance(outputs, Tensor) and outputs.ndim == 2
        kind = "probabilities [n, classes]"
    if not fits and outputs is not None:
        got = f"a tensor of shape {list(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
        raise DloError(
            f"run.predictions must be pt for outputs of predict_step that are not {kind}, got {form} and {got}; set"
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
    if DataDescription(datamodule).prediction_rows is not None:
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
