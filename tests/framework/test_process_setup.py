"""Lines that a user cannot act on are not shown; others are."""

import logging

import pytest
from lightning.fabric.utilities.rank_zero import rank_zero_info

from dlo_framework.process_setup import silence_warnings


def test_lightnings_tip_on_tensor_cores_is_silenced(caplog: pytest.LogCaptureFixture) -> None:
    silence_warnings()
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        rank_zero_info(
            "You are using a CUDA device ('NVIDIA H200') that has Tensor Cores. To properly utilize them, ..."
        )
        rank_zero_info("GPU available: True (cuda), used: True")
    assert [record.getMessage() for record in caplog.records] == ["GPU available: True (cuda), used: True"]
