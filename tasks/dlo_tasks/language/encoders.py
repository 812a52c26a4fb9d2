"""Properties of models that predict masked tokens: how they keep packed documents apart, and what their head computes.

Encoders of transformers (5.24) have no common way to tell documents apart: the form of mask that a model takes, and the
number from which it counts positions, are found by running a small copy of it on a few tokens.

Shapes: B rows, L positions, N tokens, D width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_framework.frozen_model import default_dtype
from dlo_tasks.language import families, language_models
from dlo_tasks.language.batches import mark_document_starts
from dlo_tasks.language.document_isolation import FORWARD_FAILURES, near
from dlo_tasks.language.text_settings import text_settings
from dlo_tasks.language.tokenizer import first_line

if TYPE_CHECKING:
    from transformers import PreTrainedModel

#: Form of the mask of a model's attention: `boolean`, `[B, 1, L, L]`, true where tokens see each other; `additive`, the
#: same with 0 and the lowest number of the dtype; `rows`, int64 `[B, L, L]`, 1 or 0.
MaskForm = Literal["boolean", "additive", "rows"]
_FORMS: tuple[MaskForm, ...] = ("boolean", "additive", "rows")


class EncoderTraits(NamedTuple):
    """Properties of a model that predicts masked tokens.

    Attributes:
        mask: Form of mask that keeps documents apart; None where a model takes none.
        first_position: Number of a document's first position; None for a model that ignores positions, or takes none.
        has_linear_head: Whether the logits are the output projection of what the rest of the head computes, so that
            they can be computed in chunks.
    """

    mask: MaskForm | None = None
    first_position: int | None = None
    has_linear_head: bool = True

    @property
    def isolates_documents(self) -> bool:
        """Whether documents of a packed row can be kept apart."""
        return self.mask is not None


@torch.no_grad()
def probe_encoder(model: PreTrainedModel) -> EncoderTraits:
    """Returns the properties of a model, tested on a few tokens.

    Args:
        model: Model with its weights, or on the meta device.

    Raises:
        DloError: If no token attends to later ones, or the model cannot be tested.
    """
    tried = families.small_copy(model) if next(model.parameters()).is_meta else model
    was_training = tried.training
    tried.eval()
    try:
        with torch.device(tried.device), default_dtype(None if tried is model else torch.float32):
            _check_bidirectional(tried)
            has_linear_head = _projects(tried)
        return _find_isolation(model)._replace(has_linear_head=has_linear_head)
    except DloError:
        raise
    except FORWARD_FAILURES as error:
        raise DloError(
            f"model must be of a supported family, got {type(model).__name__}, which fails on a few tokens:"
            f" {first_line(error)}; choose, for example, bert or modernbert"
        ) from error
    finally:
        tried.train(was_training)


def _check_bidirectional(model: PreTrainedModel) -> None:
    tokens = families.ordinary_tokens(model)
    rows = torch.tensor([tokens, [*tokens[:2], tokens[0], *tokens[3:]]])
    first, other = encode(model, input_ids=rows)[:, :2].float()
    if torch.equal(first, other):
        raise DloError(
            f"model must attend to later tokens for MaskedLM, got {type(model).__name__}, whose output at a token does"
            " not change with a later one; set config.is_decoder: false, or train it as a CausalLM"
        )


def _find_isolation(model: PreTrainedModel) -> EncoderTraits:
    """Returns the form of mask, and the first position, with which documents in a row are as if each were alone."""
    pad = language_models.text_config(model.config).pad_token_id
    starts = [None, 0, *([] if pad is None else [pad + 1])]
    try:
        with torch.device("cpu"), default_dtype(torch.float32):
            twin = families.small_copy(model, window=2).eval()
            tokens = families.ordinary_tokens(twin)
            rows = torch.tensor([tokens, tokens[::-1]])
            positions = torch.tensor([[0, 1, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2]])
            parts = [[rows[0, :2], rows[0, 2:]], [rows[1, :3], rows[1, 3:]]]
            alone = torch.stack([torch.cat([encode(twin, input_ids=part[None])[0] for part in row]) for row in parts])
            for form, start in itertools.product(_FORMS, starts):
                traits = EncoderTraits(form, start)
                with contextlib.suppress(*FORWARD_FAILURES):  # such as a mask of a form that the model does not take
                    if near(encode(twin, input_ids=rows, **document_arguments(twin, positions, traits)), alone):
                        return traits
    except FORWARD_FAILURES:  # such as a model that cuts rows into blocks
        pass
    return EncoderTraits()


def document_arguments(
    model: PreTrainedModel, position_ids: Tensor, traits: EncoderTraits, *, masked: bool = True
) -> dict[str, Any]:
    """Returns keyword arguments with which a model keeps the documents of packed rows apart.

    Args:
        model: Model that is called.
        position_ids: Positions, `[B, L]`; a document begins with each row, and wherever they do not increase by one.
        traits: Properties of the model.
        masked: Whether they have a mask; else the positions alone.
    """
    places = {} if traits.first_position is None else {"position_ids": position_ids + traits.first_position}
    if not masked:
        return places
    number = mark_document_starts(position_ids).cumsum(dim=1)
    same = number[:, None, :, None] == number[:, None, None, :]
    settings = text_settings(language_models.text_config(model.config))
    mask: Any = _in_form(same, traits.mask, model)
    if "sliding_attention" in settings.layer_types:  # transformers takes a mask of four dims unchanged, in all layers.
        columns = torch.arange(position_ids.shape[1], device=position_ids.device)
        close = (columns[:, None] - columns[None]).abs() <= settings.sliding_window
        mask = {"full_attention": mask, "sliding_attention": _in_form(same & close, traits.mask, model)}
    return {"attention_mask": mask, **places}


def _in_form(seen: Tensor, form: MaskForm | None, model: PreTrainedModel) -> Tensor:
    if form == "rows":
        return seen[:, 0].long()
    if form == "boolean":
        return seen
    dtype = model.dtype
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)


def encode(model: PreTrainedModel, **inputs: Any) -> Tensor:
    """Returns the hidden states before the head, `[B, L, D]`."""
    hidden: Tensor = language_models.find_base_model(model)(**inputs)[0]
    return hidden


# --- the head ---------------------------------------------------------------------------------------------------


class HeadStage:
    """What a model's head computes before its output projection; called with hidden states `[N, D]`.

    BERT's is a dense layer, an activation and a norm, which model classes apply in their `forward`. It runs unchanged,
    with two modules replaced for the time of the call: the base model returns the hidden states, and the projection its
    input.

    Args:
        model: Model.
        projects: Whether to leave the projection out; otherwise the stage returns logits, `[N, V]`.
    """

    def __init__(self, model: PreTrainedModel, *, projects: bool) -> None:
        self._model, self._projects = model, projects

    def __call__(self, hidden: Tensor) -> Tensor:
        """Returns the projection's inputs, `[N, D]`, or the logits, `[N, V]`."""
        model: Any = self._model
        base, projection = language_models.find_base_model(model), model.get_output_embeddings()
        tokens = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
        with contextlib.ExitStack() as replaced:
            replaced.enter_context(_replaced(model, base, _Given(hidden[None])))
            if self._projects:
                replaced.enter_context(_replaced(model, projection, nn.Identity()))
            outputs = type(model).forward(model, input_ids=tokens)
        output: Tensor = outputs[0] if isinstance(outputs, tuple) else outputs.logits
        return output[0]


class _Given(nn.Module):
    """Base model that returns given hidden states."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _Output(self.hidden)


class _Output(tuple[Tensor]):
    """Output of a base model, of which heads pass on further fields."""

    def __new__(cls, hidden: Tensor) -> _Output:
        return super().__new__(cls, (hidden,))

    def __getattr__(self, name: str) -> Tensor | None:
        return self[0] if name == "last_hidden_state" else None


@contextlib.contextmanager
def _replaced(model: nn.Module, module: nn.Module, other: nn.Module) -> Iterator[None]:
    """Has another module in one's place inside the block; a strategy's hooks on the modules around it run."""
    name = next(name for name, each in model.named_modules() if each is module)
    parent, _, leaf = name.rpartition(".")
    siblings = model.get_submodule(parent)._modules
    siblings[leaf] = other
    try:
        yield
    finally:
        siblings[leaf] = module


def _projects(model: PreTrainedModel) -> bool:
    """Returns whether the logits are the projection of the stage's output."""
    seen: list[Tensor] = []
    base = language_models.find_base_model(model)
    with base.register_forward_hook(lambda module, inputs, output: seen.append(output[0])):
        output = model(input_ids=torch.tensor([families.ordinary_tokens(model)]))
    hidden = seen[0][0]
    expected = (output[0] if isinstance(output, tuple) else output.logits)[0]
    try:
        made: Tensor = model.get_output_embeddings()(HeadStage(model, projects=True)(hidden))
        if made.shape == expected.shape and near(made, expected):
            return True
    except FORWARD_FAILURES:  # such as a bias that is added after the projection
        pass
    made = HeadStage(model, projects=False)(hidden)
    if made.shape != expected.shape or not near(made, expected):
        raise DloError(
            f"model must compute its logits from hidden states by its head, got {type(model).__name__}; choose, for"
            " example, bert or modernbert"
        )
    return False
