"""Attention of packed documents without a dense mask gives what the dense mask gives; families, and what is refused."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers.modeling_flash_attention_utils as flash_attention
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from dlo_framework.errors import DloError
from dlo_tasks.language import batches, families, language_models, packed_attention
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.generation import Sampling, complete_ids
from support.causal_types import tiny
from support.fsdp_nets import trainer
from support.largest_tensor import Largest
from support.token_batches import FAMILIES, GROUPED, PLACES, VOCABULARY, Tokens, built_model
from support.waits import Waits

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
MIXED = {"use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]}
SIZES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 3},
    "qwen3": {**GROUPED, "head_dim": 8, "sliding_window": 3, **MIXED},
    "gpt2": {**FAMILIES["gpt2"], "attn_pdrop": 0.0},
}


def task_of(attention: str, family: str = "llama", **more: Any) -> CausalLM:
    torch.manual_seed(0)
    task = CausalLM(config={"model_type": family, **SIZES[family], **more}, attention=attention, dtype="float64")
    task.configure_model()
    return task.eval()  # no dropout


def batch_of(positions: Tensor | None) -> dict[str, Tensor]:
    shape = (2, 8) if positions is None else positions.shape
    ids, labels = torch.randint(VOCABULARY, (2, *shape), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": labels, **({} if positions is None else {"position_ids": positions})}


def loss_and_gradients(task: CausalLM, batch: dict[str, Tensor]) -> list[Tensor]:
    loss = task.training_step(batch, 0)["loss"]
    return [loss.detach(), *torch.autograd.grad(loss, [p for p in task.parameters() if p.requires_grad])]


def compare(task: CausalLM, other: CausalLM, positions: Tensor | None, rtol: float = 1e-5, atol: float = 1e-7) -> None:
    batch = batch_of(positions)
    for found, expected in zip(loss_and_gradients(task, batch), loss_and_gradients(other, batch), strict=True):
        torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)


@pytest.mark.parametrize("family", SIZES)
def test_it_is_the_dense_mask(family: str) -> None:
    ours, dense = task_of("dlo_varlen", family), task_of("sdpa", family)
    for name, places in PLACES.items():
        told = ours.inputs(batch_of(torch.tensor(places)))[1]
        has_window = family in ("mistral", "qwen3")
        assert ("cu_seq_lens_q" in told) == (name != "one a row" or has_window), name
        compare(ours, dense, torch.tensor(places))
    compare(ours, dense, None)


def test_recomputed_blocks_and_adapters_are_told_the_documents_too() -> None:
    torch.manual_seed(0)
    tasks = [
        CausalLM(
            config={"model_type": "llama", **GROUPED}, attention=attention, lora={"rank": 2}, recompute=True  # type: ignore[arg-type]
        )
        for attention in ("dlo_varlen", "sdpa")
    ]  # fmt: skip
    for task in tasks:
        torch.manual_seed(0)
        task.configure_model()
    for parameters in zip(*(task.parameters() for task in tasks), strict=True):
        parameters[1].data.copy_(parameters[0].data)
    compare(*tasks, torch.tensor(PLACES["several documents a row"]), rtol=1e-4, atol=1e-6)


def test_where_torch_shares_no_heads_of_keys_they_are_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in torch 2.11."""
    monkeypatch.setattr(packed_attention, "_GROUPS", False)
    given = {}

    def kernel(query: Tensor, key: Tensor, *rest: Any, **options: Any) -> Tensor:
        given.update(options, heads=(query.shape[1], key.shape[1]))
        return reference(query, key, *rest, **options)

    reference = packed_attention.varlen_reference
    monkeypatch.setattr(packed_attention, "varlen_reference", kernel)
    compare(task_of("dlo_varlen"), task_of("sdpa"), torch.tensor(PLACES["several documents a row"]))
    assert given["heads"] == (4, 4)
    assert "enable_gqa" not in given


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
@pytest.mark.parametrize("kernel", ["varlen", "flex"])
def test_no_dense_mask_is_made_and_nothing_waits(family: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With kernels that compute nothing, as one that ran on the host would have to look at the documents."""
    calls: list[Any] = []

    def varlen(query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Tensor:
        calls.append((rest, options))
        return torch.empty_like(query)

    def flex(query: Tensor, key: Tensor, value: Tensor, mask: BlockMask, scale: float, score_mod: Any) -> Tensor:
        calls.append(mask)
        return torch.empty_like(query)

    monkeypatch.setattr(packed_attention, "varlen_reference", varlen)
    monkeypatch.setattr(packed_attention, "run_flex", flex)
    monkeypatch.setattr(packed_attention, "choose_kernel", lambda *_: kernel)
    length = 64
    positions = torch.arange(length).repeat(2, 2).view(2, -1)  # [2, 128]: two documents a row
    batch = batch_of(positions)
    batches.attach_counts(batch, batches.count_rows(batch))
    task, dense = task_of("dlo_varlen", family), task_of("sdpa", family)
    with Waits() as waits, Largest(floats=False) as largest:
        task.forward(**task.inputs(batch)[1])
    assert len(calls) == 2  # one a layer
    assert not waits.calls
    assert largest.elements <= 2 * 128 * 32  # a tensor of the model's, and no [2, 1, 128, 128]
    with Waits() as waits, Largest(floats=False) as largest:
        dense.forward(**dense.inputs(batch)[1])
    assert largest.elements == 2 * 128 * 128
    assert waits.calls
    if kernel == "varlen":
        (edges, _, longest, _), _ = calls[0]
        assert edges.tolist() == [0, 64, 128, 192, 256]
        assert (edges.dtype, longest) == (torch.int32, 64)
        windows = {options["window_size"] for _, options in calls}
        assert windows == {"llama": {(-1, 0)}, "mistral": {(2, 0)}, "qwen3": {(2, 0), (-1, 0)}}[family]


def random_positions(rows: int, length: int, most: int) -> Tensor:
    draw = torch.Generator().manual_seed(length + most)
    begins = torch.rand(rows, length, generator=draw) < 1 / most
    begins[:, 0] = True
    places = torch.arange(length)
    return places - torch.where(begins, places, 0).cummax(dim=1).values


@pytest.mark.parametrize(("length", "most"), [(64, 9), (61, 30), (16, 4), (7, 3), (128, 1000)])
def test_a_block_mask_is_that_of_the_dense_one(length: int, most: int) -> None:
    positions = random_positions(3, length, most)
    begins = batches.mark_document_starts(positions)
    document = begins.cumsum(dim=1)
    for window, block in itertools.product([None, 1, 5, 20], [16, 8]):

        def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor, window: int | None = window) -> Tensor:
            near = q - k < (window or length)
            return (document[b, q] == document[b, k]) & (q >= k) & near

        expected = create_block_mask(sees, 3, None, length, length, device="cpu", BLOCK_SIZE=block)
        found = packed_attention.block_mask(positions, window, block)
        assert torch.equal(found.to_dense(), expected.to_dense())
        for part in ("kv_num_blocks", "q_num_blocks"):
            wholly = getattr(expected, f"full_{part}")
            total = getattr(expected, part) + wholly
            ours = getattr(found, f"full_{part}")
            assert torch.equal(getattr(found, part) + ours, total)
            # A block that ends with the row is whole to us only if it is complete; never the other way round.
            assert (ours <= wholly).all() or length % block
        places = torch.arange(length)
        grid = found.mask_mod(torch.arange(3)[:, None, None], torch.tensor(0), places[:, None], places[None])
        same = sees(torch.arange(3)[:, None, None], torch.tensor(0), places[:, None], places[None])
        assert torch.equal(grid, same)


@torch.no_grad()
def compare_losses(task: CausalLM, other: CausalLM, positions: Tensor) -> None:
    """FlexAttention has no backward on a CPU: tests/gpu/test_packed_attention_on_gpu.py compares gradients."""
    batch = batch_of(positions)
    found, expected = (one.training_step(batch, 0)["loss"] for one in (task, other))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_flex_attention_is_the_dense_mask(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_attention, "choose_kernel", lambda *_: "flex")
    small = functools.partial(packed_attention.block_mask, block=16)
    monkeypatch.setattr(packed_attention, "block_mask", small)
    compare_losses(task_of("dlo_varlen", family), task_of("sdpa", family), random_positions(2, 64, 9))


@pytest.mark.parametrize("kernel", ["flex", None])
def test_scores_are_capped_by_flex_attention_and_on_a_cpu(kernel: str | None, monkeypatch: Any) -> None:
    config = {"model_type": "gemma2", **FAMILIES["gemma2"]}
    tasks = []
    for attention in ("dlo_varlen", "eager"):
        torch.manual_seed(0)
        tasks.append(CausalLM(config=config, attention=attention).eval())
        tasks[-1].configure_model()
    monkeypatch.setattr(packed_attention, "choose_kernel", lambda *_: kernel)
    for positions in (torch.arange(24).expand(2, 24), random_positions(2, 24, 9)):
        compare_losses(*tasks, positions)


@pytest.mark.parametrize("family", sorted(families.KNOWN - {"gemma2", "gemma3_text"}))
def test_known_families_pass_what_others_are_tried_with(family: str) -> None:
    more = {"sliding_window": 4096} if family in ("mistral", "phi3") else {}
    assert families.matches_dense_mask(small_model(family, **more))


def test_a_family_that_it_does_not_serve_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")

    def used(device: torch.device = GPU, **settings: Any) -> str:
        sizes = {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
        model = built_model({**sizes, **settings})
        families.enable_packed_attention(model, device)
        return str(model.config._attn_implementation)

    assert used(model_type="llama") == "dlo_varlen"
    assert used(model_type="smollm3", intermediate_size=48, pad_token_id=0) == "dlo_varlen"  # tried
    assert used(model_type="falcon") == "sdpa"  # its positions do not keep documents apart
    assert used(model_type="llama", attention_dropout=0.1) == "sdpa"
    assert used(CPU, model_type="llama") == "sdpa"


@pytest.mark.parametrize(("attention", "expected"), [(None, "dlo_varlen"), ("sdpa", "sdpa")])
def test_a_run_on_cuda_has_it_unless_the_user_chose(attention: str | None, expected: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(CausalLM, "_root_device", GPU)
    task = CausalLM(config={"model_type": "llama", **GROUPED}, attention=attention)
    trainer(1, "auto", accelerator="cpu", max_steps=1).fit(task, datamodule=Tokens(1, steps=1))
    assert task.model.config._attn_implementation == expected


def test_the_kernel_is_chosen_by_precision_width_and_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    llama = language_models.read_config(None, {"model_type": "llama", **GROUPED})
    wide = language_models.read_config(None, {"model_type": "llama", **GROUPED, "head_dim": 512})
    capped = language_models.read_config(None, {"model_type": "gemma2", **FAMILIES["gemma2"]})
    dropped = language_models.read_config(None, {"model_type": "llama", **GROUPED, "attention_dropout": 0.1})
    choose = packed_attention.choose_kernel
    assert choose(llama, torch.bfloat16, GPU) == "varlen"
    assert choose(llama, torch.float32, GPU) == choose(wide, torch.bfloat16, GPU) == "flex"
    assert choose(capped, torch.bfloat16, GPU) == "flex"
    assert choose(llama, torch.float64, GPU) is choose(dropped, torch.bfloat16, GPU) is None
    assert choose(llama, torch.float64, CPU) == "varlen"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert choose(llama, torch.float16, GPU) == "flex"


def test_padded_rows_and_generation_have_their_mask() -> None:
    ours, plain = task_of("dlo_varlen"), task_of("sdpa")
    ids = torch.randint(VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    found, expected = (task.forward(input_ids=ids, attention_mask=mask) for task in (ours, plain))
    torch.testing.assert_close(found[1], expected[1])
    torch.testing.assert_close(found[0, 3:], expected[0, 3:])
    sampling = Sampling(max_new_tokens=6, temperature=0.0)
    written = [complete_ids(task.model, ids, mask, sampling, None, False) for task in (ours, plain)]  # type: ignore[arg-type]
    assert all(torch.equal(one, other) for one, other in zip(*written, strict=True))


def test_what_a_kernel_does_not_compute_is_refused() -> None:
    task = task_of("dlo_varlen")
    told = task.inputs(batch_of(torch.tensor(PLACES["one row"])))[1]
    module = torch.nn.Module()
    tensor = torch.zeros(1, 4, 8, 8)
    lengths = {name: told[name] for name in ("cu_seq_lens_q", "max_length_q")}
    for given in ({"dropout": 0.1}, {"softcap": 5.0}, {"s_aux": tensor}, {"is_causal": False}):
        with pytest.raises(DloError, match="set attention: sdpa"):
            packed_attention.attention_forward(module, tensor, tensor, tensor, None, **lengths, **given)


# --- families: what is known of them, what they are tried with, and what is refused ---------------------------------


@pytest.mark.filterwarnings("ignore")
def test_a_family_that_cannot_keep_documents_apart_refuses_packed_ones() -> None:
    task = tiny_task("xlnet")
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "labels": torch.zeros(1, 4, dtype=torch.long)}
    task.training_step({**batch, "position_ids": torch.tensor([[0, 1, 2, 3]])}, 0)
    with pytest.raises(DloError, match=r"must be none for .*, which ignores restarting positions"):
        task.training_step({**batch, "position_ids": torch.tensor([[0, 1, 0, 1]])}, 0)


@pytest.mark.parametrize("family", sorted(families.KNOWN))
def test_families_that_are_known_pass_what_others_are_tried_with(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "KNOWN", frozenset())
    more = {"gemma2": {"final_logit_softcapping": 2.0}, "granite": {"logits_scaling": 3.0}}.get(family, {})
    assert families.probe_traits(small_model(family, **more))


def small_model(family: str, **more: Any) -> Any:
    return built_model(tiny(family, dropout=False) | more)


def test_a_known_family_is_not_tried_and_others_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small_model("llama")
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
        assert families.probe_traits(built_model(tiny(family), torch.float64)), family


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


def set_flash(task: CausalLM) -> None:
    """As a run with `attention: flash_attention_2` has it, which cannot be built where the kernels cannot run."""
    task.model.config._attn_implementation = "flash_attention_2"  # type: ignore[union-attr]


@pytest.mark.parametrize("places", PLACES.values(), ids=PLACES)
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_flash_kernels_give_packed_rows_the_loss_of_sdpa(family: str, places: list[list[int]], kernels: None) -> None:
    task = tiny_task(family)
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


def tiny_task(family: str) -> CausalLM:
    torch.manual_seed(0)
    task = CausalLM(config=tiny(family, dropout=False))
    task.configure_model()
    return task


def flash_task_of(monkeypatch: pytest.MonkeyPatch, family: str) -> CausalLM:
    """A task that is built as if flash attention could be."""
    build = language_models.build_model

    def built(*args: Any, **options: Any) -> Any:
        model = build(*args, **options)
        if model.device.type != "meta":
            model.config._attn_implementation = "flash_attention_2"
        return model

    monkeypatch.setattr(language_models, "build_model", built)
    return tiny_task(family)


@pytest.mark.parametrize("family", sorted(families.KNOWN))
def test_families_that_are_known_tell_flash_attention_of_documents(family: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(families, "KNOWN", frozenset())
    task = flash_task_of(monkeypatch, family)
    assert families.is_flash(task.model)  # type: ignore[arg-type]
    assert task._traits.isolates_documents


def test_a_family_whose_flash_attention_is_its_own_refuses_packed_documents(monkeypatch: Any) -> None:
    task = flash_task_of(monkeypatch, "stablelm")
    with pytest.raises(DloError, match=r"would attend to each other; set packing: none, or attention: sdpa"):
        task.inputs({"input_ids": torch.zeros(1, 4), "position_ids": torch.tensor([[0, 1, 0, 1]])})


# --- models without memory -------------------------------------------------------------------------------------


# Whether positions suffice to keep documents apart; LFM2 has two kinds of blocks.
@pytest.mark.parametrize(
    ("family", "packs"),
    [("opt", False), ("gpt_oss", False), ("bloom", False), ("mixtral", True), ("olmo", True), ("lfm2", True)],
)
def test_a_model_without_memory_is_judged_as_one_with_it(family: str, packs: bool) -> None:
    for device in ("cpu", "meta"):
        with torch.device(device):
            dtype = torch.bfloat16 if device == "meta" else None
            model = built_model(tiny(family), dtype)
            state = torch.get_rng_state()
            found = families.probe_traits(model)
            assert found.isolates_documents
            assert (found.isolation is None) is packs
        assert torch.equal(torch.get_rng_state(), state)
        assert next(model.parameters()).device.type == device


def test_a_twin_has_a_block_of_each_kind_and_next_to_no_memory() -> None:
    sizes = {**GROUPED, "vocab_size": 50_000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 20}
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
    task = tiny_task("llama4_text")
    assert task.compile_target() is task.model.model
    ids = torch.arange(8)[None]
    hidden = task(input_ids=ids)
    assert hidden.shape == (1, 8, 32)
    torch.testing.assert_close(task.head.logits(hidden), task.model(input_ids=ids).logits)


def test_hidden_states_that_cannot_be_the_heads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_models, "hidden_states", lambda model, **_: None)
    with pytest.raises(DloError, match=r"^model must be of a supported family, got OlmoForCausalLM, which fails"):
        tiny_task("olmo")
