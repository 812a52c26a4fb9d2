"""Implements context parallelism as an applier, for causal language models.

transformers' models compute their attention over a shared sequence by its interfaces (version 5, tried with 5.23):
`AttentionInterface.register`, `PreTrainedModel.set_attn_implementation`, and no mask for an implementation without a
registered one (`masking_utils._preprocess_mask_arguments`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, get_args

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from dlo_framework.errors import DloError, check_choice
from dlo_framework.models.attention.attention_mask import find_heads, find_mask
from dlo_framework.models.experts.balance import find_routers, router_kind
from dlo_framework.models.hugging_face import attention_implementation, is_bidirectional
from dlo_framework.plan import Applier, ParallelPlan, Phase
from dlo_plugins.parallel.context.block_attention import Score
from dlo_plugins.parallel.context.context_sequence import ContextSequence, Method
from dlo_plugins.parallel.context.gathered_modules import Gather, GatheredModules, SharedParts, find_parts
from dlo_plugins.parallel.context.shared_attention import heads_error

_AXIS = "cp"


class ContextParallel(Applier):
    """Shards the sequences of a causal language model over the ranks of the mesh's `cp` axis.

    Each rank has two chunks of each sequence, one from its head and one from its tail, so that all ranks have the same
    work, and the activations of a rank shrink to 1 / cp. Attention is masked between documents packed into a row, and
    at padding; sliding windows extend across ranks. A length that `2 * cp` does not divide is padded; the padding has
    no target. Dropout of attention weights and soft-capped scores run without a fused kernel, which is slow.

    It works for causal language models of transformers. Attention of their AttentionInterface is shared. Modules that
    mix positions in other ways (state-space layers, linear attention, convolutions, attention with biases or masks of
    its own) get full sequences: each rank computes them in full and keeps its own positions, which is exact, but
    divides neither their computation nor their activations. Other models, such as vision models, are errors. In
    compiled blocks attention is an operator of the graph.

    Args:
        method: Method of attention. `ring`: keys and values rotate among the ranks while blocks of attention are
            computed, for any number of heads. `ulysses`: an all-to-all exchanges positions for heads, whose number
            must be divisible by the ranks.
        gather: Modules that get full sequences. `auto`: those that mix positions in other ways than by attention that
            can be shared. `all`: all that mix positions, also attention.

    Raises:
        DloError: The method is unknown.
    """

    phase: ClassVar[Phase] = Phase.CONTEXT
    axis: ClassVar[str | None] = _AXIS

    def __init__(self, method: Method = "ring", gather: Gather = "auto") -> None:
        check_choice("method", method, get_args(Method), "use ring for any number of heads")
        check_choice("gather", gather, get_args(Gather), "use auto to share all attention that can be")
        self.method: Method = method
        self.gathers: Gather = gather
        self.sequence: ContextSequence | None = None
        self._module: nn.Module | None = None
        self._gathering: GatheredModules | None = None
        self._original = "sdpa"
        self._runs_full_sequences = False
        self._shares = False

    def check(self, module: nn.Module, plan: ParallelPlan, cp: int, tp: int = 1) -> None:
        """Checks that a model's sequence can be shared, before processes start; it may be on the meta device.

        Args:
            module: Model.
            plan: Plan of the model.
            cp: Number of ranks of the axis.
            tp: Number of ranks over which tensor parallelism divides its heads.

        Raises:
            DloError: The model cannot be sharded so; the message computes the nearest number of ranks that works.
        """
        if cp == 1:
            return
        parts = check_model(module, plan, self.gathers)
        for model in outermost(module):
            heads = getattr(model.config.get_text_config(), "num_attention_heads", None)
            if self.method == "ulysses" and parts.attention and heads is not None and (heads // tp) % cp:
                raise DloError(heads_error(heads // tp, cp))
        for router in find_routers(module).values():
            chooses = router_kind(router) == "expert_choice"
            if chooses or getattr(router, "capacity_factor", None) is not None:
                given = "router: expert_choice" if chooses else "capacity_factor"
                raise DloError(
                    f"cp must be 1 with experts.{given}, which selects among the tokens of a full sequence, got {cp};"
                    " set cp: 1, or choose experts by top k without a capacity"
                )

    def describe(self, module: nn.Module, plan: ParallelPlan, cp: int) -> str:
        """Returns a line about a checked model's attention and the modules that get full sequences; empty for one rank.

        Args:
            module: Model.
            plan: Plan of the model.
            cp: Number of ranks of the axis.
        """
        if cp == 1:
            return ""
        parts = check_model(module, plan, self.gathers)
        line = f"{len(parts.attention)} attention modules share the sequence by {self.method}"
        kinds = dict.fromkeys(type(module.get_submodule(name)).__name__ for name in parts.gathered)
        if not kinds:
            return line
        more = f"{len(parts.gathered)} modules get full sequences ({', '.join(kinds)})"
        return f"{line}; {more}: cp does not divide their computation and activations"

    def apply(self, module: nn.Module, mesh: DeviceMesh, plan: ParallelPlan) -> None:
        """Makes the attention modules of `module` compute over sequences sharded over the mesh's `cp` ranks.

        Does nothing on a mesh without that axis, or with one rank of it.

        Raises:
            DloError: The attention cannot be replaced.
        """
        if _AXIS not in (mesh.mesh_dim_names or ()) or mesh[_AXIS].size() == 1:
            return
        models = outermost(module)
        self._module = module
        self._original = next((model.config._attn_implementation or "sdpa" for model in models), "sdpa")
        self.sequence = ContextSequence(mesh[_AXIS].get_group(), self.method)
        self._gathering = share_attention(module, plan, self.sequence, self.gathers)
        self._shares = any(m.config._attn_implementation == IMPLEMENTATION for m in models)

    def shard_batch(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Returns this rank's shard of a batch that all ranks of the axis have.

        The model's attention uses the batch's documents and padding until the next batch.

        Args:
            batch: Dict with `input_ids` [B, L]. All tensors of that shape are sharded: `labels` (already shifted by
                one), `position_ids` (0 at the start of each document; 0, 1, ... if there are none), `attention_mask`
                (0 for padding); other entries are not changed.

        Raises:
            DloError: The batch is of another kind.
        """
        return batch if self.sequence is None else self.sequence.shard(batch)

    def add_document_counts(self, batch: Any) -> Any:
        """Returns a CPU batch with counts added on the host, so that :meth:`shard_batch` needs no device wait."""
        return batch if self.sequence is None else self.sequence.with_counts(batch)

    def select_rows(self, first: int, count: int) -> None:
        """Selects the rows of the batch for the model's next forward, those of a pipeline's micro-batch.

        Call it before each forward of a micro-batch, and :meth:`restore_rows` before its backward where activations
        are recomputed. Inside :meth:`use_full_sequences` it does nothing.

        Args:
            first: Index of the first row.
            count: Number of rows.
        """
        if self.sequence is not None and not self._runs_full_sequences:
            self.sequence.select_rows(first, count)

    def selected_rows(self) -> Any:
        """Returns the rows that are selected, with the documents of their batch; None without a shared sequence."""
        return None if self.sequence is None else self.sequence.selection

    def restore_rows(self, selected: Any) -> None:
        """Selects rows again, before a backward that recomputes; their batch may be an earlier one.

        Args:
            selected: Result of :meth:`selected_rows` after the forward.
        """
        if self.sequence is not None:
            self.sequence.selection = selected

    def gather(self, part: Tensor, dim: int = 1) -> Tensor:
        """Returns the full tensor of one that is sharded by positions; without gradients.

        A batch that was padded for sharding keeps its padding.

        Args:
            part: Shard of this rank.
            dim: Dimension of the positions.
        """
        return part if self.sequence is None else self.sequence.gather(part, dim)

    @contextlib.contextmanager
    def use_full_sequences(self) -> Iterator[None]:
        """Makes the model run on full sequences inside the block, on each rank alone, for example to generate text."""
        if self._module is None:
            yield
            return
        before, self._runs_full_sequences = self._runs_full_sequences, True
        try:
            with contextlib.ExitStack() as stack:
                if self._shares:
                    stack.enter_context(own_attention(self._module, self._original))
                if self._gathering is not None:
                    stack.enter_context(self._gathering.switched_off())
                yield
        finally:
            self._runs_full_sequences = before


#: Name of this implementation in transformers, which searches names for "sdpa" and "flash": it contains neither.
IMPLEMENTATION = "dlo_shared_sequence"
#: Attribute in which an attention module keeps its shared sequence.
_SEQUENCE = "_dlo_sequence"


def share_attention(
    module: nn.Module, plan: ParallelPlan, sequence: ContextSequence, gather: Gather = "auto"
) -> GatheredModules | None:
    """Makes a model compute over a shared sequence.

    Args:
        module: Model of transformers, or one with such a model inside.
        plan: Plan of the model, with its blocks and attention.
        sequence: Shared sequence of the attention modules.
        gather: Modules that are gathered; see :func:`dlo_plugins.parallel.context.gathered_modules.find_parts`.

    Returns:
        The modules that get full sequences; None if there are none.

    Raises:
        DloError: If the model cannot be shared; see :func:`check_model`.
    """
    parts = check_model(module, plan, gather)
    if parts.attention:
        for model in outermost(module):
            model.set_attn_implementation(IMPLEMENTATION)
    for name in parts.attention:
        part = module.get_submodule(name)
        part.__dict__[_SEQUENCE] = sequence
        mask = find_mask(part)
        if mask is not None:
            sequence.set_mask(mask, find_heads(part))
    if not parts.gathered and not parts.needs_full_inputs:
        return None
    sequence.keeps_positions = True
    gathering = GatheredModules(sequence)
    gathering.install(module, parts, _holders(module, parts.blocks))
    return gathering


def check_model(module: nn.Module, plan: ParallelPlan, gather: Gather = "auto") -> SharedParts:
    """Checks that the sequence of a model can be shared; returns what is done with its modules.

    Raises:
        DloError: If the model is not a causal language model of transformers, or its attention cannot be replaced.
    """
    from transformers import AttentionInterface

    models = outermost(module)
    if not models:
        raise DloError(
            "the model must be a causal language model of transformers for context parallelism, got"
            f" {type(module).__name__}; set cp=1, and use tp, pp or dp instead"
        )
    for model in models:
        config = model.config.get_text_config()
        if config.is_encoder_decoder or not getattr(config, "is_causal", True):
            raise DloError(_causal_error(f"{type(model).__name__}, which is not"))
    parts = find_parts(module, models, plan, gather)
    if not parts.attention and not parts.gathered:
        raise DloError(
            "a plan must have the names of the attention modules for context parallelism, got none from"
            f" {type(module).__name__}; set ParallelPlan(attention=(...))"
        )
    if not parts.attention:
        return parts
    AttentionInterface.register(IMPLEMENTATION, attention_forward)
    before = [model.config._attn_implementation for model in models]
    try:
        for model in models:
            model.set_attn_implementation(IMPLEMENTATION)
        for name in parts.attention:
            part: Any = module.get_submodule(name)
            if attention_implementation(part) != IMPLEMENTATION:
                raise DloError(
                    f"attention '{name}' of {type(module).__name__} must use transformers' AttentionInterface for"
                    f" context parallelism, got {type(part).__name__}, which does not; set cp=1, or use a family that"
                    " does: llama, qwen3, gpt_neox..."
                )
    finally:
        for model, implementation in zip(models, before, strict=True):
            model.set_attn_implementation(implementation)
    return parts


def _holders(module: nn.Module, blocks: Sequence[str]) -> list[nn.Module]:
    """Returns the models of transformers that hold blocks, from the outermost to the innermost."""
    from transformers import PreTrainedModel

    return [
        part
        for name, part in module.named_modules()
        if isinstance(part, PreTrainedModel) and any(not name or block.startswith(f"{name}.") for block in blocks)
    ]


def outermost(module: nn.Module) -> list[Any]:
    """Returns the outermost models of transformers in a module."""
    from transformers import PreTrainedModel

    models: list[tuple[str, Any]] = []
    for name, part in module.named_modules():
        inside = any(not outer or name.startswith(outer + ".") for outer, _ in models)
        if isinstance(part, PreTrainedModel) and not inside:
            models.append((name, part))
    return [model for _, model in models]


@contextlib.contextmanager
def own_attention(module: nn.Module, implementation: str) -> Iterator[None]:
    """Switches a model to another attention implementation inside the block, without a shared sequence."""
    models = outermost(module)
    try:
        for model in models:
            model.set_attn_implementation(implementation)
        yield
    finally:
        for model in models:
            model.set_attn_implementation(IMPLEMENTATION)


def attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Computes attention with the signature of transformers' attention functions.

    Args:
        module: Attention module.
        query: Queries [B, H, S, D] of this rank's positions.
        key: Keys [B, K, S, D] of this rank's positions.
        value: Values [B, K, S, E] of this rank's positions.
        attention_mask: None, as the batch has the documents and the padding.
        dropout: Rate of weights that are dropped.
        scaling: Factor on scores; the inverse square root of D by default.
        sliding_window: Number of tokens that a token sees, including itself.
        softcap: Soft bound of the scores.
        s_aux: Score of each head's attention sink, [H]; None without sinks.
        **others: Further arguments of some families.

    Returns:
        The output, [B, S, H, E], and None for the attention weights.

    Raises:
        DloError: If an argument cannot be computed over a shared sequence.
    """
    sequence: ContextSequence | None = module.__dict__.get(_SEQUENCE)
    if sequence is None:
        raise DloError(
            f"the plan's attention modules must include all of the model's, got none of class {type(module).__name__};"
            " add its name to ParallelPlan(attention=(...))"
        )
    _refuse(module, attention_mask, others)
    score = Score(query.shape[-1] ** -0.5 if scaling is None else float(scaling), softcap)
    out = sequence.attention(query, key, value, score, sliding_window, dropout, s_aux)
    return out.transpose(1, 2).contiguous(), None


def _refuse(module: nn.Module, mask: Tensor | None, others: dict[str, Any]) -> None:
    kind = type(module).__name__
    if mask is not None:
        raise DloError(
            "attention must have no mask of its own under context parallelism, which has documents and padding from the"
            f" batch, got {list(mask.shape)} from {kind}; set gather: all of ContextParallel"
        )
    if is_bidirectional(module, **others):
        raise DloError(_causal_error(f"is_causal=False from {kind}"))
    if others.get("position_bias") is not None:
        raise DloError(
            f"attention must have no position bias for context parallelism, got position_bias from {kind}; set gather:"
            " all of ContextParallel"
        )
    if others.get("output_attentions"):
        raise DloError(
            "output_attentions must be off under context parallelism, which does not keep attention weights, got True;"
            " leave it out"
        )


def _causal_error(got: str) -> str:
    return f"attention must be causal for context parallelism, got {got}; set cp=1"
