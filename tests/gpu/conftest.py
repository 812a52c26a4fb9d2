"""Tests of this folder need a CUDA device: ``pytest -m gpu``."""

import pytest
import torch


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks every test of this folder, which is skipped where there is no device."""
    item.add_marker(pytest.mark.gpu)
    if not torch.cuda.is_available():
        item.add_marker(pytest.mark.skip(reason="this machine has no CUDA device"))
