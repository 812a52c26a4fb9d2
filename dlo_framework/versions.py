"""Versions of the software that affects a run, read from metadata without importing anything heavy."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib import metadata

from dlo_framework._version import __version__

PACKAGES = (
    "torch",
    "torchvision",
    "lightning",
    "timm",
    "transformers",
    "deepspeed",
    "jsonargparse",
    "tensorboard",
    "torchmetrics",
    "numpy",
    "simplejpeg",
    "opencv-python-headless",
)


def versions(also: Iterable[str] = ()) -> dict[str, str]:
    """Returns name to version of dlo, Python, the platform, and each installed package.

    Args:
        also: Further packages to list.
    """
    found = {
        "dlo_framework": __version__,
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }
    for package in (*PACKAGES, *also):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def format_versions() -> str:
    """Returns :func:`versions` as aligned lines, with missing packages named."""
    found = versions()
    lines = [f"{name:<24} {version}" for name, version in found.items()]
    missing = [package for package in PACKAGES if package not in found]
    if missing:
        lines.append(f"{'not installed':<24} {', '.join(missing)}")
    return "\n".join(lines)
