"""Rank 0 plans a save once, until something changes; each rank receives its own part alone."""

import json
import pickle
from itertools import pairwise
from math import prod

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from dlo_framework.agreement import gather_then_scatter, run_on_all_ranks
from dlo_framework.checkpoint import load, read_manifest, save, saving
from dlo_framework.checkpoint.manifest import Manifest, Runs, SavedTensor, dtype_of, make_header, to_text
from dlo_framework.checkpoint.save_plan import InventoryEntry, make_file_plan, make_global_plan, pack_inventory
from dlo_framework.errors import DloError, is_agreed
from dlo_framework.shards import Box, FlatShard, overlap
from dlo_framework.testing import run_distributed

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


def a_run(step: float, rank: int, world_size: int, extra: bool = False) -> dict:
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


def failing(rank: int, group) -> list[str]:
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
        save(a_run(10.0 * (len(found) + 1), rank, world_size, extra), folder / name, group=group)
        found[name] = calls.taken()
    divided = saving.make_global_plan
    saving.make_global_plan = lambda told: 1 / 0
    found["no plan"] = failure_of(lambda: save(a_run(1.0, rank, world_size, True), folder / "no plan", group=group))
    saving.make_global_plan = divided
    # Each plan is forgotten by one rank: all make a new one.
    if rank == 2:
        saving._cached_plans.clear()
    save(a_run(60.0, rank, world_size), folder / "forgotten", group=group)
    found["forgotten"] = calls.taken()
    found["failing"] = failing(rank, group)
    found["plans kept whole"] = sum(known.plan is not None for known in saving._cached_plans.values())
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("planning")


@pytest.fixture(scope="module")
def found(folder):
    return run_distributed(save_often, 3, folder, group_timeout=60)


def test_a_second_save_tells_nothing_of_the_tensors_and_plans_nothing(found):
    for rank, of_rank in enumerate(found):
        sent = {name: of_rank[name]["sent"] for name in ("first", "second", "one more", "again")}
        # Whether the plan fits, the inventories if it does not, the files that are written.
        assert [len(sizes) for sizes in sent.values()] == [3, 2, 3, 2]
        assert max(sent["second"]) < 500
        assert max(sent["first"]) > 1000
        plans = [of_rank[name]["plans"] for name in ("first", "second", "one more", "again", "forgotten")]
        assert plans == ([1, 0, 1, 0, 1] if rank == 0 else [0] * 5)


def test_what_is_saved_under_a_plan_that_is_kept_is_of_its_own_moment(found, folder):
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


def test_a_rank_that_fails_while_it_is_planned_ends_all_with_what_it_said(found, folder):
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
