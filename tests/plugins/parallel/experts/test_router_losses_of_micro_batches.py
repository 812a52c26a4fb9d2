"""A router's losses and bias over micro-batches: a pipeline's are those of one process that accumulates as many."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import seed_everything
from torch import Tensor
from torch.utils.data import DataLoader

from dlo_framework.models.experts import MixtureOptions
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.memory.activation_checkpoint import ActivationCheckpoint
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_tasks.language.causal_lm import CausalLM
from support.token_batches import FAMILIES, Batches, Tokens
from support.trainers import quiet_trainer

MICRO_BATCHES, STEPS = 4, 3
OPTIONS: dict[str, Any] = {"count": 6, "every": 2, "aux_loss": 0.5, "z_loss": 0.1, "bias_rate": 0.01}


class Joined(Tokens):
    """Steps of one batch, which has the rows of all micro-batches of :class:`Tokens`."""

    def train_dataloader(self) -> DataLoader:
        batches = super().train_dataloader().dataset.batches  # type: ignore[attr-defined]
        steps = [batches[at : at + self.micro_batches] for at in range(0, len(batches), self.micro_batches)]
        joined = [{name: _join([part[name] for part in step]) for name in step[0]} for step in steps]
        return DataLoader(Batches(joined), batch_size=None)


def _join(values: list[Tensor]) -> Tensor:
    return torch.cat(values) if values[0].ndim else values[0]


def fitted(folder: Path, strategy: Any, devices: int, data: type[Tokens], **options: Any) -> dict[str, Tensor]:
    seed_everything(0, verbose=False)
    config = {"model_type": "llama", **FAMILIES["llama"], "num_hidden_layers": 4}
    settings: dict[str, Any] = {"optimizer": "sgd", "lr": 0.5, "schedule": "constant"}
    task = CausalLM(config=config, experts=MixtureOptions(**{**OPTIONS, **options.pop("experts", {})}), **settings)
    trainer = quiet_trainer(
        devices=devices, strategy=strategy, max_steps=STEPS, default_root_dir=folder, precision="64-true", **options
    )
    trainer.fit(task, datamodule=data(MICRO_BATCHES, rows=2, steps=STEPS))
    return gather_full_weights(trainer)


def on_ranks(rank: int, world_size: int, folder: Path) -> list[dict[str, Tensor]]:
    pipeline: dict[str, Any] = {"pp": 2, "dp_shard": 1, "micro_batches": MICRO_BATCHES}
    strategies = [MeshStrategy(**pipeline, schedule="ZBV"), MeshStrategy(**pipeline, appliers=[ActivationCheckpoint()])]
    return [fitted(folder, strategy, world_size, Joined) for strategy in strategies]


def test_a_pipeline_has_the_router_losses_of_one_process_that_accumulates(tmp_path: Path) -> None:
    def alone(data: type[Tokens], accumulated: int, **experts: Any) -> dict[str, Tensor]:
        return fitted(tmp_path, "auto", 1, data, accumulate_grad_batches=accumulated, experts=experts)

    expected = alone(Tokens, MICRO_BATCHES)
    router = next(name for name in expected if name.endswith("mlp.gate.weight"))
    bias = router.replace("weight", "e_score_correction_bias")
    assert expected[bias].abs().max() > 0
    undivided = alone(Joined, 1)
    assert (expected[router] - undivided[router]).abs().max() > 1e-6  # Its fractions are those of all rows.
    for weights in run_distributed(on_ranks, 2, tmp_path, backend=None)[0]:
        for name, tensor in expected.items():
            torch.testing.assert_close(weights[name], tensor, rtol=1e-6, atol=1e-9)
    # Without the load-balancing loss, a division of the batch changes nothing, the bias included.
    divided, undivided = (alone(data, count, aux_loss=0.0) for data, count in ((Tokens, MICRO_BATCHES), (Joined, 1)))
    assert divided[bias].abs().max() > 0
    for name, tensor in undivided.items():
        torch.testing.assert_close(divided[name], tensor, rtol=1e-6, atol=1e-9)
