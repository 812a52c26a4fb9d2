"""Public configs of the recipes' models: their sizes are the published ones, and a run does not use them."""

import json
import re
from pathlib import Path

import pytest
import torch

from dlo_framework.cli.main import main
from dlo_framework.config_only import config_only
from dlo_framework.errors import DloError
from dlo_tasks.language.language_models import build_model, public_configs, read_config

ROOT = Path(__file__).parents[3]


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
    images = [
        "--model.init_args.model",
        "resnet10t",
        "--model.init_args.model_args",
        "{}",
        "--trainer.strategy",
        "mesh",
    ]
    assert main(["mesh", "--config", "imagenet/coatnet_0", "--ranks", "2", *images]) == 0
    assert capsys.readouterr().err.endswith("missing here, and not read: data/imagenet\n")
    assert main(["fit", *mesh, "--trainer.accelerator", "cpu"]) == 2
    assert "HF_HUB_OFFLINE is set" in capsys.readouterr().err
