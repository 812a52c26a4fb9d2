"""Compressed averaging by its definition, in one process."""

import torch
from torch import Tensor

from dlo_plugins.compression.compressed_all_reduce import BlockLayout, block_scales, decompress, pack_signs


def compress(values: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Returns what is sent in place of ``values`` [n]: their packed signs [n / 8], and a scale a block [b]."""
    return pack_signs(values), block_scales(values, counts)


def average_in_one_process(
    inputs: list[Tensor], worker_errors: list[Tensor], server_errors: list[Tensor], layout: BlockLayout
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """Returns the mean, and the new worker and server errors, by the definition: every rank's part in turn.

    What :class:`CompressedAllReduce` computes on several ranks.

    Args:
        inputs: each rank's values, flat, [numel of the layout], zero where there is no tensor.
        worker_errors: each rank's, of the same layout.
        server_errors: each rank's, [chunk].
        layout: where tensors stand.
    """
    counts, padding = layout.counts(), layout.padding()
    workers: list[Tensor] = []
    decoded: list[Tensor] = []
    for value, error in zip(inputs, worker_errors, strict=True):
        corrected = value + error
        decoded.append(decompress(*compress(corrected, counts)))
        workers.append((corrected - decoded[-1]).index_fill(0, padding, 0.0))
    chunks, servers = [], []
    for rank, error in enumerate(server_errors):
        here = slice(rank * layout.chunk, (rank + 1) * layout.chunk)
        corrected = error.clone()
        for value in decoded:
            corrected += value[here] / len(inputs)
        of_chunk = counts[rank * layout.blocks : (rank + 1) * layout.blocks]
        chunks.append(decompress(*compress(corrected, of_chunk)))
        own = padding[(padding >= here.start) & (padding < here.stop)] - here.start
        servers.append((corrected - chunks[-1]).index_fill(0, own, 0.0))
    return torch.cat(chunks).index_fill(0, padding, 0.0), workers, servers
