"""Tests of this folder need a CUDA device: ``pytest -m gpu``."""

import pytest
import torch
import torch.distributed as dist


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks every test of this folder, which is skipped where there is no device."""
    item.add_marker(pytest.mark.gpu)
    if not torch.cuda.is_available():
        item.add_marker(pytest.mark.skip(reason="this machine has no CUDA device"))


@pytest.fixture
def group():
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True)
    dist.init_process_group("nccl", store=store, rank=0, world_size=1, device_id=torch.device("cuda", 0))
    yield
    dist.destroy_process_group()
