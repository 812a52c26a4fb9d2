"""Settings of a run on an accelerator, as far as a CPU can test them."""

import contextlib
import gc
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch import nn
from transformers import BatchEncoding

from dlo_framework import accelerator
from dlo_framework.accelerator import AcceleratorSettings, BatchCopyStream, Collector, may_benchmark
from dlo_framework.batch_transform import BatchCopier, join_transfer, leave_transfer
from dlo_framework.cli import run
from dlo_framework.data import module as data_module
from dlo_framework.errors import DloError
from support.trainers import quiet_trainer


class Streams:
    """The streams of `torch.cuda`, which records the calls."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def Stream(self, device: torch.device) -> Any:
        return SimpleNamespace(name="copies")

    def current_stream(self, device: torch.device) -> Any:
        return SimpleNamespace(name="computes", wait_stream=lambda other: self.events.append(f"wait for {other.name}"))

    @contextlib.contextmanager
    def stream(self, stream: Any) -> Any:
        self.events.append(f"begin {stream.name}")
        yield
        self.events.append(f"end {stream.name}")


def test_a_batch_is_copied_on_its_own_stream_which_the_computing_one_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    recorded: list[Any] = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: recorded.append((self, stream.name)))
    copies = BatchCopyStream(torch.device("meta"), Streams(events))
    there = torch.ones(2, device="meta")
    batch = {"x": torch.ones(3), "more": [torch.ones(1), "name"], "there": there}
    to = torch.Tensor.to

    def noted(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        events.append("copy" if self.device.type == "cpu" else "stay")
        return to(self, *args, **kwargs)

    monkeypatch.setattr(torch.Tensor, "to", noted)
    found = copies.copy(batch)
    assert events == ["begin copies", "copy", "copy", "stay", "end copies", "wait for copies"]
    assert found["x"].device.type == "meta"
    assert found["there"] is there
    # Memory that was there before does not belong to the copy stream.
    assert [name for _, name in recorded] == ["computes"] * 2
    assert {id(tensor) for tensor, _ in recorded} == {id(found["x"]), id(found["more"][0])}


class Copier(BatchCopier):
    def __init__(self) -> None:
        self.copied = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        join_transfer(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        leave_transfer(trainer)

    def copy_batch(self, batch: Any) -> Any:
        self.copied += 1
        return batch + 0


class OwnTransfer(BoringModel):
    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        return batch.to(device)


@pytest.mark.parametrize("module", [BoringModel, OwnTransfer])
def test_batches_of_training_and_validation_go_by_the_callback_that_copies_them(module, tmp_path) -> None:
    copier = Copier()
    trainer = quiet_trainer(
        max_epochs=1, limit_train_batches=3, limit_val_batches=2, num_sanity_val_steps=0,
        callbacks=[copier], default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module())
    assert copier.copied == (5 if module is BoringModel else 0)
    assert "batch_to_device" not in vars(trainer.strategy)


def test_on_a_cpu_nothing_is_set(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accelerator, "Collector", lambda every: pytest.fail("garbage collection was taken over"))
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    trainer = quiet_trainer(max_steps=3, callbacks=[AcceleratorSettings()], default_root_dir=tmp_path)
    trainer.fit(BoringModel())
    assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark) == before
    assert "batch_to_device" not in vars(trainer.strategy)


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A trainer with a pretended CUDA device and recording streams; settings are restored."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.benchmark
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.benchmark = False
    monkeypatch.setattr(accelerator, "BatchCopyStream", lambda device: SimpleNamespace(copy=lambda batch: batch))
    strategy = mock.Mock(root_device=torch.device("cuda", 0), batch_to_device=lambda batch: batch)
    yield SimpleNamespace(strategy=strategy, callbacks=[], optimizers=[], training=False)
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.benchmark = before[1]


def test_float32_products_are_rounded_unless_the_user_has_chosen(on_cuda: Any) -> None:
    module = BoringModel()
    for settings, before, expected in (
        (AcceleratorSettings(), "highest", "high"),
        (AcceleratorSettings(matmul_precision="medium"), "highest", "medium"),
        (AcceleratorSettings(matmul_precision="highest"), "highest", "highest"),
        (AcceleratorSettings(), "medium", "medium"),
    ):
        torch.set_float32_matmul_precision(before)
        settings.setup(on_cuda, module, "fit")
        assert torch.get_float32_matmul_precision() == expected
        settings.teardown(on_cuda, module, "fit")
        assert torch.get_float32_matmul_precision() == before


def test_batches_have_a_stream_unless_it_is_off(on_cuda: Any) -> None:
    own = vars(on_cuda.strategy)["batch_to_device"]
    for settings, joins in ((AcceleratorSettings(), True), (AcceleratorSettings(copy_stream=False), False)):
        settings.setup(on_cuda, BoringModel(), "fit")
        assert (on_cuda.strategy.batch_to_device is not own) == joins
        settings.teardown(on_cuda, BoringModel(), "fit")
        assert on_cuda.strategy.batch_to_device is own


def test_cudnn_measures_convolutions_unless_runs_are_to_be_alike(on_cuda: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    images = BoringModel()
    images.first = nn.Conv2d(3, 4, 3)
    for settings, module, expected in (
        (AcceleratorSettings(), BoringModel(), False),
        (AcceleratorSettings(cudnn_benchmark=False), images, False),
        (AcceleratorSettings(), images, True),
    ):
        settings.setup(on_cuda, module, "fit")
        settings.on_fit_start(on_cuda, module)
        assert torch.backends.cudnn.benchmark == expected
        settings.teardown(on_cuda, module, "fit")
        assert not torch.backends.cudnn.benchmark
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert not may_benchmark(images)


def test_garbage_is_collected_after_set_steps_and_at_no_other_time() -> None:
    freed = []

    class Loop:
        def __init__(self) -> None:
            self.own = self

        def __del__(self) -> None:
            freed.append(1)

    collector = Collector(3)
    try:
        assert not gc.isenabled()
        for step in range(1, 7):
            for _ in range(2000):  # more than any threshold of Python's
                Loop()
            collector.step()
            assert len(freed) == 2000 * (step - step % 3)
    finally:
        collector.close()
    assert gc.isenabled()


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_gives_garbage_collection_back(fails: bool, on_cuda: Any) -> None:
    settings = AcceleratorSettings(gc_steps=2)
    settings.on_train_start(on_cuda, BoringModel())
    assert not gc.isenabled()
    if fails:
        settings.on_exception(on_cuda, BoringModel(), RuntimeError())
    else:
        settings.on_train_end(on_cuda, BoringModel())
    assert gc.isenabled()
    AcceleratorSettings(gc_steps=0).on_train_start(on_cuda, BoringModel())
    assert gc.isenabled()


def test_a_batch_with_objects_that_hold_tensors_is_left_to_lightning() -> None:
    streams = Streams([])
    batch = {"text": BatchEncoding({"input_ids": torch.ones(2)}), "weight": 1.0}
    assert BatchCopyStream(torch.device("cpu"), streams).copy(batch) is batch


def test_validation_collects_garbage_too_and_forked_processes_do_it_themselves(on_cuda: Any) -> None:
    settings = AcceleratorSettings(gc_steps=2)
    settings.on_train_start(on_cuda, BoringModel())
    try:
        collections = gc.get_stats()[2]["collections"]
        for _ in range(4):
            settings.on_validation_batch_end()
        assert gc.get_stats()[2]["collections"] == collections + 2
        child = os.fork()
        if child == 0:
            os._exit(0 if gc.isenabled() else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        settings.on_train_end(on_cuda, BoringModel())


@pytest.mark.parametrize("precision", ["bf16-mixed", "32-true"])
def test_gradients_of_a_fused_optimizer_are_clipped(precision: str) -> None:
    """Lightning alone (2.6) refuses it in bf16-mixed."""
    weights = []
    for fused in (True, False):
        torch.manual_seed(0)
        module = BoringModel()
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=fused)
        module.configure_optimizers = lambda made=optimizer: made
        options = {"precision": precision, "gradient_clip_val": 0.1}
        quiet_trainer(max_steps=3, callbacks=[AcceleratorSettings()], **options).fit(module)
        weights.append(module.layer.weight.detach())
    torch.testing.assert_close(*weights)


def test_values_that_do_not_exist_are_refused() -> None:
    with pytest.raises(DloError, match="matmul_precision must be one of highest, high, medium, got fast"):
        AcceleratorSettings(matmul_precision="fast")  # type: ignore[arg-type]
    with pytest.raises(DloError, match="gc_steps must be at least 0, got -1"):
        AcceleratorSettings(gc_steps=-1)


def test_the_allocator_grows_its_segments_unless_the_user_has_set_it_up(tmp_path, monkeypatch) -> None:
    for name in run._ALLOCATOR:
        monkeypatch.delenv(name, raising=False)
    driver = tmp_path / "version"
    run.set_allocator(driver)
    assert not any(name in run.os.environ for name in run._ALLOCATOR)
    driver.touch()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:64")  # its older name
    run.set_allocator(driver)
    assert "PYTORCH_ALLOC_CONF" not in run.os.environ
    monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
    run.set_allocator(driver)
    assert run.os.environ["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"


def test_the_command_sets_the_allocator_up_before_torch_is_imported() -> None:
    code = """
import sys
from dlo_framework.cli import main, run
def note():
    sys.exit("after torch" if "torch" in sys.modules else "before torch")
run.set_allocator = note
main.main(["fit", "--config", "quickstart"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.strip() == "before torch"


def test_loading_processes_are_as_many_as_the_machine_has_cores_for(monkeypatch) -> None:
    assert [data_module.default_workers(cores, False) for cores in (0, 1, 6, 64)] == [0, 1, 6, 8]
    assert [data_module.default_workers(cores, True) for cores in (0, 1, 2, 16, 64)] == [1, 1, 1, 15, 32]
    monkeypatch.setattr(data_module, "usable_cores", lambda: 96)
    monkeypatch.delenv("SLURM_CPUS_PER_TASK", raising=False)
    assert data_module._cores_of_rank(8) == 12
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "10")
    monkeypatch.setattr(data_module.SLURMEnvironment, "detect", staticmethod(lambda: False))
    assert data_module._cores_of_rank(8) == 12  # A job's shell, in which dlo starts the ranks.
    monkeypatch.setattr(data_module.SLURMEnvironment, "detect", staticmethod(lambda: True))
    assert data_module._cores_of_rank(8) == 10  # The other ranks of the node are tasks with cores of their own.
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert data_module._cores_of_rank(8) == 12  # One task, in which torchrun starts the ranks.
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.setattr(data_module, "usable_cores", lambda: 4)
    assert data_module._cores_of_rank(8) == 4
