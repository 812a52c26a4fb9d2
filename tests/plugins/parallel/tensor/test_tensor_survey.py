"""What tensor parallelism will do, and refuses, found out without a process group and without memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from dlo_framework.errors import DloError
from dlo_framework.plan import ParallelPlan
from dlo_plugins.parallel.tensor.tensor_parallel import TensorParallel
from dlo_plugins.parallel.tensor.tp_plan import Divisibility, Division, check_divisibility
from dlo_plugins.parallel.tensor.tp_planner import make_tp_plan
from dlo_tasks.language import adapters
from dlo_tasks.language.adapters import Lora
from support.odd_modules import INPUTS, WIDTH, Block, Odd, block, put
from support.tensor_models import SIZES, VIT, language_model, plan_of


def on_meta(family: str, **more: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**SIZES, **more}))


def pictures(name: str = "vit_tiny_patch16_224", **more: Any) -> nn.Module:
    with torch.device("meta"):
        return timm.create_model(name, **more)


@given(pieces=st.lists(st.integers(1, 40), min_size=1, max_size=4), ranks=st.integers(1, 9))
def test_the_ranks_parts_are_the_whole(pieces: list[int], ranks: int) -> None:
    division = Division(1, tuple(pieces))
    whole = torch.arange(sum(pieces)).expand(2, -1)
    cuts = [division.slice_for(ranks, rank) for rank in range(ranks)]
    assert sorted(torch.cat([cut.slice_tensor(whole)[0] for cut in cuts]).tolist()) == whole[0].tolist()
    for piece in range(len(pieces)):
        counts = [cut.runs[piece][1] for cut in cuts]
        assert max(counts) - min(counts) <= 1
    assert all(cut.size == sum(pieces) for cut in cuts)


@pytest.mark.parametrize(
    ("model", "tp", "message"),
    [
        (pictures(**{**VIT, "num_heads": 8}), 3, r"the 8 heads of 'blocks.0.attn', got 3; set tp=2"),
        (on_meta("llama"), 8, r"the 4 key/value heads of 'model.*', got 8; set tp=4 \(sizes .*: 1, 2, 4"),
        (on_meta("phi3"), 8, r"the 4 key/value heads of .*, got 8; set tp=4"),
        (on_meta("llama", intermediate_size=50), 4, r"the 50 output features of 'model.layers.0.mlp.*set tp=2"),
        (on_meta("gpt_neox", num_attention_heads=2), 4, r"the 2 heads of 'gpt_neox.layers.0.attention', got 4"),
        (pictures("resnet18"), 2, r"got none from ResNet; set tp=1"),
    ],
)
def test_sizes_that_the_ranks_do_not_divide(model: nn.Module, tp: int, message: str) -> None:
    with pytest.raises(DloError, match=message):
        TensorParallel().check(model, plan_of(model), tp)


def test_rules_of_parameters_alone_are_named() -> None:
    plan = ParallelPlan(tensor={"0.weight": "column"})
    with pytest.raises(DloError, match=r"got 0\.weight, which match no module, from Sequential"):
        TensorParallel().check(nn.Sequential(nn.Linear(4, 4)), plan, 2)


def test_the_fix_suits_the_whole_model() -> None:
    sizes = [Divisibility(f"{number}", number, "heads") for number in (12, 18, 48)]
    with pytest.raises(DloError, match=r"set tp=6 \(sizes that fit all of the model: 1, 2, 3, 6\)"):
        check_divisibility(sizes, 8)


class Scaled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Mlp(nn.Module):
    def __init__(self, norm: bool = False, inside: bool = False, last: type[nn.Linear] = nn.Linear) -> None:
        super().__init__()
        self.before = nn.LayerNorm(8) if inside else nn.Identity()
        self.up, self.down = nn.Linear(8, 32), last(32, 8)
        self.norm = nn.LayerNorm(32) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.norm(self.up(self.before(x)).relu()))


class Net(nn.Module):
    def __init__(self, **more: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleDict({"mlp": Mlp(**more)}) for _ in range(2))


def plan(**more: str) -> ParallelPlan:
    return ParallelPlan(blocks=("blocks.*",), tensor={f"blocks.*.mlp.{name}": rule for name, rule in more.items()})


@pytest.mark.parametrize(
    ("net", "rules", "message"),
    [
        ({"norm": True}, {"up": "column", "down": "row"}, r"norm.weight' must not span all features .* \(32,\)"),
        ({}, {"up": "column"}, "'blocks.0.mlp.up' must have a row projection after it, got none"),
        ({}, {"down": "row"}, "'blocks.0.mlp.down' must have a column projection in a module around it"),
        ({"inside": True}, {"before": "column", "down": "row"}, "mlp.before' must be Linear, .* got LayerNorm"),
        ({"last": Scaled}, {"up": "column", "down": "row"}, "must compute what nn.Linear does, got .* Scaled"),
        ({"inside": True}, {"before": "vocab"}, "'vocab' must be an Embedding or a Linear, got LayerNorm"),
        ({}, {"up": "heads", "down": "row"}, "Mlp must have an attribute with the width of its heads .*mlp.up'"),
    ],
)
def test_rules_that_do_not_make_a_region_are_refused(net: Any, rules: dict[str, str], message: str) -> None:
    with pytest.raises(DloError, match=message):
        make_tp_plan(Net(**net), plan(**rules), 2)


def test_sequence_parallel_needs_tokens_in_a_row() -> None:
    coatnet = pictures("coatnet_nano_rw_224")
    with pytest.raises(DloError, match=r"got feature maps in 'stages.2.blocks.0.attn'; set sequence_parallel: false"):
        TensorParallel(sequence_parallel=True).check(coatnet, plan_of(coatnet), 2)
    opt = on_meta("opt", ffn_dim=48, word_embed_proj_dim=32)
    with pytest.raises(DloError, match=r"got them directly in 'model.decoder.layers.0'"):
        TensorParallel(sequence_parallel=True).check(opt, plan_of(opt), 2)


def test_sequence_parallel_needs_a_rule_for_what_it_splits() -> None:
    vit = pictures(**VIT)
    known = plan_of(vit)
    rules = {pattern: rule for pattern, rule in known.tensor.items() if "norm1" not in pattern}
    unsaid = ParallelPlan(blocks=known.blocks, tensor=rules)
    make_tp_plan(vit, unsaid, 2)
    with pytest.raises(DloError, match=r"'blocks.0.norm1.weight' must have the rule 'sequence'"):
        make_tp_plan(vit, unsaid, 2, sequence_parallel=True)


def test_a_vocabulary_of_fewer_tokens_than_ranks() -> None:
    model = on_meta("gemma", vocab_size=3, num_key_value_heads=1)
    with pytest.raises(DloError, match=r"at most the 3 tokens of 'model.embed_tokens', .* got 4; set tp=3"):
        TensorParallel().check(model, plan_of(model), 4)


# --- other adapters than LoRA and DoRA, whose parity is in `test_llm_adapters.py`, are refused -----------------------


def test_other_adapters_are_refused() -> None:
    model = language_model("llama")
    adapters.add_adapters(model, model.get_output_embeddings(), Lora(rank=3), torch.float32)
    model.model.layers[0].self_attn.q_proj.extra = nn.Linear(2, 2)  # type: ignore[index,union-attr,attr-defined]
    with pytest.raises(DloError, match=r"of 'model.layers.0.self_attn.q_proj' must be LoRA or DoRA .* set tp=1"):
        TensorParallel().check(model, plan_of(model), 2)


# --- A user's tensor rules are tried on values before the first step; what they do not say is found ------------------


class WithExample(Odd):
    rules_of: tuple[str, ...] = ("column", "row")
    more: dict[str, str] = {}  # noqa: RUF012

    def example_batch(self, datamodule: Any) -> Any:
        return torch.zeros(1, INPUTS), torch.zeros(1, dtype=torch.long)

    def parallel_plan(self) -> ParallelPlan:
        plan = super().parallel_plan()
        return replace(plan, tensor={**dict(zip(plan.tensor, self.rules_of, strict=True)), **self.more})


def made(**members: Any) -> WithExample:
    task = type("Made", (WithExample,), members)()
    task.configure_model()
    return task


def completed(task: Any) -> ParallelPlan:
    tensor = TensorParallel()
    plan = tensor.complete_plan(task, task.parallel_plan(), 2)
    tensor.check(task.model, plan, 2)
    return plan


def packed(self: Any, hidden: Tensor) -> Tensor:
    gate, value = hidden.chunk(2, -1)
    return torch.sigmoid(gate) * value


SOFTMAX = block(act=lambda self, hidden: hidden.softmax(-1))
PACKED = block(act=packed, more=lambda self: put(self, fc1=nn.Linear(WIDTH, 32)))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"block": SOFTMAX}, r"fc1: column, fc2: row, .* differs by \de-0\d"),
        ({"block": PACKED}, "fc1: column, fc2: row, .* differs by"),
        ({"block": PACKED, "rules_of": ("gate_up", "row")}, None),
        ({}, None),
        ({"more": {"blocks.*.norm": "replicate"}}, None),
    ],
    ids=["softmax", "packed", "gate_up", "no rule of the norm", "replicated norm"],
)
def test_rules_must_give_the_full_blocks_values(members: dict[str, Any], message: str | None) -> None:
    task = made(**members)
    if message is not None:
        with pytest.raises(DloError, match=message):
            completed(task)
        return
    plan = completed(task)
    assert plan.rule_for("blocks.3.norm.weight") in ("sequence", "replicate")
    task.example_batch = lambda datamodule: None
    completed(task)  # Shapes tell where a norm of the block's width works.


def test_a_rule_that_is_wrong_is_named_without_the_others() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = Block(), SOFTMAX()

        def forward(self, x: Tensor) -> Tensor:
            return self.two(self.one(x))

    rules = {"blocks.*.*.fc1": "column", "blocks.*.*.fc2": "row"}
    task = made(block=Two, parallel_plan=lambda self: replace(Odd.parallel_plan(self), tensor=rules))
    with pytest.raises(DloError, match=r"got two\.fc1: column, two\.fc2: row, with which"):
        completed(task)
