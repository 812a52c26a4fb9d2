"""Tensor and sequence parallelism, which :class:`dlo_plugins.appliers.tensor_parallel.TensorParallel` applies.

`survey` makes a tensor-parallel plan of a model, `cutting` shards the parameters, and `regions`, `norms`, `vocabulary`
and `sequence` change how modules run, with the pairs of collectives in `collectives`. Departures from Megatron-LM
(arXiv 1909.08053) and from sequence parallelism (arXiv 2205.05198): the modules are those of timm, transformers or the
user; vocabularies and sequences need not be divisible by the ranks.
"""
