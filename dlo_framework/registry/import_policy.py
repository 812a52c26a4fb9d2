"""Allow-list of the class paths that a config may name.

A class path in YAML is an import, and an import runs code. So dlo refuses every path outside of the plug-ins that the
run has loaded, the modules that its user lists under ``plugins:``, and the libraries below, before any of it is
imported.
"""

from __future__ import annotations

from collections.abc import Iterable

from dlo_framework.errors import DloError, nearest
from dlo_framework.registry.entry_points import own_packages

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
