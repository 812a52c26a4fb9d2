"""Optimizers of full tensors under tp: one rank steps and keeps each sliced tensor; the bytes are counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_tasks.language.causal_lm import CausalLM
from support.fsdp_nets import Batches, differ, trainer
from support.optimizer_runs import STEPS, STRATEGIES, data, plain_loop, task
from support.token_batches import SIZES, Tokens


def _run(rank: int, world: int, folder: Path, name: str) -> dict[str, Any]:
    run = trainer(world, STRATEGIES["tp"](), max_steps=STEPS, max_epochs=-1, gradient_clip_val=1e6)
    use_canonical_checkpoints(run)
    run.fit(task(name), Batches(data()))
    optimizer, strategy = run.optimizers[0], run.strategy
    share = strategy.engine.shares.share_of("model.blocks.0.mlp.fc1.weight")
    held = strategy.optimizer_tensors(optimizer)
    sliced = {key: tuple(share.full_shape(key)) for key in share.slices if key in share.shapes}
    state = {key for key, tensor in held.items() if key in sliced and optimizer.state[tensor]}
    weights = gather_full_weights(run)
    found = {
        "sliced": sliced,
        "held": sorted(held),
        "state": sorted(state),
        "sent": share.tensor_parallel.elements["exchange"],
        "difference": differ(
            {key: value for key, value in weights.items() if key.startswith("model.")}, plain_loop(name, 1)
        )
        if rank == 0
        else 0.0,
    }
    return found


def test_each_sliced_tensor_is_stepped_by_one_rank(tmp_path: Path) -> None:
    first, second = run_distributed(_run, 2, tmp_path, "lamb8bit", timeout=200)
    sliced = first["sliced"]
    assert len(sliced) >= 8
    both = set(first["held"]) & set(second["held"])
    assert not both & sliced.keys()
    assert set(first["held"]) | set(second["held"]) >= sliced.keys()
    assert both, "tensors without slices are stepped by both"
    assert not set(first["state"]) & set(second["state"])
    assert set(first["state"]) | set(second["state"]) == sliced.keys()
    # Slices of the gradient and of the old values to the owner, and of the new values from it.
    elements = sum(torch.Size(shape).numel() for shape in sliced.values())
    assert first["sent"] + second["sent"] == STEPS * 3 * elements
    loads = [sum(torch.Size(sliced[key]).numel() for key in rank["state"]) for rank in (first, second)]
    assert max(loads) <= 0.6 * elements
    assert first["difference"] < 1e-5


#: Matrices of these sizes have gradients without a null space, whose eigenbasis would be arbitrary: no side that is
#: longer than the other has a basis, and a step has more tokens than either.
SOAP = {"precondition_frequency": 2, "max_precondition_dim": SIZES["hidden_size"]}


def _soap(world: int, strategy: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    language = CausalLM(
        config={"model_type": "llama", **SIZES},
        optimizer="soap",
        optimizer_args=SOAP,
        lr=1e-2,
        schedule="constant",
    )
    run = trainer(world, strategy, max_steps=STEPS, precision="64-true")
    run.fit(language, datamodule=Tokens(1, steps=STEPS))
    return gather_full_weights(run)


def _soap_of_rank(rank: int, world: int) -> dict[str, torch.Tensor]:
    return _soap(world, MeshStrategy(tp=world))


def test_soap_has_the_weights_of_one_process_in_double_precision() -> None:
    expected = _soap(1, "auto")
    found = run_distributed(_soap_of_rank, 2, timeout=200)[0]
    assert differ(found, expected) < 5e-5  # Its QR is in single precision.
