"""`dlo plugins`, `show`, and `new`: what it writes passes its own test."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from dlo_framework.cli.commands.plugins_command import format_yaml_snippet, format_yaml_value, main
from dlo_framework.errors import DloError
from dlo_framework.registry import KINDS
from dlo_framework.registry.class_source import Parameter
from support.distributions import install
from support.doc_pages import ROOT


@pytest.fixture
def pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with a callback, a strategy with an alias, and a plug-in whose module is missing."""
    entries = {
        "dlo_framework.plugins.callback": ["PcCallback = pc_mod:PcCallback", "PcGone = pc_gone:PcGone"],
        "dlo_framework.plugins.strategy": ["PcStrategy = pc_mod:PcStrategy", "pc_alias = pc_mod:PcStrategy"],
        "dlo_framework.checkpoint_stores": ["pc = pc_mod:PcStore"],
        "dlo_framework.plugins.callbacky": ["PcTypo = pc_mod:PcTypo"],
    }
    source = '''
raise RuntimeError("imported")

class PcCallback:
    """Does a [bold]thing[/bold] now and then.

    It says why.

    Args:
        rate: How often, in ``Hz``.
        mode: What.

    Raises:
        DloError: at times.
    """
    def __init__(self, rate: float, mode: str | None = None): ...

class PcStrategy:
    """Strategy."""
'''
    install(tmp_path, "pc_pack", entries, "3.1", pc_mod=source)
    monkeypatch.syspath_prepend(str(tmp_path))


def output(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert main(list(argv)) == 0
    return capsys.readouterr().out


def test_the_list_has_kind_description_and_origin(pack: None, capsys: pytest.CaptureFixture[str]) -> None:
    lines = output(capsys).splitlines()
    kinds = [line for line in lines if line in ("strategy", "callback", "task", "data", "applier")]
    assert kinds == ["strategy", "callback", "task", "data", "applier"]
    row = next(line for line in lines if "PcCallback" in line)
    assert row.split() == ["PcCallback", "Does", "a", "[bold]thing[/bold]", "now", "and", "then.", "pc_pack", "3.1"]
    assert next(line for line in lines if "pc_alias" in line).split()[:2] == ["PcStrategy,", "pc_alias"]
    assert "(not found: no module pc_gone)" in next(line for line in lines if "PcGone" in line)
    assert any(line.startswith("warning: pc_pack 3.1: 'PcTypo' is in the unknown group") for line in lines)
    store = lines.index("dlo_framework.checkpoint_stores (entry points)") + 1
    assert lines[store].split() == ["pc", "pc_mod:PcStore", "pc_pack", "3.1"]
    assert any("OneCycle" in line and "dlo_framework" in line for line in lines)


def test_the_list_is_drawn_on_a_terminal(
    pack: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "100")
    text = output(capsys)
    assert "what it does" in text
    assert "[bold]thing[/bold]" in text
    assert "pc_pack 3.1" in text


def test_show_knows_ones_own_and_those_of_every_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pc_own.py").write_text("from lightning.pytorch import Callback\nclass PcOwn(Callback): pass\n")
    for words in (["pc_own.PcOwn"], ["PcOwn", "--plugins", "./pc_own.py"]):
        text = output(capsys, "show", *words)
        assert text.startswith("PcOwn: callback from ")
        assert "From Python: from pc_own import PcOwn" in text
        assert yaml.safe_load(text[text.index("\nplugins:") :])["plugins"] == [words[-1].removesuffix(".PcOwn")]
    assert "class_path: FiniteLoss" in output(capsys, "show", "FiniteLoss")
    assert "monitor: <str>  # required" in output(capsys, "show", "EarlyStopping")


def test_json_is_for_machines(pack: None, capsys: pytest.CaptureFixture[str]) -> None:
    records = {record["name"]: record for record in json.loads(output(capsys, "--json"))}
    assert records["PcStrategy"] == {
        "name": "PcStrategy",
        "kind": "strategy",
        "aliases": ["pc_alias"],
        "description": "Strategy.",
        "class_path": "pc_mod.PcStrategy",
        "distribution": "pc_pack",
        "version": "3.1",
        "conflict": None,
    }


def test_show_has_doc_parameters_and_yaml(pack: None, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "show", "PcCallback")
    assert text.startswith("PcCallback: callback from pc_pack 3.1\ndefined in ")
    assert "pc_mod.py:4" in text
    assert "It says why." in text
    assert "DloError: at times." in text
    assert "Args:" not in text
    rows = [line.split() for line in text.splitlines()]
    assert ["rate", "float", "required", "How", "often,", "in", "Hz."] in rows
    assert ["mode", "str", "|", "None", "None", "What."] in rows
    snippet = yaml.safe_load(text[text.index("\ntrainer:") :])
    init_args = {"rate": "<float>", "mode": None}
    assert snippet == {"trainer": {"callbacks": [{"class_path": "PcCallback", "init_args": init_args}]}}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["show", "PcCalback"], r"unknown plug-in 'PcCalback'; did you mean 'PcCallback'\?$"),
        (["show", "PcGone"], r"plugin 'PcGone' \(pc_pack 3\.1\): no module pc_gone; reinstall pc_pack"),
        (["shoow"], r"unknown command 'dlo plugins shoow'; did you mean 'show'\? available: show, new"),
        (["PcCallback"], "did you mean 'dlo plugins show PcCallback'"),
        (["--jsn"], "unrecognized arguments: --jsn; see 'dlo plugins --help'"),
        (["show"], "the following arguments are required: NAME; see 'dlo plugins show --help'"),
    ],
)
def test_bad_words_are_errors_with_the_nearest(pack: None, argv: list[str], message: str) -> None:
    with pytest.raises(DloError, match=message):
        main(argv)


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, 3, -1.5, 1e-5, 1e20, 2.5e-07, float("inf"), -float("inf"), {}, []),
        *("adamw", "a b", "no", "1e-5", "", "a: #b", "tab\tquote\"'", "é"),
        *(["x", 1, None], {"a": [1e-5], "on": "y"}),
    ],
)
def test_yaml_values_read_back_as_they_are(value: object) -> None:
    found = yaml.safe_load(format_yaml_value(value))
    assert (found, type(found)) == (value, type(value))


def test_a_default_that_yaml_cannot_say_is_a_comment() -> None:
    parameters = [Parameter("dtype", "torch.dtype", "torch.float32", ""), Parameter("of", "set", "{1}", "")]
    text = format_yaml_snippet("task", "Net", parameters)
    assert yaml.safe_load(text) == {"model": {"class_path": "Net"}}
    assert "# dtype: torch.float32" in text


@pytest.mark.parametrize(
    ("kind", "path"),
    [
        ("strategy", ["trainer", "strategy"]),
        ("task", ["model"]),
        ("data", ["data"]),
        ("applier", ["trainer", "strategy", "init_args", "appliers", 0]),
    ],
)
def test_each_kind_has_its_place(kind: str, path: list[str | int]) -> None:
    found = yaml.safe_load(format_yaml_snippet(kind, "Name", [Parameter("a", "int", "1", "")]))
    for key in path:
        found = found[key]
    assert found == {"class_path": "Name", "init_args": {"a": 1}}


def test_show_has_values_for_constants_and_an_import(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "show", "ImageFolderData")
    assert re.search(r"^  mean .*\(0\.485, 0\.456, 0\.406\) ", text, re.MULTILINE), "a constant of another module"
    assert re.search(r"^  ratio .*\(0\.75, 1\.3333333333333333\) ", text, re.MULTILINE), "arithmetic"
    assert "mean: [0.485, 0.456, 0.406]" in text
    assert "\nFrom Python: from dlo_framework import ImageFolderData\n" in text
    shown = json.loads(output(capsys, "show", "GradientCompression", "--json"))
    (block,) = [parameter for parameter in shown["parameters"] if parameter["name"] == "block"]
    assert block["default"] == "256"
    assert shown["import"] == "from dlo_framework import GradientCompression"


# --- ``dlo plugins new``: what it writes passes its own test ---------------------------------------------------------


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
    ("words", "message"),
    [
        ("callbacky x", r"unknown kind 'callbacky'; did you mean 'callback'\? available: strategy, callback"),
        ("callback MyThing", "got 'MyThing'; try 'my_thing'"),
        ("callback class", "got 'class'; try 'my_class'"),
        ("callback ../up", "got '../up'; try 'up'"),
        ("callback one_cycle", "got 'OneCycle', taken by dlo_framework .*; try 'my_one_cycle'"),
        ("data torch", "NAME must differ from installed modules, got 'torch'; try 'torch_data'"),
        ("callback my_thing --dir file/x", r"cannot write to file/x: .*; --dir writes elsewhere"),
        ("callback np_thing --in-tree gradients", "in the root of a clone of dlo"),
        ("callback np_thing --in-tree gradient", "got 'gradient'; did you mean 'gradients'"),
        ("callback np_thing --in-tree loggers", "with a page in docs/plugins, got 'loggers'"),
        ("callbacky np_thing --in-tree gradients", "did you mean 'callback'"),
    ],
)
def test_what_cannot_be_written_is_an_error_with_the_fix(
    cwd: Path, monkeypatch: pytest.MonkeyPatch, words: str, message: str
) -> None:
    (cwd / "file").touch()
    if "in-tree" in words and "clone" not in message:
        monkeypatch.chdir(ROOT)
    with pytest.raises(DloError, match=message):
        main(["new", *words.split()])
    assert [path.name for path in cwd.iterdir()] == ["file"]
