"""Peak memory of saving and loading beside the tensors: one bucket of 64 MB."""

import sys
from pathlib import Path

import pytest
import torch

from dlo_framework.checkpoint import AsyncSaver, load, save
from dlo_framework.checkpoint.formats.safetensors_file import export_weights
from dlo_framework.shards import FlatShard
from dlo_framework.testing import run_distributed

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

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


def test_the_peak_is_a_bucket_over_the_tensors(tmp_path):
    (peaks,) = run_distributed(measure, 1, tmp_path, backend=None)
    background = peaks.pop("background")
    # The copy that the background writes from, and nothing else of its size.
    assert SIZE - MB <= background <= SIZE + BUCKET + SLACK
    assert {what: round(peak / MB) for what, peak in peaks.items() if peak > BUCKET + SLACK} == {}, peaks
