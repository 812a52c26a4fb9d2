"""Context parallelism: ranks share the sequence of a causal language model, and attention communicates between them.

A batch is sharded along its sequence (`sequence_layout`), with the positions of its documents (`visibility`). Attention
runs on pairs of chunks (`block_attention`, `blockwise`), while keys and values are sent around a ring (`ring`), or
after an all-to-all of queries, keys and values by heads (`ulysses`). Only `transformers_attention` knows transformers.

Why not torch's ``context_parallel``: it takes no mask, so neither packed
documents nor sliding windows; and it is experimental, with kernels of accelerators alone.
"""
