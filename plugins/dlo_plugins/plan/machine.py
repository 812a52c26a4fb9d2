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
from dlo_plugins.plan.work import Product, RankFraction, Work

_FOLDER = resources.files("dlo_plugins.plan").joinpath("machines")


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
            fix = next((f"trainer.precision to {name}" for key, name in _PRECISIONS.items() if key in self.peak), "")
            raise DloError(
                f"machine {self.name} must have a peak for {dtype}, got {', '.join(self.peak)}; set"
                f" {fix or 'another precision'}, or add peak.{dtype} to the machine's file"
            )
        return self.peak[dtype]

    def product_seconds(self, product: Product, dtype: str, *, backward: bool = False) -> float:
        """Returns the time of a matrix product: the longer of its operations and its bytes."""
        efficiency = self.attention[backward] if product.is_attention else self.efficiency
        computing = product.flops / (self.rate(dtype) * efficiency)
        return max(computing, self.moving_seconds(product.bytes)) + self.launch

    def work_seconds(
        self, work: Work, fraction: RankFraction, dtype: str, *, fused: bool, backward: bool = False
    ) -> float:
        """Returns the time of a rank's fraction of a work.

        Args:
            work: Work of one row.
            fraction: Fraction of the rank.
            dtype: Dtype of the products.
            fused: Whether neighbouring operations are one kernel.
            backward: Whether it is a backward.
        """
        products = sum(
            count * self.product_seconds(product.on(fraction), dtype, backward=backward)
            for product, count in work.products
        )
        others = work.compiled if fused else work.eager
        return products + self.moving_seconds(others.moved.on(fraction)) + others.number * self.launch

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

    A file with `extends: NAME` has the constants of that machine of dlo's, except those that it sets.

    Raises:
        DloError: No such machine exists, or its file lacks a constant.
    """
    if not name.endswith((".yaml", ".yml")):
        path = _shipped_file(name)
    elif not (path := Path(name)).is_file():
        raise DloError(f"machine must be a file that exists, got {name}; copy one of {_FOLDER}")
    return parse_machine(_read_constants(path, name), name)


def _shipped_file(name: str) -> Path:
    """Returns the file of a machine that comes with dlo."""
    known = machine_names()
    if name not in known:
        hint = did_you_mean(name.lower(), known) or f"; set --machine {known[0]}"
        raise DloError(f"machine must be one of {', '.join(known)}, or a file, got {name}{hint}")
    return Path(str(_FOLDER.joinpath(f"{name}.yaml")))


def _read_constants(path: Path, name: str) -> dict[str, Any]:
    """Returns the constants of a machine's file, with those of the machine that it extends."""
    content = read_yaml(path, "machine")
    if not isinstance(content, dict):
        raise DloError(
            f"machine must be a YAML file of constants, got {name} with {type(content).__name__}; correct it"
        )
    extended = content.pop("extends", None)
    if extended is None:
        return content
    base = _read_constants(_shipped_file(str(extended)), str(extended))
    if "peak" in content:
        base.pop("accelerator", None)  # Its peaks would win.
    return _override(base, content)


def _override(base: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    """Returns constants with those of another file in their place."""
    merged = dict(base)
    for key, entry in content.items():
        sections = all(isinstance(each, dict) and "value" not in each for each in (entry, base.get(key)))
        merged[key] = _override(base[key], entry) if sections else entry
    return merged


def parse_machine(content: Mapping[str, Any], file: str) -> Machine:
    """Returns the machine of a file's content.

    Args:
        content: Constants, each a number or `{value: ..., source: ...}`.
        file: Name of the file, for messages.

    Raises:
        DloError: A constant is missing, or no positive number.
    """
    values: dict[str, Any] = {}
    sources: dict[str, str] = {}

    def collect(key: str, entry: Any) -> None:
        if isinstance(entry, dict) and "value" in entry:
            values[key], sources[key] = entry["value"], str(entry.get("source", ""))
        elif isinstance(entry, dict) and entry and not key.endswith("bandwidth"):
            for word, inner in entry.items():
                collect(f"{key}.{word}" if key else str(word), inner)
        else:
            values[key] = entry

    def find(key: str, known: str = "{value: ..., source: ...}") -> Any:
        if key not in values:
            raise DloError(
                f"machine {file} must have {key}, got a file without it; add {key.rpartition('.')[2]}: {known} there,"
                " or start from a copy of a machine that dlo has"
            )
        return values[key]

    def read(key: str, value: Any = None) -> float:
        entry = find(key) if value is None else value
        try:
            number = float(entry)
        except (TypeError, ValueError):
            number = -1.0
        if not 0 < number < math.inf:
            raise DloError(f"machine {file}: {key} must be a positive number, got {entry!r}; correct it")
        return number

    def read_link(name: str) -> Link:
        key = f"links.{name}.bandwidth"
        entry = find(key)
        table = entry if isinstance(entry, dict) else {1: entry}  # By number of nodes.
        return Link({int(nodes): read(key, rate) for nodes, rate in table.items()}, read(f"links.{name}.latency"))

    collect("", content)
    unknown = next((key for key in values if key not in _KEYS and not key.startswith("peak.")), None)
    if unknown is not None:
        raise DloError(
            f"machine {file} must have keys of {', '.join(_KEYS)}, got {unknown}; remove it: since 0.2 efficiency,"
            " bandwidth_efficiency and launch are those of all kernels. dlo plan --measure writes a new file"
        )
    if "accelerator" in values:
        from dlo_framework.costs import known_peak  # It imports torch.

        known = known_peak(str(values["accelerator"]))
        if known is None:
            raise DloError(
                f"machine {file}: accelerator must be one whose peak dlo knows, got {values['accelerator']}; set peak:"
                f" {_PEAK} in its place"
            )
        peak = known.rates()
    else:
        peak = {key.removeprefix("peak."): read(key) for key in values if key.startswith("peak.")}
    if not peak:
        find("peak", _PEAK)
    device = str(values.get("device", "cuda"))
    if device not in ("cuda", "cpu"):
        raise DloError(f"machine {file}: device must be cuda or cpu, got {device!r}; correct it")
    return Machine(
        **{key: read(key) for key in _NUMBERS},
        name=str(values.get("name", Path(file).stem)),
        ranks_per_node=int(read("ranks_per_node")),
        peak=peak,
        attention=(read("attention.forward"), read("attention.backward")),
        node=read_link("node"),
        network=read_link("network") if any(key.startswith("links.network") for key in values) else None,
        sources=sources,
        device=device,
        cores=int(read("cores")) if "cores" in values else 0,
        host=Host(read("links.host.bandwidth"), read("links.host.memory")) if "links.host.memory" in values else None,
    )


#: Precision of the Trainer to use on a machine with a peak for a dtype, the best first.
_PRECISIONS = {"bfloat16": "bf16-mixed", "float16": "16-mixed", "float32": "32-true"}
_PEAK = "{bfloat16: {value: ..., source: ...}}"
#: Constants that are a number of the same name.
_NUMBERS = (
    *("memory", "reserved", "fragmentation", "efficiency", "bandwidth", "bandwidth_efficiency", "launch"),
    "overlap_slowdown",
)
#: Keys that a file may have, beside a peak by dtype.
_KEYS = (
    *("name", "device", "ranks_per_node", "cores", "accelerator", "peak", *_NUMBERS, "attention.forward"),
    *("attention.backward", "links.host.bandwidth", "links.host.memory"),
    *(f"links.{link}.{key}" for link in ("node", "network") for key in ("bandwidth", "latency")),
)
