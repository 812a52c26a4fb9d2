"""``dlo config diff`` and ``dlo schema``: what differs between configs, and which configs an editor accepts."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from dlo_framework.cli.commands.completion_command import make_parser, make_preamble
from dlo_framework.cli.commands.schema_command import make_schema
from dlo_framework.cli.config_scan import list_shipped_configs
from dlo_framework.cli.main import main
from dlo_framework.registry import Registry

ONE = """
trainer:
  max_epochs: 3
  callbacks: [{class_path: OneCycle, init_args: {max_lr: 0.1}}, {class_path: ModelCheckpoint}]
model: {class_path: ImageClassifier, init_args: {model: vit_tiny_patch16_224, lr: 0.01}}
data: {class_path: DigitsData}
"""


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("one.yaml").write_text(ONE)
    return tmp_path


def diff(other: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    Path("other.yaml").write_text(other)
    code = main(["config", "diff", "one.yaml", "other.yaml"])
    lines = capsys.readouterr().out.splitlines()
    assert code == bool(lines)
    return lines


def test_only_keys_that_differ_are_printed(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(ONE, capsys) == []
    assert diff(ONE.replace("max_lr: 0.1", "max_lr: 0.2"), capsys) == [
        "  trainer.callbacks[OneCycle].max_lr: 0.1 -> 0.2"
    ]
    assert diff(ONE.replace("lr: 0.01", "weight_decay: 0.3"), capsys) == [
        "- model.lr: 0.01",
        "+ model.weight_decay: 0.3",
    ]
    assert diff(ONE.replace(", {class_path: ModelCheckpoint}", ""), capsys) == [
        "- trainer.callbacks[ModelCheckpoint]: ModelCheckpoint"
    ]


def test_class_paths_and_defaults_are_equal_to_short_names_and_unset_keys(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = ONE.replace("class_path: OneCycle", "class_path: dlo_plugins.schedules.lr_curves.OneCycle")
    full = full.replace("max_epochs: 3", "max_epochs: 3\n  precision: null\n  devices: auto")
    full += "seed_everything: 42\nrun: {dir: null, async_checkpoints: false}\n"
    assert diff(full, capsys) == []
    assert diff(f"{full}ckpt_path: last\n", capsys) == ["+ ckpt_path: last"]
    assert diff(full.replace("seed_everything: 42", "seed_everything: 0"), capsys) == ["+ seed_everything: 0"]


def test_a_config_is_equal_to_what_a_run_writes_of_it(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With every default, full class paths, numbers with exponents, and options that have fields of their own."""
    Path("one.yaml").write_text(
        "trainer: {max_steps: 3, callbacks: [WeightEMA, {class_path: EarlyStopping, init_args: {monitor: val_loss}}]}\n"
        "model: {class_path: CausalLM, init_args: {config: {model_type: gpt2}, lora: {rank: 4}, lr: 1e-3}}\n"
        "data: {class_path: TextData, init_args: {seq_len: 32}}\n"
    )
    with pytest.raises(SystemExit):
        main(["fit", "--config", "one.yaml", "--print_config"])
    full = capsys.readouterr().out.replace("name: null", "name: one")
    assert "base_block: 64" in full
    assert diff(full, capsys) == []
    assert diff(full.replace("rank: 4", "rank: 16"), capsys) == ["  model.lora.rank: 4 -> 16"]
    assert diff(full.replace("patience: 3", "patience: 5"), capsys) == [
        "+ trainer.callbacks[EarlyStopping].patience: 5"
    ]


# --- the schema ----------------------------------------------------------------------------------------------

TYPES: dict[str, Any] = {
    "integer": int,
    "number": (int, float),
    "string": str,
    "boolean": bool,
    "null": type(None),
    "array": list,
    "object": dict,
}


def faults(value: Any, schema: dict[str, Any], root: dict[str, Any], key: str = "") -> list[str]:
    """Returns the faults of a value by the part of JSON schema's rules that dlo's schema uses."""
    if "$ref" in schema:
        return faults(value, root["definitions"][schema["$ref"].rpartition("/")[2]], root, key)
    if "anyOf" in schema:
        found = [faults(value, each, root, key) for each in schema["anyOf"]]
        return [] if [] in found else min(found, key=len)
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    is_bool = isinstance(value, bool) and "boolean" not in kinds
    if kinds and (is_bool or not any(isinstance(value, TYPES[kind]) for kind in kinds)):
        return [f"{key}: {value!r} is none of {kinds}"]
    if "enum" in schema and value not in schema["enum"]:
        return [f"{key}: {value!r} is none of {schema['enum'][:5]}"]
    if "pattern" in schema and not re.search(schema["pattern"], value):
        return [f"{key}: {value!r} does not match"]
    if isinstance(value, list):
        return [fault for item in value for fault in faults(item, schema.get("items", {}), root, f"{key}[]")]
    if not isinstance(value, dict):
        return []
    found = [f"{key}.{name} is missing" for name in schema.get("required", ()) if name not in value]
    known, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
    for name, inner in value.items():
        if name not in known and rest is False:
            found.append(f"{key}.{name} is unknown")
        found += faults(inner, known.get(name, rest if isinstance(rest, dict) else {}), root, f"{key}.{name}")
    return found


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(json.dumps(make_schema(Registry())))
    return made


def test_the_schema_takes_every_shipped_config(schema: dict[str, Any]) -> None:
    configs = {name: yaml.safe_load(path.read_text()) for name, path in list_shipped_configs().items()}
    found = {name: faults(config, schema, schema) for name, config in configs.items() if "model" in config}
    assert len(found) > 20
    assert {name: each for name, each in found.items() if each} == {}


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("max_epochs", "max_epoch", ".trainer.max_epoch is unknown"),
        ("max_epochs: 3", "max_epochs: many", ".trainer.max_epochs: 'many' is none of"),
        ("\ndata:", "\ndate:", ".date is unknown"),
        ("class_path: DigitsData", "class_pth: DigitsData", ".data"),
    ],
)
def test_the_schema_refuses_faults(schema: dict[str, Any], old: str, new: str, fault: str) -> None:
    assert faults(yaml.safe_load(ONE), schema, schema) == []
    assert any(fault in each for each in faults(yaml.safe_load(ONE.replace(old, new)), schema, schema))


def test_a_plugin_s_arguments_have_types_defaults_and_texts(schema: dict[str, Any]) -> None:
    digits = schema["definitions"]["DigitsData"]
    assert digits["additionalProperties"] is False
    assert digits["properties"]["batch_size"]["type"] == "integer"
    assert digits["properties"]["image_size"]["default"] == 16
    assert digits["properties"]["image_size"]["description"]
    assert faults({"image_sise": 16}, digits, schema) == [".image_sise is unknown"]
    names = {
        name
        for each in schema["definitions"]["callback"]["anyOf"]
        for name in each["properties"]["class_path"].get("enum", ())
    }
    assert {"OneCycle", "EarlyStopping", "dlo_plugins.schedules.lr_curves.OneCycle"} <= names


def test_the_schema_is_written_to_a_file(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "--out", "dlo.schema.json"]) == 0
    assert "# yaml-language-server: $schema=dlo.schema.json" in capsys.readouterr().out
    assert json.loads(Path("dlo.schema.json").read_text())["title"] == "Config of dlo"
    assert main(["schema", "--out", "one.yaml/x.json"]) == 2
    assert "cannot write one.yaml/x.json" in capsys.readouterr().err


# --- completion ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def completion() -> str:
    shtab = pytest.importorskip("shtab")
    script: str = shtab.complete(make_parser(Registry()), "bash", preamble=make_preamble())
    return script


def complete(script: str, *words: str) -> set[str]:
    """Returns what bash offers for the last of the words after ``dlo``."""
    given = " ".join(f"'{word}'" for word in ("dlo", *words))
    code = f"{script}\nCOMP_WORDS=({given}); COMP_CWORD={len(words)}\n_shtab_dlo\nprintf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True, check=True)
    return {word.strip() for word in done.stdout.split("\n") if word.strip()}


def test_bash_completes_commands_options_and_names(completion: str, files: Path) -> None:
    assert {"fit", "plugins", "doctor", "schema", "mesh"} <= complete(completion, "")
    assert complete(completion, "va") == {"validate"}
    assert complete(completion, "fit", "--trainer.max_e") == {"--trainer.max_epochs"}
    assert "--model.lr" in complete(completion, "fit", "--model.l")
    assert complete(completion, "fit", "--trainer.strategy", "zero2") == {"zero2", "zero2_offload"}
    assert complete(completion, "fit", "--data", "Digits") == {"DigitsData"}
    assert complete(completion, "plugins", "show", "OneC") == {"OneCycle"}
    assert complete(completion, "config", "diff", "quick") == {"quickstart"}
    assert complete(completion, "fit", "--config", "quick") == {"quickstart"}
    assert complete(completion, "fit", "--config", "one") == {"one.yaml"}
    assert complete(completion, "predict", "--run.predictions", "") == {"pt", "csv", "jsonl", "parquet"}
    assert complete(completion, "config", "from") == {"from-accelerate"}
    assert complete(completion, "completion", "z") == {"zsh"}


def test_bash_completes_checkpoints_by_word_and_by_path(completion: str, files: Path) -> None:
    Path("last.ckpt").touch()
    assert complete(completion, "fit", "--ckpt_path", "") == {"last", "best", "auto", "last.ckpt", "one.yaml"}
    assert complete(completion, "validate", "--ckpt_path", "last") == {"last", "last.ckpt"}
    assert "auto" not in complete(completion, "predict", "--ckpt_path", "")
    assert complete(completion, "checkpoint", "export", "be") == {"best"}


def test_zsh_describes_installed_commands() -> None:
    shtab = pytest.importorskip("shtab")
    script = shtab.complete(make_parser(Registry()), "zsh", preamble=make_preamble())
    assert "lr-find:'try learning rates before a training, and suggest one'" in script
    assert "from-accelerate:'print a config of Hugging Face Accelerate" in script
    assert '"--ckpt_path[checkpoint to resume from\\: a path, last, best, or auto' in script
    assert "_dlo_start() {\n  compadd -- last best auto\n  _files\n}" in script


def test_the_script_is_printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("shtab")
    assert main(["completion", "zsh"]) == 0
    assert "#compdef dlo" in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 2
    assert capsys.readouterr().err.strip().endswith("pip install 'dlo_framework[completion]'")
