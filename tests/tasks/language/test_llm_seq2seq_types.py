"""Every type of encoder-decoder of transformers trains with the loss of its logits, also on two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from dlo_framework.errors import DloError
from dlo_tasks.language.seq2seq_lm import Seq2SeqLM
from support.causal_types import tiny
from support.divided_types import check_cut, check_divided
from support.seq2seq import pairs

#: Types of speech models, which have no encoder of text.
SPEECH = (
    *("audioflamingo3", "glmasr", "granite_speech", "granite_speech_plus", "moss_transcribe_diarize", "musicflamingo"),
    *("nemo_speechlm", "omniasr", "qwen2_audio", "qwen3_asr", "vibevoice_asr", "voxtral", "voxtral_realtime"),
)
TYPES = sorted(set(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES) - set(SPEECH))
#: Types without tensor rules that can be proved; those whose gradients are NaN in double precision on one rank too.
NOT_DIVIDED = {"switch_transformers", "fsmt", "led", "prophetnet"}
#: FSMT's output projection is also its decoder's embedding; ProphetNet calls a method of its table of positions.
NOT_CUT = {"fsmt", "prophetnet"}


def built(kind: str) -> Seq2SeqLM:
    config = tiny(kind, dropout=False)
    if kind == "encoder-decoder":
        decoder = tiny("bert", dropout=False, add_cross_attention=True)
        config = {"encoder": decoder | {"is_decoder": False, "add_cross_attention": False}, "decoder": decoder}
        config |= {"model_type": kind, "decoder_start_token_id": 1, "pad_token_id": 0}
    torch.manual_seed(0)
    task = Seq2SeqLM(config=config)
    task.configure_model()
    return task


def batch() -> dict[str, Any]:
    found = pairs()
    return found | {"tokens_in_step": (found["labels"] != -100).sum()}


def example(kind: str) -> tuple[Seq2SeqLM, dict[str, Any]]:
    return built(kind).eval(), batch()  # Routers of Switch Transformers have noise in training.


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.filterwarnings("ignore")
def test_a_type_trains_with_the_loss_of_its_logits(kind: str) -> None:
    task, data = example(kind)
    logits = task.model(**task.inputs(data)[1], use_cache=False).logits
    expected = F.cross_entropy(logits.flatten(0, 1), data["labels"].flatten())
    torch.testing.assert_close(task.training_step(data, 0)["loss"], expected, rtol=1e-5, atol=1e-5)
    task.parallel_plan().validate(task.model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPEECH)
def test_a_speech_model_is_refused(kind: str) -> None:
    with pytest.raises(DloError, match="must be an encoder-decoder for Seq2SeqLM"):
        Seq2SeqLM(config={"model_type": kind})


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_types_divided_by_two_ranks_are_one_process() -> None:
    check_divided(example, [kind for kind in TYPES if kind not in NOT_DIVIDED], set())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_types_in_two_stages_are_one_process() -> None:
    check_cut(example, [kind for kind in TYPES if kind not in NOT_CUT])
