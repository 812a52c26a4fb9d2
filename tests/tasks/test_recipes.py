"""Recipes and public configs of models: they fit their classes, with the sizes and memory that they say."""

import importlib
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch import Trainer

import dlo_framework
from dlo_framework.cli.main import main
from dlo_framework.config_only import config_only
from dlo_framework.errors import DloError
from dlo_framework.frozen_model import FrozenModel
from dlo_framework.mesh import MeshSpec
from dlo_framework.models import attention
from dlo_framework.models.four_bit_linear import FourBitLinear
from dlo_plugins.distill.callback import Distill
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_tasks.imagenet.classifier import ImageClassifier
from dlo_tasks.language import language_models
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.generation import Sampling
from dlo_tasks.language.language_models import build_model, public_configs, read_config
from support.simulated_ranks import simulate_ranks
from support.token_batches import SMALL

pytestmark = pytest.mark.recipes

ROOT = Path(__file__).parents[2]
RECIPES = {str(path.relative_to(ROOT / "configs").with_suffix("")): path for path in ROOT.glob("configs/**/*.yaml")}
LLM, IMAGES = ([name for name in sorted(RECIPES) if name.startswith("llm/") == llm] for llm in (True, False))
#: Sizes of the models of 4-bit recipes, as their config.json has them.
SIZES: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B-Instruct": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
    | {"num_attention_heads": 32},
    "meta-llama/Llama-3.1-70B-Instruct": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    | {"num_attention_heads": 64},
}
LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8, "head_dim": 128}


def read(name: str) -> dict[str, Any]:
    """Returns a recipe, of keys that a run knows, and with the optimizers that its callbacks add."""
    config = yaml.safe_load(RECIPES[name].read_text())
    assert set(config) <= {"seed_everything", "trainer", "model", "data", "callbacks", "plugins", "run"}
    assert set(config["trainer"]) <= set(inspect.signature(Trainer).parameters)
    if config["model"]["init_args"].get("optimizer") == "OneBitAdam":
        importlib.import_module("dlo_plugins.compression.one_bit")  # As the run's callback does.
    return config


def parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


@pytest.mark.parametrize("name", LLM)
def test_a_recipe_is_accepted_by_its_classes(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = read(name)
    given = config["model"]["init_args"]
    if "model" in given:  # The hub is out of reach of tests.
        sizes = {**SMALL, "hidden_size": 64, "intermediate_size": 128}
        made = language_models.read_config(None, {"model_type": "llama", **sizes})
        monkeypatch.setattr(language_models, "read_config", lambda model, config: made)
    arguments = {**given, "lora": Lora(**given["lora"]) if "lora" in given else None}
    if "sampling" in given:
        arguments["sampling"] = Sampling(**given["sampling"])
    if "reference" in given:
        arguments["reference"] = FrozenModel(task=CausalLM(**given["reference"]["task"]["init_args"]))
    if "attention" in given:
        mask = given["attention"]["mask"]
        pattern = getattr(attention, mask["class_path"])(**mask["init_args"])
        arguments["attention"] = attention.Attention(given["attention"]["kernel"], pattern)
    getattr(dlo_framework, config["model"]["class_path"])(**arguments).check(None)
    data = getattr(dlo_framework, config["data"]["class_path"])(**config["data"]["init_args"])
    assert data.batch_size % config["trainer"].get("devices", 1) == 0


@pytest.mark.parametrize(
    ("name", "devices", "limit"),
    [("llm/llama3.1_8b_qlora", 1, 16), pytest.param("llm/llama3.1_70b_qlora", 2, 48, marks=pytest.mark.slow)],
)
def test_four_bit_weights_take_what_the_header_says_and_fit_the_gpu(name: str, devices: int, limit: int) -> None:
    config, text = read(name), RECIPES[name].read_text()
    header = " ".join(line.lstrip("# ") for line in text.split("seed_everything")[0].splitlines())
    settings = SIZES[config["model"]["init_args"]["model"]]
    given = {**config["model"]["init_args"], "model": None, "config": {**LLAMA, **settings}}
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


class Thousand:
    """Stands in for ImageNet, which has to be there for a datamodule."""

    num_classes = 1000

    def __init__(self, image_size: int, eval_image_size: int | None = None) -> None:
        self.image_size, self.eval_image_size = image_size, eval_image_size


#: Models that have been built: many recipes differ in the trainer alone.
BUILT: list[object] = []


@pytest.mark.parametrize("name", IMAGES)
def test_a_recipe_of_images_is_accepted_by_its_classes_and_builds(name: str) -> None:
    config = read(name)
    assert config["model"]["class_path"] == "ImageClassifier"
    task = ImageClassifier(**config["model"]["init_args"])
    given = config["data"]["init_args"]
    data: Any = getattr(dlo_framework, config["data"]["class_path"])(**given)
    if name.startswith("imagenet/"):
        data = Thousand(given["image_size"], given.get("eval_image_size"))
    task.check(data)
    size, names = given["image_size"], ("model", "model_args", "position_embedding", "experts")
    model = [size, *(config["model"]["init_args"].get(name) for name in names)]
    if model in BUILT:
        return
    BUILT.append(model)
    with torch.device("meta"):
        task.configure_model()
        (images,), _ = task.inputs((torch.zeros(2, 3, size, size), None))
        assert task(images).shape == (2, data.num_classes)
    task.parallel_plan().validate(task.model)


def test_deits_student_and_its_teacher_fit_together() -> None:
    """The recipe's Distill accepts both on the meta device; the teacher's weights are not downloaded."""
    config = read("imagenet/deit_distilled")
    init = next(c["init_args"] for c in config["trainer"]["callbacks"] if c["class_path"] == "Distill")
    given = init.pop("teacher")["task"]["init_args"]
    assert given.pop("pretrained")
    distill = Distill(FrozenModel(task=ImageClassifier(**given)), **init)
    student = ImageClassifier(**config["model"]["init_args"])
    trainer = Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    distill.check_run(trainer, student, Thousand(config["data"]["init_args"]["image_size"]))
    with torch.device("meta"):
        student.configure_model()
    assert student.use_distillation_token()
    by_class, by_token = student.train()(torch.zeros(2, 3, 224, 224, device="meta"))
    assert by_class.shape == by_token.shape == (2, 1000)


# --- public configs of the recipes' models: their sizes are the published ones, and a run does not use them ----------


@pytest.fixture(autouse=True)
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the hub's cache, which is empty."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for module in ("constants", "file_download"):
        monkeypatch.setattr(f"huggingface_hub.{module}.HF_HUB_CACHE", str(tmp_path), raising=False)
    return tmp_path


def test_each_model_that_a_recipe_or_a_page_names_has_its_published_size() -> None:
    pages = [*ROOT.glob("configs/**/*.yaml"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
    named = {name for page in pages for name in re.findall(r"\bmodel: ([\w-]+/[\w.-]+)", page.read_text())}
    assert named <= set(public_configs())
    for name, public in public_configs().items():
        kind = "seq2seq" if public["config"]["model_type"] == "t5" else "causal"
        with config_only("dlo plan"), torch.device("meta"):
            model = build_model(None, read_config(name, None), kind, dtype=torch.bfloat16, attention=None)
        assert sum(parameter.numel() for parameter in model.parameters()) == public["parameters"], name


def test_the_hubs_cache_comes_first_and_other_models_need_a_config(offline: Path, capsys) -> None:
    name = "meta-llama/Llama-3.2-1B"
    with pytest.raises(DloError, match="HF_HUB_OFFLINE is set"):
        read_config(name, None)
    with (
        config_only("dlo plan"),
        pytest.raises(DloError, match=r"got me/mine: .* model\.init_args\.config: path/to/config\.json"),
    ):
        read_config("me/mine", None)
    capsys.readouterr()
    folder = offline / f"models--{name.replace('/', '--')}"
    (folder / "snapshots" / "0").mkdir(parents=True), (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0")
    (folder / "snapshots" / "0" / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 96}))
    with config_only("dlo plan"):
        assert read_config(name, None).hidden_size == 96
    assert capsys.readouterr().err == ""


def test_shapes_need_no_data_weights_or_tokenizer_and_a_run_does(capsys) -> None:
    mesh = ["--config", "llm/llama3.2_3b_fsdp", "--model.init_args.model", "meta-llama/Llama-3.2-1B-Instruct"]
    assert main(["mesh", *mesh]) == 0
    out, err = capsys.readouterr()
    assert "LlamaForCausalLM, 1,235,814,400 parameters" in out
    (line,) = [line for line in err.splitlines() if "missing here" in line]
    assert line.startswith("dlo mesh: shapes come from the config alone; missing here, and not read: weights and tok")
    assert line.endswith(" (config: the public one that dlo ships), data/chats/*.jsonl")
    images = ["--ranks", "2", "--model.init_args.model", "resnet10t", "--model.init_args.model_args", "{}"]
    assert main(["mesh", "--config", "imagenet/coatnet_0", *images, "--trainer.strategy", "mesh"]) == 0
    assert capsys.readouterr().err.endswith("missing here, and not read: data/imagenet\n")
    assert main(["fit", *mesh, "--trainer.accelerator", "cpu"]) == 2
    assert "HF_HUB_OFFLINE is set" in capsys.readouterr().err
