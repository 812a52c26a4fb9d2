"""torch.compile of a model's blocks, one by one."""

from __future__ import annotations

from typing import ClassVar

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dlo_framework.applier import Applier, Phase
from dlo_framework.errors import DloError
from dlo_framework.plan import ParallelPlan
from dlo_plugins.compile_parts import CUDA_GRAPHS, compile_in_place


class CompileBlocks(Applier):
    """Compiles each of the plan's blocks, after recomputation is set up and before it is sharded.

    Blocks of one class share their compiled code, so that one is compiled and the others find it. Names of parameters
    stay. The callback Compile compiles under any strategy, and reports on it; this is the order that a mesh needs.

    Args:
        backend: of torch.compile.
        mode: of torch.compile: `default` or `max-autotune-no-cudagraphs`. Those that replay CUDA graphs are refused:
            a graph keeps what it returns and reads in its own memory, where the next micro-batch of a pipeline or of
            accumulated gradients overwrites it, and sharded parameters are gathered elsewhere for each use.
        fullgraph: whether a break in a block's graph is an error.
        dynamic: whether shapes may change without a new compilation; by default torch finds out.

    Raises:
        DloError: for a mode that replays CUDA graphs.
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
                "CompileBlocks replays no CUDA graphs, whose memory the next micro-batch overwrites and which sharded"
                f" parameters leave, but mode is {mode}; set mode: {CUDA_GRAPHS[mode]}"
            )
        self.backend, self.mode, self.fullgraph, self.dynamic = backend, mode, fullgraph, dynamic

    def apply(self, module: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
        """Compiles the blocks in place."""
        for name in plan.block_names(module):
            block = module.get_submodule(name)
            compile_in_place(
                block, backend=self.backend, mode=self.mode, fullgraph=self.fullgraph, dynamic=self.dynamic
            )
