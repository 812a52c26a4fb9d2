"""Who gets which blocks of a pipeline: by the work that the data will make, on one process as on many."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dlo_framework.errors import DloError
from dlo_framework.mesh import MeshSpec
from dlo_plugins.parallel.mesh.pipelined_task import PipelineOptions, check_task, forward_costs
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.language.causal_lm import CausalLM

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 2, "num_hidden_layers": 6}


def causal(vocab_size: int = 100, **more: Any) -> CausalLM:
    sizes = {"intermediate_size": 128, "vocab_size": vocab_size, "max_position_embeddings": 4096}
    return CausalLM(config={**LLAMA, **sizes, **more})


def split(task: Any, ranks: int = 2, datamodule: Any = None, **options: Any) -> Any:
    task = task.on_meta()
    return PipelineOptions(**options).choose_split(task, task.parallel_plan(), ranks, datamodule)


def test_blocks_of_one_size_are_shared_out_with_the_head_counted() -> None:
    assert split(causal()) == [3, 3]
    assert split(causal(vocab_size=10_000)) == [4, 2]
    assert split(causal(), split=[1, 5]) == [1, 5]
    assert sum(split(causal(), schedule="ZBV")) == 6
    assert len(split(causal(), schedule="ZBV")) == 4


def test_the_data_tell_how_long_sequences_are() -> None:
    task = causal().on_meta()
    costs = {
        length: forward_costs(task, task.parallel_plan(), SimpleNamespace(seq_len=length)) for length in (64, 1024)
    }
    short, long = costs[64], costs[1024]
    assert short is not None
    assert long is not None
    assert long.head == 16 * short.head == 2 * 64 * 100 * 1024
    assert long.blocks[0] > 16 * short.blocks[0]  # Attention grows with the square.


def test_the_mesh_that_is_drawn_is_the_one_that_runs() -> None:
    task = causal(vocab_size=10_000)
    strategy = MeshStrategy(pp=2, dp_shard=1, micro_batches=2)
    strategy.parallel_devices = [torch.device("cpu")] * 2
    assert strategy.mesh_spec() == MeshSpec(pp=2, dp_shard=1)
    drawn = strategy.describe(task, SimpleNamespace(seq_len=64))
    assert [len(stage.blocks) for stage in drawn.stages] == split(task, datamodule=SimpleNamespace(seq_len=64))


def test_a_task_that_generates_without_the_pipeline_is_refused_before_it_starts() -> None:
    class Alone(CausalLM):
        generates_in_stages = False

    strategy = MeshStrategy(pp=2, dp_shard=1, micro_batches=2)
    strategy.parallel_devices = [torch.device("cpu")] * 2
    strategy.check_predict(CausalLM(config=LLAMA))
    with pytest.raises(DloError, match=r"must set generates_in_stages under pp > 1, got Alone; run its forwards by"):
        strategy.check_predict(Alone(config=LLAMA))


def test_parameters_outside_of_the_model_are_refused() -> None:
    task = ImageClassifier("vit_tiny_patch16_224", num_classes=10, image_size=32)
    task.temperature = torch.nn.Parameter(torch.ones(()))
    twin = task.on_meta()
    spec = MeshSpec(pp=2, dp_shard=1)
    with pytest.raises(DloError, match=r"got 'temperature' of ImageClassifier; make it a part of"):
        PipelineOptions().check(twin, twin.parallel_plan(), spec, None)
    twin.temperature.requires_grad = False
    PipelineOptions().check(twin, twin.parallel_plan(), spec, None)


@pytest.mark.parametrize("own", ["training_step", "backward"])
def test_a_task_with_a_step_of_its_own_is_refused(own: str) -> None:
    """A schedule runs forward and backward, and would leave the task's out."""
    task = type("Own", (CausalLM,), {own: lambda self, *args: None})(config=LLAMA)
    with pytest.raises(DloError, match=rf"by inputs\(\) and loss\(\), got a {own} of Own"):
        check_task(task)
