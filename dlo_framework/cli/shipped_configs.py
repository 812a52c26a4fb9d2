"""Lookup of configs by path, or by name among the shipped ones."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from dlo_framework.errors import DloError, did_you_mean


def list_shipped_configs() -> dict[str, Path]:
    """Returns the paths of the shipped configs by name, without the ending (``imagenet/coatnet_0``)."""
    root = Path(str(resources.files("dlo_framework.configs")))
    return {path.relative_to(root).with_suffix("").as_posix(): path for path in sorted(root.rglob("*.yaml"))}


def resolve_config(name: str) -> str:
    """Returns the path of the config ``name``, which is a file or the name of a shipped config.

    Raises:
        DloError: If it is neither; the message has the nearest match.
    """
    if Path(name).is_file():
        return name
    shipped = list_shipped_configs()
    key = name.removesuffix(".yaml").removesuffix(".yml")
    if key in shipped:
        return str(shipped[key])
    short = key.removeprefix("configs/")
    if short in shipped:
        hint = f"; the shipped one is called '{short}': --config {short}"
    else:
        folder = Path(name).parent
        beside = [str(path) for path in folder.glob("*.y*ml")] if folder.is_dir() else []
        hint = did_you_mean(key, shipped) or did_you_mean(name, beside)
    hint += " " if hint.endswith("?") else "; "
    raise DloError(f"no config '{name}': neither a file nor a shipped config{hint}`dlo configs` lists the shipped")
