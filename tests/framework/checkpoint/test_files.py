"""Files of a checkpoint: safetensors, the tree, other state, strides, memory; and those that earlier versions wrote."""

import io
import json
import os
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from safetensors.torch import load_file, save_file
from torch import nn

from dlo_framework.checkpoint import AsyncSaver, SafeCheckpointIO, load, loading, newest_valid, recover, save, verify
from dlo_framework.checkpoint.formats.safetensors_file import export_weights
from dlo_framework.checkpoint.loading import TensorFile, refuse_unsafe
from dlo_framework.checkpoint.manifest import (
    AS_BYTES,
    SAFETENSORS_CODES,
    dtype_name,
    read_header,
)
from dlo_framework.checkpoint.state_tree import extract_tensors, read_mark
from dlo_framework.distributed.strategy import register_data_parallel, use_canonical_checkpoints
from dlo_framework.errors import DloError
from dlo_framework.run.resume import ExactResume
from dlo_framework.shards import FlatShard, full_box
from dlo_framework.testing import run_distributed
from dlo_framework.testing.training import leave_group
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.imagenet.digits import DigitsData
from support.runs import Watch
from support.trainers import Squares, quiet_trainer

TYPES = [getattr(torch, name) for name in (*SAFETENSORS_CODES, *AS_BYTES) if name != "float4_e2m1fn_x2"]


def some(dtype: torch.dtype, shape=(3, 5)) -> torch.Tensor:
    """Every bit pattern is preserved, not only numbers."""
    count = int(np.prod(shape)) * dtype.itemsize
    generator = torch.Generator().manual_seed(dtype.itemsize)
    raw = torch.randint(0, 2 if dtype == torch.bool else 256, (count,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_type_is_stored_bit_by_bit(tmp_path, dtype):
    tensors = {"matrix": some(dtype), "scalar": some(dtype, ()), "none": some(dtype, (0, 2)), "strided": some(dtype).T}
    save({"state_dict": tensors}, tmp_path / "a.ckpt")
    run = load(tmp_path / "a.ckpt")
    for name, tensor in tensors.items():
        read = run["state_dict"][name]
        assert (read.dtype, read.shape, bits(read)) == (dtype, tensor.shape, bits(tensor))
        target = torch.zeros(tensor.shape, dtype=torch.uint8).new_empty(tensor.shape, dtype=dtype)
        run["state_dict"].read_into(name, target)
        assert bits(target) == bits(tensor)
    if str(dtype).removeprefix("torch.") in SAFETENSORS_CODES and dtype != torch.complex64:
        theirs = load_file(tmp_path / "a.ckpt" / "shard-00000.safetensors")
        assert len(theirs) == 3, "all but the empty one"
        assert all(bits(other) == bits(tensors[name.removeprefix("model/")]) for name, other in theirs.items())


def test_other_types_are_refused():
    with pytest.raises(DloError, match=r"cannot store tensors of torch\.quint8; convert it to one of: float64, "):
        dtype_name(torch.quint8)


def test_what_safetensors_writes_is_read_aligned_or_not(tmp_path):
    path = tmp_path / "x.safetensors"
    save_file({"a": some(torch.float32), "b": some(torch.int8, (3,))}, path)
    # The odd bytes first, which the format allows and its library does not write.
    header = {"b": {"dtype": "I8", "shape": [3], "data_offsets": [0, 3]}}
    header["a"] = {"dtype": "F32", "shape": [3, 5], "data_offsets": [3, 63]}
    text = json.dumps(header).encode()
    odd = tmp_path / "odd.safetensors"
    raw = some(torch.int8, (3,)).numpy().tobytes() + some(torch.float32).numpy().tobytes()
    odd.write_bytes(len(text).to_bytes(8, "little") + text + raw)
    for file in (path, odd):
        stored, _ = read_header(file)
        for name, tensor in (("a", some(torch.float32)), ("b", some(torch.int8, (3,)))):
            assert bits(TensorFile(file).tensor(stored[name])) == bits(tensor)
            target, box = torch.empty_like(tensor), full_box(tuple(tensor.shape))
            TensorFile(file).copy_part(stored[name], box, box, target)
            assert bits(target) == bits(tensor)


@pytest.mark.parametrize(
    "content",
    [b"", b"\x05", b"\xff" * 16, (10**6).to_bytes(8, "little") + b"{}", (2).to_bytes(8, "little") + b"[]"]
    + [
        len(text).to_bytes(8, "little") + text + b"\0" * 4
        for text in (
            b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
            b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
            b'{"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
            b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}',
            b'{"a": {"shape": [1]}}',
        )
    ],
)
def test_a_damaged_header_is_refused(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(DloError, match=r"x\.safetensors|'F99' in a safetensors file"):
        read_header(path)


class Module(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(3, 2)
        self.norm = torch.nn.BatchNorm1d(2)

    def get_extra_state(self):
        return {"answer": 42}

    def set_extra_state(self, state):
        self.answer = state["answer"]


def test_what_is_taken_out_and_what_stays(tmp_path):
    module = Module()
    state = module.state_dict()
    average = {name: value + 1 for name, value in state.items() if isinstance(value, torch.Tensor)}
    moments = {"exp_avg": torch.ones(2, 3), "step": torch.tensor(4.0), "blocks": [torch.ones(2), torch.zeros(3)]}
    run = {
        "state_dict": state,
        "average": average,
        "optimizer_states": [{"state": {"linear.weight": moments, "linear.bias": {}}, "param_groups": [{"lr": 1}]}],
        "random_state": [{"torch": torch.get_rng_state()}],
        "callbacks": {"Mine": {"list": [FlatShard(torch.ones(4), torch.Size([4]), 0)], "score": torch.tensor(2.0)}},
        "tuple": (1, torch.ones(2), OrderedDict(a=1)),
    }
    rest, found = extract_tensors(run)
    groups = {place.group for place, _ in found}
    assert groups == {"model", "average", "optimizer.0", "callbacks.Mine.list"}
    assert "linear.weight.blocks.1" in {place.name for place, _ in found}
    assert read_mark(rest["state_dict"]["linear.weight"]) == ("model", "linear.weight")
    assert torch.is_tensor(rest["random_state"][0]["torch"])
    assert torch.is_tensor(rest["callbacks"]["Mine"]["score"])

    save(run, tmp_path / "a.ckpt")
    read = load(tmp_path / "a.ckpt")
    assert list(read) == list(run)
    other = Module()
    assert str(other.load_state_dict(read["state_dict"])) == "<All keys matched successfully>"
    assert other.answer == 42
    assert read["state_dict"]._metadata == {key: dict(value) for key, value in state._metadata.items()}
    assert all(torch.equal(read["average"][name], value) for name, value in average.items())
    assert set(read["average"]) == set(average)
    loaded = read["optimizer_states"][0]["state"]
    assert loaded["linear.bias"] == {}
    assert torch.equal(loaded["linear.weight"]["step"], torch.tensor(4.0))
    assert [t.tolist() for t in loaded["linear.weight"]["blocks"]] == [[1, 1], [0, 0, 0]]
    assert torch.equal(read["random_state"][0]["torch"], run["random_state"][0]["torch"])
    assert read["callbacks"]["Mine"]["list"][0].tolist() == [1.0] * 4
    assert read["tuple"][0] == 1
    assert torch.equal(read["tuple"][1], torch.ones(2))


def test_hyperparameters_that_are_no_plain_data_are_kept_as_text(tmp_path):
    run = {"state_dict": {}, "hyper_parameters": {"width": 3, "stream": io.BytesIO}}
    with pytest.warns(UserWarning, match="the hyperparameter 'stream' is saved as text: a type is not plain data"):
        save(run, tmp_path / "a.ckpt")
    assert load(tmp_path / "a.ckpt")["hyper_parameters"] == {"width": 3, "stream": "<class '_io.BytesIO'>"}
    assert run["hyper_parameters"]["stream"] is io.BytesIO


# --- peak memory of saving and loading beside the tensors: one bucket of 64 MB ---------------------------------------


MB = 2**20
SIDE = 6144
SIZE = SIDE * SIDE * 4  # 144 MB
BUCKET = 64 * MB
#: Pages of libraries that are touched for the first time, the manifest, the allocator's own memory.
SLACK = 40 * MB


def status(key: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


def peak_of(work) -> int:
    """Peak memory during ``work``, above that before."""
    Path("/proc/self/clear_refs").write_text("5")  # This resets the high-water mark.
    before = status("VmRSS")
    work()
    return status("VmHWM") - before


def measure(rank: int, world_size: int, folder: Path) -> dict[str, int]:
    tensor = torch.arange(SIZE // 4, dtype=torch.float32)
    path = folder / "step.ckpt"
    save({"state_dict": {"w": torch.ones(3)}}, folder / "warm.ckpt")
    square = tensor.view(SIDE, SIDE)
    peaks = {"save": peak_of(lambda: save({"state_dict": {"model.w": square}}, path))}
    peaks["save transposed"] = peak_of(lambda: save({"state_dict": {"w": square.T}}, folder / "t.ckpt"))
    saver = AsyncSaver()

    def in_background() -> None:
        saver.save({"state_dict": {"w": square}}, folder / "b.ckpt")
        saver.close()

    peaks["background"] = peak_of(in_background)
    expected = tensor.clone()
    run = load(path, level=None)
    tensor.zero_()
    peaks["load"] = peak_of(lambda: run["state_dict"].read_into("model.w", square))
    assert torch.equal(tensor, expected)
    flat = FlatShard(tensor, torch.Size([SIDE, SIDE]), 0)
    tensor.zero_()
    peaks["load flat"] = peak_of(lambda: run["state_dict"].read_into("model.w", flat))
    assert torch.equal(tensor, expected)
    half = torch.ones(SIDE, SIDE, dtype=torch.bfloat16)
    peaks["load converted"] = peak_of(lambda: run["state_dict"].read_into("model.w", half))
    peaks["verify and open"] = peak_of(lambda: load(path))
    peaks["export"] = peak_of(lambda: export_weights(path, folder / "w.safetensors", dtype=torch.bfloat16))
    return peaks


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_is_a_bucket_over_the_tensors(tmp_path):
    (peaks,) = run_distributed(measure, 1, tmp_path, backend=None)
    background = peaks.pop("background")
    # The copy that the background writes from, and nothing else of its size.
    assert SIZE - MB <= background <= SIZE + BUCKET + SLACK
    assert {what: round(peak / MB) for what, peak in peaks.items() if peak > BUCKET + SLACK} == {}, peaks


# --- optimizer state that is read back has its parameter's strides, which fused optimizers on CUDA require -----------


class Adam(Squares):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(folder: Path, steps: int, resume: Path | None = None) -> tuple[Trainer, torch.Tensor]:
    torch.manual_seed(0)
    conv = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    trainer = quiet_trainer(max_steps=steps, default_root_dir=folder)
    use_canonical_checkpoints(trainer)
    data = torch.utils.data.TensorDataset(torch.randn(16, 3, 6, 6))
    trainer.fit(Adam(conv), torch.utils.data.DataLoader(data, batch_size=2), ckpt_path=resume)
    return trainer, conv.weight


def test_moments_of_a_channels_last_weight_are_channels_last_after_a_resume(tmp_path: Path) -> None:
    trainer, weight = fit(tmp_path, 3)
    trainer.save_checkpoint(tmp_path / "third.ckpt")
    strides = weight.stride()
    assert strides != torch.empty(weight.shape).stride()
    resumed, weight = fit(tmp_path, 5, tmp_path / "third.ckpt")
    state = resumed.optimizers[0].state[weight]
    assert state["exp_avg"].stride() == state["exp_avg_sq"].stride() == strides


# --- checkpoints that earlier versions have written, and what a write that fails or a hostile file leaves -----------


#: One of a single process and one of ZeRO-3 on two ranks, each after step 3, with the losses of the run that wrote
#: them, in format 2 by torch 2.14.
STORED = Path(__file__).parent / "stored"
SAVED, STEPS = 3, 8
NAMES = ("one-process", "zero3-two-ranks")


class Model(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 9), nn.BatchNorm1d(9), nn.GELU(), nn.Linear(9, 10))
        self.net[1].eval()

    def training_step(self, batch, batch_idx):
        self.net[1].eval()  # Its statistics would be each rank's own.
        return nn.functional.cross_entropy(self.net(batch[0].mean(1)[:, ::2, ::2].flatten(1)), batch[1])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


def train(rank: int, world_size: int, save: Path | None, resume: Path | None) -> list[float]:
    register_data_parallel()
    seed_everything(7, workers=True, verbose=False)
    watch = Watch(save, SAVED)
    trainer = quiet_trainer(
        devices=world_size,
        strategy=ZeroStrategy(3) if world_size > 1 else "auto",
        max_steps=STEPS,
        max_epochs=-1,
        limit_val_batches=0,
        callbacks=[watch, ExactResume()],
    )
    use_canonical_checkpoints(trainer)
    trainer.fit(Model(), datamodule=DigitsData(image_size=16, batch_size=32), ckpt_path=resume)
    if world_size > 1:
        leave_group()
    return watch.losses


def sums_of(path: Path) -> dict[str, float]:
    """Sum of each tensor of a checkpoint."""
    content = load(path)
    sums = {f"model/{name}": float(value.double().sum()) for name, value in content["state_dict"].items()}
    for name, state in content["optimizer_states"][0]["state"].items():
        sums |= {f"{name}/{key}": float(value.double().sum()) for key, value in state.items()}
    return sums


@pytest.mark.parametrize("name", NAMES)
def test_a_stored_checkpoint_is_whole_and_holds_what_was_saved(name: str) -> None:
    expected = json.loads((STORED / "expected.json").read_text())[name]
    verify(STORED / f"{name}.ckpt")
    content = load(STORED / f"{name}.ckpt")
    assert content["global_step"] == SAVED
    assert content["lr_schedulers"][0]["step_size"] == 1
    found = sums_of(STORED / f"{name}.ckpt")
    assert found == pytest.approx(expected["sums"], rel=1e-12)
    assert len(found) == 9 + 6 * 3


def test_the_newest_of_the_stored_ones_is_found() -> None:
    assert newest_valid(STORED) == STORED / "zero3-two-ranks.ckpt"


@pytest.mark.parametrize("world_size", [1, 2])
def test_runs_resume_from_both_with_the_losses_of_the_run_that_wrote_them(world_size: int) -> None:
    expected = json.loads((STORED / "expected.json").read_text())
    for name in NAMES:
        losses = run_distributed(train, world_size, None, STORED / f"{name}.ckpt", backend=None)[0]
        assert losses == pytest.approx(expected[name]["losses"][SAVED:], rel=1e-4), name


class Bomb:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_a_checkpoint_larger_than_the_disk_is_refused_before_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "free_bytes", lambda folder: 1000)
    with pytest.raises(DloError, match=r"need 4\.0 kB, 1\.0 kB free in .*; no earlier checkpoint there"):
        SafeCheckpointIO().save_checkpoint({"x": torch.zeros(1000)}, tmp_path / "last.ckpt")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_bomb_is_refused_and_not_executed(tmp_path, legacy):
    path, proof = tmp_path / "bomb.ckpt", tmp_path / "executed"
    torch.save({"state_dict": Bomb(f"touch {proof}")}, path, _use_new_zipfile_serialization=not legacy)
    for read in (refuse_unsafe, SafeCheckpointIO().load_checkpoint):
        message = r"refusing .*bomb\.ckpt: pickle global \w+\.system not allowed; nothing executed"
        with pytest.raises(DloError, match=message):
            read(path)
    assert not proof.exists()


def test_what_a_killed_save_left_is_removed(tmp_path):
    (tmp_path / "last.ckpt.dlo-partial").write_bytes(b"half")
    (tmp_path / "last.ckpt").write_bytes(b"whole")
    recover(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("content", [[1, 2], {"state_dict": {}}])
def test_a_file_that_is_no_checkpoint_of_a_run_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(DloError, match=r"other\.pt is not a checkpoint of a run"):
        SafeCheckpointIO().load_checkpoint(tmp_path / "other.pt")


def test_noise_and_folders_are_refused_in_one_sentence(tmp_path):
    (tmp_path / "noise.ckpt").write_bytes(bytes(range(256)) * 40)
    with pytest.raises(
        DloError, match=r"noise\.ckpt \(10\.2 kB\): it is damaged, truncated, or not a checkpoint"
    ) as caught:
        refuse_unsafe(tmp_path / "noise.ckpt")
    assert "weights_only" not in str(caught.value)
    with pytest.raises(DloError, match="a checkpoint must be a file, or hold a manifest, got"):
        refuse_unsafe(tmp_path)
