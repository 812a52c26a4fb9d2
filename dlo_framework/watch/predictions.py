"""What ``dlo predict`` leaves behind: the outputs of all ranks in the order of the data, in one file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device
from lightning.pytorch import Callback, LightningModule, Trainer


class SavePredictions(Callback):
    """Writes what ``predict_step`` returned to one file; on by default in ``dlo predict``.

    The file holds one tensor ``[N, ...]`` where every batch gave a tensor, else the list of the batches' outputs;
    ``torch.load(path, weights_only=True)`` reads it. Several ranks' outputs are put in the order of the data, as
    dlo's loaders spread it: rank r has the r-th share of each global batch.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._batches: list[Any] = []

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Keeps a batch's outputs, on the CPU."""
        self._batches.append(move_data_to_device(outputs, torch.device("cpu")))

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Writes the file on rank 0, and says where it is."""
        batches, self._batches = in_order(gather(self._batches)), []
        if not trainer.is_global_zero or not batches:
            return
        tensors = all(isinstance(batch, torch.Tensor) and batch.ndim > 0 for batch in batches)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(torch.cat(batches) if tensors else batches, self.path)
        print(f"predictions: {self.path}")


def gather(batches: list[Any]) -> list[list[Any]]:
    """Returns every rank's batches, in the order of ranks."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return [batches]
    found: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, batches)
    return found


def in_order(ranks: list[list[Any]]) -> list[Any]:
    """Returns the batches of all ranks as one list: the first of each rank, the second of each, and so on."""
    longest = max(map(len, ranks))
    return [batches[number] for number in range(longest) for batches in ranks if number < len(batches)]
