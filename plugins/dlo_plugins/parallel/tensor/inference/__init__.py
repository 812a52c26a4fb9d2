"""Tensor rules of a model whose family brings none: found in a forward on fake tensors, and proved on values.

`projection_flow` records which projections feed which, `rule_candidates` proposes rules for each such group,
`block_proof` runs a block on a few small ranks and compares, and `inferred_rules` puts what is proved into a plan.
"""
