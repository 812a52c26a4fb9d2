"""A checkpoint of any layout, saved on three ranks or on one, loads in every layout on two ranks and on one."""

import hashlib
import itertools
import json

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from dlo_framework.checkpoint import load, read_manifest, save, verify
from dlo_framework.shards import FlatShard
from dlo_framework.testing import run_distributed

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
