"""Measured machines: shapes are those of the plans, constants have sources, and plans run with the file."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from dlo_framework.cli.main import main
from dlo_framework.errors import DloError
from dlo_framework.mesh import MeshSpec
from dlo_plugins.planner import rank_measurement
from dlo_plugins.planner.layout import Layout, StateFormat
from dlo_plugins.planner.machine import ProductTable, parse_machine
from dlo_plugins.planner.machine_measurement import machine_content, product_shapes
from dlo_plugins.planner.plan_config import read_device
from dlo_plugins.planner.rank_measurement import BlockCall, RankMeasurement, Wanted
from dlo_plugins.planner.step_time import TimeModel
from dlo_plugins.planner.work import Product, Share
from support.planner_models import llama

CONFIG = """
trainer: {accelerator: cpu, devices: 2, max_steps: 2}
model:
  class_path: CausalLM
  init_args:
    config: {model_type: llama, hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4,
             num_key_value_heads: 2, max_position_embeddings: 64, vocab_size: 512}
data: {class_path: TextData, init_args: {seq_len: 64, batch_size: 16}}
"""


def test_shapes_are_those_of_the_plans_and_a_grid() -> None:
    profile = llama(512, 1536, 3, 8, 4, 256, 1000)
    shapes = product_shapes(profile, 2, [4])
    assert (4 * 256, 1536, 512, 1, False) in shapes
    assert (512, 1536, 1024, 1, True) in shapes or (1536, 512, 1024, 1, True) in shapes
    assert (4 * 256, 768, 512, 1, False) in shapes  # tp 2
    assert (8 * 256, 768, 512, 1, False) in shapes  # The rows of both ranks.
    assert (8 * 256, 1536, 512, 1, False) not in shapes
    assert len(set(shapes)) == len(shapes)
    assert (64, 64, 64, 1, False) in shapes


def test_a_table_has_measured_shapes_exactly_and_others_between() -> None:
    table = ProductTable({(64, 64, 64, 1, False): 1e9, (1024, 64, 64, 1, False): 4e9, (64, 64, 64, 1, True): 5e8})
    assert table.rate(Product(64, 64, 64)) == pytest.approx(1e9)
    assert table.rate(Product(64, 64, 64, tokens="k")) == pytest.approx(5e8)
    assert 1e9 < table.rate(Product(512, 64, 64)) < 4e9


def _measured(slope: float, launch: float) -> tuple[dict[str, object], Wanted]:
    """Returns a machine made of ranks whose blocks take what a given bandwidth and cost of a kernel make of them."""
    profile = llama(512, 1536, 3, 8, 4, 256, 1000)
    block, rate = profile.blocks[0], 1e11
    shapes = product_shapes(profile, 2, [1, 4])
    heads = (8, 256, 64, True)
    wanted = Wanted("cpu", torch.bfloat16, shapes, heads, (), [1, 4], 1.0)

    def seconds(work: object, rows: int) -> float:
        share = Share(rows)
        flops = sum(count * product.on(share).flops for product, count in work.products)  # type: ignore[attr-defined]
        return flops / rate + slope * work.moved.on(share) + launch * work.kernels  # type: ignore[attr-defined]

    sizes = (1 << 12, 1 << 22)
    attention = 2 * 2.0 * 8 * 256 * 256 * 64 / 2 / rate
    rank = RankMeasurement(
        {shape: 2.0 * shape[0] * shape[1] * shape[2] * shape[3] / rate for shape in shapes},
        (attention, 2.5 * attention),
        {(block.name, rows): (seconds(block.forward, rows), seconds(block.backward, rows)) for rows in (1, 4)},
        2e10, 1e-9,
        {(kind, 2, size): 1e-4 + size / 1e9 for kind in ("all_gather", "send", "all_reduce") for size in sizes},
        2.0, 300_000_000,
    )  # fmt: skip
    return machine_content(profile, [rank, rank], wanted, "bfloat16", 1), wanted


def test_bandwidth_and_launch_are_found_from_blocks() -> None:
    content, _ = _measured(1 / 5e9, 2e-5)
    machine = parse_machine(content, "measured")
    assert machine.bandwidth * machine.bandwidth_efficiency == pytest.approx(5e9, rel=0.02)
    assert machine.launch == pytest.approx(2e-5, rel=0.05)
    assert machine.backward == pytest.approx((5e9, 2e-5), rel=0.05)
    assert machine.attention == pytest.approx((1.0, 1.0))
    assert machine.collectives["all_gather"][2].rate(1) == pytest.approx(0.5e9, rel=0.01)
    assert machine.collectives["send"][2].rate(1) == pytest.approx(1e9, rel=0.01)
    assert machine.collectives["all_gather"][2].times is not None
    assert machine.collective_seconds(1 << 22, 2, 1) == pytest.approx(1e-4 + (1 << 22) / 1e9, rel=0.01)
    sources = dict(machine.sources)
    assert sources.pop("overlap_slowdown").startswith("assumed")  # On gloo nothing overlaps.
    assert all(len(source) > 10 and "measured" in source for source in sources.values())


def test_collectives_take_what_was_measured_for_their_size() -> None:
    """Caches hold small buffers, so that time is not linear in size."""
    content, _ = _measured(1 / 5e9, 2e-5)
    links: Any = content["links"]
    links["all_reduce"][2]["times"] = [[4e3, 1e-4], [1e6, 3e-4], [4e6, 4e-3]]
    machine = parse_machine(content, "mine.yaml")
    found = [machine.collective_seconds(n, 2, 1, reduces_and_gathers=True) for n in (1e3, 4e3, 1e6, 2.5e6, 4e6, 8e6)]
    assert found == pytest.approx([1e-4, 1e-4, 3e-4, 2.15e-3, 4e-3, 8e-3])
    content["links"] = {**links, "send": {2: {**links["send"][2], "times": [[4e3, 0.0]]}}}
    with pytest.raises(DloError, match=r"links\.send\.2\.times must be rows of bytes and seconds"):
        parse_machine(content, "mine.yaml")


def test_regions_of_tp_take_what_was_measured_and_else_gather_their_input_once_more_beside_products() -> None:
    content, _ = _measured(1 / 5e9, 2e-5)
    links: Any = content["links"]
    plain = parse_machine(content, "a")
    summed = plain.collective_seconds(1 << 20, 2, 1, reduces_and_gathers=True)
    gathered = plain.collective_seconds(1 << 20, 2, 1)
    assert plain.region_seconds(1 << 20, 2, 1.0, backward=False) == summed
    assert plain.region_seconds(1 << 20, 2, 1.0, backward=True) == summed + gathered  # On gloo they take turns.
    copy = plain.moving_seconds(2 << 20, "strided")
    copied = [plain.region_seconds(1 << 20, 2, 1.0, backward=back, copies=True) for back in (False, True)]
    assert copied == pytest.approx([summed + 2 * copy, summed + gathered + 3 * copy])
    fast = replace(plain, overlap_slowdown=1.2)
    assert fast.region_seconds(1 << 20, 2, 1.0, backward=True) == pytest.approx(summed + 0.2 * gathered)
    for kind, seconds in (("region_forward", 3e-3), ("region_backward", 5e-3)):
        links[kind] = {2: {**links["all_reduce"][2], "times": [[1 << 20, seconds], [1 << 22, 4 * seconds]]}}
    machine = parse_machine(content, "b")
    profile = llama(512, 1536, 3, 8, 4, 256, 1000)
    layout = Layout(MeshSpec(dp_shard=1, tp=2), 2, zero=0)
    size = 2 * profile.blocks[0].gathered
    assert 1 << 19 <= size <= 1 << 20
    time = TimeModel(profile, machine, StateFormat()).step(layout)
    ends = 3 * machine.collective_seconds(size, 2, 1, reduces_and_gathers=True)  # Two sums and two gathers.
    norms = machine.collective_seconds(3 * 2 * 512 * StateFormat().gradient, 2, 1, reduces_and_gathers=True)
    assert time.tensor == pytest.approx(3 * 2 * 8e-3 + ends + norms)


def test_ranks_that_share_cores_take_turns() -> None:
    content, _ = _measured(1 / 5e9, 2e-5)
    alone, shared = parse_machine(content | {"cores": 2}, "a"), parse_machine(content | {"cores": 1}, "b")
    product = Product(1024, 1536, 512)
    assert shared.contention == 2 * alone.contention
    assert shared.product_seconds(product, "bfloat16") == 2 * alone.product_seconds(product, "bfloat16")
    assert shared.moving_seconds(1e6) == 2 * alone.moving_seconds(1e6)


def test_a_wrong_table_is_refused() -> None:
    content, _ = _measured(1 / 5e9, 2e-5)
    content["product"]["table"] = [[1, 2, 3]]  # type: ignore[index]
    with pytest.raises(DloError, match=r"product\.table must be rows of m, n, k"):
        parse_machine(content, "mine.yaml")


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_dlo_plan_measures_this_machine_and_plans_for_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.yaml").write_text(CONFIG)
    words = ["plan", "--config", str(tmp_path / "mine.yaml"), "--gpus", "2", "--measure", "1s", "--json", "--top", "2"]
    assert main([*words, "--out", str(tmp_path / "plans")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [plan["step_seconds"] > 0 for plan in found["plans"]] == [True, True]
    content = yaml.safe_load((tmp_path / "plans" / "machine.yaml").read_text())
    machine = parse_machine(content, "machine.yaml")
    assert machine.device == "cpu"
    assert machine.table is not None
    assert machine.collectives.keys() == {
        *("all_gather", "reduce_scatter", "all_reduce", "send"), "region_forward", "region_backward"
    }  # fmt: skip
    assert 1e7 < machine.bandwidth < 1e12


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--measure", "soon"], "--measure must be 1 to 3600 seconds, got soon"),
        (["--measure", "5s", "--machine", "cpu"], "--measure must come without --machine, got --machine cpu"),
    ],
)
def test_bad_options_are_refused(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.yaml").write_text(CONFIG)
    assert main(["plan", "--config", str(tmp_path / "mine.yaml"), "--gpus", "2", *words]) == 2
    assert message in capsys.readouterr().err


class _Indexed(torch.nn.Module):
    """Block with weights in single precision, and a buffer of indices."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.table = torch.nn.Linear(8, 8), torch.nn.Parameter(torch.zeros(4, 8))
        self.register_buffer("places", torch.full((8,), 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.table[self.places].mean(0)


def _measuring(blocks: tuple[BlockCall, ...] = ()) -> rank_measurement._Measuring:
    return rank_measurement._Measuring(Wanted("cpu", torch.bfloat16, [], None, blocks, [2], 1.0), 1)


def test_blocks_are_measured_in_the_dtype_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile has the weights in that dtype, and so have the arguments of its blocks."""

    def to_garbage(module: torch.nn.Module, device: Any) -> torch.nn.Module:
        moved = empty(module, device=device)
        for buffer in moved.buffers():
            buffer.fill_(1 << 40)  # As memory that another tensor has left.
        return moved

    empty = torch.nn.Module.to_empty
    monkeypatch.setattr(torch.nn.Module, "to_empty", to_garbage)
    x = torch.empty(2, 8, dtype=torch.bfloat16, device="meta", requires_grad=True)
    found = _measuring((BlockCall("block", _Indexed().to("meta"), ((x,), {}), 2),)).blocks(1.0)
    assert set(found) == {("block", 2)}


def test_messages_of_two_ranks_are_sent_and_received_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL runs a rank's send before its receive: both ranks would wait."""
    batches: list[list[Any]] = []
    monkeypatch.setattr(torch.distributed, "P2POp", lambda op, *_, **__: op)
    monkeypatch.setattr(torch.distributed, "batch_isend_irecv", lambda both: batches.append(both) or [])
    monkeypatch.setattr(rank_measurement, "Communicator", lambda _: None)
    group = SimpleNamespace(size=lambda: 2, rank=lambda: 0)
    send, products = _measuring()._exchanges(group, 64)["send"]  # type: ignore[arg-type]
    send()
    assert products == 0
    assert batches == [[torch.distributed.isend, torch.distributed.irecv]]


def test_a_gpu_reserves_what_is_outside_torchs_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 30)
    assert rank_measurement.memory_outside_allocator() == 10


def test_a_config_for_the_cpu_is_planned_for_it_on_a_gpu_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert read_device({"trainer": {"accelerator": "cpu"}}) == "cpu"
    assert read_device({"trainer": {"accelerator": "auto"}}) == read_device({}) == "cuda"
