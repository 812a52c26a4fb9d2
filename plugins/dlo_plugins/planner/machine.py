"""Machine: rates of its ranks and links, read from a file in which each constant names its source."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from dlo_framework.errors import DloError, did_you_mean
from dlo_framework.yaml_text import read_yaml
from dlo_plugins.planner.kernel_kind import Kind
from dlo_plugins.planner.kernel_rates import KernelRates, read_rates
from dlo_plugins.planner.work import Product, Share, Work

#: Kinds of communication that a file may have links of their own for, by number of ranks.
_KINDS = ("all_gather", "reduce_scatter", "all_reduce", "region_forward", "region_backward", "send")
_FOLDER = resources.files("dlo_plugins.planner").joinpath("machines")


@dataclass(frozen=True)
class Link:
    """Link between ranks, of a node or across nodes.

    Attributes:
        bandwidth: Bytes a second that one rank sends in a collective (`busbw` of nccl-tests), by number of nodes.
        latency: Seconds of one step of a ring.
        times: Measured bytes of the full tensor and seconds, in ascending order; None for latency and bandwidth.
    """

    bandwidth: Mapping[int, float]
    latency: float
    times: tuple[tuple[float, float], ...] | None = None

    def measured_seconds(self, size: float) -> float | None:
        """Returns the time for a number of bytes between measured ones; None where nothing was measured.

        Between two sizes it is linear; beyond the largest, each byte takes as long as there.
        """
        if self.times is None:
            return None
        (smallest, least), (largest, most) = self.times[0], self.times[-1]
        if size <= smallest:
            return least
        if size >= largest:
            return most * size / largest
        after = next(n for n, (known, _) in enumerate(self.times) if known >= size)
        (low, fast), (high, slow) = self.times[after - 1 : after + 1]
        return fast + (slow - fast) * (size - low) / (high - low)

    def rate(self, nodes: int) -> float:
        """Returns the bandwidth for a number of nodes, interpolated on a logarithmic scale."""
        if len(self.bandwidth) == 1:
            return next(iter(self.bandwidth.values()))
        known = sorted(self.bandwidth)
        above = next((n for n in known if n >= nodes), known[-1])
        below = max((n for n in known if n <= nodes), default=known[0])
        if above == below:
            return self.bandwidth[above]
        at = (math.log(nodes) - math.log(below)) / (math.log(above) - math.log(below))
        return math.exp((1 - at) * math.log(self.bandwidth[below]) + at * math.log(self.bandwidth[above]))


@dataclass(frozen=True)
class Host:
    """Host of a device, to which activations can be copied.

    Attributes:
        bandwidth: Bytes a second of the copies in each direction, while all devices of the node copy.
        memory: Bytes of page-locked memory that each device may take.
    """

    bandwidth: float
    memory: float


@dataclass(frozen=True)
class ProductTable:
    """Measured rates of matrix products by shape.

    Attributes:
        rates: Shapes (m, n, k, batch, whether the left operand is transposed), and operations a second of each.
    """

    rates: Mapping[tuple[int, int, int, int, bool], float]

    def rate(self, product: Product) -> float:
        """Returns the operations a second of a product: those of the nearest shapes, weighted by their distance."""
        at = [math.log2(max(size, 1.0)) for size in (product.m, product.n, product.k, product.batch)]
        transposed = product.tokens == "k"
        near = sorted((_distance(at, shape, transposed), rate) for shape, rate in self.rates.items())[:3]
        if near[0][0] < 1e-3:
            return near[0][1]
        weights = [1 / distance**2 for distance, _ in near]
        logarithm = sum(w * math.log(rate) for w, (_, rate) in zip(weights, near, strict=True))
        return math.exp(logarithm / sum(weights))


def _distance(at: Sequence[float], shape: tuple[int, int, int, int, bool], transposed: bool) -> float:
    """Returns the distance of two shapes on a logarithmic scale."""
    apart = [abs(a - math.log2(size)) for a, size in zip(at, shape[:4], strict=True)]
    return sum(apart) + 0.5 * (transposed != shape[4])


@dataclass(frozen=True)
class Machine:
    """Machine of equal nodes with equal ranks.

    Attributes:
        name: Name of the machine.
        device: Type of its devices, `cuda` or `cpu`: which kernels attention, dropout and the loss have.
        memory: Bytes of a rank's memory.
        reserved: Bytes that the device's context and its libraries take.
        fragmentation: Fraction by which the allocator exceeds the tensors.
        ranks_per_node: Number of ranks of a node.
        peak: Floating-point operations a second, by dtype.
        bandwidth: Bytes a second between memory and chip, by data sheet.
        bandwidth_efficiency: Fraction of it that kernels reach.
        launch: Seconds of a kernel beyond its work.
        efficiency: Fraction of the peak that the best matrix product reaches.
        units: Number of processors that compute one tile of a product each.
        tile: Rows and columns of the largest tile.
        ramp: Inner dim of a product whose start and end take as long as its work.
        attention: Fractions of the peak that fused attention reaches, in forward and in backward.
        node: Link of ranks of one node.
        network: Link of ranks on different nodes; None for a machine of one node.
        host: Host of a device; None where nothing is offloaded.
        overlap_slowdown: Factor by which communication slows computation that runs at the same time; 2 where they take
            turns.
        sources: Source of each constant, by key.
        cores: Number of processors that the ranks of a node share; 0 where each rank has its own.
        table: Measured products; None for the formula of tiles.
        backward: Bytes a second and seconds of a kernel in backward, where they differ from forward's.
        optimizer: Seconds of an optimizer's step for a byte of parameters; None for the bytes that Adam moves.
        collectives: Links by kind of communication and number of ranks, of one node; others are as `node`.
            `region_forward` and `region_backward` are all that a region divided by `tp` adds to its computation with
            tokens that its ranks share.
        kinds: Bandwidths of kinds of kernels, relative to `bandwidth` times `bandwidth_efficiency`.
    """

    name: str
    memory: float
    reserved: float
    fragmentation: float
    ranks_per_node: int
    peak: Mapping[str, float]
    bandwidth: float
    bandwidth_efficiency: float
    launch: float
    efficiency: float
    units: int
    tile: tuple[int, int]
    ramp: float
    attention: tuple[float, float]
    node: Link
    network: Link | None
    overlap_slowdown: float
    sources: Mapping[str, str]
    device: str = "cuda"
    cores: int = 0
    table: ProductTable | None = None
    backward: tuple[float, float] | None = None
    optimizer: float | None = None
    collectives: Mapping[str, Mapping[int, Link]] = field(default_factory=dict)
    host: Host | None = None
    kinds: KernelRates = field(default_factory=KernelRates)

    @property
    def contention(self) -> float:
        """Number of ranks that share a processor: how much longer each takes if all compute."""
        return max(1.0, self.ranks_per_node / self.cores) if self.cores else 1.0

    def rate(self, dtype: str) -> float:
        """Returns the peak of a dtype.

        Raises:
            DloError: The machine does not compute in this dtype.
        """
        if dtype not in self.peak:
            raise DloError(
                f"machine {self.name} must have a peak for {dtype}, got {', '.join(self.peak)}; set the trainer's"
                f" precision to one of these, or add peak.{dtype} to the machine's file"
            )
        return self.peak[dtype]

    def product_efficiency(self, m: float, n: float, k: float, batch: float = 1.0) -> float:
        """Returns the fraction of the peak that a matrix product reaches.

        Tiles that do not fill the processors' last wave are lost, and so are the start and the end of each tile. Of the
        tile's sizes down to an eighth, the best is taken; smaller tiles load more per operation.
        """
        best = 0.0
        for rows, columns, quality in _tiles(self.tile):
            waves = math.ceil(math.ceil(m / rows) * math.ceil(n / columns) * max(batch, 1.0) / self.units)
            filled = m * n * max(batch, 1.0) / (waves * self.units * rows * columns)
            best = max(best, filled * quality)
        return self.efficiency * best * k / (k + self.ramp)

    def product_seconds(self, product: Product, dtype: str, *, backward: bool = False) -> float:
        """Returns the time of a matrix product."""
        if product.is_attention:
            rate = self.rate(dtype) * self.attention[backward]
            return self.contention * (product.flops * self._padding(product) / rate + self.launch)
        if self.table is not None:
            return self.contention * product.flops / self.table.rate(product)
        moving = product.bytes / (self.bandwidth * self.bandwidth_efficiency)
        computing = min(self._computing(product, dtype, split) for split in self._splits(product))
        return self.contention * (max(computing, moving) + self.launch)

    def _computing(self, product: Product, dtype: str, split: int) -> float:
        """Returns the time of a product whose inner dim is computed in slices, of which each has tiles of its own.

        Slices write their partial sums in single precision, and one reads them.
        """
        efficiency = self.product_efficiency(product.m, product.n, product.k / split, product.batch * split)
        found = product.flops / (self.rate(dtype) * efficiency)
        if split == 1:
            return found
        partial = 2 * 4 * split * product.batch * product.m * product.n
        return found + partial / (self.bandwidth * self.bandwidth_efficiency)

    def _splits(self, product: Product) -> Iterable[int]:
        """Returns the numbers of slices that a kernel may have: several where its tiles leave processors idle."""
        tiles = math.ceil(product.m / self.tile[0]) * math.ceil(product.n / self.tile[1]) * max(product.batch, 1.0)
        most = min(_WAVES * self.units / tiles, product.k / (_SLICE * self.tile[1])) if tiles < self.units else 1
        return range(1, max(1, int(most)) + 1)

    def _padding(self, product: Product) -> float:
        """Returns the work of fused attention over its operations: a GPU's kernels compute full tiles of scores."""
        if self.device == "cpu" or self.table is not None:
            return 1.0
        rows, columns = _ATTENTION_TILE
        full = math.ceil(product.m / rows) * rows * math.ceil(product.n / columns) * columns
        return full / (product.m * product.n)

    def work_seconds(self, work: Work, share: Share, dtype: str, *, fused: bool, backward: bool = False) -> float:
        """Returns the time of a rank's share of a work.

        Args:
            work: Work of one row.
            share: Share of the rank.
            dtype: Dtype of the products.
            fused: Whether neighbouring operations are one kernel.
            backward: Whether it is a backward.
        """
        found = sum(
            count * self.product_seconds(product.on(share), dtype, backward=backward)
            for product, count in work.products
        )
        bandwidth, launch = self.bandwidth * self.bandwidth_efficiency, self.launch
        if backward and self.backward is not None:
            bandwidth, launch = self.backward
        others = sum(
            count * (self.kinds.copied(kernel, share) / bandwidth + launch)
            for kernel, count in (work.compiled if fused else work.eager)
        )
        return found + self.contention * others

    def optimizer_seconds(self, parameters: float, moved: float) -> float:
        """Returns the time of an optimizer's step.

        Args:
            parameters: Bytes of the parameters.
            moved: Bytes that Adam reads and writes for them.
        """
        if self.optimizer is not None:
            return self.contention * self.optimizer * parameters
        return self.moving_seconds(moved, "optimizer")

    def moving_seconds(self, moved: float, kind: Kind | None = None, kernels: int = 1) -> float:
        """Returns the time of operations that read and write a number of bytes.

        Args:
            moved: Bytes.
            kind: Kind of their kernels; None for the bandwidth of a large copy, as of sums in place.
            kernels: Number of kernels.
        """
        ratio = self.kinds.ratio(kind, moved / kernels) if kind else 1.0
        return self.contention * moved / (self.bandwidth * self.bandwidth_efficiency * ratio)

    def collective_seconds(
        self, size: float, ranks: int, spread: int, *, reduces_and_gathers: bool = False, kind: str = "all_gather"
    ) -> float:
        """Returns the time of an all-gather or a reduce-scatter; twice that for an all-reduce.

        Args:
            size: Bytes of the full tensor.
            ranks: Number of ranks of the group.
            spread: Distance between neighbouring ranks of the group in the numbering of all ranks.
            reduces_and_gathers: Whether it is an all-reduce.
            kind: Kind of the collective, unless it is an all-reduce.

        Raises:
            DloError: The group has ranks on several nodes, and the machine has no link between nodes.
        """
        if ranks == 1 or size == 0:
            return 0.0
        rate, latency = self.link_of(ranks, spread)
        own = self.collectives.get("all_reduce" if reduces_and_gathers else kind, {}).get(ranks)
        if own is not None and ranks * spread <= self.ranks_per_node:
            measured = own.measured_seconds(size)
            if measured is not None:
                return measured
            rate, latency = own.rate(1), own.latency
        return (1 + reduces_and_gathers) * (latency * (ranks - 1) + size * (ranks - 1) / ranks / rate)

    def region_seconds(self, size: float, ranks: int, beside: float, *, backward: bool, copies: bool = False) -> float:
        """Returns the time that communication adds to a region divided by `tp`, whose ranks share the tokens outside.

        Both passes gather one tensor and scatter the sum of another. Backward gathers the region's input once more,
        beside the products of its gradient.

        Args:
            size: Bytes of the full tensor.
            ranks: Number of ranks of the axis.
            beside: Seconds of these products.
            backward: Whether it is backward.
            copies: Whether tokens are copied into the order of rows once they are gathered, and back to be scattered.
        """
        own = self.collectives.get("region_backward" if backward else "region_forward", {}).get(ranks)
        measured = own.measured_seconds(size) if own is not None and ranks <= self.ranks_per_node else None
        if measured is not None:
            return measured
        found = self.collective_seconds(size, ranks, 1, reduces_and_gathers=True)
        found += (2 + backward) * self.moving_seconds(2 * size, "strided") * copies
        return found + self.exposed(self.collective_seconds(size, ranks, 1), beside) * backward

    def exposed(self, communication: float, computation: float) -> float:
        """Returns the time by which communication lengthens computation that runs at the same time."""
        slowed = (self.overlap_slowdown - 1) * min(communication, computation)
        return max(0.0, communication - computation) + slowed

    def link_of(self, ranks: int, spread: int) -> tuple[float, float]:
        """Returns the bytes a second of each rank of a group, and the seconds of a step.

        A ring crosses each node's network once, over the cards of all its ranks in the group.

        Args:
            ranks: Number of ranks of the group.
            spread: Distance between neighbouring ranks of the group in the numbering of all ranks.
        """
        if ranks * spread <= self.ranks_per_node:
            return self.node.rate(1), self.node.latency
        if self.network is None:
            raise DloError(
                f"machine {self.name} must have links.network to run on several nodes, got links.node alone; add"
                " links.network: {bandwidth: ..., latency: ...} to its file, or plan for one node"
            )
        local = max(1, min(ranks, self.ranks_per_node // spread))
        nodes = max(2, ranks // local)
        return min(self.node.rate(1), self.network.rate(nodes) * local), self.network.latency

    def send_seconds(self, size: float, spread: int) -> float:
        """Returns the time to send bytes to a rank at a distance."""
        link = self.node if spread < self.ranks_per_node or self.network is None else self.network
        if link is self.node and "send" in self.collectives:
            link = next(iter(self.collectives["send"].values()))
            measured = link.measured_seconds(size)
            if measured is not None:
                return measured
        return link.latency + size / link.rate(2 if link is self.network else 1)


#: Rows and columns of a tile of scores in FlashAttention-2's kernels, arXiv 2307.08691: at most 128 x 64 to 128 x 128.
_ATTENTION_TILE = (128, 64)
#: Of a product in slices: largest number of rounds of tiles, and fewest tiles' columns of a slice's inner dim.
_WAVES, _SLICE = 4, 4


def _tiles(largest: tuple[int, int]) -> list[tuple[int, int, float]]:
    """Returns the sizes of tiles, and the rate of each relative to the largest."""
    rows, columns = largest
    return [(rows, columns, 1.0), (columns, rows, 1.0), (rows, columns // 2, 0.95), (rows // 2, columns // 4, 0.7)]


def machine_names() -> list[str]:
    """Returns the names of the machines that come with dlo."""
    return sorted(entry.name.removesuffix(".yaml") for entry in _FOLDER.iterdir() if entry.name.endswith(".yaml"))


def load_machine(name: str) -> Machine:
    """Returns a machine by its name, or by the path of its file.

    Raises:
        DloError: No such machine exists, or its file lacks a constant.
    """
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
        if not path.is_file():
            raise DloError(f"machine must be a file that exists, got {name}; copy one of {_FOLDER}")
    elif name in machine_names():
        path = Path(str(_FOLDER.joinpath(f"{name}.yaml")))
    else:
        known = machine_names()
        hint = did_you_mean(name.lower(), known) or f"; set --machine {known[0]}"
        raise DloError(f"machine must be one of {', '.join(known)}, or a file, got {name}{hint}")
    content = read_yaml(path, "machine")
    if not isinstance(content, dict):
        raise DloError(
            f"machine must be a YAML file of constants, got {name} with {type(content).__name__}; correct it"
        )
    return parse_machine(content, name)


def parse_machine(content: Mapping[str, Any], file: str) -> Machine:
    """Returns the machine of a file's content.

    Args:
        content: Constants, each a number or `{value: ..., source: ...}`.
        file: Name of the file, for messages.

    Raises:
        DloError: A constant is missing, or no positive number.
    """
    read = _Reader(content, file)
    links = content.get("links")
    if not isinstance(links, dict) or "node" not in links:
        raise read.missing("links.node")
    peak = content.get("peak")
    if not isinstance(peak, dict) or not peak:
        raise read.missing("peak")
    return Machine(
        name=str(content.get("name", Path(file).stem)),
        memory=read("memory"),
        reserved=read("reserved"),
        fragmentation=read("fragmentation"),
        ranks_per_node=int(read("ranks_per_node")),
        peak={dtype: read(f"peak.{dtype}") for dtype in peak},
        bandwidth=read("bandwidth"),
        bandwidth_efficiency=read("bandwidth_efficiency"),
        launch=read("launch"),
        efficiency=read("product.efficiency"),
        units=int(read("product.units")),
        tile=(int(read("product.tile_rows")), int(read("product.tile_columns"))),
        ramp=read("product.ramp"),
        attention=(read("attention.forward"), read("attention.backward")),
        node=read.link("node"),
        network=read.link("network") if "network" in links else None,
        overlap_slowdown=read("overlap_slowdown"),
        sources=read.sources,
        device=read.device(),
        cores=int(read("cores")) if "cores" in content else 0,
        table=read.table() if "table" in (content.get("product") or {}) else None,
        backward=(read("backward.bandwidth"), read("backward.launch")) if "backward" in content else None,
        optimizer=read("optimizer") if "optimizer" in content else None,
        collectives={
            kind: {int(ranks): read.link(f"{kind}.{ranks}") for ranks in links[kind]}
            for kind in _KINDS
            if kind in links
        },
        host=Host(read("links.host.bandwidth"), read("links.host.memory")) if "host" in links else None,
        kinds=read_rates(content, file, read.sources),
    )


#: Entries of a file with several constants, for messages.
_ENTRIES = {
    "links.node": "{bandwidth: {value: ..., source: ...}, latency: {value: ..., source: ...}}",
    "peak": "{bfloat16: {value: ..., source: ...}}",
}


class _Reader:
    """Reads constants by dotted key, and collects their sources."""

    def __init__(self, content: Mapping[str, Any], file: str) -> None:
        self._content, self._file = content, file
        self.sources: dict[str, str] = {}

    def missing(self, key: str) -> DloError:
        """Returns the error for a missing constant."""
        entry = _ENTRIES.get(key, "{value: ..., source: ...}")
        return DloError(
            f"machine {self._file} must have {key}, got a file without it; add {key.rpartition('.')[2]}: {entry} there,"
            " or start from a copy of a machine that dlo has"
        )

    def find(self, key: str) -> Any:
        """Returns the entry of a key."""
        at: Any = self._content
        for word in key.split("."):
            if isinstance(at, dict) and word.isdigit() and int(word) in at:
                word = int(word)  # type: ignore[assignment]
            if not isinstance(at, dict) or word not in at:
                raise self.missing(key)
            at = at[word]
        if isinstance(at, dict) and "value" in at:
            self.sources[key] = str(at.get("source", ""))
            return at["value"]
        return at

    def __call__(self, key: str) -> float:
        """Returns a positive number."""
        value = self.find(key)
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = -1.0
        if not 0 < number < math.inf:
            raise DloError(f"machine {self._file}: {key} must be a positive number, got {value!r}; correct it")
        return number

    def device(self) -> str:
        """Returns the type of the devices; `cuda` where the file does not say."""
        found = str(self._content.get("device", "cuda"))
        if found not in ("cuda", "cpu"):
            raise DloError(f"machine {self._file}: device must be cuda or cpu, got {found!r}; correct it")
        return found

    def table(self) -> ProductTable:
        """Returns the measured products: rows of m, n, k, batch, 1 for a transposed left operand, and the rate."""
        rows = self.find("product.table")
        try:
            found = {(int(m), int(n), int(k), int(b), bool(t)): float(rate) for m, n, k, b, t, rate in rows}
        except (TypeError, ValueError):
            found = {}
        if not found or min(found.values()) <= 0 or min(min(shape[:4]) for shape in found) < 1:
            raise DloError(
                f"machine {self._file}: product.table must be rows of m, n, k, batch, 0 or 1, and operations a second,"
                " got other content; correct it, or remove it"
            )
        return ProductTable(found)

    def link(self, name: str) -> Link:
        """Returns a link; its bandwidth may be a mapping of numbers of nodes."""
        key = f"links.{name}.bandwidth"
        value = self.find(key)
        table = value if isinstance(value, dict) else {1: value}
        try:
            found = {int(nodes): float(rate) for nodes, rate in table.items()}
        except (TypeError, ValueError):
            found = {}
        if not found or min(found.values()) <= 0 or min(found) < 1:
            raise DloError(
                f"machine {self._file}: {key} must be bytes a second, or a mapping of numbers of nodes to them, got"
                f" {value!r}; correct it"
            )
        return Link(found, self(f"links.{name}.latency"), self.times(name))

    def times(self, name: str) -> tuple[tuple[float, float], ...] | None:
        """Returns a link's measured bytes and seconds; None where the file has none."""
        key = f"links.{name}.times"
        try:
            rows = self.find(key)
        except DloError:
            return None
        try:
            found = tuple(sorted((float(size), float(seconds)) for size, seconds in rows))
        except (TypeError, ValueError):
            found = ()
        if not found or min(min(row) for row in found) <= 0:
            raise DloError(
                f"machine {self._file}: {key} must be rows of bytes and seconds, got {rows!r}; correct it, or remove it"
            )
        return found
