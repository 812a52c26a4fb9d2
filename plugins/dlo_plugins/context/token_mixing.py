"""Finds what context parallelism must do in a model: which modules mix positions, and which attention can be shared.

Attention that transformers computes through its AttentionInterface is shared among ranks. Any other module that mixes
positions is gathered: state-space layers, linear attention, convolutions, and attention with a bias or a mask of its
own. Whether a module mixes positions is found by its arguments, as it must get a cache, a state or a mask, and by
convolutions inside.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from dlo_framework.plan import ParallelPlan

Gather = Literal["auto", "all"]

#: Parameters of a forward that tell a module that mixes positions: what it has seen before, and what it may see.
_STATES = ("cache", "cache_params", "past_key_values", "past_key_value", "layer_past", "state", "kv_cache")
_MASK = "attention_mask"
#: Kinds of layers (`config.layer_types`) with attention over all tokens or a window, or without attention.
_SHAREABLE = {"full_attention", "sliding_attention", "attention", "linear_attention", "conv", "mamba", "mlp", "moe"}
#: Model types whose attention makes a mask of its own inside.
_OWN_MASKS = {"doge"}
#: Names of modules with one row for each position, from which a model adds absolute positions.
_TABLES = ("embed_positions", "position_embeddings", "wpe", "position_embedding")


@dataclass(frozen=True)
class SharedParts:
    """What context parallelism does with the modules of a model.

    Attributes:
        attention: Names of the attention modules that compute over a shared sequence.
        gathered: Names of the modules that get full sequences.
        blocks: Names of the blocks.
        others: Names of the modules outside of blocks that mix positions, such as those of a tower for images: no text
            may reach them.
        needs_full_inputs: Whether what comes before the blocks may run on full sequences: a model that makes positions,
            masks or biases by itself.
        takes_positions: Whether a call with `position_ids` needs no full inputs.
    """

    attention: tuple[str, ...]
    gathered: tuple[str, ...]
    blocks: tuple[str, ...]
    others: tuple[str, ...]
    needs_full_inputs: bool
    takes_positions: bool


def find_parts(module: nn.Module, models: Sequence[Any], plan: ParallelPlan, gather: Gather) -> SharedParts:
    """Returns what context parallelism does with the modules of a model.

    Args:
        module: Model.
        models: Outermost models of transformers in it.
        plan: Plan of the model, with its blocks and attention.
        gather: `all` to gather all modules that mix positions, `auto` only those whose attention cannot be shared.
    """
    blocks = _stacks(module, plan.block_names(module))
    mixing = [name for block in blocks for name in _mixers(module, block)]
    known = [name for name in plan.attention_names(module) if not _is_inside(name, mixing)]
    mixing += [name for name in known if not any(_is_inside(other, [name]) for other in mixing)]
    shareable = {name: _interface_parts(module, name) for name in mixing}
    own_masks = gather == "all" or any(_has_own_mask(model) for model in models)
    # Attention that is not shared needs masks of full sequences, which attention that is shared does not make.
    foreign = [name for name, parts in shareable.items() if not parts and _reads_masks(module.get_submodule(name))]
    others = _outside(module, blocks)
    tables = [name for name, _ in module.named_modules() if name.rpartition(".")[2] in _TABLES]
    takes_positions = all("position_ids" in inspect.signature(m.base_model.forward).parameters for m in models)
    if own_masks or foreign:
        return SharedParts((), tuple(mixing), tuple(blocks), others, needs_full_inputs=True, takes_positions=False)
    attention = tuple(part for parts in shareable.values() for part in parts)
    gathered = tuple(name for name, parts in shareable.items() if not parts)
    return SharedParts(attention, gathered, tuple(blocks), others, not takes_positions or bool(tables), takes_positions)


def _stacks(module: nn.Module, blocks: list[str]) -> list[str]:
    """Returns the blocks, with those of further lists of the same class (a model of two stacks)."""
    if not blocks:
        return []
    kinds = {type(module.get_submodule(name)) for name in blocks}
    found = [name for name, part in module.named_modules() if type(part) in kinds or name in blocks]
    return [name for name in found if not any(name.startswith(f"{other}.") for other in found if other != name)]


def _mixers(module: nn.Module, block: str) -> list[str]:
    """Returns the outermost modules of a block that mix positions; a module that only holds some is left out."""
    root = module.get_submodule(block)
    parts = {name: part for name, part in root.named_modules() if name}
    stateful = [name for name, part in parts.items() if is_stateful(part)]
    innermost = [name for name in stateful if not any(_is_inside(other, [name]) for other in stateful if other != name)]
    chosen = {name for name in stateful if name in innermost or "Attention" in type(parts[name]).__name__}
    for name, part in parts.items():
        parent = name.rpartition(".")[0]
        if isinstance(part, nn.modules.conv._ConvNd) and not _is_inside(name, chosen):
            chosen.add(parent or name)
    found = [name for name in chosen if not _is_inside(name, chosen - {name})]
    if not found and is_stateful(root):  # The block itself is the module, such as one without parts that take states.
        return [block]
    return [f"{block}.{name}" for name in parts if name in found]


def is_stateful(module: nn.Module) -> bool:
    """Returns whether a module's forward takes a cache, a state or a mask."""
    return any(name in (*_STATES, _MASK) for name in inspect.signature(module.forward).parameters)


def _is_inside(name: str, others: Any) -> bool:
    return any(name == other or name.startswith(f"{other}.") for other in others)


def _outside(module: nn.Module, blocks: Sequence[str]) -> tuple[str, ...]:
    """Returns the innermost modules outside of blocks that take a cache, a state or a mask."""
    around = {block.rsplit(".", up)[0] for block in blocks for up in range(1, block.count(".") + 1)}
    found = [
        name
        for name, part in module.named_modules()
        if name and name not in around and is_stateful(part) and not _is_inside(name, blocks)
        if "Embedding" not in type(part).__name__  # Positions are counted by a mask; see `needs_full_inputs`.
    ]
    holders = {name.rsplit(".", up)[0] for name in found for up in range(1, name.count(".") + 1)}
    return tuple(name for name in found if name not in holders)


def _reads_masks(part: nn.Module) -> bool:
    """Returns whether a module may read a mask `[B, 1, L, L]`: attention, but not one that is a recurrence."""
    if any("ALL_ATTENTION_FUNCTIONS" in _code_names(type(inner)) for inner in part.modules()):
        return True
    takes_mask = any(_MASK in inspect.signature(inner.forward).parameters for inner in part.modules())
    return takes_mask and "Attention" in type(part).__name__ and not _convolves(part)


def _convolves(part: nn.Module) -> bool:
    return any(isinstance(inner, nn.modules.conv._ConvNd) for inner in part.modules())


def _interface_parts(module: nn.Module, name: str) -> list[str]:
    """Returns the modules in a mixing module, or itself, that compute through transformers' AttentionInterface.

    None if it mixes positions in other ways too.
    """
    root = module.get_submodule(name)
    if _convolves(root):
        return []
    found = []
    for inner, part in root.named_modules():
        if _uses_interface(part):
            found.append(f"{name}.{inner}" if inner else name)
    others = [
        part
        for inner, part in root.named_modules()
        if inner and is_stateful(part) and not _is_inside(f"{name}.{inner}", found)
        if not any(_is_inside(one, [f"{name}.{inner}"]) for one in found)
    ]
    return [] if others else found


def _uses_interface(part: nn.Module) -> bool:
    """Returns whether a module's code calls the attention that its model's config names."""
    if getattr(getattr(part, "config", None), "_attn_implementation", None) is None:
        return False
    if getattr(part, "is_causal", True) is False:  # Its mask alone makes it causal.
        return False
    if not is_stateful(part) and "Attention" not in type(part).__name__:
        return False
    if not type(part).__module__.startswith("transformers."):
        return True  # transformers decides when the implementation is set, and attention checks that it was.
    return "ALL_ATTENTION_FUNCTIONS" in _code_names(type(part))


def _code_names(kind: type[nn.Module]) -> set[str]:
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return set() if code is None else {*code.co_names, *code.co_freevars}


def _has_own_mask(model: Any) -> bool:
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    return bool(kinds - _SHAREABLE) or config.model_type in _OWN_MASKS
