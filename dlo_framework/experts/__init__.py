"""Mixtures of experts: how they are found in a model, and the grouped products of their experts."""

from dlo_framework.experts.expert_mixtures import Mixture, find_mixtures

__all__ = ["Mixture", "find_mixtures"]
