"""Families of language models: what is known of them, what they are tried with, and what is refused."""

import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.modeling_flash_attention_utils as flash_attention
from torch import Tensor

from dlo_framework.errors import DloError
from dlo_tasks.language import families, language_models
from dlo_tasks.language.causal_lm import CausalLM
from support.causal_types import tiny
from support.token_batches import PLACES, SMALL, built_model, small_model

LLAMA: dict[str, Any] = {"model_type": "llama", **SMALL, "num_key_value_heads": 2}


@pytest.mark.filterwarnings("ignore")
def test_a_family_that_cannot_keep_documents_apart_refuses_packed_ones() -> None:
    task = CausalLM(config=tiny("xlnet", dropout=False))
    task.configure_model()
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "labels": torch.zeros(1, 4, dtype=torch.long)}
    task.training_step({**batch, "position_ids": torch.tensor([[0, 1, 2, 3]])}, 0)
    with pytest.raises(DloError, match=r"must be none for .*, which ignores restarting positions"):
        task.training_step({**batch, "position_ids": torch.tensor([[0, 1, 0, 1]])}, 0)


@pytest.mark.parametrize("family", sorted(families.KNOWN))
def test_families_that_are_known_pass_what_others_are_tried_with(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "KNOWN", frozenset())
    more = {"gemma2": {"final_logit_softcapping": 2.0}, "granite": {"logits_scaling": 3.0}}.get(family, {})
    assert families.probe_traits(small_model(family, **more))


def test_a_known_family_is_not_tried_and_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = built_model(LLAMA)
    monkeypatch.setattr(families, "KNOWN", frozenset())
    assert families.probe_traits(model)
    monkeypatch.setattr(
        language_models, "find_head", lambda model: language_models.VocabularyHead(model.lm_head, scale=0.9)
    )
    assert families.probe_traits(model) == families.KNOWN_TRAITS._replace(has_linear_head=False)


def test_families_that_compute_norms_in_single_precision_are_taken_in_double() -> None:
    """The tolerance is that of float32, in which they compute; mixtures do without kernels that take no double."""
    for family in ("nanochat", "minimax_m3_vl_text", "qwen2_moe"):
        torch.manual_seed(0)
        model = built_model(
            {**LLAMA, "model_type": family, "head_dim": 8, "max_position_embeddings": 64}, torch.float64
        )
        assert families.probe_traits(model), family


# --- flash attention -------------------------------------------------------------------------------------------


def dense(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
    """What flash_attn_func computes, `[B, L, H, D]`."""
    query, key, value = (tensor.transpose(1, 2) for tensor in (query, key, value))
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True).transpose(1, 2)


def by_lengths(query: Tensor, key: Tensor, value: Tensor, cu_seqlens_q: Tensor, **others: Any) -> Tensor:
    """What flash_attn_varlen_func computes, `[all tokens, H, D]`."""
    assert others["max_seqlen_q"] == max(cu_seqlens_q.diff())
    edges = cu_seqlens_q.tolist()
    spans = [slice(*edge) for edge in itertools.pairwise(edges)]
    return torch.cat([dense(query[None, span], key[None, span], value[None, span])[0] for span in spans])


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of flash attention, in what transformers asks for them, for a CPU."""

    def process(max_seqlen_q: Any = None, **_: Any) -> dict[str, Any]:
        return {"max_seqlen_q": max_seqlen_q}

    found = ((dense, by_lengths, None, None, None), (process, process))
    monkeypatch.setattr(flash_attention, "lazy_import_flash_attention", lambda *_: found)


def task_of(family: str, **more: Any) -> CausalLM:
    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 60} if family == "gpt2" else dict(LLAMA)
    if family == "gpt_neox":
        del sizes["num_key_value_heads"]
    task = CausalLM(config={**sizes, "model_type": family, **more})
    task.configure_model()
    return task


def set_flash(task: CausalLM) -> None:
    """As a run with `attention: flash_attention_2` has it, which cannot be built where the kernels cannot run."""
    task.model.config._attn_implementation = "flash_attention_2"  # type: ignore[union-attr]


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_flash_kernels_give_packed_rows_the_loss_of_sdpa(family: str, places: list[list[int]], kernels: None) -> None:
    task = task_of(family)
    positions = torch.tensor(places)
    ids, labels = torch.randint(60, (2, *positions.shape), generator=torch.Generator().manual_seed(1))
    batch = {"input_ids": ids, "labels": labels, "position_ids": positions}
    task.eval()  # no dropout
    expected = task.training_step(batch, 0)["loss"]
    set_flash(task)
    found = task.training_step(batch, 0)["loss"]
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    found.backward()
    assert "cu_seq_lens_q" not in task.inputs({**batch, "attention_mask": torch.ones_like(ids)})[1]


def flash_task_of(monkeypatch: pytest.MonkeyPatch, family: str, **sizes: Any) -> CausalLM:
    """A task that is built as if flash attention could be."""
    build = language_models.build_model

    def built(*args: Any, **options: Any) -> Any:
        model = build(*args, **options)
        if model.device.type != "meta":
            model.config._attn_implementation = "flash_attention_2"
        return model

    monkeypatch.setattr(language_models, "build_model", built)
    return task_of(family, **sizes)


@pytest.mark.parametrize("family", sorted(families.KNOWN))
def test_families_that_are_known_tell_flash_attention_of_documents(family: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(families, "KNOWN", frozenset())
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    task = flash_task_of(monkeypatch, family, **special)
    assert families.is_flash(task.model)  # type: ignore[arg-type]
    assert task._traits.isolates_documents


def test_a_family_whose_flash_attention_is_its_own_refuses_packed_documents(monkeypatch: Any) -> None:
    task = flash_task_of(monkeypatch, "stablelm")
    with pytest.raises(DloError, match=r"would attend to each other; set packing: none, or attention: sdpa"):
        task.inputs({"input_ids": torch.zeros(1, 4), "position_ids": torch.tensor([[0, 1, 0, 1]])})


# --- models without memory -------------------------------------------------------------------------------------

SPARSE: dict[str, Any] = {"intermediate_size": 48, "num_local_experts": 4, "head_dim": 8, "num_key_value_heads": 2}
#: Settings, and whether positions suffice to keep documents apart.
OTHERS: dict[str, tuple[dict[str, Any], bool]] = {
    "opt": ({"ffn_dim": 32, "word_embed_proj_dim": 32}, False),
    "gpt_oss": (SPARSE, False),
    "bloom": ({}, False),
    "mixtral": (SPARSE, True),
    "olmo": ({"intermediate_size": 48}, True),
    "lfm2": ({"intermediate_size": 48, "num_key_value_heads": 2}, True),  # two kinds of blocks
}


@pytest.mark.parametrize("family", OTHERS)
def test_a_model_without_memory_is_judged_as_one_with_it(family: str) -> None:
    more, packs = OTHERS[family]
    sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    for device in ("cpu", "meta"):
        with torch.device(device):
            dtype = torch.bfloat16 if device == "meta" else None
            model = built_model({"model_type": family, **sizes, **more}, dtype)
            state = torch.get_rng_state()
            found = families.probe_traits(model)
            assert found.isolates_documents
            assert (found.isolation is None) is packs
        assert torch.equal(torch.get_rng_state(), state)
        assert next(model.parameters()).device.type == device


def test_a_twin_has_a_block_of_each_kind_and_next_to_no_memory() -> None:
    sizes = {**LLAMA, "vocab_size": 50_000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 20}
    with torch.device("meta"):
        model = built_model({**sizes, "model_type": "gemma3_text"}, torch.bfloat16)
    twin = families.small_copy(model)
    kinds = {model.config.layer_types[number] for number in range(len(twin.model.layers))}
    assert kinds == {"sliding_attention", "full_attention"}
    assert len(twin.model.layers) < 20
    held = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in twin.parameters()}
    assert sum(held.values()) < 2**22
    logits = twin(input_ids=torch.arange(6)[None]).logits
    assert logits.std() > 0.1  # its blocks do something
    assert logits[0, 0].std() > 0.1


# --- what is not supported -------------------------------------------------------------------------------------


def test_a_model_that_is_its_own_base_is_called_without_its_head() -> None:
    sizes = {"intermediate_size_mlp": 64, "num_local_experts": 2, "head_dim": 8}
    task = task_of("llama4_text", **sizes)
    assert task.compile_target() is task.model.model
    ids = torch.arange(8)[None]
    hidden = task(input_ids=ids)
    assert hidden.shape == (1, 8, 32)
    torch.testing.assert_close(task.head.logits(hidden), task.model(input_ids=ids).logits)


def test_hidden_states_that_cannot_be_the_heads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_models, "hidden_states", lambda model, **_: None)
    with pytest.raises(DloError, match=r"^model must be of a supported family, got OlmoForCausalLM, which fails"):
        task_of("olmo")
