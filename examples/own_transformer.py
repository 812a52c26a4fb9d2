"""Defines a small transformer for four axes of parallelism, which learns to write Python byte by byte."""

from __future__ import annotations

# --8<-- [start:imports]
import argparse
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from dlo_framework import ParallelPlan, Task
from dlo_framework.data import ResumableDataModule, ResumableLoader

# --8<-- [end:imports]


# --8<-- [start:model]
class Attention(nn.Module):
    """Causal attention."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.config, self.head_dim = config, config.width // config.heads
        self.qkv, self.out = nn.Linear(config.width, 3 * config.width), nn.Linear(config.width, config.width)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, L, width] to [B, L, width]."""
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.head_dim)).permute(2, 0, 3, 1, 4)  # [B, heads, L, head_dim]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, sdpa_attention_forward)
        return self.out(attend(self, q, k, v, attention_mask=None)[0].flatten(-2))


class Block(nn.Module):
    """Attention and an MLP, each with a residual connection."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(config.width), nn.RMSNorm(config.width)
        self.attention = Attention(config)
        up, down = nn.Linear(config.width, 4 * config.width), nn.Linear(4 * config.width, config.width)
        self.mlp = nn.Sequential(up, nn.GELU(), down)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, L, width] to [B, L, width]."""
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Transformer(PreTrainedModel):
    """Causal language model."""

    config_class = PreTrainedConfig
    _supports_sdpa = True

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.places = nn.Embedding(config.length, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.depth))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor) -> Tensor:
        """Maps tokens [B, L] and their positions [B, L] to logits [B, L, vocabulary]."""
        x = self.tokens(input_ids) + self.places(position_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# --8<-- [end:model]


# --8<-- [start:task]
class Writer(Task):
    """Trains the transformer on batches of `input_ids`, `position_ids` and `labels`, int64 [B, L].

    Args:
        width: Features of the residual stream.
        depth: Number of blocks.
        heads: Number of attention heads.
        length: Tokens per sample.
        lr: Learning rate of AdamW.
    """

    best_metric = ("val_loss", "min")

    def __init__(self, width: int = 64, depth: int = 4, heads: int = 4, length: int = 64, lr: float = 2e-3) -> None:
        super().__init__()
        self.sizes = {"width": width, "depth": depth, "heads": heads, "length": length, "vocabulary": 256}
        self.lr = lr

    def configure_model(self) -> None:
        """Builds the transformer, once."""
        if not self.has_model:
            self.model = Transformer(PreTrainedConfig(attn_implementation="sdpa", **self.sizes))

    def inputs(self, batch: dict[str, Tensor]) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
        """Returns the transformer's arguments from a batch."""
        return (batch["input_ids"], batch["position_ids"]), {}

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        """Returns the mean cross-entropy of the tokens."""
        return nn.functional.cross_entropy(outputs.flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.lr)

    # --8<-- [start:plan]
    def parallel_plan(self) -> ParallelPlan:
        """Returns the parallel plan, with names relative to `self.model`."""
        return ParallelPlan(
            stem=("tokens", "places"),
            blocks=("blocks.*",),
            head=("norm", "head"),
            attention=("blocks.*.attention",),
            tensor={
                "blocks.*.attention.qkv": "qkv",
                "blocks.*.attention.out": "row",
                "blocks.*.mlp.0": "column",
                "blocks.*.mlp.2": "row",
                "blocks.*.norm?": "sequence",
                "tokens": "vocab",
                "head": "vocab",
            },
        )

    # --8<-- [end:plan]


# --8<-- [end:task]


# --8<-- [start:data]
class Source(ResumableDataModule):
    """Loads the bytes of a module of Python's standard library; holds out the last tenth.

    Args:
        length: Bytes per sample.
        batch_size: Samples over all ranks together.
        seed: Seed of the sample order.
    """

    def __init__(self, length: int = 64, batch_size: int = 32, seed: int = 0) -> None:
        super().__init__(batch_size=batch_size, num_workers=0, seed=seed)
        self.length = length

    def _samples(self, *, held_out: bool) -> list[dict[str, Tensor]]:
        text = torch.tensor(list(Path(argparse.__file__).read_bytes()))
        windows = text.unfold(0, self.length + 1, self.length)
        cut = len(windows) * 9 // 10
        places = torch.arange(self.length)
        return [
            {"input_ids": window[:-1], "position_ids": places, "labels": window[1:]}
            for window in (windows[cut:] if held_out else windows[:cut])
        ]

    def train_dataloader(self) -> ResumableLoader:
        """Returns the loader: a new order each epoch, and full batches only."""
        return self.train_loader(self._samples(held_out=False))

    def val_dataloader(self) -> ResumableLoader:
        """Returns the loader: each held-out sample once."""
        return self.eval_loader(self._samples(held_out=True))


# --8<-- [end:data]
