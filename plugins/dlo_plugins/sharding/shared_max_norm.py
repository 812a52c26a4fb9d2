"""Embeddings with ``max_norm``: ranks that share their rows bound those that any of them uses, as one process does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dlo_framework.distributed.collectives import Communicator

#: Added to a norm before it divides, as torch does.
_EPSILON = 1e-7


def bound_rows_alike(module: nn.Module, ranks: Communicator) -> None:
    """Makes embeddings with ``max_norm`` bound the rows that any rank's inputs use, before each forward.

    torch bounds those of the rank's own inputs, so that ranks would write other values to one table.

    Args:
        module: Module with such embeddings, whose forwards all ranks call alike.
        ranks: Communicator of the ranks that share the tables, and have other inputs.
    """

    def bound(table: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        indices = args[0] if args else kwargs["input"]
        used = torch.zeros(table.num_embeddings, dtype=torch.uint8, device=indices.device)
        used[indices.reshape(-1)] = 1
        bound_rows(table.weight, ranks.maximum(used).bool(), table.max_norm, table.norm_type)

    for part in module.modules():
        if isinstance(part, nn.Embedding | nn.EmbeddingBag) and part.max_norm is not None:
            part.register_forward_pre_hook(bound, with_kwargs=True)


@torch.no_grad()
def bound_rows(weight: Tensor, used: Tensor, max_norm: float, norm_type: float) -> None:
    """Scales the rows that are used down to a norm, in place, as ``torch.embedding_renorm_`` does.

    Args:
        weight: Table [rows, features].
        used: Whether each row is used [rows].
        max_norm: Largest norm.
        norm_type: Order of the norm.
    """
    norms = torch.linalg.vector_norm(weight, norm_type, dim=1)
    scales = torch.where(used & (norms > max_norm), max_norm / (norms + _EPSILON), 1.0)
    weight.mul_(scales.to(weight.dtype).unsqueeze(1))
