"""Stage 3 with parts of it in CPU memory: what lies where, and that each way trains as without."""

from __future__ import annotations

from typing import Any

import pytest
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
OPTIMIZERS: dict[str, Any] = {
    "pieces": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "whole tensors": lambda parameters: torch.optim.Adafactor(parameters, lr=0.05),
}


def _engine(offload: str | None, kind: str) -> tuple[nn.Module, Any, ZeroEngine]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 7), nn.Linear(7, 3))
    model[0].bias.requires_grad_(False)
    optimizer = OPTIMIZERS[kind]([p for p in model.parameters() if p.requires_grad])
    options = ZeroOptions(
        3,
        bucket_elements=1,
        offload_optimizer=offload in ("optimizer", "both"),
        offload_parameters=offload in ("parameters", "both"),
    )
    return model, optimizer, ZeroEngine(model, [optimizer], ["0", "1"], Communicator(), DEVICE, options)


def _step(rank: int, model: nn.Module, optimizer: Any, engine: ZeroEngine, micro_batches: int, twice: bool) -> None:
    for number in range(micro_batches):
        engine.sync = number == micro_batches - 1
        inputs = torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * rank + number))
        loss = model(inputs).square().mean()
        engine.before_backward(automatic=True)
        loss.backward()
        engine.after_backward(automatic=True)
    optimizer.step()
    if twice:
        optimizer.step()
    optimizer.zero_grad()


def _trained(rank: int, world_size: int) -> dict[Any, Any]:
    """Returns weights by kind of optimizer and offload, and the bytes of copies for the step beside the shards."""
    found: dict[Any, Any] = {}
    for kind in OPTIMIZERS:
        for offload in PLACES:
            model, optimizer, engine = _engine(offload, kind)
            places = {(group.trains, group.shard_device, group.step_device) for group in engine.groups}
            _step(rank, model, optimizer, engine, 1, twice=False)
            for group in engine.groups:  # As an average of the weights, or a checkpoint, writes.
                group.shard.mul_(0.5)
            engine.refresh()
            _step(rank, model, optimizer, engine, 2, twice=kind == "pieces")
            copies = sum(group.copy_bytes for group in engine.groups)
            shards = sum(group.shard.nbytes for group in engine.groups if group.trains)
            held = engine.count_state_bytes()["parameters"] - sum(group.shard.nbytes for group in engine.groups)
            engine.dissolve()
            found[kind, offload] = places, copies, shards, held, [p.tolist() for p in model.parameters()]
    return found


@pytest.fixture(scope="module")
def found() -> dict[Any, Any]:
    return run_distributed(_trained, 2, timeout=280)[0]


@pytest.mark.parametrize("offload", PLACES)
def test_each_option_moves_what_it_names_and_nothing_else(found: dict[Any, Any], offload: str | None) -> None:
    rests, home = PLACES[offload]
    places, copies, shards, held, _ = found["pieces", offload]
    assert places == {(True, rests, home), (False, rests, rests)}
    # The copy that the CPU steps stays there; on the device it is there for a step alone.
    assert copies == held == (shards if offload == "optimizer" else 0)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_wherever_it_lies_it_trains_alike(found: dict[Any, Any], kind: str) -> None:
    *_, expected = found[kind, None]
    for offload in PLACES:
        for weights, wanted in zip(found[kind, offload][-1], expected, strict=True):
            torch.testing.assert_close(torch.tensor(weights), torch.tensor(wanted), rtol=1e-6, atol=1e-7)
