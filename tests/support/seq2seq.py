"""Encoder-decoder models and pairs of source and target for tests."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from support.token_batches import Tokens

_BART = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
_BART |= {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "d_model": 32, "vocab_size": 96, "max_position_embeddings": 64}
SMALL_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4, "vocab_size": 96}
FAMILIES: dict[str, dict[str, Any]] = {
    "t5": SMALL_T5,
    "mt5": SMALL_T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "bart": _BART,
    "pegasus": _BART,
}


def seq2seq_config(family: str, **more: Any) -> dict[str, Any]:
    """Returns the config of a small model of a family, without dropout."""
    rates = {"dropout_rate": 0.0} if family.endswith("t5") else {"dropout": 0.0}
    return {"model_type": family, **FAMILIES[family], **rates, **more}


def pairs(rows: int = 4, draw: torch.Generator | None = None) -> dict[str, Tensor]:
    """Returns a batch of random pairs of up to 9 and 7 tokens, padded."""
    draw = draw or torch.Generator().manual_seed(0)
    ids, labels = torch.randint(3, 60, (rows, 9), generator=draw), torch.randint(3, 60, (rows, 7), generator=draw)
    mask = torch.ones_like(ids)
    for row in range(1, rows, 2):
        mask[row, 9 - row :], labels[row, 7 - row :] = 0, -100
    return {"input_ids": ids.masked_fill(mask == 0, 0), "attention_mask": mask, "labels": labels}


class Pairs(Tokens):
    """Random pairs of source and target, padded, or two packed in a row."""

    def __init__(self, micro_batches: int, packed: bool = False) -> None:
        super().__init__(micro_batches)
        self.packed = packed

    def make_batch(self, rows: int, draw: torch.Generator, length: int) -> dict[str, Tensor]:
        found = pairs(rows, draw)
        if self.packed:
            numbers = (torch.arange(9) // 4 + 1).clamp(max=2)
            found["encoder_segment_ids"] = numbers * found.pop("attention_mask")
            found["decoder_segment_ids"] = numbers[:7] * (found["labels"] != -100)
        return found
