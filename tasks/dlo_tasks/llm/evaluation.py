"""How well a model predicts text: exact means over the tokens, and the bytes, of all batches and ranks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric


def widest() -> torch.dtype:
    """Returns what sums are kept in: float64, but where there is an Apple GPU, which has none, float32."""
    return torch.float32 if torch.backends.mps.is_available() else torch.float64


class TokenMean(Metric):
    """The mean of one value a token, over all tokens of all ranks; the base of those that are made of it."""

    full_state_update = False
    total: Tensor
    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0, dtype=widest()), dist_reduce_fx="sum")
        self.add_state("count", torch.tensor(0, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, total: Tensor, count: Tensor) -> None:
        """Adds a batch: the sum of its values, and how many they are."""
        self.total += total
        self.count += count

    def compute(self) -> Tensor:
        """Returns the mean as a float32 scalar; NaN without tokens."""
        return (self.total / self.count).float()


class Perplexity(TokenMean):
    """The exponential of the mean cross-entropy; of a token or of a byte, as the counts are."""

    def compute(self) -> Tensor:
        """Returns it as a float32 scalar."""
        return (self.total / self.count).exp().float()


class BitsPerByte(TokenMean):
    """The mean cross-entropy of a byte, in bits: comparable between tokenizers."""

    def compute(self) -> Tensor:
        """Returns it as a float32 scalar."""
        return (self.total / self.count / math.log(2)).float()


def bytes_of_tokens(tokenizer: Any, size: int) -> Tensor:
    """Returns how many bytes of text each token stands for, `[size]` of int64; special tokens stand for none.

    Byte-level tokens have a character a byte, others are UTF-8, in which `▁` is a space and `<0x0A>` one byte. So a
    text's tokens add up to its bytes, up to a space that a tokenizer puts in front.

    Args:
        tokenizer: of transformers.
        size: rows of the model's embedding; ids past the tokenizer's stand for no bytes.
    """
    counts = torch.zeros(size, dtype=torch.long)
    special = set(tokenizer.all_special_ids)
    is_byte_level = _is_byte_level(tokenizer)
    for token, number in tokenizer.get_vocab().items():
        if number < size and number not in special:
            counts[number] = _bytes_of(token, is_byte_level)
    return counts


def _bytes_of(token: str, is_byte_level: bool) -> int:
    if is_byte_level:
        return len(token)
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return 1
    return len(token.replace("▁", " ").encode())


def _is_byte_level(tokenizer: Any) -> bool:
    """Whether a tokenizer writes each byte as a character of its own, as GPT-2's and Llama 3's do."""
    fast = getattr(tokenizer, "backend_tokenizer", None)
    decoder = repr(getattr(fast, "decoder", None))
    return "ByteLevel" in decoder
