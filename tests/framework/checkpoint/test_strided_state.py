"""Optimizer state that is read back has its parameter's strides, which fused optimizers on CUDA require."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer

from dlo_framework.distributed.strategy import use_canonical_checkpoints
from support.trainers import quiet_trainer


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.held: dict[str, Any] = {}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        states = self.trainer.optimizers[0].state
        state = next((states[p] for p in states if p.ndim == 4), {})
        self.held = {key: value.clone() for key, value in state.items()}
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(folder: Path, steps: int, resume: Path | None = None) -> tuple[Trainer, Net]:
    torch.manual_seed(0)
    module = Net()
    trainer = quiet_trainer(
        max_steps=steps, default_root_dir=folder,
    )  # fmt: skip
    use_canonical_checkpoints(trainer)
    batches = torch.randn(8, 2, 3, 6, 6, generator=torch.Generator().manual_seed(1))
    trainer.fit(module, torch.utils.data.DataLoader(list(batches), batch_size=None), ckpt_path=resume)
    return trainer, module


def test_moments_of_a_channels_last_weight_are_channels_last_after_a_resume(tmp_path: Path) -> None:
    trainer, module = fit(tmp_path, 3)
    path = tmp_path / "third.ckpt"
    trainer.save_checkpoint(path)
    _, resumed = fit(tmp_path, 5, path)
    strides = module.net.weight.stride()
    assert strides != torch.empty(module.net.weight.shape).stride()
    assert resumed.held["exp_avg"].stride() == resumed.held["exp_avg_sq"].stride() == strides
