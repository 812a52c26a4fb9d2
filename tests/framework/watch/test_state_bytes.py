"""The bytes that a step and a process hold, counted in nobody's way."""

from __future__ import annotations

import inspect
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from dlo_framework.local_memory import optimizer_bytes, process_peak, states_per_parameter
from dlo_framework.watch.state_bytes import SavedTensorCounter, StateReport
from support.monitored import Net, fit
from support.trainers import quiet_trainer


class Derived(Net):
    """Trains on the derivative of what it computes, by torch.func; its first layer is computed again in backward."""

    def __init__(self, func: str | None) -> None:
        super().__init__()
        self.func = func
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))

    def on_before_optimizer_step(self, optimizer):
        pass

    def training_step(self, batch, batch_idx):
        (x,) = batch
        if self.func == "autograd":  # As gradient penalties and solvers of differential equations do.
            x.requires_grad_()
            (found,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
            return (found - 1).square().mean()
        if self.func:
            return (torch.func.vmap(torch.func.grad(lambda z: self.net(z)[0]))(x) - 1).square().mean()
        inside = checkpoint(self.net[:2], x, use_reentrant=False)
        return self.net[2](inside).sum()

    def validation_step(self, batch, batch_idx):
        pass


@pytest.mark.parametrize("func", ["autograd", "torch.func"])
def test_derivatives_in_a_step_are_not_hindered_by_what_watches_it(tmp_path, func):
    _, trainer = fit(tmp_path, Derived(func), max_epochs=1)
    assert trainer.global_step == 20
    found = json.loads((tmp_path / "summary.json").read_text())
    assert found["state_bytes"]["activations"] > 0
    assert found["flops_per_sample"] > 0


def test_what_a_step_saves_is_counted(tmp_path):
    fit(tmp_path, Derived(None), max_epochs=1)
    found = json.loads((tmp_path / "summary.json").read_text())["state_bytes"]
    # Of four samples: what the last layer takes, 4 x 4. What the layer before takes and gives is computed again.
    # Lightning's division of the loss by the micro-batches keeps their number, a double.
    assert found["activations"] == 4 * 4 * 4 + 8
    assert found["parameters"] == (8 * 4 + 4 + 4 + 1) * 4


def test_the_peak_of_saved_tensors_is_that_of_what_is_in_flight():
    """As micro-batches of a pipeline: two graphs at a time, then one, whose memory may be where another's was."""
    weight = torch.ones(64, requires_grad=True)
    counter = SavedTensorCounter([weight])
    with counter.hooks():
        inputs = [torch.ones(64) for _ in range(2)]
        losses = [((x * weight) * x).sum() for x in inputs]  # Both products save x.
        assert counter.peak == 2 * 64 * 4
        for loss in losses:
            loss.backward()
        del losses, loss
        for _ in range(3):
            (torch.ones(64) * weight).exp().sum().backward()  # Its input, and the output of exp.
    assert counter.peak == 2 * 64 * 4
    assert torch.equal(weight.grad, torch.full((64,), 2 + 3 * math.e))


def test_the_state_of_parameters_that_are_no_longer_in_a_group_is_counted():
    """DeepSpeed puts partitions of a flat buffer in their place; benchmarks/sharding.py runs it."""
    weight = torch.nn.Parameter(torch.ones(6, 4))
    optimizer = torch.optim.AdamW([weight])
    weight.sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["params"] = [torch.zeros(12)]
    with pytest.raises(KeyError):
        optimizer.state_dict()
    assert optimizer_bytes([optimizer]) == 2 * 4 * 24 + 4


def test_a_state_of_codes_and_scales_has_their_bytes() -> None:
    """torchao's tensors have no storage of their own, and asking for it is an error."""
    pytest.importorskip("torchao")
    from dlo_plugins.optimizers.quantised_adam import AdamW8bit

    weight = torch.nn.Parameter(torch.ones(4096))
    weight.grad = torch.ones(4096)
    optimizer = AdamW8bit([weight])
    optimizer.step()
    tables = 2 * 4 * 256  # Values of the codes of each moment.
    assert 2 * 4096 < optimizer_bytes([optimizer]) <= 2.1 * 4096 + tables


def test_the_formula_has_the_bytes_that_an_optimizer_keeps_for_an_element():
    """Two moments of 4 bytes; of 1 byte with their scales, and of 4 bytes for small tensors."""
    pytest.importorskip("torchao")
    from dlo_plugins.optimizers.quantised_adam import AdamW8bit

    for kind, expected in ((torch.optim.AdamW, 8.0), (AdamW8bit, (2 * 65536 + 8 * 64) / (65536 + 64))):
        weights = [torch.nn.Parameter(torch.ones(size)) for size in (65536, 64, 9)]
        optimizer = kind(weights)
        for weight in weights[:2]:  # The last is never used.
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        assert states_per_parameter([optimizer]) == pytest.approx(expected, rel=0.06)


def test_activations_are_those_of_the_largest_batch():
    """Batches grow after the step in which the other figures are measured, and get smaller again."""

    class Growing(BoringModel):
        def train_dataloader(self):
            return DataLoader([torch.ones(size, 32) for size in (2, 2, 2, 16, 4)], batch_size=None)

    found = []
    for steps in (3, -1):
        report = StateReport()
        trainer = quiet_trainer(max_epochs=1, max_steps=steps, callbacks=[report], limit_val_batches=0)
        trainer.fit(Growing())
        found.append(report.found.activations)
    assert 7.5 * found[0] < found[1] <= 8 * found[0]  # A scalar does not grow.


# --- the peak memory of a process is its own, whatever the process that has started it takes -------------------------


#: The function alone: to import torch takes seconds, and more memory than the process that starts this one.
_CODE = f"""
import contextlib, resource, sys
from pathlib import Path

{inspect.getsource(process_peak)}
print(process_peak())
"""


def test_a_process_does_not_count_the_memory_of_the_one_that_started_it() -> None:
    large = np.ones(2**27, dtype=np.uint8)
    found = int(subprocess.run([sys.executable, "-c", _CODE], capture_output=True, text=True, check=True).stdout)
    assert 1_000_000 < found < large.nbytes
