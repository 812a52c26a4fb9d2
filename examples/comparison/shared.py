"""What the three programs of the comparison share: a model, its data, options, and a record of losses."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import TensorDataset


def make_model() -> nn.Module:
    """Returns a small network with the same weights in every process."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))


def make_data() -> TensorDataset:
    """Returns 60 samples: an epoch is 7 batches of 8 and one of 4."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 16, generator=generator)
    return TensorDataset(x, x[:, :4].argmax(1))


def read_options() -> argparse.Namespace:
    """Returns the program's options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategy", default="fsdp")
    parser.add_argument("--steps", type=int, default=16, help="steps after which the run stops")
    parser.add_argument("--resume", action="store_true")
    return parser.parse_args()


def record(loss: Tensor) -> None:
    """Appends the mean loss of all ranks to ``losses.txt``."""
    mean = loss.detach().clone()
    if dist.is_initialized():
        dist.all_reduce(mean)
        mean /= dist.get_world_size()
    if not dist.is_initialized() or dist.get_rank() == 0:
        with Path("losses.txt").open("a") as file:
            file.write(f"{mean.item():.7f}\n")
