"""Task that trains encoder-decoder language models of transformers: `Seq2SeqLM`."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor, nn

from dlo_framework.data.description import DataDescription
from dlo_framework.errors import DloError
from dlo_framework.models.attention import Attention
from dlo_framework.plan import ParallelPlan
from dlo_tasks.language import encoder_decoder, families, language_models
from dlo_tasks.language.batches import pad_right
from dlo_tasks.language.encoder_decoder import decoder_states, shift_right
from dlo_tasks.language.generation import check_generation_length, check_windows
from dlo_tasks.language.generative_lm import GenerativeLM
from dlo_tasks.language.language_models import ModelKind
from dlo_tasks.language.language_plans import encoder_decoder_plan
from dlo_tasks.language.text_settings import text_settings
from dlo_tasks.language.tokenizer import find_filler_id


class Seq2SeqLM(GenerativeLM):
    """Trains any encoder-decoder language model of transformers: T5, mT5, BART, Pegasus, ...

    Batches are dicts: `input_ids` and `attention_mask`, `[B, S]`, the padded sources; `labels`, `[B, T]`, the tokens of
    the targets, or -100; and `tokens_in_step`, a scalar, as for `CausalLM`. The decoder's inputs are the labels,
    shifted right behind the config's `decoder_start_token_id`; a batch may have others, `decoder_input_ids`. Packed
    rows have `encoder_segment_ids`, `[B, S]`, and `decoder_segment_ids`, `[B, T]`, in place of the mask: the number of
    each token's pair in its row, from 1, and 0 for padding.

    Validation and test log `loss`, `perplexity` and `accuracy` per token of the targets. `predict_step` writes targets
    for the sources of `predict_files`.

    The arguments are those of :class:`GenerativeLM`.

    Raises:
        DloError: If a model, setting or argument does not exist, the model is not an encoder-decoder, or values
            contradict each other.
    """

    kind: ModelKind = "seq2seq"
    needs_hidden_states = True
    divided_by = ("cp", "sequence_parallel")
    looks_inside_by = "each block of its decoder uses the encoder's output, and an encoder attends to later tokens"
    looks_inside_fix = ""

    def __init__(self, model: str | None = None, config: dict[str, Any] | str | None = None, **generative: Any) -> None:
        super().__init__(model, config, **generative)
        encoder_decoder.set_start_token(self.config, trained=model is not None)
        kernel = self.attention.kernel if isinstance(self.attention, Attention) else self.attention
        is_masked = isinstance(self.attention, Attention) and self.attention.mask is not None
        if is_masked or kernel not in (None, "auto", "sdpa", "eager"):
            given = "a mask" if is_masked else kernel
            raise DloError(
                "attention must be auto, sdpa or eager for Seq2SeqLM, whose encoder attends to later tokens, got"
                f" {given}; remove it"
            )
        if self.experts is not None and self.experts.count is not None:
            raise DloError(f"experts.count must be unset for Seq2SeqLM, got {self.experts.count}; remove it")
        chat = next((prompt for prompt in self.prompts if not isinstance(prompt, str)), None)
        if chat is not None:
            raise DloError(f"prompts must be texts for Seq2SeqLM, got the conversation {chat}; write a source text")

    def _check_data(self, data: DataDescription, model: Any) -> None:
        super()._check_data(data, model)
        check_windows(model, data.target_len, trained=self.model_name is not None, option="target_len")
        self._check_positions(model)

    def _check_positions(self, model: Any) -> None:
        if self.prompts:
            check_generation_length(model, 1, self.sampling.max_new_tokens)

    def _prepare(self, model: Any) -> None:
        self._check_positions(model)
        super()._prepare(model)

    def _probe(self, model: Any) -> families.Traits:
        traits = families.probe_encoder_decoder(model)
        bias = dict(model.named_buffers()).get("final_logits_bias")
        # A trained bias is not known before the weights are read.
        unknown = bias is not None and bias.is_meta and self.model_name is not None
        return traits._replace(has_linear_head=traits.has_linear_head and not unknown)

    def example_batch(self, datamodule: LightningDataModule | None) -> dict[str, Tensor]:
        """Returns a batch of one pair, as long as the data's rows."""
        data = DataDescription(datamodule)
        source, target = data.seq_len or 128, data.target_len or data.seq_len or 128
        row = torch.zeros(1, source, dtype=torch.long)
        labels = torch.zeros(1, target, dtype=torch.long)
        return {
            "input_ids": row,
            "attention_mask": torch.ones_like(row),
            "labels": labels,
            "tokens_in_step": torch.tensor(target),
        }

    def inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the model's keyword arguments: sources with their mask, targets shifted right, and segments.

        Raises:
            DloError: If the batch is of another task's data, or packed for a model that would not keep pairs apart.
        """
        names = ("input_ids", "attention_mask", "decoder_input_ids", "encoder_segment_ids", "decoder_segment_ids")
        arguments = {name: batch[name] for name in names if batch.get(name) is not None}
        if "encoder_segment_ids" in arguments and not self._traits.isolates_documents:
            raise DloError(
                f"data.init_args.packing must be none for {type(self.model).__name__}, whose positions do not restart"
                " with each pair of a packed row, got packed rows; set packing: none"
            )
        if "decoder_input_ids" not in arguments:
            config: Any = self.config
            arguments["decoder_input_ids"] = shift_right(
                batch["labels"],
                config.decoder_start_token_id,
                text_settings(config).pad_token_id or 0,
                arguments.get("decoder_segment_ids"),
            )
        return (), arguments

    def forward(self, **inputs: Tensor) -> Tensor:
        """Returns the decoder's hidden states before the head, `[B, T, D]`.

        For a model whose logits are more than a projection of them, it returns the logits, `[B, T, V]`.

        Args:
            **inputs: Inputs of the model; see :func:`dlo_tasks.language.encoder_decoder.decoder_states`.
        """
        if not self._traits.has_linear_head:
            return language_models.logits(self.model, **inputs)  # type: ignore[arg-type]
        return decoder_states(self.model, **inputs)  # type: ignore[arg-type]

    def parallel_plan(self) -> ParallelPlan:
        """Returns the parallel plan of both stacks; see :mod:`dlo_tasks.language.language_plans`."""
        return encoder_decoder_plan(self.model)  # type: ignore[arg-type]

    def compile_target(self) -> nn.Module:
        """Returns the decoder, of the two modules that :meth:`forward` calls, or the model for its logits."""
        model: Any = self.model
        return model.get_decoder() if self._traits.has_linear_head else model

    def _pad_prompts(self) -> tuple[Tensor, Tensor]:
        rows = encoder_decoder.encode_sources(self.tokenizer, self.prompts)
        return pad_right(rows, find_filler_id(self.tokenizer), self._root_device)
