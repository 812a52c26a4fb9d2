"""Workflows, images and the lock file name what there is."""

import configparser
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))


def setup_cfg() -> configparser.ConfigParser:
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg", encoding="utf-8")
    return parser


def extras() -> set[str]:
    return set(setup_cfg()["options.extras_require"])


def requirements(names: tuple[str, ...]) -> list[Requirement]:
    lines = setup_cfg()["options"]["install_requires"].splitlines()
    for name in names:
        lines += setup_cfg()["options.extras_require"][name].splitlines()
    return [Requirement(line) for line in lines if line.strip()]


def commands(workflow: dict[str, Any]) -> list[str]:
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert all(len({"run", "uses"} & set(step)) == 1 for step in steps)
    return [line for step in steps for line in step.get("run", "").splitlines()]


def check_extras(text: str) -> None:
    found = re.findall(r"(?:\.|dlo_framework|whl\)\")\[([\w,]+)\]", text)
    assert set(",".join(found).split(",")) - {""} <= extras()


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_runs_what_the_tree_has(path):
    workflow = yaml.safe_load(path.read_text())
    assert {"name", True, "permissions", "jobs"} <= set(workflow), "YAML reads the key `on` as true"
    assert all(job["runs-on"] and job["timeout-minutes"] for job in workflow["jobs"].values())
    found = commands(workflow)
    assert found
    for command in found:
        check_extras(command)
        for word in command.split():
            if word.startswith((".ci/", "tests/", "requirements/")):
                assert (ROOT / word).is_file(), word
        marker = re.search(r"pytest -m (\w+)", command)
        if marker:
            assert re.search(rf"^ +{marker[1]}: ", setup_cfg()["tool:pytest"]["markers"].replace("\n", "\n "), re.M)


def test_the_lock_pins_all_of_the_tested_set_with_hashes():
    text = (ROOT / "requirements/test.lock").read_text()
    assert "://" not in text
    entries = re.split(r"\n(?=\w)", text)
    pinned = {}
    for entry in entries:
        name, version = re.match(r"([\w.-]+)==(\S+)", entry).groups()
        assert re.findall(r"--hash=sha256:[0-9a-f]{64}", entry), name
        pinned[name] = version
    tested = ("images", "llm", "quantisation", "optimizers", "onnx", "plots", "deepspeed", "completion")
    for requirement in requirements(tested):
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        assert requirement.specifier.contains(pinned[name]), name
