"""Sizes are read in all their units, and what is no size is an error that names the option."""

import pytest

from dlo_framework.errors import DloError
from dlo_framework.units import parse_bytes


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
