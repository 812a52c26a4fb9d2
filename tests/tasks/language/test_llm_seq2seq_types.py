"""Every type of encoder-decoder of transformers trains with the loss of its logits, also on two ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES

from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.pipeline.pipeline_engine import Pipeline
from dlo_plugins.parallel.tensor.tensor_parallel import TensorParallel
from dlo_tasks.language.seq2seq_lm import Seq2SeqLM
from support.causal_types import tiny
from support.seq2seq import pairs
from support.tensor_models import assert_close, noisy, whole_gradients

#: Types of speech models, which have no encoder of text.
SPEECH = (
    *("audioflamingo3", "glmasr", "granite_speech", "granite_speech_plus", "moss_transcribe_diarize", "musicflamingo"),
    *("nemo_speechlm", "omniasr", "qwen2_audio", "qwen3_asr", "vibevoice_asr", "voxtral", "voxtral_realtime"),
)
TYPES = sorted(set(MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES) - set(SPEECH))
#: Types without tensor rules that can be proved; those whose gradients are NaN in double precision on one rank too.
NOT_DIVIDED = {"switch_transformers", "fsmt", "led", "prophetnet"}
#: Types whose gradients are NaN in double precision.
SINGLE = {"led"}
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


@pytest.mark.slow
@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.filterwarnings("ignore")
def test_a_type_trains_with_the_loss_of_its_logits(kind: str) -> None:
    task, data = built(kind).eval(), batch()  # Routers of Switch Transformers have noise in training.
    logits = task.model(**task.inputs(data)[1], use_cache=False).logits
    expected = F.cross_entropy(logits.flatten(0, 1), data["labels"].flatten())
    torch.testing.assert_close(task.training_step(data, 0)["loss"], expected, rtol=1e-5, atol=1e-5)
    task.parallel_plan().validate(task.model)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPEECH)
def test_a_speech_model_is_refused(kind: str) -> None:
    with pytest.raises(DloError, match="must be an encoder-decoder for Seq2SeqLM"):
        Seq2SeqLM(config={"model_type": kind})


def _divide(rank: int, world_size: int, kinds: list[str]) -> None:
    for kind in kinds:
        task = built(kind).double()
        noisy(task.model)
        shared, applier = copy.deepcopy(task), TensorParallel()
        plan = applier.complete_plan(shared, shared.parallel_plan(), world_size)
        applier.apply(shared.model, init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",)), plan)
        loss = shared.training_step(batch(), 0)["loss"]
        loss.backward()
        _check(task, loss, whole_gradients(shared.model), kind)


def _cut(rank: int, world_size: int, kinds: list[str]) -> None:
    for kind in kinds:
        task = built(kind).eval()  # Routers of Switch Transformers have noise in training.
        task = task if kind in SINGLE else task.double()
        noisy(task.model)
        shared = copy.deepcopy(task)
        assert dist.group.WORLD is not None
        pipeline = Pipeline(shared.model, shared.parallel_plan(), dist.group.WORLD)
        loss = pipeline.train_step([batch()], lambda part, one=shared: one(**one.inputs(part)[1]), shared.loss, [1.0])
        own = shared.model.named_parameters()
        gradients = {name: weight.grad for name, weight in own if pipeline.ownership(name)}
        _check(task, loss, {name: found for name, found in gradients.items() if found is not None}, kind)


def _check(task: Seq2SeqLM, loss: Tensor, gradients: dict[str, Tensor], kind: str) -> None:
    """Compares a loss and some gradients with those of one process."""
    expected = task.training_step(batch(), 0)["loss"]
    torch.testing.assert_close(loss.detach(), expected.detach(), check_dtype=False)
    expected.backward()
    own = {name: weight.grad for name, weight in task.model.named_parameters() if weight.grad is not None}
    assert gradients
    assert_close(gradients, {name: own[name] for name in gradients}, 1e-4 if kind in SINGLE else 1e-6, kind)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("function", "left_out"), [(_divide, NOT_DIVIDED), (_cut, NOT_CUT)])
def test_types_on_two_ranks_are_one_process(function: Callable[..., None], left_out: set[str]) -> None:
    run_distributed(function, 2, [kind for kind in TYPES if kind not in left_out], timeout=1100)
