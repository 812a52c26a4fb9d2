"""Random access to the rows of a Parquet file, through a small cache of decoded row groups.

A row group is the smallest unit that Parquet can decode. Rows that are read near each other, as under a buffered
shuffle, decode each group about once; a global shuffle of rows decodes one group per row.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import numpy as np

from dlo_framework.data.remote import ByteFile
from dlo_framework.data.tar_shard import SeekableBytes
from dlo_framework.errors import DloError, did_you_mean

#: Bytes of decoded row groups that a file keeps, at least one group.
_KEPT = 64 << 20


class ParquetShard:
    """One Parquet file.

    Args:
        file: File to read.

    Raises:
        DloError: If pyarrow is missing, or it is not a Parquet file.
    """

    def __init__(self, file: ByteFile) -> None:
        try:
            import pyarrow
            import pyarrow.parquet
        except ImportError as error:
            raise DloError(f"{file.name}: Parquet needs the package pyarrow; pip install pyarrow") from error
        self.file, self.name = file, file.name
        self._opened: Any = None
        self._groups: OrderedDict[tuple[int, str], Any] = OrderedDict()
        try:
            metadata = self._reader().metadata
        except (pyarrow.ArrowException, OSError) as error:
            raise DloError(f"{file.name} must be a Parquet file, got {str(error).splitlines()[0]}") from error
        rows = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
        #: First row of each row group, and the number of rows, int64 [groups + 1].
        self.starts = np.cumsum([0, *rows])
        self.columns: list[str] = self._reader().schema_arrow.names

    def __len__(self) -> int:
        return int(self.starts[-1])

    def check_column(self, column: str) -> None:
        """Checks that there is a column; a nested one is ``image.bytes``.

        Raises:
            DloError: If there is none of this name.
        """
        if column.partition(".")[0] not in self.columns:
            raise DloError(
                f"column must be one of {', '.join(self.columns)} for {self.name}, got {column!r}"
                f"{did_you_mean(column, self.columns)}"
            )

    def group(self, number: int, column: str) -> Any:
        """Returns a column of a row group, a pyarrow array."""
        key = (number, column)
        found = self._groups.pop(key, None)
        if found is None:
            table = self._reader().read_row_group(number, columns=[column])
            found = table.column(0).combine_chunks()
            for part in column.split(".")[1:]:
                found = found.field(part)
        self._groups[key] = found
        while len(self._groups) > 1 and sum(each.nbytes for each in self._groups.values()) > _KEPT:
            self._groups.popitem(last=False)
        return found

    def read(self, index: int, column: str) -> Any:
        """Returns a column's value in a row, a pyarrow scalar."""
        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        return self.group(number, column)[index - int(self.starts[number])]

    def group_range(self, index: int) -> tuple[int, int]:
        """Returns the offset and size in the file of the row group of a row."""
        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        group = self._reader().metadata.row_group(number)
        starts, ends = [], []
        for place in range(group.num_columns):
            column = group.column(place)
            start = column.dictionary_page_offset or column.data_page_offset
            starts.append(start)
            ends.append(start + column.total_compressed_size)
        return min(starts), max(ends) - min(starts)

    def stamp(self) -> str:
        """Returns a string that changes when the file does."""
        return str(getattr(self.file, "stamp", lambda: self.name)())

    def _reader(self) -> Any:
        if self._opened is None:
            import pyarrow
            import pyarrow.parquet

            source = pyarrow.PythonFile(io.BufferedReader(SeekableBytes(self.file), 1 << 20), mode="r")
            self._opened = pyarrow.parquet.ParquetFile(source)
        return self._opened

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_opened": None, "_groups": OrderedDict()}
