"""Every type of causal language model of transformers trains as its own code does, documents apart, or is refused."""

from __future__ import annotations

import copy
import itertools
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningDataModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dlo_framework.distributed import gradient_check
from dlo_framework.distributed.gradient_check import find_unused, unused_message
from dlo_framework.distributed.strategy import DataParallelStrategy, register_data_parallel
from dlo_framework.errors import DloError
from dlo_framework.frozen_model import default_dtype
from dlo_framework.testing import assert_parity
from dlo_plugins.curriculum.block_schedule import ModelBlocks, handle_calls
from dlo_plugins.curriculum.token_drop import TokenDrop
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.language import language_models
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.document_isolation import document_spans, documents_of
from dlo_tasks.language.language_plans import plan_for
from support.causal_types import REFUSED, TYPES, tiny
from support.foreign_transformer import ForeignTask
from support.strategies import named_cases
from support.texts import word_tokenizer
from support.token_batches import VOCABULARY, Tokens
from support.trainers import quiet_trainer

#: One of each kind: a head that does more than project and positions that do not count from 0; a model of pictures and
#: text; attention with a norm that spans no projection.
KINDS = ("roberta", "gemma3", "hy_v4")
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in TYPES if kind not in KINDS]


class Padded(LightningDataModule):
    """Two batches of four rows, two of which are padded, and a tokenizer of 64 tokens."""

    seq_len = 16

    def __init__(self) -> None:
        super().__init__()
        self.tokenizer = word_tokenizer({"<end>": 2, "<pad>": 0, **{f"w{number}": number for number in range(3, 64)}})
        self.tokenizer.pad_token = "<pad>"
        self.batches = [self.batch(torch.Generator().manual_seed(seed)) for seed in range(2)]

    def batch(self, draw: torch.Generator) -> dict[str, Tensor]:
        ids = torch.randint(3, 60, (4, 17), generator=draw)
        labels = ids[:, 1:].clone()
        for row, length in enumerate((16, 11, 7, 16)):
            ids[row, length:], labels[row, length:] = 0, -100
        places = torch.arange(16).expand(4, 16)
        tokens = (labels != -100).sum()
        return {"input_ids": ids[:, :-1], "labels": labels, "position_ids": places, "tokens_in_step": tokens}

    def train_dataloader(self) -> DataLoader:
        return DataLoader(self.batches, batch_size=None)  # type: ignore[arg-type]


class Recorded(CausalLM):
    """Keeps the model as it was before the first step, and the loss of each."""

    def on_train_start(self) -> None:
        self.losses: list[float] = []
        self.first, self.random = copy.deepcopy(self.model), torch.get_rng_state()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses.append(float(outputs["loss"]))


def trained(kind: str, **changes: Any) -> Recorded:
    seed_everything(0, verbose=False)
    task = Recorded(config=tiny(kind) | changes, optimizer="sgd", lr=0.1, schedule="constant", weight_decay=0.0)
    data = Padded()
    task.check(data)
    quiet_trainer(max_steps=2, devices=1, num_sanity_val_steps=0).fit(task, datamodule=data)
    return task


def plain_losses(task: Recorded) -> list[float]:
    """The losses of the same steps by transformers' own forward and torch's optimizer."""
    model: Any = task.first.train()
    own = task.optimizers()
    optimizer = type(own.optimizer)(model.parameters(), **own.optimizer.defaults)  # type: ignore[union-attr,call-arg]
    torch.set_rng_state(task.random)
    losses = []
    for batch in Padded().batches:
        optimizer.zero_grad()
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("kind", [*KINDS, *SLOW])
@pytest.mark.filterwarnings("ignore")
def test_a_type_trains_as_transformers_does_or_is_refused(kind: str) -> None:
    if kind in REFUSED:
        with pytest.raises(DloError, match=REFUSED[kind]):
            trained(kind)
        return
    task = trained(kind)
    assert task.losses == pytest.approx(plain_losses(task), rel=1e-5)
    rows = task.model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    assert 64 <= language_models.model_vocabulary_size(task.model.config) <= rows  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "fix"), [("bert", "set config.is_decoder: true"), ("xlnet", "attn_type: uni")])
@pytest.mark.filterwarnings("ignore")
def test_a_model_that_sees_what_it_is_to_predict_is_refused(kind: str, fix: str) -> None:
    wrong = {"bert": {"is_decoder": False}, "xlnet": {"attn_type": "bi"}}[kind]
    with pytest.raises(DloError, match=f"must be causal, got .*, whose tokens attend to later ones; .*{fix}"):
        trained(kind, **wrong)


@pytest.mark.filterwarnings("ignore")
def test_a_head_that_does_more_than_project_says_what_it_costs() -> None:
    task = CausalLM(config=tiny("bert") | {"vocab_size": 1000})
    with pytest.warns(UserWarning, match=r"the logits of all tokens at once: 4\.0 kB per token"):
        task.configure_model()
    ids = torch.arange(8)[None]
    torch.testing.assert_close(task.eval()(input_ids=ids), task.model(input_ids=ids).logits)


def test_what_tokens_do_not_reach_is_frozen() -> None:
    task = CausalLM(config=tiny("gemma3")).on_meta()
    trains = {name for name, parameter in task.model.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[1] for name in trains} == {"language_model"}
    assert "model.language_model.embed_tokens.weight" in trains


@pytest.mark.parametrize("kind", ["deepseek_v32", "glm_moe_dsa", "axk2", "hy_v4"])
def test_a_norm_that_spans_no_projection_has_no_rule_of_its_own(kind: str) -> None:
    model = CausalLM(config=tiny(kind)).on_meta().model
    assert all("indexer" not in name for name in plan_for(model).tensor)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore")
def test_evaluation_writes_no_weights() -> None:
    """RWKV's code divides those of every few blocks, which a checkpoint after a validation would then have."""
    task = CausalLM(config={**tiny("rwkv", dropout=False), "rescale_every": 1})
    task.configure_model()
    before, batch = copy.deepcopy(task.state_dict()), Padded().batches[0]
    losses = [task.train(training).training_step(batch, 0)["loss"].detach() for training in (True, False)]
    torch.testing.assert_close(losses[1], losses[0])
    torch.testing.assert_close(task.state_dict(), before, rtol=0, atol=0)
    assert task.model.config.rescale_every == 1  # of the exported model


# --- parameters that no text reaches: found before ranks start, with a fix that is true for the strategy -------------


def frozen(task: CausalLM) -> set[str]:
    task = task.on_meta()
    return {name for name, parameter in task.model.named_parameters() if not parameter.requires_grad}


def test_cross_attentions_of_bart_are_frozen() -> None:
    found = frozen(CausalLM(config=tiny("bart", dropout=False), freeze="auto"))
    assert found
    assert all(".encoder_attn" in name for name in found)
    assert "model.decoder.layers.0.encoder_attn.q_proj.weight" in found
    more = frozen(CausalLM(config=tiny("bart", dropout=False), freeze=["auto", "model.decoder.layers.0"]))
    assert {"model.decoder.layers.0.fc1.weight", "model.decoder.layers.1.encoder_attn.k_proj.bias"} <= more
    assert not frozen(CausalLM(config=tiny("llama", dropout=False), freeze="auto"))


def test_they_are_found_while_a_task_has_metrics() -> None:
    """A run makes metrics, whose states are no buffers, before it builds the model."""
    task = CausalLM(config=tiny("bart", dropout=False), freeze="auto")
    task.setup("fit")
    task.configure_model()
    assert not task.get_parameter("model.model.decoder.layers.0.encoder_attn.q_proj.weight").requires_grad


def test_the_error_offers_it() -> None:
    task = CausalLM(config=tiny("bart", dropout=False))
    assert "set --model.init_args.freeze auto, or set find_unused: true" in unused_message(["a"], module=task)
    told = CausalLM(config=tiny("bart", dropout=False), freeze="auto")
    assert "set requires_grad to False" in unused_message(["a"], module=told)
    assert "set requires_grad to False" in unused_message(["a"], module=nn.Linear(1, 1))


def test_a_step_that_needs_values_is_an_error() -> None:
    task = ForeignTask().on_meta()
    assert find_unused(task, task.example_batch(None)) == []
    task = Branching().on_meta()
    with pytest.raises(DloError, match=r"must be found by a step on fake tensors, got .*; name them instead"):
        find_unused(task, task.example_batch(None))


DDP = "use --trainer.strategy ddp_find_unused_parameters_true"
OPTION = "set find_unused: true in the strategy"
APPLIER = "set find_unused by the strategy's `appliers: [{class_path: FullyShard"


def check(strategy: Any, module: Any, *callbacks: Callback, devices: int = 2, trains: bool = True) -> None:
    trainer = Trainer(accelerator="cpu", devices=devices, strategy=strategy, logger=False, enable_checkpointing=False)
    trainer.strategy.check_model(module, None, trains=trains, callbacks=callbacks)


def bart(**options: Any) -> CausalLM:
    return CausalLM(config=tiny("bart", dropout=False), **options)


@pytest.mark.parametrize(
    ("strategy", "fix"),
    [
        (DataParallelStrategy, DDP),
        (lambda: ZeroStrategy(3), OPTION),
        (FSDPStrategy, OPTION),
        pytest.param(lambda: MeshStrategy(tp=2), APPLIER, marks=pytest.mark.slow),
    ],
)
def test_they_are_found_before_ranks_start(strategy: Any, fix: str) -> None:
    task = bart()
    with pytest.raises(DloError) as caught:
        check(strategy(), task)
    message = str(caught.value)
    assert "encoder_attn" in message
    assert f"set --model.init_args.freeze auto, or {fix}" in message
    assert not task.has_model  # It is built on the ranks.
    check(strategy(), bart(freeze="auto"))
    check(strategy(), task, trains=False)


class Freezing(Callback):
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        pl_module.requires_grad_(False)


def test_it_is_allowed_where_the_strategy_looks_for_them() -> None:
    register_data_parallel()
    check(ZeroStrategy(2, find_unused=True), bart())
    check(FSDPStrategy(find_unused=True), bart())
    check("ddp_find_unused_parameters_true", bart())
    check(DataParallelStrategy(static_graph=True), bart())
    check(DataParallelStrategy(), bart(), devices=1)  # Without torch's wrapper such a run trains.
    check(DataParallelStrategy(), bart(), Freezing())


class Unused(ForeignTask):
    """Has a layer that no loss depends on."""

    def configure_model(self) -> None:
        super().configure_model()
        self.model.extra = torch.nn.Linear(2, 2)


class FreezesLate(Unused):
    def configure_optimizers(self) -> Any:
        self.model.extra.requires_grad_(False)
        return super().configure_optimizers()


class NeedsTrainer(Unused):
    def configure_optimizers(self) -> Any:
        raise RuntimeError("no trainer is attached")


class Branching(Unused):
    def loss(self, outputs: torch.Tensor, batch: object) -> torch.Tensor:
        return outputs[outputs > 0].sum()


class OwnStep(Unused):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx)


def test_a_task_of_a_user() -> None:
    with pytest.raises(DloError, match=r"got none for model\.extra\.bias and model\.extra\.weight|model\.extra"):
        check(ZeroStrategy(2), Unused())
    # The first step of the run checks these.
    for task in (FreezesLate, NeedsTrainer, Branching, OwnStep, ForeignTask):
        check(ZeroStrategy(2), task())


def test_ranks_that_have_started_check_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_check, "dist", SimpleNamespace(is_initialized=lambda: True))
    check(ZeroStrategy(2), bart())


# --- documents of packed rows are kept apart in models that ignore restarting positions, or rows are padded ---------


#: Lengths of the documents of two rows.
DOCUMENTS = ((5, 19), (1, 2, 21))
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
ISOLATED = ("mamba", "qwen3_next", "gpt_oss", "bloom", "bart", "mpt")
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
    ids, labels = torch.randint(3, 60, (2, len(DOCUMENTS), LENGTH), generator=draw)
    places = torch.stack([torch.cat([torch.arange(size) for size in row]) for row in DOCUMENTS])
    return {"input_ids": ids, "labels": labels, "position_ids": places, "tokens_in_step": torch.tensor(ids.numel())}


def single_documents() -> list[dict[str, Tensor]]:
    found, whole = [], packed_batch()
    for row, sizes in enumerate(DOCUMENTS):
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
    changed["input_ids"][0, : DOCUMENTS[0][0]] = 7
    after = outputs(task, changed)
    atol = 1e-12 * float(each.abs().max())
    torch.testing.assert_close(after[0, DOCUMENTS[0][0] :], logits[0, DOCUMENTS[0][0] :], rtol=0, atol=atol)
    assert not torch.allclose(after[0, : DOCUMENTS[0][0]], logits[0, : DOCUMENTS[0][0]])


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", ISOLATED)
def test_packed_documents_have_the_logits_and_gradients_of_each_by_itself(kind: str) -> None:
    check_isolated(kind)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind not in ISOLATED])
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
    changed["input_ids"][0, : DOCUMENTS[0][0]] = 7
    one, other = hidden(batch), hidden(changed)
    assert seen
    assert one.requires_grad
    atol = 1e-12 * float(one.abs().max())
    torch.testing.assert_close(other[0, DOCUMENTS[0][0] :], one[0, DOCUMENTS[0][0] :], rtol=0, atol=atol)
    assert not torch.allclose(other[0, : DOCUMENTS[0][0]], one[0, : DOCUMENTS[0][0]])


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
