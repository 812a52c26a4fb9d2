"""Machine: rates of its ranks and links, read from a file in which each constant names its source."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from dlo_framework.errors import DloError, did_you_mean
from dlo_framework.yaml_text import read_yaml
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
        efficiency: Fraction of the peak that matrix products reach.
        bandwidth: Bytes a second between memory and chip, by data sheet.
        bandwidth_efficiency: Fraction of it that kernels reach.
        launch: Seconds of a kernel beyond its work.
        attention: Fractions of the peak that fused attention reaches, in forward and in backward.
        node: Link of ranks of one node.
        network: Link of ranks on different nodes; None for a machine of one node.
        host: Host of a device; None where nothing is offloaded.
        overlap_slowdown: Factor by which communication slows computation that runs at the same time; 2 where they take
            turns.
        sources: Source of each constant, by key.
        cores: Number of processors that the ranks of a node share; 0 where each rank has its own. Rates are those with
            all ranks at work.
    """

    name: str
    memory: float
    reserved: float
    fragmentation: float
    ranks_per_node: int
    peak: Mapping[str, float]
    efficiency: float
    bandwidth: float
    bandwidth_efficiency: float
    launch: float
    attention: tuple[float, float]
    node: Link
    network: Link | None
    overlap_slowdown: float
    sources: Mapping[str, str]
    device: str = "cuda"
    cores: int = 0
    host: Host | None = None

    @property
    def contention(self) -> float:
        """Number of ranks that share a processor: how much faster one computes while the others wait."""
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

    def product_seconds(self, product: Product, dtype: str, *, backward: bool = False) -> float:
        """Returns the time of a matrix product: the longer of its operations and its bytes."""
        efficiency = self.attention[backward] if product.is_attention else self.efficiency
        computing = product.flops / (self.rate(dtype) * efficiency)
        return max(computing, self.moving_seconds(product.bytes)) + self.launch

    def work_seconds(self, work: Work, share: Share, dtype: str, *, fused: bool, backward: bool = False) -> float:
        """Returns the time of a rank's share of a work.

        Args:
            work: Work of one row.
            share: Share of the rank.
            dtype: Dtype of the products.
            fused: Whether neighbouring operations are one kernel.
            backward: Whether it is a backward.
        """
        products = sum(
            count * self.product_seconds(product.on(share), dtype, backward=backward)
            for product, count in work.products
        )
        others = work.compiled if fused else work.eager
        return products + self.moving_seconds(others.moved.on(share)) + others.number * self.launch

    def moving_seconds(self, moved: float) -> float:
        """Returns the time of operations that read and write a number of bytes."""
        return moved / (self.bandwidth * self.bandwidth_efficiency)

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

    def exchange_seconds(self, size: float, ranks: int, spread: int) -> float:
        """Returns the time of an all-to-all.

        A rank sends to ranks of its own node over the node's link, and at the same time to the others over its share of
        the network.

        Args:
            size: Bytes that a rank sends, its own share included, the same number to each rank.
            ranks: Number of ranks of the group.
            spread: Distance between neighbouring ranks of the group in the numbering of all ranks.

        Raises:
            DloError: The group has ranks on several nodes, and the machine has no link between nodes.
        """
        if ranks == 1 or size == 0:
            return 0.0
        _, latency = self.link_of(ranks, spread)
        own = ranks if ranks * spread <= self.ranks_per_node else max(1, min(ranks, self.ranks_per_node // spread))
        seconds = size * (own - 1) / ranks / self.node.rate(1)
        if own < ranks:
            assert self.network is not None, "link_of has raised an error"
            seconds = max(seconds, size * (ranks - own) / ranks / self.network.rate(max(2, ranks // own)))
        return latency * (ranks - 1) + seconds

    def send_seconds(self, size: float, spread: int) -> float:
        """Returns the time to send bytes to a rank at a distance."""
        if spread < self.ranks_per_node or self.network is None:
            return self.node.latency + size / self.node.rate(1)
        return self.network.latency + size / self.network.rate(2)


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
    for key in (*content, *(f"links.{name}" for name in links)):
        if key not in _KEYS:
            raise DloError(
                f"machine {file} must have keys of {', '.join(_KEYS)}, got {key}; remove it: since 0.2 efficiency,"
                " bandwidth_efficiency and launch are those of all kernels. dlo plan --measure writes a new file"
            )
    return Machine(
        name=str(content.get("name", Path(file).stem)),
        memory=read("memory"),
        reserved=read("reserved"),
        fragmentation=read("fragmentation"),
        ranks_per_node=int(read("ranks_per_node")),
        peak=read.peak(),
        efficiency=read("efficiency"),
        bandwidth=read("bandwidth"),
        bandwidth_efficiency=read("bandwidth_efficiency"),
        launch=read("launch"),
        attention=(read("attention.forward"), read("attention.backward")),
        node=read.link("node"),
        network=read.link("network") if "network" in links else None,
        overlap_slowdown=read("overlap_slowdown"),
        sources=read.sources,
        device=read.device(),
        cores=int(read("cores")) if "cores" in content else 0,
        host=Host(read("links.host.bandwidth"), read("links.host.memory")) if "host" in links else None,
    )


#: Keys that a file may have.
_KEYS = (
    *("name", "device", "memory", "reserved", "fragmentation", "ranks_per_node", "cores", "accelerator", "peak"),
    *("efficiency", "bandwidth", "bandwidth_efficiency", "launch", "attention", "links", "links.node"),
    *("links.network", "links.host", "overlap_slowdown"),
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

    def peak(self) -> dict[str, float]:
        """Returns the peak by dtype: that of the file, or of the accelerator that it names."""
        if "accelerator" in self._content:
            from dlo_framework.costs import known_peak  # It imports torch.

            found = known_peak(str(self.find("accelerator")))
            if found is None:
                raise DloError(
                    f"machine {self._file}: accelerator must be one whose peak dlo knows, got"
                    f" {self.find('accelerator')}; set peak: {_ENTRIES['peak']} in its place"
                )
            return found.rates()
        peak = self._content.get("peak")
        if not isinstance(peak, dict) or not peak:
            raise self.missing("peak")
        return {dtype: self(f"peak.{dtype}") for dtype in peak}

    def device(self) -> str:
        """Returns the type of the devices; `cuda` where the file does not say."""
        found = str(self._content.get("device", "cuda"))
        if found not in ("cuda", "cpu"):
            raise DloError(f"machine {self._file}: device must be cuda or cpu, got {found!r}; correct it")
        return found

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
