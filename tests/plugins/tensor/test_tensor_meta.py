"""Models without memory, cut for more ranks than there are, and cut models whose parts FSDP2 shards."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from dlo_framework.shards import get_layout
from dlo_framework.testing import run_distributed
from dlo_plugins.appliers.tensor_parallel import TensorParallel
from dlo_tasks.llm.language_models import find_head
from support.tensor_models import (
    assert_close,
    language_model,
    plan_of,
    text_loss,
    whole,
)

LLAMA = {
    **{"vocab_size": 128_256, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 3},
    **{"num_attention_heads": 32, "num_key_value_heads": 8},
}


def _on_meta(rank: int, world_size: int) -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=8)
    for sequence_parallel in (False, True):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **LLAMA))
        whole_sizes = {name: p.shape for name, p in model.named_parameters()}
        applier = TensorParallel(sequence_parallel)
        applier.check(model, plan_of(model), 8)
        applier.apply(model, init_device_mesh("cpu", (8,), mesh_dim_names=("tp",)), plan_of(model))
        assert applier.communicator is not None
        layout = get_layout(model)
        held = sum(p.numel() for p in model.parameters())
        norms = (2 * 3 + 1) * 4096
        assert held == (sum(size.numel() for size in whole_sizes.values()) - norms) / 8 + norms
        for name, p in model.named_parameters():
            assert p.is_meta
            if name in layout.slices:
                assert layout.slices[name].full_shape(p.shape) == whole_sizes[name]
        assert model.lm_head.weight.shape == (16_032, 4096)
        assert layout.slices["lm_head.weight"].runs == ((5 * 16_032, 16_032),)
        with applier.communicator.counted() as passed, torch.device("meta"):
            mask = torch.ones(2, 1, 64, 64, dtype=torch.bool)  # transformers would make one from ids' values
            ids = torch.zeros(2, 64, dtype=torch.long)
            hidden = model.model(input_ids=ids, attention_mask=mask, use_cache=False)[0]
            hidden.sum().backward()
        activations = 2 * 64 * 4096
        forward_and_backward = 2 * (2 * 3) * activations  # two a layer, each way
        gathers, embedding = 2 * activations, activations
        if sequence_parallel:
            each, again = forward_and_backward, forward_and_backward // 2  # Backward gathers inputs again.
            assert passed == {"all_reduce": embedding, "all_gather": each + again + gathers, "reduce_scatter": each}
        else:
            assert passed == {"all_reduce": forward_and_backward + embedding}
        assert all(
            p.grad is not None and p.grad.shape == p.shape for n, p in model.named_parameters() if "head" not in n
        )
    dist.destroy_process_group()


def test_eight_ranks_of_a_model_without_memory() -> None:
    run_distributed(_on_meta, 1, backend=None)


def _sharded(rank: int, world_size: int) -> None:
    """Two ranks of tp by two that FSDP2 shards over; a step on both halves of a batch is one on the whole."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for sequence_parallel in (False, True):
        alone, shared = language_model("qwen3"), language_model("qwen3")
        TensorParallel(sequence_parallel).apply(shared, mesh, plan_of(shared))
        for block in shared.model.layers:
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(shared.lm_head, mesh=mesh["dp"])
        fully_shard(shared.model, mesh=mesh["dp"])
        assert find_head(shared).is_gathered
        assert find_head(shared).shard is not None
        text_loss(alone).backward()
        text_loss(shared).backward()
        wanted = {name: p.grad for name, p in alone.named_parameters()}
        found = {}
        for name, p in shared.named_parameters():
            found[name] = _whole_over(shared, name, p, mesh["tp"].get_group())
        assert_close(found, wanted, 1e-5, f"sharded, sequence {sequence_parallel}")


def _whole_over(model: nn.Module, name: str, parameter: nn.Parameter, group: dist.ProcessGroup) -> torch.Tensor:
    assert parameter.grad is not None
    part = parameter.grad.full_tensor()  # type: ignore[attr-defined]
    return whole(model, name, part, group=group)


def test_fsdp2_shards_what_has_been_cut() -> None:
    run_distributed(_sharded, 4)
