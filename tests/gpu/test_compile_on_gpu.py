"""Compile on an accelerator: a whole step of CUDA graphs has the weights of the uncompiled one."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import Trainer, seed_everything
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from dlo_framework.task import Task
from dlo_plugins.compile.callback import Compile


class Net(Task):
    def configure_model(self) -> None:
        if not self.has_model:
            self.model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 10))

    def inputs(self, batch: Any) -> Any:
        return (batch[0],), {}

    def loss(self, outputs: Any, batch: Any) -> Any:
        return cross_entropy(outputs, batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 - 0.05 * step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _fit(*callbacks: Any) -> dict[str, torch.Tensor]:
    seed_everything(3, verbose=False)
    module = Net()
    module.configure_model()
    data = TensorDataset(torch.randn(320, 64), torch.randint(10, (320,)))
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    Trainer(accelerator="gpu", devices=1, max_epochs=1, callbacks=list(callbacks), **quiet).fit(
        module, DataLoader(data, batch_size=32)
    )
    return {name: value.cpu() for name, value in module.state_dict().items()}


def test_a_whole_step_of_cuda_graphs_has_the_weights_of_the_uncompiled_one(tmp_path: Any) -> None:
    expected = _fit()
    found = _fit(Compile(mode="reduce-overhead", loss=True, optimizer=True, cache_dir=str(tmp_path)))
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)
