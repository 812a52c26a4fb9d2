"""Recomputes activations as an applier: full or selective, of every n-th block, with inputs offloaded to the CPU.

Training Deep Nets with Sublinear Memory Cost. Chen, Xu, Zhang & Guestrin, 2016, arXiv 1604.06174 (`full`).

Reducing Activation Recomputation in Large Transformer Models. Korthikanti et al., 2022, arXiv 2205.05198 (`selective`).
Departures: the paper recomputes attention and keeps everything outside it. Here outputs of fused attention kernels,
which store no scores, and outputs of collectives are kept; norms, activation functions and dropout are recomputed,
which costs next to nothing.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from dlo_framework.batches import tree_leaves
from dlo_framework.copy_streams import CopyHandle, copy_streams, empty_host_tensor
from dlo_framework.errors import DloError, check_choice, check_number
from dlo_framework.models.recompute import recompute
from dlo_framework.plan import Applier, ParallelPlan, Phase

_MODES = ("full", "selective")
#: Device types whose tensors are not offloaded.
_STAYS = ("cpu", "meta")


class ActivationCheckpoint(Applier):
    """Recomputes the activations of the plan's blocks in backward, instead of keeping them.

    Gradients are exactly those without it, also with dropout, and names of parameters do not change. `full` keeps the
    blocks' inputs and the activations of one block, at the cost of a second forward of each. `selective` keeps the
    outputs of matrix products, attention and collectives, and recomputes almost no arithmetic and no communication.

    Args:
        mode: Mode of recomputation: `full` keeps only a block's inputs; `selective` also outputs of matrix products,
            convolutions, fused attention without dropout and tensor parallelism's collectives.
        every: Interval of the blocks that recompute, beginning with the first: 1 for all of them, 2 for half.
        offload: Whether a block's inputs are kept in pinned CPU memory until backward. Copies overlap computation:
            they return while the following block is recomputed. It has no effect on a CPU.

    Raises:
        DloError: The mode is unknown, `every` is below 1, or `offload` comes with `selective`.
    """

    phase: ClassVar[Phase] = Phase.CHECKPOINT

    def __init__(self, mode: Literal["full", "selective"] = "full", every: int = 1, offload: bool = False) -> None:
        check_choice("mode", mode, _MODES, "use full for the least memory")
        check_number("every", every, "at least 1", "use 1 for all blocks, 2 for every other one")
        if offload and mode == "selective":
            raise DloError(
                "offload must come with mode full, since it moves the blocks' inputs only, got mode selective, which"
                " keeps most of its memory inside the blocks; use mode full, or leave offload out"
            )
        self.mode, self.every, self.offload = mode, every, offload

    def apply(self, module: nn.Module, mesh: DeviceMesh | None, plan: ParallelPlan) -> None:
        """Makes the plan's blocks recompute, in place.

        Args:
            module: Model, which may be on the meta device.
            mesh: Mesh, which is not used.
            plan: Plan that names the blocks.

        Raises:
            DloError: The plan has no blocks, or they recompute already in another way.
        """
        blocks = [module.get_submodule(name) for name in plan.block_names(module)]
        if not blocks:
            raise DloError(
                f"the parallel plan must name blocks for ActivationCheckpoint, got none of {type(module).__name__};"
                " name them in Task.parallel_plan: ParallelPlan(blocks=(...))"
            )
        context_fn = contexts_for(*blocks) if self.mode == "selective" else None
        recompute(blocks[:: self.every], context_fn, _InputsOnCpu() if self.offload else None)


class _InputsOnCpu:
    """Offloads those inputs of blocks that need gradients to CPU memory, block by block.

    Inputs without gradients, such as rotary angles and masks, are shared by all blocks and stay on the device. In
    backward the inputs of a block return while the block after it is recomputed.
    """

    def __init__(self) -> None:
        self._last: weakref.ref[_Aside] | None = None  # inputs of the last block of forward

    def __call__(self, inputs: Any) -> saved_tensors_hooks:
        """Returns a context to enter around a block's checkpoint.

        Args:
            inputs: Arguments of the block.
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
    """Inputs of one block in CPU memory.

    Args:
        before: Inputs of the block before, which backward needs next; None for the first block.
    """

    def __init__(self, before: _Aside | None) -> None:
        self._before = None if before is None else weakref.ref(before)
        self.held: weakref.WeakSet[_OnCpu] = weakref.WeakSet()

    def fetch_before(self) -> None:
        """Starts the copies of the previous block's inputs to the device."""
        before = self._before() if self._before is not None else None
        for held in () if before is None else list(before.held):
            held.fetch()


class _OnCpu:
    """Tensor that is copied to CPU memory.

    Args:
        tensor: Tensor on a device; the copy overlaps its stream's computation, after which its memory is freed.
        aside: Inputs of the block to which the tensor belongs.
    """

    def __init__(self, tensor: Tensor, aside: _Aside) -> None:
        self._device, self._aside = tensor.device, aside
        self._held = empty_host_tensor(tensor, tensor.device)
        self._away = copy_streams(tensor.device).down.copy(self._held, tensor.detach())
        self._back: tuple[Tensor, CopyHandle] | None = None
        aside.held.add(self)

    def fetch(self) -> None:
        """Starts the copy of the tensor back to its device, unless it has started."""
        if self._back is None:
            self._away.wait()
            target = torch.empty_like(self._held, device=self._device)
            self._back = target, copy_streams(self._device).up.copy(target, self._held)

    def back(self) -> Tensor:
        """Returns the tensor on its device, and starts the copies that backward needs next."""
        self.fetch()
        assert self._back is not None
        (tensor, copied), self._back = self._back, None
        copied.wait()
        self._aside.fetch_before()
        return tensor


#: Operators whose outputs `selective` keeps: products of activations with weights; fused attention, which stores no
#: scores; and collectives, which are not to run again. Products of activations with each other, such as unfused
#: attention's, are recomputed. Operators are given by name, as torch 2.11 lacks some.
_KEPT_NAMES = (
    *("aten.mm", "aten.addmm", "aten.convolution", "aten._grouped_mm", "aten._scaled_mm"),
    "dlo.grouped_linear",
    *("aten._scaled_dot_product_flash_attention", "aten._scaled_dot_product_flash_attention_for_cpu"),
    *("aten._scaled_dot_product_efficient_attention", "aten._scaled_dot_product_cudnn_attention"),
    *("aten._scaled_dot_product_fused_attention_overrideable", "aten._flash_attention_forward"),
    *("torch_attn._varlen_attn", "_c10d_functional.all_reduce", "_c10d_functional.all_gather_into_tensor"),
    *("_c10d_functional.reduce_scatter_tensor", "_c10d_functional.all_to_all_single", "_c10d_functional.wait_tensor"),
    *("dlo.ring_attention", "dlo.full_attention"),  # In compiled blocks under context parallelism.
)


#: Product of experts, to whose output transformers (5.24) adds a bias in place; an output that changes is not kept.
_GROUPED = "aten._grouped_mm"


def selective_contexts() -> Any:
    """Returns the contexts of a forward and of its recomputation that keep the outputs of selected operators."""
    return _contexts("")


def _contexts_without_grouped() -> Any:
    return _contexts(_GROUPED)


def _contexts(without: str) -> Any:
    forward, recomputation = create_selective_checkpoint_contexts(functools.partial(_policy, without=without))
    recomputation.__class__ = _recomputation_of(recomputation.__class__, without)
    return forward, recomputation


@functools.cache
def _recomputation_of(kind: Any, without: str) -> Any:
    """Returns torch's mode of a recomputation, by which operators that are not kept run without a look at the forward.

    From 2.14 on, torch raises if an operator runs more often than in the forward. Those of a sharded unit inside the
    block do so rightly, such as experts with a mesh of their own: it is gathered for a recomputation, and in a pipeline
    it may have been gathered before the forward. The class is set on the object: its constructor is torch's own.

    Args:
        kind: Class of the mode (torch 2.11 to 2.15: ``_CachedTorchDispatchMode``).
        without: Name of an operator that is not kept.
    """

    class Recomputation(kind):
        """Recomputation that looks up the outputs of kept operators only."""

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            """Runs an operator, or returns the output that is kept."""
            kwargs = kwargs or {}
            if _is_kept(func, without, args, kwargs):
                return super().__torch_dispatch__(func, types, args, kwargs)
            return func(*args, **kwargs)

    return Recomputation


def contexts_for(*blocks: nn.Module) -> Callable[[], Any]:
    """Returns the function of the contexts for blocks, which leaves out products whose outputs they change."""
    adds_biases = any(getattr(part, "has_bias", False) is True for block in blocks for part in block.modules())
    return _contexts_without_grouped if adds_biases else selective_contexts


def _policy(context: Any, op: Any, *args: Any, without: str = "", **kwargs: Any) -> CheckpointPolicy:
    """Returns whether an operator's output is kept; compiled code may keep further outputs."""
    is_kept = _is_kept(op, without, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _is_kept(op: Any, without: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    name = _name(op)
    return name in _KEPT_NAMES and name != without and not _drops(op, args, kwargs)


@functools.cache
def _name(op: Any) -> str:
    return f"{op.namespace}.{op.overloadpacket.__name__}"


def _drops(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns whether an operator draws random numbers, so that skipping it would shift those of later ones."""
    names = [argument.name for argument in op._schema.arguments]
    if "dropout_p" not in names:
        return False
    at = names.index("dropout_p")
    return bool(args[at] if at < len(args) else kwargs.get("dropout_p", 0.0))
