"""Context parallelism: the sequence of a causal language model is shared by ranks, and attention passes between them.

A batch is cut along its sequence (`layout`), with a note of which documents lie where (`visibility`). Attention runs on
pairs of chunks (`kernels`, `blockwise`), while keys and values go round (`ring`), or after queries, keys and values
have been dealt out by heads (`ulysses`); `interface` is the only part that knows transformers.
"""
