"""Ranks that save and load in any layout: the files of each, failures, a full disk, saves in the background."""

import errno
import hashlib
import itertools
import json
import os
import resource
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, zeros

from dlo_framework.checkpoint import (
    AsyncSaver,
    SafeCheckpointIO,
    load,
    newest_valid,
    read_manifest,
    save,
    saving,
    verify,
)
from dlo_framework.errors import DloError
from dlo_framework.shards import FlatShard
from dlo_framework.testing import run_distributed


def flat(value: float, rank: int, world_size: int, count: int = 4) -> dict:
    part = count // world_size
    return {"w": FlatShard(torch.full((part,), value), torch.Size([count]), rank * part)}


def error_of(work) -> str:
    try:
        work()
    except (DloError, AssertionError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def blocked(rank: int):
    """Creates a folder at the path of rank 1's file: a disk that raises an error, on one rank."""
    wait = saving._wait_for

    def block(partial, of_rank):
        wait(partial, of_rank)
        if of_rank == 1:
            (partial / "shard-00001.safetensors").mkdir()

    saving._wait_for = block
    return lambda: setattr(saving, "_wait_for", wait)


def replicated(rank: int, world_size: int, folder: Path) -> None:
    mesh = init_device_mesh("cpu", (world_size,))
    weights = {f"w{n}": zeros(250_000, device_mesh=mesh, placements=[Replicate()]) for n in range(4)}
    # A buffer that differs between ranks: rank 0's is the one that plain data parallelism would keep.
    small = torch.full((1000,), float(rank))
    save({"state_dict": {**weights, "small": small}}, folder / "r.ckpt", group=dist.group.WORLD)


def failing(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    group, path = dist.group.WORLD, folder / "bad.ckpt"
    good = folder / "good.ckpt"
    save({"state_dict": flat(1.0, rank, world_size)}, good, group=group)
    ones = {"w": torch.ones(4)}
    gap = {"w": FlatShard(torch.ones(1), torch.Size([4]), rank)}
    found = {
        "unsafe": error_of(lambda: save({"state_dict": ones, "mine": {"f": save}}, path, group=group)),
        "gap": error_of(lambda: save({"state_dict": gap}, path, group=group)),
    }
    restore = blocked(rank)
    found["blocked"] = error_of(lambda: save({"state_dict": flat(9.0, rank, world_size)}, good, group=group))
    restore()
    return found


def disk(rank: int, world_size: int, small_disk: Path) -> dict[str, str]:
    """A disk of 20 MB that is too small from the start, and one that another process fills during the save."""
    group, path = dist.group.WORLD, small_disk / "last.ckpt"

    def big(value: float, count: int) -> dict:
        return {"global_step": int(value), "state_dict": flat(value, rank, world_size, count)}

    save(big(1.0, 10**6), path, group=group)
    found = {"before": error_of(lambda: save(big(2.0, 10**7), path, group=group))}

    def fill(event: str, arguments: tuple) -> None:
        if (
            event == "open"
            and rank == 1
            and str(arguments[0]).endswith("last.ckpt.dlo-partial/shard-00001.safetensors")
        ):
            free = os.statvfs(small_disk)
            (small_disk / "other").write_bytes(bytes(free.f_bavail * free.f_frsize - 10**6))

    sys.addaudithook(fill)
    found["during"] = error_of(lambda: save(big(2.0, 3 * 10**6), path, group=group))
    dist.barrier()  # Rank 0 removes them.
    found["left"] = str(sorted(p.name for p in small_disk.iterdir()))
    return found


def limited(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    """Files of 100 kB at most: a disk that refuses writes, in the tensors and in the other state."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    large, path = torch.zeros(10**6), folder / f"limited-{rank}.ckpt"
    try:
        return {
            "tensors": error_of(lambda: save({"state_dict": {"w": large}}, path)),
            "state": error_of(lambda: save({"state_dict": {}, "callbacks": {"mine": large}}, path)),
        }
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def in_background(rank: int, world_size: int, folder: Path) -> dict[str, object]:
    go, write = threading.Event(), saving.write

    def late(*arguments) -> None:
        go.wait(60)
        write(*arguments)

    first, second, third = (folder / f"step-{n}.ckpt" for n in (1, 2, 3))
    saver = AsyncSaver(dist.group.WORLD)
    save({"global_step": 1, "state_dict": flat(1.0, rank, world_size)}, first, group=dist.group.WORLD)
    saving.write = late
    weights, loops = flat(2.0, rank, world_size), {"seen": [1, 2]}
    saver.save({"global_step": 2, "state_dict": weights, "loops": loops}, second)
    weights["w"].data.fill_(99.0)
    loops["seen"].append(99)
    if rank == 0:
        saver.remove(first)
    found: dict[str, object] = {"early": (first.exists(), second.exists())}
    dist.barrier()
    go.set()
    saver.wait()
    dist.barrier()
    found["late"] = (first.exists(), second.exists())
    restore = blocked(rank)
    saver.save({"global_step": 3, "state_dict": weights}, third)
    if rank == 0:
        saver.remove(second)
    # The next save raises it, before it does anything.
    found["error"] = error_of(lambda: saver.save({"state_dict": weights}, folder / "step-4.ckpt"))
    restore()
    dist.barrier()
    found["after"] = sorted(path.name for path in folder.iterdir())
    saver.save({"global_step": 5, "state_dict": flat(5.0, rank, world_size)}, folder / "step-5.ckpt")
    saver.close()
    saving.write = write
    return found


def all_of_it(rank: int, world_size: int, folder: Path, small_disk: Path | None) -> dict[str, dict]:
    folders = {name: folder / name for name in ("replicated", "failing", "limited", "background")}
    replicated(rank, world_size, folders["replicated"])
    return {
        "failing": failing(rank, world_size, folders["failing"]),
        "limited": limited(rank, world_size, folders["limited"]),
        "background": in_background(rank, world_size, folders["background"]),
        "disk": disk(rank, world_size, small_disk) if small_disk is not None else {},
    }


@pytest.fixture(scope="module")
def small_disk(tmp_path_factory):
    """A file system of 20 MB; None if this user may not mount one."""
    folder = tmp_path_factory.mktemp("disk")
    command = ["mount", "-t", "tmpfs", "-o", "size=20m", "tmpfs", str(folder)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    yield folder if mounted else None
    if mounted:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("two-ranks")


@pytest.fixture(scope="module")
def found(folder, small_disk):
    """The results of the two ranks."""
    return run_distributed(all_of_it, 2, folder, small_disk, group_timeout=20)


def test_what_several_ranks_hold_is_written_once_and_divided(found, folder):
    path = folder / "replicated" / "r.ckpt"
    shards = sorted(path.glob("shard-*"))
    assert [shard.name for shard in shards] == ["shard-00000.safetensors", "shard-00001.safetensors"]
    # Four tensors of 1 MB, two a rank; rank 0 writes the small one.
    for shard, small in zip(shards, (4000, 0), strict=True):
        assert 2_000_000 + small <= shard.stat().st_size < 2_000_000 + small + 1000
    assert load(path)["state_dict"]["small"].tolist() == [0.0] * 1000


def test_an_error_on_one_rank_is_raised_on_all_and_nothing_is_left(found, folder):
    for of_rank in found:
        messages = of_rank["failing"]
        assert messages["unsafe"].startswith(
            "DloError: rank 0: checkpoint['mine']['f'] must be plain data, got a builtins.function"
        )
        assert messages["gap"].startswith("DloError: rank 0: the shards of model/w on 2 ranks must cover its")
        assert messages["blocked"].startswith("DloError: rank 1: cannot write the checkpoint")
    assert [path.name for path in (folder / "failing").iterdir()] == ["good.ckpt"]
    assert load(folder / "failing" / "good.ckpt")["state_dict"]["w"].tolist() == [1.0] * 4


def test_shards_that_are_saved_without_their_group_are_refused_and_nothing_is_left(tmp_path):
    with pytest.raises(DloError, match=r"model/w on 1 rank must cover .*; save\(\) on every rank with group="):
        save({"state_dict": flat(1.0, 0, 2)}, tmp_path / "last.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_told_on_all_ranks_and_the_previous_checkpoint_stays(found, small_disk):
    if small_disk is None:
        pytest.skip("a small file system cannot be mounted here")
    for of_rank in found:
        messages = of_rank["disk"]
        assert "need 40.0 MB, 1" in messages["before"]
        assert f"free in {small_disk}; previous last.ckpt intact" in messages["before"]
        assert "DloError: rank " in messages["during"]
        assert "need 12.0 MB" in messages["during"]
        assert "previous last.ckpt intact" in messages["during"]
        assert messages["left"] == "['last.ckpt', 'other']"
    assert load(small_disk / "last.ckpt")["state_dict"]["w"].unique().tolist() == [1.0]


def test_a_write_that_is_refused_leaves_nothing(found, folder):
    for of_rank in found:
        for message in of_rank["limited"].values():
            assert message.startswith("DloError: no space for the checkpoint")
            assert "File too large: files of this process are limited to 100.0 kB (ulimit -f)" in message
            assert "no earlier checkpoint there" in message
    assert list((folder / "limited").iterdir()) == []


@pytest.mark.parametrize(
    ("code", "inodes", "says"),
    [
        (errno.ENOSPC, 0, "are used up; remove some files there"),
        (errno.ENOSPC, 1, "No space left on device, though need 4."),
        (errno.EDQUOT, 1, "this user's quota in"),
        (errno.EIO, 1, "Input/output error"),
    ],
)
def test_what_is_short_is_told(tmp_path, monkeypatch, code, inodes, says):
    """Enough bytes may be free."""
    about = SimpleNamespace(f_bavail=2, f_frsize=4096, f_files=100, f_favail=inodes)
    monkeypatch.setattr("os.statvfs", lambda folder: about)

    def refuse(descriptor):
        raise OSError(code, os.strerror(code))

    for name, write in {"folder": save, "file": lambda *given: SafeCheckpointIO().save_checkpoint(*given)}.items():
        path = tmp_path / f"{name}.ckpt"
        write({"state_dict": {"w": torch.ones(2)}, "pytorch-lightning_version": "2.6.6"}, path)
        with monkeypatch.context() as refusing:
            refusing.setattr("os.fsync", refuse)
            with pytest.raises(DloError) as caught:
                write({"state_dict": {"w": torch.zeros(1000)}}, path)
        assert says in str(caught.value)
        assert load(path)["state_dict"]["w"].tolist() == [1.0, 1.0], "the previous one is left"
    assert {path.name for path in tmp_path.iterdir()} == {"folder.ckpt", "file.ckpt"}


def test_in_the_background_the_state_of_the_call_is_saved_and_nothing_is_removed_too_early(found, folder):
    for of_rank in found:
        assert of_rank["background"]["early"] == (True, False)
        assert of_rank["background"]["late"] == (False, True)
        assert of_rank["background"]["error"].startswith("DloError: rank 1: cannot write the checkpoint")
        assert of_rank["background"]["after"] == ["step-2.ckpt"]
    run = load(folder / "background" / "step-2.ckpt")
    assert run["state_dict"]["w"].tolist() == [2.0] * 4
    assert run["loops"] == {"seen": [1, 2]}
    assert newest_valid(folder / "background", weights_only=True) == folder / "background" / "step-5.ckpt"


@pytest.mark.parametrize(("code", "works"), [(errno.EINVAL, True), (errno.ENOTSUP, True), (errno.EIO, False)])
def test_a_file_system_that_cannot_sync_folders_still_takes_checkpoints(tmp_path, monkeypatch, code, works):
    sync = os.fsync

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(code, os.strerror(code))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    checkpoint = {"state_dict": {"weight": torch.ones(3)}, "global_step": 1, "epoch": 0}
    if works:
        save(checkpoint, tmp_path / "last.ckpt")
        assert torch.equal(load(tmp_path / "last.ckpt")["state_dict"]["weight"], torch.ones(3))
    else:
        with pytest.raises((DloError, OSError)):
            save(checkpoint, tmp_path / "last.ckpt")


# A checkpoint of any layout, saved on three ranks or on one, loads in every layout on two ranks and on one


SHAPES = {
    "model.stem.weight": (7, 5, 3),
    "model.head.weight": (10, 6),
    "model.head.bias": (10,),
    "model.scale": (),
    "model.none": (0, 4),
}
LAYOUTS = ("plain", "flat", "rows", "columns", "replicate", "mesh")


def values(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    types = itertools.cycle([torch.float32, torch.bfloat16, torch.float64])
    return {n: torch.randn(s, generator=generator, dtype=torch.float64).to(next(types)) for n, s in SHAPES.items()}


def laid_out(tensor: torch.Tensor, layout: str, rank: int, world_size: int):
    """A rank's shard of the tensor; "mesh" is sharded along two axes, or twice along one with few ranks."""
    if layout == "plain" or tensor.ndim == 0:
        return tensor.clone()
    if layout == "flat":
        count = tensor.numel()
        start, stop = count * rank // world_size, count * (rank + 1) // world_size
        return FlatShard(tensor.flatten()[start:stop].clone(), tensor.shape, start)
    if layout == "mesh":
        outer = 2 if world_size == 4 else world_size
        mesh = init_device_mesh("cpu", (outer, world_size // outer), mesh_dim_names=("a", "b"))
        placements = [Shard(0), Shard(tensor.ndim - 1)]
    else:
        mesh = init_device_mesh("cpu", (world_size,))
        dim = tensor.ndim - 1 if layout == "columns" else 0
        placements = [Replicate() if layout == "replicate" else Shard(dim)]
    return distribute_tensor(tensor, mesh, placements)


def same(shard, tensor: torch.Tensor, layout: str, rank: int, world_size: int) -> bool:
    other = laid_out(tensor, layout, rank, world_size)
    if isinstance(shard, FlatShard):
        return torch.equal(shard.data, other.data)
    if hasattr(shard, "to_local"):
        return torch.equal(shard.to_local(), other.to_local())
    return torch.equal(shard, other)


def a_run(layout: str, rank: int, world_size: int) -> dict:
    """A checkpoint in the form that a strategy passes: weights, moments, an average, plain data."""

    def part(tensor):
        return laid_out(tensor, layout, rank, world_size)

    weights, first, second, average = (values(seed) for seed in range(4))
    # Full parameters are distributed over the ranks: each rank has the state, and the steps, of some.
    mine = [name for number, name in enumerate(SHAPES) if layout != "plain" or number % world_size == rank]
    state = {n: {"exp_avg": part(first[n]), "exp_avg_sq": part(second[n]), "step": 3.0 + len(n)} for n in mine}
    return {
        "epoch": 1,
        "global_step": 20,
        "state_dict": {name: part(tensor) for name, tensor in weights.items()},
        "current_model_state": {name: part(tensor) for name, tensor in average.items()},
        "optimizer_states": [{"state": state, "param_groups": [{"lr": 0.1, "params": list(mine)}]}],
        "loops": {"fit_loop": {"batches": 7}, "of_rank": rank},
        "callbacks": {"Sharded": {"buffers": [part(weights["model.head.weight"])]}},
    }


def save_all(rank: int, world_size: int, folder) -> int:
    for layout in LAYOUTS:
        run = a_run(layout, rank, world_size)
        save(run, folder / f"{layout}-{world_size}", group=dist.group.WORLD, about={"strategy": layout})
    return rank


def load_all(rank: int, world_size: int, folder, layouts: int = len(LAYOUTS)) -> int:
    """Loads every checkpoint in so many layouts, in turn; returns the number of compared tensors."""
    compared = 0
    weights, first, second, average = (values(seed) for seed in range(4))
    empty = {n: torch.zeros_like(t) for n, t in weights.items()}
    paths = enumerate(sorted(folder.iterdir()))
    for path, layout in [(path, layout) for n, path in paths for layout in (LAYOUTS * 2)[n % 6 :][:layouts]]:
        run = load(path, group=dist.group.WORLD)
        state = run["optimizer_states"][0]["state"]
        assert list(run["state_dict"]) == list(SHAPES)
        assert set(state) == set(SHAPES)
        assert sorted(run["optimizer_states"][0]["param_groups"][0]["params"]) == sorted(SHAPES)
        assert run["loops"] == {"fit_loop": {"batches": 7}, "of_rank": 0}
        assert torch.equal(run["callbacks"]["Sharded"]["buffers"][0], weights["model.head.weight"])
        for name in SHAPES:
            assert state[name]["step"] == 3.0 + len(name)
            for read, key, expected in (
                (run["state_dict"], name, weights[name]),
                (run["current_model_state"], name, average[name]),
                (state[name], "exp_avg", first[name]),
                (state[name], "exp_avg_sq", second[name]),
            ):
                assert read.shape(key) == expected.shape
                assert read.dtype(key) == expected.dtype
                target = laid_out(empty[name], layout, rank, world_size)
                read.read_into(key, target)
                assert same(target, expected, layout, rank, world_size), (path.name, layout, name)
                compared += 1
            assert torch.equal(run["state_dict"][name], weights[name])
    return compared


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Every layout, saved on three ranks, and those of a single process saved in this one."""
    folder = tmp_path_factory.mktemp("saved")
    assert run_distributed(save_all, 3, folder) == [0, 1, 2]
    for layout in ("plain", "flat"):
        save(a_run(layout, 0, 1), folder / f"{layout}-1")
    return folder


def test_three_ranks_and_one_load_on_two_in_every_layout(saved):
    each = (len(LAYOUTS) + 2) * 2 * len(SHAPES) * 4
    assert run_distributed(load_all, 2, saved, 2) == [each, each]


@pytest.mark.slow
@pytest.mark.parametrize(("writers", "readers"), [(4, 2), (2, 8), (8, 1), (1, 4)])
def test_any_number_of_ranks_reads_any_other(tmp_path, writers, readers):
    run_distributed(save_all, writers, tmp_path)
    assert all(run_distributed(load_all, readers, tmp_path))


def test_what_is_saved_does_not_depend_on_the_layout(saved):
    def content(folder):
        run = load(folder)
        named = {f"w.{n}": t for n, t in run["state_dict"].items()}
        named |= {
            f"{n}.{k}": s[k] for n, s in run["optimizer_states"][0]["state"].items() for k in ("exp_avg", "exp_avg_sq")
        }
        return {
            n: hashlib.sha256(t.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest() for n, t in named.items()
        }

    first = content(saved / "plain-1")
    assert [path.name for path in saved.iterdir() if content(path) != first] == []


def test_each_file_is_one_that_safetensors_opens_and_has_the_hash_of_the_manifest(saved):
    for folder in sorted(saved.iterdir()):
        verify(folder)
        manifest = json.loads((folder / "manifest.json").read_text())
        assert {path.name for path in folder.iterdir()} == {"manifest.json", *manifest["files"]}
        total = 0
        for name, file in manifest["files"].items():
            assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == file["sha256"]
            if name.endswith(".safetensors"):
                with safe_open(folder / name, "pt") as opened:
                    total += sum(opened.get_tensor(key).nbytes for key in opened.keys())  # noqa: SIM118
        stored = [tensor for group in read_manifest(folder).tensors.values() for tensor in group.values()]
        assert total == sum(chunk.end - chunk.begin for tensor in stored for chunk in tensor.chunks)


def test_checkpoints_of_two_steps_with_the_same_bytes_are_a_warning(tmp_path: Path, recwarn) -> None:
    """NeMo-RL #3312: asynchronous saves of steps 90, 110 and 120 had the weights of one step."""
    stale = torch.arange(4.0)
    for step, weights in ((1, stale), (2, stale + 1), (3, stale + 1), (3, stale + 1)):
        save({"state_dict": {"w": weights}, "global_step": step}, tmp_path / f"{step}-{len(recwarn)}.ckpt")
    (warning,) = [str(each.message) for each in recwarn]
    assert "of step 3 has weights and optimizer state of 2-0.ckpt, of step 2, to the bit" in warning
