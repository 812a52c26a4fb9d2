"""PipeDream-2BW over shards of sequences: backwards of a batch run while another one's sequences are in use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import seed_everything
from torch import Tensor

from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.run.resume import ExactResume
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.compile.compile_blocks import CompileBlocks
from dlo_plugins.memory.activation_checkpoint import ActivationCheckpoint
from dlo_plugins.parallel.fsdp.fully_shard import FullyShard
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_tasks.language.causal_lm import CausalLM
from support.fsdp_nets import Batches, trainer
from support.runs import Watch
from support.token_batches import FAMILIES, packed_rows

#: Options of the mesh, beside pp and cp of two; the first each time.
MESHES: dict[str, Any] = {
    "ring": dict,
    "recomputed": lambda: {"appliers": [ActivationCheckpoint()]},
    "ulysses": lambda: {"cp_method": "ulysses"},
    "offload": lambda: {"appliers": [FullyShard(offload=True)]},
    "compiled": lambda: {"appliers": [CompileBlocks(backend="aot_eager")]},
    "recomputed, compiled": lambda: {"appliers": [ActivationCheckpoint(), CompileBlocks(backend="aot_eager")]},
}
STEPS, STOP = 4, 2


class Late(torch.optim.AdamW):
    """Optimizer that applies the gradients of the step before."""

    late: list[Tensor] | None = None

    def step(self, closure: Any = None) -> Any:
        loss = closure()
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters]
        for parameter, gradient in zip(parameters, self.late or [None] * len(parameters), strict=True):
            parameter.grad = gradient
        super().step()
        self.late = gradients
        return loss


class Model(CausalLM):
    def __init__(self, is_late: bool) -> None:
        super().__init__(config={"model_type": "qwen3", **FAMILIES["qwen3"]}, lr=1e-2)
        self.is_late = is_late

    def configure_optimizers(self) -> Any:
        kind = Late if self.is_late else torch.optim.AdamW
        return kind(self.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.05)


def loader() -> Batches:
    draw = torch.Generator().manual_seed(5)
    rows = [packed_rows(4, draw) for _ in range(STEPS)]
    return Batches([batch | {"tokens_in_step": (batch["labels"] != -100).sum()} for batch in rows])


def fit(world: int, strategy: Any, *, is_late: bool = False, save: Path | None = None, **options: Any) -> Any:
    seed_everything(3, verbose=False)
    losses, resume = Watch(), options.pop("resume", None)
    settings = {"precision": "64-true", "gradient_clip_val": 0.5, "max_steps": STEPS, "max_epochs": -1, **options}
    run = trainer(world, strategy, callbacks=[losses, ExactResume()], **settings)
    use_canonical_checkpoints(run)
    run.fit(Model(is_late), loader(), ckpt_path=resume)
    if save is not None:
        run.save_checkpoint(save)
    return losses.losses, gather_full_weights(run)


def mesh(**options: Any) -> MeshStrategy:
    return MeshStrategy(**{"pp": 2, "cp": 2, "dp_shard": 1, "micro_batches": 2, "schedule": "PipeDream2BW", **options})


def _alone(rank: int, world: int) -> Any:
    found = fit(1, "auto", is_late=True), fit(1, "auto")
    return found


def _by_mesh(rank: int, world: int, folder: Path, meshes: list[str]) -> dict[str, Any]:
    found = {name: fit(world, mesh(**MESHES[name]())) for name in meshes}
    if "ring" in meshes:
        fit(world, mesh(), save=folder / "half.ckpt", max_steps=STOP)
        found["resumed"] = fit(world, mesh(), resume=folder / "half.ckpt")
    return found


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    "meshes", [["ring"], pytest.param([*MESHES][1:], marks=pytest.mark.slow)], ids=["ring", "others"]
)
def test_sequences_of_two_batches_are_kept_apart(tmp_path: Path, meshes: list[str]) -> None:
    (late, plain), *_ = run_distributed(_alone, 1, timeout=200)
    assert late[0] != pytest.approx(plain[0], rel=1e-4), "the delay changes the losses"
    ranks = run_distributed(_by_mesh, 4, tmp_path, meshes, timeout=280, group_timeout=90)
    for found in ranks:
        for name in meshes:  # Losses are in single precision.
            assert found[name][0] == pytest.approx([late[0][0], *late[0][:-1]], rel=1e-6), name
        if "resumed" in found:  # The first loss after a resume is the mean over the ranks of cp.
            assert found["resumed"][0][0] == pytest.approx(found["ring"][0][STOP], rel=1e-6)
            assert found["resumed"][0][1:] == found["ring"][0][STOP + 1 :]
    for name in meshes:
        for key, value in late[1].items():
            torch.testing.assert_close(ranks[0][name][1][key], value, rtol=1e-9, atol=1e-9)
    if "resumed" in ranks[0]:
        assert all(torch.equal(ranks[0]["resumed"][1][key], value) for key, value in ranks[0]["ring"][1].items())
