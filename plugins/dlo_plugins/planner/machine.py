"""Machine: rates of its ranks and links, read from a file in which each constant names its source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from dlo_framework.errors import DloError, did_you_mean
from dlo_plugins.planner.work import Product, Share, Work

_FOLDER = resources.files("dlo_plugins.planner").joinpath("machines")


@dataclass(frozen=True)
class Link:
    """Link between ranks, of a node or across nodes.

    Attributes:
        bandwidth: Bytes a second that one rank sends in a collective (`busbw` of nccl-tests), by number of nodes.
        latency: Seconds of one step of a ring.
    """

    bandwidth: Mapping[int, float]
    latency: float

    def rate(self, nodes: int) -> float:
        """Returns the bandwidth for a number of nodes, interpolated on a logarithmic scale."""
        known = sorted(self.bandwidth)
        above = next((n for n in known if n >= nodes), known[-1])
        below = max((n for n in known if n <= nodes), default=known[0])
        if above == below:
            return self.bandwidth[above]
        at = (math.log(nodes) - math.log(below)) / (math.log(above) - math.log(below))
        return math.exp((1 - at) * math.log(self.bandwidth[below]) + at * math.log(self.bandwidth[above]))


@dataclass(frozen=True)
class Machine:
    """Machine of equal nodes with equal ranks.

    Attributes:
        name: Name of the machine.
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
        overlap_slowdown: Factor by which communication slows computation that runs at the same time.
        sources: Source of each constant, by key.
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
            return product.flops / (self.rate(dtype) * self.attention[backward]) + self.launch
        efficiency = self.product_efficiency(product.m, product.n, product.k, product.batch)
        moving = product.bytes / (self.bandwidth * self.bandwidth_efficiency)
        return max(product.flops / (self.rate(dtype) * efficiency), moving) + self.launch

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
        moved, kernels = (work.fused, work.fused_kernels) if fused else (work.moved, work.kernels)
        return found + moved.on(share) / (self.bandwidth * self.bandwidth_efficiency) + kernels * self.launch

    def collective_seconds(self, size: float, ranks: int, spread: int, *, reduces_and_gathers: bool = False) -> float:
        """Returns the time of an all-gather or a reduce-scatter; twice that for an all-reduce.

        Args:
            size: Bytes of the full tensor.
            ranks: Number of ranks of the group.
            spread: Distance between neighbouring ranks of the group in the numbering of all ranks.
            reduces_and_gathers: Whether it is an all-reduce.

        Raises:
            DloError: The group has ranks on several nodes, and the machine has no link between nodes.
        """
        if ranks == 1 or size == 0:
            return 0.0
        rate, latency = self.link_of(ranks, spread)
        return (1 + reduces_and_gathers) * (latency * (ranks - 1) + size * (ranks - 1) / ranks / rate)

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
        return link.latency + size / link.rate(2 if link is self.network else 1)


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
        text = path.read_text()
    elif name in machine_names():
        text = _FOLDER.joinpath(f"{name}.yaml").read_text()
    else:
        known = machine_names()
        hint = did_you_mean(name.lower(), known) or f"; set --machine {known[0]}"
        raise DloError(f"machine must be one of {', '.join(known)}, or a file, got {name}{hint}")
    try:
        content = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise DloError(f"machine must be a YAML file, got {name}: {error}; correct it") from error
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
    )


class _Reader:
    """Reads constants by dotted key, and collects their sources."""

    def __init__(self, content: Mapping[str, Any], file: str) -> None:
        self._content, self._file = content, file
        self.sources: dict[str, str] = {}

    def missing(self, key: str) -> DloError:
        """Returns the error for a missing constant."""
        return DloError(
            f"machine {self._file} must have {key}, got a file without it; add {key.rpartition('.')[2]}:"
            " {value: ..., source: ...} there, or start from a copy of a machine that dlo has"
        )

    def find(self, key: str) -> Any:
        """Returns the entry of a key."""
        at: Any = self._content
        for word in key.split("."):
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
        return Link(found, self(f"links.{name}.latency"))
