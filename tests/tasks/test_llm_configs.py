"""The recipes for language models fit their classes, and take the memory that their headers promise."""

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from transformers import AutoConfig, AutoModelForCausalLM

from dlo_framework.frozen_model import FrozenModel
from dlo_framework.mesh import MeshSpec
from dlo_framework.models import attention
from dlo_framework.models.four_bit_linear import FourBitLinear
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_tasks.language import language_models
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.generation import Sampling
from dlo_tasks.language.preference_data import PreferenceData
from dlo_tasks.language.preference_lm import PreferenceLM
from dlo_tasks.language.text_data import TextData
from support.simulated_ranks import simulate_ranks

pytestmark = pytest.mark.recipes

FOLDER = Path(__file__).parents[2] / "configs" / "llm"
CONFIGS = {path.stem: path for path in sorted(FOLDER.glob("*.yaml"))}
#: Those that a laptop trains.
SMALL = (
    "curriculum",
    "distill",
    "distill_on_policy",
    "dpo",
    "int8",
    "mesh",
    "mixture",
    "moe_quickstart",
    "one_bit_adam",
    "quickstart",
    "sparse_attention",
)
#: Classes of the recipes' tasks and data.
CLASSES = {kind.__name__: kind for kind in (CausalLM, PreferenceLM, TextData, PreferenceData)}
#: Sizes that the models of the recipes share, and those of each, as their config.json has them.
LLAMA = {"vocab_size": 128256, "num_key_value_heads": 8, "head_dim": 128}
QWEN = {"vocab_size": 151936, "num_attention_heads": 32, "head_dim": 128}
MIXTRAL = {"vocab_size": 32000, "num_attention_heads": 32, "num_key_value_heads": 8}
LAYERS = ("hidden_size", "intermediate_size", "num_hidden_layers")


def sizes(family: str, shared: dict[str, Any], *layers: int, tied: bool = False, **more: Any) -> tuple[str, Any]:
    return family, {**shared, **dict(zip(LAYERS, layers, strict=True)), "tie_word_embeddings": tied, **more}


SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "meta-llama/Llama-3.2-3B-Instruct": sizes("llama", LLAMA, 3072, 8192, 28, tied=True, num_attention_heads=24),
    "meta-llama/Llama-3.2-1B-Instruct": sizes(
        "llama", LLAMA, 2048, 8192, 16, tied=True, num_attention_heads=32, head_dim=64
    ),
    "meta-llama/Llama-3.1-8B-Instruct": sizes("llama", LLAMA, 4096, 14336, 32, num_attention_heads=32),
    "meta-llama/Llama-3.1-70B-Instruct": sizes("llama", LLAMA, 8192, 28672, 80, num_attention_heads=64),
    "Qwen/Qwen3-8B": sizes("qwen3", QWEN, 4096, 12288, 36, num_key_value_heads=8),
    "Qwen/Qwen3-30B-A3B": sizes(
        *("qwen3_moe", QWEN, 2048, 6144, 48),
        num_key_value_heads=4,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
    ),
    "mistralai/Mixtral-8x7B-Instruct-v0.1": sizes(
        "mixtral", MIXTRAL, 4096, 14336, 32, num_local_experts=8, num_experts_per_tok=2
    ),
}


def read(name: str) -> tuple[dict[str, Any], str]:
    text = CONFIGS[name].read_text()
    header = " ".join(line.lstrip("# ") for line in text.split("seed_everything")[0].splitlines())
    return yaml.safe_load(text), header


def big_model(name: str) -> Any:
    family, settings = SIZES[name]
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings))


def parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_recipe_is_accepted_by_its_classes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, _ = read(name)
    tiny = {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
    }
    given = config["model"]["init_args"]
    assert set(config["trainer"]) <= set(inspect.signature(Trainer).parameters)
    if "model" in given:  # The hub is out of reach of tests.
        made = language_models.read_config(None, tiny)
        monkeypatch.setattr(language_models, "read_config", lambda model, config: made)
        assert given["model"] in SIZES or name in SMALL
    if given.get("optimizer") == "OneBitAdam":
        importlib.import_module("dlo_plugins.compression.one_bit")  # As the run's callback does.
    arguments = {**given, "lora": Lora(**given["lora"]) if "lora" in given else None}
    arguments["sampling"] = Sampling(**given["sampling"]) if "sampling" in given else None
    if "reference" in given:
        arguments["reference"] = FrozenModel(task=CausalLM(**given["reference"]["task"]["init_args"]))
    if "attention" in given:
        mask = given["attention"]["mask"]
        pattern = getattr(attention, mask["class_path"])(**mask["init_args"])
        arguments["attention"] = attention.Attention(given["attention"]["kernel"], pattern)
    CLASSES[config["model"]["class_path"]](**arguments).check(None)
    data = CLASSES[config["data"]["class_path"]](**config["data"]["init_args"])
    assert data.batch_size % config["trainer"].get("devices", 1) == 0


#: Ranks, and the bytes of a parameter with gradient and Adam's state.
DIVIDED = {
    "llama3.1_8b_bf16": (8, 12),
    "llama3.2_3b_fsdp": (8, 16),
    "qwen3_8b_zero3": (8, 16),
    "mixtral_8x7b": (16, 16),
    "qwen3_30b_a3b": (16, 16),
}


@pytest.mark.parametrize("name", DIVIDED)
def test_state_that_is_divided_takes_what_the_header_says(name: str) -> None:
    config, header = read(name)
    devices, size = DIVIDED[name]
    psi = parameters(big_model(config["model"]["init_args"]["model"]))
    state, bytes_of, billions = re.findall(
        r"computed: ([\d.]+) for an? (?:eighth|sixteenth) .*?(\d+) bytes of each of ([\d.]+) billion", header
    )[0]
    assert int(bytes_of) == size
    assert config["trainer"]["devices"] * config["trainer"].get("num_nodes", 1) == devices
    assert float(billions) == pytest.approx(psi / 1e9, abs=0.0005)
    assert float(state) == pytest.approx(size * psi / devices / 1e9, abs=0.05)


@pytest.mark.parametrize(
    ("name", "devices", "limit"),
    [("llama3.1_8b_qlora", 1, 16), pytest.param("llama3.1_70b_qlora", 2, 48, marks=pytest.mark.slow)],
)
def test_four_bit_weights_take_what_the_header_says_and_fit_the_gpu(name: str, devices: int, limit: int) -> None:
    config, header = read(name)
    family, settings = SIZES[config["model"]["init_args"]["model"]]
    given = {**config["model"]["init_args"], "model": None, "config": {"model_type": family, **settings}}
    task = CausalLM(**{**given, "lora": Lora(**given["lora"])})
    model: Any = task.on_meta().model
    layers = [module for module in model.modules() if isinstance(module, FourBitLinear)]
    codes, billions, others, millions = re.findall(
        r"computed: ([\d.]+) for .*?([\d.]+) billion 4-bit weights, ([\d.]+) for .* ([\d.]+) million", header
    )[0]
    assert config["trainer"]["devices"] == devices
    assert float(billions) == pytest.approx(sum(m.in_features * m.out_features for m in layers) / 1e9, abs=0.005)
    in_codes = sum(p.nbytes for layer in layers for p in layer.parameters())
    assert float(codes) == pytest.approx(in_codes / devices / 1e9, abs=0.05)
    assert float(millions) == pytest.approx(parameters(model) / 1e6, abs=0.05)
    frozen = sum(p.nbytes for p in model.parameters() if not p.requires_grad) - in_codes
    assert float(others) == pytest.approx(frozen / devices / 1e9, abs=0.05)
    if devices > 1:
        ranks = simulate_ranks(task, MeshStrategy(dp_shard=devices), MeshSpec(dp_shard=devices), range(devices))
        computed = (in_codes + frozen + 16 * parameters(model)) / devices
        for rank in ranks:
            assert rank.state_bytes.total == pytest.approx(computed, rel=0.01)
    assert int(re.findall(r"memory\s+(\d+) GB", header)[0]) < limit
