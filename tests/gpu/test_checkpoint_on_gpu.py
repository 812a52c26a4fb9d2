"""Checkpoints of tensors on an accelerator: through the CPU's memory a bucket at a time, or page-locked copies."""

import torch

from dlo_framework.checkpoint import AsyncSaver, load, save
from dlo_framework.shards import FlatShard


def weights() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"w": (300, 70), "t": (70, 300), "b": (7,), "s": ()}
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def test_a_save_and_a_load_are_bit_equal(tmp_path):
    expected = weights()
    held = {name: tensor.cuda() for name, tensor in expected.items()}
    held["t"] = held["t"].T.contiguous().T  # strided
    save({"state_dict": held}, tmp_path / "a.ckpt")
    read = load(tmp_path / "a.ckpt")["state_dict"]
    for name, tensor in expected.items():
        assert torch.equal(read[name], tensor)
        target = torch.zeros_like(held[name])
        read.read_into(name, target)
        assert torch.equal(target.cpu(), tensor)
        flat = FlatShard(torch.zeros(tensor.numel(), device="cuda", dtype=torch.bfloat16), tensor.shape, 0)
        read.read_into(name, flat)
        assert torch.equal(flat.data.cpu(), tensor.bfloat16().flatten())


def test_a_save_in_the_background_holds_the_state_of_the_call(tmp_path):
    held = {"w": torch.ones(5_000_000, device="cuda")}
    saver = AsyncSaver()
    for step in range(3):
        saver.save({"global_step": step, "state_dict": held}, tmp_path / f"{step}.ckpt")
        held["w"] += 1
    saver.close()
    for step in range(3):
        assert load(tmp_path / f"{step}.ckpt")["state_dict"]["w"].unique().tolist() == [step + 1.0]
