"""Recomputation of activations as an applier: full, selective, of every n-th block, with their inputs on the CPU.

Training Deep Nets with Sublinear Memory Cost. Chen, Xu, Zhang & Guestrin, 2016, arXiv 1604.06174 (`full`). Reducing
Activation Recomputation in Large Transformer Models. Korthikanti et al., 2022, arXiv 2205.05198 (`selective`): what
takes much memory for little arithmetic is computed again, and outputs of matrix products are kept. Departures: the
paper recomputes attention and keeps all that lies outside it. Here attention's outputs are kept where a fused kernel
computes it, which holds no scores, and so is what collectives have returned; norms, activation functions and dropout
are recomputed, which costs next to nothing.
"""

from __future__ import annotations

import functools
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from dlo_framework.applier import Applier, Phase
from dlo_framework.errors import DloError
from dlo_framework.plan import ParallelPlan
from dlo_plugins.fsdp.recompute import recompute

_MODES = ("full", "selective")
#: What stays where it is when inputs go to the CPU.
_STAYS = ("cpu", "meta")
#: Operators whose outputs `selective` keeps: products of activations with weights; fused attention, which keeps
#: no scores; and collectives, since what has passed between ranks is not to pass again. Products of activations with
#: each other, attention's where it is written out, are recomputed. By name, as torch 2.11 lacks some.
_KEPT_NAMES = (
    *("aten.mm", "aten.addmm", "aten.convolution", "aten._grouped_mm", "aten._scaled_mm"),
    *("aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_flash_attention_for_cpu"),
    *("aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_cudnn_attention"),
    *("aten._scaled_dot_product_fused_attention_overrideable", "aten._flash_attention_forward"),
    *("torch_attn._varlen_attn", "_c10d_functional.all_reduce", "_c10d_functional.all_gather_into_tensor"),
    *("_c10d_functional.reduce_scatter_tensor", "_c10d_functional.all_to_all_single", "_c10d_functional.wait_tensor"),
)


class ActivationCheckpoint(Applier):
    """Computes activations inside the plan's blocks again in backward, in place of keeping them.

    Gradients are exactly those without it, dropout included, and names of parameters stay. Memory of activations falls
    to the blocks' inputs and the inside of one block, for a second forward of each (`full`); or to the outputs of their
    matrix products, attention and collectives, for next to none of the arithmetic and no traffic (`selective`).

    Args:
        mode: `full` keeps a block's inputs alone; `selective` outputs of matrix products, convolutions,
            fused attention without dropout and tensor parallelism's collectives too.
        every: of the blocks, each so-many-th recomputes, beginning with the first: 1 for all of them, 2 for half.
        offload: whether a block's inputs wait for backward in the CPU's memory, pinned, and on their way there beside
            what is being computed; not on a CPU.

    Raises:
        DloError: for another mode, for `every` below 1, and for `offload` with `selective`.
    """

    phase: ClassVar[Phase] = Phase.CHECKPOINT

    def __init__(self, mode: Literal["full", "selective"] = "full", every: int = 1, offload: bool = False) -> None:
        if mode not in _MODES:
            raise DloError(f"mode is full or selective, given {mode!r}")
        if every < 1:
            raise DloError(f"every is 1 for each block, 2 for every other one and so on, given {every}; use 1")
        if offload and mode == "selective":
            raise DloError(
                "offload takes the blocks' inputs to the CPU, and mode selective keeps most of the memory inside the"
                " blocks; use mode full with it"
            )
        self.mode, self.every, self.offload = mode, every, offload

    def apply(self, module: nn.Module, mesh: DeviceMesh | None, plan: ParallelPlan) -> None:
        """Lets the plan's blocks recompute, in place.

        Args:
            module: the model; on the meta device too.
            mesh: is of no account.
            plan: names the blocks.

        Raises:
            DloError: if the plan has none.
        """
        blocks = [module.get_submodule(name) for name in plan.block_names(module)]
        if not blocks:
            raise DloError(
                f"ActivationCheckpoint recomputes a plan's blocks, and that of {type(module).__name__} has none; name"
                " them in Task.parallel_plan: ParallelPlan(blocks=(...))"
            )
        context_fn = None
        if self.mode == "selective":
            context_fn = functools.partial(create_selective_checkpoint_contexts, _policy)
        recompute(blocks[:: self.every], context_fn, _InputsOnCpu if self.offload else None)


def _policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Says what is kept. Compiled code may also keep what costs it nothing."""
    is_kept = f"{op.namespace}.{op.overloadpacket.__name__}" in _KEPT_NAMES and not _drops(op, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _drops(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator draws random numbers: if it were not called again, later ones would draw those."""
    names = [argument.name for argument in op._schema.arguments]
    if "dropout_p" not in names:
        return False
    at = names.index("dropout_p")
    return bool(args[at] if at < len(args) else kwargs.get("dropout_p", 0.0))


class _InputsOnCpu(saved_tensors_hooks):
    """Puts those of a block's inputs that need gradients aside in the CPU's memory; entered around its checkpoint.

    What needs none, such as rotary angles and masks, is shared by all blocks and stays.

    Args:
        inputs: arguments of the block.
    """

    def __init__(self, inputs: Any) -> None:
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        moving = {tensor.data_ptr() for tensor in tensors if tensor.requires_grad and tensor.device.type not in _STAYS}

        def pack(tensor: Tensor) -> Tensor | _OnCpu:
            return _OnCpu(tensor) if tensor.data_ptr() in moving else tensor

        def unpack(held: Tensor | _OnCpu) -> Tensor:
            return held if isinstance(held, Tensor) else held.back()

        super().__init__(pack, unpack)


class _OnCpu:
    """A tensor that has gone to the CPU's memory.

    Args:
        tensor: which is copied beside what its stream computes, and freed once that is done.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._device, self._copied = tensor.device, None
        pinned = tensor.device.type not in _STAYS
        self._held = torch.empty_like(tensor, device="cpu", pin_memory=pinned)
        if not pinned:
            self._held.copy_(tensor)
            return
        device: Any = torch.get_device_module(tensor.device)
        beside = _stream_of(tensor.device)
        beside.wait_stream(device.current_stream(tensor.device))
        with device.stream(beside):
            self._held.copy_(tensor, non_blocking=True)
            self._copied = beside.record_event()
        tensor.record_stream(beside)

    def back(self) -> Tensor:
        """Returns the tensor where it was."""
        if self._copied is not None:
            device: Any = torch.get_device_module(self._device)
            device.current_stream(self._device).wait_event(self._copied)
        return self._held.to(self._device, non_blocking=True)


@functools.lru_cache
def _stream_of(device: torch.device) -> Any:
    """Returns the stream on which a device's tensors are copied."""
    module: Any = torch.get_device_module(device)
    return module.Stream(device)
