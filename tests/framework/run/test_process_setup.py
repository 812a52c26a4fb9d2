"""Lines that a user cannot act on are not shown; others are."""

import logging
import warnings

import pytest
from lightning.fabric.utilities.rank_zero import rank_zero_info

from dlo_framework.run.process import shorten_warnings, silence_warnings


def test_lightnings_tip_on_tensor_cores_is_silenced(caplog: pytest.LogCaptureFixture) -> None:
    silence_warnings()
    with caplog.at_level(logging.INFO, "lightning.pytorch.utilities.rank_zero"):
        rank_zero_info(
            "You are using a CUDA device ('NVIDIA H200') that has Tensor Cores. To properly utilize them, ..."
        )
        rank_zero_info("GPU available: True (cuda), used: True")
    assert [record.getMessage() for record in caplog.records] == ["GPU available: True (cuda), used: True"]


def test_dlos_own_warnings_are_one_line_of_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    shorten_warnings()
    shorten_warnings()
    told = warnings.formatwarning("too long", UserWarning, "/a/dlo_tasks/language/positions.py", 58, "warn(x)")
    assert told == "warning: too long\n"
    for file in ("/home/me/train.py", "/home/me/dlo_train.py"):
        assert f"{file}:58: UserWarning: too long" in warnings.formatwarning(
            "too long", UserWarning, file, 58, "warn(x)"
        )
