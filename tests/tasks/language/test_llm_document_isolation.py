"""Documents of packed rows are kept apart in models that ignore restarting positions, or their rows are padded."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor

from dlo_framework.errors import DloError
from dlo_framework.frozen_model import default_dtype
from dlo_framework.testing import assert_parity
from dlo_plugins.curriculum.block_schedule import ModelBlocks, handle_calls
from dlo_plugins.curriculum.token_drop import TokenDrop
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.document_isolation import document_spans, documents_of
from support.causal_types import REFUSED, TYPES, tiny
from support.strategies import named_cases
from support.token_batches import VOCABULARY, Tokens

#: Lengths of the documents of two rows.
ROWS = ((5, 19), (1, 2, 21))
LENGTH = 24
#: Types whose documents cannot be kept apart, and why; their rows are padded.
PADDED = {
    "prophetnet": "a mask of its own in each attention",
    "deepseek_v4": "a compressor of keys and values whose windows cross documents",
    "xlm": "a mask of its own, made before the blocks",
    "xlnet": "a mask of its own, with the positions first",
}
#: One of each kind: a state space, linear attention, sinks, a bias of positions, a table of positions, and a mask where
#: true hides, which takes rows.
KINDS = ("mamba", "qwen3_next", "gpt_oss", "bloom", "bart", "mpt")
#: Code that computes scans, softmax or norms in single precision inside.
SINGLE = 1e-6


def double_task(kind: str, **options: Any) -> CausalLM:
    torch.manual_seed(0)
    task = CausalLM(config=tiny(kind, dropout=False), **options)
    with default_dtype(torch.float64):
        task.configure_model()
    return task


def packed_batch() -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids, labels = torch.randint(3, 60, (2, len(ROWS), LENGTH), generator=draw)
    places = torch.stack([torch.cat([torch.arange(size) for size in row]) for row in ROWS])
    return {"input_ids": ids, "labels": labels, "position_ids": places, "tokens_in_step": torch.tensor(ids.numel())}


def single_documents() -> list[dict[str, Tensor]]:
    found, whole = [], packed_batch()
    for row, sizes in enumerate(ROWS):
        edges = torch.tensor([0, *sizes]).cumsum(0).tolist()
        for first, past in itertools.pairwise(edges):
            own = {name: tensor[row : row + 1, first:past] for name, tensor in whole.items() if tensor.ndim}
            found.append(own | {"tokens_in_step": whole["tokens_in_step"]})
    return found


def outputs(task: CausalLM, batch: dict[str, Tensor]) -> Tensor:
    args, kwargs = task.inputs(batch)
    with torch.no_grad():
        hidden = task.forward(*args, **kwargs)
    assert isinstance(hidden, Tensor)
    return task.head.logits(hidden)


def gradients(task: CausalLM, batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    task.zero_grad()
    for batch in batches:
        task.training_step(batch, 0)["loss"].backward()
    return {name: param.grad.clone() for name, param in task.named_parameters() if param.grad is not None}


@default_dtype(torch.float64)  # Also of the constants that models compute.
def check_isolated(kind: str) -> None:
    """Checks logits, gradients and that a document changes no other, against each document by itself."""
    task = double_task(kind).train()
    assert task._traits.isolates_documents
    batch, alone = packed_batch(), single_documents()
    found, expected = gradients(task, [batch]), gradients(task, alone)
    assert set(found) == set(expected)
    largest = max(float(grad.abs().max()) for grad in expected.values())
    for name, grad in expected.items():
        assert float((found[name] - grad).abs().max()) <= SINGLE * largest, name
    task.eval()
    logits = outputs(task, batch)
    each = torch.cat([outputs(task, document)[0] for document in alone])
    torch.testing.assert_close(logits.flatten(0, 1), each, rtol=SINGLE, atol=SINGLE * float(each.abs().max()))
    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, : ROWS[0][0]] = 7
    after = outputs(task, changed)
    atol = 1e-12 * float(each.abs().max())
    torch.testing.assert_close(after[0, ROWS[0][0] :], logits[0, ROWS[0][0] :], rtol=0, atol=atol)
    assert not torch.allclose(after[0, : ROWS[0][0]], logits[0, : ROWS[0][0]])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_have_the_logits_and_gradients_of_each_by_itself(kind: str) -> None:
    check_isolated(kind)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind not in KINDS])
def test_every_type_keeps_documents_apart_or_is_padded(kind: str) -> None:
    task = CausalLM(config=tiny(kind, dropout=False))
    if kind in REFUSED:
        pytest.skip(f"{kind} does not train: {REFUSED[kind]}")
    task.configure_model()
    assert task._traits.isolates_documents is (kind not in PADDED)
    if task._traits.isolation is not None:
        check_isolated(kind)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["mamba", "gpt_oss", "qwen3_next"])
def test_blocks_that_see_some_tokens_keep_documents_apart(kind: str) -> None:
    """A change of one document changes no token of the next one, whichever tokens blocks see."""
    task = double_task(kind).train()
    index = torch.tensor([0, 2, 3, 6, 7, 8, 11, 15, 16, 20, 23])
    drop = TokenDrop()
    drop._draw = lambda number, length, device: index  # type: ignore[method-assign]
    layers = ModelBlocks(task, "TokenDrop")
    drop._places = dict.fromkeys(layers.names, 0)  # Each block gets the same selection.
    seen: list[int] = []
    for name in layers.names:
        block = layers.model.get_submodule(name)
        block.register_forward_hook(lambda *_: seen.append(1))
        handle_calls(block, drop.handler(0, name, block), 0)
    batch = packed_batch()

    def hidden(batch: dict[str, Tensor]) -> Tensor:
        found = task(**task.inputs(batch)[1])
        return found[0] if isinstance(found, tuple) else found

    changed = {**batch, "input_ids": batch["input_ids"].clone()}
    changed["input_ids"][0, : ROWS[0][0]] = 7
    one, other = hidden(batch), hidden(changed)
    assert seen
    assert one.requires_grad
    atol = 1e-12 * float(one.abs().max())
    torch.testing.assert_close(other[0, ROWS[0][0] :], one[0, ROWS[0][0] :], rtol=0, atol=atol)
    assert not torch.allclose(other[0, : ROWS[0][0]], one[0, : ROWS[0][0]])


def test_spans_of_chosen_tokens() -> None:
    spans = document_spans(torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3]]))
    chosen = spans.select(torch.tensor([1, 2, 4, 6, 7, 7]))  # The last one is padding.
    assert chosen.position_ids.tolist() == [[0, 1, 0, 1, 2, 0]]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [pytest.param("qwen3_next", marks=pytest.mark.slow), "bart"])
def test_recomputed_blocks_keep_the_documents_of_their_forward(kind: str) -> None:
    """Backward of one batch comes after the forward of another, as in a pipeline."""
    task = double_task(kind, recompute=True).train()
    expected = gradients(task, [packed_batch(), *single_documents()])
    task.zero_grad()
    losses = [task.training_step(batch, 0)["loss"] for batch in [packed_batch(), *single_documents()]]
    for loss in losses:
        loss.backward()
    largest = max(float(grad.abs().max()) for grad in expected.values())
    for name, param in task.named_parameters():
        if param.grad is not None:
            torch.testing.assert_close(param.grad, expected[name], rtol=0, atol=SINGLE * largest)


@pytest.mark.filterwarnings("ignore")
def test_shards_of_a_sequence_are_refused_where_documents_become_rows() -> None:
    task = double_task("mamba")
    model: Any = task.model
    mixer = model.backbone.layers[0].mixer
    spans = document_spans(packed_batch()["position_ids"])
    with (
        documents_of(spans),
        pytest.raises(DloError, match=r"must have all 24 tokens .* in MambaMixer, got \[2, 12, 32"),
    ):
        mixer(torch.zeros(2, 12, 32, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore")
def test_rows_of_other_models_are_padded_and_the_run_says_so(make: Any, capsys: Any) -> None:
    from types import SimpleNamespace

    task = CausalLM(config=tiny("xlnet"))
    data = make()
    data.trainer = SimpleNamespace(lightning_module=task, is_global_zero=True)
    for _ in range(2):
        data._pad_if_needed()
    assert data.packing == "none"
    assert capsys.readouterr().out.count("packing: none in place of best_fit: a model of xlnet cannot keep") == 1
    kept = make()
    kept.trainer = SimpleNamespace(lightning_module=CausalLM(config=tiny("llama")), is_global_zero=True)
    kept._pad_if_needed()
    assert kept.packing == "best_fit"


# --- models whose documents are kept apart by changes to their modules train on two ranks as in one process ----------


def build(kind: str, recompute: bool = False) -> tuple[CausalLM, LightningDataModule]:
    warnings.filterwarnings("ignore")
    config = tiny(kind, dropout=False) | {"vocab_size": VOCABULARY}
    options: dict[str, Any] = {"optimizer": "sgd", "lr": 0.1, "schedule": "constant", "weight_decay": 0.0}
    unused = [f"model.decoder.layers.*.encoder_attn{part}" for part in ("", "_layer_norm")] if kind == "bart" else None
    return CausalLM(config=config, recompute=recompute, freeze=unused, **options), Tokens(1)


@pytest.mark.filterwarnings("ignore")
def test_strategies_are_one_process() -> None:
    """Bamba has state-space layers and attention; the slow test has other kinds of positions."""
    assert_parity(build, named_cases(["tp"], kind="bamba", recompute=True), steps=2, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ["bamba", "bloom", "bart", "qwen3_next", "rwkv"])
def test_every_strategy_is_one_process(kind: str) -> None:
    names = ["ddp", "fsdp", "zero1", "zero2", "zero3", "pp", "deepspeed_2", "deepspeed_3"]
    names += ["tp"] if kind != "rwkv" else []
    found = named_cases(names, kind=kind) + named_cases(("fsdp", "pp"), kind=kind, recompute=True)
    assert_parity(build, found, steps=2, rtol=1e-4)
