"""Estimates compiled code: neighbouring operations are one kernel, and only what other kernels need is stored.

A kernel ends after a reduction, since what follows needs its result over all of a dim. A cast has no kernel of its own:
each kernel that reads its result reads its source, and a normalisation writes its result in the dtype to which it is
cast for a matrix product.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

import torch

from dlo_plugins.planner.kernel_kind import Kind, kind_of_fused
from dlo_plugins.planner.recorded_operation import Operation
from dlo_plugins.planner.work import Amount, Kernel

_aten = torch.ops.aten
#: Operators after which a kernel ends.
_REDUCTIONS = {
    *(_aten._softmax, _aten._log_softmax, _aten._softmax_backward_data, _aten._log_softmax_backward_data),
    *(_aten.native_layer_norm, _aten.native_layer_norm_backward, _aten.native_group_norm, _aten.native_batch_norm),
    *(_aten.mean, _aten.sum, _aten.var, _aten.amax, _aten.logsumexp, _aten.linalg_vector_norm),
}


@dataclass(frozen=True)
class Fusion:
    """Kernels of a forward or a backward.

    Attributes:
        kernels: Kernels other than matrix products.
        internal: Numbers of the storages that no kernel but their own needs.
        kernel_of: Kernel of each internal storage; a cast's result has one of its own.
        sources: Storages that each kernel reads from outside: number, bytes, and whether tensor parallelism divides it.
    """

    kernels: tuple[Kernel, ...]
    internal: frozenset[int]
    kernel_of: Mapping[int, int]
    sources: Mapping[int, tuple[tuple[int, int, bool], ...]]

    def saved(self, sizes: Mapping[int, tuple[int, bool]], known: set[int]) -> Amount:
        """Returns the bytes that compiled code saves of what autograd would save.

        A kernel's internal results are computed again from what the kernel reads, where that takes less memory.

        Args:
            sizes: Bytes that autograd saves, and whether tensor parallelism divides them, by number.
            known: Numbers of storages that are in memory anyway.
        """
        found = {
            number: entry for number, entry in sizes.items() if number not in self.internal and number not in known
        }
        by_kernel: dict[int, dict[int, tuple[int, bool]]] = {}
        for number, entry in sizes.items():
            if number in self.internal and number not in known:
                by_kernel.setdefault(self.kernel_of[number], {})[number] = entry
        for kernel, own in by_kernel.items():
            reads = self.sources.get(kernel, ())
            sources = {n: (size, inside) for n, size, inside in reads if n not in found and n not in known}
            is_less = sum(size for size, _ in sources.values()) < sum(size for size, _ in own.values())
            found |= sources if is_less else own
        amounts = [0.0, 0.0]
        for size, is_inside in found.values():
            amounts[not is_inside] += size
        return Amount(*amounts)


def fuse(operations: Iterable[Operation], kept: set[int]) -> Fusion:
    """Returns the kernels of compiled code.

    Args:
        operations: Operations in order.
        kept: Numbers of the storages that are outputs: they are always written.
    """
    inlined, casts = _inline_casts(list(operations), kept)
    group, maker, users = _groups(inlined)
    seen = set[tuple[int, int]]()
    moved: dict[int, list[float]] = {}
    kinds: dict[int, set[Kind]] = {}
    internal: set[int] = set(casts)
    reads: dict[int, dict[int, tuple[int, int, bool]]] = {}
    inside = {number: op.is_inside for op in inlined for number in op.writes}
    for index, op in enumerate(inlined):
        if op.product is not None:
            continue
        own = group[index]
        amounts = moved.setdefault(own, [0.0, 0.0])
        kinds.setdefault(own, set()).add(op.kind)
        for number, size in op.reads.items():
            before = maker.get(number)
            is_outer = before is None or group[before] != own
            if is_outer and (own, number) not in seen:
                seen.add((own, number))
                amounts[not op.is_inside] += size
                reads.setdefault(own, {})[number] = (number, size, inside.get(number, False))
        for number, size in op.writes.items():
            apart = any(group[user] != own for user in users.get(number, ()))
            if not apart and number not in kept:
                internal.add(number)
            elif (own, -number - 1) not in seen:
                seen.add((own, -number - 1))
                amounts[not op.is_inside] += size
    kernel_of = {number: group[at] for number, at in maker.items() if number in internal and number not in casts}
    sources = {kernel: tuple(found.values()) for kernel, found in reads.items()}
    sources |= {len(inlined) + number: (source,) for number, source in casts.items()}
    kernel_of |= {number: len(inlined) + number for number in casts}
    kernels = tuple(Kernel(kind_of_fused(kinds[own]), Amount(*amounts)) for own, amounts in moved.items())
    return Fusion(kernels, frozenset(internal), kernel_of, sources)


def _groups(operations: list[Operation]) -> tuple[list[int], dict[int, int], dict[int, set[int]]]:
    """Returns each operation's kernel, and the makers and users of each storage."""
    parent = list(range(len(operations)))

    def root(index: int) -> int:
        while parent[index] != index:
            index = parent[index]
        return index

    maker: dict[int, int] = {}
    users: dict[int, set[int]] = {}
    for index, op in enumerate(operations):
        for number in op.reads:
            before = maker.get(number)
            if op.product is None and before is not None and _goes_on(operations[before], op):
                parent[root(before)] = root(index)
            users.setdefault(number, set()).add(index)
        maker |= dict.fromkeys(op.writes, index)
    return [root(index) for index in range(len(operations))], maker, users


def _goes_on(operation: Operation, after: Operation) -> bool:
    """Returns whether a kernel goes on from an operation to one that reads its result."""
    if operation.product is not None:
        return False
    return operation.packet not in _REDUCTIONS or (operation.kind == "norm" and after.kind == "cast")


def _inline_casts(
    operations: list[Operation], kept: set[int]
) -> tuple[list[Operation], dict[int, tuple[int, int, bool]]]:
    """Returns the operations without casts that only kernels read, and the source of each cast's result."""
    of_products = {number for op in operations if op.product is not None for number in op.reads}
    casts: dict[int, tuple[int, int, bool]] = {}
    found = []
    for op in operations:
        reads = {}
        for number, size in op.reads.items():
            source = casts.get(number)
            reads[source[0] if source else number] = source[1] if source else size
        written = next(iter(op.writes), -1)
        if op.packet is _aten._to_copy and len(reads) == 1 and written not in of_products | kept:
            number, size = next(iter(reads.items()))
            casts[written] = (number, size, op.is_inside)
        else:
            found.append(replace(op, reads=reads))
    return found, casts
