"""CausalLM under a mask: equal to the model's own attention with the same dense mask, in many families and on ranks."""

import copy
from functools import partial
from typing import Any

import pytest
import torch

from dlo_framework.defaults import add_default_callbacks
from dlo_framework.errors import DloError
from dlo_framework.models.attention import (
    Attention,
    AttentionMask,
    BigBird,
    BSLongformer,
    DenseSparsity,
    FixedSparsity,
    Prefix,
    SlidingWindow,
    SparsityPattern,
    VariableSparsity,
    masked_attention,
)
from dlo_framework.models.attention.attention_options import Kernel
from dlo_framework.testing import Case, assert_parity
from dlo_framework.watch.monitor import RunMonitor
from dlo_plugins.compile.callback import Compile
from dlo_plugins.compile.compile_blocks import CompileBlocks
from dlo_plugins.memory.activation_checkpoint import ActivationCheckpoint
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.language import sparse_attention
from dlo_tasks.language.causal_lm import CausalLM
from support.causal_types import tiny
from support.runs import Losses
from support.token_batches import FAMILIES, Tokens
from support.trainers import quiet_trainer

LENGTH, HEADS = 60, 4
WHOLE: dict[str, Any] = {"sliding_window": None}
MODELS = {"llama": {}, "qwen3": {}, "gpt2": {}, "gpt_neox": {}, "mistral": WHOLE, "starcoder2": WHOLE}
FULL = {"layer_types": ["full_attention"] * 4}
#: With soft-capped scores, and with sinks; their own attention, in plain operations, has its softmax in float32.
SCORED = {
    "gemma2": {"attn_logit_softcapping": 0.5, **WHOLE, **FULL},
    "gpt_oss": {"sliding_window": LENGTH, **FULL},
}
PATTERNS = [
    DenseSparsity(16),
    FixedSparsity(8, True, num_local_blocks=2, num_different_global_patterns=2),
    VariableSparsity(8, True, 1, [2, 1], [0, 3]),
    BSLongformer(8),
    BigBird(8, different_layout_per_head=True),
    SlidingWindow(11, 8),
    Prefix(13, 8),
]


def make_task(family="llama", option=None, **more):
    torch.manual_seed(0)
    config = tiny(family, dropout=False, **(MODELS | SCORED)[family])
    task = CausalLM(config=config, attention=option, dtype="float64", **more)
    task.configure_model()
    for name, parameter in task.model.named_parameters():
        if name.endswith("sinks"):
            torch.nn.init.normal_(parameter)
    return task


def make_batch(packed=True, padded=False):
    torch.manual_seed(1)
    ids = torch.randint(3, 64, (2, LENGTH))
    positions = torch.arange(LENGTH).repeat(2, 1)
    if packed:
        positions[0, 25:] -= 25
        positions[1, 7:] -= 7
        positions[1, 41:] -= 34
    batch = {"input_ids": ids, "labels": ids.roll(-1, 1), "position_ids": positions}
    if padded:
        batch["attention_mask"] = torch.ones_like(ids)
        batch["attention_mask"][0, 50:] = 0
        batch["labels"] = batch["labels"].masked_fill(batch["attention_mask"] == 0, -100)
    return batch


def dense_mask(pattern, batch, longest=LENGTH):
    places = torch.arange(LENGTH)
    seen = AttentionMask(pattern, causal=True, num_heads=HEADS, longest=longest).visible(places, places, length=LENGTH)
    starts = torch.where(batch["position_ids"].diff(dim=1, prepend=batch["position_ids"][:, :1] - 1) != 1, 1, 0)
    numbers = starts.cumsum(1)
    if "attention_mask" in batch:
        numbers = numbers.masked_fill(batch["attention_mask"] == 0, -1)
    return seen[None] & (numbers[:, None, :, None] == numbers[:, None, None])


def reference(task, pattern, batch):
    """Returns hidden states and gradients of the same weights with transformers' sdpa and a dense mask."""
    model = copy.deepcopy(task.model)
    mask = dense_mask(pattern, batch, min(task.config.max_position_embeddings, 2**14))
    if task.config.model_type in SCORED:
        model.set_attn_implementation("eager")
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, torch.finfo(torch.float32).min)
    else:
        model.set_attn_implementation("sdpa")
    out = model.base_model(
        input_ids=batch["input_ids"], position_ids=batch["position_ids"], attention_mask=mask, use_cache=False
    )[0]
    return out, model


def compare(task, pattern, batch, atol=1e-10):
    _, inputs = task.inputs(batch)
    found = task(**inputs)
    expected, model = reference(task, pattern, batch)
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    weight = torch.randn(found.shape, dtype=found.dtype, generator=torch.Generator().manual_seed(2)) * real[..., None]
    torch.testing.assert_close(found * real[..., None], expected * real[..., None], rtol=0, atol=atol)
    ours = torch.autograd.grad((found * weight).sum(), list(task.model.parameters()), allow_unused=True)
    theirs = torch.autograd.grad((expected * weight).sum(), list(model.parameters()), allow_unused=True)
    for one, other in zip(ours, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other, rtol=0, atol=10 * atol * max(1.0, float(other.abs().max())))


@pytest.mark.parametrize("family", MODELS)
def test_families_equal_their_own_attention_with_the_dense_mask(family):
    for pattern in PATTERNS if family in ("llama", "gpt2") else PATTERNS[-2:]:
        compare(make_task(family, Attention(mask=pattern)), pattern, make_batch())


@pytest.mark.parametrize("family", SCORED)
def test_soft_caps_and_sinks_equal_the_families_own_attention_with_the_dense_mask(family):
    for pattern in (BigBird(8, different_layout_per_head=True), BSLongformer(8), DenseSparsity(16)):
        for batch in (make_batch(), make_batch(packed=False)):
            compare(make_task(family, Attention(mask=pattern)), pattern, batch, atol=1e-6)


@pytest.mark.parametrize("kernel", ["auto", "blocks", "sdpa"])
def test_each_kernel_computes_packed_padded_and_single_documents(kernel):
    pattern = BigBird(8, True)
    task = make_task("llama", Attention(kernel, pattern))
    for batch in (make_batch(), make_batch(packed=False), make_batch(packed=False, padded=True)):
        compare(task, pattern, batch)


def test_the_mask_matters_and_a_recomputed_model_has_the_same_gradients():
    pattern, batch = BSLongformer(8), make_batch()
    plain, masked = make_task(option=None), make_task(option=Attention(mask=pattern))
    again = make_task(option=Attention(mask=pattern), recompute=True)
    outs = [task(**task.inputs(batch)[1]) for task in (plain, masked, again)]
    assert not torch.allclose(outs[0], outs[1])
    assert torch.equal(outs[1], outs[2])
    for out in outs[1:]:
        out.square().sum().backward()
    for one, other in zip(masked.model.model.parameters(), again.model.model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)


@pytest.mark.parametrize("pattern", [BSLongformer(8), BigBird(8, True), SlidingWindow(11, 8), Prefix(5, 8)])
def test_generation_with_a_cache_has_the_pattern_of_a_full_forward(pattern):
    task = make_task("llama", Attention(mask=pattern))
    task.model.eval()
    torch.manual_seed(3)
    rows = [torch.randint(3, 64, (length,)) for length in (30, 17)]
    ids, mask = torch.zeros(2, 30, dtype=torch.long), torch.zeros(2, 30, dtype=torch.long)
    for number, row in enumerate(rows):  # padded on the left
        ids[number, 30 - len(row) :], mask[number, 30 - len(row) :] = row, 1
    written = task.model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert written.shape == (2, 50)
    for number, row in enumerate(rows):
        kept = written[number, 30 - len(row) :]
        for past in range(len(row), len(kept)):
            prompt = {"input_ids": kept[None, :past], "position_ids": torch.arange(past)[None]}
            hidden = task(**task.inputs({**prompt, "labels": prompt["input_ids"]})[1])
            assert int(task.model.get_output_embeddings()(hidden[0, -1]).argmax()) == int(kept[past])


def test_a_prefix_has_no_targets_that_it_sees():
    batch = make_batch(packed=False)
    task = make_task(option=Attention(mask=Prefix(13, 8)))
    out = task(**task.inputs(batch)[1]).detach().requires_grad_()
    task.loss(out, batch).backward()
    used = out.grad.abs().sum(-1)
    assert (used[:, :12] == 0).all()
    assert (used[:, 12:] > 0).all()


def test_the_option_survives_a_checkpoint():
    task = make_task(option=Attention("blocks", BigBird(8, True, seed=5)))
    stored = task.hparams["attention"]
    assert stored["mask"]["name"] == "BigBird"
    assert stored["mask"]["seed"] == 5
    again = CausalLM(config=tiny("llama"), attention=dict(stored), dtype="float64")
    again.configure_model()
    again.model.load_state_dict(task.model.state_dict())
    batch = make_batch()
    assert torch.equal(task(**task.inputs(batch)[1]), again(**again.inputs(batch)[1]))
    with pytest.raises(DloError, match="must be an imported SparsityPattern, got Missing"):
        Attention.from_settings({"mask": {"name": "Missing"}})


def test_dropout_of_weights_is_drawn_by_the_block_kernel():
    config = tiny("llama", attention_dropout=0.5)
    task = CausalLM(config=config, attention=Attention(mask=BSLongformer(8)), dtype="float64")
    task.configure_model()
    _, inputs = task.inputs(make_batch())
    assert not torch.equal(task(**inputs), task(**inputs))
    task.eval()
    assert torch.equal(task(**inputs), task(**inputs))


@pytest.mark.parametrize(
    ("family", "words"),
    [
        ("gemma2", "sliding_attention"),
        ("mistral", "config.sliding_window=8"),
        ("gpt_oss", "sliding_attention"),
    ],
)
def test_models_whose_attention_has_other_parts_are_refused_before_the_run(family, words):
    with pytest.raises(DloError, match=words):
        CausalLM(config=tiny(family), attention=Attention(mask=BSLongformer(8))).check(None)


@pytest.mark.parametrize("kernel", ["flash", "cudnn", "flex"])
def test_kernels_of_accelerators_are_refused_on_a_cpu(kernel):
    with pytest.raises(DloError, match=f"must run on cpu, got {kernel}, which needs a CUDA device"):
        make_task(option=Attention(kernel))


class Rows(torch.utils.data.Dataset):
    """Rows of packed documents."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        return {name: values[index % 2] for name, values in make_batch().items()}


def train(folder, callbacks=(), **options):
    """Trains on a CPU with everything that watches a run; returns the losses, the validation's, and FLOPs a sample."""
    torch.manual_seed(0)
    config, losses = tiny("llama", dropout=False, num_hidden_layers=2), Losses()
    task = CausalLM(config=config, attention=Attention(mask=BSLongformer(8)), dtype="float64")
    watching = add_default_callbacks(
        [losses, *callbacks], run_folder=folder, model=task, config="{}", progress_bar=False
    )
    options |= {"max_epochs": 1, "enable_checkpointing": True, "use_distributed_sampler": False}
    trainer = quiet_trainer(callbacks=watching, **options)
    loader = torch.utils.data.DataLoader(Rows(), batch_size=2)
    trainer.fit(task, loader, loader)
    monitor = next(callback for callback in watching if isinstance(callback, RunMonitor))
    return losses.found, float(trainer.callback_metrics["val_loss"]), monitor.flops.per_sample


@pytest.fixture(scope="module")
def by_blocks(tmp_path_factory):
    return train(tmp_path_factory.mktemp("blocks"))


@pytest.mark.parametrize("way", ["compiled", "zero3"])
def test_flex_attention_trains_under_all_that_watches_a_step(way, tmp_path, monkeypatch, by_blocks):
    """As on an accelerator, but for the backend: a CPU's kernel has no gradients."""
    monkeypatch.setattr(sparse_attention, "choose_kernel", lambda *_, **__: Kernel("flex", ""))
    monkeypatch.setattr(torch.nn.attention.flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(masked_attention, "_runs_eagerly", lambda query: torch.compiler.is_compiling())
    compiled = torch.compile(masked_attention.flex_attention, backend="aot_eager")
    monkeypatch.setattr(masked_attention, "_compiled", lambda: compiled)
    compile_blocks = [Compile(scope="blocks", backend="aot_eager")]
    strategy = ZeroStrategy(3) if way == "zero3" else "auto"
    losses, validated, flops = train(tmp_path, compile_blocks if way == "compiled" else [], strategy=strategy)
    expected, wanted, of_blocks = by_blocks
    assert losses == pytest.approx(expected)
    assert validated == pytest.approx(wanted)
    assert flops > of_blocks, "FlexAttention's blocks have 128 positions, and a row's pattern 60"


# --- on several ranks: BigBird draws other blocks for each head, so that another rank's heads would change losses ---


ROWS = 8


def make_pattern() -> BigBird:
    return BigBird(block=3, different_layout_per_head=True, num_sliding_window_blocks=1, seed=3)


def llm(pattern: SparsityPattern | None = None) -> tuple[Any, Any]:
    config = {"model_type": "llama", **FAMILIES["llama"]}
    # Without a larger eps, Adam makes whole steps of the rounding of gradients that cancel to nothing.
    more: dict[str, Any] = {"lr": 1e-3, "optimizer_args": {"eps": 1e-4}}
    return CausalLM(config=config, attention=Attention(mask=pattern or make_pattern()), **more), Tokens(1, rows=ROWS)


def mesh(pattern: SparsityPattern | None = None, **options: Any) -> Case:
    more = {"micro_batches": 4} if options.get("pp", 1) > 1 else {}
    arguments = {} if pattern is None else {"pattern": pattern}
    return Case(partial(MeshStrategy, **{"dp_shard": 1, **more, **options}), arguments, name=f"{pattern} {options}")


MESHES = ({"tp": 2, "sequence_parallel": True}, {"pp": 2})
SHARED = ({"cp": 2}, {"cp": 2, "cp_method": "ulysses"})


def test_a_language_model_trains_on_two_ranks_as_in_one_process() -> None:
    # Keys of a prefix come after queries, in the same chunk and in later ones; its targets have no loss.
    prefix = mesh(Prefix(13, block=3), **SHARED[1])
    assert_parity(llm, [*(mesh(**axes) for axes in (*MESHES, SHARED[0])), prefix], steps=2)


@pytest.mark.slow
def test_pairs_of_axes_and_compiled_and_recomputed_blocks_are_one_process() -> None:
    """The composition of options and strategies has DeepSpeed."""
    pairs = ({"tp": 2, "cp": 2}, {"tp": 2, "cp": 2, "cp_method": "ulysses"}, {"pp": 2, "cp": 2}, {"pp": 2, "tp": 2})
    assert_parity(llm, [mesh(**axes) for axes in pairs], steps=2, world_size=4, rtol=1e-5)
    appliers, axes = (CompileBlocks, ActivationCheckpoint), ({"tp": 2}, *SHARED)
    found = [mesh(**each, appliers=[applier()]) for applier in appliers for each in axes]
    assert_parity(llm, found, steps=2, rtol=1e-5)
