"""Distributions that are installed for a test: their metadata, and modules beside it."""

from __future__ import annotations

from pathlib import Path

#: Source of a module with a callback.
CALLBACK = '''
from lightning.pytorch import Callback

class {name}(Callback):
    """Does {name}."""
'''


def install(site: Path, name: str, entries: dict[str, list[str]], version: str = "1.2", **modules: str) -> None:
    """Writes a distribution to a folder of the path.

    Args:
        site: Folder.
        name: Name of the distribution.
        entries: Entry points by group.
        version: Version of the distribution.
        modules: Source of modules by name.
    """
    info = site / f"{name}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [line for group, points in entries.items() for line in (f"[{group}]", *points, "")]
    (info / "entry_points.txt").write_text("\n".join(lines))
    for module, source in modules.items():
        (site / f"{module}.py").write_text(source)
