"""Mixtures of experts: layers, routers, their losses, and the balance of their load.

A mixture has the form of transformers 5: a module with a router, which returns logits, weights and indices of the top k
experts of each token, and `experts`, whose parameters are stacked along dim 0. What reads one reads both.
"""
