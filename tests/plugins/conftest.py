"""What the tests of plug-ins share."""

import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

PACK = Path(__file__).resolve().parents[2] / "plugins" / "example_pack"


@pytest.fixture(scope="session")
def example_pack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip has installed the example pack; for a subprocess's PYTHONPATH."""
    folder = tmp_path_factory.mktemp("example_pack")
    source, target = folder / "source", folder / "site"
    # A copy: setuptools leaves its build folder beside the source.
    shutil.copytree(PACK, source, ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), str(source)]
    if _setuptools_can_build():
        command += ["--no-build-isolation", "--no-index"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def _setuptools_can_build() -> bool:
    """Returns whether the pack builds with what is installed, offline; else pip fetches setuptools for it."""
    try:
        return int(metadata.version("setuptools").partition(".")[0]) >= 77
    except metadata.PackageNotFoundError:
        return False
