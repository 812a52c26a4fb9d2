"""Old import paths of public classes, which work for one version: imports of them give the modules' new places.

The ``config.yaml`` of a run, and scripts, name classes by their paths.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

#: Old path of a module, or of a package with all its modules, and the new one.
MOVED = {
    "dlo_framework.applier": "dlo_framework.plan",
    "dlo_framework.cli.command_parser": "dlo_framework.cli.config_scan",
    "dlo_framework.attention": "dlo_framework.models.attention",
    "dlo_framework.experts": "dlo_framework.models.experts",
    "dlo_framework.four_bit_linear": "dlo_framework.models.four_bit_linear",
    "dlo_framework.model_sizes": "dlo_framework.models.model_sizes",
    "dlo_framework.recompute": "dlo_framework.models.recompute",
    "dlo_framework.resume": "dlo_framework.run.resume",
    "dlo_framework.runs": "dlo_framework.run.runs",
    "dlo_plugins.appliers.activation_checkpoint": "dlo_plugins.memory.activation_checkpoint",
    "dlo_plugins.appliers.compile_blocks": "dlo_plugins.compile.compile_blocks",
    "dlo_plugins.appliers.context_parallel": "dlo_plugins.parallel.context.context_parallel",
    "dlo_plugins.appliers.expert_parallel": "dlo_plugins.parallel.experts.expert_parallel",
    "dlo_plugins.appliers.fully_shard": "dlo_plugins.parallel.fsdp.fully_shard",
    "dlo_plugins.appliers.tensor_parallel": "dlo_plugins.parallel.tensor.tensor_parallel",
    "dlo_plugins.callbacks.batch_mix": "dlo_plugins.images.batch_mix",
    "dlo_plugins.callbacks.compile": "dlo_plugins.compile.callback",
    "dlo_plugins.callbacks.difficulty_order": "dlo_plugins.curriculum.difficulty_order",
    "dlo_plugins.callbacks.diloco": "dlo_plugins.compression.diloco",
    "dlo_plugins.callbacks.distill": "dlo_plugins.distill.callback",
    "dlo_plugins.callbacks.dynamic_batch_size": "dlo_plugins.batches.dynamic_batch_size",
    "dlo_plugins.callbacks.expert_balance": "dlo_plugins.parallel.experts.expert_balance",
    "dlo_plugins.callbacks.freeze": "dlo_plugins.curriculum.freeze",
    "dlo_plugins.callbacks.gradient_compression": "dlo_plugins.compression.gradient_compression",
    "dlo_plugins.callbacks.gradients": "dlo_plugins.gradients.clipping_and_noise",
    "dlo_plugins.callbacks.layer_drop": "dlo_plugins.curriculum.layer_drop",
    "dlo_plugins.callbacks.low_precision": "dlo_plugins.quantise.low_precision",
    "dlo_plugins.callbacks.lr_curves": "dlo_plugins.schedules.lr_curves",
    "dlo_plugins.callbacks.lr_finder": "dlo_plugins.schedules.lr_finder",
    "dlo_plugins.callbacks.micro_batch_finder": "dlo_plugins.batches.micro_batch_finder",
    "dlo_plugins.callbacks.one_cycle": "dlo_plugins.schedules.lr_curves",
    "dlo_plugins.callbacks.optimizer_in_backward": "dlo_plugins.memory.optimizer_in_backward",
    "dlo_plugins.callbacks.pipeline_timeline": "dlo_plugins.parallel.pipeline.timeline",
    "dlo_plugins.callbacks.progressive_resizing": "dlo_plugins.images.progressive_resizing",
    "dlo_plugins.callbacks.prune": "dlo_plugins.prune.callback",
    "dlo_plugins.callbacks.quantise": "dlo_plugins.quantise.callback",
    "dlo_plugins.callbacks.rectangular_validation": "dlo_plugins.images.rectangular_validation",
    "dlo_plugins.callbacks.rotor_callback": "dlo_plugins.memory.rotor_callback",
    "dlo_plugins.callbacks.schedule_free": "dlo_plugins.schedules.schedule_free",
    "dlo_plugins.callbacks.sequence_length": "dlo_plugins.curriculum.sequence_length",
    "dlo_plugins.callbacks.start_from": "dlo_plugins.weights.start_from",
    "dlo_plugins.callbacks.stochastic_depth": "dlo_plugins.curriculum.layer_drop",
    "dlo_plugins.callbacks.sweep_trial": "dlo_plugins.sweep.sweep_trial",
    "dlo_plugins.callbacks.time_to_target": "dlo_plugins.profile.time_to_target",
    "dlo_plugins.callbacks.token_drop": "dlo_plugins.curriculum.token_drop",
    "dlo_plugins.pipeline.actions": "dlo_plugins.parallel.pipeline.pipeline_schedules",
    "dlo_plugins.pipeline.pipeline_schedules": "dlo_plugins.parallel.pipeline.pipeline_schedules",
    "dlo_plugins.profiling.energy_callback": "dlo_plugins.profile.energy",
    "dlo_plugins.profiling.profile_callback": "dlo_plugins.profile.callback",
    "dlo_plugins.strategies.deepspeed": "dlo_plugins.deepspeed.strategy",
    "dlo_plugins.strategies.fsdp": "dlo_plugins.parallel.fsdp.strategy",
    "dlo_plugins.strategies.mesh": "dlo_plugins.parallel.mesh.strategy",
    "dlo_plugins.strategies.zero": "dlo_plugins.parallel.zero.strategy",
    "dlo_tasks.llm": "dlo_tasks.language",
}


class MovedModules(MetaPathFinder, Loader):
    """Finder of modules by their old paths, with a warning that names the new one."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns a spec for an old path, and for a package that held such modules; None for any other name."""
        if new_path(fullname) or any(old.startswith(f"{fullname}.") for old in MOVED):
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Puts the module at the new path in place of the old one."""
        new = new_path(module.__name__)
        if new is not None:
            message = f"{module.__name__} has moved to {new}; write that: the old path ends with version 0.4"
            warnings.warn(message, FutureWarning, stacklevel=2)
            sys.modules[module.__name__] = importlib.import_module(new)


def new_path(module: str) -> str | None:
    """Returns the new path of a module that moved, itself or with its package; None for any other."""
    package = module
    while package and package not in MOVED:
        package = package.rpartition(".")[0]
    return MOVED[package] + module[len(package) :] if package else None
