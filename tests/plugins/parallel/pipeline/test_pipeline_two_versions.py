"""PipeDream-2BW: the weights' delay of one step is that of a simulation in one process; draining changes nothing."""

import copy
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.pipeline.pipeline_engine import DelayedStep, Pipeline
from support.pipeline_nets import Case, language, plain

STEPS = 5


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if not p.is_meta], lr=0.1, momentum=0.9)


def simulated(case: Case, model: nn.Module, batches: list[Any]) -> Iterator[tuple[float, dict[str, Tensor]]]:
    """Yields each batch's loss, and the weights after its step: W(t+1) = W(t) - lr * gradient at W(t-1)."""
    optimizer, late = optimizer_of(model), None
    for case.micro_batches in batches:
        optimizer.zero_grad()
        loss = case.alone(model, [1 / len(case.micro_batches)] * len(case.micro_batches))
        gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        if late is not None:
            for parameter, gradient in zip(model.parameters(), late, strict=True):
                parameter.grad = gradient
            optimizer.step()
        late = gradients
        yield loss, {name: p.detach().clone() for name, p in model.named_parameters()}


class Recomputed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(self.block, *args, use_reentrant=False, **kwargs)


def recomputed(number: int) -> Case:
    case = plain(number)
    layers: Any = case.model.layers
    for at, layer in enumerate(layers):
        layers[at] = Recomputed(layer)
    return case


CASES = {
    "plain": plain,
    "tied": lambda n: language("llama", n, tie_word_embeddings=True),
    "recomputed": recomputed,
}


def make_batches(name: str, number: int) -> tuple[Case, list[Any]]:
    """Returns a case, and its batches; the fourth has one micro-batch less if the schedule can run that many."""
    torch.manual_seed(3)
    case = CASES[name](number)
    batches = []
    for step in range(STEPS):
        torch.manual_seed(10 + step)
        batches.append(CASES[name](number - (step == 3 and number > dist.get_world_size())).micro_batches)
    return case, batches


def _trains(rank: int, world_size: int, names: list[str]) -> None:
    for name in names:
        for number in (world_size, 2 * world_size + 1):
            case, batches = make_batches(name, number)
            alone = copy.deepcopy(case.model)
            expected = list(simulated(case, alone, batches))
            pipeline = Pipeline(case.model, case.plan, dist.group.WORLD, schedule="PipeDream2BW")
            optimizer = optimizer_of(case.model)
            first = {n: p.detach().clone() for n, p in case.model.named_parameters()}
            for step, case.micro_batches in enumerate(batches):
                label = f"{name}, {number} micro-batches, step {step}"
                loss = case.step(pipeline)
                assert pipeline.has_gradients == (step > 0)
                assert loss.item() == pytest.approx(expected[max(step - 1, 0)][0], rel=1e-6), label
                optimizer.step()
                for key, parameter in case.model.named_parameters():
                    if pipeline.ownership(key):
                        apart = (parameter.detach() - expected[step][1][key]).abs().max()
                        assert apart < 2e-6, f"{label}: {key}: {apart}"
                        assert torch.equal(parameter, first[key]) == (step == 0), label
            pipeline.drain()  # As at the end of a fit: a rank that ended would close its connection to one that sends.


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, ["tied"]),
        pytest.param(2, ["plain", "recomputed"], marks=pytest.mark.slow),
        pytest.param(4, ["plain"], marks=pytest.mark.slow),
    ],
)
def test_weights_are_those_of_a_simulation_in_one_process(ranks: int, names: list[str]) -> None:
    """Plain weights are in the ordinary suite on a mesh, in test_mesh_delayed_gradients."""
    run_distributed(_trains, ranks, names, timeout=120)


def _drains(rank: int, world_size: int) -> None:
    """Draining, evaluating and restoring in any step leave all bits as they are."""
    found = []
    for interrupts in (False, True):
        case, batches = make_batches("plain", 4)
        pipeline = Pipeline(case.model, case.plan, dist.group.WORLD, schedule="PipeDream2BW")
        assert pipeline.drain() is None
        optimizer, losses = optimizer_of(case.model), []
        for step, case.micro_batches in enumerate(batches):
            losses.append(case.step(pipeline))
            if interrupts and step == 1:  # Before the optimizer's step, which has its gradients still.
                pipeline.evaluate(case.micro_batches, partial(case.forward, case.model))
            optimizer.step()
            if interrupts and step == 3:
                delayed = pipeline.drain()
                assert delayed is not None
                assert delayed is pipeline.drain()
                pipeline.reset()
                pipeline.delayed = DelayedStep({n: g.clone() for n, g in delayed.gradients.items()}, delayed.loss)
        last = pipeline.drain()
        assert last is not None
        weights = {n: p.detach() for n, p in case.model.named_parameters() if pipeline.ownership(n)}
        found.append((losses, weights, last))
    (losses, weights, last), (again, same, end) = found
    assert all(map(torch.equal, losses, again))
    assert all(torch.equal(weights[name], same[name]) for name in weights)
    assert last.gradients.keys() == end.gradients.keys() == weights.keys()
    assert all(torch.equal(last.gradients[name], end.gradients[name]) for name in weights)
    assert torch.equal(last.loss, end.loss)


def test_draining_changes_no_bit() -> None:
    run_distributed(_drains, 2, timeout=120)


def _overlaps(rank: int, world_size: int) -> None:
    """The last stage runs the end of a step only after the first stage has returned from it."""
    case, batches = make_batches("plain", 4)
    pipeline = Pipeline(case.model, case.plan, dist.group.WORLD, schedule="PipeDream2BW")
    store = dist.distributed_c10d._get_default_store()
    computed = 0

    def wait(loss: Tensor) -> None:
        nonlocal computed
        computed += 1
        if computed % 4 == 0 and computed > 4:  # The first step returns its own loss.
            store.wait([f"returned {computed // 4 - 1}"], timedelta(seconds=60))

    pipeline.loss_ready = wait
    for step, case.micro_batches in enumerate([*batches[:3], batches[4]]):
        case.step(pipeline)
        if rank == 0:
            store.set(f"returned {step}", "")
    assert pipeline.is_last == (computed == 16)
    dist.barrier()  # A rank that ended would close its connection to one that still sends.


def test_a_step_does_not_wait_for_the_last_stage() -> None:
    run_distributed(_overlaps, 3, timeout=120)
