"""What the commands print that import nothing heavy: shipped configs, versions, the machine."""

import json
import os
import shutil
import signal
import sys
from collections import namedtuple
from importlib import metadata
from pathlib import Path

import pytest

from dlo_framework.cli.commands import doctor_command
from dlo_framework.cli.commands.doctor_command import check_packages, check_ranks_meet, check_storage, missing_extras
from dlo_framework.cli.main import main
from dlo_framework.registry import Registry

CONFIGS = Path(__file__).parents[3] / "configs"


def test_every_shipped_config_is_listed_with_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs"]) == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert listed.keys() == {path.relative_to(CONFIGS).with_suffix("").as_posix() for path in CONFIGS.rglob("*.yaml")}
    first = (CONFIGS / "quickstart.yaml").read_text().splitlines()[0]
    assert listed["quickstart"] == first.removeprefix("# ")


def test_a_config_is_printed_as_it_stands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["configs", "digits/batch_mix"]) == 0
    assert capsys.readouterr().out == (CONFIGS / "digits" / "batch_mix.yaml").read_text()
    assert main(["configs", "digits/bach_mix"]) == 2
    assert "did you mean 'digits/batch_mix'?" in capsys.readouterr().err


def test_the_versions_are_told_and_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlo_framework.extensions.PACKAGES", ("torch", "no-such-package"))
    assert main(["--version"]) == 0
    told = dict(
        line.split(maxsplit=1) for line in capsys.readouterr().out.replace("not installed", "absent").splitlines()
    )
    import torch

    assert torch.__version__.startswith(told["torch"])
    assert told["absent"] == "no-such-package"
    assert {"dlo_framework", "python", "platform"} <= told.keys()


def test_ctrl_c_at_once_is_told_in_a_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(words: list[str]) -> int:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            if words:  # As Lightning does.
                sys.exit(1)
            raise

    monkeypatch.setattr("dlo_framework.cli.main._dispatch", interrupt)
    for words in ([], ["fit"]):
        assert main(words) == 130
        assert "interrupted; " in capsys.readouterr().err
    monkeypatch.setattr("dlo_framework.cli.main._dispatch", lambda words: sys.exit(3))
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 3


def test_a_reader_that_leaves_cuts_a_training_short_and_a_list_not(monkeypatch: pytest.MonkeyPatch) -> None:
    def write_on(words: list[str]) -> int:
        raise BrokenPipeError

    monkeypatch.setattr("dlo_framework.cli.main._dispatch", write_on)
    monkeypatch.setattr("dlo_framework.cli.main.os.dup2", lambda *_: None)
    monkeypatch.setattr("sys.stdout", open(os.devnull, "w"))  # noqa: SIM115  It is pytest's to close.
    assert main(["plugins"]) == 0
    assert main(["fit", "--config", "quickstart"]) == 128 + signal.SIGPIPE


@pytest.mark.parametrize("command", ["fit", "validate"])
def test_the_help_of_a_run_is_one_screen(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--config", "quickstart", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 104
    text = " ".join(" ".join(lines).split())
    assert "CausalLM, ImageClassifier, MaskedLM, PreferenceLM, Seq2SeqLM" in text
    assert "DigitsData, ImageFolderData, MaskedTextData, PreferenceData, Seq2SeqData, TextData" in text
    assert "auto, ddp, deepspeed, fsdp, hsdp, mesh, zero1, zero2, zero3" in text
    assert ("last, best, or auto" in text) == (command == "fit")


# --- ``dlo doctor``: what it finds of this machine, and what it says of a bad one ------------------------------------


Usage = namedtuple("Usage", "total used free")


def test_this_machine_can_run(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    assert main(["doctor", "--json"]) == 0
    found = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert found["torch"]["text"] == metadata.version("torch")
    assert found["file system"]["status"] == found["ports"]["status"] == found["plug-ins"]["status"] == "ok"
    assert found["2 ranks"]["text"].startswith("all_reduce of 16.8 MB over ")
    assert found["2 ranks"]["text"].endswith("/s a rank")
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"


def test_a_full_disk_and_little_shared_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(10**9, 10**9 - 5 * 10**6, 5 * 10**6))
    found = {each.name: each for each in check_storage(tmp_path / "runs")}
    assert found["disk"].status == "note"
    assert "5.0 MB free" in found["disk"].text
    assert "--run.dir" in found["disk"].text
    if Path("/dev/shm").is_dir():
        assert "num_workers: 0" in found["shared memory"].text


def test_a_file_system_without_links_fails(tmp_path, monkeypatch):
    def refuse(*paths: Path) -> None:
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(doctor_command.os, "link", refuse)
    (found,) = [each for each in check_storage(tmp_path) if each.name == "file system"]
    assert found.status == "fails"
    assert "Operation not permitted" in found.text
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_cannot_meet_fail():
    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("no route\nto host")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dlo_framework.testing.spawn.run_distributed", broken)
        finding = check_ranks_meet(2)
    assert finding == ("2 ranks", "fails", "cannot reduce over gloo: to host")


def test_what_an_extra_lacks_is_named(monkeypatch):
    monkeypatch.setattr(doctor_command, "_is_installed", lambda package: package != "transformers")
    missing = missing_extras()
    assert missing["llm"] == ["transformers"]
    assert missing["gpu"] == []
    assert not {"dev", "test"} & set(missing)
    (found,) = [each for each in check_packages(Registry()) if each.name == "extra llm"]
    assert found == ("extra llm", "note", "without transformers; pip install 'dlo_framework[llm]'")


@pytest.mark.parametrize("ranks", ["1", "-2"])
def test_a_number_of_ranks_that_cannot_be(ranks, capsys):
    assert main(["doctor", "--ranks", ranks]) == 2
    assert f"--ranks must be 0 or at least 2, got {ranks}" in capsys.readouterr().err
