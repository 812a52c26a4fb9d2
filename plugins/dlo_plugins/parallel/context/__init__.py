"""Context parallelism: ranks share the sequence of a causal language model, and attention communicates between them.

A batch is sharded along its sequence, with the positions of its documents (`sequence_layout`). Attention runs on pairs
of chunks (`block_attention`), while keys and values are sent around a ring, or after an all-to-all of queries, keys and
values by heads (`shared_attention`). Only `context_parallel` knows transformers.

Why not torch's ``context_parallel``: it takes no mask, so neither packed
documents nor sliding windows; and it is experimental, with kernels of accelerators alone.
"""
