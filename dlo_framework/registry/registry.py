"""Registry of plug-ins: finds the installed ones by entry points, and imports and checks those that a run names.

A plug-in is a class and one line of metadata, an entry point in the group of its kind::

    [options.entry_points]
    dlo_framework.plugins.callback =
        OneCycle = dlo_plugins.schedules.lr_curves:OneCycle

Discovery reads those lines only. A module is imported when a config names its class, so that a broken or slow plug-in
costs nothing in runs that do not use it. Further entries with the same target are aliases: ``zero2`` for
``ZeroStrategy``.

The user's own modules and files are named under ``plugins:`` in a config. A file is imported under a name by which any
other process can import it too: its dotted path below the working directory (``./nets/plugin.py`` is ``nets.plugin``),
or else below its own folder. That folder goes to the *end* of ``sys.path``, where it shadows nothing. multiprocessing
passes ``sys.path`` to the workers that it spawns, so that a dataset defined in such a file can be unpickled in a
worker, and two files called ``plugin.py`` are two modules. Saved configs contain the names, which stay valid when the
project's folder moves.

The class paths that a config may name are on an allow-list. A class path in YAML is an import, and an import runs code.
So dlo refuses every path outside of the plug-ins that the run has loaded, the modules that its user lists under
``plugins:``, and the libraries below, before any of it is imported.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import keyword
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

from dlo_framework.errors import DloError, did_you_mean, nearest, unknown_hint
from dlo_framework.extensions import installed_points, registering_modules
from dlo_framework.registry.class_source import SourceNotFoundError, find_spec, module_file, read_summary

BASES = {
    "strategy": "lightning.pytorch.strategies.Strategy",
    "callback": "lightning.pytorch.Callback",
    "task": "lightning.pytorch.LightningModule",
    "data": "lightning.pytorch.LightningDataModule",
    "applier": "dlo_framework.plan.Applier",
}


class Registry:
    """Plug-ins of one run, discovered at the first look-up; :meth:`discover` repeats the discovery."""

    def __init__(self) -> None:
        self._installed: list[Plugin] | None = None
        self._users: list[Plugin] = []
        self._user_modules: list[str] = []
        self._classes: dict[Plugin, type] = {}
        #: Sentences on entry points that cannot be plug-ins.
        self.problems: list[str] = []

    def discover(self) -> None:
        """Reads the entry points of every installed distribution, without an import."""
        self._installed, self.problems = read_entry_points()

    def plugins(self, kind: str | None = None) -> list[Plugin]:
        """Returns the plug-ins of a kind, or of all kinds, sorted by kind and name."""
        if self._installed is None:
            self.discover()
        known = [*(self._installed or ()), *self._users]
        chosen = [plugin for plugin in known if kind in (None, plugin.kind)]
        return sorted(chosen, key=lambda plugin: (KINDS.index(plugin.kind), plugin.name.lower()))

    def names(self, kind: str | None = None) -> list[str]:
        """Returns the short names and aliases of a kind, or of all kinds."""
        return sorted({name for plugin in self.plugins(kind) for name in plugin.names}, key=str.lower)

    def conflict(self, plugin: Plugin) -> str | None:
        """Returns the error text if another plug-in has one of this plug-in's names; None if not."""
        for other in self.plugins():
            shared = [name for name in plugin.names if name in other.names]
            if other != plugin and shared:
                first, second = sorted((plugin, other), key=str)
                return f"plug-in names must be unique, got '{shared[0]}' in {first} and in {second}; uninstall one"
        return None

    def get(self, name: str, kind: str | None = None) -> Plugin:
        """Looks a plug-in up by its short name or an alias.

        Raises:
            DloError: if there is none, or more than one.
        """
        matches = [plugin for plugin in self.plugins() if name in plugin.names]
        if matches:
            conflict = self.conflict(matches[0])
            if conflict:
                raise DloError(conflict)
            if kind in (None, matches[0].kind):
                return matches[0]
        raise self.unknown(name, kind)

    def unknown(self, name: str, kind: str | None = None, others: Iterable[str] = ()) -> DloError:
        """Returns the error for a name that no plug-in has.

        Args:
            name: Unknown name.
            kind: Kind of plug-in that the name must be of; None for any.
            others: Further valid names, such as Lightning's own strategies.
        """
        available = sorted({*self.names(kind), *others}, key=str.lower)
        elsewhere = next((plugin for plugin in self.plugins() if name in plugin.names), None)
        if elsewhere is not None and elsewhere.kind == kind:
            return DloError(f"'{name}' is an alias of the {kind} {elsewhere.name}; write {elsewhere.name} here")
        if elsewhere is not None:
            return DloError(f"'{name}' is a {elsewhere.kind} plug-in, not a {kind}; available: {', '.join(available)}")
        return DloError(f"unknown {kind or 'plug-in'} '{name}'{unknown_hint(name, available)}")

    def find_named(self, strings: Iterable[str]) -> list[Plugin]:
        """Returns the plug-ins that the strings name, by short name, alias or class path.

        Raises:
            DloError: if two plug-ins have one of those names.
        """
        table = {key: plugin for plugin in self.plugins() for key in (*plugin.names, plugin.class_path)}
        named = dict.fromkeys(table[text] for text in strings if text in table)
        for plugin in named:
            conflict = self.conflict(plugin)
            if conflict:
                raise DloError(conflict)
        return list(named)

    def load(self, name: str, kind: str | None = None) -> type:
        """Imports one plug-in, and no other, and checks that its class is of its kind.

        A strategy's ``register_strategies`` classmethod, if it defines one, is called with Lightning's registry;
        aliases that it does not register there stand for the class with its defaults.

        Args:
            name: Short name or alias of the plug-in.
            kind: Kind that the plug-in must be of; None for any.

        Raises:
            DloError: if the name is unknown, the import fails, or the class is not of the registered kind.
        """
        plugin = self.get(name, kind)
        if plugin not in self._classes:
            loaded = _import_class(plugin)
            if plugin.kind == "strategy":
                _register_strategy(plugin, loaded)
            self._classes[plugin] = loaded
        return self._classes[plugin]

    def load_user_module(self, spec: str) -> list[Plugin]:
        """Imports a user's module or file, and registers the plug-ins that it defines.

        Args:
            spec: Module, ``my_pkg.mod``, or file, ``./file.py``, relative to the working directory.

        Returns:
            Plug-ins of the module; empty where it only defines other classes that configs can name, such as networks.

        Raises:
            DloError: if the module does not exist, raises, defines no class that a config can name, or a plug-in with
                another plug-in's name.
        """
        module = import_user_module(spec)
        plugins = []
        classes = _public_classes(module)
        for cls in classes:
            kind = kind_of(cls)
            if kind is None or inspect.isabstract(cls):
                continue
            plugin = self._register_user_plugin(
                Plugin(cls.__name__, kind, f"{cls.__module__}:{cls.__qualname__}", spec, "")
            )
            if kind == "strategy":
                _register_strategy(plugin, cls)
            self._classes[plugin] = cls
            plugins.append(plugin)
        registers = any(name in registering_modules for name in (module.__name__, *(cls.__module__ for cls in classes)))
        if not plugins and not registers and not any(_names_allowed_base(cls) for cls in classes):
            bases = ", ".join(BASES.values())
            raise DloError(f"plugins: '{spec}' must define a public subclass of one of {bases}, got none; add one")
        if module.__name__ not in self._user_modules:
            self._user_modules.append(module.__name__)
        return plugins

    def _register_user_plugin(self, plugin: Plugin) -> Plugin:
        """Registers a user's plug-in unless it is registered already; returns the registered plug-in."""
        for other in self.plugins():
            if other.target == plugin.target:
                return other
            if plugin.name in other.names:
                raise DloError(
                    f"plug-in names must be unique, got '{plugin.name}' in {other} and in {plugin}; "
                    f"rename the class in '{plugin.distribution}'"
                )
        self._users.append(plugin)
        return plugin

    def allow_class_path(self, path: str) -> None:
        """Checks that a config may name a class path, before anything of it is imported.

        Raises:
            DloError: if the path is outside of the loaded plug-ins, the modules under ``plugins:`` and
                :func:`dlo_framework.registry.registry.allowed_roots`.
        """
        check_class_path(path, self.allowed_import_paths())

    def allowed_import_paths(self) -> list[str]:
        """Returns jsonargparse's ``import_path_allowlist``: libraries, loaded plug-ins, user modules."""
        homes = [home for plugin, cls in self._classes.items() for home in (plugin.module, cls.__module__)]
        return list(dict.fromkeys([*allowed_roots(), *self._user_modules, *homes]))

    def denied_import_paths(self) -> list[str]:
        """Returns jsonargparse's ``import_path_denylist``: all paths that are not allowed, and the denied ones."""
        return ["*", *DENIED_PATHS]


def _import_class(plugin: Plugin) -> type:
    label = f"plugin '{plugin.name}' ({plugin.origin})"
    module_path, _, name = plugin.target.partition(":")
    try:
        module = importlib.import_module(module_path)
    except (Exception, SystemExit) as error:
        raise DloError(f"{label} failed to import: {type(error).__name__}: {error}") from error
    target: object = module
    for part in name.split("."):
        if not hasattr(target, part):
            hint = did_you_mean(part, [key for key, value in vars(target).items() if inspect.isclass(value)])
            raise DloError(f"{label}: module {module_path} has no class '{name}'{hint}")
        target = getattr(target, part)
    if not isinstance(target, type):
        raise DloError(f"{label}: {plugin.target} must be a class, got a {type(target).__name__}; fix its entry point")
    if not issubclass(target, base_of(plugin.kind)):
        other = kind_of(target)
        fix = f"register it in the group '{GROUP_PREFIX}{other}'" if other else "derive it from that class"
        raise DloError(
            f"{label}: a {plugin.kind} must be a subclass of {BASES[plugin.kind]}, got {plugin.target}; {fix}"
        )
    return target


def base_of(kind: str) -> type:
    """Returns the class that plug-ins of a kind derive from."""
    module, _, name = BASES[kind].rpartition(".")
    base = getattr(importlib.import_module(module), name)
    assert isinstance(base, type)
    return base


def kind_of(cls: type) -> str | None:
    """Returns the kind of plug-in that a class is; None for another class."""
    return next((kind for kind in KINDS if issubclass(cls, base_of(kind))), None)


def _public_classes(module: ModuleType) -> list[type]:
    """Returns the classes with a public name that a module, or a package's own modules, define."""
    classes = []
    for name, value in vars(module).items():
        if inspect.isclass(value) and not name.startswith("_"):
            home = value.__module__
            if f"{home}.".startswith(f"{module.__name__}."):
                classes.append(value)
    return list(dict.fromkeys(classes))


def _names_allowed_base(cls: type) -> bool:
    """Returns whether a class derives from a class of an allowed library, such as a network or a dataset."""
    return any(base.__module__.partition(".")[0] in allowed_roots() for base in cls.__mro__[1:])


def _register_strategy(plugin: Plugin, cls: Any) -> None:
    """Registers a strategy's aliases with Lightning, so that ``--trainer.strategy zero2`` works."""
    from lightning.pytorch.strategies import StrategyRegistry

    if any(entry["strategy"] is cls for entry in StrategyRegistry.values()):
        return
    if "register_strategies" in vars(cls):  # An inherited one registers the base class.
        try:
            cls.register_strategies(StrategyRegistry)
        except Exception as error:
            raise DloError(
                f"plugin '{plugin.name}' ({plugin.origin}) failed to register its strategies: "
                f"{type(error).__name__}: {error}"
            ) from error
    for alias in plugin.aliases:
        if alias not in StrategyRegistry:
            StrategyRegistry.register(alias, cls, description=plugin.summary)


#: Number of folders above a file to try as the root of its name.
_LONGEST_NAME = 4


def import_user_module(spec: str) -> ModuleType:
    """Imports a module or a file.

    Args:
        spec: Module, ``my_pkg.mod``, or path of a file, ``./file.py``, relative to the working directory.

    Raises:
        DloError: if the module or file does not exist, or raises.
    """
    importlib.invalidate_caches()  # The file may be newer than Python's cache of its folder.
    if spec.endswith(".py") or "/" in spec or os.sep in spec:
        file = _existing_file(spec)
        name = module_name(file)
        if name is None:
            return _import_alone(spec, file)
    else:
        name = _existing_module(spec)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        raise DloError(f"plugins: '{spec}' failed to import: {type(error).__name__}: {error}") from error


def _existing_file(spec: str) -> Path:
    path = Path(spec).expanduser()
    if path.is_file() and path.suffix == ".py":
        return path.resolve()
    if path.is_dir():
        raise DloError(f"plugins: '{spec}' must be a file, got a folder; name a file, '{spec.rstrip('/')}/NAME.py'")
    if path.is_file():
        raise DloError(f"plugins: the name of a file must end in .py, got '{spec}'; rename the file")
    if not path.parent.is_dir():
        raise DloError(f"plugins: no file '{spec}': the folder {path.parent.absolute()} does not exist")
    names = {file.name for file in path.parent.glob("*.py")}
    hint = did_you_mean(path.name, names)
    raise DloError(f"plugins: no file '{spec}' in {path.parent.absolute()}{hint}")


def _existing_module(spec: str) -> str:
    parts = spec.split(".")
    if not _importable(parts):
        raise DloError(
            f"plugins: an entry must be a module (my_pkg.mod) or a file (./file.py), got '{spec}'; write './{spec}.py'"
            " for a file"
        )
    if spec in sys.modules or find_spec(spec) is not None:
        return spec
    folder = os.getcwd()
    sys.path.append(folder)
    if find_spec(spec) is not None:
        return spec
    sys.path.remove(folder)
    file = Path(*parts).with_suffix(".py")
    if Path(spec).with_suffix(".py").is_file() or file.is_file():
        raise DloError(f"plugins: no module '{spec}'; to name the file, write './{file}'")
    parent = find_spec(".".join(parts[:-1])) if len(parts) > 1 else None
    folders = parent.submodule_search_locations if parent else [folder]
    names = {file.stem for place in folders or [] for file in Path(place).glob("*.py")}
    raise DloError(f"plugins: no module '{spec}'{did_you_mean(parts[-1], names)}")


def module_name(file: Path) -> str | None:
    """Returns the name by which a file can be imported, and adds a folder to ``sys.path`` if that needs it.

    Args:
        file: Absolute path of the file.

    Returns:
        Dotted name; None where no folder above the file gives it one, because a part of the path cannot be an
        identifier, or another module has the name.
    """
    for root in _roots(file):
        parts = list(file.relative_to(root).with_suffix("").parts)
        if parts[-1] == "__init__":
            parts.pop()
        name = ".".join(parts)
        if not parts or not _importable(parts):
            continue
        if _imports_file(name, file):
            return name
        sys.path.append(str(root))
        if _imports_file(name, file):
            return name
        sys.path.pop()
    return None


def _roots(file: Path) -> Iterator[Path]:
    """Yields the folders that may be the root of a file's dotted name, the best first, none inside a package."""
    cwd = Path.cwd().resolve()
    outer = next(folder for folder in file.parents if not (folder / "__init__.py").exists())
    if cwd == outer or cwd in outer.parents:
        yield cwd
    yield outer
    yield from list(outer.parents)[: _LONGEST_NAME - 1]


def _imports_file(name: str, file: Path) -> bool:
    """Returns whether importing ``name`` imports ``file``."""
    if name in sys.modules:
        origin = module_file(name)
    else:
        spec = find_spec(name)
        origin = spec.origin if spec and spec.has_location else None
    return origin is not None and Path(origin).resolve() == file


def _importable(parts: list[str]) -> bool:
    return all(part.isidentifier() and not keyword.iskeyword(part) for part in parts)


def _import_alone(spec: str, file: Path) -> ModuleType:
    """Imports a file without an importable name, such as ``my-plugin.py``, under a name made from its path.

    A worker that is spawned, not forked, cannot import it.
    """
    relative = os.path.relpath(file, Path.cwd().resolve())
    stem = "".join(char if f"_{char}".isidentifier() else "_" for char in file.stem)
    name = f"user_{stem}_{hashlib.sha256(relative.encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    created = importlib.util.spec_from_file_location(name, file)
    assert created is not None
    assert created.loader is not None
    module = importlib.util.module_from_spec(created)
    sys.modules[name] = module
    try:
        created.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise DloError(f"plugins: '{spec}' failed to import: {type(error).__name__}: {error}") from error
    return module


#: Libraries whose classes a config may always name.
_LIBRARIES = ("torch", "torchvision", "lightning", "timm", "transformers")

#: Paths in them that run, unpickle or download what an argument names; training needs none of them in YAML.
DENIED_PATHS = (
    "torch.hub",
    "torch.jit.load",
    "torch.jit._serialization",
    "torch.load",
    "torch.multiprocessing",
    "torch.package",
    "torch.serialization",
    "torch.distributed.launcher",
    "torch.distributed.run",
    "torch.utils.cpp_extension",
    "torch.utils.model_zoo",
)

#: Packages with the same classes under names that Lightning's own type checks do not accept.
_RENAMED = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}


def allowed_roots() -> tuple[str, ...]:
    """Returns the packages whose classes a config may always name: libraries, and dlo's own."""
    return (*_LIBRARIES, *own_packages())


def check_class_path(path: str, allowed: Iterable[str]) -> None:
    """Checks that a class path is under one of ``allowed``, and not under one of :data:`DENIED_PATHS`.

    Args:
        path: Class path from a config. A short name, without a dot, is accepted: only loaded classes have one.
        allowed: Modules and packages, with everything below them. The longest prefix of the path decides.

    Raises:
        DloError: if the path is refused, with the fix.
    """
    if "." not in path:
        return
    verdicts = dict.fromkeys(allowed, True) | dict.fromkeys(DENIED_PATHS, False)
    parts = path.split(".")
    prefixes = [".".join(parts[:count]) for count in range(len(parts), 0, -1)]
    if next((verdicts[prefix] for prefix in prefixes if prefix in verdicts), False):
        return
    denied = next((prefix for prefix in prefixes if prefix in DENIED_PATHS), None)
    if denied:
        raise DloError(
            f"class_path '{path}' is refused: '{denied}' runs or loads what its arguments name; call it in a class of"
            " your own"
        )
    raise DloError(
        f"class_path '{path}' is refused: a config may name plug-ins, modules listed under plugins:, and "
        f"{', '.join(allowed_roots())}; {_suggest_fix(path, parts)}"
    )


def _suggest_fix(path: str, parts: list[str]) -> str:
    if parts[0] in _RENAMED:
        return f"write '{'.'.join([_RENAMED[parts[0]], *parts[1:]])}'"
    near = nearest(parts[0], allowed_roots())
    if near:
        return f"did you mean '{'.'.join([near, *parts[1:]])}'?"
    return f"if you trust it, add 'plugins: [{path.rpartition('.')[0]}]' to the config"


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
        """Distribution and version, or file: ``"dlo_framework 0.3.0"``, ``"./file.py"``."""
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
    ours = [group for group in sorted(points.groups) if f"{group}.".startswith(GROUP_PREFIX)]
    for point in (p for group in ours for p in points.select(group=group)):
        kind = point.group.removeprefix(GROUP_PREFIX)
        # Each look at a name or version parses the distribution's metadata.
        if point.dist is not None and point.dist not in origins:
            origins[point.dist] = (point.dist.name, point.dist.version)
        distribution, version = origins[point.dist]
        problem = _problem(kind, point)
        if problem:
            problems.append(f"{distribution} {version}: {problem}")
            continue
        groups.setdefault((distribution, version, kind, point.value.replace(" ", "")), []).append(point.name)
    return [_with_aliases(names, *key) for key, names in groups.items()], problems


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
