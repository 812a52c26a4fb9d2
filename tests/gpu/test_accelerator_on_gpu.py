"""Settings of a run on a GPU: copies on a stream of their own are right, and a fit has all of them."""

import gc
import json
import os
import subprocess
import sys

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.data import DataLoader, Dataset

from dlo_framework.accelerator import AcceleratorSettings, BatchCopyStream


def test_what_is_copied_is_what_is_computed_with_while_the_device_is_behind():
    """The host runs ahead by many batches, so that memory is freed and taken again before the device has read it."""
    device = torch.device("cuda", 0)
    copies = BatchCopyStream(device)
    work = torch.randn(4096, 4096, device=device)
    batches = [torch.full((1 << 20,), float(number)).pin_memory() for number in range(64)]
    sums = []
    for batch in batches:
        moved = copies.copy({"x": batch})
        for _ in range(4):
            work @ work
        sums.append(moved["x"].sum(dtype=torch.float64))
        del moved
    assert [float(one) for one in sums] == [number * float(1 << 20) for number in range(64)]


def test_a_copy_runs_beside_the_computation():
    device = torch.device("cuda", 0)
    copies = BatchCopyStream(device)
    work = torch.randn(8192, 8192, device=device)
    batch = torch.empty(1 << 26).pin_memory()
    copies.copy(batch)
    torch.cuda.synchronize()
    for _ in range(20):
        work @ work
    done = torch.cuda.Event()
    copies.copy(batch)
    done.record(copies.stream)
    done.synchronize()
    assert not torch.cuda.current_stream(device).query()  # The products are not through yet.


class Rows(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3, 16, 16), float(index))


class Convolution(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.Linear(8 * 14 * 14, 1))
        self.losses: list[torch.Tensor] = []

    def training_step(self, batch, batch_idx):
        loss = self.net(batch / 64).square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Look(Callback):
    found: tuple

    def on_train_batch_end(self, *args, **kwargs):
        self.found = (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark, gc.isenabled())


@pytest.fixture
def as_it_was():
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.benchmark = before[1]


@pytest.mark.usefixtures("as_it_was")
def test_a_fit_has_them_and_its_losses_are_those_of_one_without(tmp_path):
    losses = []
    exact = {"matmul_precision": "highest", "cudnn_benchmark": False}
    for settings in ([AcceleratorSettings(**exact)], []):
        module = Convolution()
        trainer = Trainer(
            accelerator="gpu", devices=1, max_epochs=2, callbacks=settings, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        trainer.fit(module, DataLoader(Rows(), batch_size=8, pin_memory=True))
        losses.append([loss.item() for loss in module.losses])
        assert gc.isenabled()
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    look = Look()
    trainer = Trainer(
        accelerator="gpu", devices=1, max_steps=2, callbacks=[AcceleratorSettings(), look], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(Convolution(), DataLoader(Rows(), batch_size=8))
    assert look.found == ("high", True, False)


def test_the_command_has_the_allocator_grow_its_segments():
    code = (
        "from dlo_framework.cli.run import set_allocator; set_allocator(); import torch, json;"
        "torch.zeros(1, device='cuda'); print(json.dumps(torch.cuda.memory_snapshot()[0]['is_expandable']))"
    )
    environment = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) is True
