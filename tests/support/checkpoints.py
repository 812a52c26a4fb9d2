"""Checkpoints laid side by side: all tensors of each, and what was loaded saved again."""

from pathlib import Path

import torch
from lightning.pytorch import Callback
from torch import Tensor

from dlo_framework.checkpoint import load


class Again(Callback):
    """Saves what has just been loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_start(self, trainer, pl_module) -> None:
        trainer.save_checkpoint(self.path)


def tensors(path: Path) -> dict[str, Tensor]:
    """Returns all tensors of a checkpoint, weights and moments, whole."""
    content = load(path)
    found = {f"model/{name}": value for name, value in content["state_dict"].items()}
    for optimizer in content["optimizer_states"]:
        for name, state in optimizer["state"].items():
            found |= {f"{name}/{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    return found


def check_same(one: Path, other: Path) -> None:
    """Asserts that two checkpoints hold the same tensors, bit for bit."""
    expected, found = tensors(one), tensors(other)
    assert expected.keys() == found.keys()
    assert len(expected) > 40
    for name, value in expected.items():
        assert torch.equal(value, found[name]), name
