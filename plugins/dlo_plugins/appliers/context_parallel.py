"""Context parallelism as an applier: the attention of a causal language model runs over a sequence shared by ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dlo_framework.applier import Applier, Phase
from dlo_framework.errors import DloError
from dlo_framework.plan import ParallelPlan
from dlo_plugins.context import interface
from dlo_plugins.context.sequence import Method, SharedSequence
from dlo_plugins.context.ulysses import heads_message

_AXIS = "cp"
_METHODS = ("ring", "ulysses")


class ContextParallel(Applier):
    """Shares the sequence of a causal language model among the ranks of the mesh's `cp` axis.

    Each rank holds two chunks of each sequence, one from its head and one from its tail, so that all have the same
    work, and activations a rank fall as 1 / cp. Documents packed into a row do not see each other, padding is not
    seen, and sliding windows hold across ranks. A length that `2 * cp` does not divide is padded; the padding has no
    target. Dropout of attention weights and soft-capped scores are computed without a fused kernel, and slowly.

    For models of transformers, through its AttentionInterface: causal language models whose blocks mix positions in
    attention alone. Others, vision models among them, are refused. In compiled blocks attention breaks the graph.

    Args:
        method: `ring`: keys and values go round the ranks while blocks of attention are computed, for any number of
            heads; `ulysses`: an all-to-all deals out heads in place of positions, which the ranks must divide.

    Raises:
        DloError: for another method.
    """

    phase: ClassVar[Phase] = Phase.CONTEXT

    def __init__(self, method: Method = "ring") -> None:
        if method not in _METHODS:
            raise DloError(f"method is ring or ulysses, given {method!r}")
        self.method: Method = method
        self.sequence: SharedSequence | None = None
        self._module: nn.Module | None = None
        self._original = "sdpa"

    def check(self, module: nn.Module, plan: ParallelPlan, cp: int, tp: int = 1) -> None:
        """Checks that a model's sequence can be shared, before processes start; it may be on the meta device.

        Args:
            module: the model.
            plan: of the model.
            cp: ranks of the axis.
            tp: ranks among which its heads are shared before.

        Raises:
            DloError: if it cannot; with the nearest number of ranks that works.
        """
        if cp == 1:
            return
        interface.check_model(module, plan.attention_names(module))
        for model in interface.outermost(module):
            heads = getattr(model.config.get_text_config(), "num_attention_heads", None)
            if self.method == "ulysses" and heads is not None and (heads // tp) % cp:
                raise DloError(heads_message(heads // tp, cp))

    def apply(self, module: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
        """Makes the attention modules of `module` compute over the sequence shared by the mesh's `cp` ranks.

        Does nothing on a mesh without that axis, or with one rank of it.

        Raises:
            DloError: if attention cannot be reached.
        """
        if _AXIS not in (mesh.mesh_dim_names or ()) or mesh[_AXIS].size() == 1:
            return
        models = interface.outermost(module)
        self._module = module
        self._original = next((model.config._attn_implementation or "sdpa" for model in models), "sdpa")
        self.sequence = SharedSequence(mesh[_AXIS].get_group(), self.method)
        interface.share_attention(module, plan.attention_names(module), self.sequence)

    def shard_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns this rank's part of a batch, which all ranks of the axis have alike.

        Its documents and padding are noted for the model's attention, until the next batch.

        Args:
            batch: a dict with `input_ids` [B, L]. All tensors of that shape are cut: `labels` (already shifted by one),
                `position_ids` (0 at the start of each document; 0, 1, ... if there are none), `attention_mask` (0 for
                padding); the rest stays as it is.

        Raises:
            DloError: for another kind of batch.
        """
        return batch if self.sequence is None else self.sequence.shard(batch)

    def counted(self, batch: Any) -> Any:
        """Returns a batch of the CPU that takes with it to the device what :meth:`shard_batch` would wait for."""
        return batch if self.sequence is None else self.sequence.counted(batch)

    def select_rows(self, first: int, count: int) -> None:
        """Says which rows of the batch the model is given next: those of a pipeline's micro-batch.

        To be called before each forward of a micro-batch, and before its backward where activations are recomputed.
        """
        if self.sequence is not None:
            self.sequence.select_rows(first, count)

    def gather(self, part: Tensor, dim: int = 1) -> Tensor:
        """Returns the whole of a tensor of which each rank has the part of its positions; without gradients.

        A batch that was padded to be shared comes back with its padding.
        """
        return part if self.sequence is None else self.sequence.gather(part, dim)

    @contextlib.contextmanager
    def local(self) -> Iterator[None]:
        """Lets the model run on whole sequences inside the block, each rank for itself: to generate text, say."""
        if self._module is None:
            yield
            return
        with interface.own_attention(self._module, self._original):
            yield
