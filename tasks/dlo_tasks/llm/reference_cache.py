"""Computes a reference's log-probabilities of all answers once, and caches them in a file beside the tokens."""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch import Tensor

from dlo_framework.data import Draw
from dlo_framework.distributed.control_group import control_group
from dlo_framework.errors import DloError
from dlo_framework.frozen_model import FrozenModel
from dlo_framework.strategy_contract import contract_of
from dlo_tasks.llm.cache_folder import cached_file
from dlo_tasks.llm.preference_losses import Objective
from dlo_tasks.llm.preference_rows import PreferenceRows

#: Values of each row, `[rows, A]`, by their names in the file.
Values = dict[str, np.ndarray]


class ReferenceModel(Protocol):
    """Task whose reference is computed."""

    model_name: str | None
    reference: FrozenModel | None
    lora: Any
    objective: Objective

    def place_reference(self) -> None:
        """Places the second model, if the reference is one."""

    def reference_log_probs(self, batch: dict[str, Any]) -> Tensor | None:
        """Returns the reference's log-probabilities of a batch's answers; None on ranks without outputs."""


class ReferenceCache:
    """Log-probabilities of a reference, for each row of the data.

    A file's name is a hash of the tokens and their layout, and one of the weights' files, so that runs with other
    settings of the tuning share it. Where the weights come from no file, the name is new, and only a resumed run reads
    it.

    Attributes:
        names: Names of the files, by split.
        is_running: Whether log-probabilities are being computed.
    """

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.is_running = False

    def prepare(self, trainer: Trainer, task: ReferenceModel) -> None:
        """Reads the log-probabilities, or computes and writes them; called on all ranks before the first batch.

        Args:
            trainer: Trainer, whose datamodule has been set up.
            task: Task whose reference is meant.

        Raises:
            DloError: If they must be computed, and the initial weights are gone because the run is resumed.
        """
        options: Any = trainer
        datasets: dict[str, PreferenceRows] = options.datamodule.preferences
        weights = fingerprint_weights(task, str(options.precision))
        own = task.reference is None and task.lora is None
        for split, rows in datasets.items():
            start = f"reference-{_hash([options.datamodule.made_of, split])}-"
            known = self.names.get(split, "")
            name = _broadcast(
                trainer, known if known.startswith(start) else f"{start}{weights or uuid.uuid4().hex[:16]}.npz"
            )
            self.names[split] = name
            if rows.reference_name == name:
                continue
            path = options.datamodule.cache_dir / name
            values = _broadcast(trainer, _read(path) if trainer.is_global_zero else None)
            if values is None:
                if own and (options.ckpt_path is not None or trainer.global_step):
                    raise DloError(
                        "precompute must find the log-probabilities of the initial weights, which a resumed run no"
                        f" longer has, got no file {path}; restore the file and the data, or set reference to the model"
                        " before the tuning"
                    )
                values = self._compute(trainer, task, rows)
                if trainer.is_global_zero:
                    with cached_file(path, "the reference's log-probabilities") as partial, open(partial, "wb") as file:
                        np.savez(file, allow_pickle=False, **values)
            rows.set_reference(name, values["log_probs"], values.get("mismatched"))

    def _compute(self, trainer: Trainer, task: ReferenceModel, rows: PreferenceRows) -> Values:
        """Returns the log-probabilities of all rows; each data-parallel rank computes its share."""
        options: Any = trainer
        rank, ranks = contract_of(trainer.strategy).data_share()
        data = options.datamodule
        each = max(1, (data.eval_batch_size or data.batch_size) // ranks)
        rank_zero_info(f"computing the reference's log-probabilities of {len(rows):,} rows")
        found: list[tuple[list[int], Values]] = []
        self.is_running = True
        task.place_reference()
        try:
            # All ranks run equally many batches of equal size; a rank beyond the last row repeats the first ones.
            for start in range(0, len(rows), each * ranks):
                index = [(start + rank * each + number) % len(rows) for number in range(each)]
                batch: Any = rows.fetch([Draw(number, 0, True) for number in index])
                batch = data.on_before_batch_transfer(batch, 0)
                batch = trainer.strategy.batch_to_device(batch, dataloader_idx=0)
                computed = {"log_probs": task.reference_log_probs(batch)}
                if task.objective == "kto":
                    computed["mismatched"] = task.reference_log_probs(mismatched_part(batch))
                values = {name: value.float().cpu().numpy() for name, value in computed.items() if value is not None}
                if values:
                    found.append((index, values))
        finally:
            self.is_running = False
            if task.reference is not None:
                task.reference.stop()
        return _merge(trainer, found, len(rows), rows.most_answers)


def mismatched_part(batch: dict[str, Any]) -> dict[str, Any]:
    """Returns the batch of the mismatched completions in a batch."""
    prefix = "mismatched_"
    others = {name.removeprefix(prefix): value for name, value in batch.items() if name.startswith(prefix)}
    return others | {"answers": batch["answers"]}


def fingerprint_weights(task: ReferenceModel, precision: str) -> str | None:
    """Returns a hash of the files of a reference's weights and of its precision; None if they come from no file."""
    source, dtype = task.model_name, None
    if task.reference is not None:
        source = task.reference.checkpoint or getattr(task.reference.task, "model_name", None)
        dtype = str(task.reference.dtype)
    if source is None:
        return None
    path = Path(source).expanduser()
    files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else []
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return _hash([source, stats, precision, dtype])


def _hash(made_of: list[Any]) -> str:
    return hashlib.sha256(repr(made_of).encode()).hexdigest()[:16]


def _read(path: Path) -> Values | None:
    if not path.is_file():
        return None
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _broadcast(trainer: Trainer, value: Any) -> Any:
    group = control_group(trainer)
    if group is None:
        return value
    said = [value]
    dist.broadcast_object_list(said, src=0, group=group)
    return said[0]


def _merge(trainer: Trainer, found: list[tuple[list[int], Values]], rows: int, answers: int) -> Values:
    """Returns the values of all rows, from those that the ranks have computed."""
    group = control_group(trainer)
    parts: list[Any] = [found]
    if group is not None:
        parts = [None] * dist.get_world_size(group)
        dist.all_gather_object(parts, found, group=group)
    merged: Values = {}
    for index, values in (entry for part in parts for entry in part):
        for name, value in values.items():
            whole = merged.setdefault(name, np.zeros((rows, answers), dtype=np.float32))
            whole[index, : value.shape[1]] = value
    return merged
