"""Mixtures of experts: how they are found in a model, their layers, routers and losses, and the balance of their load.

A mixture has the form of transformers 5: a module with a router, which returns logits, weights and indices of the top k
experts of each token, and `experts`, whose parameters are stacked along dim 0. What reads one reads both.
"""

from dlo_framework.models.experts.expert_mixtures import Mixture, find_mixtures
from dlo_framework.models.experts.mixture_options import MixtureOptions

__all__ = ["Mixture", "MixtureOptions", "find_mixtures"]
