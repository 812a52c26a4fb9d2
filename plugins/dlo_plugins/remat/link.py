"""Link between the device and the host: the rates of its copies, one queue a direction."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dlo_framework.errors import DloError


@dataclass(frozen=True)
class Link:
    """Link on which the copies of each direction run in the order of their issue, beside computation.

    Attributes:
        to_host: Bytes per second from the device to the host.
        to_device: Bytes per second from the host to the device.

    Raises:
        DloError: A rate that is not a finite number above 0.
    """

    to_host: float
    to_device: float

    def __post_init__(self) -> None:
        for key in ("to_host", "to_device"):
            if not 0 < (value := getattr(self, key)) < math.inf:
                raise DloError(
                    f"{key} must be a finite number of bytes per second above 0, got {value}; 25e9 is that of PCIe 4"
                )
