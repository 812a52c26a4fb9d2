"""Packages add formats to `dlo checkpoint convert` by entry points; one that cannot be imported is named."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dlo_framework.checkpoint import load, read_manifest, save
from dlo_framework.checkpoint.formats import find_importer
from dlo_framework.cli.main import main

FORMAT = """
import json
from pathlib import Path

import torch

from dlo_framework.checkpoint.formats import CheckpointFormat, ForeignCheckpoint


class TextFormat(CheckpointFormat):
    def recognises(self, path: Path) -> bool:
        return path.suffix == ".weights"

    def read(self, path: Path) -> ForeignCheckpoint:
        weights = {name: torch.tensor(value) for name, value in json.loads(path.read_text()).items()}
        return ForeignCheckpoint({"state_dict": weights, "pytorch-lightning_version": "2.6.6"}, ["it has no step"])
"""

Install = Callable[[str, str, str], None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a distribution with one module and one format on the path."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))

    def write(dist: str, entry: str, source: str) -> None:
        info = tmp_path / "site" / f"{dist}-1.2.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 1.2\n")
        (info / "entry_points.txt").write_text(f"[dlo_framework.checkpoint_formats]\n{entry}\n")
        module = entry.partition("= ")[2].partition(":")[0]
        (tmp_path / "site" / f"{module}.py").write_text(source)

    return write


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "theirs.weights"
    path.write_text('{"w": [1.0, 2.0, 3.0]}')
    return path


def test_a_users_format_is_converted(tmp_path, install, weights, capsys) -> None:
    install("text_pack", "Text = ck_text:TextFormat", FORMAT)
    assert main(["checkpoint", "convert", str(weights), str(tmp_path / "made")]) == 0
    printed = capsys.readouterr()
    assert "it has no step" in printed.err
    assert printed.out == f"wrote {tmp_path / 'made'}\n"
    assert load(tmp_path / "made")["state_dict"]["w"].tolist() == [1, 2, 3]
    assert read_manifest(tmp_path / "made").about["imported_from"] == "theirs.weights (Text)"
    assert main(["checkpoint", "convert", str(weights), str(tmp_path / "made")]) == 2
    assert f"{tmp_path / 'made'} exists; remove it, or choose another path" in capsys.readouterr().err
    assert main(["checkpoint", "convert", str(weights), str(tmp_path / "one.safetensors")]) == 2
    assert f"TARGET must be a folder for the Text file {weights}, got" in capsys.readouterr().err


def test_a_broken_importer_is_named_with_its_distribution_and_cause(tmp_path, install, weights, capsys) -> None:
    install("broken_pack", "Broken = ck_broken:Format", "raise RuntimeError('boom')")
    install("wrong_pack", "Wrong = ck_wrong:Format", "class Format: ...")
    assert main(["checkpoint", "convert", str(weights), str(tmp_path / "made")]) == 2
    message = "checkpoint format 'Broken' (broken_pack 1.2) failed to import: RuntimeError: boom"
    assert message in capsys.readouterr().err
    (tmp_path / "site" / "ck_broken.py").write_text(FORMAT.replace("TextFormat", "Format").replace(".weights", ".x"))
    assert main(["checkpoint", "convert", str(weights), str(tmp_path / "made")]) == 2
    message = "checkpoint format 'Wrong' (wrong_pack 1.2) must be a subclass of dlo_framework.checkpoint.formats"
    assert message in capsys.readouterr().err


def test_a_broken_importer_does_not_disturb_what_others_read(tmp_path, install, weights, capsys) -> None:
    install("broken_pack", "Broken = ck_broken_too:Format", "raise RuntimeError('boom')")
    install("text_pack", "Text = ck_text_too:TextFormat", FORMAT)
    assert main(["checkpoint", "convert", str(weights), str(tmp_path / "made")]) == 0
    for target in ("one.safetensors", "again.ckpt"):
        source = tmp_path / "made" if target == "one.safetensors" else tmp_path / "one.safetensors"
        assert main(["checkpoint", "convert", str(source), str(tmp_path / target)]) == 0
    assert load(tmp_path / "again.ckpt")["state_dict"]["w"].tolist() == [1, 2, 3]
    torch.save({"state_dict": {"w": torch.ones(2)}, "pytorch-lightning_version": "2.6.6"}, tmp_path / "lightning.ckpt")
    assert main(["checkpoint", "convert", str(tmp_path / "lightning.ckpt"), str(tmp_path / "folder")]) == 0
    assert "note: checkpoint format 'Broken' (broken_pack 1.2) failed to import" in capsys.readouterr().err


def test_deepspeeds_folders_are_a_plug_ins(tmp_path) -> None:
    save({"state_dict": {"w": torch.ones(2)}}, tmp_path / "ours.ckpt")
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "latest").write_text("step")
    assert find_importer(tmp_path / "ours.ckpt") is None
    found = find_importer(tmp_path / "theirs")
    assert found is not None
    assert (found.name, type(found.format).__module__.partition(".")[0]) == ("DeepSpeed", "dlo_plugins")
