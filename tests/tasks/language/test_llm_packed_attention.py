"""Attention of packed documents without a dense mask gives what the dense mask gives."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from dlo_framework.errors import DloError
from dlo_tasks.language import batches, families, language_models, packed_attention
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.generation import Sampling, complete_ids
from support.fsdp_nets import trainer
from support.largest_tensor import Largest
from support.token_batches import FAMILIES, GROUPED, PLACES, VOCABULARY, Tokens, built_model, small_model
from support.waits import Waits

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SIZES: dict[str, dict[str, Any]] = {
    "llama": GROUPED,
    "mistral": {**GROUPED, "sliding_window": 3},
    "qwen3": {
        **GROUPED,
        "head_dim": 8,
        "sliding_window": 3,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention"],
    },
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
def test_no_dense_mask_is_made_and_the_device_is_not_waited_for(
    family: str, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
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
    more = {"attn_pdrop" if family == "gpt2" else "attention_dropout": 0.0}
    if family in ("mistral", "phi3"):
        more["sliding_window"] = 4096
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
def test_a_run_on_cuda_has_it_unless_the_user_has_chosen(
    attention: str | None, expected: str, monkeypatch: Any
) -> None:
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
