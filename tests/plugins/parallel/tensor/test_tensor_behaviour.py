"""Models cut over ranks: parity with the whole model, what passes between ranks, dropout, recomputation, bfloat16."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.memory.activation_checkpoint import ActivationCheckpoint
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.tensor.tensor_parallel import TensorParallel
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.language_models import hidden_states
from support.fsdp_nets import Batches, differ, trainer
from support.on_ranks import on_ranks
from support.optimizer_runs import STEPS, STRATEGIES, data, plain_loop, task
from support.tensor_models import (
    VIT,
    assert_close,
    compare,
    cut,
    image_loss,
    image_model,
    language_model,
    plan_of,
    text_loss,
    tokens,
    whole_gradients,
)
from support.token_batches import SIZES, Tokens


def same_on_all(value: Tensor) -> bool:
    """Whether all ranks have a tensor's value."""
    highest, lowest = value.detach().clone(), value.detach().clone()
    dist.all_reduce(highest, dist.ReduceOp.MAX)
    dist.all_reduce(lowest, dist.ReduceOp.MIN)
    return torch.equal(highest, lowest)


class Between(TorchDispatchMode):
    """Counts the matrix products between the start of each collective and its wait, collectives, and attentions."""

    def __init__(self) -> None:
        super().__init__()
        self._started: dict[int, tuple[str, int]] = {}
        self._products = 0
        self.found: list[tuple[str, int]] = []
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self._products += name in ("mm", "addmm")
        self.calls[name] += func.namespace == "_c10d_functional" or "attention" in name
        if name == "wait_tensor":
            started, products = self._started.pop(args[0].data_ptr(), ("", 0))
            self.found.append((started, self._products - products))
        result = func(*args, **(kwargs or {}))
        if func.namespace == "_c10d_functional" and name != "wait_tensor":
            self._started[result.data_ptr()] = name, self._products
        return result


@on_ranks(2)
def test_collectives_run_beside_products(rank: int, world_size: int) -> None:
    """With sequence parallelism, both collectives of backward run beside matrix products, as in Megatron.

    They are those of the MLP's two column projections, and of attention's three.
    """
    model = language_model("llama", num_hidden_layers=1)
    cut(model, sequence_parallel=True)
    embedded = model.get_input_embeddings()(tokens(8)[0]).detach().requires_grad_()
    hidden = model.model(inputs_embeds=embedded, use_cache=False)[0]
    with Between() as between:
        hidden.sum().backward()
    gather, scatter = "all_gather_into_tensor", "reduce_scatter_tensor"
    # The row projection's gradient is needed at once. The input is gathered beside the products of its gradient, whose
    # sum is scattered beside the products of the weights' gradients.
    mlp, attention = ([(gather, 0), (gather, products), (scatter, products)] for products in (2, 3))
    assert between.found == [*mlp, *attention, (gather, 0)]


@on_ranks(2)
def test_what_a_stage_sends_is_whole(rank: int, world_size: int) -> None:
    """What one stage of a pipeline sends the next is whole."""
    model = image_model("vit_tiny_patch16_224", **VIT)
    alone = image_loss(model).detach()
    applier = TensorParallel(sequence_parallel=True)
    lengths: dict[str, int] = {}
    for name in ("blocks.0.norm2", "blocks.1", "blocks.1.norm1"):
        note = lambda _, args, name=name: lengths.update({name: args[0].shape[1]})
        model.get_submodule(name).register_forward_pre_hook(note)
    plan = plan_of(model)
    applier.apply(model, init_device_mesh("cpu", (world_size,), mesh_dim_names=("tp",)), plan)
    applier.gather_between_stages(model, plan, ["blocks.1"])
    torch.testing.assert_close(image_loss(model), alone)
    assert lengths == {"blocks.0.norm2": 9, "blocks.1": 17, "blocks.1.norm1": 9}


@on_ranks(2)
def test_sequence_parallelism_keeps_less(rank: int, world_size: int) -> None:
    """Sequence parallelism keeps less for backward."""
    found = []
    for sequence_parallel in (False, True):
        model = language_model("llama", num_hidden_layers=4)
        cut(model, sequence_parallel)
        weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
        kept: dict[int, int] = {}

        def note(tensor: Tensor, kept: dict[int, int] = kept) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda kept: kept):
            hidden_states(model, input_ids=tokens(256)[0])
        found.append(sum(size for at, size in kept.items() if at not in weights))
    activations = 2 * 256 * 32 * 4  # bytes of one tensor between regions
    # Of each of a layer's two norms: its input, the same normalised, and its output, which the projections take; a rank
    # has a half of the tokens.
    assert found[0] - found[1] >= 4 * (2 * 3) * 0.5 * activations


def seen(model: nn.Module, name: str) -> list[Tensor]:
    """Returns a list of what a dropout layer lets through."""
    kept: list[Tensor] = []
    model.get_submodule(name).register_forward_hook(lambda _, args, output: kept.append(output.detach() != 0))
    return kept


def dropping(p: float = 0.4) -> nn.Module:
    model = image_model("vit_tiny_patch16_224", **VIT, drop_path_rate=0.5)
    for name, part in model.named_modules():
        if isinstance(part, nn.Dropout) and name.startswith("blocks"):
            part.p = p
    return model


@on_ranks(2)
def test_dropout(rank: int, world_size: int) -> None:
    for sequence_parallel in (False, True):
        model = dropping()
        inside, outside = seen(model, "blocks.0.mlp.drop1"), seen(model, "blocks.0.mlp.drop2")
        path = seen(model, "blocks.1.drop_path1")
        cut(model, sequence_parallel)
        losses, states = [], []
        for _ in range(2):
            torch.manual_seed(5)
            losses.append(image_loss(model))
            states.append(torch.get_rng_state())
        assert torch.equal(losses[0], losses[1])  # It all follows from the seed.
        assert same_on_all(losses[0])
        assert same_on_all(states[0].double())
        assert not same_on_all(inside[0].double())
        # Split along the sequence, a rank's tokens are its own; a sample's path is one for all tokens.
        assert same_on_all(outside[0].double()) == (not sequence_parallel)
        assert same_on_all(path[0].any(dim=(1, 2)).double())
        assert 0.5 < float(inside[0].double().mean()) < 0.7
        image_loss(model)
        assert not torch.equal(inside[-1], inside[0])
        model.eval()
        before = torch.get_rng_state()
        image_loss(model)
        assert torch.equal(torch.get_rng_state(), before)


@on_ranks(2)
def test_dropout_is_recomputed(rank: int, world_size: int) -> None:
    for sequence_parallel in (False, True):
        found = []
        for recompute in (False, True):
            model: Any = dropping()
            model.set_grad_checkpointing(recompute)
            cut(model, sequence_parallel)
            torch.manual_seed(5)
            image_loss(model).backward()
            found.append(whole_gradients(model))
        assert_close(found[1], found[0], 0.0, f"recomputed, sequence {sequence_parallel}")


@on_ranks(2)
def test_lengths_that_cannot_be_told_apart_are_refused(rank: int, world_size: int) -> None:
    """Two micro-batches at once, of lengths that come to parts of the same length: refused rather than confused."""
    model = language_model("llama")
    model.gradient_checkpointing_enable({"use_reentrant": False})
    cut(model, sequence_parallel=True)
    first = text_loss(model, 10)
    second = text_loss(model, 8)
    (first + second).backward()
    first = text_loss(model, 8)
    second = text_loss(model, 7)
    with pytest.raises(DloError, match="got several with shards of 4 tokens; pad them to a multiple of tp"):
        first.backward()


@on_ranks(2)
def test_frozen_weights_copies_and_generation(rank: int, world_size: int) -> None:
    alone, shared = language_model("llama"), language_model("llama")
    for model in (alone, shared):
        model.model.layers[0].requires_grad_(False)
        model.get_input_embeddings().weight.requires_grad_(False)
    cut(shared)
    ids, _ = tokens()
    for model in (alone, shared, copy.deepcopy(shared)):  # A copy works, and is cut in the same way.
        model(input_ids=ids, labels=ids).loss.backward()  # transformers' own loss, from whole logits
    wanted = {name: p.grad for name, p in alone.named_parameters() if p.grad is not None}
    assert_close(whole_gradients(shared), wanted, 1e-5, "frozen")
    assert "model.layers.0.mlp.up_proj.weight" not in wanted
    alone.eval()
    shared.eval()
    along = language_model("llama").eval()
    cut(along, sequence_parallel=True)
    greedy: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False}
    expected, *generated = (model.generate(ids[:1], **greedy) for model in (alone, shared, along))
    assert all(torch.equal(found, expected) for found in generated)


@on_ranks(2)
def test_what_is_kept_is_not_sent_again(rank: int, world_size: int) -> None:
    for sequence_parallel in (False, True):
        found, counts = [], []
        for mode in (None, "selective", "full"):
            model = language_model("llama", num_hidden_layers=2)
            cut(model, sequence_parallel)
            if mode is not None:
                ActivationCheckpoint(mode).apply(model, None, plan_of(model))
            with Between() as between:
                text_loss(model).backward()
            counts.append(between.calls)
            found.append(whole_gradients(model))
        plain, selective, full = counts
        assert selective == plain
        assert full.total() > plain.total()
        for again in found[1:]:
            assert_close(again, found[0], 0.0, f"recomputed, sequence {sequence_parallel}")


@on_ranks(2)
def test_sums_run_beside_products(rank: int, world_size: int) -> None:
    model = language_model("llama", num_hidden_layers=1)
    cut(model)
    ids, _ = tokens(8, 2)
    embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
    hidden = model.model(inputs_embeds=embedded, use_cache=False)[0]
    with Between() as between:
        hidden.sum().backward()
    # Of the MLP gate and up; of the attention queries, keys and values.
    assert between.found == [("all_reduce", 2), ("all_reduce", 3)]
    # A weight that is frozen has no gradient to wait for, and a copy computes with its own weights.
    model.model.layers[0].mlp.gate_proj.weight.requires_grad_(False)
    twin = copy.deepcopy(model)
    twin.model.layers[0].mlp.up_proj.weight.data.mul_(2)
    for each, factor in ((model, 1), (twin, 2)):
        each.zero_grad()
        found = each.model(inputs_embeds=embedded, use_cache=False)[0]
        found.sum().backward()
        assert each.model.layers[0].mlp.gate_proj.weight.grad is None
        assert each.model.layers[0].mlp.up_proj.weight.grad is not None
        assert torch.equal(found, hidden) == (factor == 1)


# --- models cut over 2 and 4 ranks have the loss, the gradients and the steps of the whole model ---------------------


NO_DROPOUT = {"attention_dropout": 0.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},  # biases of queries, keys and values
    "qwen3": {},  # norms of each head's queries and keys
    "mistral": {"sliding_window": 4},
    "gemma": {"tie_word_embeddings": True, "num_key_value_heads": 1},  # one key/value head for all
    "gemma2": {"tie_word_embeddings": True},  # soft-capped logits, norms after attention and MLP
    "gemma3_text": {"tie_word_embeddings": True},
    "granite": {},  # scaled logits
    "gpt_neox": NO_DROPOUT,  # fused by head, attention and MLP side by side
    "phi": NO_DROPOUT,  # side by side after one norm, biases everywhere, the head too
    "phi3": {},  # packed queries, keys and values, of different sizes
    "cohere": {"use_qk_norm": True, "tie_word_embeddings": True},
    "olmo2": {},  # norms over all heads
    "starcoder2": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 8, "attn_pdrop": 0.0, "tie_word_embeddings": True},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 0.0},  # MLP in the block
}
FEW = ("phi3", "gpt2")  # Beside the lengths of Llama.
ON_FOUR = ("llama", "gemma", "qwen3", "phi3", "gpt_neox", "olmo2", "gemma2")


def _language(rank: int, world_size: int, names: tuple[str, ...]) -> None:
    for name in names:
        make = functools.partial(language_model, name, **FAMILIES[name])
        for sequence_parallel in (False, True) if name != "opt" else (False,):
            compare(make, text_loss, sequence_parallel, f"{name}, sequence {sequence_parallel}")
    for length in (2, 8):  # fewer tokens than ranks; as many for each
        loss = functools.partial(text_loss, length=length)
        compare(functools.partial(language_model, "llama"), loss, True, f"{length} tokens")


VITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms of queries and keys, layer scale": {"qk_norm": True, "init_values": 0.1},
    "registers, mean of tokens, an even length": {"reg_tokens": 2, "class_token": False, "global_pool": "avg"},
}


def _vision(rank: int, world_size: int, every: bool) -> None:
    for what, more in VITS.items():
        make = functools.partial(image_model, "vit_tiny_patch16_224", **VIT, **more)
        for sequence_parallel in (False, True) if every or what == "plain" else (True,):
            compare(make, image_loss, sequence_parallel, f"vit: {what}, sequence {sequence_parallel}")
    packed = functools.partial(image_model, "vit_giant_patch14_reg4_dinov2", **{**VIT, "mlp_ratio": 4})
    compare(packed, image_loss, True, "a gate packed with the values")


def _all(rank: int, world_size: int, names: tuple[str, ...]) -> None:
    _language(rank, world_size, names)
    _vision(rank, world_size, names != FEW)


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, FEW),
        pytest.param(2, tuple(name for name in FAMILIES if name not in FEW), marks=pytest.mark.slow),
        pytest.param(4, ON_FOUR, marks=pytest.mark.slow),
    ],
)
def test_language_models_and_vision_transformers(ranks: int, names: tuple[str, ...]) -> None:
    run_distributed(_all, ranks, names)


def _coatnets(rank: int, world_size: int, names: tuple[str, ...]) -> None:
    loss = functools.partial(image_loss, size=64)
    for name in names:
        compare(functools.partial(image_model, name, img_size=64, num_classes=5), loss, False, name, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [("coatnet_nano_rw_224",), ("coatnet_rmlp_nano_rw_224",), ("maxvit_tiny_tf_224", "coatnext_nano_rw_224")],
)
def test_attention_over_pixels(names: tuple[str, ...]) -> None:
    run_distributed(_coatnets, 2, names)


# --- optimizers of full tensors under tp: one rank steps and keeps each sliced tensor; the bytes are counted ---------


def _step_by_owner(rank: int, world: int, name: str) -> dict[str, Any]:
    run = trainer(world, STRATEGIES["tp"](), max_steps=STEPS, max_epochs=-1, gradient_clip_val=1e6)
    run.fit(task(name), Batches(data()))
    optimizer, strategy = run.optimizers[0], run.strategy
    share = strategy.engine.shares.share_of("model.blocks.0.mlp.fc1.weight")
    held = strategy.optimizer_tensors(optimizer)
    sliced = {key: tuple(share.full_shape(key)) for key in share.slices if key in share.shapes}
    state = {key for key, tensor in held.items() if key in sliced and optimizer.state[tensor]}
    weights = {key: value for key, value in gather_full_weights(run).items() if key.startswith("model.")}
    assert rank or differ(weights, plain_loop(name, 1)) < 1e-5
    sent = share.tensor_parallel.elements["exchange"]
    return {"sliced": sliced, "held": {*held}, "state": state, "sent": sent}


def test_each_sliced_tensor_is_stepped_by_one_rank() -> None:
    first, second = run_distributed(_step_by_owner, 2, "lamb8bit", timeout=200)
    sliced = first["sliced"]
    assert len(sliced) >= 8
    both = first["held"] & second["held"]
    assert not both & sliced.keys()
    assert first["held"] | second["held"] >= sliced.keys()
    assert both, "tensors without slices are stepped by both"
    assert not first["state"] & second["state"]
    assert first["state"] | second["state"] == sliced.keys()
    # Slices of the gradient and of the old values to the owner, and of the new values from it.
    elements = sum(torch.Size(shape).numel() for shape in sliced.values())
    assert first["sent"] + second["sent"] == STEPS * 3 * elements
    loads = [sum(torch.Size(sliced[key]).numel() for key in rank["state"]) for rank in (first, second)]
    assert max(loads) <= 0.6 * elements


#: Matrices of these sizes have gradients without a null space, whose eigenbasis would be arbitrary: no side that is
#: longer than the other has a basis, and a step has more tokens than either.
SOAP = {"precondition_frequency": 2, "max_precondition_dim": SIZES["hidden_size"]}


def _soap(world: int, strategy: Any) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    options: dict[str, Any] = {"optimizer": "soap", "optimizer_args": SOAP, "lr": 1e-2, "schedule": "constant"}
    language = CausalLM(config={"model_type": "llama", **SIZES}, **options)
    run = trainer(world, strategy, max_steps=STEPS, precision="64-true")
    run.fit(language, datamodule=Tokens(1, steps=STEPS))
    return gather_full_weights(run)


@on_ranks(2)
def test_soap_has_the_weights_of_one_process_in_double_precision(rank: int, world: int) -> None:
    expected, found = _soap(1, "auto"), _soap(world, MeshStrategy(tp=world))
    assert rank or differ(found, expected) < 5e-5  # Its QR is in single precision.
