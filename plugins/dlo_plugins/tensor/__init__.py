"""Tensor and sequence parallelism: what :class:`dlo_plugins.appliers.tensor_parallel.TensorParallel` is made of.

`survey` finds out from a plan what is to be done, `cutting` cuts the parameters, `regions`, `norms`, `vocabulary` and
`sequence` change how modules run, with the pairs of collectives in `collectives`. Departures from Megatron-LM
(arXiv 1909.08053) and from sequence parallelism (arXiv 2205.05198): modules stay those of timm, transformers or the
user; vocabularies and sequences that the ranks do not divide are split all the same.
"""
