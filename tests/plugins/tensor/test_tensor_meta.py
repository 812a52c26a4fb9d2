"""Cut models whose parts FSDP2 shards."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.tensor.tensor_parallel import TensorParallel
from dlo_tasks.language.language_models import find_head
from support.tensor_models import (
    assert_close,
    language_model,
    plan_of,
    text_loss,
    whole,
)


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
