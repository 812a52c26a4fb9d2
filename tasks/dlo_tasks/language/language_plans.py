"""Parallel plans of causal language models, mixtures of experts in place of their MLPs, and the load-balancing loss.

A plan is made from transformers' own plans of the model's family.

Sparse Upcycling: arXiv 2212.05055. The load-balancing loss is computed with transformers' function for the model's
family: Switch Transformers: Scaling to Trillion Parameter Models with Simple and Efficient Sparsity. Fedus et al.,
2021, arXiv 2101.03961, equations 4 to 6; here over the router logits of all blocks together.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_framework.models.experts import find_mixtures
from dlo_framework.models.experts.balance import check_routers, find_routers, limit_capacity
from dlo_framework.models.experts.layer import DenseMLP, upcycle
from dlo_framework.models.experts.mixture_options import MixtureOptions
from dlo_framework.plan import ParallelPlan, Rule, named_tensors, tied_groups
from dlo_tasks.language.language_models import find_base_model, find_blocks
from dlo_tasks.language.text_settings import text_settings

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
    beside = [(child, module) for child, module in around.named_children() if module is not blocks]
    own = [child for child, module in beside if next(chain(module.parameters(), module.buffers()), None) is not None]
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
        attention=tuple(
            f"{pattern}.{name}" for name, part in blocks[0].named_children() if "Attention" in type(part).__name__
        ),
        tied=tied_groups(model),
        experts=tuple(_experts(model, name)),
    )
    return _with_rest(model, plan)


#: Rules of an encoder-decoder's attentions and MLPs by the names of their projections: those of T5, and of BART.
_ATTENTIONS: tuple[dict[str, Rule], ...] = (
    {"q": Rule.HEADS, "k": Rule.HEADS, "v": Rule.HEADS, "o": Rule.ROW},
    {"q_proj": Rule.HEADS, "k_proj": Rule.HEADS, "v_proj": Rule.HEADS, "out_proj": Rule.ROW},
)
_MLPS: tuple[dict[str, Rule], ...] = (
    {"wi": Rule.COLUMN, "wo": Rule.ROW},
    {"wi_0": Rule.COLUMN, "wi_1": Rule.COLUMN, "wo": Rule.ROW},
    {"fc1": Rule.COLUMN, "fc2": Rule.ROW},
)


#: Families whose attentions and MLPs compute with these projections alone; rules of others are inferred and proved.
_PLAIN_STACKS = frozenset(
    {"bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "m2m_100", "marian", "mbart", "mt5", "nllb-moe"}
    | {"pegasus", "plbart", "seamless_m4t", "seamless_m4t_v2", "t5", "umt5"}
)


#: Arguments of blocks: the encoder's output; biases of positions, which T5's first blocks compute; Pegasus-X's global
#: tokens.
_CARRIED = ("encoder_hidden_states", "position_bias", "encoder_decoder_position_bias", "global_hidden_states")


def encoder_decoder_plan(model: PreTrainedModel) -> ParallelPlan:
    """Returns the parallel plan of an encoder-decoder language model.

    Blocks are those of the encoder, then those of the decoder. Attentions and MLPs with the projections of T5 or BART
    have tensor rules, in the families that were compared with one process.
    """
    own: Any = model
    stacks = [own.get_encoder(), own.get_decoder()]
    lists = [(_name_of(model, stack), _largest_list(stack)) for stack in stacks]
    blocks = [(f"{stack}.{name}" if stack else name, layers) for stack, (name, layers) in lists]
    patterns = tuple(f"{name}.*" for name, _ in blocks)
    head = _name_of(model, own.get_output_embeddings())
    tensor: dict[str, Rule] = {}
    attention: dict[str, None] = {}
    widths: dict[str, int] = {}
    for name, layers in blocks:
        for part, module in layers.named_modules():
            pattern = f"{name}.*.{part.partition('.')[2]}".removesuffix(".")
            children = {child for child, _ in module.named_children()}
            if any(set(rules) <= children for rules in _ATTENTIONS):
                attention[pattern] = None
                if "o" in children:
                    widths[pattern] = model.config.d_kv
            known = (*_ATTENTIONS, *_MLPS) if model.config.model_type in _PLAIN_STACKS else ()
            rules = next((rules for rules in known if set(rules) <= children), {})
            tensor |= {f"{pattern}.{child}": rule for child, rule in rules.items()}
            if rules in _MLPS and pattern == f"{name}.*":  # BART's MLP is the block itself.
                norms = [child for child, norm in module.named_children() if "Norm" in type(norm).__name__]
                tensor |= dict.fromkeys([f"{pattern}.{child}" for child in norms], Rule.SEQUENCE)
            if rules and "relative_attention_bias" in children:
                tensor[f"{pattern}.relative_attention_bias.weight"] = Rule.LAST_DIM_HEADS
    if tensor:
        embeddings = [name for name, part in model.named_modules() if _shares_input(model, part)]
        tensor |= dict.fromkeys([*embeddings, head], Rule.VOCAB)
    plan = ParallelPlan(
        blocks=patterns,
        head=(head,),
        tensor=tensor,
        attention=tuple(attention),
        tied=tied_groups(model),
        head_widths=widths,
        carried=_CARRIED,
    )
    return _with_parts_around(model, plan, [_name_of(model, stack) for stack in stacks], [name for name, _ in blocks])


def _with_parts_around(
    model: PreTrainedModel, plan: ParallelPlan, stacks: Sequence[str], blocks: Sequence[str]
) -> ParallelPlan:
    """Returns a plan whose stem and head have all other tensors too.

    Of a stack, its embeddings and what else is registered before its blocks run before them, and the rest after them:
    between the stacks, or in the head. What is in neither stack belongs to the stem.

    Args:
        model: Model.
        plan: Plan with the blocks and the output projection.
        stacks: Names of the encoder and the decoder.
        blocks: Names of the lists of their blocks.
    """
    order = {name: number for number, (name, _) in enumerate(model.named_modules(remove_duplicate=False))}
    tensors = [name for name, _ in named_tensors(model)]
    owned = [name for name in tensors if plan.owners(name)]
    parts: list[dict[str, None]] = [{}, {}, {}]
    for name in (name for name in tensors if not plan.owners(name)):
        module = name.rpartition(".")[0]
        part = name if not module or any(other.startswith(f"{module}.") for other in owned) else module
        stack = next((n for n, stack in enumerate(stacks) if name.startswith(f"{stack}.")), None)
        is_after = stack is not None and _runs_after(model, module, stacks[stack], blocks[stack], order)
        parts[(stack or 0) + is_after][part] = None
    stem, between, head = parts
    return replace(plan, stem=(*stem, *between), between=tuple(between), head=(*plan.head, *head))


def _runs_after(model: PreTrainedModel, module: str, stack: str, blocks: str, order: Mapping[str, int]) -> bool:
    """Returns whether a module of a stack runs after its blocks."""
    # BigBird-Pegasus's last norm has the name of BART's first one.
    embeds = "embed" in module.removeprefix(stack) and model.config.model_type != "bigbird_pegasus"
    beside = module.rpartition(".")[0] == blocks.rpartition(".")[0]  # T5Gemma registers its last norm before them.
    is_norm = beside and "Norm" in type(model.get_submodule(module)).__name__
    return not embeds and (is_norm or order[module] > order[blocks])


def _largest_list(stack: nn.Module) -> tuple[str, nn.ModuleList]:
    """Returns the name and the `ModuleList` of a stack's blocks."""
    lists = [(name, part) for name, part in stack.named_modules() if isinstance(part, nn.ModuleList)]
    return max(lists, key=lambda item: sum(parameter.numel() for parameter in item[1].parameters()))


def _shares_input(model: PreTrainedModel, part: nn.Module) -> bool:
    """Returns whether a module is an embedding of the model's input tokens, or tied to it."""
    return isinstance(part, nn.Embedding) and part.weight is model.get_input_embeddings().weight


def _with_rest(model: PreTrainedModel, plan: ParallelPlan) -> ParallelPlan:
    """Returns a plan whose stem and head have all other tensors too: BERT's embeddings are not beside its blocks.

    What is registered before the first block belongs to the stem. What comes after it, or is beside the base model, as
    the head of XLM-RoBERTa, belongs to the head.
    """
    base = find_base_model(model)
    inside = f"{_name_of(model, base)}." if base is not model else ""
    order = {name: number for number, (name, _) in enumerate(model.named_modules())}
    first = order[plan.block_names(model)[0]]
    rest: tuple[dict[str, None], dict[str, None]] = ({}, {})
    for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)):
        if not plan.owners(name):
            is_after = not name.startswith(inside) or order[name.rpartition(".")[0]] > first
            rest[is_after][name] = None
    if not any(rest):
        return plan
    return replace(plan, stem=(*plan.stem, *rest[0]), head=(*plan.head, *rest[1]))


def _after_blocks(model: PreTrainedModel, around: nn.Module, blocks: str) -> set[str]:
    """Returns the modules beside the blocks that run after them."""
    plan = model.config.base_model_pp_plan
    order = list(plan) if plan and blocks in plan else [name for name, _ in around.named_children()]
    later = set(order[order.index(blocks) + 1 :])
    # OPT registers its final norm before the blocks, DeepSeek-V4 its hyper-connection head; BART its embeddings after.
    later |= {name for name, _ in around.named_children() if name.startswith("final") or name.endswith("_head")}
    # LFM2's final norm is called `embedding_norm`, BigBird-Pegasus's by the name of BART's first one.
    last = "layernorm_embedding" if model.config.model_type == "bigbird_pegasus" else "embedding_norm"
    later.discard("relative_attention_bias")  # MPNet's table, which it registers after its blocks.
    return {name for name in later if "rotary" not in name and ("embed" not in name or name == last)}


def _tensor_rules(model: PreTrainedModel, blocks: str, head: str) -> dict[str, Rule]:
    base = find_base_model(model)
    prefix = f"{_name_of(model, base)}." if base is not model else ""
    styles: Mapping[str, str] = model.config.base_model_tp_plan or {}
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
    for name, module in first[0].named_children():
        if type(module).__name__.endswith(("RMSNorm", "LayerNorm")):
            rules[f"{blocks}.{name}"] = Rule.SEQUENCE
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


def _experts(model: PreTrainedModel, blocks: str) -> list[str]:
    """Returns the patterns of the mixtures of experts, such as `model.layers.*.mlp`, which may match dense layers."""
    patterns: dict[str, None] = {}
    for mixture in find_mixtures(model):
        name = mixture.name
        if name.startswith(f"{blocks}."):
            _, dot, inside = name.removeprefix(f"{blocks}.").partition(".")
            name = f"{blocks}.*{dot}{inside}"
        patterns[name] = None
    return list(patterns)


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
    shares = text_settings(model.config.get_text_config()).activation_sparsity_pattern
    name = pattern.removesuffix(".*")
    return {f"{name}.{layer}.mlp": Rule.REPLICATE for layer, share in enumerate(shares) if share}


def _rows(block: nn.Module, name: str) -> int | None:
    """Returns the size of dim 0 of a block's parameter; None if it has no parameter of that name."""
    parameter = dict(block.named_parameters()).get(name)
    return None if parameter is None else parameter.shape[0]


def _names_vectors(model: PreTrainedModel, pattern: str) -> bool:
    """Returns whether a pattern names parameters with one entry per head, such as attention sinks and gate biases."""
    plan = ParallelPlan(tensor={pattern: Rule.COLUMN})
    named = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if plan.rule_for(name) is Rule.COLUMN and plan.rule_for(name.rpartition(".")[0]) is not Rule.COLUMN
    ]
    return bool(named) and all(".self_attn." in name and parameter.ndim == 1 for name, parameter in named)


def _name_of(model: nn.Module, wanted: nn.Module) -> str:
    return next(name for name, module in model.named_modules() if module is wanted)


def _matches(model: nn.Module, pattern: str) -> bool:
    return bool(ParallelPlan(blocks=(pattern,)).block_names(model))


# --- mixtures of experts, and the load-balancing loss -------------------------------------------------------------

#: Linear layers of the MLPs of most families: Llama, Qwen, Mistral, Gemma, OLMo, ...
_GATED = ("gate_proj", "up_proj", "down_proj")


def check_options(options: MixtureOptions | None, config: Any, lora: Any) -> None:
    """Checks the option `experts` against the model's config.

    Raises:
        DloError: If they contradict each other.
    """
    if options is None:
        return
    if options.router == "expert_choice":
        raise DloError(
            "experts.router must be softmax or sigmoid for a causal model, got expert_choice, which selects tokens by"
            " later ones; set router: softmax"
        )
    if options.count is not None and lora is not None:
        raise DloError("experts.count must be unset with lora, which freezes the experts; remove lora")
    if options.aux_loss and text_settings(config.get_text_config()).output_router_logits:
        raise DloError(
            f"experts.aux_loss must be 0 with config.output_router_logits, which adds transformers' own, got"
            f" {options.aux_loss}; remove output_router_logits"
        )


def install_mixtures(model: PreTrainedModel, options: MixtureOptions | None, *, reads_weights: bool) -> None:
    """Replaces MLPs by mixtures, or checks the mixtures that the model has and limits their capacity.

    Args:
        model: Model, also on the meta device.
        options: Option `experts`; None does nothing.
        reads_weights: Whether the model's weights are read after this.

    Raises:
        DloError: If the model has none, or its MLPs cannot be copied.
    """
    if options is None:
        return
    if options.count is None:
        check_routers(model, options)
        if options.capacity_factor is not None:
            limit_capacity(model, options.capacity_factor)
        return
    if find_routers(model):
        raise DloError(
            f"experts.count must be unset for a model with mixtures, got {options.count} for {type(model).__name__};"
            " set its experts in config"
        )
    if reads_weights:
        raise DloError(
            "experts.count must be unset under meta_init with a trained model, whose dense weights are read after"
            f" sharding, got {options.count}; remove meta_init"
        )
    name, blocks = find_blocks(model)
    mlps = [f"{name}.{number}.{child}" for number, block in enumerate(blocks) for child in _mlps(block)]
    with torch.no_grad():
        upcycle(model, mlps, read_mlp, options)


def _mlps(block: nn.Module) -> list[str]:
    return [name for name, module in block.named_children() if read_mlp(module) is not None]


def read_mlp(mlp: nn.Module) -> DenseMLP | None:
    """Returns the linear layers of a gated MLP of transformers (5.24); None for others."""
    gate, up, down = (getattr(mlp, name, None) for name in _GATED)
    if not (isinstance(gate, nn.Linear) and isinstance(up, nn.Linear) and isinstance(down, nn.Linear)):
        return None
    activation = getattr(mlp, "act_fn", None)
    if activation is None or len({layer.bias is None for layer in (gate, up, down)}) > 1:
        return None
    return DenseMLP(up, down, activation, gate)


#: Name and arguments of the loss in transformers (5.17 to 5.23), in the module of each family that has it.
_FUNCTION = "load_balancing_loss_func"
_ARGUMENTS = ["gate_logits", "num_experts", "top_k", "attention_mask"]


@dataclass(frozen=True)
class LoadBalancing:
    """Load-balancing loss of a model: its coefficient and its function.

    Attributes:
        coefficient: Value of `router_aux_loss_coef` in the config.
        measure: Function of transformers, of the router logits, `[B * L, experts]` each, and the mask.
    """

    coefficient: float
    measure: Callable[[tuple[Tensor, ...], Tensor | None], Tensor]

    def hidden_states(self, model: PreTrainedModel, inputs: dict[str, Any]) -> tuple[Tensor, Tensor]:
        """Returns the hidden states, `[B, L, D]`, and the batch's loss times its coefficient, a scalar.

        Raises:
            DloError: If the model does not return router logits.
        """
        outputs = find_base_model(model)(**inputs, use_cache=False, output_router_logits=True)
        logits = outputs.get("router_logits")
        if not logits:
            raise DloError(
                "config.output_router_logits must be false for models that return no router logits, got true for"
                f" {type(model).__name__}; set config.output_router_logits: false"
            )
        mask = inputs.get("attention_mask")
        if not isinstance(mask, Tensor) or mask.ndim != 2:  # A mask of documents: all tokens count.
            mask = None
        return outputs[0], self.coefficient * self.measure(tuple(logits), mask)


def find_load_balancing(model: PreTrainedModel) -> LoadBalancing | None:
    """Returns a model's load-balancing loss, or None where its config does not set one.

    Raises:
        DloError: If the config sets one, and the family does not have it.
    """
    if not text_settings(model.config.get_text_config()).output_router_logits:
        return None
    function = getattr(sys.modules[type(model).__module__], _FUNCTION, None)
    names = ("router_aux_loss_coef", "num_experts", "num_experts_per_tok")
    coefficient, experts, top_k = (getattr(model, name, None) for name in names)
    if function is None or list(inspect.signature(function).parameters) != _ARGUMENTS or None in (coefficient, experts):
        raise DloError(
            "config.output_router_logits must be false for families without the load-balancing loss of mixtral and"
            f" qwen3_moe, got true for {type(model).__name__}; set config.output_router_logits: false"
        )
    if not coefficient:
        return None
    return LoadBalancing(float(coefficient), lambda logits, mask: function(logits, experts, top_k, mask))
