"""Makes the parallel plan of a causal language model from transformers' own plans of its family."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import nn

from dlo_framework.experts import find_mixtures
from dlo_framework.plan import ParallelPlan, Rule, tied_groups
from dlo_tasks.llm.language_models import find_base_model, find_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_STYLES = {"colwise": Rule.COLUMN, "rowwise": Rule.ROW, "sequence_parallel": Rule.SEQUENCE}
#: Replicated styles: transformers all-reduces their gradients, which a strategy does for replicated parameters anyway.
_WHOLE = ("replicated_with_grad_allreduce",)
_HEADS = {"q_proj": Rule.HEADS, "k_proj": Rule.KV_HEADS, "v_proj": Rule.KV_HEADS}
#: Fused projections, by family and name; those of other families are replicated.
_FUSED = {
    ("gpt_neox", "query_key_value"): Rule.QKV_BY_HEAD,
    ("phi3", "qkv_proj"): Rule.QKV_GROUPED,
    ("phi3", "gate_up_proj"): Rule.GATE_UP,
}
#: Families in whose attention or MLP transformers gathers activations, for a fused projection or a norm over all heads.
#: With rules for these no gather is needed.
_NOT_GATHERED = ("phi3", "olmo2", "olmo3")
_GATHERED_STYLES = {"colwise_gather_output": "colwise", "rowwise_split_input": "rowwise"}
#: Rules of families without a plan in transformers, by name within a block.
_OWN: dict[str, dict[str, Rule]] = {
    "gpt2": {"attn.c_attn": Rule.QKV, "attn.c_proj": Rule.ROW, "mlp.c_fc": Rule.COLUMN, "mlp.c_proj": Rule.ROW},
    "opt": {
        **{"self_attn.q_proj": Rule.HEADS, "self_attn.k_proj": Rule.HEADS, "self_attn.v_proj": Rule.HEADS},
        **{"self_attn.out_proj": Rule.ROW, "fc1": Rule.COLUMN, "fc2": Rule.ROW},
    },
}


def plan_for(model: PreTrainedModel) -> ParallelPlan:
    """Returns the parallel plan of a causal language model.

    Blocks are the `ModuleList` with most of the parameters. The head is the output projection and the modules that
    `base_model_pp_plan` names after the blocks; the stem is everything else, the rotary embedding included. Tensor
    rules are those of `base_model_tp_plan`, with the attention's projections split between heads. Families without such
    a plan have no tensor rules, except GPT-2 and OPT. Mixtures of experts are found by their form.
    """
    name, blocks = find_blocks(model)
    pattern, parent = f"{name}.*", name.rpartition(".")[0]
    around = model.get_submodule(parent)  # the blocks' parent: the base model, or OPT's decoder in it
    prefix = f"{parent}." if parent else ""
    head_name = _name_of(model, model.get_output_embeddings())
    own = [child for child, module in around.named_children() if _holds_tensors(module) and module is not blocks]
    own = [child for child in own if prefix + child != head_name]
    after = _after_blocks(model, around, name.removeprefix(prefix))
    head = [prefix + child for child in own if child in after] + [head_name]
    stem = [prefix + child for child in own if child not in after]
    stem += [prefix + key for key, _ in around.named_parameters(recurse=False)]
    stem += [prefix + key for key, _ in around.named_buffers(recurse=False)]
    plan = ParallelPlan(
        blocks=(pattern,),
        stem=tuple(stem),
        head=tuple(head),
        tensor=_tensor_rules(model, pattern, head_name),
        attention=tuple(_attention(blocks, pattern)),
        tied=tied_groups(model),
        experts=tuple(_experts(model, name)),
    )
    return _with_rest(model, plan)


def _with_rest(model: PreTrainedModel, plan: ParallelPlan) -> ParallelPlan:
    """Returns a plan whose stem and head have all other tensors too: BERT's embeddings are not beside its blocks.

    What is registered before the first block belongs to the stem, what comes after it to the head.
    """
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    first = order[plan.block_names(model)[0]]
    rest: tuple[dict[str, None], dict[str, None]] = ({}, {})
    for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if not plan.owners(name):
            rest[order[name.rpartition(".")[0]] > first][name] = None
    if not any(rest):
        return plan
    return replace(plan, stem=(*plan.stem, *rest[0]), head=(*plan.head, *rest[1]))


def _after_blocks(model: PreTrainedModel, around: nn.Module, blocks: str) -> set[str]:
    """Returns the modules beside the blocks that run after them."""
    plan: Any = getattr(model.config, "base_model_pp_plan", None)
    order = list(plan) if plan and blocks in plan else [name for name, _ in around.named_children()]
    later = set(order[order.index(blocks) + 1 :])
    # OPT registers its final norm before the blocks, DeepSeek-V4 its hyper-connection head; BART its embeddings after.
    later |= {name for name, _ in around.named_children() if name.startswith("final") or name.endswith("_head")}
    # LFM2's final norm is called `embedding_norm`, BigBird-Pegasus's by the name of BART's first one.
    last = "layernorm_embedding" if model.config.model_type == "bigbird_pegasus" else "embedding_norm"
    return {name for name in later if "rotary" not in name and ("embed" not in name or name == last)}


def _tensor_rules(model: PreTrainedModel, blocks: str, head: str) -> dict[str, Rule]:
    base = find_base_model(model)
    prefix = f"{_name_of(model, base)}." if base is not model else ""
    styles: Mapping[str, str] = getattr(model.config, "base_model_tp_plan", None) or {}
    by_parent: dict[str, dict[str, Rule | None]] = {}
    for pattern, style in styles.items():
        if style not in _WHOLE:
            parent, _, leaf = f"{prefix}{pattern}".rpartition(".")
            by_parent.setdefault(parent, {})[leaf] = _rule(model.config.model_type, leaf, style)
    rules: dict[str, Rule] = {}
    for parent, of_leaves in by_parent.items():
        known = {leaf: rule for leaf, rule in of_leaves.items() if rule is not None}
        if len(known) == len(of_leaves):  # A row rule without its column rule, or the reverse, would be wrong.
            rules |= {f"{parent}.{leaf}": rule for leaf, rule in known.items()}
    rules |= {f"{blocks}.{name}": rule for name, rule in _OWN.get(model.config.model_type, {}).items()}
    if not rules:
        return {}
    _, first = find_blocks(model)
    rules |= {f"{blocks}.{name}": Rule.SEQUENCE for name, module in first[0].named_children() if _is_norm(module)}
    embedding = _name_of(model, model.get_input_embeddings())
    of_heads = {pattern: Rule.HEADS for pattern in rules if _names_vectors(model, pattern)}
    return (
        of_heads
        | _sparse_mlps(model, blocks)
        | {pattern: rule for pattern, rule in rules.items() if _matches(model, pattern)}
        | {
            **_norms_within(model, blocks),
            embedding: Rule.VOCAB,
            head: Rule.VOCAB,
        }
    )


def _rule(family: str, leaf: str, style: str) -> Rule | None:
    if (family, leaf) in _FUSED:
        return _FUSED[family, leaf]
    if family in _NOT_GATHERED:
        style = _GATHERED_STYLES.get(style, style)
    if "qkv" in leaf or "query_key_value" in leaf or "gate_up" in leaf:
        return None
    return _HEADS.get(leaf) if style == "colwise" and leaf in _HEADS else _STYLES.get(style)


def _attention(blocks: nn.ModuleList, pattern: str) -> list[str]:
    return [f"{pattern}.{name}" for name, module in blocks[0].named_children() if "Attention" in type(module).__name__]


def _experts(model: PreTrainedModel, blocks: str) -> list[str]:
    """Returns the patterns of the mixtures of experts, such as `model.layers.*.mlp`, which may match dense layers."""
    found: dict[str, None] = {}
    for mixture in find_mixtures(model):
        name = mixture.name
        if name.startswith(f"{blocks}."):
            _, dot, inside = name.removeprefix(f"{blocks}.").partition(".")
            name = f"{blocks}.*{dot}{inside}"
        found[name] = None
    return list(found)


def _norms_within(model: PreTrainedModel, pattern: str) -> dict[str, Rule]:
    """Returns the rules of attention norms that span heads: with weights per head (Cohere), or over all features."""
    _, blocks = find_blocks(model)
    rules: dict[str, Rule] = {}
    for name, parameter in blocks[0].named_parameters():
        attention, _, norm = name.removesuffix(".weight").rpartition(".")
        if norm not in ("q_norm", "k_norm"):
            continue
        if parameter.ndim == 2:
            rules[f"{pattern}.{name}"] = Rule.HEADS if norm == "q_norm" else Rule.KV_HEADS
        elif parameter.shape[0] == _rows(blocks[0], f"{attention}.{norm[0]}_proj.weight"):
            rules[f"{pattern}.{attention}.{norm}"] = Rule.COLUMN_NORM
    return rules


def _sparse_mlps(model: PreTrainedModel, pattern: str) -> dict[str, Rule]:
    """Returns the rules of MLPs that zero activations below a threshold (Gemma 3n): they are replicated.

    The threshold depends on the mean over all features, which a rank with some of them cannot compute.
    """
    shares = getattr(model.config.get_text_config(), "activation_sparsity_pattern", None) or ()
    name = pattern.removesuffix(".*")
    return {f"{name}.{layer}.mlp": Rule.REPLICATE for layer, share in enumerate(shares) if share}


def _rows(block: nn.Module, name: str) -> int | None:
    """Returns the size of dim 0 of a block's parameter; None if it has no parameter of that name."""
    found = dict(block.named_parameters()).get(name)
    return None if found is None else found.shape[0]


def _names_vectors(model: PreTrainedModel, pattern: str) -> bool:
    """Returns whether a pattern names parameters with one entry per head, such as attention sinks and gate biases."""
    plan = ParallelPlan(tensor={pattern: Rule.COLUMN})
    named = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if plan.rule_for(name) is Rule.COLUMN and plan.rule_for(name.rpartition(".")[0]) is not Rule.COLUMN
    ]
    return bool(named) and all(".self_attn." in name and parameter.ndim == 1 for name, parameter in named)


def _is_norm(module: nn.Module) -> bool:
    return type(module).__name__.endswith(("RMSNorm", "LayerNorm"))


def _holds_tensors(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def _matches(model: nn.Module, pattern: str) -> bool:
    return bool(ParallelPlan(blocks=(pattern,)).block_names(model))
