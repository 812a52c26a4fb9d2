"""Callbacks that change gradients between backward and the optimizer's step."""
