"""Mixtures in families of transformers: which are found, how experts are stacked, and the loss that balances them."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from dlo_framework.errors import DloError
from dlo_framework.models.experts import Mixture, find_mixtures
from dlo_framework.shards import Box
from dlo_framework.testing import Case, assert_parity
from dlo_plugins.compile.callback import Compile
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_tasks.language import model_folders
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.language_plans import plan_for
from dlo_tasks.language.masked_lm import MaskedLM
from dlo_tasks.language.seq2seq_lm import Seq2SeqLM
from support.causal_types import TYPES, tiny, tiny_masked
from support.seq2seq import seq2seq_config
from support.strategies import STRATEGIES
from support.token_batches import SMALL, Tokens, packed_rows
from support.trainers import quiet_trainer

#: Families of the ordinary test, with the modules that hold router and experts.
NAMED = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe", "gpt_oss", "mixtral", "olmoe"), "mlp"),
    **dict.fromkeys(("phimoe", "qwen2_moe", "qwen3_moe"), "mlp"),
    **{"granitemoe": "block_sparse_moe", "jamba": "feed_forward", "llama4_text": "feed_forward"},
}
#: Families with experts in a form of their own, which `ep` refuses: JetMoe sorts tokens between two linear layers of
#: experts, LongCat-Flash counts experts without weights among the others.
OWN_FORM = {"jetmoe", "longcat_flash"}


def build(family: str) -> Any:
    config = tiny(family)
    kind = config.pop("model_type")
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config))


def check(family: str) -> list[Mixture]:
    model = build(family)
    found = find_mixtures(model)
    stacked = {name for mixture in found for name in mixture.stacked}
    inside = {
        name
        for name, parameter in model.named_parameters()
        if re.search(r"\bexperts\b", name) and "shared" not in name and parameter.ndim >= 3
    }
    assert (not found and inside) if family in OWN_FORM else inside <= stacked, family
    assert all(model.get_parameter(name).shape[0] == mixture.count for mixture in found for name in mixture.stacked)
    assert all(mixture.router is not None and mixture.top_k for mixture in found)
    plan = plan_for(model)
    assert bool(plan.experts) == bool(found)
    if found:
        plan.validate(model)
        assert find_mixtures(model, plan) == found
    return found


def test_mixtures_of_named_families_are_found_in_their_plans() -> None:
    for family, name in NAMED.items():
        found = check(family)
        assert {mixture.name.rpartition(".")[2] for mixture in found} == {name}
        assert {mixture.form for mixture in found} == {"dense" if family == "llama4_text" else "routed"}
        assert {mixture.count for mixture in found} == {4}
    shared = {family: bool(find_mixtures(build(family))[0].shared) for family in ("deepseek_v3", "mixtral")}
    assert shared == {"deepseek_v3": True, "mixtral": False}


def test_dense_layers_between_are_not_mixtures() -> None:
    model = build("glm4_moe")
    names = [mixture.name for mixture in find_mixtures(model, plan_for(model))]
    assert plan_for(model).experts == ("model.layers.*.mlp",)
    assert names == ["model.layers.1.mlp", "model.layers.2.mlp", "model.layers.3.mlp"]


def test_joined_experts_and_features_are_found() -> None:
    from transformers.models.dbrx.configuration_dbrx import DbrxFFNConfig
    from transformers.models.dbrx.modeling_dbrx import DbrxFFN

    config = DbrxFFNConfig(hidden_size=8, ffn_hidden_size=6, moe_num_experts=4, moe_top_k=2)
    with torch.device("meta"):
        model = torch.nn.ModuleDict({"ffn": DbrxFFN(SimpleNamespace(ffn_config=config))})
    (found,) = find_mixtures(model)
    assert (found.name, found.form, found.count, found.top_k) == ("ffn", "routed", 4, 2)
    assert set(found.stacked) == {f"ffn.experts.mlp.{name}" for name in ("w1", "v1", "w2")}


@pytest.mark.slow
def test_every_family_with_experts_is_found() -> None:
    found = {family: check(family) for family in TYPES}
    assert len([family for family, mixtures in found.items() if mixtures]) >= 55
    assert {family for family, mixtures in found.items() if any(mixture.form == "dense" for mixture in mixtures)} == {
        "llama4",
        "llama4_text",
    }


def stored(family: str, folder: Path) -> tuple[Any, Any]:
    """Returns a model, and what has been saved of it."""
    config = tiny(family, num_hidden_layers=2)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    model.save_pretrained(folder)
    return model, model_folders.open_safetensors(folder)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_stored_experts_are_stacked_without_being_read(family: str, tmp_path: Path) -> None:
    model, saved = stored(family, tmp_path)
    assert any(".experts.3." in name for name in saved)  # transformers writes each expert's matrices.
    model_folders._take_new_names(saved, model)
    names = [name for name, _ in model.named_parameters() if "experts" in name]
    assert len(names) == 4
    for name in names:
        expected = model.get_parameter(name).detach()
        assert torch.equal(saved[name], expected)
        # The rows in the middle of the second half of the experts, as a rank of ep and FSDP reads them.
        count, rows, columns = expected.shape
        box = Box((count // 2, rows // 2 - 3, 0), (count // 2, 7, columns))
        part = torch.empty(box.sizes)
        saved.read_part(name, box, part)
        assert torch.equal(part, expected[count // 2 :, rows // 2 - 3 : rows // 2 + 4])


def test_an_expert_that_is_missing_leaves_its_stack_out(tmp_path: Path) -> None:
    model, saved = stored("mixtral", tmp_path)
    del saved[next(name for name in saved if ".experts.1.w2." in name)]
    model_folders._take_new_names(saved, model)
    found = [name in saved for name, _ in model.named_parameters() if name.endswith("experts.down_proj")]
    assert sorted(found) == [False, True]


# --- the loss that balances the experts of a mixture: transformers' own, whatever the batch is cut into --------------


SIZES: dict[str, Any] = {**SMALL, "num_key_value_heads": 2, "router_aux_loss_coef": 0.5, "output_router_logits": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "granitemoe": {"num_local_experts": 4, "logits_scaling": 2.0},
}


def task_of(family: str = "mixtral", **more: Any) -> CausalLM:
    torch.manual_seed(0)
    options = {name: more.pop(name) for name in ("recompute", "optimizer", "lr", "schedule") if name in more}
    task = CausalLM(config={"model_type": family, **SIZES, **FAMILIES.get(family, {}), **more}, **options)
    task.configure_model()
    return task


def batch_of(rows: int = 2, length: int = 8, seed: int = 1) -> dict[str, Tensor]:
    ids, labels = torch.randint(60, (2, rows, length), generator=torch.Generator().manual_seed(seed))
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels, "position_ids": torch.arange(length).expand(rows, length)}


def reference(task: CausalLM, batch: dict[str, Tensor]) -> Any:
    """What transformers computes, all logits at once."""
    model: Any = task.model
    names = [name for name in ("input_ids", "position_ids", "attention_mask") if name in batch]
    inputs = {name: batch[name] for name in names}
    return model(**inputs, labels=batch["labels"], shift_labels=batch["labels"], use_cache=False)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_are_those_of_transformers(family: str, recompute: bool) -> None:
    task, twin = task_of(family, recompute=recompute), task_of(family)
    padded = {**batch_of(), "attention_mask": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1] * 8])}
    for batch in (batch_of(), padded):
        expected, found = reference(twin, batch), task.training_step(batch, 0)["loss"]
        assert expected.aux_loss > 1
        assert found.item() == pytest.approx(expected.loss.item(), rel=1e-5)
        expected.loss.backward()
        found.backward()
        for one, other in zip(task.model.parameters(), twin.model.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_each_micro_batchs_balance_counts_by_its_targets() -> None:
    task, parts = task_of(), [batch_of(1, seed=1), batch_of(3, seed=2)]
    counts = [int((part["labels"] != -100).sum()) for part in parts]
    whole = torch.tensor(sum(counts))
    found = sum(float(task.training_step({**part, "tokens_in_step": whole}, 0)["loss"]) for part in parts)
    losses = [float(reference(task, part).loss) for part in parts]
    mean = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    assert found == pytest.approx(mean, rel=1e-5)


def test_it_is_no_part_of_what_is_measured_and_absent_unless_it_is_asked_for() -> None:
    task, batch = task_of(), batch_of()
    plain = reference(task, batch)
    entropy = float(plain.loss - 0.5 * plain.aux_loss)
    task.eval()
    task.setup("validate")
    assert isinstance(task(input_ids=batch["input_ids"]), Tensor)
    measures: Any = task.metrics(task(input_ids=batch["input_ids"]), batch)
    assert float(measures["loss"].compute()) == pytest.approx(entropy)
    for off in ({"output_router_logits": False}, {"router_aux_loss_coef": 0.0}):
        other = task_of(**off)
        assert not other.needs_hidden_states
        assert float(other.training_step(batch, 0)["loss"]) == pytest.approx(entropy, rel=1e-5)


class Twice(Tokens):
    """Batches with the same rows on each rank, so that one process's balance is theirs."""

    def make_batch(self, rows: int, draw: torch.Generator, length: int) -> dict[str, Tensor]:
        half = packed_rows(rows // 2, draw, length)
        return {name: torch.cat([value, value]) for name, value in half.items()}


def balanced() -> tuple[CausalLM, Tokens]:
    return task_of(vocab_size=96, recompute=True, optimizer="sgd", lr=0.1, schedule="constant"), Twice(1, steps=2)


def test_strategies_that_divide_the_weights_train_with_it() -> None:
    assert_parity(balanced, [Case(STRATEGIES[name]) for name in ("fsdp", "zero3", "tp")], steps=2, rtol=1e-5)


@pytest.mark.slow
def test_compiled_blocks_have_it_too() -> None:
    found = []
    for callbacks in ([], [Compile(backend="aot_eager")]):
        task, data = balanced()
        quiet_trainer(max_epochs=1, callbacks=callbacks).fit(task, datamodule=data)
        found.append(task.state_dict())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("axes", "named"),
    [
        ({"pp": 2, "micro_batches": 2}, "pp=2"),
        ({"cp": 2}, "cp=2"),
        ({"tp": 2, "sequence_parallel": True}, "sequence_parallel: true"),
    ],
)
def test_axes_that_divide_blocks_or_sequences_are_refused(axes: dict[str, Any], named: str) -> None:
    strategy = MeshStrategy(dp_shard=1, **axes)
    strategy.parallel_devices = [torch.device("cpu")] * 2
    mixture = CausalLM(config={"model_type": "mixtral", **SIZES, **FAMILIES["mixtral"]})
    both = Seq2SeqLM(config=seq2seq_config("t5"))
    masked = MaskedLM(config=tiny_masked("bert"))
    refused: list[tuple[Any, str, set[str]]] = [
        (mixture, "routers' logits", {"pp=2", "cp=2", "sequence_parallel: true"}),
        (both, "its decoder uses the encoder's output", {"cp=2", "sequence_parallel: true"}),
        (masked, "its tokens attend to all others", {"cp=2"}),
    ]
    for task, reason in ((task, reason) for task, reason, by in refused if named in by):
        with pytest.raises(DloError, match=rf"{reason}.*, got {named}, which divides them; use the other axes"):
            strategy.check_model(task)


def test_a_family_without_it_is_refused() -> None:
    task = CausalLM(config={"model_type": "llama4_text", **{k: v for k, v in SIZES.items() if "coef" not in k}})
    with pytest.raises(DloError, match=r"output_router_logits must be false .*, got true for Llama4ForCausalLM"):
        task.check(None)
