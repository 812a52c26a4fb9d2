"""Expert parallelism: tokens travel to the ranks that have their experts, and back.

GShard: Scaling Giant Models with Conditional Computation and Automatic Sharding. Lepikhin et al., 2020,
arXiv 2006.16668. Departures: no token is dropped, so that ranks get uneven numbers of tokens; and the experts' own
forward computes them, so that any family works.

torch and transformers (5.24) have expert parallelism for inference alone: transformers' ranks all compute the same
tokens and sum their outputs.
"""
