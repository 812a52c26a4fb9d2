"""Compiles a model's blocks one by one with torch.compile."""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dlo_framework.applier import Applier, Phase
from dlo_framework.errors import DloError
from dlo_framework.plan import ParallelPlan
from dlo_plugins.appliers.module_compilation import CUDA_GRAPHS, compile_in_place


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
