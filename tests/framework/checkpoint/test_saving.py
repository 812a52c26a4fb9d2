"""Ranks that save and load in any layout: files, plans, failures, a small disk, and saves in the background."""

import errno
import hashlib
import itertools
import json
import os
import pickle
import resource
import signal
import stat
import threading
from itertools import pairwise
from math import prod
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, zeros

from dlo_framework.agreement import gather_then_scatter, run_on_all_ranks
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
from dlo_framework.checkpoint.manifest import Manifest, Runs, SavedTensor, dtype_of, make_header, to_text
from dlo_framework.checkpoint.save_plan import InventoryEntry, make_file_plan, make_global_plan, pack_inventory
from dlo_framework.errors import DloError, is_agreed
from dlo_framework.shards import Box, FlatShard, overlap
from dlo_framework.testing import run_distributed


def flat(value: float, rank: int, world_size: int, count: int = 4) -> dict:
    part = count // world_size
    return {"w": FlatShard(torch.full((part,), value), torch.Size([count]), rank * part)}


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
        "unsafe": failure_of(lambda: save({"state_dict": ones, "mine": {"f": save}}, path, group=group)),
        "gap": failure_of(lambda: save({"state_dict": gap}, path, group=group)),
    }
    restore = blocked(rank)
    found["blocked"] = failure_of(lambda: save({"state_dict": flat(9.0, rank, world_size)}, good, group=group))
    restore()
    disk = os.statvfs
    os.statvfs = lambda place: SimpleNamespace(f_bavail=2 if rank == 1 else 10**9, f_frsize=4096)
    found["small"] = failure_of(lambda: save({"state_dict": flat(9.0, rank, world_size, 10**4)}, good, group=group))
    os.statvfs = disk
    return found


def limited(rank: int, world_size: int, folder: Path) -> dict[str, str]:
    """Files of 100 kB at most: a disk that refuses writes, in the tensors and in the other state."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    large, path = torch.zeros(10**6), folder / f"limited-{rank}.ckpt"
    try:
        return {
            "tensors": failure_of(lambda: save({"state_dict": {"w": large}}, path)),
            "state": failure_of(lambda: save({"state_dict": {}, "callbacks": {"mine": large}}, path)),
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
    found["error"] = failure_of(lambda: saver.save({"state_dict": weights}, folder / "step-4.ckpt"))
    restore()
    dist.barrier()
    found["after"] = sorted(path.name for path in folder.iterdir())
    saver.save({"global_step": 5, "state_dict": flat(5.0, rank, world_size)}, folder / "step-5.ckpt")
    saver.close()
    saving.write = write
    return found


def all_of_it(rank: int, world_size: int, folder: Path) -> dict[str, dict]:
    folders = {name: folder / name for name in ("replicated", "failing", "limited", "background")}
    replicated(rank, world_size, folders["replicated"])
    return {
        "failing": failing(rank, world_size, folders["failing"]),
        "limited": limited(rank, world_size, folders["limited"]),
        "background": in_background(rank, world_size, folders["background"]),
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("two-ranks")


@pytest.fixture(scope="module")
def found(folder):
    """The results of the two ranks."""
    return run_distributed(all_of_it, 2, folder, group_timeout=20)


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
            "DloError True: rank 0: checkpoint['mine']['f'] must be plain data, got a builtins.function"
        )
        assert messages["gap"].startswith("DloError True: rank 0: the shards of model/w on 2 ranks must cover its")
        assert messages["blocked"].startswith("DloError True: rank 1: cannot write the checkpoint")
        assert "need 40.3 kB, 8.2 kB free in" in messages["small"], "what all ranks write, on the smallest disk"
        assert "previous good.ckpt intact" in messages["small"]
    assert [path.name for path in (folder / "failing").iterdir()] == ["good.ckpt"]
    assert load(folder / "failing" / "good.ckpt")["state_dict"]["w"].tolist() == [1.0] * 4


def test_shards_that_are_saved_without_their_group_are_refused_and_nothing_is_left(tmp_path):
    with pytest.raises(DloError, match=r"model/w on 1 rank must cover .*; save\(\) on every rank with group="):
        save({"state_dict": flat(1.0, 0, 2)}, tmp_path / "last.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_is_refused_leaves_nothing(found, folder):
    for of_rank in found:
        for message in of_rank["limited"].values():
            assert message.startswith("DloError False: no space for the checkpoint")
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
        assert of_rank["background"]["error"].startswith("DloError True: rank 1: cannot write the checkpoint")
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


def local(shard) -> torch.Tensor:
    return shard.data if isinstance(shard, FlatShard) else shard.to_local() if hasattr(shard, "to_local") else shard


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
    """Loads every checkpoint in that many layouts, in turn; returns the number of compared tensors."""
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
                found = laid_out(expected, layout, rank, world_size)
                assert torch.equal(local(target), local(found)), (path.name, layout, name)
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


# --- rank 0 plans a save once, until something changes; each rank receives its own part alone -----------------------


TENSORS = 200


def held(name: str, dtype: str, shape: tuple[int, ...], *boxes: Box) -> InventoryEntry:
    return InventoryEntry(("state_dict", name), ("model", name), dtype, shape, boxes)


def rows(rank: int, ranks: int, shape: tuple[int, ...]) -> list[Box]:
    """A rank's FSDP shard of a tensor; the last ranks may get less, or nothing."""
    step = -(-shape[0] // ranks)
    low, high = min(rank * step, shape[0]), min((rank + 1) * step, shape[0])
    return [Box((low, *(0 for _ in shape[1:])), (high - low, *shape[1:]))] if high > low else []


def sharded(rank: int, ranks: int) -> list[InventoryEntry]:
    """A model whose tensors the ranks shard evenly, all but one, and Adam's steps, which every rank holds."""
    shapes = {f"layer.{n}": (1024, 64) for n in range(20)} | {"norm": (1024,), "odd": (1030, 3)}
    weights = [held(name, "float32", shape, *rows(rank, ranks, shape)) for name, shape in shapes.items()]
    return weights + [held(f"{name}.step", "float32", (), Box((), ())) for name in shapes]


def manifest_of(holdings: list[list[InventoryEntry]]) -> Manifest:
    """The manifest of a save, without writing it."""
    plan = make_global_plan([pack_inventory(of_rank) for of_rank in holdings])
    manifest, starts = Manifest(1, 0, len(holdings), 0.0, {}), {}
    for rank, (of_rank, mask, size) in enumerate(zip(holdings, plan.masks, plan.sizes, strict=True)):
        file = make_file_plan(rank, of_rank, mask, size)
        if file is not None:
            starts[rank] = len(make_header(file.entries, {}))
            manifest.files[file.name] = {"bytes": starts[rank] + size, "sha256": "0" * 64, "data": starts[rank]}
    for (group, name), tensor in plan.tensors.items():
        runs = Runs(tensor.runs, dtype_of(tensor.dtype).itemsize, starts)
        manifest.tensors.setdefault(group, {})[name] = SavedTensor(tensor.dtype, tensor.shape, runs)
    return manifest


def test_what_the_manifest_says_of_a_tensor_does_not_grow_with_the_ranks(tmp_path):
    sizes = {}
    for ranks in (8, 64, 512):
        manifest = manifest_of([sharded(rank, ranks) for rank in range(ranks)])
        text = to_text(manifest)
        sizes[ranks] = len(text) - len(str(manifest.files))
        (tmp_path / "manifest.json").write_text(text)
        read = read_manifest(tmp_path)
        assert len(read.tensors["model"]["layer.3"].chunks) == ranks
        assert {n: list(t.chunks) for n, t in read.tensors["model"].items()} == {
            n: list(t.chunks) for n, t in manifest.tensors["model"].items()
        }
    assert sizes[512] < 1.1 * sizes[8]


@st.composite
def layouts(draw) -> list[list[InventoryEntry]]:
    """Tensors in grids of boxes, even or not, some of them on several ranks, of up to six."""
    ranks = draw(st.integers(1, 6))
    holdings: list[list[InventoryEntry]] = [[] for _ in range(ranks)]
    for number in range(draw(st.integers(0, 6))):
        shape = tuple(draw(st.lists(st.integers(0, 9), max_size=3)))
        cuts = [sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=3))}) for size in shape]
        boxes = [Box((), ())]
        for cut in cuts:
            sides = list(pairwise(cut))
            boxes = [Box((*box.offsets, a), (*box.sizes, b - a)) for box in boxes for a, b in sides]
        dtype = draw(st.sampled_from(["float32", "bfloat16", "float64"]))
        in_order = draw(st.booleans())
        who = {
            box: {place % ranks} if in_order else draw(st.sets(st.integers(0, ranks - 1), min_size=1))
            for place, box in enumerate(boxes)
        }
        for rank in range(ranks):
            mine = [box for box in boxes if rank in who[box]]
            if mine or draw(st.booleans()) or not boxes:
                holdings[rank].append(held(f"t{number}", dtype, shape, *mine))
    return holdings


@given(layouts())
def test_each_box_lies_where_its_writer_puts_it_and_is_found_there(holdings):
    manifest = manifest_of(holdings)
    plan = make_global_plan([pack_inventory(of_rank) for of_rank in holdings])
    expected: dict = {}
    for rank, of_rank in enumerate(holdings):
        file = make_file_plan(rank, of_rank, plan.masks[rank], plan.sizes[rank])
        if file is None:
            assert plan.sizes[rank] == 0
            continue
        head = make_header(file.entries, {})
        ranges = {name: place.get("data_offsets") for name, place in json.loads(head[8:]).items()}
        assert len(head) + max(ranges[name][1] for name, _, _ in file.entries) == manifest.files[file.name]["bytes"]
        for (key, box), (entry, _, _) in zip(file.boxes, file.entries, strict=True):
            assert (key, box) not in expected, "written twice"
            assert box in next(one for one in of_rank if one.key == key).boxes
            expected[key, box] = (file.name, *(len(head) + at for at in ranges[entry]))
    found = {
        (("model", name), chunk.box): (chunk.file, chunk.begin, chunk.end)
        for name, tensor in manifest.tensors.get("model", {}).items()
        for chunk in tensor.chunks
    }
    assert found == expected
    for tensor in manifest.tensors.get("model", {}).values():
        for part in [Box(tuple(s // 3 for s in tensor.shape), tuple(s - s // 3 for s in tensor.shape))]:
            over = [(chunk, shared) for chunk in tensor.chunks if (shared := overlap(chunk.box, part)) is not None]
            assert list(tensor.overlapping(part)) == over


class Calls:
    """Bytes that this rank sends to rank 0 in each exchange, and number of plans made."""

    def __init__(self) -> None:
        self.sent, self.plans = list[int](), 0
        exchange, plan = saving.gather_then_scatter, saving.make_global_plan

        def gather_then_scatter(group, work, decide):
            def counted():
                value = work()
                self.sent.append(len(pickle.dumps(value)))
                return value

            return exchange(group, counted, decide)

        def divided(told):
            self.plans += 1
            return plan(told)

        saving.gather_then_scatter, saving.make_global_plan = gather_then_scatter, divided

    def taken(self) -> dict:
        result = {"sent": self.sent, "plans": self.plans}
        self.sent, self.plans = [], 0
        return result


def many_shards(step: float, rank: int, world_size: int, extra: bool = False) -> dict:
    """Flat shards of many weights; plain values of the optimizer that exist on one rank alone."""
    weights = {f"model.layers.{n}.weight": torch.full((6, 4), step + n) for n in range(TENSORS)}
    share = 24 // world_size
    shards = {
        name: FlatShard(weight.flatten()[rank * share : (rank + 1) * share].clone(), weight.shape, rank * share)
        for name, weight in weights.items()
    }
    if extra:
        shards["extra"] = torch.ones(3)
    state = {f"of_rank_{rank}": {"step": step, "seen": rank}}
    return {
        "global_step": int(step),
        "state_dict": shards,
        "optimizer_states": [{"state": state, "param_groups": [{"lr": step, "params": list(state)}]}],
    }


def failure_of(work) -> str:
    try:
        work()
    except Exception as error:
        return f"{type(error).__name__} {is_agreed(error)}: {error}"
    return "none"


def failed_exchanges(rank: int, group) -> list[str]:
    """Error raised if a rank's work fails, or the first rank's decision."""

    def at(where: int, error: BaseException):
        def work() -> int:
            if rank == where:
                raise error
            return rank

        return work

    def refuse(_):
        raise DloError("no")

    def everyone(values: list) -> list:
        return [sum(values)] * len(values)

    found = [
        failure_of(lambda: gather_then_scatter(group, at(1, ValueError("boom")), everyone)),
        failure_of(lambda: gather_then_scatter(group, at(2, DloError("bad input")), everyone)),
        failure_of(lambda: gather_then_scatter(group, at(-1, ValueError()), refuse)),
        failure_of(lambda: run_on_all_ranks(group, at(1, ValueError("boom")))),
    ]
    assert gather_then_scatter(group, at(-1, ValueError()), everyone) == 3
    return found


def save_often(rank: int, world_size: int, folder) -> dict:
    group, found = dist.group.WORLD, {}
    calls = Calls()
    for name, extra in (("first", False), ("second", False), ("one more", rank == 1), ("again", rank == 1)):
        save(many_shards(10.0 * (len(found) + 1), rank, world_size, extra), folder / name, group=group)
        found[name] = calls.taken()
    divided = saving.make_global_plan
    saving.make_global_plan = lambda told: 1 / 0
    found["no plan"] = failure_of(
        lambda: save(many_shards(1.0, rank, world_size, True), folder / "no plan", group=group)
    )
    saving.make_global_plan = divided
    # Each plan is forgotten by one rank: all make a new one.
    if rank == 2:
        saving._cached_plans.clear()
    save(many_shards(60.0, rank, world_size), folder / "forgotten", group=group)
    found["forgotten"] = calls.taken()
    found["failing"] = failed_exchanges(rank, group)
    found["plans kept whole"] = sum(known.plan is not None for known in saving._cached_plans.values())
    return found


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """The folder of the saves, and the results of the three ranks."""
    folder = tmp_path_factory.mktemp("planning")
    return folder, run_distributed(save_often, 3, folder, group_timeout=60)


def test_a_second_save_tells_nothing_of_the_tensors_and_plans_nothing(planned):
    for rank, of_rank in enumerate(planned[1]):
        sent = {name: of_rank[name]["sent"] for name in ("first", "second", "one more", "again")}
        # Whether the plan fits, the inventories if it does not, the files that are written.
        assert [len(sizes) for sizes in sent.values()] == [3, 2, 3, 2]
        assert max(sent["second"]) < 500
        assert max(sent["first"]) > 1000
        plans = [of_rank[name]["plans"] for name in ("first", "second", "one more", "again", "forgotten")]
        assert plans == ([1, 0, 1, 0, 1] if rank == 0 else [0] * 5)


def test_what_is_saved_under_a_plan_that_is_kept_is_of_its_own_moment(planned):
    folder, _ = planned
    for step, name in ((10.0, "first"), (20.0, "second"), (30.0, "one more"), (40.0, "again"), (60.0, "forgotten")):
        run = load(folder / name)
        assert run["global_step"] == step
        for n in range(TENSORS):
            assert run["state_dict"][f"model.layers.{n}.weight"].unique().tolist() == [step + n]
        assert ("extra" in run["state_dict"]) is (name in ("one more", "again"))
        (optimizer,) = run["optimizer_states"]
        assert {key: dict(value) for key, value in optimizer["state"].items()} == {
            f"of_rank_{rank}": {"step": step, "seen": rank} for rank in range(3)
        }
        assert optimizer["param_groups"] == [{"lr": step, "params": [f"of_rank_{rank}" for rank in range(3)]}]


def test_a_rank_that_fails_while_it_is_planned_ends_all_with_what_it_said(planned):
    folder, found = planned
    assert not (folder / "no plan").exists()
    for of_rank in found:
        assert of_rank["no plan"] == "RuntimeError True: rank 0: ZeroDivisionError: division by zero"
        assert of_rank["failing"] == [
            "RuntimeError True: rank 1: ValueError: boom",
            "DloError True: rank 2: bad input",
            "DloError True: rank 0: no",
            "RuntimeError True: rank 1: ValueError: boom",
        ]


def test_ranks_that_disagree_on_a_tensor_and_boxes_that_are_not_all_of_it_are_told():
    whole = held("w", "float32", (4,), Box((0,), (4,)))
    with pytest.raises(AssertionError, match=r"ranks hold \('model', 'w'\) as float32\(4,\) and as bfloat16\(4,\)"):
        make_global_plan([pack_inventory([whole]), pack_inventory([whole._replace(dtype="bfloat16")])])
    for part in (Box((0,), (3,)), None):
        holding = held("w", "float32", (4,), *([part] if part else []))
        told = pack_inventory([holding])
        got = r"offsets \(0,\) sizes \(3,\)" if part else "none"
        with pytest.raises(DloError, match=rf"on 1 rank must cover its shape \(4,\) once, got {got}; .* with group="):
            make_global_plan([told])
        with pytest.raises(
            DloError, match=rf"shards of model/w on 2 ranks .* got {got}; give each element to one rank"
        ):
            make_global_plan([told, told])
    assert prod(make_global_plan([pack_inventory([])]).sizes) == 0
