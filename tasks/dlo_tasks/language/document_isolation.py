"""Keeps the documents of packed rows apart in models that ignore restarting positions.

transformers separates the documents of a row only where it makes the attention mask from the positions. State-space
layers, linear attention, short convolutions and attention with a mask of its own let documents leak into the next ones.
Their modules are changed in one of two ways:

* *mask*: attention that takes a mask gets one that is cut between documents.
* *rows*: a module that takes no such mask is called with one document per row. Documents of similar length share a
  call: lengths are rounded up to a power of two, so that less than half of a call is padding, on the right, where no
  earlier token of a causal model attends to it. The number of calls depends on the length of a row alone, so that ranks
  that gather weights or reduce in these modules make equal numbers of calls.

Where a model computes absolute positions by itself, the rows of its position embedding are gathered by the restarting
positions. Which way a class of modules needs is found by values, on a small copy of the model.

Shapes: B rows, L positions, T = B * L tokens, N documents of a call, W positions of its rows.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from dlo_framework.batches import get_chosen_tokens
from dlo_framework.errors import DloError
from dlo_framework.models.hugging_face import attention_implementation
from dlo_tasks.language.batches import mark_document_starts

Way = Literal["mask", "rows"]

#: Parameters of a forward that tell a module that mixes positions: what it has seen before, and what it may see.
_STATES = ("cache", "cache_params", "past_key_values", "past_key_value", "layer_past", "state", "kv_cache")
_MASK = "attention_mask"
#: Arguments that describe the documents of all rows to kernels; a call with one document per row has none.
_BOUNDARIES = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx")
#: Keyword argument of a block in which its documents are kept for recomputation in backward.
_ARGUMENT = "dlo_documents"
#: Implementations of attention that read a dense mask.
_DENSE = ("sdpa", "eager")
#: Exceptions that a forward raises if a model does not support its arguments.
FORWARD_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)
#: Positions of the rows of the call with the shortest documents.
_SHORTEST = 16


class DocumentSpans(NamedTuple):
    """Documents of a batch of packed rows.

    Attributes:
        position_ids: Positions that restart with each document, int64 `[B, L]`.
        same: Whether two tokens belong to one document, bool `[B, 1, L, L]`.
        groups: Tokens of each call's rows among all, int64 `[N, W]`; padding repeats the last token.
        places: Place of each token among the results of all calls in a row, int64 `[T]`.
    """

    position_ids: Tensor
    same: Tensor
    groups: tuple[Tensor, ...]
    places: Tensor

    def select(self, index: Tensor) -> DocumentSpans:
        """Returns the documents of some of the tokens, which are then the tokens of shorter rows.

        Args:
            index: Positions of the tokens, int64 `[K]`, ascending; each position of a padding that repeats one is a
                document of its own.
        """
        number = mark_document_starts(self.position_ids).cumsum(1)[:, index.to(self.position_ids.device)]
        begins = torch.ones_like(number, dtype=torch.bool)
        begins[:, 1:] = (number.diff(dim=1) != 0) | (index.diff() <= 0).to(number.device)
        place = torch.arange(len(index), device=number.device)
        return document_spans(place - torch.where(begins, place, 0).cummax(1).values)


def document_spans(position_ids: Tensor) -> DocumentSpans:
    """Returns the documents of a batch; reads the positions on the host once.

    Args:
        position_ids: Positions, `[B, L]`; a document begins with each row, and wherever they do not increase by one.
    """
    begins = mark_document_starts(position_ids)
    number = begins.flatten().cumsum(0).view(begins.shape)  # of each token's document
    same = (number[:, None, :, None] == number[:, None, None, :])  # fmt: skip
    length, total = position_ids.shape[1], position_ids.numel()
    starts = torch.nonzero(begins.flatten().cpu()).flatten()
    lengths = torch.diff(starts, append=torch.tensor([total]))
    groups, places, offset = [], torch.empty(total, dtype=torch.long), 0
    bounds = [0, _SHORTEST]
    while bounds[-1] < length:
        bounds.append(2 * bounds[-1])
    for shortest, width in itertools.pairwise(bounds):
        chosen = (lengths > shortest) & (lengths <= width)
        first, sizes = starts[chosen], lengths[chosen]
        if not len(first):
            groups.append(torch.zeros(1, 1, dtype=torch.long))
            offset += 1
            continue
        within = torch.arange(min(width, int(sizes.max())))
        tokens = first[:, None] + torch.minimum(within, sizes[:, None] - 1)
        is_token = within < sizes[:, None]
        places[tokens[is_token]] = offset + torch.arange(tokens.numel()).view(tokens.shape)[is_token]
        groups.append(tokens)
        offset += tokens.numel()
    device = position_ids.device
    return DocumentSpans(position_ids, same, tuple(group.to(device) for group in groups), places.to(device))


_CURRENT: ContextVar[DocumentSpans | None] = ContextVar("dlo_documents", default=None)


@contextlib.contextmanager
def documents_of(spans: DocumentSpans | None) -> Iterator[None]:
    """Sets the documents of the forward inside the block; None for rows of one document."""
    token = _CURRENT.set(spans)
    try:
        yield
    finally:
        _CURRENT.reset(token)


class Isolation(NamedTuple):
    """Changes to a model that keep documents apart.

    Attributes:
        ways: Way of each class of modules that mixes positions.
        gathers_positions: Whether rows of the position embedding are gathered by the restarting positions, which the
            model does not take.
    """

    ways: Mapping[type[nn.Module], Way]
    gathers_positions: bool

    def install(self, model: Any, blocks: nn.ModuleList) -> None:
        """Changes a model in place: hooks, and `forward` on the objects, so that names and types do not change.

        Args:
            model: Model of transformers.
            blocks: Blocks of the model.
        """
        # Attention by torch takes masks of truth values.
        is_additive = "sdpa" not in (attention_implementation(model) or "")
        for module in list(mixers(blocks)):
            way = self.ways[type(module)]
            if way == "rows":
                module.forward = _ByRows(module)
            else:
                # Its place after self, read here: tensor parallelism may give the module another class.
                place = list(inspect.signature(type(module).forward).parameters).index(_MASK) - 1
                module.register_forward_pre_hook(functools.partial(_cut_mask, is_additive, place), with_kwargs=True)
        if self.gathers_positions:
            for module in position_embeddings(model):
                module.register_forward_hook(_gather_positions)
        for block in blocks:  # They keep their documents among their arguments, from which backward recomputes them.
            block.forward = _Carrying(block)
            block.register_forward_pre_hook(_add_documents, with_kwargs=True)


def find_isolation(
    twin: Any, position_ids: Tensor, run: Callable[..., Tensor], expected: Tensor, find_blocks: Callable[[Any], Any]
) -> Isolation | None:
    """Returns the changes that keep documents apart in a model; None if there are none.

    Each class of attention takes a cut mask if that suffices, and rows otherwise; other modules take rows.

    Args:
        twin: Small copy of the model.
        position_ids: Positions of packed rows.
        run: Function that returns a model's hidden states of these rows, with `position_ids` or without.
        expected: Hidden states of each document by itself.
        find_blocks: Function that returns the blocks of a model.
    """
    kinds = {type(module) for module in mixers(find_blocks(twin))}
    masked = {kind for kind in kinds if _MASK in inspect.signature(kind.forward).parameters}
    attention = sorted((kind for kind in masked if "Attention" in kind.__name__), key=lambda kind: kind.__name__)
    choices: list[tuple[Way, ...]] = list(itertools.product(("mask", "rows"), repeat=len(attention)))
    for gathers in (False, True):
        if gathers and not position_embeddings(twin):
            return None
        for chosen in sorted(choices, key=lambda ways: ways.count("rows")):
            ways: dict[type[nn.Module], Way] = dict.fromkeys(kinds, "rows")
            ways |= dict(zip(attention, chosen, strict=True))
            isolation = Isolation(ways, gathers)
            trial = copy.deepcopy(twin)
            isolation.install(trial, find_blocks(trial))
            with contextlib.suppress(*FORWARD_FAILURES, DloError), documents_of(document_spans(position_ids)):
                if near(run(trial) if gathers else run(trial, position_ids=position_ids), expected):
                    return isolation
    return None


def near(one: Tensor, other: Tensor) -> bool:
    """Returns whether two tensors agree to half the digits of their dtype, at most those of float32.

    Models in double precision still compute norms, softmax and soft-caps in float32.
    """
    eps = max(torch.finfo(one.dtype).eps, torch.finfo(torch.float32).eps)
    return bool((one.double() - other.double()).abs().max() <= eps**0.5 * float(other.abs().max()))


# --- the modules -----------------------------------------------------------------------------------------------


def mixers(blocks: nn.ModuleList) -> Iterator[nn.Module]:
    """Yields the modules inside blocks that mix positions: they take a cache, a state or a mask.

    A module that only passes these on, such as a block, is left out, but attention whose parts have states of their own
    is not.
    """
    for block in blocks:
        stateful = {
            name: part
            for name, part in block.named_modules()
            if name and not inspect.signature(part.forward).parameters.keys().isdisjoint((*_STATES, _MASK))
        }
        for name, part in stateful.items():
            is_innermost = not any(other.startswith(f"{name}.") for other in stateful)
            if is_innermost or "Attention" in type(part).__name__:
                yield part


def position_embeddings(model: nn.Module) -> list[nn.Module]:
    """Returns the modules that embed absolute positions: tables, learned or of sines, but no rotary frequencies."""
    embeddings: list[tuple[str, nn.Module]] = []
    for name, part in model.named_modules():
        kind, own = type(part).__name__, name.rpartition(".")[2]
        is_named = "PositionalEmbedding" in kind or own in ("embed_positions", "position_embeddings", "wpe")
        if is_named and "Rotary" not in kind and not any(name.startswith(f"{other}.") for other, _ in embeddings):
            embeddings.append((name, part))
    return [part for _, part in embeddings]


def _add_documents(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    spans, index = _CURRENT.get(), get_chosen_tokens()
    if spans is None:
        return None
    return args, {**kwargs, _ARGUMENT: spans if index is None else spans.select(index)}


class _Carrying:
    """Forward of a block whose documents are among its arguments."""

    def __init__(self, module: nn.Module) -> None:
        self._carried = module.forward
        functools.update_wrapper(self, module.forward)  # copies attributes too: each wrapper has names of its own

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if _ARGUMENT not in kwargs:
            return self._carried(*args, **kwargs)
        with documents_of(kwargs.pop(_ARGUMENT)):
            return self._carried(*args, **kwargs)


def _cut_mask(
    is_additive: bool, place: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Returns the arguments of an attention module with a mask that is cut between documents; None to keep them.

    Implementations other than transformers' with dense masks get the documents in another way.
    """
    names = map(attention_implementation, module.modules())
    spans = _CURRENT.get()
    if spans is None or next(filter(None, names), "eager") not in _DENSE:
        return None
    mask = args[place] if place < len(args) else kwargs.get(_MASK)
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    dtype = next((tensor.dtype for tensor in tensors if tensor.is_floating_point()), torch.get_default_dtype())
    cut = _between_documents(mask, spans, is_additive, dtype)
    if cut is None:
        return None
    if place < len(args):
        return (*args[:place], cut, *args[place + 1 :]), kwargs
    return args, {**kwargs, _MASK: cut}


def _between_documents(mask: Any, spans: DocumentSpans, is_additive: bool, dtype: torch.dtype) -> Tensor | None:
    """Returns a mask that is cut between documents; None for one that has no dense form.

    Args:
        mask: Mask of the model, `[B, 1 or H, L, L]`, of truth values or added to scores; None for causal attention.
        spans: Documents.
        is_additive: Whether a mask in place of None is added to scores.
        dtype: Dtype of a mask that is added.
    """
    length = spans.position_ids.shape[1]
    if mask is None:
        seen = spans.same & torch.ones(length, length, dtype=torch.bool, device=spans.same.device).tril()
        if not is_additive:
            return seen
        return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, _lowest(dtype))
    if not isinstance(mask, Tensor) or mask.ndim != 4 or mask.shape[-2:] != (length, length):
        return None
    return _fill(mask, spans.same)


def _fill(mask: Tensor, seen: Tensor) -> Tensor:
    """Returns a mask, of truth values or added to scores, without what is not seen."""
    if mask.dtype == torch.bool:
        return mask & seen
    return mask.masked_fill(~seen, _lowest(mask.dtype))


def _lowest(dtype: torch.dtype) -> float:
    """Returns the lowest number of a mask: the softmax is in float32, where the lowest of float64 is -inf."""
    return max(torch.finfo(dtype).min, torch.finfo(torch.float32).min)


def _gather_positions(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    """Returns the rows of a position embedding of the positions that restart with each document."""
    spans = _CURRENT.get()
    if spans is None or not isinstance(output, Tensor):
        return None
    table = output if output.ndim == 2 else output[0]  # all rows are alike: [L, D]
    return table[spans.position_ids]


class _ByRows:
    """Forward of a module with one document per row."""

    def __init__(self, module: nn.Module) -> None:
        self._of_rows, self._name = module.forward, type(module).__name__
        functools.update_wrapper(self, module.forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        spans = _CURRENT.get()
        if spans is None:
            return self._of_rows(*args, **kwargs)
        tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
        if tensors and tensors[0].shape[:2] != spans.position_ids.shape:
            raise DloError(
                f"activations must have all {spans.position_ids.shape[1]} tokens of a row for packed documents in"
                f" {self._name}, got {list(tensors[0].shape)}; set sequence_parallel: false, or"
                " data.init_args.packing to none"
            )
        by_group = []
        with documents_of(None):
            for tokens in spans.groups:
                own_args = [_rows(value, tokens, spans) for value in args]
                own = {name: _rows(value, tokens, spans) for name, value in kwargs.items() if name not in _BOUNDARIES}
                by_group.append(self._of_rows(*own_args, **own))
        return _joined(by_group, spans)


def _rows(value: Any, tokens: Tensor, spans: DocumentSpans) -> Any:
    """Returns an argument for a call with one document per row: the tokens `[N, W]` of what has a value per token."""
    if isinstance(value, tuple | list):
        return type(value)(_rows(part, tokens, spans) for part in value)
    rows, length = spans.position_ids.shape
    if not isinstance(value, Tensor) or value.ndim < 2:
        return value
    inside, row = tokens % length, (tokens[:, 0] // length) % value.shape[0]
    if value.ndim == 4 and value.shape[-2:] == (length, length):  # a mask
        cut = torch.stack([value[r][:, i][:, :, i] for r, i in zip(row.tolist(), inside, strict=True)])
        seen = torch.ones(cut.shape[-2:], dtype=torch.bool, device=cut.device).tril()  # copies in padding are not
        hides = cut.dtype == torch.bool and not cut[0, 0, 0, 0]  # A token sees itself.
        return cut | ~seen if hides else _fill(cut, seen)
    if value.shape[:2] == (rows, length):
        return value.flatten(0, 1)[tokens]
    if value.shape[0] == 1 and value.shape[1] == length:
        return value[0][inside]
    if value.ndim == 4 and value.shape[2] == length and value.shape[0] in (1, rows):
        return torch.stack([value[r][:, i] for r, i in zip(row.tolist(), inside, strict=True)])
    if value.ndim == 2 and value.shape[0] == length:  # such as frequencies of positions
        return value[: tokens.shape[1]]
    return value


def _joined(by_group: list[Any], spans: DocumentSpans) -> Any:
    """Returns the result of all calls, in the order of the tokens."""
    first = by_group[0]
    if isinstance(first, tuple | list):
        return type(first)(_joined(list(parts), spans) for parts in zip(*by_group, strict=True))
    if not isinstance(first, Tensor) or first.ndim < 2:
        return by_group[-1]
    for part, tokens in zip(by_group, spans.groups, strict=True):
        if part.shape[:2] != tokens.shape:
            return by_group[-1]  # no value per token, such as attention weights, which nothing reads
    results = torch.cat([part.flatten(0, 1) for part in by_group])
    return results[spans.places].view(*spans.position_ids.shape, *first.shape[2:])
