"""Shards of sequences: what is refused, sent and held, and models that mix positions in other ways."""

import contextlib
import copy
import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

from dlo_framework.errors import DloError
from dlo_framework.models.experts import MixtureOptions
from dlo_framework.models.recompute import recompute
from dlo_framework.plan import ParallelPlan
from dlo_framework.testing import Case, assert_parity, run_distributed
from dlo_plugins.memory.activation_checkpoint import ActivationCheckpoint
from dlo_plugins.parallel.context.context_parallel import ContextParallel, outermost
from dlo_plugins.parallel.context.gathered_modules import find_parts
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.language_plans import plan_for
from support import token_batches
from support.causal_types import tiny
from support.on_ranks import on_ranks
from support.shared_sequences import compare, inspect_sequence
from support.token_batches import Tokens

LAYERS, WIDTH, KEYS, VOCABULARY = 3, 32, 16, 50
LLAMA = {**token_batches.GROUPED, "num_hidden_layers": LAYERS, "vocab_size": VOCABULARY}


def built(**settings: Any) -> Any:
    torch.manual_seed(0)
    return token_batches.built_model(tiny("llama", dropout=False) | LLAMA | settings)


def applied(model: Any, method: Any = "ring", cp: int | None = None) -> ContextParallel:
    """Shares the sequence among all ranks, or among that many."""
    ranks = dist.get_world_size()
    cp = ranks if cp is None else cp
    applier = ContextParallel(method)
    applier.apply(model, init_device_mesh("cpu", (ranks // cp, cp), mesh_dim_names=("dp", "cp")), plan_for(model))
    return applier


def batch_of(rows: int, length: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, VOCABULARY, (rows, length), generator=generator)
    return {"input_ids": ids, "position_ids": torch.arange(length).expand(rows, -1)}


def hidden(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return model.model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], use_cache=False)[0]


def test_vision_models_are_refused() -> None:
    import timm

    with pytest.raises(DloError, match=r"causal language model of transformers .* got VisionTransformer"):
        ContextParallel().check(timm.create_model("vit_tiny_patch16_224"), ParallelPlan(), 2)


def test_a_capacity_of_experts_is_refused() -> None:
    config = {"model_type": "llama", **LLAMA}
    for options in (MixtureOptions(count=4), MixtureOptions(count=4, capacity_factor=1.5)):
        task = CausalLM(config=config, experts=options).on_meta()
        ContextParallel().check(task.model, task.parallel_plan(), 1)
        refused = pytest.raises(DloError, match=r"cp must be 1 with experts\.capacity_factor, .* got 2; set cp: 1")
        with refused if options.capacity_factor else contextlib.nullcontext():
            ContextParallel().check(task.model, task.parallel_plan(), 2)


def test_ulysses_needs_heads_that_the_ranks_divide() -> None:
    with torch.device("meta"):
        model = built(num_attention_heads=6, num_key_value_heads=2, hidden_size=48)
    plan = plan_for(model)
    for cp, tp, near in ((4, 1, 3), (6, 2, 3)):
        message = f"the {6 // tp} heads .* got {cp}; set cp={near} "
        with pytest.raises(DloError, match=message):
            ContextParallel("ulysses").check(model, plan, cp, tp)
        ContextParallel("ring").check(model, plan, cp, tp)
    ContextParallel("ulysses").check(model, plan, 3)
    assert model.config._attn_implementation == "sdpa"


@on_ranks(4)
def test_what_is_sent_is_the_papers_and_what_is_held_falls_with_the_ranks(rank: int, ranks: int) -> None:
    alone: dict[bool, int] = {}
    for (cp, method), again in itertools.product(
        ((1, "ring"), (2, "ulysses"), (4, "ring"), (4, "ulysses")), (False, True)
    ):
        model = built()
        applier = applied(model, method, cp)
        if again:
            recompute(model.model.layers)
        part = applier.shard_batch(batch_of(2, 256))
        saved: dict[int, int] = {}

        def note(tensor: Tensor, saved: dict[int, int] = saved) -> Tensor:
            saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = hidden(model, part).square().sum()
        loss.backward()
        parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        held = sum(size for at, size in saved.items() if at not in parameters)
        elements = {} if applier.sequence is None else dict(applier.sequence.ring.elements)
        positions = 2 * 256 // cp * LAYERS
        keys_values = 2 * KEYS * positions
        forwards, more = 2 if again else 1, 0
        if cp == 1:
            alone[again] = held
            assert not elements
        elif method == "ring":
            passed = (cp - 1) * keys_values
            backward = dict.fromkeys(("backward_keys_values", "backward_gradients"), passed)
            assert elements == {"forward_keys_values": forwards * passed, **backward}
        else:
            repeats = max(2, cp) // 2  # Of two heads of keys.
            assert elements == {"all_to_all": (forwards + 1) * (2 * WIDTH * positions + repeats * keys_values)}
            if not again:  # the attention's output by heads and by positions, and heads that are repeated
                more = 4 * WIDTH * positions + 4 * (repeats - 1) * keys_values
        assert held < 1.01 * alone[again] / cp + more, (cp, method, again)


@on_ranks(2)
def test_other_uses(rank: int, ranks: int) -> None:
    model, reference = built(), built()
    applier = applied(model)
    batch = batch_of(2, 22)
    whole = reference(batch["input_ids"]).logits
    with pytest.raises(DloError, match=r"got one that was not; pass it through\s+shard_batch"):
        model(batch["input_ids"])
    with applier.use_full_sequences():  # as if nothing were shared, padding on the left included
        mask = torch.ones_like(batch["input_ids"])
        mask[0, :5] = 0
        ours, theirs = (m(batch["input_ids"], attention_mask=mask).logits for m in (model, reference))
        assert torch.equal(ours[:, 5:], theirs[:, 5:])
        ours, theirs = (m.generate(batch["input_ids"], max_new_tokens=3, do_sample=False) for m in (model, reference))
        assert torch.equal(ours, theirs)
    part = applier.shard_batch(batch)
    model.eval()
    with torch.no_grad():
        logits = model(part["input_ids"], position_ids=part["position_ids"], use_cache=False).logits
    torch.testing.assert_close(applier.gather(logits)[:, :22], whole, rtol=1e-5, atol=1e-5)
    applier.shard_batch({"input_ids": batch["input_ids"], "position_ids": torch.arange(11).repeat(2, 2)})
    with pytest.raises(DloError, match="got 1 rows of 12 queries and 12 keys"):
        model(part["input_ids"][:1], position_ids=part["position_ids"][:1])
    with pytest.raises(DloError, match=r"the shape \[2, 22\] of input_ids .* got \[2, 1, 22, 22\]"):
        applier.shard_batch({**batch, "attention_mask": torch.ones(2, 1, 22, 22)})
    assert "dlo" not in model.config.to_json_string()
    twin = copy.deepcopy(model)
    part = applier.shard_batch(batch)
    assert torch.equal(hidden(twin, part), hidden(model, part))

    applier = applied(reference, cp=1)  # nothing is done to it
    assert applier.sequence is None
    assert applier.shard_batch(batch) is batch
    assert reference.config._attn_implementation == "sdpa"
    with applier.use_full_sequences():
        assert torch.equal(reference(batch["input_ids"]).logits, whole)


@on_ranks(2)
def test_micro_batches(rank: int, ranks: int) -> None:
    """Two micro-batches of other documents, both forward before both backward, with recomputation."""
    positions = torch.stack([torch.arange(24), torch.arange(6).repeat(4), torch.arange(8).repeat(3), torch.arange(24)])
    batch = {**batch_of(4, 24), "position_ids": positions}
    for method in ("ring", "ulysses"):
        model, together = built(), built()
        recompute(model.model.layers)
        applier = applied(model, method)
        part = applier.shard_batch(batch)
        losses = []
        for first in (0, 2):
            applier.select_rows(first, 2)
            rows = {name: value[first : first + 2] for name, value in part.items()}
            losses.append(hidden(model, rows).square().sum())
        for first, loss in zip((0, 2), losses, strict=True):
            applier.select_rows(first, 2)
            loss.backward()
        hidden(together, batch).square().sum().backward()
        for own, whole in zip(model.model.parameters(), together.model.parameters(), strict=True):
            assert own.grad is not None
            assert whole.grad is not None
            dist.all_reduce(own.grad)
            torch.testing.assert_close(own.grad, whole.grad, rtol=1e-4, atol=1e-4)


def _packed(rows: int, length: int, document: int) -> dict[str, Tensor]:
    return {**batch_of(rows, length), "position_ids": (torch.arange(length) % document).expand(rows, -1)}


#: Of compiled blocks: dtype, backend, rate of attention's dropout, and how activations are recomputed.
COMPILED = {
    "plain": (torch.float32, "aot_eager", 0.0, None),
    "double": (torch.float64, "aot_eager", 0.0, None),
    "recomputed": (torch.float32, "aot_eager", 0.0, "full"),
    "selective": (torch.float32, "aot_eager", 0.0, "selective"),
    "dropout": (torch.float32, "aot_eager", 0.2, None),
    "dropout, recomputed": (torch.float32, "aot_eager", 0.2, "full"),
    "inductor": (torch.float32, "inductor", 0.0, None),
    "autocast": (torch.bfloat16, "aot_eager", 0.0, None),
}


def _compiled(rank: int, ranks: int, method: str) -> dict[str, Any]:
    """Trains a model in compiled blocks and an eager one, on batches of other lengths and documents.

    Returns the graphs of a block and its breaks, and the elements that both have sent in the last batch.
    """
    found: dict[str, Any] = {}
    for name, (dtype, backend, dropout, again) in COMPILED.items():
        torch._dynamo.reset()
        counters.clear()
        models = [built(attention_dropout=dropout) for _ in range(2)]
        appliers = [applied(model, method) for model in models]
        for model in models:
            model.to(torch.float64 if dtype == torch.float64 else torch.float32)
            if again is not None:
                ActivationCheckpoint(again).apply(model, None, plan_for(model))
        for layer in models[0].model.layers:
            layer.compile(backend=backend, fullgraph=True)
        sent = []
        for batch in (batch_of(2, 24), _packed(2, 24, 7), _packed(2, 40, 9), _packed(2, 40, 4)):
            results, sent = [], []
            for applier, model in zip(appliers, models, strict=True):
                assert applier.sequence is not None
                applier.sequence.ring.elements.clear()
                model.zero_grad()
                torch.manual_seed(5)
                with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                    loss = hidden(model, applier.shard_batch(batch)).square().mean()
                loss.backward()
                results.append((loss.detach(), *(parameter.grad for parameter in model.model.parameters())))
                sent.append(dict(applier.sequence.ring.elements))
            tolerance = 1e-12 if dtype == torch.float64 else 1e-2 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(*results, rtol=tolerance, atol=tolerance)
        found[name] = (counters["stats"]["unique_graphs"], dict(counters["graph_break"])), sent
    return found


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ring", "ulysses"])
def test_a_compiled_block_is_one_graph(method: str) -> None:
    for rank in run_distributed(_compiled, 2, method, timeout=1200):
        # Two graphs: one more for the other length.
        assert {name: found for name, (found, _) in rank.items()} == dict.fromkeys(COMPILED, (2, {}))
        if method == "ring":  # Keys and values do not travel again; in eager code they do.
            compiled, eager = rank["selective"][1]
            assert 2 * compiled["forward_keys_values"] == eager["forward_keys_values"]


# models of which ranks share the sequence, also those that mix positions in other ways: ranks equal one process


#: Types of each way: shared attention (plain, with a window, a cap or sinks), a bias by position, positions that the
#: model makes, a mask that attention makes, a recurrence beside shared attention, convolutions in attention, and
#: positions in the first dim.
CASES = [
    ("llama", "packed", "ring"),
    ("mistral", "packed", "ulysses"),
    ("gemma2", "padded left", "ulysses"),
    ("flint", "packed", "ring"),
    ("bloom", "packed", "ring"),
    ("bart", "packed", "ulysses"),
    ("doge", "padded", "ring"),
    ("qwen3_next", "packed", "ring"),
    ("zaya", "packed", "ring"),
    ("xlnet", "plain", "ring"),
]


def parts_of(name: str, gather: Any = "auto") -> Any:
    task: Any = CausalLM(config=tiny(name)).on_meta()
    return find_parts(task.model, outermost(task.model), task.parallel_plan(), gather)


def check(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        wrong = {case: value for case, value in of_rank.items() if isinstance(value, str) or value > 2e-5}
        assert not wrong


def _compared_and_inspected(rank: int, ranks: int) -> Any:
    return compare(rank, ranks, CASES), inspect_sequence(rank, ranks)


def test_outputs_and_gradients_are_one_process_s_and_full_sequences_are_sent_once() -> None:
    found = run_distributed(_compared_and_inspected, 2)
    check([compared for compared, _ in found])
    for _, (elements, is_local) in found:
        hidden = 2 * 8 * 32 * 4  # rows, positions of the rank, width, layers
        assert elements["all_gather"] == 2 * (hidden + 2 * 8)  # and the tokens
        assert elements["reduce_scatter"] == 2 * hidden
        assert is_local, "generation needs no full sequences"


def build(name: str) -> tuple[Any, Any]:
    config = {**tiny(name, dropout=False), "vocab_size": token_batches.VOCABULARY}
    return CausalLM(config=config, lr=1e-3, optimizer_args={"eps": 1e-4}), Tokens(1, rows=8)


def on_pair(**axes: Any) -> MeshStrategy:
    more = {"micro_batches": 4} if "pp" in axes else {}
    return MeshStrategy(**{"dp_shard": 1, "cp": 2, **axes, **more})


def recomputed(mode: Any) -> MeshStrategy:
    return on_pair(dp_shard=2, appliers=[ActivationCheckpoint(mode)])


@pytest.mark.slow
def test_pairs_of_axes_and_recomputation() -> None:
    ways = [partial(on_pair, **{axis: 2}) for axis in ("dp_shard", "pp", "tp")]
    ways += [partial(recomputed, mode) for mode in ("full", "selective")]
    # Slices of attention of gpt_oss have other gradients of experts' biases, and tp refuses them.
    names = [(name, way) for name in ("bloom", "qwen3_next", "opt", "gpt_oss") for way in ways]
    cases = [Case(way, {"name": name}) for name, way in names if (name, way) != ("gpt_oss", ways[2])]
    assert_parity(build, cases, world_size=4, steps=3)


def test_only_what_cannot_be_shared_is_gathered() -> None:
    found = parts_of("qwen3_next")
    assert [name.rpartition(".")[2] for name in found.attention] == ["self_attn"] * len(found.attention)
    assert {name.rpartition(".")[2] for name in found.gathered} == {"linear_attn"}
    assert found.attention
    llama = parts_of("llama")
    assert not llama.gathered
    assert not llama.needs_full_inputs
    assert not parts_of("llama", "all").attention
    assert parts_of("bloom").needs_full_inputs


def test_models_without_blocks_and_unknown_ways_are_refused() -> None:
    task: Any = CausalLM(config=tiny("llama")).on_meta()
    with pytest.raises(DloError, match="got none from LlamaForCausalLM"):
        ContextParallel().check(task.model, ParallelPlan(), 2)
    with pytest.raises(DloError, match="gather must be one of auto, all, got some"):
        ContextParallel(gather="some")  # type: ignore[arg-type]
    with pytest.raises(DloError, match="method must be one of ring, ulysses, got star"):
        ContextParallel("star")  # type: ignore[arg-type]
