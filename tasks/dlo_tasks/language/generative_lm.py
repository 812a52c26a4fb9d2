"""Base of the tasks whose language models write text: `GenerativeLM`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dlo_framework.errors import DloError
from dlo_framework.strategy_abilities import Pipelined, full_sequences
from dlo_framework.strategy_contract import contract_of
from dlo_framework.task_abilities import Generates
from dlo_framework.watch.media import log_text
from dlo_tasks.language.batches import pad_left
from dlo_tasks.language.chat import encode_prompts
from dlo_tasks.language.generation import Sampling, as_markdown, complete_ids, print_samples
from dlo_tasks.language.language_model import LanguageModel


class GenerativeLM(LanguageModel, Generates):
    """Trains a language model that writes text: completions of prompts, or targets of sources.

    `predict_step` writes them for the prompts of `predict_files`.

    Args:
        model: Folder that `save_pretrained` wrote, or name on the Hugging Face hub.
        config: Config of a model with random weights, in place of `model`; see :class:`LanguageModel`.
        prompts: Prompts that are completed at each validation, for TensorBoard, and printed when training ends: texts,
            or, for a causal model, conversations, `[{role: user, content: ...}]`, which the tokenizer's chat template
            renders.
        sampling: Sampling options for `prompts` and for `dlo predict`: `{max_new_tokens: 64, temperature: 0.8}`.
        **language_model: Further arguments of :class:`LanguageModel`.

    Raises:
        DloError: If a model, setting, target or argument does not exist, or values contradict each other.
    """

    generates_in_stages = True

    def __init__(
        self,
        model: str | None = None,
        config: dict[str, Any] | str | None = None,
        prompts: list[str | list[dict[str, Any]]] | None = None,
        sampling: Sampling | None = None,
        **language_model: Any,
    ) -> None:
        super().__init__(model, config, **language_model)
        # Stored as plain data in checkpoints; `load_from_checkpoint` passes it as a dict.
        sampling = Sampling(**sampling) if isinstance(sampling, dict) else sampling
        self.hparams["sampling"] = None if sampling is None else vars(sampling).copy()
        self.prompts, self.sampling = list(prompts or []), sampling or Sampling()
        self.samples: list[str] = []

    def _fit_to_data(self) -> None:
        super()._fit_to_data()
        if self.tokenizer is None and self.prompts and self._trainer is not None:
            raise DloError(
                f"prompts must be unset where the datamodule has no attribute 'tokenizer', got {len(self.prompts)}"
                " prompts; remove them, or add a tokenizer to the datamodule"
            )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Updates the validation metrics, and completes the prompts with the first batch."""
        super().validation_step(batch, batch_idx)
        self.after_validation_step(batch_idx)

    def after_validation_step(self, batch_idx: int) -> None:
        """Completes the prompts with the first batch, where weights are available; a pipeline calls it too."""
        if batch_idx == 0 and self.prompts and not self.trainer.sanity_checking:
            with full_sequences(contract_of(self.trainer.strategy)):
                written = self._complete_ids(*self._pad_prompts(), self.sampling)
                self.samples = self.tokenizer.batch_decode(written, skip_special_tokens=True)

    def _pad_prompts(self) -> tuple[Tensor, Tensor]:
        """Returns the ids and the attention mask of `prompts`, both `[B, L]`."""
        pad = self.tokenizer.pad_token_id
        return pad_left(encode_prompts(self.tokenizer, self.prompts), 0 if pad is None else pad, self._root_device)

    def _complete_ids(self, ids: Tensor, mask: Tensor, sampling: Sampling, draws: Tensor | None = None) -> Tensor:
        model: Any = self.model
        pipelined = contract_of(self.trainer.strategy).find_ability(Pipelined)
        return complete_ids(
            model, ids, mask, sampling, self.tokenizer, self._together, draws, self.logit_softcap, pipelined
        )

    @property
    def _together(self) -> bool:
        """Whether a forward needs all ranks, because the strategy gathers weights in it."""
        return contract_of(self.trainer.strategy).forward_needs_all_ranks and dist.is_initialized()

    def predict_step(self, batch: Any, batch_idx: int) -> list[dict[str, Any]]:
        """Returns the completion of each prompt: `[{index, prompt, completion, tokens}]`, with texts and token ids.

        Without a tokenizer, the texts are missing.

        Args:
            batch: Prompts: `input_ids` and `attention_mask`, `[B, L]`, padded on the left; `index [B]`, the prompts'
                numbers, -1 for rows to leave out.
            batch_idx: Index of the batch.
        """
        ids, mask = batch["input_ids"], batch.get("attention_mask")
        mask = torch.ones_like(ids) if mask is None else mask
        with full_sequences(contract_of(self.trainer.strategy)):
            written = self._complete_ids(ids, mask, self.sampling)
        numbers = batch["index"].tolist() if "index" in batch else list(range(len(ids)))
        predictions: list[dict[str, Any]] = []
        for number, prompt, kept, row in zip(numbers, ids, mask, written, strict=True):
            if number >= 0:
                parts = {} if self.tokenizer is None else {"prompt": prompt[kept.bool()], "completion": row}
                texts = {name: self.tokenizer.decode(ids, skip_special_tokens=True) for name, ids in parts.items()}
                predictions.append({"index": number, **texts, "tokens": row.tolist()})
        return predictions

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Prints the first completions."""
        shown = [row for row in outputs[:3] if "completion" in row] if batch_idx == 0 else []
        if shown and self.trainer.is_global_zero:
            print_samples([row["prompt"] for row in shown], [row["completion"] for row in shown])

    def on_validation_epoch_end(self) -> None:
        """Logs the completed prompts."""
        if self.samples:
            log_text(self.trainer, "samples", lambda: as_markdown(self.prompts, self.samples))

    def on_train_end(self) -> None:
        """Prints the last completed prompts."""
        if self.samples and self.trainer.is_global_zero:
            print_samples(self.prompts, self.samples)
