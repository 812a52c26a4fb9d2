"""Several ranks on one GPU: NCCL communicates between them as it does between machines."""

from __future__ import annotations

import os
from typing import Any

import torch
from lightning.pytorch.accelerators import CUDAAccelerator


class SharedGPU(CUDAAccelerator):
    """Accelerator that gives the first GPU to every rank of this machine."""

    @staticmethod
    def parse_devices(devices: Any) -> Any:
        """Returns the index of each rank's device."""
        return [0] * int(devices)

    @staticmethod
    def get_parallel_devices(devices: Any) -> list[torch.device]:
        """Returns each rank's device."""
        return [torch.device("cuda", number) for number in devices]


def share_gpu() -> None:
    """Prepares a rank, before its process group is made.

    NCCL refuses two ranks of one machine on one GPU, and knows machines by NCCL_HOSTID.
    """
    os.environ["NCCL_HOSTID"] = f"rank-{os.environ.get('RANK', '0')}"
