"""``dlo doctor``: what it finds of this machine, and what it says of a bad one."""

import json
import shutil
from collections import namedtuple
from importlib import metadata
from pathlib import Path

import pytest

from dlo_framework.cli.commands import doctor_command
from dlo_framework.cli.commands.doctor_command import check_packages, check_ranks_meet, check_storage, missing_extras
from dlo_framework.cli.main import main
from dlo_framework.registry import Registry

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
