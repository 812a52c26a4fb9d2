"""Machine files: what comes with dlo is complete and has sources, and what is missing is named."""

import pytest
import yaml

from dlo_framework.errors import DloError
from dlo_plugins.plan.machine import _FOLDER, load_machine, machine_names, parse_machine


def test_each_shipped_machine_has_a_source_for_every_constant() -> None:
    assert {"a100", "cpu", "h100", "h200", "jean-zay-h100", "v100"} <= set(machine_names())
    for name in machine_names():
        machine = load_machine(name)
        assert machine.name == name
        assert len(machine.sources) >= 13
        assert all(len(source) > 5 for source in machine.sources.values()), name


def test_what_a_file_lacks_or_has_too_much_is_named() -> None:
    text = _FOLDER.joinpath("h100.yaml").read_text()
    for key, value, message in (
        (("kinds",), {}, r"must have keys of name, .* got kinds; remove it: since 0.2"),
        (("links", "all_reduce"), {}, r"must have keys of name, .* got links.all_reduce; remove it: since 0.2"),
        (("links", "node"), None, "must have links.node"),
        (("attention", "forward"), None, "must have attention.forward"),
        (("accelerator",), None, "must have peak"),
        (("links", "network", "latency"), None, "must have links.network.latency"),
        (("bandwidth",), {"value": "fast", "source": "guess"}, "bandwidth must be a positive number, got 'fast'"),
    ):
        content = yaml.safe_load(text)
        at = content
        for word in key[:-1]:
            at = at[word]
        at[key[-1]] = value
        if value is None:
            del at[key[-1]]
        with pytest.raises(DloError, match=message):
            parse_machine(content, "mine.yaml")


def test_a_machine_that_extends_another_has_its_constants_but_those_it_sets(tmp_path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "extends: jean-zay-a100\nlinks: {network: {bandwidth: {2: 5.0e+9}}}\npeak: {bfloat16: 3e+14}"
    )
    mine, base = load_machine(str(tmp_path / "mine.yaml")), load_machine("a100")
    assert (mine.network.rate(2), mine.network.latency) == (5e9, base.network.latency)
    assert (mine.peak, mine.host.memory, mine.node) == ({"bfloat16": 3e14}, 51e9, base.node)
