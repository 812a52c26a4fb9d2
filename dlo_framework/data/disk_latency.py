"""Measures whether a local disk answers so slowly that announced reads are worth their cost."""

from __future__ import annotations

import time

from dlo_framework.data.remote import ByteFile, LocalFile

#: Seconds of an answer. The page cache takes 1 us and a solid-state drive 0.1 ms: there, mapped pages, which are read
#: with their neighbours, are sooner than announced ones. Hard disks and network file systems take milliseconds.
SLOW = 5e-4
_IN_A_ROW = 4  # slow answers
_LONGEST = 64  # calls between two measurements


class DiskLatency:
    """Latency of the disk of local files, measured by reading a byte of what is read soon.

    While answers are fast, the measurements become rare: every 64th call of :meth:`is_due`. After four slow answers in
    a row, the disk counts as slow, and is not measured again.

    Attributes:
        is_slow: Whether reads should be announced.
    """

    def __init__(self) -> None:
        self.is_slow = False
        self._interval = self._left = 1
        self._count = 0

    def is_due(self) -> bool:
        """Counts a call; returns whether to measure now."""
        self._left -= 1
        return self._left <= 0

    def measure(self, file: ByteFile, offset: int) -> None:
        """Reads a byte of a file and takes the time.

        Args:
            file: File; other than a local one, it is slow.
            offset: Offset of the byte.
        """
        if not isinstance(file, LocalFile):
            self.is_slow = True
            return
        begin = time.perf_counter()
        file.read(offset, 1)
        self.note(time.perf_counter() - begin)

    def note(self, seconds: float) -> None:
        """Counts a measured answer.

        Args:
            seconds: Time of the answer.
        """
        self._count = self._count + 1 if seconds > SLOW else 0
        self.is_slow = self.is_slow or self._count == _IN_A_ROW
        self._interval = 1 if self._count else min(2 * self._interval, _LONGEST)
        self._left = self._interval
