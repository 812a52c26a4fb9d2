"""All files of a checkpoint are reached through the store of its path: here a remote one, in memory."""

import json
import re
from pathlib import Path

import pytest
import torch
from jsonargparse import Namespace

from dlo_framework.checkpoint import (
    check,
    load,
    loading,
    locate,
    newest_valid,
    note_resumption,
    recover,
    remove,
    resumptions,
    save,
    step_of,
    verify,
)
from dlo_framework.checkpoint import store as stores
from dlo_framework.checkpoint.formats.safetensors_file import from_single_file
from dlo_framework.checkpoint.history import superseded
from dlo_framework.checkpoint.store import LocalStore, store_of
from dlo_framework.cli.lightning_cli import DloCLI
from dlo_framework.cli.main import main
from dlo_framework.errors import DloError
from dlo_framework.shards import FlatShard, full_box
from support.distributions import install
from support.memory_store import MemoryStore

RUN = Path("mem:/bucket/run")


@pytest.fixture
def memory(tmp_path, monkeypatch):
    """The registered store; the file system's is not to be used."""
    register(tmp_path, monkeypatch, "mem = support.memory_store:MemoryStore")
    monkeypatch.setattr(MemoryStore, "files", {})
    monkeypatch.setattr(MemoryStore, "log", [])

    def refuse(self, path, *others):
        raise AssertionError(f"{path} is not on a file system")

    for name in ("status", "list", "open", "create", "make_folder", "rename", "remove", "sync", "map"):
        monkeypatch.setattr(LocalStore, name, refuse)
    return MemoryStore


def register(folder: Path, monkeypatch, *entries: str, **modules: str) -> None:
    install(folder / "site", "store_pack", {"dlo_framework.checkpoint_stores": list(entries)}, **modules)
    monkeypatch.syspath_prepend(str(folder / "site"))
    stores._registered.cache_clear()


@pytest.fixture(autouse=True)
def _forget():
    yield
    stores._registered.cache_clear()


def a_run(step: int) -> dict:
    weights = {"w": torch.arange(600.0).view(20, 30) + step, "b": torch.ones(7, dtype=torch.bfloat16)}
    moments = {"w": {"exp_avg": torch.full((20, 30), float(step)), "step": torch.tensor(step)}}
    optimizer = {"state": moments, "param_groups": [{"params": ["w"], "lr": 0.1}]}
    return {"global_step": step, "epoch": 0, "state_dict": weights, "optimizer_states": [optimizer], "n": step}


def test_a_checkpoint_is_saved_verified_loaded_and_removed_in_another_store(memory):
    save(a_run(5), RUN / "step-5.ckpt")
    save(a_run(5), RUN / "last.ckpt")
    save(a_run(9), RUN / "last.ckpt")
    verify(RUN / "last.ckpt")
    check(RUN / "last.ckpt")
    found = load("mem://bucket/run/last.ckpt")
    assert (found["global_step"], found["n"]) == (9, 9)
    expected = a_run(9)["state_dict"]
    assert torch.equal(found["state_dict"]["w"], expected["w"])
    assert torch.equal(found["state_dict"]["b"], expected["b"])
    assert found["optimizer_states"][0]["state"]["w"]["exp_avg"].unique().tolist() == [9]
    shard = FlatShard(torch.empty(100), torch.Size([20, 30]), 37)
    found["state_dict"].read_into("w", shard)
    assert torch.equal(shard.data, expected["w"].flatten()[37:137])
    half = torch.empty(20, 30, dtype=torch.float16)
    found["state_dict"].read_into("w", half)
    assert torch.equal(half, expected["w"].half())
    remove(RUN / "step-5.ckpt")
    assert memory().list(RUN) == ["last.ckpt"]


def test_history_is_kept_in_another_store(memory):
    for step in (5, 9):
        save(a_run(step), RUN / f"step-{step}.ckpt")
    assert newest_valid(RUN) == RUN / "step-9.ckpt"
    note_resumption(RUN / "step-5.ckpt")
    assert resumptions(RUN) == 1
    assert list(superseded(RUN)) == ["step-9.ckpt"]
    assert newest_valid(RUN) == RUN / "step-5.ckpt"
    assert step_of(RUN / "step-5.ckpt") == 5
    assert step_of(RUN / "step-7.ckpt") == -1


def test_damage_in_another_store_is_named_and_the_newest_valid_one_is_offered(memory):
    for step in (5, 9):
        save(a_run(step), RUN / f"step-{step}.ckpt")
    path = RUN / "step-9.ckpt" / "shard-00000.safetensors"
    memory.files[path] = memory.files[path][:-1] + bytes([memory.files[path][-1] ^ 1])
    with pytest.raises(DloError, match=r"SHA-256 of mem:/.*shard-00000.*; the newest valid one beside it is .*step-5"):
        load(RUN / "step-9.ckpt")
    del memory.files[path]
    with pytest.warns(UserWarning, match=r"skipping mem:/.*step-9\.ckpt: .*shard-00000\.safetensors is missing"):
        assert newest_valid(RUN) == RUN / "step-5.ckpt"


def test_the_manifest_is_written_last_and_names_change_once_the_files_are_durable(memory):
    save(a_run(5), RUN / "last.ckpt")
    memory.log.clear()
    save(a_run(9), RUN / "last.ckpt")
    assert memory.log == [
        ("make_folder", "last.ckpt.dlo-partial"),
        ("create", "shard-00000.safetensors"),
        ("create", "state.pt"),
        ("create", "manifest.json"),
        ("sync", "last.ckpt.dlo-partial"),
        ("rename", "last.ckpt", "last.ckpt.dlo-old"),
        ("rename", "last.ckpt.dlo-partial", "last.ckpt"),
        ("sync", "run"),
    ]


def test_a_kill_between_the_renames_is_recovered_in_another_store(memory):
    save(a_run(5), RUN / "last.ckpt")
    save(a_run(9), RUN / "new.ckpt")
    memory().rename(RUN / "last.ckpt", RUN / "last.ckpt.dlo-old")
    memory().rename(RUN / "new.ckpt", RUN / "last.ckpt.dlo-partial")
    assert locate(RUN / "last.ckpt") == RUN / "last.ckpt.dlo-partial"
    assert load(RUN / "last.ckpt")["global_step"] == 9
    recover(RUN)
    assert memory().list(RUN) == ["last.ckpt"]
    assert load(RUN / "last.ckpt")["global_step"] == 9


def test_an_existing_checkpoint_in_another_store_is_not_overwritten_by_a_conversion(memory):
    save(a_run(5), RUN / "last.ckpt")
    with pytest.raises(DloError, match=r"mem:/bucket/run/last\.ckpt exists; remove it, or choose another path"):
        from_single_file(Path("one.safetensors"), RUN / "last.ckpt")


def test_the_commands_read_a_checkpoint_of_another_store(tmp_path, monkeypatch, capsys):
    register(tmp_path, monkeypatch, "mem = support.memory_store:MemoryStore")
    monkeypatch.setattr(MemoryStore, "files", {})
    save({**a_run(9), "pytorch-lightning_version": "2.6.6"}, RUN / "last.ckpt")
    path = "mem://bucket/run/last.ckpt"
    assert main(["checkpoint", "inspect", path]) == 0
    assert "w          20 x 30  float32   2.4 kB" in capsys.readouterr().out
    assert main(["checkpoint", "inspect", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 9
    for words in (["verify"], ["verify", "--quick"]):
        assert main(["checkpoint", words[0], path, *words[1:]]) == 0
    targets = {"convert": ("one.safetensors", "theirs.ckpt"), "export": ("w.safetensors", "w.pt")}
    for command, names in targets.items():
        for name in names:
            assert main(["checkpoint", command, path, str(tmp_path / name)]) == 0
            assert (tmp_path / name).is_file()
    assert main(["checkpoint", "convert", str(tmp_path / "one.safetensors"), "mem://bucket/run/back.ckpt"]) == 0
    assert main(["checkpoint", "convert", str(tmp_path / "theirs.ckpt"), "mem://bucket/run/third.ckpt"]) == 0
    for name in ("back.ckpt", "third.ckpt"):
        assert torch.equal(load(RUN / name)["state_dict"]["w"], a_run(9)["state_dict"]["w"])
    assert main(["checkpoint", "inspect", "mem://bucket/run/none.ckpt"]) == 2
    assert "no checkpoint mem:/bucket/run/none.ckpt" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "mem://bucket/run/one.ckpt"],
        ["verify", "mem://bucket/run/one.ckpt"],
        ["convert", "mem://bucket/run/other", "ours.ckpt"],
        ["export", "mem://bucket/run/one.ckpt", "w.safetensors"],
        ["convert", "mem://bucket/run/last.ckpt", "mem://bucket/run/one.safetensors"],
        ["export", "mem://bucket/run/last.ckpt", "mem://bucket/run/w.safetensors"],
    ],
)
def test_the_commands_refuse_what_another_store_does_not_hold_and_leave_nothing(words, tmp_path, monkeypatch, capsys):
    register(tmp_path, monkeypatch, "mem = support.memory_store:MemoryStore")
    monkeypatch.setattr(MemoryStore, "files", {})
    monkeypatch.chdir(tmp_path)
    save(a_run(9), RUN / "last.ckpt")
    MemoryStore().make_folder(RUN / "other")
    MemoryStore.files[RUN / "one.ckpt"] = b"PK"
    before = sorted(MemoryStore.files)
    assert main(["checkpoint", *words]) == 2
    message = capsys.readouterr().err
    assert re.search(r"must be on a file system, got mem:/.*; a store holds checkpoint folders", message), message
    assert sorted(MemoryStore.files) == before
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


def test_a_single_file_in_another_store_is_refused_before_a_run_and_skipped_in_the_history(memory):
    save(a_run(5), RUN / "step-5.ckpt")
    memory.files[RUN / "one.ckpt"] = b"PK"
    for read in (check, load):
        with pytest.raises(DloError, match=r"a checkpoint in one file must be on a file system, got mem:/.*one\.ckpt"):
            read(RUN / "one.ckpt")
    with pytest.warns(
        UserWarning, match=r"skipping mem:/.*one\.ckpt: a checkpoint in one file must be on a file system"
    ):
        assert newest_valid(RUN) == RUN / "step-5.ckpt"


def test_slices_with_gaps_are_read_by_ranges_of_a_bucket_at_most(memory, monkeypatch):
    lengths = []
    read = loading._read_range

    def counted(file, begin, end, dtype):
        lengths.append(end - begin)
        return read(file, begin, end, dtype)

    monkeypatch.setattr(loading, "BUCKET_BYTES", 500)
    monkeypatch.setattr(loading, "_read_range", counted)
    save(a_run(5), RUN / "last.ckpt")
    state, target = load(RUN / "last.ckpt")["state_dict"], torch.empty(20, 2)
    state.read_part("w", full_box((20, 2)), target)
    assert torch.equal(target, a_run(5)["state_dict"]["w"][:, :2])
    assert len(lengths) > 3
    assert max(lengths) <= 500


def test_a_store_is_found_by_its_scheme_and_a_broken_one_is_named(tmp_path, monkeypatch):
    sources = {"ck_bad_store": "raise RuntimeError('boom')", "ck_odd_store": "class Store: ..."}
    register(tmp_path, monkeypatch, "bad = ck_bad_store:Store", "odd = ck_odd_store:Store", **sources)
    assert type(store_of(tmp_path)) is LocalStore
    with pytest.raises(DloError, match=r"'bad' \(store_pack 1\.2\) failed to import: RuntimeError: boom"):
        load("bad://bucket/last.ckpt")
    with pytest.raises(
        DloError, match=r"'odd' \(store_pack 1\.2\) must be a subclass of dlo_framework.*CheckpointStore, got ck_odd"
    ):
        load("odd://bucket/last.ckpt")
    with pytest.raises(DloError, match=r"must be on a file system, or .*, got s3://bucket/last\.ckpt"):
        load("s3://bucket/last.ckpt")


def test_predictions_from_another_store_are_written_to_the_runs_of_the_config(memory) -> None:
    cli = DloCLI.__new__(DloCLI)
    cli.command = "predict"
    run, trainer = Namespace(dir=None, name="digits", predictions="pt"), Namespace(default_root_dir=None)
    for folder, expected in ((RUN, "runs/digits"), (Path("kept/version_3"), "kept/version_3")):
        path = str(folder / "checkpoints" / "last.ckpt")
        cli.config = Namespace(predict=Namespace(ckpt_path=path, run=run, trainer=trainer))
        assert cli.predictions_path() == Path(expected) / "predictions-last.pt"
