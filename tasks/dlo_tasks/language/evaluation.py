"""Metrics of a language model: exact means over the tokens, and the bytes, of all batches and ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


def sum_dtype() -> torch.dtype:
    """Returns the dtype of sums: float64, or float32 on an Apple GPU, which lacks float64."""
    return torch.float32 if torch.backends.mps.is_available() else torch.float64


class TokenMean(Metric):
    """Mean of one value per token, over all tokens of all ranks; base class of the other metrics."""

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0, dtype=sum_dtype()), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, total: Tensor, count: Tensor) -> None:
        """Adds a batch: the sum of its values, and their number."""
        self.total += total
        self.count += count

    def compute(self) -> Tensor:
        """Returns the mean, a float32 scalar; NaN without tokens."""
        return (self.total / self.count).float()


class Perplexity(TokenMean):
    """Exponential of the mean cross-entropy, per token or per byte, depending on the counts."""

    def compute(self) -> Tensor:
        """Returns the metric, a float32 scalar."""
        return (self.total / self.count).exp().float()


class BitsPerByte(TokenMean):
    """Mean cross-entropy per byte, in bits; comparable between tokenizers."""

    def compute(self) -> Tensor:
        """Returns the metric, a float32 scalar."""
        return (self.total / self.count / math.log(2)).float()


def count_token_bytes(tokenizer: Any, size: int) -> Tensor:
    """Returns the number of text bytes of each token, int64 `[size]`; 0 for special tokens.

    Byte-level tokens have one character per byte. Other tokens are UTF-8, in which `▁` is a space and `<0x0A>` is one
    byte. The sum over a text's tokens is the text's length in bytes, except for a space that a tokenizer prepends.

    Args:
        tokenizer: Tokenizer of transformers.
        size: Rows of the model's embedding; ids beyond the tokenizer's have 0 bytes.
    """
    counts = torch.zeros(size, dtype=torch.long)
    special = set(tokenizer.all_special_ids)
    # Those of GPT-2 and Llama 3 represent each byte by one character.
    is_byte_level = tokenizer.is_fast and "ByteLevel" in repr(tokenizer.backend_tokenizer.decoder)
    for token, number in tokenizer.get_vocab().items():
        if number >= size or number in special:
            continue
        if is_byte_level:
            counts[number] = len(token)
        else:
            is_byte = len(token) == 6 and token.startswith("<0x") and token.endswith(">")
            counts[number] = 1 if is_byte else len(token.replace("▁", " ").encode())
    return counts
