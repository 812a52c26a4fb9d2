"""The task Seq2SeqLM: its loss is transformers' own, it writes targets, and it refuses models of other kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM

from dlo_framework.errors import DloError
from dlo_framework.frozen_model import default_dtype
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.generation import Sampling, complete_ids
from dlo_tasks.language.seq2seq_lm import Seq2SeqLM
from support.seq2seq import FAMILIES, pairs, seq2seq_config


def built(family: str, **options: Any) -> Seq2SeqLM:
    torch.manual_seed(0)
    task = Seq2SeqLM(config=seq2seq_config(family), **options)
    task.configure_model()
    return task


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@default_dtype(torch.float64)
def test_the_loss_is_transformers_own_and_the_head_runs_in_chunks(family: str, attention: str) -> None:
    task, batch = built(family, attention=attention), pairs()
    assert task._traits.has_linear_head
    model: Any = task.model
    own = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    expected = model(**own).loss
    found = task.training_step(batch, 0)["loss"]
    torch.testing.assert_close(found, expected, check_dtype=False)
    weights = [weight for weight in model.parameters() if weight.requires_grad]  # Pegasus has tables of sines.
    torch.testing.assert_close(*(torch.autograd.grad(loss, weights) for loss in (found, expected)))


@default_dtype(torch.float64)
def test_a_bias_of_the_logits_is_part_of_the_loss() -> None:
    task, batch = built("bart"), pairs()
    torch.nn.init.normal_(task.model.final_logits_bias)  # type: ignore[arg-type]
    task._prepare(task.model)
    assert not task._traits.has_linear_head
    own = {name: batch[name] for name in ("input_ids", "attention_mask", "labels")}
    torch.testing.assert_close(task.training_step(batch, 0)["loss"], task.model(**own).loss, check_dtype=False)


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_targets_are_those_of_transformers_generate(family: str) -> None:
    task, batch = built(family), pairs()
    model: Any = task.model.eval()
    written = complete_ids(model, batch["input_ids"], batch["attention_mask"], Sampling(max_new_tokens=6), None, False)
    own = {"max_new_tokens": 6, "forced_eos_token_id": None, "forced_bos_token_id": None}
    expected = model.generate(batch["input_ids"], attention_mask=batch["attention_mask"], **own)
    torch.testing.assert_close(written, expected[:, 1:])


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        (Seq2SeqLM, {"config": {"model_type": "llama"}}, "must be an encoder-decoder for Seq2SeqLM, .* use CausalLM"),
        (CausalLM, {"config": seq2seq_config("t5")}, "cannot build a causal language model from t5: .*use Seq2SeqLM"),
        (Seq2SeqLM, {"config": seq2seq_config("t5"), "attention": "dlo_varlen"}, "attention must be auto, sdpa or"),
        (Seq2SeqLM, {"config": seq2seq_config("t5"), "prompts": [[{"role": "user", "content": "x"}]]}, "must be texts"),
    ],
)
def test_models_and_options_of_other_kinds_are_refused(task: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(DloError, match=message):
        task(**options).check(None)


def test_a_trained_model_without_a_start_token_is_refused(tmp_path: Any) -> None:
    model = built("t5").model
    model.config.decoder_start_token_id = model.generation_config.decoder_start_token_id = None  # type: ignore[union-attr]
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    assert AutoModelForSeq2SeqLM.from_pretrained(tmp_path) is not None
    with pytest.raises(DloError, match="decoder_start_token_id must be set to the token with which targets begin"):
        Seq2SeqLM(str(tmp_path))
