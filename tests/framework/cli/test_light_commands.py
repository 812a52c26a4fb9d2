"""What the commands print that import nothing heavy: the shipped configs and the versions."""

import os
import signal
import sys
from pathlib import Path

import pytest

from dlo_framework.cli.main import main

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
