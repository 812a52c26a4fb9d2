"""Selective recomputation: which operators' outputs are kept, and which are computed again.

Reducing Activation Recomputation in Large Transformer Models. Korthikanti et al., 2022, arXiv 2205.05198. Departures:
the paper recomputes attention and keeps everything outside it. Here outputs of fused attention kernels, which store no
scores, and outputs of collectives are kept; norms, activation functions and dropout are recomputed, which costs next to
nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

#: Operators whose outputs `selective` keeps: products of activations with weights; fused attention, which stores no
#: scores; and collectives, which are not to run again. Products of activations with each other, such as unfused
#: attention's, are recomputed. Operators are given by name, as torch 2.11 lacks some.
_KEPT_NAMES = (
    *("aten.mm", "aten.addmm", "aten.convolution", "aten._grouped_mm", "aten._scaled_mm"),
    "dlo.grouped_linear",
    *("aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_flash_attention_for_cpu"),
    *("aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_cudnn_attention"),
    *("aten._scaled_dot_product_fused_attention_overrideable", "aten._flash_attention_forward"),
    *("torch_attn._varlen_attn", "_c10d_functional.all_reduce", "_c10d_functional.all_gather_into_tensor"),
    *("_c10d_functional.reduce_scatter_tensor", "_c10d_functional.all_to_all_single", "_c10d_functional.wait_tensor"),
    *("dlo.ring_attention", "dlo.full_attention"),  # In compiled blocks under context parallelism.
)


#: Product of experts, to whose output transformers (5.24) adds a bias in place; an output that changes is not kept.
_GROUPED = "aten._grouped_mm"


def selective_contexts() -> Any:
    """Returns the contexts of a forward and of its recomputation that keep the outputs of selected operators."""
    return _contexts("")


def _contexts_without_grouped() -> Any:
    return _contexts(_GROUPED)


def _contexts(without: str) -> Any:
    forward, recomputation = create_selective_checkpoint_contexts(functools.partial(_policy, without=without))
    recomputation.__class__ = _recomputation_of(recomputation.__class__, without)
    return forward, recomputation


@functools.cache
def _recomputation_of(kind: Any, without: str) -> Any:
    """Returns torch's mode of a recomputation, by which operators that are not kept run without a look at the forward.

    From 2.14 on, torch raises if an operator runs more often than in the forward. Those of a sharded unit inside the
    block do so rightly, such as experts with a mesh of their own: it is gathered for a recomputation, and in a pipeline
    it may have been gathered before the forward. The class is set on the object: its constructor is torch's own.

    Args:
        kind: Class of the mode (torch 2.11 to 2.15: ``_CachedTorchDispatchMode``).
        without: Name of an operator that is not kept.
    """

    class Recomputation(kind):
        """Recomputation that looks up the outputs of kept operators only."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            """Runs an operator, or returns the output that is kept."""
            kwargs = kwargs or {}
            if _is_kept(func, without, args, kwargs):
                return super().__torch_dispatch__(func, types, args, kwargs)
            return func(*args, **kwargs)

    return Recomputation


def contexts_for(*blocks: nn.Module) -> Callable[[], Any]:
    """Returns the function of the contexts for blocks, which leaves out products whose outputs they change."""
    adds_biases = any(getattr(part, "has_bias", False) is True for block in blocks for part in block.modules())
    return _contexts_without_grouped if adds_biases else selective_contexts


def _policy(context: Any, op: Any, *args: Any, without: str = "", **kwargs: Any) -> CheckpointPolicy:
    """Returns whether an operator's output is kept; compiled code may keep further outputs."""
    is_kept = _is_kept(op, without, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _is_kept(op: Any, without: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = _name(op)
    return name in _KEPT_NAMES and name != without and not _drops(op, args, kwargs)


@functools.cache
def _name(op: Any) -> str:
    return f"{op.namespace}.{op.overloadpacket.__name__}"


def _drops(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether an operator draws random numbers, so that skipping it would shift those of later ones."""
    names = [argument.name for argument in op._schema.arguments]
    if "dropout_p" not in names:
        return False
    at = names.index("dropout_p")
    return bool(args[at] if at < len(args) else kwargs.get("dropout_p", 0.0))
