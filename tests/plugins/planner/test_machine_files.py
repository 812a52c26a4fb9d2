"""Machine files: what comes with dlo is complete and has sources, and what is missing is named."""

from dataclasses import replace

import pytest
import yaml

from dlo_framework.errors import DloError
from dlo_plugins.planner.machine import Machine, ProductTable, load_machine, machine_names, parse_machine
from dlo_plugins.planner.work import Product


def test_each_shipped_machine_has_a_source_for_every_constant() -> None:
    assert {"a100", "cpu", "h100", "h200", "v100"} <= set(machine_names())
    for name in machine_names():
        machine = load_machine(name)
        assert machine.name == name
        assert len(machine.sources) >= 18
        assert all(len(source) > 5 for source in machine.sources.values()), name


def test_efficiency_grows_with_a_product_and_never_exceeds_the_best() -> None:
    machine = load_machine("a100")
    sizes = [machine.product_efficiency(n, n, n) for n in (128, 512, 2048, 8192)]
    assert sizes == sorted(sizes)
    assert sizes[0] < 0.1 < 0.9 * machine.efficiency < sizes[-1] <= machine.efficiency
    small = machine.product_seconds(Product(16, 16, 16), "bfloat16")
    assert small == pytest.approx(machine.launch, rel=0.5)


def test_few_tiles_with_a_long_inner_dim_are_computed_in_slices() -> None:
    machine = load_machine("h100")
    best = machine.rate("bfloat16") * machine.efficiency

    def rate(m: int, n: int, k: int) -> float:
        product = Product(m, n, k)
        return product.flops / machine.product_seconds(product, "bfloat16") / best

    alone = machine.product_efficiency(768, 768, 50_432) / machine.efficiency  # 18 tiles on 132 processors.
    assert alone < 0.4 < 0.75 < rate(768, 768, 50_432) < 1
    # A short inner dim has no slices, and many tiles need none.
    for m, n, k in ((768, 768, 512), (8192, 8192, 8192)):
        assert list(machine._splits(Product(m, n, k))) == [1]


def test_fused_attention_computes_full_tiles() -> None:
    machine = load_machine("h100")

    def seconds(length: int, machine: Machine) -> float:
        product = Product(length, length, 64, batch=3072, is_attention=True)
        return (machine.product_seconds(product, "bfloat16") - machine.launch) / product.flops

    assert seconds(197, machine) == pytest.approx(seconds(256, machine) * 256**2 / 197**2)
    assert seconds(256, machine) == pytest.approx(seconds(4096, machine))
    for other in (replace(machine, device="cpu"), replace(machine, table=ProductTable({(1, 1, 1, 1, False): 1.0}))):
        assert seconds(197, other) == pytest.approx(seconds(256, other))


def test_a_group_over_nodes_uses_the_cards_of_all_its_ranks() -> None:
    machine = load_machine("h100")
    inside, across = machine.link_of(8, 1), machine.link_of(64, 1)
    alone = machine.link_of(8, 8)
    assert inside[0] >= across[0] > alone[0]
    assert alone[0] == machine.network.rate(8)  # type: ignore[union-attr]
    assert across[0] == pytest.approx(min(inside[0], 8 * alone[0]))
    assert machine.collective_seconds(1e9, 8, 1, reduces_and_gathers=True) == pytest.approx(
        2 * machine.collective_seconds(1e9, 8, 1)
    )
    assert machine.collective_seconds(1e9, 1, 1) == 0


def _content() -> dict[str, object]:
    from dlo_plugins.planner.machine import _FOLDER

    content: dict[str, object] = yaml.safe_load(_FOLDER.joinpath("h100.yaml").read_text())
    return content


def test_a_bandwidth_may_depend_on_the_number_of_nodes() -> None:
    content = _content()
    content["links"]["network"]["bandwidth"] = {2: 40.0e9, 8: 10.0e9}  # type: ignore[index]
    network = parse_machine(content, "mine.yaml").network
    assert network is not None
    assert [network.rate(n) for n in (1, 2, 8, 64)] == [40e9, 40e9, 10e9, 10e9]
    assert network.rate(4) == pytest.approx(20e9)


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (("links", "node"), "must have links.node"),
        (("product", "ramp"), "must have product.ramp"),
        (("peak",), "must have peak"),
        (("links", "network", "latency"), "must have links.network.latency"),
    ],
)
def test_a_missing_constant_is_named(key: tuple[str, ...], message: str) -> None:
    content = _content()
    at: dict[str, object] = content
    for word in key[:-1]:
        at = at[word]  # type: ignore[assignment]
    del at[key[-1]]
    with pytest.raises(DloError, match=message):
        parse_machine(content, "mine.yaml")


def test_a_constant_that_is_not_positive_is_refused() -> None:
    content = _content()
    content["bandwidth"] = {"value": "fast", "source": "guess"}
    with pytest.raises(DloError, match="bandwidth must be a positive number, got 'fast'"):
        parse_machine(content, "mine.yaml")


def test_a_machine_without_a_network_plans_one_node_only() -> None:
    content = _content()
    del content["links"]["network"]  # type: ignore[attr-defined]
    machine = parse_machine(content, "mine.yaml")
    assert machine.collective_seconds(1e9, 8, 1) > 0
    with pytest.raises(DloError, match=r"must have links\.network"):
        machine.collective_seconds(1e9, 16, 1)


def test_an_unknown_machine_gets_the_nearest_match() -> None:
    with pytest.raises(DloError, match="did you mean 'h100'"):
        load_machine("h10")
    with pytest.raises(DloError, match="must be a file that exists"):
        load_machine("absent.yaml")
