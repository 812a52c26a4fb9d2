"""Computes the cross-entropy over a vocabulary in chunks of tokens, so that all logits are never in memory at once.

Liger Kernel: Efficient Triton Kernels for LLM Training. Hsu et al., 2024, arXiv 2410.10989. As there, forward
computes a chunk's gradient together with its loss, from the same logits; backward only scales the gradients.
Departures: tokens without a target are removed first, soft-capping (Gemma 2) is included, and every kernel of
:data:`Kernel` runs on every device, except Liger's own, which needs a GPU.

On a CPU a chunk fits the caches, with logits `[V, n]`. On an accelerator it is as large as a budget of logits allows,
with logits `[n, V]`, so that few kernels are launched; the host never waits for the device.

The vocabulary of a head may be split over ranks (tensor parallelism): see
:mod:`dlo_framework.distributed.vocab_parallel`.

torch 2.15 has `torch.nn.functional.linear_cross_entropy`, which also works in chunks, without soft-capping;
`benchmarks/vocabulary_loss.py` compares both.

Shapes: N tokens, D width, V vocabulary.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dlo_framework.distributed.vocab_parallel import VocabularyShard, exp_and_losses
from dlo_framework.errors import DloError
from dlo_framework.fake_kernels import FakeTensor
from dlo_framework.models.autocast import autocast_dtype
from dlo_framework.token_loss import PLAIN, TokenLoss
from dlo_tasks.language.batches import IGNORE_INDEX
from dlo_tasks.language.vocabulary_head import (
    VocabularyHead,
    can_run_inside,
    head_width,
    is_quantised,
    run_inside,
)

#: Maximum tokens and logits of a chunk on a CPU: large enough for efficient matrix products.
CHUNK_TOKENS, CHUNK_LOGITS = 256, 2**25
#: Maximum logits of a chunk on an accelerator: 2,048 tokens of a vocabulary of 131,072.
ACCELERATOR_LOGITS = 2**28

#: Implementation of a plain head's loss: `columns`, torch's operations on logits `[V, n]`; `rows`, on `[n, V]`;
#: `compiled`, the same with everything but the matrix products in one compiled kernel; `liger`, Liger Kernel.
Kernel = Literal["columns", "rows", "compiled", "liger"]
#: Implementations that a user may choose; `torch` is `columns` on a CPU and `rows` elsewhere.
UserKernel = Literal["torch", "compiled", "liger"]


#: Error of a second backward.
ONCE = "backward of the loss over the vocabulary must run once, got a second call; compute the loss again"


def default_kernel(device: torch.device) -> Kernel:
    """Returns the default kernel of a device."""
    return "columns" if device.type == "cpu" else "rows"


def check_kernel(kernel: UserKernel, device: torch.device | None = None) -> None:
    """Checks that a kernel is available.

    Args:
        kernel: Choice of the user.
        device: Device of the run; None before it is known.

    Raises:
        DloError: If Liger's kernel is chosen without the package, or without a GPU.
    """
    if kernel != "liger":
        return
    if importlib.util.find_spec("liger_kernel") is None:
        raise DloError(
            "loss_kernel must be torch or compiled where liger-kernel is not installed, got liger; pip install"
            " 'dlo_framework[gpu]', or leave it out"
        )
    if device is not None and device.type == "cpu":
        raise DloError("loss_kernel must be torch or compiled on a CPU, got liger; leave it out")


def summed_loss(
    head: VocabularyHead,
    hidden: Tensor,
    targets: Tensor,
    chunk: int | None = None,
    count: int | None = None,
    kernel: Kernel | None = None,
    terms: TokenLoss = PLAIN,
) -> Tensor:
    """Returns the sum of the tokens' losses, a scalar in float32; 0 without targets.

    A head that is gathered on use is called once, with all chunks inside the call: ranks may have different numbers of
    targets, and all ranks must call it equally often. One with a LoRA adapter, a factor or another `output_dtype`
    computes all logits at once then.

    Args:
        head: Head of the model.
        hidden: Hidden states, `[N, D]`: the last block's normalised output.
        targets: Target ids, `[N]`; :data:`IGNORE_INDEX` for tokens without one.
        chunk: Tokens per chunk; by default computed from the vocabulary size.
        count: Number of targets, if known. Otherwise a CPU counts them, and an accelerator computes the logits of all
            tokens, because reading the number would wait for the device.
        kernel: Implementation; by default that of the device.
        terms: Terms beside the cross-entropy.

    Raises:
        DloError: If the kernel does not support this head.
    """
    _check_head(head, kernel)
    return _selected_losses(head, hidden, targets, chunk, count, kernel, terms, per_token=False)


def token_log_probs(
    head: VocabularyHead, hidden: Tensor, targets: Tensor, chunk: int | None = None, count: int | None = None
) -> Tensor:
    """Returns the log-probability of each token's target, `[N]` in float32 or wider; 0 for tokens without one.

    The gradient of :func:`summed_loss` is known in forward but for a factor. Here each token's has a factor of its own:
    backward computes a chunk's logits again. For the arguments see :func:`summed_loss`.
    """
    losses = _selected_losses(head, hidden, targets, chunk, count, None, PLAIN, per_token=True)
    if len(losses) == len(targets):
        return -losses
    log_probs = torch.zeros(targets.shape, dtype=losses.dtype, device=losses.device)
    return log_probs.masked_scatter(targets != IGNORE_INDEX, -losses)


def _selected_losses(
    head: VocabularyHead,
    hidden: Tensor,
    targets: Tensor,
    chunk: int | None,
    count: int | None,
    kernel: Kernel | None,
    terms: TokenLoss,
    *,
    per_token: bool,
) -> Tensor:
    """Returns the sum of the losses, or the loss of each token that :func:`select_targets` has kept."""
    at_once = functools.partial(VocabularyHead.losses, terms=terms, per_token=per_token)
    head, hidden, targets, count = enter_stage(head, hidden, targets, count)
    if isinstance(hidden, FakeTensor):  # No values or memory, as in FLOP counting.
        return at_once(head, hidden, targets)
    if head.shard is not None:
        hidden = head.shard.enter(hidden)
    kernel = kernel or default_kernel(hidden.device)
    hidden, targets = select_targets(hidden, targets, count, waits=kernel == "columns")
    if head.is_gathered and not head.fuses:
        return at_once(head, hidden, targets)
    complete = kernel == "columns" or count == len(targets)

    def fused(head: VocabularyHead, hidden: Tensor) -> Tensor:
        linear: Any = head.module
        if is_quantised(linear):  # In the call that gathers it.
            return at_once(head, hidden, targets)
        if kernel == "liger":
            return _by_liger(linear, hidden, targets, head.softcap, terms)
        dtype = autocast_dtype(hidden.device.type) or hidden.dtype
        rows = chunk or chunk_tokens(linear.weight.shape[0], len(targets), kernel)
        compute = functools.partial(_chunk_losses, targets, head.softcap, head.shard, kernel, complete, terms)
        return linear_losses(hidden, linear, compute, dtype, rows, kernel, per_token=per_token)

    if head.fuses:
        return run_inside(head, hidden, fused) if head.is_gathered else fused(head, hidden)
    rows = chunk or (CHUNK_TOKENS if kernel == "columns" else chunk_tokens(head_width(head), len(targets), kernel))
    chunks = zip(hidden.split(rows), targets.split(rows), strict=True) if len(targets) else ()
    losses = [checkpoint(at_once, head, h, t, use_reentrant=False) for h, t in chunks]
    if per_token:
        return torch.cat(losses) if losses else hidden.float().sum(dim=1)
    return torch.stack(losses).sum() if losses else hidden.float().sum()


def enter_stage(
    head: VocabularyHead, hidden: Tensor, targets: Tensor, count: int | None
) -> tuple[VocabularyHead, Tensor, Tensor, int | None]:
    """Returns a head without its stage, and the stage's outputs of the tokens with a target, these targets and a count.

    All ranks call the stage, also one without a target. A head without a stage is returned with the others unchanged.

    Args:
        head: Head of the model.
        hidden: Hidden states, `[N, D]`.
        targets: Target ids, `[N]`.
        count: Number of targets, if known; otherwise the device is read.
    """
    if head.stage is None:
        return head, hidden, targets, count
    if isinstance(hidden, FakeTensor):
        hidden, targets = hidden[:count], targets[:count]
    else:
        hidden, targets = select_targets(hidden, targets, count, waits=True)
    return replace(head, stage=None), head.stage(hidden), targets, len(targets)


def _check_head(head: VocabularyHead, kernel: Kernel | None) -> None:
    if kernel in (None, "columns", "rows") or (head.fuses and (kernel == "compiled" or head.shard is None)):
        return
    what = "is adapted or scaled"
    if head.fuses:
        what = "is split over ranks (tp), whose sums Liger's kernel lacks"
    elif head.is_product and head.is_gathered:
        what = "has hooks or an output_dtype, which take its logits"
    raise DloError(f"loss_kernel must be torch where the output projection {what}, got {kernel}; leave it out")


@torch.no_grad()
def token_losses_and_hits(head: VocabularyHead, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns each token's cross-entropy, `[N]`, and whether its target has the highest logit, `[N]`.

    Cross-entropies are in float32, or in float64 if the model is.

    Args:
        head: Head of the model.
        hidden: Hidden states, `[N, D]`.
        targets: Target ids, `[N]`; :data:`IGNORE_INDEX` has loss 0 and is never a hit.
    """
    losses = torch.zeros(targets.shape, dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device)
    hits = torch.zeros(targets.shape, dtype=torch.bool, device=hidden.device)
    if head.stage is not None:
        are = targets != IGNORE_INDEX
        staged, states, kept, _ = enter_stage(head, hidden, targets, None)
        of_kept, hits_of_kept = token_losses_and_hits(staged, states, kept)
        return losses.masked_scatter(are, of_kept.to(losses.dtype)), hits.masked_scatter(are, hits_of_kept)
    if can_run_inside(head):

        def inside(head: VocabularyHead, hidden: Tensor) -> Tensor:
            _write_losses_and_hits(head, hidden, targets, losses, hits)
            return hidden

        run_inside(head, hidden, inside)
    else:
        _write_losses_and_hits(head, hidden, targets, losses, hits)
    return losses, hits


def _write_losses_and_hits(head: VocabularyHead, hidden: Tensor, targets: Tensor, losses: Tensor, hits: Tensor) -> None:
    """Writes the results of :func:`token_losses_and_hits` into zeros; a head that is gathered is called once."""
    if head.is_gathered:
        chunks: Any = [slice(None)]
    elif hidden.device.type == "cpu":
        chunks = torch.nonzero(targets != IGNORE_INDEX).flatten().split(CHUNK_TOKENS)
    else:  # Only the device knows the targets.
        rows = chunk_tokens(head_width(head), len(targets), "rows")
        chunks = [slice(start, start + rows) for start in range(0, len(targets), rows)]
    for some in chunks:
        of_these = targets[some]
        if head.shard is None:
            logits = head.logits(hidden[some])
            losses[some] = F.cross_entropy(logits, of_these, ignore_index=IGNORE_INDEX, reduction="none")
            best = logits.argmax(dim=1)
        else:
            logits = head.own_logits(hidden[some])
            losses[some] = head.shard.cross_entropy(logits, of_these).masked_fill(of_these == IGNORE_INDEX, 0)
            best = head.shard.argmax(logits)
        hits[some] = (best == of_these) & (of_these != IGNORE_INDEX)


def select_targets(hidden: Tensor, targets: Tensor, count: int | None, *, waits: bool) -> tuple[Tensor, Tensor]:
    """Removes the tokens without a target; keeps all if only the device knows them, unless the caller `waits`."""
    if count == len(targets) or (count is None and not waits):
        return hidden, targets
    are = targets != IGNORE_INDEX
    if count is None or are.device.type not in ("cpu", "cuda"):  # Others (MPS in torch 2.11) lack it.
        keep = torch.nonzero(are).flatten()
    else:
        keep = torch.nonzero_static(are, size=count).flatten()
    if len(keep) == len(targets):
        return hidden, targets
    selected: Tensor = _Rows.apply(hidden, keep)
    return selected, targets.index_select(0, keep)


class _Rows(torch.autograd.Function):
    """Selects distinct rows of a matrix; backward copies, whereas that of indexing sorts and adds."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.count = len(tensor)
        return tensor.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (rows,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.count, *grads[0].shape[1:]).index_copy_(0, rows, grads[0]), None


def chunk_tokens(vocabulary: int, tokens: int, kernel: Kernel) -> int:
    """Returns the number of tokens per chunk; on an accelerator chunks have about equal lengths."""
    if kernel == "columns":
        return max(1, min(CHUNK_TOKENS, CHUNK_LOGITS // vocabulary))
    most = max(1, ACCELERATOR_LOGITS // vocabulary)
    chunks = max(1, -(-tokens // most))
    return max(1, -(-tokens // chunks))


def logits_on_cpu(head: VocabularyHead) -> int:
    """Returns the number of logits of a chunk on a CPU."""
    return head_width(head) * chunk_tokens(head_width(head), CHUNK_TOKENS, "columns")


#: Function of a chunk's first token, its logits `[n, V]`, which it may overwrite, and whether the gradient is needed:
#: the losses, `[n, 1]`, their gradient, `[n, V]`, and whether each token has no target, or None for all have.
ChunkLosses = Callable[[int, Tensor, bool], tuple[Tensor, Tensor | None, Tensor | None]]


def _chunk_losses(
    targets: Tensor,
    softcap: float | None,
    shard: VocabularyShard | None,
    kernel: Kernel,
    complete: bool,
    terms: TokenLoss,
    start: int,
    logits: Tensor,
    need_slope: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    t = targets[start : start + len(logits), None]
    ignored = None if complete else t == IGNORE_INDEX
    if ignored is not None:
        t = t.clamp(min=0)
    if kernel == "compiled":
        return *compiled_losses_and_slope(logits, t, softcap, shard, terms, need_slope=need_slope), ignored
    if kernel == "columns" or softcap is not None or shard is not None:
        return *losses_and_slope(logits, t, softcap, shard, terms, need_slope=need_slope), ignored
    return *losses_and_slope_of_rows(logits, t, terms, need_slope=need_slope), ignored


def linear_losses(
    hidden: Tensor,
    linear: Any,
    compute: ChunkLosses,
    dtype: torch.dtype,
    rows: int,
    kernel: Kernel,
    *,
    per_token: bool = False,
) -> Tensor:
    """Returns the sum of the losses of `hidden @ weight.T + bias`, or `per_token` each, `[N]`, in chunks of tokens.

    Of a sum, forward computes the gradients, and backward scales them. Otherwise backward computes the chunks again.

    Args:
        hidden: Hidden states, `[N, D]`.
        linear: Projection, whose weight is available.
        compute: Losses of a chunk.
        dtype: Dtype of the products.
        rows: Tokens of a chunk.
        kernel: Implementation of the loss.
        per_token: Whether to return each token's loss.
    """
    losses: Tensor = _LinearLosses.apply(hidden, linear.weight, linear.bias, compute, dtype, rows, kernel, per_token)
    return losses


class _LinearLosses(torch.autograd.Function):
    """Computes :func:`linear_losses`."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        compute: ChunkLosses,
        dtype: torch.dtype,
        rows: int,
        kernel: Kernel,
        per_token: bool,
    ) -> Tensor:
        needed = (False, False, False) if per_token else ctx.needs_input_grad[:3]
        parts = HeadGradients(hidden, weight, bias, dtype, needed)
        by_chunk = list(parts.chunks(hidden, bias, compute, rows, kernel))
        wide = torch.promote_types(dtype, torch.float32)
        if not per_token:
            ctx.parts, ctx.per_token = parts, None
            total = torch.zeros((), dtype=wide, device=hidden.device)
            for losses in by_chunk:
                total += losses.sum()
            return total
        ctx.save_for_backward(hidden, weight, bias)
        ctx.per_token = (compute, dtype, rows, kernel)
        return torch.cat(by_chunk)[:, 0] if by_chunk else hidden.new_zeros(0, dtype=wide)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        factor = grads[0]
        if ctx.per_token is None:
            parts, ctx.parts = ctx.parts, None
            if parts is None:
                raise RuntimeError(ONCE)
        else:
            hidden, weight, bias = ctx.saved_tensors
            compute, dtype, rows, kernel = ctx.per_token
            parts = HeadGradients(hidden, weight, bias, dtype, ctx.needs_input_grad[:3])
            for _ in parts.chunks(hidden, bias, compute, rows, kernel, factor):
                pass
            factor = torch.ones((), device=factor.device)
        return (*parts.scaled(factor), *(None,) * 5)


class HeadGradients:
    """Accumulates the required gradients of hidden states, weight and bias over chunks.

    The weight's gradient is summed in single precision at least: a sum in bf16 loses late summands.
    """

    def __init__(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, wanted: tuple[bool, ...]
    ) -> None:
        self.weight = weight.detach().to(dtype)
        self.wanted = any(wanted)
        wide = torch.promote_types(weight.dtype, torch.float32)
        self.dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
        self.hidden = torch.empty_like(hidden, dtype=dtype) if wanted[0] else None
        self.of_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if wanted[1] else None
        self.bias = torch.zeros(bias.shape, dtype=wide, device=bias.device) if bias is not None and wanted[2] else None

    @torch.no_grad()
    def chunks(
        self,
        hidden: Tensor,
        bias: Tensor | None,
        compute: ChunkLosses,
        rows: int,
        kernel: Kernel,
        factors: Tensor | None = None,
    ) -> Iterator[Tensor]:
        """Yields the losses of each chunk, `[n, 1]`, and adds its gradients, each token's times its factor."""
        with torch.autocast(hidden.device.type, enabled=False):
            for start, h, logits in project_chunks(hidden, self.weight, bias, rows, kernel):
                losses, slope, ignored = compute(start, logits, self.wanted)
                if slope is not None:
                    slope = slope if factors is None else slope.mul_(factors[start : start + len(h), None])
                    self.add(start, h, slope, ignored)
                yield losses if ignored is None else losses.masked_fill_(ignored, 0)

    def add(self, start: int, h: Tensor, slope: Tensor, ignored: Tensor | None = None) -> None:
        """Adds a chunk.

        Args:
            start: Index of its first token.
            h: Hidden states, `[n, D]`.
            slope: Gradient of the loss with respect to the logits, `[n, V]`.
            ignored: Whether a token has no target, `[n, 1]`; its gradient is then 0. None if all have one.
        """
        if self.hidden is not None:
            into = torch.mm(slope, self.weight, out=self.hidden[start : start + len(h)])
            if ignored is not None:
                into.masked_fill_(ignored, 0)
        if self.of_weight is not None:
            _add_product(self.of_weight, slope, h if ignored is None else h.masked_fill(ignored, 0))
        if self.bias is not None:
            # A product with ones and zeros avoids a write to the gradient, [n, V].
            self.bias += slope.sum(dim=0) if ignored is None else ((~ignored).t().to(slope.dtype) @ slope)[0]

    def scaled(self, factor: Tensor) -> tuple[Tensor | None, ...]:
        """Returns the three gradients, times the gradient of the loss."""
        gradients = (self.hidden, self.of_weight, self.bias)
        return tuple(
            None if tensor is None else tensor.mul_(factor).to(dtype)
            for tensor, dtype in zip(gradients, self.dtypes, strict=True)
        )


def _add_product(total: Tensor, slope: Tensor, h: Tensor) -> None:
    """Adds `slope.T @ h` to `total [V, D]`, which may have a wider dtype, in one operation where torch has it."""
    if total.dtype == slope.dtype:
        total.addmm_(slope.t(), h)
    elif _adds_wide(total.device.type, slope.dtype):
        torch.addmm(total, slope.t(), h, out_dtype=total.dtype, out=total)
    else:
        total += slope.t() @ h


@functools.lru_cache
def _adds_wide(device_type: str, dtype: torch.dtype) -> bool:
    """Returns whether a device can add a half-precision product to a float32 matrix, tested on small ones."""
    one = torch.ones(16, 16, dtype=dtype, device=device_type)
    total = torch.zeros(16, 16, dtype=torch.float32, device=device_type)
    try:
        torch.addmm(total, one, one, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True


def project_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, rows: int, kernel: Kernel
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields each chunk's first token, hidden states `[n, D]` and logits `[n, V]`, in memory that the next one reuses.

    With `columns` the logits are a view of `[V, n]`: in that order the products are faster on a CPU.

    Args:
        hidden: Hidden states, `[N, D]`.
        weight: Weight of the projection in the dtype of the products, `[V, D]`.
        bias: Bias of the projection, `[V]`; None without one.
        rows: Tokens of a chunk.
        kernel: Implementation of the loss.
    """
    bias = None if bias is None else bias.detach().to(weight.dtype)
    buffer = weight.new_empty(0)
    for start in range(0, len(hidden), rows):
        h = hidden[start : start + rows].detach().to(weight.dtype)
        if kernel == "columns":
            if buffer.shape != (len(weight), len(h)):
                buffer = weight.new_empty(len(weight), len(h))
            torch.mm(weight, h.t(), out=buffer)
            yield start, h, (buffer if bias is None else buffer.add_(bias[:, None])).t()
        else:
            if not start:
                buffer = weight.new_empty(len(h), len(weight))
            out = buffer[: len(h)]
            yield (
                start,
                h,
                torch.mm(h, weight.t(), out=out) if bias is None else torch.addmm(bias, h, weight.t(), out=out),
            )


def losses_and_slope(
    logits: Tensor,
    targets: Tensor,
    softcap: float | None,
    shard: VocabularyShard | None = None,
    terms: TokenLoss = PLAIN,
    *,
    need_slope: bool,
) -> tuple[Tensor, Tensor | None]:
    """Returns the losses, `[n, 1]` in float32 or wider, and their gradient `[n, V]` in the logits' dtype.

    Args:
        logits: Logits, `[n, V]`, overwritten.
        targets: Target ids, `[n, 1]`.
        softcap: Soft bound of the logits; see :class:`VocabularyHead`.
        shard: Shard of the vocabulary that the logits cover, `[n, v]`; None for the full vocabulary.
        terms: Terms beside the cross-entropy.
        need_slope: Whether to compute the gradient.
    """
    dtype = logits.dtype
    values = logits.to(torch.promote_types(dtype, torch.float32))
    bent = None
    if softcap is not None:
        values = values.div_(softcap).tanh_()
        bent = 1 - values.square() if need_slope else None  # the slope of cap * tanh(x / cap)
        values = values.mul_(softcap)
    if shard is None:
        columns, own, size = targets, None, values.shape[1]
        highest = values.amax(dim=1, keepdim=True)
        values = values.sub_(highest)
        at_target = values.gather(1, columns)
        mean = values.mean(dim=1, keepdim=True) if terms.label_smoothing else None
        total = values.exp_().sum(dim=1, keepdim=True)
        above = total.log()
        losses, log_total = terms.losses(above, highest, at_target, mean), above + highest
    else:
        size = shard.size
        columns, own = shard.locate_targets(targets)
        losses, total, log_total = exp_and_losses(values, columns, own, shard, terms)
    if not need_slope:
        return losses, None
    values = terms.slope(values.div_(total), log_total, columns, own, size)
    if bent is not None:
        values = values.mul_(bent)
    return losses, values if values.dtype == dtype else logits.copy_(values)


def losses_and_slope_of_rows(
    logits: Tensor, targets: Tensor, terms: TokenLoss = PLAIN, *, need_slope: bool
) -> tuple[Tensor, Tensor | None]:
    """Computes the same with few kernels, each of which passes once over the logits `[n, V]`."""
    log_shares = torch.log_softmax(logits, dim=1, dtype=torch.promote_types(logits.dtype, torch.float32))
    at_target = log_shares.gather(1, targets)
    losses = -at_target
    if terms.label_smoothing:
        losses = losses + terms.label_smoothing * (at_target - log_shares.mean(dim=1, keepdim=True))
    log_total = logits.gather(1, targets).to(at_target.dtype) - at_target if terms.z_loss else at_target
    if terms.z_loss:
        losses = losses + terms.z_loss * log_total.square()
    if not need_slope:
        return losses, None
    if terms.is_plain:
        slope = torch.exp(log_shares, out=logits)
        return losses, slope.scatter_(1, targets, (at_target.exp() - 1).to(slope.dtype))
    return losses, logits.copy_(terms.slope(log_shares.exp_(), log_total, targets, None, logits.shape[1]))


def compiled_losses_and_slope(
    logits: Tensor,
    targets: Tensor,
    softcap: float | None,
    shard: VocabularyShard | None,
    terms: TokenLoss,
    *,
    need_slope: bool,
) -> tuple[Tensor, Tensor | None]:
    """Computes the same in two compiled passes over the logits, between which ranks that split them exchange sums."""
    columns, own = (
        (targets, torch.ones_like(targets, dtype=torch.bool)) if shard is None else shard.locate_targets(targets)
    )
    size = logits.shape[1] if shard is None else shard.size
    log_total, at_target, mean = _compiled(_fusible_sums)(logits, columns, own, softcap, size)
    if shard is not None:
        highest = shard.communicator.maximum(log_total.clone())
        parts = torch.cat([(log_total - highest).exp(), at_target, mean], dim=1)
        total, at_target, mean = shard.communicator.sum(parts).split(1, dim=1)
        log_total = total.log() + highest
    losses = log_total - at_target + terms.label_smoothing * (at_target - mean)
    if terms.z_loss:
        losses = losses + terms.z_loss * log_total.square()
    if not need_slope:
        return losses, None
    return losses, _compiled(_fusible_slope)(logits, log_total, columns, own, softcap, size, terms)


def _fusible_sums(
    logits: Tensor, columns: Tensor, own: Tensor, softcap: float | None, size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns this rank's logarithm of summed exponentials, logit of the target and part of the mean logit."""
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if softcap is not None:
        values = softcap * torch.tanh(values / softcap)
    at_target = torch.where(own, values.gather(1, columns), 0)
    return torch.logsumexp(values, dim=1, keepdim=True), at_target, values.sum(dim=1, keepdim=True) / size


def _fusible_slope(
    logits: Tensor,
    log_total: Tensor,
    columns: Tensor,
    own: Tensor,
    softcap: float | None,
    size: int,
    terms: TokenLoss,
) -> Tensor:
    """Returns the gradient of the losses, in the logits' dtype."""
    values = logits.to(torch.promote_types(logits.dtype, torch.float32))
    bent = None if softcap is None else torch.tanh(values / softcap)
    if softcap is not None and bent is not None:
        values = softcap * bent
    shares = torch.exp(values - log_total)
    if terms.z_loss:
        shares = shares * (1 + 2 * terms.z_loss * log_total)
    is_target = own & (torch.arange(logits.shape[1], device=logits.device) == columns)
    slope = shares - (1 - terms.label_smoothing) * is_target.to(values.dtype)
    if terms.label_smoothing:
        slope = slope - terms.label_smoothing / size
    return (slope if bent is None else slope * (1 - bent.square())).to(logits.dtype)


@functools.cache
def _compiled(function: Any) -> Any:
    return torch.compile(function)


def _by_liger(linear: Any, hidden: Tensor, targets: Tensor, softcap: float | None, terms: TokenLoss = PLAIN) -> Tensor:
    """Returns the loss of Liger Kernel (0.8), which waits for the device to read the number of targets."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss(
        ignore_index=IGNORE_INDEX,
        reduction="sum",
        softcap=softcap,
        accum_dtype=torch.float32,
        lse_square_scale=terms.z_loss,
        label_smoothing=terms.label_smoothing,
    )
    total: Tensor = loss(linear.weight, hidden, targets, linear.bias)
    return total
