"""A damaged checkpoint is refused, with the file named, and skipped in the search; and saves that are killed."""

import contextlib
import hashlib
import io
import json
import multiprocessing
import os
import random
import signal
import struct
import sys
import time
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dlo_framework.checkpoint import (
    LazyStateDict,
    check,
    load,
    manifest,
    newest_valid,
    read_manifest,
    recover,
    remove,
    save,
    verify,
)
from dlo_framework.checkpoint.state_tree import read_state
from dlo_framework.checkpoint.verify import find_damage, open_checkpoint
from dlo_framework.errors import DloError
from dlo_framework.run import runs
from dlo_framework.shards import Box, FlatShard
from dlo_framework.testing import run_distributed


def a_run(step: int) -> dict:
    weights = {"w": torch.arange(1000.0) + step, "b": torch.ones(7, dtype=torch.bfloat16)}
    return {"global_step": step, "epoch": 0, "state_dict": weights, "optimizer_states": [], "loops": {"n": step}}


@pytest.fixture
def folder(tmp_path):
    for step in (5, 10, 15):
        save(a_run(step), tmp_path / f"step-{step}.ckpt")
    return tmp_path


def flip(path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "flipped in the tensors": ("shard-00000.safetensors", lambda path: flip(path, -100)),
    "flipped in the manifest": ("manifest.json", lambda path: flip(path, path.read_text().index('"step": 15') + 9)),
    "shard truncated": ("shard-00000.safetensors", lambda path: os.truncate(path, 2000)),
    "shard lengthened": ("shard-00000.safetensors", lambda path: path.write_bytes(path.read_bytes() + b"x")),
    "manifest truncated": ("manifest.json", lambda path: os.truncate(path, 100)),
    "shard deleted": ("shard-00000.safetensors", lambda path: path.unlink()),
    "state deleted": ("state.pt", lambda path: path.unlink()),
    "manifest deleted": ("manifest.json", lambda path: path.unlink()),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_damage_is_refused_by_name_and_the_newest_whole_one_is_offered_and_found(folder, kind):
    name, harm = DAMAGES[kind]
    newest = folder / "step-15.ckpt"
    verify(newest)
    harm(newest / name)
    with pytest.raises(DloError, match=name):
        verify(newest)
    with pytest.raises(DloError, match=rf"{name}.*; the newest valid one beside it is .*step-10\.ckpt$"):
        load(newest)
    with pytest.warns(UserWarning, match=rf"skipping .*step-15\.ckpt: .*{name}"):
        assert newest_valid(folder) == folder / "step-10.ckpt"


def test_ranks_that_share_the_hashing_look_at_every_file_once(folder):
    path = folder / "step-5.ckpt"
    for name in ("shard-00000.safetensors", "state.pt"):
        flip(path / name, 300)
        for ranks in (1, 2, 3):
            found = [open_checkpoint(path).find_damage("hash", rank, ranks) for rank in range(ranks)]
            (problem,) = (text for text in found if text is not None)
            assert name in problem
        flip(path / name, 300)


def test_every_flipped_byte_of_every_file_is_found(folder):
    path = folder / "step-5.ckpt"
    for name in ("shard-00000.safetensors", "state.pt"):
        for at in range(0, (path / name).stat().st_size, 97):
            flip(path / name, at)
            with pytest.raises(DloError, match=name):
                verify(path)
            flip(path / name, at)
    # White space between the manifest's entries may change; its content may not.
    text = (path / "manifest.json").read_text()
    for at in range(0, len(text), 7):
        if not text[at].isspace():
            flip(path / "manifest.json", at)
            with pytest.raises(DloError, match=r"manifest\.json"):
                verify(path)
            flip(path / "manifest.json", at)
    verify(path)


def test_a_look_at_the_sizes_finds_what_is_cut_off_and_not_what_is_changed(folder):
    path = folder / "step-15.ckpt"
    flip(path / "shard-00000.safetensors", -100)
    verify(path, "size")
    assert load(path, level="size")["global_step"] == 15
    os.truncate(path / "shard-00000.safetensors", 3000)
    with pytest.raises(DloError, match=r"shard-00000\.safetensors must have \d+ bytes, got 3000"):
        check(path)
    with pytest.raises(DloError, match=r"no checkpoint .*other\.ckpt; choose an existing path, or 'last' or 'best'"):
        check(folder / "other.ckpt")


def test_nothing_valid_is_said_so(tmp_path):
    save(a_run(1), tmp_path / "only.ckpt")
    (tmp_path / "only.ckpt" / "state.pt").unlink()
    with pytest.raises(DloError, match="no other one there is valid"):
        load(tmp_path / "only.ckpt")
    with pytest.warns(UserWarning, match=r"skipping .*only\.ckpt"):
        assert newest_valid(tmp_path) is None
    assert newest_valid(tmp_path / "nowhere") is None


def test_the_newest_is_by_step_and_then_by_time(folder):
    assert newest_valid(folder) == folder / "step-15.ckpt"
    time.sleep(0.01)
    save(a_run(15), folder / "last.ckpt")
    assert newest_valid(folder) == folder / "last.ckpt"
    save(a_run(10), folder / "later.ckpt")
    assert newest_valid(folder) == folder / "last.ckpt"
    weights_only = {key: value for key, value in a_run(99).items() if key != "optimizer_states"}
    save(weights_only, folder / "weights.ckpt")
    assert newest_valid(folder) == folder / "last.ckpt"
    assert newest_valid(folder, weights_only=True) == folder / "weights.ckpt"
    torch.save({**a_run(100), "pytorch-lightning_version": "2.6.6"}, folder / "file.ckpt")
    assert newest_valid(folder) == folder / "file.ckpt"
    flip(folder / "file.ckpt", -3000)
    with pytest.warns(UserWarning, match=r"skipping .*file\.ckpt"):
        assert newest_valid(folder) == folder / "last.ckpt"


def test_last_is_the_newest_whole_one_of_the_newest_run_that_has_one(tmp_path, monkeypatch):
    for name in (runs.FOUND, "RANK", "LOCAL_RANK", "SLURM_PROCID", "NODE_RANK"):
        monkeypatch.delenv(name, raising=False)
    old, new = (tmp_path / f"version_{n}" / "checkpoints" for n in (3, 12))
    save(a_run(50), old / "last.ckpt")
    for step in (20, 30):
        save(a_run(step), new / f"step-{step}.ckpt")
    save(a_run(30), new / "last.ckpt")
    assert runs.find_checkpoint(tmp_path, "last") == new / "last.ckpt"
    # A rank that rank 0 has started uses its result, without reading the files.
    flip(new / "last.ckpt" / "state.pt", 200)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert runs.find_checkpoint(tmp_path, "last") == new / "last.ckpt"
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.warns(UserWarning, match=r"state\.pt"):
        assert runs.find_checkpoint(tmp_path, "last") == new / "step-30.ckpt"
    for path in new.iterdir():
        (path / "manifest.json").unlink()
    with pytest.warns(UserWarning, match=r"manifest\.json"):
        assert runs.find_checkpoint(tmp_path, "last") == old / "last.ckpt"


def test_an_unfinished_save_gives_way_to_the_previous_one(folder):
    (folder / "step-15.ckpt").rename(folder / "last.ckpt.dlo-partial")
    (folder / "last.ckpt.dlo-partial" / "manifest.json").unlink()
    (folder / "step-10.ckpt").rename(folder / "last.ckpt.dlo-old")
    assert load(folder / "last.ckpt")["global_step"] == 10
    recover(folder)
    assert sorted(path.name for path in folder.iterdir()) == ["last.ckpt", "step-5.ckpt"]
    assert load(folder / "last.ckpt")["global_step"] == 10


def test_an_old_single_file_is_replaced_and_removed(tmp_path):
    path = tmp_path / "last.ckpt"
    torch.save({**a_run(1), "pytorch-lightning_version": "2.6.6"}, path)
    assert load(path)["global_step"] == 1
    save(a_run(2), path)
    assert load(path)["global_step"] == 2
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]
    remove(path)
    remove(path)
    assert not list(tmp_path.iterdir())


def as_format_1(path) -> None:
    """Writes a checkpoint's manifest in format 1."""
    found, content = read_manifest(path), json.loads((path / "manifest.json").read_text())
    content["format"] = 1
    for file in content["files"].values():
        file.pop("data", None)
    for group, named in found.tensors.items():
        for name, tensor in named.items():
            content["tensors"][group][name]["chunks"] = [
                {
                    "offsets": chunk.box.offsets,
                    "sizes": chunk.box.sizes,
                    "file": chunk.file,
                    "begin": chunk.begin,
                    "end": chunk.end,
                }
                for chunk in tensor.chunks
            ]
    rewrite(path, content)


def rewrite(path, content: dict) -> None:
    """Replaces a checkpoint's manifest, with its hash."""
    content.pop("manifest_sha256", None)
    content = json.loads(json.dumps(content))
    text = json.dumps({**content, "manifest_sha256": manifest._hash(content)})
    (path / "manifest.json").write_text(text)


def refuse(path, change, message: str) -> None:
    content = json.loads((path / "manifest.json").read_text())
    change(content)
    rewrite(path, content)
    with pytest.raises(DloError, match=message):
        load(path)


def test_a_manifest_of_format_1_is_read(folder):
    path = folder / "step-15.ckpt"
    as_format_1(path)
    verify(path)
    run = load(path)
    assert torch.equal(run["state_dict"]["w"], torch.arange(1000.0) + 15)
    part = torch.zeros(3)
    run["state_dict"].read_part("w", Box((5,), (3,)), part)
    assert part.tolist() == [20.0, 21.0, 22.0]
    save(run, folder / "again.ckpt")
    assert torch.equal(load(folder / "again.ckpt")["state_dict"]["b"], torch.ones(7, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c, w: c["files"].update({"../evil": {"bytes": 1, "sha256": ""}}), "not a plain file name"),
        (lambda c, w: c["files"]["shard-00000.safetensors"].update(data=-1), "data begin before it"),
        (lambda c, w: w[0].__setitem__(0, 3), r"is in 'shard-00003\.safetensors', which the manifest does not list"),
        (lambda c, w: w[0].__setitem__(0, "/etc/passwd"), "damaged checkpoint"),
        (lambda c, w: w[0].__setitem__(1, 10**9), "is outside its file"),
        (lambda c, w: w[0].__setitem__(3, [10, 100]), "has another number of dims"),
        (lambda c, w: w[0].extend([10**15, 0, 1]), "which the manifest does not list"),
        (lambda c, w: w[0].extend([0, 0, 1]), "is empty"),
        (
            lambda c, w: (w[0].extend([2, 1, 1]), c["files"].update({"shard-00001.safetensors": file_of(c)})),
            "along a dim that it does not have",
        ),
        (lambda c, w: w[0].extend([2, 0, 0]), "are in one file"),
        (lambda c, w: w.clear(), "do not tile it"),
        (lambda c, w: w.append([0, 0, [0], [1]]), "do not tile it"),
        (lambda c, w: c["tensors"]["model"]["w"].update(shape=[2000]), "do not tile it"),
        (lambda c, w: c["tensors"]["model"]["w"].update(dtype="load"), "unknown element type"),
        (lambda c, w: c.update(format=99), "format must be at most 2, got 99; update dlo"),
    ],
)
def test_a_manifest_that_was_made_up_is_refused(folder, change, message):
    """An attacker can change the manifest's hash too; it still must not name anything outside the checkpoint."""
    refuse(folder / "step-5.ckpt", lambda c: change(c, c["tensors"]["model"]["w"]["chunks"]), message)


def file_of(content: dict) -> dict:
    return content["files"]["shard-00000.safetensors"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w[0].update(file="shard-00003.safetensors"), "which the manifest does not list"),
        (lambda w: w[0].update(begin=10**9, end=10**9 + 4000), "is outside its file"),
        (lambda w: w[0].update(end=w[0]["end"] - 4), "has the wrong size"),
    ],
)
def test_a_manifest_of_format_1_that_was_made_up_is_refused(folder, change, message):
    as_format_1(folder / "step-5.ckpt")
    refuse(folder / "step-5.ckpt", lambda c: change(c["tensors"]["model"]["w"]["chunks"]), message)


def test_a_state_that_would_execute_is_refused_and_nothing_is_executed(folder, tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.system, (f"touch {tmp_path / 'executed'}",)

    path = folder / "step-5.ckpt"
    torch.save({"loops": Bomb()}, path / "state.pt")
    content = json.loads((path / "manifest.json").read_text())
    raw = (path / "state.pt").read_bytes()
    content["files"]["state.pt"] = {"bytes": len(raw), "sha256": hashlib.sha256(raw).hexdigest()}
    rewrite(path, content)
    for read in (check, load):
        with pytest.raises(DloError, match=r"refusing .*state\.pt: pickle global \w+\.system not allowed"):
            read(path)
    assert not (tmp_path / "executed").exists()


def test_the_mapping_is_a_readers_own_to_change(folder):
    run = load(folder / "step-5.ckpt")
    state = run["state_dict"]
    assert isinstance(state, LazyStateDict)
    assert state.shape("w") == (1000,)
    assert state.dtype("b") == torch.bfloat16
    taken = state.pop("w")
    assert "w" not in state
    assert len(state) == 1
    taken += 1  # This process's copy of the file's pages: the file does not change.
    state["v"] = taken
    state.rename("b", "c")
    state.rename("v", "u")
    assert sorted(state) == ["c", "u"]
    target = torch.zeros(1000, dtype=torch.float64)
    state.read_into("u", target)
    assert torch.equal(target, torch.arange(1000.0).double() + 6)
    with pytest.raises(DloError, match=r"'c' must have the run's shape \(8,\) in .*step-5\.ckpt, got \(7,\)"):
        state.read_into("c", torch.zeros(8))
    with pytest.raises(DloError, match=r"no 'cc' in .*; did you mean 'c'"):
        state.read_into("cc", torch.zeros(8))
    with pytest.raises(KeyError):
        state["b"]
    with pytest.raises(KeyError):
        del state["b"]
    verify(folder / "step-5.ckpt")
    assert torch.equal(load(folder / "step-5.ckpt")["state_dict"]["w"], torch.arange(1000.0) + 5)


# --- bytes that are changed at random ------------------------------------------------------------------------------


def mutate(draw: random.Random, content: bytes) -> bytes:
    """Returns a content in which some bytes are changed, left out, repeated or inserted."""
    found = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8))):
        at, length = draw.randrange(len(found) + 1), draw.choice((1, 2, 8, 64))
        match draw.randrange(5):
            case 0:
                found[at : at + length] = draw.randbytes(length)
            case 1:
                del found[at : at + length]
            case 2:
                found[at:at] = draw.choice((b"1e999", b"-1", b"[" * 5000, b'{"a":' * 5000, b"\xff", b"null", b"9" * 30))
            case 3:
                found[at:at] = found[at : at + length]
            case _:
                found[at : at + 1] = draw.choice((b"\x00", b"\x80", b"\x8a\xff", b"R", b"(", b".", b"0", b"-"))
    return bytes(found)


def write_state_of(path, draw: random.Random, state: bytes, packed: bool) -> None:
    """Writes a mutated file of torch; if packed, its pickle is mutated, and the archive around it is whole."""
    if not packed:
        path.write_bytes(mutate(draw, state))
        return
    with zipfile.ZipFile(io.BytesIO(state)) as archive, zipfile.ZipFile(path, "w") as changed:
        for name in archive.namelist():
            content = archive.read(name)
            changed.writestr(name, mutate(draw, content) if name.endswith("data.pkl") else content)


def write_manifest(path, draw: random.Random, text: bytes) -> None:
    """Writes a mutated manifest, half of the time with the hash of its content."""
    content = mutate(draw, text)
    with contextlib.suppress(ValueError, RecursionError):
        parsed = json.loads(content)
        if draw.random() < 0.5 and isinstance(parsed, dict):
            parsed.pop("manifest_sha256", None)
            content = json.dumps({**parsed, "manifest_sha256": manifest._hash(parsed)}).encode()
    path.write_bytes(content)


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["manifest", "state", "packed state", "file", "packed file"])
def test_mutated_bytes_are_read_or_refused_in_one_line(tmp_path, kind, count):
    draw, folder, single = random.Random(kind), tmp_path / "whole.ckpt", tmp_path / "single.ckpt"
    save(a_run(5), folder)
    torch.save({**a_run(5), "pytorch-lightning_version": "2.6.6"}, single)
    changed = {"manifest": folder / "manifest.json"}.get(kind, folder / "state.pt" if "state" in kind else single)
    original = changed.read_bytes()
    readers = [lambda: check(folder), lambda: read_manifest(folder), lambda: read_state(folder / "state.pt")]
    if "file" in kind:
        readers = [lambda: check(single), lambda: load(single, level=None), lambda: verify(single)]
    outcomes = set()
    for _ in range(count):
        if kind == "manifest":
            write_manifest(changed, draw, original)
        else:
            write_state_of(changed, draw, original, kind.startswith("packed"))
        for reader in readers:
            try:
                reader()
                outcomes.add("")
            except DloError as error:
                outcomes.add(str(error))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            newest_valid(tmp_path)  # Nothing in a folder breaks the search.
    assert len(outcomes) > 1
    assert not [text for text in outcomes if "\n" in text]


def test_a_file_that_claims_to_span_disks_is_damaged(tmp_path):
    path = tmp_path / "single.ckpt"
    torch.save({**a_run(5), "pytorch-lightning_version": "2.6.6"}, path)
    content = path.read_bytes()
    end, locator = content.rindex(b"PK\5\6"), struct.pack("<4sLQL", b"PK\6\7", 1, 0, 2)
    path.write_bytes(content[:end] + locator + content[end:])
    for level in ("size", "hash"):
        assert "span multiple disks" in (find_damage(path, level) or ""), level


def test_files_of_a_user_beside_checkpoints_stay(folder):
    own = ["last.ckpt.old", "notes.removed", "log.partial", "step-5.ckpt.old"]
    for name in own:
        (folder / name).mkdir()
        (folder / name / "notes.txt").write_text("mine")
    save(a_run(20), folder / "last.ckpt")
    save(a_run(21), folder / "last.ckpt")
    recover(folder)
    assert all((folder / name / "notes.txt").read_text() == "mine" for name in own)
    assert newest_valid(folder) == folder / "last.ckpt"


# --- a process that is killed during a save leaves a complete checkpoint, at whichever moment -----------------------


LEFTOVERS = {".dlo-partial", ".dlo-old", ".dlo-removed"}


def a_step(step: int, rank: int = 0, world_size: int = 1, count: int = 1000) -> dict:
    """A checkpoint in which every number is the step."""
    part = count // world_size
    weights = FlatShard(torch.full((part,), float(step)), torch.Size([part * world_size]), part * rank)
    return {
        "global_step": step,
        "epoch": 0,
        "state_dict": {"w": weights},
        "optimizer_states": [{"state": {"w": {"exp_avg": weights}}, "param_groups": [{"params": ["w"]}]}],
        "loops": {"step": step},
    }


def step_of(path: Path) -> int:
    """Step of a complete checkpoint; raises if any part of it has another."""
    run = load(path)
    step = run["global_step"]
    assert run["loops"] == {"step": step}
    assert run["state_dict"]["w"].unique().tolist() == [step]
    assert run["optimizer_states"][0]["state"]["w"]["exp_avg"].unique().tolist() == [step]
    return step


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix in LEFTOVERS)


def check_after_a_kill(folder: Path) -> int:
    """Step that a run would resume from: the same before and after its start has removed the leftovers."""
    found = newest_valid(folder)
    assert found is not None
    step = step_of(found)
    recover(folder)
    assert leftovers(folder) == []
    again = newest_valid(folder)
    assert again is not None
    assert step_of(again) == step
    assert step_of(folder / "last.ckpt") in (step, step - 1)
    return step


def start(work: Callable[..., object], *arguments: object) -> multiprocessing.Process:
    """Starts a forked process."""
    child = multiprocessing.get_context("fork").Process(target=work, args=arguments)
    child.start()
    return child


def exit_code(child: multiprocessing.Process, seconds: float = 60.0) -> int:
    """Waits for a process; returns its exit status, negative for a signal."""
    child.join(seconds)
    assert child.exitcode is not None, f"process {child.pid} did not end within {seconds} s"
    return child.exitcode


def kill_at(event_number: int, folder: Path) -> None:
    """Kills this process before its n-th operation: a file in ``folder`` opened, any created, renamed or removed."""
    count = 0

    def hook(event: str, arguments: tuple) -> None:
        nonlocal count
        opened = event == "open" and str(folder) in str(arguments[0])
        if opened or event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"):
            count += 1
            if count == event_number:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def overwrite(number: int, here: Path) -> None:
    kill_at(number, here)
    save(a_step(2), here / "last.ckpt")
    remove(here / "step-1.ckpt")


def kill_at_each_step(folder: Path, single_file: bool) -> list[int]:
    """Overwrites ``last.ckpt`` and purges, killed before each operation; returns the steps resumed from."""
    resumed = []
    for number in range(1, 1000):
        here = folder / str(number)
        save(a_step(1), here / "step-1.ckpt")
        if single_file:
            plain = {**a_step(1), "state_dict": {"w": torch.ones(3)}, "pytorch-lightning_version": "2.6.6"}
            plain["optimizer_states"] = [{"state": {"w": {"exp_avg": torch.ones(3)}}, "param_groups": []}]
            torch.save(plain, here / "last.ckpt")
        else:
            save(a_step(1), here / "last.ckpt")

        status = exit_code(start(overwrite, number, here))
        resumed.append(check_after_a_kill(here))
        if status == 0:
            return resumed
        assert status == -signal.SIGKILL
    raise AssertionError("the save never ended")


def kill_at_each_step_of_both(rank: int, world_size: int, folder: Path) -> list[list[int]]:
    return [kill_at_each_step(folder / str(single_file), single_file) for single_file in (False, True)]


def save_steps(rank: int, ranks: int, here: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{here}.store", rank=rank, world_size=ranks)
    for step in range(2, 1000):
        state = a_step(step, rank, ranks, count=400_000)
        save(state, here / f"step-{step}.ckpt", group=dist.group.WORLD)
        save(state, here / "last.ckpt", group=dist.group.WORLD)
        if rank == 0:
            remove(here / f"step-{step - 1}.ckpt")


def kill_ranks(rank: int, world_size: int, folder: Path, trials: int, ranks: int, seed: int) -> list[int]:
    """Kills one of several saving ranks, or all of them, at random moments; returns the steps resumed from."""
    dice = random.Random(seed)
    resumed = []
    for trial in range(trials):
        here = folder / f"trial-{trial}"
        save(a_step(1), here / "step-1.ckpt")
        save(a_step(1), here / "last.ckpt")

        children = [start(save_steps, number, ranks, here) for number in range(ranks)]
        until = time.monotonic() + 60
        while not (here / "step-2.ckpt").exists() and time.monotonic() < until:
            time.sleep(0.005)
        time.sleep(dice.random() * 0.3)
        victims = children if dice.random() < 0.3 else [dice.choice(children)]
        for child in victims:
            child.kill()
        statuses = [exit_code(child, 30) for child in children]
        assert 0 not in statuses
        resumed.append(check_after_a_kill(here))
    return resumed


def test_a_kill_before_each_operation_leaves_a_whole_checkpoint(tmp_path):
    """Forked, because each kill takes a process; over an older checkpoint's folder, and its single file."""
    for resumed in run_distributed(kill_at_each_step_of_both, 1, tmp_path, backend=None)[0]:
        # A save and a removal have at least this many operations; from some moment on the new step exists, and stays.
        assert len(resumed) > 12
        assert resumed == sorted(resumed)
        assert set(resumed) == {1, 2}


def test_a_killed_rank_ends_the_others_and_leaves_a_whole_checkpoint(tmp_path):
    (resumed,) = run_distributed(kill_ranks, 1, tmp_path, 3, 2, 0, backend=None)
    assert all(step >= 2 for step in resumed)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_fifty_kills_of_one_of_four_ranks_or_of_all(tmp_path):
    (resumed,) = run_distributed(kill_ranks, 1, tmp_path, 50, 4, 1, backend=None, timeout=1700)
    assert len(resumed) == 50
    assert all(step >= 2 for step in resumed)
