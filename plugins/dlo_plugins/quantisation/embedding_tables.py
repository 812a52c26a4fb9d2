"""Tables of embeddings in int8, with a scale per row, whose lookup restores the rows that it reads.

torchao's own int8 tensor (0.18) restores the full table in each lookup. A layer that shares its weight with a table,
such as a language model's head, computes with the same int8 weight.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_plugins.quantisation.schemes import SCHEMES, quantised_weight


def find_tables(model: nn.Module) -> list[str]:
    """Returns the names of a model's embeddings whose table can be int8.

    Left out are those that renormalise rows in their lookup (`max_norm`), and those that share their table with a
    module other than an embedding or a linear layer.
    """
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding)
        and module.max_norm is None
        and all(isinstance(one, nn.Embedding | nn.Linear) and key == "weight" for one, key in users(model, module))
    ]


def users(model: nn.Module, table: nn.Embedding) -> list[tuple[nn.Module, str]]:
    """Returns the modules that have a table as a parameter, with the parameter's name in each."""
    return [
        (module, key)
        for module in model.modules()
        for key, parameter in module._parameters.items()
        if parameter is table.weight
    ]


@torch.no_grad()
def convert_tables(model: nn.Module, names: Sequence[str], plain: bool = False) -> None:
    """Replaces tables of embeddings by int8 tensors, in place, in all modules that share them.

    Args:
        model: Model with its weights.
        names: Names of the embeddings.
        plain: Whether to use torchao's class, which can be saved.
    """
    done: set[Tensor] = set()
    for name in names:
        table = model.get_submodule(name)
        assert isinstance(table, nn.Embedding)
        if table.weight in done:
            continue  # It shares the table of an earlier one.
        sharing = users(model, table)
        weight = nn.Parameter(quantised_table(table.weight.detach(), plain), requires_grad=False)
        for module, _ in sharing:
            module.weight = weight
        done.add(weight)


def quantised_table(weight: Tensor, plain: bool = False) -> Tensor:
    """Returns an int8 tensor of a table, [V, D], with a scale per row; of torchao's class if it is to be plain."""
    found: Any = quantised_weight(weight, SCHEMES["int8_weights"], group_size=0)
    if not plain:
        found = _table_class()(found.qdata, found.scale, found.block_size, found.dtype, zero_point=found.zero_point)
    return found


@functools.cache
def _table_class() -> Any:
    """Returns the class of tables, which needs torchao; its lookup replaces that of torchao 0.18."""
    from torchao.quantization import Int8Tensor

    class Int8Table(Int8Tensor):
        """torchao's int8 tensor, with a lookup of its own."""

    @Int8Table.implements(torch.ops.aten.embedding.default)
    def look_up(func: Any, types: Any, args: Any, kwargs: Any) -> Tensor:
        weight, ids = args[:2]
        return (F.embedding(ids, weight.qdata) * F.embedding(ids, weight.scale)).to(weight.dtype)

    return Int8Table
