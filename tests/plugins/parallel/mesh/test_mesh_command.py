"""``dlo mesh``: what it prints for shipped configs, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dlo_framework.cli.main import main
from dlo_framework.errors import DloError
from dlo_plugins.parallel.mesh.simulated_run import count_ranks_and_nodes

MESH = ("mesh", "--config", "llm/quickstart", "--trainer.strategy", "MeshStrategy", "--data.init_args.batch_size", "32")


def options(**given: Any) -> list[str]:
    return [word for name, value in given.items() for word in (f"--trainer.strategy.init_args.{name}", str(value))]


def test_a_mesh_is_drawn(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["mesh", "--config", "digits/fsdp", "--ranks", "256"]) == 0
    shown = capsys.readouterr().out
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
    teacher = {"task": {"class_path": "CausalLM", "init_args": {"config": model}}, "dtype": "bfloat16"}
    for name, place in (("device", {}), ("host", {"offload": True})):
        distill = {"class_path": "Distill", "init_args": {"teacher": teacher | place}}
        config = {"trainer": {"strategy": {"class_path": "MeshStrategy"}, "callbacks": [distill]}}
        config |= {"model": teacher["task"], "data": {"class_path": "TextData", "init_args": {"batch_size": 8}}}
        (tmp_path / f"{name}.yaml").write_text(json.dumps(config))
    words = ["--ranks", "4", *options(pp=2, tp=2)]
    assert main(["mesh", "--config", str(tmp_path / "device.yaml"), *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    (second,) = found["second_models"]
    assert second["unsharded"] * 2 == found["model"]["bytes"]["parameters"], "in half precision"
    for rank in found["ranks"]:
        assert rank["second_bytes"] * 2 == rank["bytes"]["parameters"], "the same model is cut in the same way"
    assert main(["mesh", "--config", str(tmp_path / "host.yaml"), *words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["second_models"][0]["is_offloaded"]
    assert {rank["second_bytes"] for rank in found["ranks"]} == {0}


def test_what_does_not_fit_is_refused_as_in_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    refused = {
        "set tp=2 (sizes that fit all of the model: 1, 2": [*MESH, "--ranks", "8", *options(tp=8)],
        "use tp=3 or run 4 or 8 processes": [*MESH, "--ranks", "6", *options(tp=4)],
        "trainer.devices must be a number where the run's machine is not at hand, got auto": [*MESH, *options(tp=2)],
        "dlo mesh does not support DataParallelStrategy: its ranks have no axes": [
            *MESH[:3],
            "--ranks",
            "2",
            "--trainer.strategy",
            "ddp",
        ],
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


def test_devices_that_depend_on_the_machine_need_a_number() -> None:
    for devices in ("auto", -1, None):
        with pytest.raises(DloError, match="--ranks 8"):
            count_ranks_and_nodes(devices, 1, None)
