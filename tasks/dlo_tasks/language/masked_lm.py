"""Task that trains models which predict masked tokens, such as BERT: `MaskedLM`."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from dlo_framework.data.description import DataDescription
from dlo_framework.errors import DloError
from dlo_framework.fake_kernels import FakeTensor
from dlo_framework.models.attention import Attention
from dlo_framework.plan import ParallelPlan
from dlo_framework.task_abilities import Generates
from dlo_tasks.language import batches, encoders, sparse_attention
from dlo_tasks.language.encoders import EncoderTraits, HeadStage
from dlo_tasks.language.generation import max_positions, print_samples
from dlo_tasks.language.language_model import LanguageModel
from dlo_tasks.language.language_plans import encoder_decoder_plan
from dlo_tasks.language.masked_data import MASK_FRACTION
from dlo_tasks.language.vocabulary_head import VocabularyHead

#: Arguments of blocks that are computed from tables of positions: MPNet's and RoFormer's.
_CARRIED = ("position_bias", "sinusoidal_pos")


class MaskedLM(LanguageModel, Generates):
    """Trains a model that predicts masked tokens from those on both sides: BERT, RoBERTa, ModernBERT, DeBERTa...

    Any model of transformers' `AutoModelForMaskedLM`. Batches are those of :class:`MaskedTextData`: dicts of `[B, L]`
    tensors, `input_ids` with masked tokens; `labels`, the token that was there, or -100 where none is predicted;
    `attention_mask` of padded rows; `position_ids`, which restart at 0 with each document of a packed row; and
    `tokens_in_step`, a scalar: the number of predicted tokens in the whole optimizer step.

    The head and the loss run on the predicted tokens alone. Validation and test log `loss`, `perplexity` and `accuracy`
    per predicted token. `predict_step` fills in masked tokens.

    Args:
        model: Folder that `save_pretrained` wrote, or name on the Hugging Face hub.
        config: Config of a model with random weights, in place of `model`; see :class:`LanguageModel`.
        **language_model: Further arguments of :class:`LanguageModel`.

    Raises:
        DloError: If a model, setting, target or argument does not exist, or values contradict each other.
    """

    kind = "masked"
    divided_by = ("cp",)
    looks_inside_by = "its tokens attend to all others of their document, under a mask that ranks cannot divide"
    looks_inside_fix = ""

    def __init__(
        self, model: str | None = None, config: dict[str, Any] | str | None = None, **language_model: Any
    ) -> None:
        super().__init__(model, config, **language_model)
        self._traits = EncoderTraits("boolean")  # Until the model is built.
        self._fraction = MASK_FRACTION  # Of the last example batch's data.
        if isinstance(self.attention, Attention):
            _check_attention(self.attention)

    def _probe(self, model: Any) -> EncoderTraits:
        if sparse_attention.is_masked(model):  # A copy on the meta device: the model itself has its own attention yet.
            model.set_attn_implementation("eager")
        return encoders.probe_encoder(model)

    def parallel_plan(self) -> ParallelPlan:
        """Returns the parallel plan of the model's family, without attention that ranks could share."""
        if self.model.config.is_encoder_decoder:  # type: ignore[union-attr]
            plan = encoder_decoder_plan(self.model)  # type: ignore[arg-type]
        else:
            plan = replace(super().parallel_plan(), carried=_CARRIED)
        return replace(plan, attention=())

    @property
    def head(self) -> VocabularyHead:
        """Head that turns the outputs of :meth:`forward` into logits."""
        projects = self._traits.has_linear_head
        stage = HeadStage(self.model, projects=projects)  # type: ignore[arg-type]
        projection = self.model.get_output_embeddings() if projects else torch.nn.Identity()  # type: ignore[operator]
        return VocabularyHead(projection, softcap=self.logit_softcap, stage=stage)

    def example_batch(self, datamodule: LightningDataModule | None) -> dict[str, Tensor]:
        """Returns a batch of one row, as long as the data's windows."""
        length = DataDescription(datamodule).seq_len or min(max_positions(self.config) or 512, 512)
        row = torch.zeros(1, length, dtype=torch.long)
        self._fraction = DataDescription(datamodule).mask_fraction or MASK_FRACTION
        masked = math.ceil(self._fraction * length)
        labels = torch.where(torch.arange(length) < masked, row, batches.IGNORE_INDEX)
        return {"input_ids": row, "labels": labels, "tokens_in_step": torch.tensor(masked)}

    def inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Returns the model's keyword arguments: tokens, and the mask of padded rows, or that of packed documents.

        Raises:
            DloError: If rows hold several documents and the model would let them attend to each other.
        """
        arguments = {"input_ids": batch["input_ids"]}
        positions = batch.get("position_ids")
        is_masked = sparse_attention.is_masked(self.model)  # type: ignore[arg-type]
        if batch.get("attention_mask") is not None:
            arguments["attention_mask"] = batch["attention_mask"]
        elif positions is not None and _are_packed(positions):
            if not self._traits.isolates_documents:
                raise DloError(
                    f"data.init_args.packing must be none for {type(self.model).__name__}, which takes no mask of"
                    " documents, got packed rows, whose documents would attend to each other; set packing: none"
                )
            arguments |= encoders.document_arguments(self.model, positions, self._traits, masked=not is_masked)  # type: ignore[arg-type]
        return (), arguments | sparse_attention.mask_arguments(batch) if is_masked else arguments

    def forward(self, **inputs: Tensor) -> Tensor:
        """Returns the hidden states before the head, `[B, L, D]`."""
        return encoders.encode(self.model, **inputs)  # type: ignore[arg-type]

    def _count_targets(self, labels: Tensor) -> int | None:
        if isinstance(labels, FakeTensor):  # It has no values.
            return math.ceil(self._fraction * labels.numel())
        return super()._count_targets(labels)

    def predict_step(self, batch: Any, batch_idx: int) -> list[dict[str, Any]]:
        """Returns the most probable tokens of each text's masks: `[{index, prompt, completion, tokens}]`.

        `prompt` is the text, `completion` the text with its masks filled in, and `tokens` the ids of the filled in
        tokens.

        Args:
            batch: Texts: `input_ids` and `attention_mask`, `[B, L]`; `labels`, the mask's id where a token is missing,
                -100 elsewhere; `index [B]`, the numbers of the texts, -1 for rows to leave out.
            batch_idx: Index of the batch.
        """
        ids, missing = batch["input_ids"], batch["labels"] != batches.IGNORE_INDEX
        head = self.head
        assert head.stage is not None
        features = head.stage(self._outputs(batch)[missing])
        best = VocabularyHead(head.module, softcap=head.softcap).logits(features).argmax(dim=1)
        filled = ids.masked_scatter(missing, best)
        predictions = []
        for number, before, after, holes, kept in zip(
            batch["index"].tolist(), ids, filled, missing, batch["attention_mask"].bool(), strict=True
        ):
            if number >= 0:
                decode = self.tokenizer.decode
                predictions.append(
                    {
                        "index": number,
                        "prompt": decode(before[kept]),
                        "completion": decode(after[kept], skip_special_tokens=True),
                        "tokens": after[holes].tolist(),
                    }
                )
        return predictions

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Prints the first texts, filled in."""
        shown = outputs[:3] if batch_idx == 0 else []
        if shown and self.trainer.is_global_zero:
            print_samples([row["prompt"] for row in shown], [row["completion"] for row in shown])


def _are_packed(position_ids: Tensor) -> bool:
    """Returns whether a row has several documents; of fake positions, which have no values, it may have."""
    return isinstance(position_ids, FakeTensor) or batches.count_documents(position_ids).number > len(position_ids)


def _check_attention(attention: Attention) -> None:
    """Checks a kernel or mask of dlo.

    Raises:
        DloError: The kernel is causal, or each head has a layout of its own, which ranks of `tp` would not divide.
    """
    if attention.kernel == "varlen":
        raise DloError("attention.kernel must see both directions for MaskedLM, got varlen, which is causal; set auto")
    if attention.mask is not None and attention.mask.different_layout_per_head:
        raise DloError(
            "attention.mask.different_layout_per_head must be false for MaskedLM, got true; remove it: all heads then"
            " have one layout"
        )
