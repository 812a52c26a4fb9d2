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
import weakref
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
from dlo_plugins.copy_streams import Copied, copy_streams, host_tensor
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
        offload: whether a block's inputs wait for backward in the CPU's memory, page-locked. They go there beside what
            is being computed, and come back while the block after it is computed again; not on a CPU.

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
        recompute(blocks[:: self.every], context_fn, _InputsOnCpu() if self.offload else None)


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


class _InputsOnCpu:
    """Puts those of blocks' inputs that need gradients aside in the CPU's memory, one block's after the other's.

    What needs none, such as rotary angles and masks, is shared by all blocks and stays. In backward the inputs of a
    block come back while the block after it is computed again.
    """

    def __init__(self) -> None:
        self._last: weakref.ref[_Aside] | None = None  # the block that forward came to last

    def __call__(self, inputs: Any) -> saved_tensors_hooks:
        """Returns a context, to be entered around a block's checkpoint.

        Args:
            inputs: arguments of the block.
        """
        tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
        moving = {tensor.data_ptr() for tensor in tensors if tensor.requires_grad and tensor.device.type not in _STAYS}
        aside = _Aside(self._last() if self._last is not None else None)
        self._last = weakref.ref(aside)

        def pack(tensor: Tensor) -> Tensor | _OnCpu:
            return _OnCpu(tensor, aside) if tensor.data_ptr() in moving else tensor

        def unpack(held: Tensor | _OnCpu) -> Tensor:
            return held if isinstance(held, Tensor) else held.back()

        return saved_tensors_hooks(pack, unpack)


class _Aside:
    """A block's inputs in the CPU's memory.

    Args:
        before: those of the block before it, which backward needs next; None where there is none.
    """

    def __init__(self, before: _Aside | None) -> None:
        self._before = None if before is None else weakref.ref(before)
        self.held: weakref.WeakSet[_OnCpu] = weakref.WeakSet()

    def fetch_before(self) -> None:
        """Starts to fetch the inputs of the block before."""
        before = self._before() if self._before is not None else None
        for held in () if before is None else list(before.held):
            held.fetch()


class _OnCpu:
    """A tensor that has gone to the CPU's memory.

    Args:
        tensor: which is copied beside what its stream computes, and freed once that is done.
        aside: the inputs that it is one of.
    """

    def __init__(self, tensor: Tensor, aside: _Aside) -> None:
        self._device, self._aside = tensor.device, aside
        self._held = host_tensor(tensor, tensor.device)
        self._away = copy_streams(tensor.device).down.copy(self._held, tensor.detach())
        self._back: tuple[Tensor, Copied] | None = None
        aside.held.add(self)

    def fetch(self) -> None:
        """Starts to copy the tensor to where it was, unless that has been started."""
        if self._back is None:
            self._away.wait()
            target = torch.empty_like(self._held, device=self._device)
            self._back = target, copy_streams(self._device).up.copy(target, self._held)

    def back(self) -> Tensor:
        """Returns the tensor where it was, and starts to fetch what backward needs next."""
        self.fetch()
        assert self._back is not None
        (tensor, copied), self._back = self._back, None
        copied.wait()
        self._aside.fetch_before()
        return tensor
