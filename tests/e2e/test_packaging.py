"""A wheel of the tree works far from it."""

import json
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from dlo_framework.registry import KINDS

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    # From a copy: building leaves folders behind, and stale ones would get into the wheel.
    copy = tmp_path_factory.mktemp("source") / "dlo"
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    files = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    for name in filter(None, map(bytes.decode, files)):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "-w", folder, copy]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def far(wheel, tmp_path_factory) -> Path:
    """A new venv with the wheel; the packages it needs are borrowed from the venv that runs the tests."""
    folder = tmp_path_factory.mktemp("far") / "venv"
    venv.create(folder, with_pip=True)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    # A path in a .pth adds that folder, and does not read the .pth files in it: the editable install stays away.
    (site / "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    python = folder / "bin" / "python"
    subprocess.run(
        [python, "-m", "pip", "install", "--no-deps", "--no-index", "--force-reinstall", wheel],
        check=True,
        capture_output=True,
    )
    return folder


def run(far: Path, *words: str) -> str:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(far)}
    command = [far / "bin" / "dlo", *words]
    done = subprocess.run(command, cwd=far, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_wheel_holds_the_packages_the_configs_and_the_types(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    for package in ("dlo_framework", "dlo_plugins", "dlo_tasks"):
        assert {f"{package}/__init__.py", f"{package}/py.typed"} <= names
    shipped = {path.relative_to(ROOT).as_posix() for path in (ROOT / "configs").rglob("*.yaml")}
    assert len(shipped) >= 5
    assert {f"dlo_framework/{name}" for name in shipped} <= names
    templates = [path.relative_to(ROOT).as_posix() for path in (ROOT / "dlo_framework").rglob("*.tmpl")]
    assert len(templates) == 2 * len(KINDS)
    assert set(templates) <= names
    every = {
        path.relative_to(ROOT / home).as_posix()
        for home, package in ((".", "dlo_framework"), ("plugins", "dlo_plugins"), ("tasks", "dlo_tasks"))
        for path in (ROOT / home / package).rglob("*.py")
    }
    assert every <= names, "a module that setup.cfg does not list"
    assert not [name for name in names if name.startswith(("tests", "plugins", "tasks", "configs", "docs", "build"))]


def test_it_works_far_from_the_checkout(far):
    code = "import dlo_framework, dlo_tasks; print(dlo_framework.__file__, dlo_tasks.__file__)"
    command = [far / "bin" / "python", "-c", code]
    where = subprocess.run(command, cwd=far, capture_output=True, text=True, check=True).stdout
    assert where.count(str(far)) == 2
    assert "quickstart" in run(far, "configs")
    names = {plugin["name"] for plugin in json.loads(run(far, "plugins", "--json"))}
    assert {"OneCycle", "ImageClassifier", "DigitsData", "ImageFolderData"} <= names
    out = run(far, "fit", "--config", "quickstart", "--trainer.max_steps", "2", "--trainer.accelerator", "cpu")
    assert "tensorboard --logdir" in out
    assert (far / "runs" / "quickstart" / "version_0" / "summary.json").is_file()
