"""Tensor and sequence parallelism, which :class:`dlo_plugins.parallel.tensor.tensor_parallel.TensorParallel` applies.

`tp_planner` makes a tensor-parallel plan of a model, `installation` shards the parameters, and `regions` and
`sequence_parallel` change how modules run, with the pairs of collectives in `collectives`. Where a family brings no
rules, `rule_candidates` proposes some for each group of projections, `block_proof` runs a block on a few small ranks
and compares, and `inferred_rules` puts what is proved into a plan.

Departures from Megatron-LM (arXiv 1909.08053) and from sequence parallelism (arXiv 2205.05198): the modules are those
of timm, transformers or the user; vocabularies and sequences need not be divisible by the ranks.

Why not torch's ``parallelize_module``: it shards layers by rules, and leaves it to the model's code to compute with the
slices. timm's attention reshapes to its full width, and raises; here
heads, fused projections, norms over sharded features and vocabularies are handled without a change of the model.
"""
