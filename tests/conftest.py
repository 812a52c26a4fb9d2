"""What the tests share: the command as a user runs it, real photographs, and the curves of a run."""

import os

# Before torch is imported: tests run in a process a core, whose threads would wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import faulthandler
import gc
import importlib
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from support.dlo_process import DloProcess
from support.rank_server import fork_server

# Else each process rewrites the assertions of all tests again in each run, which takes 8 s.
sys.dont_write_bytecode = False

PACK = Path(__file__).resolve().parents[1] / "plugins" / "example_pack"
DLO = str(Path(sys.executable).with_name("dlo"))


class Command:
    """Runs ``dlo`` in one folder.

    Args:
        folder: which.
        fresh: whether in a new interpreter, as a shell does; else in a process that starts faster.
    """

    def __init__(self, folder: Path, *, fresh: bool = False) -> None:
        self.folder, self.fresh = folder, fresh

    def environment(self) -> dict[str, str]:
        mine = {key: value for key, value in os.environ.items() if not key.startswith(("DLO_", "PYTEST"))}
        return mine | {"COLUMNS": "160", "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def start(self, *words: str) -> subprocess.Popen | DloProcess:
        if not self.fresh:
            return DloProcess(list(words), self.folder, self.environment())
        return subprocess.Popen(
            [DLO, *words],
            cwd=self.folder,
            env=self.environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __call__(self, *words: str, code: int = 0) -> subprocess.CompletedProcess:
        process = self.start(*words)
        try:
            out, err = process.communicate(timeout=280)
        except subprocess.TimeoutExpired:
            process.kill()  # Its ranks and loading processes end with it.
            raise
        assert process.returncode == code, f"exit code {process.returncode}\n{out[-3000:]}\n{err[-6000:]}"
        return subprocess.CompletedProcess(words, process.returncode, out, err)

    def interrupt(self, signum: int, run: Path, *words: str) -> str:
        """Sends the signal to ``dlo`` as soon as its run has a checkpoint; returns what it prints to stderr."""
        process = self.start(*words)
        deadline = time.monotonic() + 120
        while not (run / "checkpoints" / "last.ckpt").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        process.send_signal(signum)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 128 + signum, err
        assert "Traceback" not in err
        return err


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Returns one process more than there are cores: tests of ranks that fail or hang wait for most of their time."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Gives slow tests an hour, unless they say otherwise: the timeout in setup.cfg is for the ordinary ones."""
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(3600))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Lets tests with a longer timeout run longer than ``faulthandler_timeout`` of setup.cfg."""
    marker = item.get_closest_marker("timeout")
    if marker is not None and marker.args[0] >= float(item.config.getini("faulthandler_timeout")):
        faulthandler.cancel_dump_traceback_later()


# No test asserts a time: under load an example of microseconds may take half a second.
settings.register_profile("dlo", deadline=None)
settings.load_profile("dlo")


#: Modules that a run imports late, at its first use, by the module that does so.
LATE_IMPORTS = {
    "dlo_tasks.language.causal_lm": ["transformers.models.llama.modeling_llama"],  # Imports torchao.
    "dlo_tasks.imagenet.digits": ["sklearn.datasets"],
    "dlo_plugins.deepspeed.strategy": ["deepspeed.runtime.engine", "deepspeed.runtime.zero.muon.muon_optimizer"],
    "dlo_plugins.parallel.mesh.strategy": ["dlo_plugins.parallel.tensor.inferred_rules"],
    "dlo_plugins.compile.compile_blocks": ["torch._inductor.compile_fx"],
    "dlo_plugins.compile.callback": ["torch._inductor.compile_fx"],
}


#: Filters of warnings that imports add, which pytest takes away after the collection.
FILTERS: list[Any] = []


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[object]:
    """Collects no garbage while tests and what they import are loaded, a fifth of that time: all of it stays."""
    gc.disable()
    before = warnings.filters[:]
    try:
        return (yield)
    finally:
        gc.enable()
        FILTERS[:] = [each for each in warnings.filters if each not in before]


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keeps what has been imported, some millions of objects, out of every collection of garbage from here on.

    What runs import and read late comes first: each rank and each `dlo` that is forked from this process would do it
    for itself, and import DeepSpeed for two seconds.
    """
    if "torch" in sys.modules and not sys.modules["torch"].accelerator.is_available():  # Else processes are spawned.
        os.environ["DS_ACCELERATOR"] = "cpu"  # DeepSpeed looks for devices where it is not told, and warns.
        for module, late in LATE_IMPORTS.items():
            for name in late if module in sys.modules else ():
                importlib.import_module(name)
        del os.environ["DS_ACCELERATOR"]
    if "dlo_tasks.imagenet.digits" in sys.modules:
        sys.modules["dlo_tasks.imagenet.digits"].read_digits()
    if "lightning.pytorch" in sys.modules:
        importlib.import_module("support.entry_points")
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> None:
    """Forks the server of ranks, while no test has changed this process."""
    torch = sys.modules.get("torch")
    if sys.platform == "linux" and "lightning.pytorch" in sys.modules and not torch.accelerator.is_available():
        fork_server(FILTERS)


@pytest.fixture(scope="module", autouse=True)
def what_a_file_leaves_is_not_collected_again():
    """Modules and caches that tests leave grow; the finder of a micro-batch, for one, collects after each trial."""
    yield
    gc.collect()
    gc.freeze()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Appends each failure to the file in DLO_TEST_LOG: a run that is cut off does not reach pytest's own report."""
    path = os.environ.get("DLO_TEST_LOG")
    if path and report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        with open(path, "a") as file:
            file.write(f"\n== {report.nodeid} ({report.when}, {report.duration:.0f} s)\n{report.longreprtext}\n")


def pytest_sessionfinish() -> None:
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_is_left_in_the_environment():
    """Lightning keeps a run's seed and rank there, and dlo its folder and checkpoint, where the next run finds them."""
    yield
    for name in (
        *("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "DLO_RUN_FOLDER", "DLO_FOUND_CHECKPOINT", "DLO_LAUNCHER"),
        *("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"),
    ):
        os.environ.pop(name, None)


@pytest.fixture(autouse=True)
def no_hooks_of_saved_tensors_are_left():
    """Hooks that a step has entered and an error has left would be those of the next test's steps."""
    yield
    if "torch" not in sys.modules:
        return
    import torch

    saved = torch.ones(1, requires_grad=True).exp()
    with pytest.raises(RuntimeError, match="inplace"):  # Hooks turn torch's check of versions off.
        saved.add_(1).sum().backward()


@pytest.fixture(autouse=True)
def linear_layers_are_torchs():
    """DeepSpeed's stage 3 replaces their function for the life of the process, also for what it cannot compute."""
    functional = sys.modules.get("torch.nn.functional")
    yield
    if functional is not None:
        functional.linear = sys.modules["torch"]._C._nn.linear


@pytest.fixture(autouse=True)
def no_process_group_is_left():
    """Lightning keeps a strategy's group for the life of the process, where the next test would be refused its own."""
    yield
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(params=["float64", "float32", "bfloat16"])
def default_dtype(request):
    """torch's default dtype, which Lightning sets in steps under `precision: 64-true` and `bf16-true`."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, request.param))
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def dlo(tmp_path) -> Command:
    return Command(tmp_path)


@pytest.fixture(scope="module")
def shared_dlo(tmp_path_factory) -> Command:
    return Command(tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="session")
def photos(tmp_path_factory) -> Path:
    """An ImageNet-style folder: crops of two real photographs, as two classes."""
    from sklearn.datasets import load_sample_images

    root = tmp_path_factory.mktemp("photos")
    generator = np.random.default_rng(0)
    for split, count in (("train", 12), ("val", 5)):
        for name, photo in zip(("china", "flower"), load_sample_images().images, strict=True):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                top, left = generator.integers(0, 300), generator.integers(0, 500)
                Image.fromarray(photo[top : top + 96, left : left + 128]).save(folder / f"{number}.jpg", quality=90)
    return root


@pytest.fixture
def curve():
    """Returns a function: run folder and tag to {step: value}. A step that two event files hold has one value."""

    def read(folder: Path, tag: str = "train/loss") -> dict[int, float]:
        found: dict[int, float] = {}
        for file in sorted(folder.glob("events.*")):
            events = EventAccumulator(str(file), size_guidance={"scalars": 0})
            events.Reload()
            for event in events.Scalars(tag) if tag in events.Tags()["scalars"] else []:
                assert found.setdefault(event.step, event.value) == event.value, f"{tag} at step {event.step}"
        return found

    return read


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
