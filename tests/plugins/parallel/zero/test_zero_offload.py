"""Stage 3 with parts of it in CPU memory: what lies where."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.zero.zero_engine import ZeroEngine, ZeroOptions

#: Two names of one memory: what is on the first passes for an accelerator's.
DEVICE, CPU = torch.device("cpu", 0), torch.device("cpu")
#: What each option says of a trained group: where its shard rests, and where it is stepped.
PLACES = {
    None: (DEVICE, DEVICE),
    "optimizer": (DEVICE, CPU),
    "parameters": (CPU, DEVICE),
    "both": (CPU, CPU),
}


def _engine(offload: str | None) -> tuple[nn.Module, Any, ZeroEngine]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 3))
    model[0].bias.requires_grad_(False)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.05)
    options = ZeroOptions(
        3,
        bucket_elements=1,
        offload_optimizer=offload in ("optimizer", "both"),
        offload_parameters=offload in ("parameters", "both"),
    )
    return model, optimizer, ZeroEngine(model, [optimizer], ["0", "1"], Communicator(), DEVICE, options)


def _places(rank: int, world_size: int) -> dict[Any, Any]:
    """Returns where groups lie by offload, and the bytes of copies for a step beside the shards."""
    found: dict[Any, Any] = {}
    for offload in PLACES:
        model, optimizer, engine = _engine(offload)
        places = {(group.trains, group.shard_device, group.step_device) for group in engine.groups}
        loss = model(torch.randn(3, 4)).square().mean()
        engine.before_backward(automatic=True)
        loss.backward()
        engine.after_backward(automatic=True)
        optimizer.step()
        optimizer.zero_grad()
        copies = sum(group.copy_bytes for group in engine.groups)
        shards = sum(group.shard.nbytes for group in engine.groups if group.trains)
        held = engine.count_state_bytes()["parameters"] - sum(group.shard.nbytes for group in engine.groups)
        engine.dissolve()
        found[offload] = places, copies, shards, held
    return found


def test_each_option_moves_what_it_names_and_nothing_else() -> None:
    for offload, (places, copies, shards, held) in run_distributed(_places, 2)[0].items():
        rests, home = PLACES[offload]
        assert places == {(True, rests, home), (False, rests, rests)}, offload
        # The copy that the CPU steps stays there; on the device it is there for a step alone.
        assert copies == held == (shards if offload == "optimizer" else 0), offload
