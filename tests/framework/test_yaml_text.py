"""YAML of a user: a repeated key, and aliases or nesting without a limit, end in a message wherever it is read."""

from pathlib import Path

import pytest

from dlo_framework.cli.config_scan import read_config, scan
from dlo_framework.cli.main import main
from dlo_framework.errors import DloError
from dlo_framework.yaml_text import MAX_DEPTH, MAX_REPEATED, parse_yaml
from dlo_plugins.deepspeed.accelerate_command import to_yaml
from dlo_plugins.plan.machine import load_machine
from dlo_plugins.sweep.command import read_space

BOMB = "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 40))
REPEATED = "trainer: {max_epochs: 1}\nmodel: {}\ntrainer: {max_epochs: 2}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (REPEATED, "x: line 3: key 'trainer' must be unique, got it on lines 1 and 3; leave one out"),
        ("a:\n  - {b: 1, c: 2, 'b': 3}", "x: line 2: key 'b' must be unique, got it on lines 2 and 2"),
        (BOMB, f"aliases must repeat at most {MAX_REPEATED:,} values, got more"),
        ("a: &a [*a]", "x: line 1: an alias must be outside of its own anchor, got one inside"),
        ("[" * 5000, f"YAML must have at most {MAX_DEPTH} levels, got more"),
        ("\n".join(" " * n + "k:" for n in range(2000)), f"YAML must have at most {MAX_DEPTH} levels, got more"),
        ("a: 2024-99-99", "x: a value must be valid YAML: a value does not fit its type: month must be in 1..12"),
        ("a: !!int b", "a value does not fit its type: invalid literal for int"),
        ("a: !!timestamp b", "a value does not fit its type"),
        ("a: " + "9" * 5000, "a value does not fit its type"),
        ("a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("a: {b", 'x: a value must be valid YAML: while parsing a flow mapping in "x", line 1, column 4'),
    ],
)
def test_what_is_refused(text, message):
    with pytest.raises(DloError) as raised:
        parse_yaml(text, "x")
    assert message in str(raised.value)


def test_what_is_valid():
    text = "a: &a {b: 1, c: [2]}\nd: {<<: *a, b: 3}\n1: x\n'1': y\n" + f"e: {'[' * 50}{']' * 50}"
    found = parse_yaml(text, "x")
    assert (found["d"], found[1], found["1"]) == ({"b": 3, "c": [2]}, "x", "y")


@pytest.mark.parametrize("text", [REPEATED, BOMB])
@pytest.mark.parametrize("read", [read_config, load_machine, read_space, lambda name: to_yaml(Path(name))])
def test_every_file_is_read_so(tmp_path, read, text):
    (tmp_path / "x.yaml").write_text(text)
    with pytest.raises(DloError, match=r"x\.yaml: line \d+: "):
        read(str(tmp_path / "x.yaml"))


@pytest.mark.parametrize("words", [["--trainer.callbacks", "[{class_path: A, class_path: B}]"], ["--plugins", "[a"]])
def test_values_of_options(words):
    with pytest.raises(DloError, match=r"key 'class_path' must be unique|--plugins: a value must be valid YAML"):
        scan(["fit", *words])
    assert scan(["fit", "--model.prompt", "[INST] {a}: {b"]).strings == ["fit", "[INST] {a}: {b"]


def test_a_file_that_an_option_names(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    Path("model.yaml").write_text("class_path: ImageClassifier\ninit_args: {model: resnet18, model: resnet34}\n")
    assert main(["fit", "--model", "model.yaml", "--data", "DigitsData"]) == 2
    assert "key 'model' must be unique, got it on lines 2 and 2; leave one out" in capfd.readouterr().err
