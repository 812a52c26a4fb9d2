"""Experts that files store one by one are read as stacked tensors, each rank its own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from dlo_framework.shards import Box
from dlo_tasks.llm import sharded_weights
from support.causal_types import tiny


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_stored_experts_are_stacked_without_being_read(family: str, tmp_path: Path) -> None:
    config = tiny(family, num_hidden_layers=2)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(config.pop("model_type"), **config))
    model.save_pretrained(tmp_path)
    saved = sharded_weights.open_safetensors(tmp_path)
    assert any(".experts.3." in name for name in saved)  # transformers writes each expert's matrices.
    sharded_weights._take_new_names(saved, model)
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
    saved = sharded_weights.open_safetensors(tmp_path)
    del saved[next(name for name in saved if ".experts.1.w2." in name)]
    sharded_weights._take_new_names(saved, model)
    found = [name in saved for name, _ in model.named_parameters() if name.endswith("experts.down_proj")]
    assert sorted(found) == [False, True]
