"""Weights that ranks share, whole again; and the norm of gradients that they share."""

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from dlo_framework.distributed.strategy import SingleProcessStrategy
from dlo_framework.shards import FlatShard
from dlo_framework.strategy_contract import contract_of
from dlo_framework.testing import record, run_distributed
from dlo_framework.testing.record import checksum, gather_full_tensors, gather_full_weights


class OwnNorm(SingleProcessStrategy):
    def gradient_norm(self, optimizer):
        return torch.tensor(5.0)


def whole() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {
        "plain": torch.randn(3),
        "flat": torch.randn(5, 4),
        "scalar": torch.tensor(7),
        "sharded": torch.randn(5, 2),
        "last_stage": torch.randn(2, 2),
    }


def _spread(rank: int, world_size: int) -> tuple[dict, float, float]:
    tensors, mesh = whole(), init_device_mesh("cpu", (world_size,))
    flat, cut = tensors["flat"].view(-1), 7
    mine = {
        "plain": tensors["plain"],
        "flat": FlatShard(flat[:cut] if rank == 0 else flat[cut:], torch.Size((5, 4)), 0 if rank == 0 else cut),
        "scalar": FlatShard(tensors["scalar"].view(-1)[: 1 - rank], torch.Size(()), rank),
        "sharded": distribute_tensor(tensors["sharded"], mesh, [Shard(0)]),
        "extra": {"no": "tensor"},
    }
    if rank == world_size - 1:
        mine["last_stage"] = tensors["last_stage"]
    gathered = gather_full_tensors(mine)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(record, "_BUNDLE", 41)  # bytes: "plain" and "scalar" fit into one message, "flat" into none
        again = gather_full_tensors(mine)
    assert again.keys() == gathered.keys()
    assert all(torch.equal(again[name], value) for name, value in gathered.items())

    plain, sharded = nn.Parameter(torch.zeros(3)), nn.Parameter(mine["sharded"].detach().clone())
    plain.grad, sharded.grad = tensors["plain"].clone(), mine["sharded"].detach().clone()
    optimizer = torch.optim.SGD([plain, sharded], lr=0.1)
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    norm = float(contract_of(trainer.strategy).gradient_norm(optimizer))
    trainer.strategy.__class__ = OwnNorm
    own = float(contract_of(trainer.strategy).gradient_norm(optimizer))
    dist.barrier()
    return gathered, norm, own


def test_what_two_ranks_share_is_whole_again():
    found = run_distributed(_spread, 2)
    expected = whole()
    assert set(found[0][0]) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[0][0][name], tensor), name
    norm = torch.cat([expected["plain"], expected["sharded"].view(-1)]).norm()
    for _, found_norm, own in found:
        assert abs(found_norm - float(norm)) < 1e-6
        assert own == 5.0, "a strategy that has a norm is asked"


def test_names_are_plain_and_tensors_are_copies():
    model = BoringModel()
    model.layer = torch.compile(model.layer, backend="eager")
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    trainer.strategy.connect(model)
    weights = gather_full_weights(trainer)
    assert set(weights) == {"layer.weight", "layer.bias"}
    before = checksum(weights["layer.bias"])
    with torch.no_grad():
        model.layer.bias.add_(1)
    assert checksum(weights["layer.bias"]) == before
    assert checksum(model.layer.bias) != before


def test_checksums_of_all_kinds():
    for tensor in (torch.randn(2, 3).T, torch.tensor(1.5), torch.ones(3, dtype=torch.bfloat16), torch.tensor([True])):
        assert checksum(tensor) == checksum(tensor.clone())
    assert checksum(torch.tensor([1.0, 2.0])) != checksum(torch.tensor([2.0, 1.0]))
    assert checksum(torch.empty(0)) == 0
