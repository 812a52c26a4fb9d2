"""Commands and options that installed packages add: found, shown, run, and refused with what is wrong."""

import re
from pathlib import Path

import pytest

from dlo_framework.cli.config_scan import scan
from dlo_framework.cli.main import main
from dlo_framework.errors import DloError
from support.distributions import install

HELLO = '''
from dlo_framework.cli.config_scan import CommandParser


def main(argv):
    """Greet someone.

    Example:
        dlo hello --name Ada
    """
    parser = CommandParser("dlo hello", description="Greet someone.")
    parser.add_argument("--name", required=True)
    print(f"hello {parser.parse_args(argv).name}")


number = 3


def translate(value):
    return {"--run.name": value or "none"}


'''


COMMANDS = {"hello": "main", "nothing": "nothing", "number": "number", "twice": "main", "fit": "main"}
OPTIONS = ("other_config", "both")


@pytest.fixture
def pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution with commands of every kind: one that works, and one for each fault."""
    broken = 'import no_such_module\n\n\ndef main(argv):\n    """Break."""\n'
    working = [f"{name} = cmd_hello:{function}" for name, function in COMMANDS.items()]
    entries = {
        "dlo_framework.commands": [*working, "broken = cmd_broken:main", "gone = cmd_gone:main"],
        "dlo_framework.options": [*(f"{name} = cmd_hello:translate" for name in OPTIONS), "bad = cmd_broken:main"],
    }
    install(tmp_path, "cmd_pack", entries, "2.0", cmd_hello=HELLO, cmd_broken=broken)
    rivals = {"dlo_framework.commands": ["twice = cmd_hello:main"], "dlo_framework.options": ["both = cmd_broken:main"]}
    install(tmp_path, "cmd_rival", rivals, "2.0")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("words", [[], ["--help"], ["fit"]])
def test_the_first_screen_fits_a_terminal_and_says_what_to_do_next(
    pack: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == (2 if words == ["fit"] else 0)
    shown = capsys.readouterr()
    text = shown.out + shown.err
    assert "dlo fit --config quickstart" in text
    assert len(text.splitlines()) <= 24
    assert words == ["fit"] or {"sweep", "plan", "hello"} <= set(re.findall(r"[\w-]+", text))


def test_a_users_command_is_in_the_help_and_runs(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help-all"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "hello greet someone" in [" ".join(line.split()) for line in lines]
    assert "  dlo hello --name Ada" in lines
    assert main(["hello", "--name", "Ada"]) == 0
    assert capsys.readouterr().out == "hello Ada\n"
    assert main(["hello"]) == 2
    assert "the following arguments are required: --name; see 'dlo hello --help'" in capsys.readouterr().err


def test_the_help_imports_no_command_and_names_what_is_missing(pack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Reading the docstring of a module that fails to import, and of one that is gone."""
    assert main(["--help-all"]) == 0
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "broken break" in lines
    assert "gone (not found: no module cmd_gone)" in lines
    conflict = "warning: command names must be unique, got '{}' in {}; uninstall one"
    assert conflict.format("twice", "cmd_pack 2.0 and in cmd_rival 2.0") in out
    assert conflict.format("fit", "cmd_pack 2.0 and in dlo") in out


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", "command 'broken' (cmd_pack 2.0) failed to import: ModuleNotFoundError: No module named 'no_such_m"),
        ("gone", "command 'gone' (cmd_pack 2.0) failed to import: ModuleNotFoundError: No module named 'cmd_gone'"),
        ("nothing", "command 'nothing' (cmd_pack 2.0) failed to import: AttributeError: "),
        ("number", "command 'number' (cmd_pack 2.0) must be a function, got cmd_hello:number, 3; fix its entry point"),
        ("twice", "command names must be unique, got 'twice' in cmd_pack 2.0 and in cmd_rival 2.0; uninstall one"),
        ("helo", "unknown command 'helo'; did you mean 'hello'? available: fit, "),
    ],
)
def test_a_command_that_cannot_run_is_named_with_its_cause(
    pack: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([name]) == 2
    assert message in capsys.readouterr().err


def test_a_users_option_becomes_dlos(pack: Path) -> None:
    assert scan(["fit", "--other_config=a", "--run.dir", "x"]).argv == ["fit", "--run.name", "a", "--run.dir", "x"]
    assert scan(["fit", "--other_config"]).strings == ["fit", "none"]
    with pytest.raises(DloError, match=r"option 'bad' \(cmd_pack 2.0\) failed to import: ModuleNotFoundError"):
        scan(["fit", "--bad"])
    with pytest.raises(DloError, match=r"got '--both' in cmd_pack 2\.0 and in cmd_rival 2\.0; uninstall one"):
        scan(["fit", "--both", "x"])
