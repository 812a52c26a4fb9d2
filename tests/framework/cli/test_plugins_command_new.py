"""``dlo plugins new``: what it writes passes its own test."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dlo_framework.cli.commands.plugins_command import main
from dlo_framework.errors import DloError
from dlo_framework.registry import KINDS
from support.doc_pages import ROOT


@pytest.fixture
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_what_is_written_passes_its_tests_for_every_kind(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for kind in KINDS:
        assert main(["new", kind, f"np_{kind}"]) == 0
        assert f"pytest ./test_np_{kind}.py" in capsys.readouterr().out
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", ".", "."]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    for kind in KINDS:
        assert f"test_np_{kind}.py::test_dlo_accepts_it_as_a_plugin PASSED" in done.stdout


def test_the_printed_yaml_names_the_file_and_the_class(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["new", "callback", "my_thing"])
    text = capsys.readouterr().out
    assert yaml.safe_load(text[text.index("plugins: [") :]) == {
        "plugins": ["./my_thing.py"],
        "trainer": {"callbacks": [{"class_path": "MyThing", "init_args": {"every": 1}}]},
    }


def test_what_is_written_is_lint_clean(cwd: Path) -> None:
    pytest.importorskip("ruff")
    for kind in KINDS:
        main(["new", kind, f"my_{kind}"])
    ruff = [sys.executable, "-m", "ruff"]
    rules = ["--select", "E,F,W,I,B,UP,C4,SIM,RUF,PT,D1", "--ignore", "D107", "--line-length", "88"]
    check = [*ruff, "check", "--isolated", "--no-cache", *rules, "--per-file-ignores", "test_*:D1", "."]
    for command in (check, [*ruff, "format", "--isolated", "--no-cache", "--diff", "."]):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the tree, which is the working directory and what processes import."""
    ignored = shutil.ignore_patterns(".*", "__pycache__", "images", "results", "site", "*.egg-info")
    shutil.copytree(ROOT, tmp_path, ignore=ignored, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(str(tmp_path / name) for name in ("", "plugins", "tasks")))
    return tmp_path


def check_clone(*commands: str) -> None:
    for command in commands:
        done = subprocess.run([sys.executable, *command.split()], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def files(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): path.read_text() for path in folder.rglob("*.[cmp][fdy]*") if path.is_file()}


def test_a_callback_of_the_tree_touches_four_files(clone: Path) -> None:
    pytest.importorskip("ruff")
    before = files(clone)
    main(["new", "callback", "np_thing", "--in-tree", "gradients"])
    after = files(clone)
    module, test = "plugins/dlo_plugins/gradients/np_thing.py", "tests/plugins/gradients/test_np_thing.py"
    changed = [name for name in sorted(after) if after[name] != before.get(name)]
    assert changed == ["docs/plugins/gradients.md", module, "setup.cfg", test]
    assert "\n    NpThing = dlo_plugins.gradients.np_thing:NpThing\n    Prune =" in after["setup.cfg"]
    lint = (f"-m ruff {command} {module} {test}" for command in ("check", "format --check"))
    check_clone(*lint, "docs/fill.py --check")


@pytest.mark.slow
def test_what_is_written_in_the_tree_passes_its_tests(clone: Path) -> None:
    for kind, feature in zip(KINDS, ("parallel/zero", "gradients", "language", "imagenet", "memory"), strict=True):
        main(["new", kind, f"np_{kind}", "--in-tree", feature])
    check_clone("-m mypy", "docs/fill.py --check", "docs/language.py")
    check_clone("-m pytest -n0 tests/docs/test_docs_pages.py tests/test_import_rules.py")
    check_clone(f"-m pytest -n0 {' '.join(map(str, Path('tests').rglob('test_np_*.py')))}")


@pytest.mark.parametrize(
    ("kind", "feature", "message"),
    [
        ("callback", "gradient", "got 'gradient'; did you mean 'gradients'"),
        ("callback", "loggers", "with a page in docs/plugins, got 'loggers'"),
        ("callbacky", "gradients", "did you mean 'callback'"),
    ],
)
def test_a_feature_that_the_tree_has_not_is_refused(
    monkeypatch: pytest.MonkeyPatch, kind: str, feature: str, message: str
) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(DloError, match=message):
        main(["new", kind, "np_thing", "--in-tree", feature])


def test_a_plugin_of_the_tree_is_refused_elsewhere(cwd: Path) -> None:
    with pytest.raises(DloError, match="in the root of a clone of dlo"):
        main(["new", "callback", "np_thing", "--in-tree", "gradients"])


def test_dir_is_made_and_named(cwd: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["new", "applier", "my_thing", "--dir", "a/b"])
    assert (cwd / "a/b/my_thing.py").exists()
    assert "plugins: [./a/b/my_thing.py]" in capsys.readouterr().out


@pytest.mark.parametrize("existing", ["my_thing.py", "test_my_thing.py"])
def test_nothing_is_overwritten(cwd: Path, existing: str) -> None:
    (cwd / existing).write_text("mine")
    with pytest.raises(DloError, match=f"got {existing}, which exists"):
        main(["new", "callback", "my_thing"])
    assert [(file.name, file.read_text()) for file in cwd.iterdir()] == [(existing, "mine")]


@pytest.mark.parametrize(
    ("kind", "name", "message"),
    [
        ("callbacky", "x", r"unknown kind 'callbacky'; did you mean 'callback'\? available: strategy, callback"),
        ("callback", "MyThing", "got 'MyThing'; try 'my_thing'"),
        ("callback", "class", "got 'class'; try 'my_class'"),
        ("callback", "../up", "got '../up'; try 'up'"),
        ("callback", "one_cycle", "got 'OneCycle', taken by dlo_framework .*; try 'my_one_cycle'"),
        ("data", "torch", "NAME must differ from installed modules, got 'torch'; try 'torch_data'"),
    ],
)
def test_a_bad_name_is_an_error_with_a_better_one(cwd: Path, kind: str, name: str, message: str) -> None:
    with pytest.raises(DloError, match=message):
        main(["new", kind, name])
    assert list(cwd.iterdir()) == []


def test_a_folder_that_cannot_be_made_is_told(cwd: Path) -> None:
    (cwd / "file").write_text("")
    with pytest.raises(DloError, match=r"cannot write to file/x: .*; --dir writes elsewhere"):
        main(["new", "callback", "my_thing", "--dir", "file/x"])
