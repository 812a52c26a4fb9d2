"""Measures the machine that this process runs on for a config's model, and writes a machine file.

Products are measured in the shapes that the model's plans have, and kernels of each kind in several sizes. Of the time
of a block, what its products leave is that of its other operations: one factor on the bandwidths of all kinds and the
cost of a kernel are fitted to it, by least squares over blocks and numbers of rows, for forward and backward apart.
"""

from __future__ import annotations

import copy
import datetime
import os
import platform
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._pytree import tree_map

from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_plugins.planner.kernel_kind import Kind
from dlo_plugins.planner.kernel_rates import KernelRates
from dlo_plugins.planner.machine import ProductTable
from dlo_plugins.planner.model_profile import ROWS, ModelProfile
from dlo_plugins.planner.rank_measurement import BlockCall, RankMeasurement, Shape, Wanted, measure_rank
from dlo_plugins.planner.work import Part, Product, Share, Work

#: Products beyond those of the plans, for other models of this machine.
_GRID = (64, 256, 1024, 4096)
_LARGEST = 2e9  # Operations of a product of the grid.
_MOST_RANKS = 8
#: Largest factor between the bandwidth of kernels in blocks and alone.
_MOST_APART = 8.0


class BlockCalls:
    """Collects the calls of a model's blocks while it is profiled.

    Args:
        model: Model on the meta device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model, self.found = model, list[BlockCall]()

    def __call__(self, name: str, args: Any, kwargs: Any) -> None:
        """Adds a call."""
        with unset_fake_temporarily():
            block = copy.deepcopy(self._model.get_submodule(name))
            self.found.append(BlockCall(name, block, tree_map(_on_meta, (args, kwargs)), ROWS))


def _on_meta(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):  # An object may hold fake tensors.
        return leaf if isinstance(leaf, int | float | str | torch.dtype) else None
    return torch.empty(leaf.shape, dtype=leaf.dtype, device="meta").requires_grad_(leaf.requires_grad)


def local_ranks(gpus: int, device: str) -> int:
    """Returns the number of ranks that measure: those of the plan that this machine can have."""
    return min(gpus, torch.cuda.device_count() if device == "cuda" else _MOST_RANKS)


def measure_machine(
    profile: ModelProfile, calls: Sequence[BlockCall], dtype: str, gpus: int, batch: int, seconds: float, device: str
) -> dict[str, Any]:
    """Returns the content of a machine file.

    Args:
        profile: Profile of the config's model.
        calls: Calls of its blocks.
        dtype: Dtype of products.
        gpus: Number of ranks of the plan.
        batch: Rows of a step on all ranks.
        seconds: Time that measuring may take, approximately.
        device: Type of the device.

    Raises:
        DloError: No rank can be measured.
    """
    ranks = local_ranks(gpus, device)
    rows = sorted({max(1, batch // ranks // part) for part in (1, 2, 4)})
    attention = next((p for part in profile.parts for p, _ in part.forward.products if p.is_attention), None)
    wanted = Wanted(
        device, getattr(torch, dtype), product_shapes(profile, ranks, rows),
        _attention_shape(attention, rows), calls, rows, seconds,
    )  # fmt: skip
    threads = max(1, (os.cpu_count() or 1) // ranks)
    backend = "nccl" if device == "cuda" else "gloo"
    try:
        found = run_distributed(
            measure_rank, ranks, wanted, timeout=10 * seconds + 120, group_timeout=60, backend=backend, threads=threads
        )
    except RuntimeError as error:
        last = str(error).strip().splitlines()[-1]
        raise DloError(f"plan: --measure must be able to run {ranks} ranks here, got {last}; use --machine") from error
    return machine_content(profile, found, wanted, dtype, threads)


def product_shapes(profile: ModelProfile, ranks: int, rows: Sequence[int]) -> list[Shape]:
    """Returns the shapes of the products of a model's plans, those with the most operations first, then a grid."""
    weights: dict[Shape, float] = {}
    for tp in (size for size in profile.tp if ranks % size == 0):
        # Ranks that share layers have the rows of all of them.
        for count in sorted({own * by for own in rows for by in (1, tp)}):
            for part in profile.parts:
                for work in (part.forward, part.backward):
                    for product, times in work.products:
                        if not product.is_attention:
                            own = product.on(Share(count, tp, tp > 1))
                            weights[_shape(own)] = weights.get(_shape(own), 0.0) + times * own.flops
    found = sorted(weights, key=lambda shape: -weights[shape])
    grid = [(m, n, k, 1, False) for m in _GRID for n in _GRID for k in _GRID if 2.0 * m * n * k <= _LARGEST]
    return [*found, *(shape for shape in grid if shape not in weights)]


def _shape(product: Product) -> Shape:
    m, n, k, batch = (max(1, round(size)) for size in (product.m, product.n, product.k, product.batch))
    return m, n, k, batch, product.tokens == "k"


def _attention_shape(attention: Product | None, rows: Sequence[int]) -> tuple[int, int, int, bool] | None:
    if attention is None:
        return None
    own = attention.on(Share(rows[len(rows) // 2]))
    return max(1, round(own.batch)), round(own.m), round(own.k), own.fraction < 1


def machine_content(
    profile: ModelProfile, ranks: Sequence[RankMeasurement], wanted: Wanted, dtype: str, threads: int
) -> dict[str, Any]:
    """Returns a machine file's content from the measurements of all ranks."""
    name = platform.node() or "measured"
    source = f"measured on {name}, {len(ranks)} ranks, {datetime.date.today()}"

    def constant(value: Any, what: str) -> dict[str, Any]:
        return {"value": value, "source": f"{source}: {what}"}

    shapes = [shape for shape in wanted.products if all(shape in rank.products for rank in ranks)]
    rates = {
        shape: 2.0 * shape[0] * shape[1] * shape[2] * shape[3] / _median(rank.products[shape] for rank in ranks)
        for shape in shapes
    }
    table, best = ProductTable(rates), max(rates.values())
    copied = _median(rank.copy for rank in ranks)
    attention = _attention_rates(ranks, wanted, best)
    ratios = _kind_ratios(ranks, copied)
    kinds = KernelRates({kind: tuple(found.items()) for kind, found in ratios.items()})
    forward, backward = (_fit(profile, ranks, table, best, attention, kinds, way) for way in (False, True))
    of_blocks = "of the blocks without their products" if ranks[0].blocks else "as a copy: the model has no blocks"
    memory = _memory(wanted.device, len(ranks))
    reserved = "a rank before it allocates" if wanted.device == "cpu" else "device memory outside torch's allocator"
    content: dict[str, Any] = {
        "name": name,
        "device": wanted.device,
        "memory": constant(memory, "memory of the machine over its ranks"),
        "reserved": constant(float(max(rank.process for rank in ranks)), reserved),
        "fragmentation": constant(0.05, "not measured; 1 to 5% is usual"),
        "ranks_per_node": len(ranks),
        "peak": {dtype: constant(best, "the fastest product")},
        "bandwidth": constant(copied, "copy of 64 MB"),
        "bandwidth_efficiency": constant(forward[0] / copied, f"forward {of_blocks}"),
        "launch": constant(forward[1], f"forward {of_blocks}"),
        "backward": {
            "bandwidth": constant(backward[0], f"backward {of_blocks}"),
            "launch": constant(backward[1], f"backward {of_blocks}"),
        },
        "kinds": {
            kind: constant(found, f"{kind} kernels over a large copy, by bytes") for kind, found in ratios.items()
        },
        "product": {
            "efficiency": 1.0, "units": 1, "tile_rows": 16, "tile_columns": 16, "ramp": 1.0,
            "table": constant([[*map(int, shape), rate] for shape, rate in rates.items()], "products by shape"),
        },
        "attention": {
            "forward": constant(attention[0], "fused attention, forward"),
            "backward": constant(attention[1], "fused attention, backward"),
        },
        "optimizer": constant(_median(rank.optimizer for rank in ranks), "AdamW of tensors like the blocks'"),
        "links": _links(ranks, constant),
        "overlap_slowdown": constant(_median(rank.slowdown for rank in ranks), "computation beside an all-reduce"),
    }  # fmt: skip
    if wanted.device == "cpu" or len(ranks) == 1:
        content["overlap_slowdown"]["source"] = "assumed: communication and computation take turns"
    if wanted.device == "cpu":
        content["cores"] = max(1, (os.cpu_count() or 1) // threads)
    return content


def _median(values: Any) -> float:
    return float(statistics.median(values))


def _memory(device: str, ranks: int) -> float:
    if device == "cuda":
        return float(torch.cuda.get_device_properties(0).total_memory)
    return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks)


def _attention_rates(ranks: Sequence[RankMeasurement], wanted: Wanted, peak: float) -> tuple[float, float]:
    """Returns the fractions of the peak that fused attention reaches; those of a usual kernel where it has none."""
    if wanted.attention is None:
        return 0.4, 0.3
    heads, length, width, causal = wanted.attention
    flops = 2.0 * heads * length * length * width * (0.5 if causal else 1.0)
    measured = [rank.attention for rank in ranks if rank.attention is not None]
    forward, backward = (_median(pair[way] for pair in measured) for way in (0, 1))
    return 2 * flops / forward / peak, 5 * flops / backward / peak


def _kind_ratios(ranks: Sequence[RankMeasurement], copied: float) -> dict[Kind, dict[float, float]]:
    """Returns the bandwidths of kinds of kernels over a large copy's, by bytes in ascending order."""
    found: dict[Kind, dict[float, float]] = {}
    for kind, size in sorted(ranks[0].kinds):
        rates = [rank.kinds[kind, size] for rank in ranks if (kind, size) in rank.kinds]
        found.setdefault(kind, {})[size] = _median(rates) / copied
    return found


def _fit(
    profile: ModelProfile,
    ranks: Sequence[RankMeasurement],
    table: ProductTable,
    peak: float,
    attention: tuple[float, float],
    kinds: KernelRates,
    backward: bool,
) -> tuple[float, float]:
    """Returns the bytes a second of a large copy beside the blocks' products, and the seconds of a kernel."""
    parts = {part.name: part for part in profile.blocks}
    rows, times = [], []
    for name, count in ranks[0].blocks:
        if not all((name, count) in rank.blocks for rank in ranks):
            continue
        part: Part = parts[name]
        work: Work = part.backward if backward else part.forward
        share = Share(count)
        own = sum(
            times_ * product.on(share).flops
            / (peak * attention[backward] if product.is_attention else table.rate(product.on(share)))
            for product, times_ in work.products
        )  # fmt: skip
        measured = _median(rank.blocks[name, count][backward] for rank in ranks)
        copied = sum(times_ * kinds.copied(kernel, share) for kernel, times_ in work.eager)
        rows.append([copied / measured, work.kernels / measured])
        times.append(max(measured - own, 0.02 * measured) / measured)
    if not rows:
        return _median(rank.copy for rank in ranks), 1e-5
    matrix, right = torch.tensor(rows, dtype=torch.float64), torch.tensor(times, dtype=torch.float64)
    alone = 1 / _median(rank.copy for rank in ranks)
    a_byte, a_kernel = torch.linalg.lstsq(matrix, right[:, None]).solution[:, 0].tolist()
    if a_kernel < 0:
        a_kernel = 0.0
        a_byte = float(matrix[:, 0] @ right / matrix[:, 0].square().sum())
    if not alone / _MOST_APART <= a_byte <= alone * _MOST_APART:
        # Too little of the blocks' time depends on bytes: kernels take what they took alone.
        a_byte = alone
        left = right - alone * matrix[:, 0]
        a_kernel = max(0.0, float(matrix[:, 1] @ left / matrix[:, 1].square().sum()))
    return 1 / a_byte, max(a_kernel, 1e-9)


def _links(ranks: Sequence[RankMeasurement], constant: Any) -> dict[str, Any]:
    """Returns the links by kind and number of ranks: times by size; latency and bandwidth from the extreme sizes."""
    times: dict[tuple[str, int], dict[int, float]] = {}
    for key in ranks[0].collectives:
        kind, size, length = key
        times.setdefault((kind, size), {})[length] = _median(rank.collectives[key] for rank in ranks)
    links: dict[str, Any] = {}
    for (kind, size), known in times.items():
        small, large = min(known), max(known)
        steps = 1 if kind == "send" else size - 1
        passed = 1.0 if kind == "send" else (size - 1) / size
        factor = 2 if kind in ("all_reduce", "region_forward", "region_backward") else 1
        a_byte = max(known[large] - known[small], 0.01 * known[large]) / (large - small)
        latency = max(known[small] - a_byte * small, 1e-7)
        links.setdefault(kind, {})[size] = {
            "bandwidth": constant(factor * passed / a_byte, f"{kind} of {large} bytes"),
            "latency": constant(latency / steps / factor, f"{kind} of {small} bytes"),
            "times": constant(_rising(known), f"{kind} by bytes"),
        }
    general = links.get("all_reduce", {})
    last = general[max(general)] if general else {
        "bandwidth": constant(1e10, "one rank: not measured"), "latency": constant(1e-6, "one rank: not measured")
    }  # fmt: skip
    return {"node": last, **links}


def _rising(times: dict[int, float]) -> list[list[float]]:
    """Returns bytes and seconds in ascending order; more bytes never take less time."""
    sizes = sorted(times)
    return [[float(size), max(times[other] for other in sizes[: at + 1])] for at, size in enumerate(sizes)]


def write_machine(content: dict[str, Any], path: Path) -> None:
    """Writes a machine file.

    Raises:
        DloError: The file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=120))
    except OSError as error:
        raise DloError(
            f"plan: --measure must write {path}, got {error.strerror}; set --out to another folder"
        ) from error
