"""Context parallelism: ranks share the sequence of a causal language model, and attention communicates between them.

A batch is sharded along its sequence (`layout`), with the positions of its documents (`visibility`). Attention runs on
pairs of chunks (`kernels`, `blockwise`), while keys and values are sent around a ring (`ring`), or after an all-to-all
of queries, keys and values by heads (`ulysses`). Only `interface` knows transformers.
"""
