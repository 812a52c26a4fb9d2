"""What a step of ZeRO or FSDP costs beside the arithmetic, counted: calls of Python functions, collectives."""

from __future__ import annotations

from typing import Any
from unittest import mock

import timm
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlo_framework.distributed.collectives import Communicator
from dlo_framework.distributed.model_units import find_units
from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.zero.zero_engine import ZeroEngine, ZeroOptions
from support.python_calls import count_python_calls

CPU = torch.device("cpu")
#: Calls of Python functions, the engine's and torch's, that a bucket may take in a step beside DDP's own.
A_BUCKET = 10
#: The same of a unit of stage 3: its hooks, two all-gathers, a reduce-scatter, and what the step has written to it.
A_UNIT = 95


def engine_of(stage: int, model: nn.Module, optimizer: Any, bucket_elements: int) -> ZeroEngine:
    units = find_units(model) if stage == 3 else []
    options = ZeroOptions(stage, bucket_elements)
    return ZeroEngine(model, [optimizer], units, Communicator(), CPU, options)


def mobilenet() -> tuple[nn.Module, Any]:
    model = timm.create_model("mobilenetv3_small_050", num_classes=10)
    # Not one that goes through its tensors in Python: ranks of ZeRO have fewer of them, and the count would hide calls.
    return model, torch.optim.SGD(model.parameters(), lr=0.01, foreach=True)


def _counted(rank: int, world_size: int) -> dict[str, tuple[int, int]]:
    """Returns calls of a step, and buckets, under DDP and each stage."""
    x, found = torch.randn(2, 3, 32, 32), {}
    model, optimizer = mobilenet()
    wrapped = DistributedDataParallel(model)

    def plain() -> None:
        wrapped(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        plain()
    found["ddp"] = count_python_calls(plain), 0
    for stage, mega in ((1, 25), (2, 1), (3, 25)):
        model, optimizer = mobilenet()
        engine = engine_of(stage, model, optimizer, mega * 2**18)

        def step(engine: ZeroEngine = engine, model: nn.Module = model, optimizer: Any = optimizer) -> None:
            loss = model(x).square().mean()
            engine.before_backward(automatic=True)
            loss.backward()
            engine.after_backward(automatic=True)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            step()
        found[f"zero{stage}, {mega} MiB"] = count_python_calls(step), len(engine.groups)
    return found


def _exchanges(rank: int, world_size: int) -> list[int]:
    """Returns how often ranks exchange in a step of an optimizer of full tensors, in stages 2 and 3."""
    found, original = [], dist.all_to_all_single
    for stage in (2, 3):
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
        optimizer = torch.optim.Adafactor(model.parameters(), lr=0.1)
        options = ZeroOptions(stage, 100)
        engine = ZeroEngine(model, [optimizer], ["0", "1"], Communicator(), CPU, options)
        with mock.patch.object(dist, "all_to_all_single", side_effect=original) as exchange:
            loss = model(torch.ones(2, 5)).square().mean()
            engine.before_backward(automatic=True)
            loss.backward()
            engine.after_backward(automatic=True)
            optimizer.step()
        found.append(exchange.call_count)
    return found


def test_a_step_calls_python_no_more_than_ddp_and_ten_times_a_bucket() -> None:
    counted = run_distributed(_counted, 2, timeout=100)[0]
    ddp, _ = counted.pop("ddp")
    for name, (calls, buckets) in counted.items():
        budget = A_UNIT if name.startswith("zero3") else A_BUCKET
        assert calls <= ddp + budget * buckets, (name, calls, ddp, buckets)


def test_full_tensors_go_to_their_owners_and_back_without_telling_their_lengths() -> None:
    # Gradients and, in stage 3, parameters go to the owners; stepped values come back.
    assert run_distributed(_exchanges, 2, timeout=100) == [[2, 3]] * 2
