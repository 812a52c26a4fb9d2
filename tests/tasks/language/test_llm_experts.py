"""Mixtures in the families of transformers: which are found, by which form, and how stored experts are stacked."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dlo_framework.models.experts import Mixture, find_mixtures
from dlo_framework.shards import Box
from dlo_tasks.language import model_folders
from dlo_tasks.language.language_plans import plan_for
from support.causal_types import TYPES, tiny

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


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_stored_experts_are_stacked_without_being_read(family: str, tmp_path: Path) -> None:
    config = tiny(family, num_hidden_layers=2)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    model.save_pretrained(tmp_path)
    saved = model_folders.open_safetensors(tmp_path)
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
    config = tiny("mixtral", num_hidden_layers=2)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    model.save_pretrained(tmp_path)
    saved = model_folders.open_safetensors(tmp_path)
    del saved[next(name for name in saved if ".experts.1.w2." in name)]
    model_folders._take_new_names(saved, model)
    found = [name in saved for name, _ in model.named_parameters() if name.endswith("experts.down_proj")]
    assert sorted(found) == [False, True]
