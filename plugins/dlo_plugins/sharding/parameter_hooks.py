"""Hooks on a parameter's gradient, for the parameter that a strategy puts in its place.

A reach into torch (2.11 to 2.15), which keeps them in ``_backward_hooks`` and ``_post_accumulate_grad_hooks``, where
the handles that a user has remove them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Wrapper = Callable[[Callable[..., Any]], Callable[..., Any]]


def move_hooks(
    source: nn.Parameter, target: nn.Parameter, before: Wrapper | None = None, after: Wrapper | None = None
) -> None:
    """Moves a parameter's hooks to the parameter that replaces it; their handles stay valid.

    Args:
        source: Parameter with hooks.
        target: Parameter that replaces it; may be the same.
        before: Function that returns what is called in place of a hook of ``register_hook``.
        after: The same for ``register_post_accumulate_grad_hook``.
    """
    for hooks, wrapper in ((source._backward_hooks, before), (source._post_accumulate_grad_hooks, after)):
        if hooks and wrapper is not None:
            hooks.update([(key, wrapper(hook)) for key, hook in hooks.items()])
    share_hooks(source, target)
    if source._post_accumulate_grad_hooks:
        target._post_accumulate_grad_hooks = source._post_accumulate_grad_hooks


def share_hooks(source: nn.Parameter, target: nn.Parameter) -> None:
    """Makes autograd call a parameter's hooks of ``register_hook`` with the gradient of another."""
    hooks, others = source._backward_hooks, target._backward_hooks
    if hooks and others is not hooks:
        hooks.update(others or {})
        target._backward_hooks = hooks
