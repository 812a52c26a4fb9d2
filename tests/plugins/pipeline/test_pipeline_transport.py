"""In which groups hidden states and gradients pass, by what carries the device's tensors."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from dlo_plugins.pipeline.transport import Transport


@pytest.mark.parametrize(
    ("name", "device", "apart", "limit"),
    [
        ("nccl", "cuda", True, None),
        ("gloo", "cpu", False, timedelta(seconds=7)),
        # With offload to CPU memory there are both.
        ("cpu:gloo,cuda:nccl", "cuda", True, None),
        ("cpu:gloo,cuda:nccl", "cpu", False, timedelta(seconds=7)),
    ],
)
def test_on_nccl_messages_up_and_down_pass_in_groups_of_their_own(
    name: str, device: str, apart: bool, limit: timedelta | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = SimpleNamespace(options=SimpleNamespace(_timeout=timedelta(seconds=7)))
    group: Any = SimpleNamespace(_get_backend=lambda _: backend)
    monkeypatch.setattr(dist, "get_backend", lambda _: name)
    monkeypatch.setattr(dist, "get_rank", lambda _: 1)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda _: [0, 1, 2])
    monkeypatch.setattr(dist, "new_group", lambda *_, **__: object())
    transport = Transport(group, torch.device(device))
    up, down = transport.link(2, incoming=False), transport.link(0, incoming=False)
    assert (up.group is not down.group) is apart
    assert (transport.link(0, incoming=True).group, transport.link(2, incoming=True).group) == (up.group, down.group)
    assert up._limit == limit
