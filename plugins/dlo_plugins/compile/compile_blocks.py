"""Compiles a model's blocks one by one with torch.compile, in place, and undoes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dlo_framework.errors import DloError
from dlo_framework.plan import Applier, ParallelPlan, Phase
from dlo_framework.task import Task, model_and_plan
from dlo_framework.task_abilities import CompileTarget


class CompileBlocks(Applier):
    """Compiles each block of the plan, after recomputation is set up and before the block is sharded.

    Blocks of one class share their compiled code, so that only the first is compiled. Names of parameters do not
    change. The callback Compile compiles under any strategy and reports on it; this applier compiles at the point of
    the order that a mesh needs.

    Args:
        backend: Backend of torch.compile.
        mode: Mode of torch.compile: `default` or `max-autotune-no-cudagraphs`. Modes that replay CUDA graphs are
            errors: a graph keeps its inputs and outputs in its own memory, where the next micro-batch of a pipeline or
            of an accumulation overwrites them, and sharded parameters are gathered at another address for each use.
        fullgraph: Whether a break in a block's graph is an error.
        dynamic: Whether shapes may change without a new compilation; by default torch detects it.

    Raises:
        DloError: The mode replays CUDA graphs.
    """

    phase: ClassVar[Phase] = Phase.COMPILE

    def __init__(
        self,
        backend: str = "inductor",
        mode: str | None = None,
        fullgraph: bool = False,
        dynamic: bool | None = None,
    ) -> None:
        if mode in CUDA_GRAPHS:
            raise DloError(
                f"mode must not replay CUDA graphs, got {mode}: the next micro-batch overwrites their memory, and"
                f" sharded parameters move between replays; set mode: {CUDA_GRAPHS[mode]}"
            )
        self.backend, self.mode, self.fullgraph, self.dynamic = backend, mode, fullgraph, dynamic

    def apply(self, module: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
        """Compiles the blocks in place."""
        for name in plan.block_names(module):
            block = module.get_submodule(name)
            compile_in_place(
                block, backend=self.backend, mode=self.mode, fullgraph=self.fullgraph, dynamic=self.dynamic
            )


#: Modes that replay CUDA graphs on an accelerator, each with the same mode without CUDA graphs.
CUDA_GRAPHS = {"reduce-overhead": "default", "max-autotune": "max-autotune-no-cudagraphs"}


def modules_to_compile(pl_module: LightningModule, scope: str) -> dict[str, nn.Module]:
    """Returns the modules to compile by name, relative to ``pl_module``.

    Args:
        pl_module: Module with its model built.
        scope: Scope as in :class:`~dlo_plugins.compile.callback.Compile`.

    Raises:
        DloError: If no module can be compiled.
    """
    if scope == "blocks":
        root, plan = model_and_plan(pl_module)
        names = plan.block_names(root)
        if not names:
            raise DloError(
                f"Compile: scope: blocks needs a parallel plan with blocks, got none from {type(pl_module).__name__};"
                " name them in Task.parallel_plan, or set scope: model"
            )
        prefix = "model." if isinstance(pl_module, Task) else ""
        return {prefix + name: root.get_submodule(name) for name in names}
    if isinstance(pl_module, Task):
        target = pl_module.find_ability(CompileTarget)
        called = pl_module.model if target is None else target.compile_target()
        return {next(name for name, module in pl_module.named_modules() if module is called): called}
    parts = dict(_children(pl_module))
    if not parts:
        raise DloError(
            "Compile: a LightningModule must have a child module with parameters, as its own steps are not compiled,"
            f" got {type(pl_module).__name__} without one; move the network into a child module such as self.net"
        )
    return parts


def _children(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yields the outermost modules that have parameters and can be called, which a list of modules cannot."""
    for name, child in module.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):
            yield from _children(child, f"{prefix}{name}.")
        elif next(child.parameters(), None) is not None:
            yield prefix + name, child


def compile_in_place(module: nn.Module, **options: Any) -> None:
    """Compiles a module's calls as ``Module.compile`` does, but also for torch's own classes (``nn.Sequential``).

    torch up to 2.13 does not compile its own code, unless other code calls it.

    Args:
        module: Module to compile.
        **options: Options of :func:`torch.compile`.
    """
    if not type(module).forward.__module__.startswith("torch."):
        module.compile(**options)
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    set_compiled_call(module, torch.compile(call, **options))


def compiled_call(module: nn.Module) -> Callable[..., Any] | None:
    """Returns the compiled function that a module compiled in place calls instead of its own code.

    torch 2.11 to 2.15 keep it in ``Module._compiled_call_impl``, which is private: ``Module.compile`` has no undo.
    """
    return module._compiled_call_impl


def set_compiled_call(module: nn.Module, call: Callable[..., Any] | None) -> None:
    """Makes a module call ``call``, a value of :func:`compiled_call`, or its own code if None."""
    if call is None:
        module.__dict__.pop("_compiled_call_impl", None)
    else:
        module.__dict__["_compiled_call_impl"] = call


def moving_parameter(parts: dict[str, nn.Module]) -> str | None:
    """Returns the name of a parameter that a strategy gathers into other memory for each use; None if there is none.

    Between uses, a rank holds a shard of it (FSDP2's DTensor), or no memory for it (ZeRO 3).
    """
    for prefix, part in parts.items():
        for name, parameter in part.named_parameters():
            is_sharded = isinstance(parameter, DTensor)
            if is_sharded or (not parameter.is_meta and parameter.untyped_storage().nbytes() < parameter.nbytes):
                return f"{prefix}.{name}"
    return None
