"""A wheel of the tree works far from it, without the packages of any extra."""

import json
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from dlo_framework.registry import KINDS

ROOT = Path(__file__).parents[2]

#: Loaded by a .pth file: modules and distributions that cannot be found, as if they were not installed.
HIDDEN = """
import importlib.machinery, importlib.metadata
find, from_name = importlib.machinery.PathFinder.find_spec, importlib.metadata.Distribution.from_name
def find_spec(name, path=None, target=None):
    return None if name.partition(".")[0] in {modules!r} else find(name, path, target)
def visible(name):
    if name.lower().replace("_", "-") in {distributions!r}:
        raise importlib.metadata.PackageNotFoundError(name)
    return from_name(name)
importlib.machinery.PathFinder.find_spec = staticmethod(find_spec)
importlib.metadata.Distribution.from_name = staticmethod(visible)
"""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required(name: str, extras: tuple[str, ...], found: dict[str, set[str]]) -> dict[str, set[str]]:
    """Adds the installed distributions that a distribution requires, with its extras, and what those require."""
    for text in metadata.requires(name) or ():
        need = Requirement(text)
        if need.marker is not None and not any(need.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            continue
        new = {*need.extras} - found.get(normal(need.name), set())
        if normal(need.name) in found and not new:
            continue
        found.setdefault(normal(need.name), set()).update(new)
        try:
            required(need.name, tuple(found[normal(need.name)]), found)
        except metadata.PackageNotFoundError:
            continue
    return found


def packages_of_extras() -> tuple[set[str], set[str]]:
    """Returns the top-level packages that only extras bring, and their distributions."""
    core = set(required("dlo_framework", (), {}))
    named = metadata.metadata("dlo_framework").get_all("Provides-Extra") or ()
    every = set(required("dlo_framework", tuple(named), {}))
    modules = {module: {*map(normal, names)} for module, names in metadata.packages_distributions().items()}
    found = {module for module, names in modules.items() if names & every and not names & core}
    return found, every - core


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
    venv.create(folder)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    # A path in a .pth adds that folder, and does not read the .pth files in it: the editable install stays away.
    own = [sysconfig.get_paths()["purelib"], *(path for path in sys.path if path.endswith("site-packages"))]
    (site / "borrowed.pth").write_text("\n".join(dict.fromkeys(own)) + "\n")
    hidden, distributions = packages_of_extras()
    assert {"matplotlib", "deepspeed", "optuna", "transformers"} <= hidden
    assert not hidden & {"torch", "timm", "sklearn", "numpy", "PIL"}
    (site / "hidden_packages.py").write_text(HIDDEN.format(modules=hidden, distributions=distributions))
    (site / "hidden.pth").write_text("import hidden_packages\n")
    python = folder / "bin" / "python"
    words = ["install", "--ignore-installed", "--no-deps", "--no-index", "--no-compile", wheel]
    subprocess.run([sys.executable, "-m", "pip", "--python", python, *words], check=True, capture_output=True)
    return folder


def run(far: Path, *words: str, code: int = 0) -> str:
    environment = {"PATH": "/usr/bin:/bin", "HOME": str(far), "OMP_NUM_THREADS": "1"}
    command = [far / "bin" / "dlo", *words]
    done = subprocess.run(command, cwd=far, capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stderr
    return done.stdout if not code else done.stderr


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


@pytest.mark.slow
def test_it_works_far_from_the_checkout(far):
    names = {plugin["name"] for plugin in json.loads(run(far, "plugins", "--json"))}
    assert {"OneCycle", "ImageClassifier", "DigitsData", "ImageFolderData"} <= names
    assert run(far, "plugins", "show", "DigitsData").count(str(far))
    small = ["--trainer.max_steps", "2", "--trainer.accelerator", "cpu", "--trainer.limit_val_batches", "1"]
    finder = ["--trainer.callbacks+", "LRFinder", "--trainer.callbacks.num_steps", "20"]
    out = run(far, "fit", "--config", "quickstart", *small, *finder)
    assert "tensorboard --logdir" in out
    assert "lr_find.json" in out
    assert not list(far.rglob("lr_find.png"))
    assert (far / "runs" / "quickstart" / "version_0" / "summary.json").is_file()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["fit", "--config", "quickstart", "--trainer.strategy", "deepspeed_2"],
            "pip install 'dlo_framework[deepspeed]'",
        ),
        (["sweep", "--config", "quickstart", "--space", "digits/sweep_space"], "pip install 'dlo_framework[hpo]'"),
        (["fit", "--config", "llm/quickstart"], "which is not installed; pip install 'dlo_framework[llm]'"),
    ],
    ids=["deepspeed", "optuna", "transformers"],
)
def test_a_package_of_an_extra_is_one_line_with_the_command(far, words, message):
    lines = run(far, *words, code=2).splitlines()
    assert lines[-1].endswith(message)
    assert "Traceback" not in lines
