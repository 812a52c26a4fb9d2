"""Errors for options: a number's rule, the nearest word, and sizes in all their units."""

import math

import pytest

from dlo_framework.errors import DloError, check_choice, check_number
from dlo_framework.units import parse_bytes


@pytest.mark.parametrize(
    ("rule", "good", "bad"),
    [
        ("at least 1 step", (1, 2.5, math.inf), (0.99, -math.inf)),
        ("above 0", (1e-9, 1), (0, -1)),
        ("at least 0 and below 1", (0, 0.99), (-0.01, 1)),
        ("above 5e-05 and at most 1.5 with three phases", (6e-5, 1.5), (5e-5, 1.51)),
        ("a number of units of at least -1", (-1, 0), (-2,)),
    ],
)
def test_a_number_is_checked_against_the_rule_that_the_message_prints(rule, good, bad):
    for value in (None, *good):
        check_number("A: key", value, rule, "use 1")
    for value in (*bad, math.nan):
        with pytest.raises(DloError) as raised:
            check_number("A: key", value, rule, "use 1")
        assert str(raised.value) == f"A: key must be {rule}, got {value}; use 1"


def test_a_word_is_checked_against_the_choices():
    check_choice("A: mode", "batch", ("batch", "element"))
    check_choice("A: mode", None, ("batch", "element"))
    with pytest.raises(DloError, match=r"of batch, element, got batches; did you mean 'batch'\?$"):
        check_choice("A: mode", "batches", ("batch", "element"))
    with pytest.raises(DloError, match=r"A: mode must be one of batch, element, got 3; leave it out$"):
        check_choice("A: mode", 3, ("batch", "element"), "leave it out")


# --- sizes are read in all their units, and what is no size is an error that names the option ------------------------


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80 * 10**9),
        ("79.5 GiB", int(79.5 * 2**30)),
        ("64k", 64_000),
        ("2e3", 2000),
        (4096, 4096),
    ],
)
def test_a_size_is_a_number_of_bytes(text, size):
    assert parse_bytes(text, "--memory") == size


@pytest.mark.parametrize(
    "text", ["lots", "", "GB", "-1", "0GB", "0.5", "12 parrots", "1.2.3GB", "nan", "inf", "80GBs", "1e300"]
)
def test_anything_else_is_an_error(text):
    with pytest.raises(
        DloError, match=r"^--memory must be a size of at least one byte, got .*; give a number with a unit"
    ):
        parse_bytes(text, "--memory")
