"""Structured pruning: a smaller model from the weights of a larger one, without heads, units, blocks or channels.

Units are scored by their weights alone, as in Li et al., "Pruning Filters for Efficient ConvNets", 2017, arXiv
1608.08710: the norm of the weights that compute a unit, times the norm of those that read it. Every block loses equally
many, so that a config can describe the result. Where units are comes from the model's parallel plan: tensor parallelism
divides the same features over ranks.

Inner channels of convolutional blocks are removed with all that computes, scales and reads them: Learning Efficient
Convolutional Networks through Network Slimming. Liu et al., 2017, arXiv 1708.06519. A channel's scale is that of its
batch norm, because the norm undoes the scale of the filter. The score is this scale times the norm of the weights that
read the channel. Departures: no L1 penalty in training, and every block loses the same fraction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from dlo_framework.checkpoint import load, save
from dlo_framework.checkpoint.loading import as_lazy_state_dict
from dlo_framework.cli.config_scan import ConfigScan
from dlo_framework.cli.lightning_cli import DloCLI
from dlo_framework.errors import DloError, shown_names
from dlo_framework.models.hugging_face import is_conv1d
from dlo_framework.plan import ParallelPlan, Rule
from dlo_framework.run_setup import check_parts, find_start_checkpoint
from dlo_framework.task import Task
from dlo_framework.task_abilities import ChannelGroup, PrunesChannels, Resizable
from dlo_framework.testing.training import silence_lightning
from dlo_plugins.parallel.tensor.heads import head_width, kv_heads

#: Prefix of the model's names in a task's checkpoint.
_MODEL = "model."


class PrunedRun:
    """Task and checkpoint of a run that is not trained.

    Args:
        config_scan: Scanned command line, with ``fit`` as its command.
    """

    def __init__(self, config_scan: ConfigScan) -> None:
        silence_lightning()
        cli = DloCLI(config_scan, "dlo prune")
        if cli.options.ckpt_path == "auto":
            raise DloError("prune: --ckpt_path must be a path, last or best, got auto; set best")
        #: Config as the user means it, without Lightning's defaults.
        self.user_config = cli.user_config()
        cli.find_checkpoint()
        # As `dlo validate`: weights alone are enough.
        self.checkpoint = str(find_start_checkpoint(cli.options.ckpt_path, cli.runs, trains=False)[0])
        cli.options["trainer.strategy"] = "auto"
        cli.build()
        self.model, self.datamodule = cli.model, cli.datamodule
        check_parts(self.model, self.datamodule)

    def write(self, amounts: dict[str, Any], output: Path) -> str:
        """Writes the smaller model's checkpoint and config; returns a description.

        Args:
            amounts: Fraction of ``heads``, ``hidden``, ``channels`` and ``blocks`` to remove; for blocks a list of
                numbers instead.
            output: New folder.

        Raises:
            DloError: If the task cannot describe the smaller model, or the checkpoint is of another model.
        """
        task: Any = self.model
        if not isinstance(task, Task):
            raise DloError(
                f"prune: the model must be a Task, whose plan says where its heads and blocks are, got"
                f" {type(task).__name__}; derive it from dlo_framework.task.Task"
            )
        content = load(self.checkpoint, level="size")
        twin = task.on_meta()
        weights = self._read_weights(content, twin)
        before = _parameters(twin)
        groups = twin.ability(PrunesChannels).channel_groups() if "channels" in amounts else []
        sizes, lines = prune_weights(weights, twin, amounts)
        arguments = task.ability(Resizable).resized(content, **sizes)
        smaller = self._build(arguments)
        if groups:
            counts = [group.count for group in smaller.ability(PrunesChannels).channel_groups()]
            lines.append(prune_channels(weights, groups, counts))
        _check_weights(weights, smaller)
        smaller_content: dict[str, Any] = {
            **{key: content[key] for key in ("pytorch-lightning_version", "hparams_name") if key in content},
            "hyper_parameters": {**dict(content.get("hyper_parameters", {})), **arguments},
            "epoch": 0,
            "global_step": 0,
            "state_dict": weights,
        }
        smaller.on_save_checkpoint(smaller_content)
        old = content.get("exporter") or {}
        if "exporter" in smaller_content:
            new = smaller_content["exporter"]
            smaller_content["exporter"] = {**new, **{key: value for key, value in old.items() if not new.get(key)}}
        output.mkdir(parents=True, exist_ok=True)
        save(smaller_content, output / "pruned.ckpt", about={"kind": "pruned", "source": self.checkpoint})
        (output / "config.yaml").write_text(yaml.safe_dump(self._smaller_config(arguments, output), sort_keys=False))
        lines.append(f"parameters: {before:,} -> {_parameters(smaller):,}")
        lines.append(f"train it:   dlo fit --config {output / 'config.yaml'}")
        lines.append(f"export it:  dlo checkpoint export {output / 'pruned.ckpt'} model.safetensors")
        return "\n".join(lines)

    def _read_weights(self, content: dict[str, Any], twin: Task) -> dict[str, Tensor]:
        state = as_lazy_state_dict(content["state_dict"])
        named = {f"{_MODEL}{name}" for name in twin.model.state_dict()}
        absent = sorted(named - set(state))
        if absent:
            raise DloError(
                f"prune: --ckpt_path must be of the config's model, got {self.checkpoint} without"
                f" {shown_names(absent)}; use that model's config"
            )
        return {name: state[name].clone() for name in state}

    def _build(self, arguments: dict[str, Any]) -> Task:
        """Returns the task of the smaller model, with the model on the meta device."""
        # Lightning's command line adds `_class_path` to the hyperparameters.
        own = {key: value for key, value in self.model.hparams.items() if not key.startswith("_")}
        smaller: Task = type(self.model)(**{**own, **arguments})
        smaller.check(self.datamodule)
        return smaller.on_meta()

    def _smaller_config(self, arguments: dict[str, Any], output: Path) -> dict[str, Any]:
        """Returns the user's config with the smaller model, and the callback that loads its weights."""
        config = dict(self.user_config)
        config.pop("ckpt_path", None)
        model = dict(config["model"])
        kept = {key: value for key, value in dict(model.get("init_args", {})).items() if key not in arguments}
        model["init_args"] = {**kept, **{key: value for key, value in arguments.items() if value is not None}}
        config["model"] = model
        trainer = dict(config.get("trainer", {}))
        callbacks = trainer.get("callbacks") or []
        callbacks = list(callbacks) if isinstance(callbacks, list) else [callbacks]
        start = {"class_path": "StartFrom", "init_args": {"checkpoint": str((output / "pruned.ckpt").resolve())}}
        trainer["callbacks"] = [*callbacks, start]
        config["trainer"] = trainer
        return config


def prune_weights(weights: dict[str, Tensor], twin: Task, amounts: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Removes units and blocks from weights, in place; channels go once the smaller model is built.

    Args:
        weights: Full weights of the task by name.
        twin: Task with its model, which may be on the meta device.
        amounts: Fraction of ``heads``, ``hidden``, ``channels`` and ``blocks`` to remove; for blocks a list of numbers
            instead.

    Returns:
        Sizes of the smaller model: ``heads``, ``kv_heads`` and ``head_width``, ``hidden``, ``blocks``, and the fraction
        of ``channels`` that is kept; and lines that describe what was removed.

    Raises:
        DloError: If nothing would be left, or a number is not one of a block.
    """
    plan, sizes, lines = twin.parallel_plan(), dict[str, Any](), list[str]()
    if "channels" in amounts:
        sizes["channels"] = 1 - amounts["channels"]
    model = twin.model
    for kind in ("heads", "hidden"):
        if kind not in amounts:
            continue
        groups = find_units(model, plan, kind)
        counts = {group.count for group in groups}
        if len(counts) != 1:
            raise DloError(
                f"prune: blocks must have equally many {kind} for --{kind}, got {sorted(counts)}; prune blocks"
            )
        count = counts.pop()
        keep = count - round(amounts[kind] * count)
        if not 0 < keep < count:
            raise DloError(
                f"prune: --{kind} must remove at least one and leave one of {count}, got {amounts[kind]:.0%}, which"
                f" leaves {keep}; set {1 / count:.0%} or more, below 100%"
            )
        for group in groups:
            chosen = kept_units(unit_scores(group, model, weights), keep)
            remove_units(weights, group, model, chosen)
        if kind == "heads":
            sizes |= {"heads": keep * groups[0].ratio, "kv_heads": keep, "head_width": groups[0].width}
        else:
            sizes["hidden"] = keep
        lines.append(f"{kind}: {count} -> {keep} in each of {len(groups)} blocks")
    if "blocks" in amounts:
        blocks, amount = plan.block_names(model), amounts["blocks"]
        keep = len(blocks) - (len(set(amount)) if isinstance(amount, list) else round(amount * len(blocks)))
        if isinstance(amount, list) and (max(amount) >= len(blocks) or not keep):
            raise DloError(
                f"prune: --blocks must be numbers from 0 to {len(blocks) - 1}, not all of them, got"
                f" {','.join(map(str, amount))}; leave some"
            )
        if not 0 < keep < len(blocks):
            raise DloError(
                f"prune: --blocks must remove at least one and leave one of {len(blocks)}, got {amount:.0%}, which"
                f" leaves {keep}; set {1 / len(blocks):.0%} or more"
            )
        if isinstance(amount, list):
            kept = [number for number in range(len(blocks)) if number not in amount]
        else:
            kept = kept_units(block_scores(model, plan, weights), keep).tolist()
        remove_blocks(weights, blocks, kept)
        sizes["blocks"] = len(kept)
        gone = [number for number in range(len(blocks)) if number not in kept]
        lines.append(f"blocks: {len(blocks)} -> {len(kept)}, without {', '.join(map(str, gone))}")
    return sizes, lines


def _parameters(task: Task) -> int:
    """Returns the number of parameters of a task's model: without its buffers, and a tied one once."""
    return sum(parameter.numel() for parameter in task.model.parameters())


def _check_weights(weights: dict[str, Tensor], smaller: Task) -> None:
    """Checks that the smaller weights are those of the model that the smaller config builds.

    Raises:
        DloError: If the config cannot describe the smaller model.
    """
    wanted = {f"{_MODEL}{name}": tuple(value.shape) for name, value in smaller.model.state_dict().items()}
    wrong = [name for name in wanted if name not in weights or tuple(weights[name].shape) != wanted[name]]
    wrong += [name for name in weights if name.startswith(_MODEL) and name not in wanted]
    if wrong:
        raise DloError(
            f"prune: the model's config must describe the smaller model, got other shapes of {shown_names(wrong)} in"
            f" {type(smaller.model).__name__}; prune hidden units or blocks alone"
        )
    for name, value in weights.items():
        weights[name] = value.contiguous() if isinstance(value, torch.Tensor) else value


_FUSED = (Rule.QKV, Rule.QKV_BY_HEAD, Rule.QKV_GROUPED, Rule.QKV_BY_GROUP)
_ATTENTION = (*_FUSED, Rule.HEADS, Rule.KV_HEADS)
_MLP = (Rule.COLUMN, Rule.GATE_UP)


@dataclass(frozen=True)
class UnitGroup:
    """Units of one block that are pruned alike: key/value heads with their query heads, or hidden units of an MLP.

    Attributes:
        block: Name of the block.
        kind: ``heads`` or ``hidden``.
        columns: Modules that compute the units, with their rules.
        rows: Modules that read the units.
        count: Number of units.
        width: Number of features of a head; 1 for hidden units.
        ratio: Number of query heads that share a key/value head.
    """

    block: str
    kind: str
    columns: tuple[tuple[str, Rule], ...]
    rows: tuple[str, ...]
    count: int
    width: int = 1
    ratio: int = 1

    def segments(self, rule: Rule, units: Tensor) -> list[Tensor]:
        """Returns the output features of a column module that belong to units, in each fused part of the module."""
        width, count = self.width, self.count
        starts = {
            Rule.COLUMN: [(0, 1)],
            Rule.GATE_UP: [(0, 1), (count, 1)],
            Rule.HEADS: [(0, self.ratio * width)],
            Rule.KV_HEADS: [(0, width)],
            Rule.QKV: [(part * count * width, width) for part in range(3)],
            Rule.QKV_BY_HEAD: [(0, 3 * width)],
            Rule.QKV_BY_GROUP: [(0, (self.ratio + 2) * width)],
            Rule.QKV_GROUPED: [
                (0, self.ratio * width),
                (self.ratio * count * width, width),
                ((self.ratio + 1) * count * width, width),
            ],
        }[rule]
        return [offset + _spread(units, size) for offset, size in starts]

    def inputs(self, units: Tensor) -> Tensor:
        """Returns the input features of a row module that belong to units."""
        return _spread(units, self.ratio * self.width)


def _spread(units: Tensor, width: int) -> Tensor:
    return (units[:, None] * width + torch.arange(width)).flatten()


def find_units(model: nn.Module, plan: ParallelPlan, kind: str) -> list[UnitGroup]:
    """Returns the groups of units of each block.

    Args:
        model: Model; it may be on the meta device.
        plan: Parallel plan of the model.
        kind: ``heads`` or ``hidden``.

    Raises:
        DloError: If the plan has no rules that say where the units are.
    """
    modules = dict(model.named_modules())
    attention = plan.attention_names(model)
    groups = []
    for block in plan.block_names(model):
        names = [name for name in modules if name.startswith(f"{block}.") and _has_weight(modules[name])]
        inside = [name for name in names if any(name.startswith(f"{part}.") for part in attention)]
        is_heads = kind == "heads"
        own, rules = (inside, _ATTENTION) if is_heads else ([name for name in names if name not in inside], _MLP)
        columns = tuple((name, plan.rule_for(name)) for name in own if plan.rule_for(name) in rules)
        rows = tuple(name for name in own if plan.rule_for(name) is Rule.ROW)
        if not columns or not rows:
            raise DloError(
                f"prune: the plan of {type(model).__name__} must have tensor rules for --{kind}, got none in {block};"
                " prune blocks, or add the rules to the task's parallel_plan"
            )
        features = {_features(modules[name])[1] for name in rows}
        if is_heads:
            groups.append(_heads(model, block, columns, rows, attention))
        elif len(features) == 1:
            groups.append(UnitGroup(block, kind, columns, rows, features.pop()))
        else:
            raise DloError(
                f"prune: a block must have one MLP for --hidden, got layers of {sorted(features)} inputs in {block};"
                " prune heads or blocks"
            )
    return groups


def _has_weight(module: nn.Module) -> bool:
    weight = module._parameters.get("weight")
    return weight is not None and weight.ndim == 2


def _features(module: nn.Module) -> tuple[int, int]:
    """Returns the numbers of output and input features."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    rows, columns = weight.shape
    return (columns, rows) if is_conv1d(module) else (rows, columns)


def _heads(
    model: nn.Module, block: str, columns: tuple[tuple[str, Rule], ...], rows: tuple[str, ...], attention: list[str]
) -> UnitGroup:
    owner = next(name for name in attention if rows[0].startswith(f"{name}."))
    around = [model.get_submodule(owner), *model.get_submodule(owner).modules()]
    features = _features(model.get_submodule(rows[0]))[1]
    width = head_width(rows[0], around, features)
    heads = features // width
    by_rule = {rule: name for name, rule in columns}
    count = heads
    if Rule.KV_HEADS in by_rule:
        count = _features(model.get_submodule(by_rule[Rule.KV_HEADS]))[0] // width
    for rule in (Rule.QKV_GROUPED, Rule.QKV_BY_GROUP):
        if rule in by_rule:
            configs: list[Any] = [module.config for module in around if hasattr(module, "config")]
            count = kv_heads(by_rule[rule], [*around, *configs])
    return UnitGroup(block, "heads", columns, rows, count, width, heads // count)


def unit_scores(group: UnitGroup, model: nn.Module, weights: Mapping[str, Tensor]) -> Tensor:
    """Returns the score of each unit: the norm of the weights that compute it, times the norm of those that read it.

    Args:
        group: Units.
        model: Model, for the layout of its layers.
        weights: Full weights of the task by name.

    Returns:
        float32 scores, ``[count]``.
    """
    every = torch.arange(group.count)
    written, read = torch.zeros(group.count), torch.zeros(group.count)
    for name, rule in group.columns:
        weight = _as_rows(model, name, weights).float().square().sum(1)
        for segment in group.segments(rule, every):
            written += weight[segment].view(group.count, -1).sum(1)
    for name in group.rows:
        weight = _as_rows(model, name, weights).float().square().sum(0)
        read += weight[group.inputs(every)].view(group.count, -1).sum(1)
    return written.sqrt() * read.sqrt()


def _as_rows(model: nn.Module, name: str, weights: Mapping[str, Tensor]) -> Tensor:
    """Returns a weight as [out, in]."""
    weight = weights[f"{_MODEL}{name}.weight"]
    return weight.T if is_conv1d(model.get_submodule(name)) else weight


def kept_units(scores: Tensor, keep: int) -> Tensor:
    """Returns the indices of the units with the largest scores, ascending; of equal ones the first are kept."""
    order = scores.argsort(descending=True, stable=True)
    return order[:keep].sort().values


def remove_units(weights: dict[str, Tensor], group: UnitGroup, model: nn.Module, keep: Tensor) -> None:
    """Removes all other units of a group from the weights, in place.

    Args:
        weights: Full weights of the task by name.
        group: Units.
        model: Model, for the layout of its layers.
        keep: Indices of the units to keep, ascending.
    """
    for name, rule in group.columns:
        features = torch.cat(group.segments(rule, keep))
        dim = 1 if is_conv1d(model.get_submodule(name)) else 0
        weights[f"{_MODEL}{name}.weight"] = weights[f"{_MODEL}{name}.weight"].index_select(dim, features)
        if f"{_MODEL}{name}.bias" in weights:
            weights[f"{_MODEL}{name}.bias"] = weights[f"{_MODEL}{name}.bias"][features]
    for name in group.rows:
        dim = 0 if is_conv1d(model.get_submodule(name)) else 1
        weight = weights[f"{_MODEL}{name}.weight"]
        weights[f"{_MODEL}{name}.weight"] = weight.index_select(dim, group.inputs(keep))


def block_scores(model: nn.Module, plan: ParallelPlan, weights: Mapping[str, Tensor]) -> Tensor:
    """Returns the score of each block: the norm of the weights that write to the residual stream.

    Those are the row projections of the plan; all weights of the block where it has none.
    """
    scores = []
    for block in plan.block_names(model):
        names = [name for name, part in model.named_modules() if name.startswith(f"{block}.") and _has_weight(part)]
        rows = [name for name in names if plan.rule_for(name) is Rule.ROW] or names
        scores.append(sum(float(weights[f"{_MODEL}{name}.weight"].float().square().sum()) for name in rows) ** 0.5)
    return torch.tensor(scores)


def remove_blocks(weights: dict[str, Tensor], blocks: Sequence[str], keep: Sequence[int]) -> None:
    """Removes blocks from the weights, in place, and renumbers the others.

    Args:
        weights: Full weights of the task by name.
        blocks: Names of the blocks, which end in their numbers, in order.
        keep: Positions of the blocks to keep, ascending.
    """
    parents = {name.rpartition(".")[0] for name in blocks}
    if len(parents) != 1 or not all(name.rpartition(".")[2].isdigit() for name in blocks):
        raise DloError(
            f"prune: blocks must be in one list for --blocks, got {len(parents)} lists, such as {blocks[0]}; prune"
            " heads or hidden units"
        )
    parent = parents.pop()
    moved = {}
    for name in list(weights):
        old = next((old for old, block in enumerate(blocks) if name.startswith(f"{_MODEL}{block}.")), None)
        if old is not None:
            value, rest = weights.pop(name), name.removeprefix(_MODEL + blocks[old])
            if old in keep:
                moved[f"{_MODEL}{parent}.{keep.index(old)}{rest}"] = value
    weights |= moved


def channel_scores(group: ChannelGroup, weights: Mapping[str, Tensor]) -> Tensor:
    """Returns the score of each channel: the product of its norms' scales, times the norm of the weights that read it.

    Without norms, the norm of the weights that compute it takes the place of their scales.

    Args:
        group: Channels.
        weights: Full weights of the task by name.

    Returns:
        float32 scores, ``[count]``.
    """
    score, scaled = torch.ones(group.count), False
    for name in group.channelwise:
        weight = weights.get(f"{_MODEL}{name}.weight")
        if weight is not None:
            score = score * weight.float().flatten(1).norm(dim=1) if weight.ndim > 1 else score * weight.float().abs()
            scaled = scaled or weight.ndim == 1
    if not scaled:
        score = score * weights[f"{_MODEL}{group.writers[0]}.weight"].float().flatten(1).norm(dim=1)
    read = [weights[f"{_MODEL}{name}.weight"].float().transpose(0, 1).flatten(1) for name in group.readers]
    return score * torch.cat(read, 1).norm(dim=1)


def remove_channels(weights: dict[str, Tensor], group: ChannelGroup, keep: Tensor) -> None:
    """Removes all other channels of a group from the weights and buffers, in place.

    Args:
        weights: Full weights of the task by name.
        group: Channels.
        keep: Indices of the channels to keep, ascending.
    """
    for name in (*group.writers, *group.channelwise):
        for key in ("weight", "bias", "running_mean", "running_var"):
            if f"{_MODEL}{name}.{key}" in weights:
                weights[f"{_MODEL}{name}.{key}"] = weights[f"{_MODEL}{name}.{key}"].index_select(0, keep)
    for name in group.readers:
        weights[f"{_MODEL}{name}.weight"] = weights[f"{_MODEL}{name}.weight"].index_select(1, keep)


def prune_channels(weights: dict[str, Tensor], groups: Sequence[ChannelGroup], counts: Sequence[int]) -> str:
    """Removes the channels with the smallest scores from the weights, in place; returns a description.

    Args:
        weights: Full weights of the task by name.
        groups: Groups of channels of the model.
        counts: Number of channels to keep of each group.

    Raises:
        DloError: If no channel is removed.
    """
    before, after = sum(group.count for group in groups), sum(counts)
    if after >= before or any(not 0 < count <= group.count for group, count in zip(groups, counts, strict=True)):
        raise DloError(
            f"prune: --channels must remove at least one of {before} channels, got {after} in the smaller model, which"
            " rounds its numbers; set a larger part"
        )
    scores = [channel_scores(group, weights) for group in groups]  # Of the weights before any is removed.
    for group, score, count in zip(groups, scores, counts, strict=True):
        remove_channels(weights, group, kept_units(score, count))
    return f"channels: {before} -> {after} in {len(groups)} groups of {len({g.block for g in groups})} blocks"
