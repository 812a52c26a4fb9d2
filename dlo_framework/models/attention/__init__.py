"""Attention masks as data, and the kernels that compute attention under them.

A :class:`SparsityPattern` says which blocks of keys a block of queries sees. A task binds it to a model as an
:class:`AttentionMask`, together with the model's direction. `masked_attention` computes it on any device, on an
accelerator by FlexAttention too, and context parallelism by chunks of the sequence. Tasks and plug-ins share this
package; it knows no model library.
"""

from dlo_framework.models.attention.attention_mask import AttentionMask
from dlo_framework.models.attention.attention_options import Attention, KernelChoice
from dlo_framework.models.attention.sparsity_patterns import (
    BigBird,
    BSLongformer,
    DenseSparsity,
    FixedSparsity,
    Prefix,
    SlidingWindow,
    SparsityPattern,
    VariableSparsity,
)

__all__ = [
    "Attention",
    "AttentionMask",
    "BSLongformer",
    "BigBird",
    "DenseSparsity",
    "FixedSparsity",
    "KernelChoice",
    "Prefix",
    "SlidingWindow",
    "SparsityPattern",
    "VariableSparsity",
]
