"""Smaller model of a run: removes units and blocks, and writes its weights and its config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor

from dlo_framework.checkpoint import load, save
from dlo_framework.checkpoint.loading import as_lazy_state_dict
from dlo_framework.cli.config_scan import ConfigScan
from dlo_framework.cli.lightning_cli import DloCLI
from dlo_framework.errors import DloError, shown_names
from dlo_framework.run_setup import check_parts, find_start_checkpoint
from dlo_framework.task import Task
from dlo_framework.testing.training import silence_lightning
from dlo_plugins.pruning.structured import (
    block_scores,
    find_units,
    kept_units,
    prune_channels,
    remove_blocks,
    remove_units,
    unit_scores,
)

#: Prefix of the model's names in a task's checkpoint.
_MODEL = "model."


class PrunedRun:
    """Task and checkpoint of a run that is not trained.

    Args:
        found: Scanned command line, with ``fit`` as its command.
    """

    def __init__(self, found: ConfigScan) -> None:
        silence_lightning()
        cli = DloCLI(found, "dlo prune")
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
        groups = twin.channel_groups() if "channels" in amounts else []
        sizes, lines = prune_weights(weights, twin, amounts)
        arguments = task.resized(content, **sizes)
        smaller = self._build(arguments)
        if groups:
            counts = [group.count for group in smaller.channel_groups()]
            lines.append(prune_channels(weights, groups, counts, _MODEL))
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
            chosen = kept_units(unit_scores(group, model, weights, _MODEL), keep)
            remove_units(weights, group, model, chosen, _MODEL)
        if kind == "heads":
            sizes |= {"heads": keep * groups[0].ratio, "kv_heads": keep, "head_width": groups[0].width}
        else:
            sizes["hidden"] = keep
        lines.append(f"{kind}: {count} -> {keep} in each of {len(groups)} blocks")
    if "blocks" in amounts:
        blocks = plan.block_names(model)
        is_list = isinstance(amounts["blocks"], list)
        scores = None if is_list else block_scores(model, plan, weights, _MODEL)
        kept = _kept_blocks(amounts["blocks"], blocks, scores)
        remove_blocks(weights, blocks, kept, _MODEL)
        sizes["blocks"] = len(kept)
        gone = [number for number in range(len(blocks)) if number not in kept]
        lines.append(f"blocks: {len(blocks)} -> {len(kept)}, without {', '.join(map(str, gone))}")
    return sizes, lines


def _kept_blocks(amount: float | list[int], blocks: list[str], scores: Tensor | None) -> list[int]:
    if scores is None:
        assert isinstance(amount, list)
        wrong = next((number for number in amount if number >= len(blocks)), None)
        if wrong is not None or len(set(amount)) >= len(blocks):
            raise DloError(
                f"prune: --blocks must be numbers from 0 to {len(blocks) - 1}, not all of them, got"
                f" {','.join(map(str, amount))}; leave some"
            )
        return [number for number in range(len(blocks)) if number not in amount]
    assert isinstance(amount, float)
    keep = len(blocks) - round(amount * len(blocks))
    if not 0 < keep < len(blocks):
        raise DloError(
            f"prune: --blocks must remove at least one and leave one of {len(blocks)}, got {amount:.0%}, which leaves"
            f" {keep}; set {1 / len(blocks):.0%} or more"
        )
    return [int(number) for number in kept_units(scores, keep)]


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
