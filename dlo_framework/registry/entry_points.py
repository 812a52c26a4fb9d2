"""Entry points of plug-ins, read from the metadata of installed distributions without an import."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata

from dlo_framework.errors import did_you_mean
from dlo_framework.extensions import installed_points
from dlo_framework.registry.class_source import SourceNotFoundError, read_summary

KINDS: tuple[str, ...] = ("strategy", "callback", "task", "data", "applier")

#: Prefix of the entry-point groups; the kind follows.
GROUP_PREFIX = "dlo_framework.plugins."


@dataclass(frozen=True)
class Plugin:
    """Metadata of a plug-in, known without importing it.

    Attributes:
        name: Short name for configs; the class's own.
        kind: One of :data:`KINDS`.
        target: Class as ``module:Class``.
        distribution: Installed distribution that registers the plug-in, or the user's entry under ``plugins:``.
        version: Version of the distribution; empty for a user's own plug-in.
        aliases: Further short names.
    """

    name: str
    kind: str
    target: str
    distribution: str
    version: str
    aliases: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """Module that the plug-in is imported from."""
        return self.target.partition(":")[0]

    @property
    def class_path(self) -> str:
        """Full class path for configs: ``module.Class``."""
        return self.target.replace(":", ".")

    @property
    def origin(self) -> str:
        """Distribution and version, or file: ``"dlo_framework 0.2.0"``, ``"./file.py"``."""
        return f"{self.distribution} {self.version}".rstrip()

    @property
    def names(self) -> tuple[str, ...]:
        """Name, followed by the aliases."""
        return (self.name, *self.aliases)

    @property
    def short_names(self) -> tuple[str, ...]:
        """Aliases without those of variants, such as ``zero2_offload``; the name of a plug-in without any."""
        return tuple(alias for alias in self.aliases if "_" not in alias) or (self.name,)

    @cached_property
    def summary(self) -> str:
        """First paragraph of the docstring, from the source; "(not found: ...)" without a source."""
        try:
            return read_summary(self.target)
        except SourceNotFoundError as error:
            return f"(not found: {error})"

    def __str__(self) -> str:
        return f"{self.origin} ({self.kind} {self.target})"


def read_entry_points() -> tuple[list[Plugin], list[str]]:
    """Reads the entry points of every installed distribution, without an import.

    Returns:
        Plug-ins, and sentences on entry points that cannot be plug-ins.
    """
    groups: dict[tuple[str, str, str, str], list[str]] = {}
    problems = []
    origins: dict[metadata.Distribution | None, tuple[str, str]] = {None: ("unknown", "")}
    points = installed_points()
    for point in (p for group in sorted(points.groups) if _is_ours(group) for p in points.select(group=group)):
        kind = point.group.removeprefix(GROUP_PREFIX)
        if (
            point.dist is not None and point.dist not in origins
        ):  # Each look at a name or version parses the distribution's metadata.
            origins[point.dist] = (point.dist.name, point.dist.version)
        distribution, version = origins[point.dist]
        problem = _problem(kind, point)
        if problem:
            problems.append(f"{distribution} {version}: {problem}")
            continue
        groups.setdefault((distribution, version, kind, point.value.replace(" ", "")), []).append(point.name)
    return [_with_aliases(names, *key) for key, names in groups.items()], problems


def _is_ours(group: str) -> bool:
    return f"{group}.".startswith(GROUP_PREFIX)


def _problem(kind: str, point: metadata.EntryPoint) -> str | None:
    if kind not in KINDS:
        groups = [GROUP_PREFIX + known for known in KINDS]
        hint = did_you_mean(point.group, groups)
        return f"'{point.name}' is in the unknown group '{point.group}'{hint}; groups: {', '.join(groups)}"
    module, _, name = point.value.replace(" ", "").partition(":")
    if not all(part.isidentifier() for part in [*module.split("."), *name.split(".")]):
        return f"{kind} entry points must have the form 'Name = module:Class', got '{point.name} = {point.value}'"
    return None


@cache
def own_packages() -> tuple[str, ...]:
    """Returns the packages of dlo's own distribution: the core, and those that contribute entry points to it."""
    points = metadata.distribution("dlo_framework").entry_points
    return tuple(sorted({point.value.partition(".")[0] for point in points}))


def _with_aliases(names: list[str], distribution: str, version: str, kind: str, target: str) -> Plugin:
    own = target.rpartition(":")[2].rpartition(".")[2]
    name = own if own in names else names[0]
    aliases = tuple(sorted(set(names) - {name}))
    return Plugin(name, kind, target, distribution, version, aliases)
