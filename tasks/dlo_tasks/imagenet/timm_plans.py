"""Parallel plans of timm models: Vision Transformers, CoAtNet and its family, ResNets, Twins, and inferred ones.

A plan is made for a module: it names only what that variant has (class token, register tokens, layer scale, the place
of its norm).
"""

from __future__ import annotations

from dataclasses import replace

from timm.layers import RelPosBiasTf
from timm.layers.mlp import GluMlp, Mlp, SwiGLU
from timm.models.maxxvit import MaxxVit
from timm.models.resnet import ResNet
from timm.models.twins import Twins
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from dlo_framework.experts import find_mixtures
from dlo_framework.plan import ParallelPlan, Rule, tied_groups
from dlo_tasks.imagenet.vision_mixtures import dense_mlps

#: Layers of CaiT, XCiT and VOLO that process a class token after all blocks of patches.
_CLASS_ATTENTION = ("blocks_token_only", "cls_attn_blocks", "post_network")


def plan_for(model: nn.Module) -> ParallelPlan:
    """Returns the plan of a timm model, with its mixtures of experts.

    Raises:
        DloError: If the model's family is unknown and its repeated blocks cannot be found.
    """
    patterns = dict.fromkeys(_any_index(mixture.name) for mixture in find_mixtures(model))
    return replace(_family_plan(model), experts=tuple(patterns))


def _family_plan(model: nn.Module) -> ParallelPlan:
    if isinstance(model, VisionTransformer):
        return vit_plan(model)
    if isinstance(model, MaxxVit):
        return maxxvit_plan(model)
    if isinstance(model, ResNet):
        return resnet_plan(model)
    if isinstance(model, Twins):
        return twins_plan(model)
    plan = ParallelPlan.infer(model)
    if "cls_token" in plan.stem and any(getattr(model, name, None) is not None for name in _CLASS_ATTENTION):
        stem = tuple(name for name in plan.stem if name != "cls_token")
        return replace(plan, stem=stem, head=(*plan.head, "cls_token"))
    return plan


def vit_plan(model: nn.Module) -> ParallelPlan:
    """Returns the plan of a `VisionTransformer`: ViT, DeiT and DeiT III, with or without registers.

    Each block follows Megatron: `qkv` by heads and `fc1` by columns, `proj` and `fc2` by rows, so that one all-reduce
    serves two linear layers. The fused `qkv` is `[3, heads, head_dim]`.
    """
    stem = ("cls_token", "dist_token", "reg_token", "pos_embed", "patch_embed", "norm_pre")
    head = ("norm", "attn_pool", "fc_norm", "head", "head_dist")
    rules = {
        **_attention_rules(model),
        **_mlp_rules(model),
        **{f"blocks.*.{name}": Rule.SEQUENCE for name in ("norm1", "norm2", "ls1", "ls2")},
    }
    return ParallelPlan(
        blocks=("blocks.*",),
        stem=_present(model, stem),
        head=_present(model, head),
        tensor={pattern: rule for pattern, rule in rules.items() if _matches(model, pattern)},
        attention=("blocks.*.attn",) if _matches(model, "blocks.*.attn") else (),
        tied=tied_groups(model),
    )


def _attention_rules(model: nn.Module) -> dict[str, Rule]:
    """Returns the rules of the blocks' attentions; empty if a norm over all heads follows."""
    attentions = [module for name, module in model.named_modules() if name.endswith(".attn")]
    if not all(isinstance(getattr(attention, "norm", None), nn.Identity | None) for attention in attentions):
        return {}
    rules = {"qkv": Rule.QKV, "gate": Rule.HEADS, "proj": Rule.ROW}
    return {f"blocks.*.attn.{name}": rule for name, rule in rules.items()}


def _mlp_rules(model: nn.Module) -> dict[str, Rule]:
    """Returns the rules of the blocks' MLPs, mixtures apart; empty if a norm follows `fc1`."""
    mlps = dense_mlps(model)
    if not all(isinstance(mlp, Mlp | SwiGLU | GluMlp) and isinstance(mlp.norm, nn.Identity) for mlp in mlps):
        return {}
    first = Rule.GATE_UP if any(isinstance(mlp, GluMlp) for mlp in mlps) else Rule.COLUMN
    rules = {"fc1": first, "fc1_g": Rule.COLUMN, "fc1_x": Rule.COLUMN, "fc2": Rule.ROW}
    return {f"blocks.*.mlp.{name}": rule for name, rule in rules.items()}


def maxxvit_plan(model: nn.Module) -> ParallelPlan:
    """Returns the plan of a `MaxxVit`: CoAtNet, MaxViT and their relatives.

    It has the blocks of all stages in order, convolutional ones too, and tensor rules for the attention of transformer
    blocks and their MLPs. In this family the fused `qkv` is `[heads, 3, head_dim]` if the attention has `head_first`,
    and the table of relative positions has one column per head.
    """
    tensor: dict[str, Rule] = {}
    attention: dict[str, None] = {}
    for name, module in model.named_modules():
        if not hasattr(module, "qkv"):
            continue
        pattern = _any_index(name)
        block = pattern.rpartition(".")[0]
        attention[pattern] = None
        tensor[f"{pattern}.qkv"] = Rule.QKV_BY_HEAD if module.head_first else Rule.QKV
        tensor[f"{pattern}.proj"] = Rule.ROW
        if hasattr(module.rel_pos, "relative_position_bias_table"):
            first = isinstance(module.rel_pos, RelPosBiasTf)  # [heads, height, width]
            tensor[f"{pattern}.rel_pos.relative_position_bias_table"] = Rule.HEADS if first else Rule.LAST_DIM_HEADS
        else:
            # Its output is a head's bias, and its input is not an activation: cut its tensors, not a projection.
            tensor |= {f"{pattern}.rel_pos.mlp.fc2.{name}": Rule.HEADS for name in ("weight", "bias")}
        tensor |= {f"{block}.mlp.fc1": Rule.COLUMN, f"{block}.mlp.fc2": Rule.ROW}
    return ParallelPlan(
        blocks=("stages.*.blocks.*",),
        stem=_present(model, ("stem",)),
        head=_present(model, ("norm", "head")),
        tensor={pattern: rule for pattern, rule in tensor.items() if _matches(model, pattern)},
        attention=tuple(attention),
        tied=tied_groups(model),
    )


def resnet_plan(model: nn.Module) -> ParallelPlan:
    """Returns the plan of a `ResNet`: its residual blocks in order, without tensor rules."""
    return ParallelPlan(
        blocks=("layer?.*",),
        stem=_present(model, ("conv1", "bn1", "maxpool")),
        head=_present(model, ("fc",)),
    )


def twins_plan(model: Twins) -> ParallelPlan:
    """Returns the plan of a `Twins`, without tensor rules.

    The modules between its blocks count as blocks too: the patch embedding at the start of each group but the first,
    and the position encoding after a group's first block.
    """
    blocks: list[str] = []
    for group, layers in enumerate(model.blocks):
        names = [f"blocks.{group}.{number}" for number, _ in layers.named_children()]
        embedding = [f"patch_embeds.{group}"] if group else []
        blocks += [*embedding, names[0], f"pos_block.{group}", *names[1:]]
    return ParallelPlan(blocks=tuple(blocks), stem=("patch_embeds.0",), head=_present(model, ("norm", "head")))


def _present(model: nn.Module, names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns those of the names that have a parameter or buffer in `model`."""
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers())
    present = {name.split(".")[0] for name, _ in tensors}
    return tuple(name for name in names if name in present)


def _matches(model: nn.Module, pattern: str) -> bool:
    finder = ParallelPlan(tensor={pattern: Rule.COLUMN})
    names = [name for name, _ in model.named_modules() if name] + [name for name, _ in model.named_parameters()]
    return any(finder.rule_for(name) is Rule.COLUMN for name in names)


def _any_index(name: str) -> str:
    """Returns `name` with each number between dots replaced by `*`."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
