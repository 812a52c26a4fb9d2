"""A rank of a mesh without memory, and `dlo mesh`: what it holds and passes, against the papers' formulas."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlo_framework import Task
from dlo_framework.cli.main import main
from dlo_framework.errors import DloError
from dlo_framework.mesh import MeshSpec
from dlo_plugins.parallel.fsdp.fully_shard import FullyShard
from dlo_plugins.parallel.mesh import mesh_simulation as simulation
from dlo_plugins.parallel.mesh.mesh_description import MeshDescription, RankStateBytes, describe_mesh
from dlo_plugins.parallel.mesh.simulated_run import count_ranks_and_nodes
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_tasks.language.causal_lm import CausalLM
from support.simulated_ranks import SimulatedRank, simulate_ranks
from support.token_batches import GROUPED, LENGTH, VOCABULARY

ROWS, WIDTH, LAYERS = 8, GROUPED["hidden_size"], 2


def task(**changes: Any) -> CausalLM:
    return CausalLM(config={"model_type": "llama", **GROUPED, "num_hidden_layers": LAYERS, **changes})


def batch(device: str = "meta", rows: int = ROWS) -> dict[str, torch.Tensor]:
    return dict.fromkeys(("input_ids", "labels"), torch.zeros(rows, LENGTH, dtype=torch.long, device=device))


def described(of: Task, spec: MeshSpec, **options: Any) -> MeshDescription:
    on_meta = of.on_meta()
    return describe_mesh(on_meta, on_meta.parallel_plan(), spec, **options)


def table(rank: SimulatedRank) -> dict[tuple[str, str], tuple[int, int]]:
    return {(row.axis, row.kind): (row.count, row.elements) for row in rank.traffic}


def test_what_a_rank_holds_is_what_the_arithmetic_says() -> None:
    """Every rank of a mesh of all axes holds what the arithmetic says, also where nothing divides evenly."""
    uneven = task(vocab_size=97, num_hidden_layers=5)
    spec = MeshSpec(pp=2, dp_replicate=2, dp_shard=3, cp=2, tp=2)
    drawn = described(uneven, spec)
    ranks = [0, 11, spec.world_size - 1]
    for found in simulate_ranks(uneven, MeshStrategy(), spec, ranks):
        assert drawn.ranks[found.rank].state_bytes == found.state_bytes, found
        assert drawn.ranks[found.rank].place == found.place
        assert found.traffic == ()
    assert not dist.is_initialized()
    assert not uneven.has_model


def test_all_ranks_of_a_copy_hold_the_model_once() -> None:
    spec = MeshSpec(pp=2, dp_shard=2, tp=1)
    drawn = described(task(), spec)
    held = sum(rank.state_bytes.parameters for rank in drawn.ranks)
    assert held == drawn.unsharded.parameters == 4 * drawn.parameters
    assert drawn.largest.state_bytes.total == max(rank.state_bytes.total for rank in drawn.ranks)
    tied = described(task(tie_word_embeddings=True), spec)
    twice = VOCABULARY * WIDTH * 4  # First and last stage hold the embedding.
    assert sum(rank.state_bytes.parameters for rank in tied.ranks) == tied.unsharded.parameters + twice
    half = described(task(), spec, element_size=2)
    assert half.unsharded.parameters * 2 == drawn.unsharded.parameters


def test_a_step_passes_what_megatron_and_ring_attention_say() -> None:
    parts, spec = 4, MeshSpec(pp=2, dp_shard=2, cp=2, tp=2)
    first, last = simulate_ranks(task(), MeshStrategy(micro_batches=parts), spec, [0, 15], batch())
    tokens, blocks = ROWS * LENGTH // 2, LAYERS // 2  # cp halves the sequence, pp the blocks.
    activations = tokens * WIDTH
    assert table(first)["tp", "all_reduce"] == (parts * (4 * blocks + 1), activations * (4 * blocks + 1))
    # The loss: gradients of hidden states, the highest logit of each token, and two sums.
    assert table(last)["tp", "all_reduce"] == (parts * (4 * blocks + 3), activations * (4 * blocks + 1) + 3 * tokens)
    for rank in (first, last):
        for kind in ("send", "receive"):
            assert table(rank)["pp", kind] == (parts, activations)
            head_dim, kv_heads = WIDTH // GROUPED["num_attention_heads"], GROUPED["num_key_value_heads"] // 2
            keys_values = 2 * tokens * kv_heads * head_dim
            assert table(rank)["cp", kind] == (3 * parts * blocks, 3 * blocks * keys_values)
        # Each unit's gradients are reduced once, however many micro-batches there are.
        elements = table(rank)["dp_shard x cp", "reduce_scatter"][1]
        assert elements == rank.state_bytes.parameters // 4 * 4


def test_sequence_parallelism_turns_all_reduces_into_pairs() -> None:
    strategy = MeshStrategy(sequence_parallel=True)
    (found,) = simulate_ranks(task(), strategy, MeshSpec(dp_shard=1, tp=2), [1], batch())
    activations = ROWS * LENGTH * WIDTH
    assert table(found)["tp", "reduce_scatter"] == (4 * LAYERS, 4 * LAYERS * activations)
    # Two more a layer: backward gathers the inputs of attention and of MLP again.
    assert table(found)["tp", "all_gather"] == (6 * LAYERS + 2, (6 * LAYERS + 2) * activations)


def test_half_precision_halves_what_it_computes_in() -> None:
    from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision

    spec, wide = MeshSpec(dp_shard=2, tp=2), MeshStrategy()
    (single,) = simulate_ranks(task(), wide, spec, [0], batch())
    mixed, half = MeshStrategy(), MeshStrategy()
    mixed._precision_plugin = MixedPrecision("bf16-mixed", "cpu")
    half._precision_plugin = HalfPrecision("bf16-true")
    (found,) = simulate_ranks(task(), mixed, spec, [0], batch())
    assert found.state_bytes == single.state_bytes
    assert _bytes(found, "tp") < _bytes(single, "tp")
    assert _bytes(found, "dp_shard") == _bytes(single, "dp_shard")
    (found,) = simulate_ranks(task(), half, spec, [0], batch())
    assert found.state_bytes == RankStateBytes(*(size // 2 for size in vars(single.state_bytes).values()))


def test_stages_pass_hidden_states_in_the_dtype_of_gathered_parameters() -> None:
    """Stages are rehearsed before they are sharded: with parameters in their own dtype, hidden states would differ."""
    from lightning.pytorch.plugins.precision import MixedPrecision

    spec, sent = MeshSpec(pp=2, dp_shard=2), {}
    for dtype in ("float32", "bfloat16"):
        strategy = MeshStrategy(appliers=[FullyShard(param_dtype=dtype)], micro_batches=2)
        strategy._precision_plugin = MixedPrecision("bf16-mixed", "cpu")
        (found,) = simulate_ranks(task(), strategy, spec, [0], batch())
        sent[dtype] = sum(row.bytes for row in found.traffic if row.kind == "send")
    assert sent["bfloat16"] == sent["float32"] / 2


def _bytes(rank: SimulatedRank, axis: str) -> int:
    return sum(row.bytes for row in rank.traffic if row.axis == axis)


# --- what is refused, and what is left ------------------------------------------------------------------------


def test_a_rank_simulates_nothing() -> None:
    with simulation.fake_world(0, 2), pytest.raises(DloError, match="run it in its own process"):
        simulate_ranks(task(), MeshStrategy(), MeshSpec(tp=2, dp_shard=1), [0])


def test_an_error_leaves_no_group() -> None:
    with pytest.raises(DloError, match="set tp=2"):
        simulate_ranks(task(), MeshStrategy(), MeshSpec(tp=8, dp_shard=1), [0])
    assert not dist.is_initialized()


# --- ``dlo mesh``: what it prints for shipped configs, and what it refuses -------------------------------------------


MESH = ("mesh", "--config", "llm/quickstart", "--trainer.strategy", "MeshStrategy", "--data.init_args.batch_size", "32")


def options(**given: Any) -> list[str]:
    return [word for name, value in given.items() for word in (f"--trainer.strategy.init_args.{name}", str(value))]


def test_a_mesh_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    shown = described(task(), MeshSpec(dp_shard=256), nodes=128).text()
    assert "dp_shard 256: 256 ranks on 128 nodes of 2" in shown
    assert "[0 1 2 3 4 5 ... 255]" in shown
    assert main([*MESH, "--ranks", "8", *options(pp=2, tp=2)]) == 0
    shown = capsys.readouterr().out
    assert "pp 2 x dp_shard 2 x tp 2: 8 ranks on 1 node" in shown
    assert "steps  1F1B, 8 micro-batches" in shown
    assert "tp        4 of 2  [0 1] [2 3] [4 5] [6 7]" in shown
    assert "0      0   model.layers.0-2  stem" in shown
    assert "1      1   model.layers.3    head" in shown
    assert len([line for line in shown.splitlines() if line[:1].isdigit()]) == 2 + 8


def test_a_mesh_as_data(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--trainer.devices", "2", "--trainer.num_nodes", "2", "--json", *options(tp=2)]
    assert main([*MESH, *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mesh"] == {"pp": 1, "dp_replicate": 1, "dp_shard": 2, "cp": 1, "tp": 2}
    assert [rank["node"] for rank in found["ranks"]] == [0, 0, 1, 1]
    assert found["groups"] == {"dp_shard": [[0, 2], [1, 3]], "tp": [[0, 1], [2, 3]]}
    whole, each = found["model"]["bytes"], [rank["bytes"]["parameters"] for rank in found["ranks"]]
    assert whole["optimizer"] == 2 * whole["gradients"] == 2 * whole["parameters"]
    assert sum(each) == pytest.approx(whole["parameters"], rel=0.01)  # Norms are whole on each rank of tp.
    assert found["largest"] == 0


def test_a_second_model_is_counted(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    model = {"model_type": "llama", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64}
    model |= {"num_attention_heads": 4, "num_hidden_layers": 4}
    task = {"class_path": "CausalLM", "init_args": {"config": model}}
    teachers = [{"task": task, "dtype": "bfloat16"}, {"task": task, "dtype": "bfloat16", "offload": True}]
    distill = [{"class_path": "Distill", "init_args": {"teacher": teacher}} for teacher in teachers]
    config = {"trainer": {"strategy": {"class_path": "MeshStrategy"}, "callbacks": distill}}
    config |= {"model": task, "data": {"class_path": "TextData", "init_args": {"batch_size": 8}}}
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    words = ["mesh", "--config", str(tmp_path / "config.yaml"), "--ranks", "4", *options(pp=2, tp=2), "--json"]
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    on_device, offloaded = found["second_models"]
    assert on_device["unsharded"] * 2 == found["model"]["bytes"]["parameters"], "in half precision"
    assert (on_device["is_offloaded"], offloaded["is_offloaded"]) == (False, True)
    for rank in found["ranks"]:
        assert rank["second_bytes"] * 2 == rank["bytes"]["parameters"], "the same model is cut in the same way"


def test_what_cannot_be_drawn_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    refused = {
        "set tp=2 (sizes that fit all of the model: 1, 2": [*MESH, "--ranks", "8", *options(tp=8)],
        "trainer.devices must be a number where the run's machine is not at hand, got auto": [*MESH, *options(tp=2)],
        "its ranks have no axes": [*MESH[:3], "--ranks", "2", "--trainer.strategy", "ddp"],
    }
    for message, words in refused.items():
        assert main(words) == 2, message
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("devices", "nodes", "ranks", "found"),
    [(8, 2, None, (8, 2)), ([0, 3], 1, None, (2, 1)), (8, 2, 32, (8, 4)), (8, 1, 12, (12, 1)), ("auto", 1, 6, (6, 1))],
)
def test_ranks_lie_on_nodes_as_in_the_config(devices: Any, nodes: int, ranks: int | None, found: tuple) -> None:
    assert count_ranks_and_nodes(devices, nodes, ranks) == found
    with pytest.raises(DloError, match="--ranks 8"):
        count_ranks_and_nodes(-1, 1, None)
