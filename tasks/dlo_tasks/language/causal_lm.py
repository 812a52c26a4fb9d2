"""Task that trains causal language models of transformers: `CausalLM`."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor

from dlo_framework.batches import FULL_POSITIONS
from dlo_framework.data.description import DataDescription
from dlo_framework.errors import DloError
from dlo_framework.task_abilities import CompletesBatches
from dlo_framework.units import format_bytes
from dlo_tasks.language import families, generation, language_models, sparse_attention
from dlo_tasks.language.batches import pad_left
from dlo_tasks.language.chat import warn_of_plain_prompts
from dlo_tasks.language.document_isolation import DocumentSpans, documents_of
from dlo_tasks.language.generation import Sampling, check_prompts, end_tokens, max_positions
from dlo_tasks.language.generative_lm import GenerativeLM


class CausalLM(GenerativeLM, CompletesBatches):
    """Trains any causal language model of transformers: all parameters, some of them, or low-rank adapters.

    Batches are dicts of `[B, L]` tensors: `input_ids`; `labels`, the id of the next token, or -100 where there is no
    target; `position_ids`, which restart at 0 with each document of a packed row, so that documents do not attend to
    each other; `attention_mask` for padded rows; and the scalar `tokens_in_step`, the number of targets in the whole
    optimizer step. With `tokens_in_step` the loss is the mean over all tokens of the step, for any division into ranks
    and micro-batches. Without it, the loss is the mean over all ranks' tokens of one micro-batch, and all micro-batches
    have the same weight.

    Validation and test log `loss`, `perplexity` and `accuracy` per token, and, with a tokenizer, `bits_per_byte` and
    `perplexity_per_byte`: exact means over all tokens of all ranks. `predict_step` completes prompts.

    The arguments are those of :class:`GenerativeLM`.

    Raises:
        DloError: If a model, setting, target or argument does not exist, or values contradict each other.
    """

    def _check_data(self, data: DataDescription, model: Any) -> None:
        if self.prompts and data.trains_on_chats:
            warn_of_plain_prompts("model.init_args.prompts", self.prompts)
        super()._check_data(data, model)
        check_prompts(model, self.prompts, None, self.sampling.max_new_tokens)

    def _prepare(self, model: Any) -> None:
        if sparse_attention.is_default(self.attention) and self._trainer is not None:
            families.enable_packed_attention(model, self._root_device)
        check_prompts(model, self.prompts, self.tokenizer, self.sampling.max_new_tokens)
        super()._prepare(model)
        self._check_head(model)
        if self._traits.isolation is not None:
            self._traits.isolation.install(model, language_models.find_blocks(model)[1])

    def _check_head(self, model: Any) -> None:
        """Warns of the memory cost of a head that is more than a projection; refuses it with a load-balancing loss."""
        if self._traits.has_linear_head:
            return
        name, vocabulary = type(model).__name__, language_models.model_vocabulary_size(self.config)
        if self._balance is not None:
            raise DloError(
                "config.output_router_logits must be false for models whose logits are more than a projection, a scale"
                f" and a soft-cap, got true for {name}; set config.output_router_logits: false"
            )
        rank_zero_warn(
            f"{name} computes its logits by more than a projection, a scale and a soft-cap; its loss needs the logits"
            f" of all tokens at once: {format_bytes(4 * vocabulary)} per token, and the same again for their gradient"
        )

    def example_batch(self, datamodule: LightningDataModule | None) -> dict[str, Tensor]:
        """Returns a batch of one row, as long as the data's windows."""
        length = DataDescription(datamodule).seq_len or min(max_positions(self.config) or 512, 2048)
        row = torch.zeros(1, length, dtype=torch.long)
        positions = torch.arange(length)[None]
        return {"input_ids": row, "labels": row, "position_ids": positions, "tokens_in_step": torch.tensor(length)}

    def inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the model's keyword arguments: tokens, positions, the mask of padded rows, and document boundaries.

        Raises:
            DloError: If rows hold several documents and the model would let them attend to each other.
        """
        names = ("input_ids", "position_ids", "attention_mask")
        arguments = {name: batch[name] for name in names if batch.get(name) is not None}
        positions = batch.get(FULL_POSITIONS, arguments.get("position_ids"))
        described = arguments if positions is None else arguments | {"position_ids": positions}
        told = families.document_arguments(self.model, described, packs=self._traits.isolates_documents)  # type: ignore[arg-type]
        if self._traits.isolation is not None and "attention_mask" not in arguments:
            told["documents"] = families.isolated_documents(positions)
        if not self._traits.positions_from_0:
            arguments.pop("position_ids", None)
        return (), arguments | told

    def forward(self, documents: DocumentSpans | None = None, **inputs: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Returns the hidden states before the head, `[B, L, D]`; the logits of all tokens are never computed at once.

        For a model whose logits are more than a projection, a scale and a soft-cap, it returns the logits, `[B, L, V]`.
        In training with a load-balancing loss, it returns a pair: the hidden states and that loss, a scalar.

        Args:
            documents: Documents of packed rows, for a model that ignores restarting positions.
            **inputs: Inputs of the model.
        """
        if documents is not None:
            with documents_of(documents):
                return self.forward(None, **inputs)
        if not self._traits.has_linear_head:
            return language_models.logits(self.model, **inputs)  # type: ignore[arg-type]
        if self._balance is None:
            return language_models.hidden_states(self.model, **inputs)  # type: ignore[arg-type]
        if self.stage == "train":
            return self._balance.hidden_states(self.model, inputs)  # type: ignore[arg-type]
        return language_models.hidden_states(self.model, **inputs, output_router_logits=False)  # type: ignore[arg-type]

    def complete_batch(
        self,
        batch: Any,
        *,
        prompt_tokens: int | None,
        max_new_tokens: int,
        temperature: float,
        seed: int,
        multiple: int = 1,
    ) -> dict[str, Tensor]:
        """Returns a batch with the model's completions of the rows' prompts, without padding on the left.

        It has no `tokens_in_step`: only other ranks know how many tokens they have written.
        """
        prompts = generation.find_prompts(batch, prompt_tokens)
        ids, mask = pad_left(prompts, 0, batch["input_ids"].device)
        sampling = Sampling(max_new_tokens, temperature)
        draws = generation.draw_for_rows(batch, max_new_tokens, seed).to(ids.device)
        written = self._complete_ids(ids, mask, sampling, draws)
        ends = end_tokens(self.model, self.tokenizer)  # type: ignore[arg-type]
        return generation.join_completions(prompts, written.tolist(), ends, batch["input_ids"].device, multiple)
