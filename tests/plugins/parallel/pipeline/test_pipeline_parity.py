"""Losses and gradients of all schedules on 2 and 4 ranks against one process's."""

import copy
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_plugins.parallel.pipeline.pipeline_engine import Pipeline
from dlo_plugins.parallel.pipeline.pipeline_schedules import SCHEDULES
from support.on_ranks import on_ranks
from support.pipeline_nets import CASES, FLUSHING, Case, Noisy, plain, vit


def check_step(case: Case, pipeline: Pipeline, alone: Any, weights: list[float], label: str, **options: Any) -> None:
    """Compares a step with one process's: loss, gradients, and what is not held."""
    expected_loss = torch.tensor(case.alone(alone, weights, float(options.get("seed", 1.0))), dtype=torch.float64)
    loss = case.step(pipeline, weights, **options)
    torch.testing.assert_close(loss, expected_loss, rtol=1e-6, atol=0, msg=lambda text: f"{label}: loss: {text}")
    largest = max(parameter.grad.abs().max() for parameter in alone.parameters() if parameter.grad is not None)
    for (name, found), expected in zip(case.model.named_parameters(), alone.parameters(), strict=True):
        if not pipeline.ownership(name):
            assert found.is_meta
            assert found.grad is None
            continue
        assert found.grad is not None, f"{label}: {name}"
        assert expected.grad is not None
        tight = 1e-11 if found.dtype == torch.float64 else 1e-6
        # Of a bias before a batch norm there is nothing but rounding.
        difference = (found.grad - expected.grad).abs().max() / (expected.grad.abs().max() + 1e-3 * largest)
        assert difference <= tight, f"{label}: {name}: {difference}"


def _models(rank: int, world_size: int, names: Sequence[str], schedules: Sequence[str]) -> None:
    number = 2 * world_size
    weights = [float(n + 1) / 10 for n in range(number)]
    for name in names:
        for schedule in schedules:
            torch.manual_seed(5)
            case = plain(number, depth=13) if name == "deep" else CASES[name](number)
            alone = copy.deepcopy(case.model)
            pipeline = Pipeline(case.model, case.plan, dist.group.WORLD, schedule=schedule)
            check_step(case, pipeline, alone, weights, f"{name}, {schedule}")


@on_ranks(2, timeout=200)
def test_models_train_as_in_one_process(rank: int, world_size: int) -> None:
    _models(rank, world_size, ("plain",), FLUSHING)
    _models(rank, world_size, ("vit", "llama, tied"), ("Interleaved1F1B", "ZBV"))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in CASES if name != "plain"])
def test_each_model_trains_under_every_schedule(name: str) -> None:
    run_distributed(_models, 2, [name], [*FLUSHING], timeout=120)


@pytest.mark.slow
@on_ranks(4, timeout=120)
def test_on_four_ranks(rank: int, world_size: int) -> None:
    one_stage = [name for name in FLUSHING if SCHEDULES.get(name).stages_per_rank == 1]
    _models(rank, world_size, ("vit", "llama, tied"), one_stage)
    _models(rank, world_size, ("deep",), FLUSHING)


@on_ranks(2, timeout=120)
def test_uneven_stages_weights_shapes_and_a_seed(rank: int, world_size: int) -> None:
    for schedule in ("1F1B", "ZBV", "Varuna"):
        torch.manual_seed(7)
        case = plain(5, depth=7)
        # Micro-batches of other shapes, among them one sample: what a partial last batch makes.
        case.micro_batches[1] = {name: value[:3] for name, value in case.micro_batches[1].items()}
        case.micro_batches[4] = {name: value[:1] for name, value in case.micro_batches[4].items()}
        alone = copy.deepcopy(case.model)
        split = [1, 2, 3, 1] if schedule == "ZBV" else [6, 1]
        pipeline = Pipeline(case.model, case.plan, dist.group.WORLD, schedule=schedule, split=split)
        assert [len(pipeline.stages.blocks_of(stage)) for stage in range(len(split))] == split
        check_step(case, pipeline, alone, [0.1, 0.4, 0.2, 0.2, 0.1], schedule, seed=1024.0)
        # Fewer micro-batches than ranks; then again many.
        whole = case.micro_batches
        pipeline.most_shapes = 2  # Fewer than there are.
        for case.micro_batches in (whole[:1], whole):
            number = len(case.micro_batches)
            check_step(case, pipeline, alone, [1 / number] * number, f"{schedule}, {number}", seed=1024.0)


@on_ranks(2, timeout=120)
def test_evaluation_with_a_partial_last_batch(rank: int, world_size: int) -> None:
    for schedule in ("1F1B", "Interleaved1F1B", "ZBV"):
        torch.manual_seed(8)
        case = vit(5, drop_rate=0.5)
        x, y = case.micro_batches[4]
        case.micro_batches[4] = x[:1], y[:1]
        alone = copy.deepcopy(case.model).eval()
        case.model.eval()
        pipeline = Pipeline(case.model, case.plan, dist.group.WORLD, schedule=schedule)
        for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
            with mode():
                outputs = pipeline.evaluate(case.micro_batches, partial(case.forward, case.model))
            assert (outputs is not None) == pipeline.is_last
            for found, batch in zip(outputs or [], case.micro_batches, strict=False):
                assert not found.requires_grad
                torch.testing.assert_close(found, alone(batch[0]))
        # Between them, training goes on as if nothing had been.
        if schedule == "1F1B":
            check_step(case, pipeline, alone, [0.2] * 5, schedule)


@on_ranks(2, timeout=120)
def test_frozen_parameters_and_thawing_them(rank: int, world_size: int) -> None:
    for schedule in ("1F1B", "ZBH1", "Varuna"):
        torch.manual_seed(10)
        case = plain(4)
        for name, parameter in case.model.named_parameters():
            parameter.requires_grad_(name.startswith(("layers.4", "out")))
        alone = copy.deepcopy(case.model)
        pipeline = Pipeline(case.model, case.plan, dist.group.WORLD, schedule=schedule)
        for trained in ("layers.4", "layers.1"):  # No gradient passes between stages; then one does.
            for model in (case.model, alone):
                for name, parameter in model.named_parameters():
                    parameter.requires_grad_(parameter.requires_grad or name.startswith(trained))
            case.alone(alone, [0.25] * 4)
            case.step(pipeline)
            for (name, one), other in zip(case.model.named_parameters(), alone.parameters(), strict=True):
                if pipeline.ownership(name):
                    assert (one.grad is None) == (other.grad is None), name
                    if one.grad is not None:
                        torch.testing.assert_close(one.grad, other.grad, rtol=1e-6, atol=1e-7)


@on_ranks(3, timeout=120)
def test_a_weight_that_three_ranks_share_gets_the_sum(rank: int, world_size: int) -> None:
    torch.manual_seed(12)
    case = plain(3)
    layers: Any = case.model.layers
    names = [f"layers.{n}.up.weight" for n in (1, 3, 5)]
    layers[3].up.weight = layers[5].up.weight = layers[1].up.weight
    alone = copy.deepcopy(case.model)
    pipeline = Pipeline(case.model, case.plan, dist.group.WORLD, split=[2, 2, 2])
    assert all(pipeline.ownership(name) and pipeline.ownership.is_first_holder(name) is (rank == 0) for name in names)
    check_step(case, pipeline, alone, [0.2, 0.3, 0.5], "shared by three")


@on_ranks(3, timeout=120)
def test_recomputation_draws_the_same_numbers_and_changes_buffers_once(rank: int, world_size: int) -> None:
    found: dict[str, Any] = {"1F1B": [], "Varuna": []}
    for schedule, autocast in itertools.product(found, (False, True)):
        torch.manual_seed(13)
        case = plain(8)
        layers: Any = case.model.layers
        for at, layer in enumerate(layers):
            layers[at] = Noisy(layer, writes=at > 0)  # Backward needs what the stem returns.
        pipeline = Pipeline(case.model, case.plan, dist.group.WORLD, schedule=schedule)
        losses = []
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                losses.append(case.step(pipeline))
        own = [(n, p) for n, p in case.model.named_parameters() if pipeline.ownership(n)]
        buffers = [b.clone() for b in case.model.buffers() if not b.is_meta]
        found[schedule] += [losses, [p.grad for _, p in own], buffers, torch.rand(4)]
    for one, other in zip(*found.values(), strict=True):
        assert all(map(torch.equal, one, other))
    assert any(float(buffer.max()) > 2 for buffer in found["Varuna"][2])


class Keeping(nn.Module):
    """Block that keeps a term of a loss in an attribute."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block
        self.kept: Any = 0.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        found = self.block(*args, **kwargs)
        self.kept = found[0].mean()
        return found


@on_ranks(2, timeout=120)
def test_what_a_loss_uses_of_other_stages_is_refused(rank: int, world_size: int) -> None:
    """Stages of one rank, so that no other waits for what raises; other ranks' blocks are named as such."""
    case = plain(2)
    layers: Any = case.model.layers
    for at in range(1, 6):
        layers[at] = Keeping(layers[at])
    groups = [dist.new_group([member]) for member in range(world_size)]
    pipeline: Any = Pipeline(case.model, case.plan, groups[rank], schedule="Interleaved1F1B", stages_per_rank=3)
    case.step(pipeline)
    plain_loss = case.loss
    case.loss = lambda *given: plain_loss(*given) + sum(layer.kept for layer in layers[1:])
    pipeline.own_stages, pipeline._has_marked = pipeline.own_stages[-1:], False
    pipeline._mark_kept(2)
    with pytest.raises(DloError, match=r"got 'add' after .* on a value computed from 'layers\.1\.kept'"):
        case.loss(case.model, torch.zeros(4, 3), {"y": torch.zeros(4, dtype=torch.long)})
    case = plain(2)
    pipeline = Pipeline(case.model, case.plan, groups[rank], schedule="Interleaved1F1B", stages_per_rank=3)
    step = 0

    def forward(batch: Any) -> Any:
        """Returns the stem's output too, which a loss uses from the second step on."""
        stem = case.model.inward(batch["x"])
        hidden = stem + case.model.shift
        for layer in case.model.layers:  # type: ignore[union-attr]
            hidden = layer(hidden, batch["scale"])[0]
        return case.model.out(case.model.final(hidden)), stem  # type: ignore[operator]

    def loss(outputs: Any, batch: Any) -> Tensor:
        return outputs[0].square().mean() + (outputs[1].square().mean() if step else 0.0)

    pipeline.train_step(case.micro_batches, forward, loss)
    step = 1
    with pytest.raises(DloError, match=r"got 'pow' after 'layers\.5' on a value computed from 'inward'"):
        pipeline.train_step(case.micro_batches, forward, loss)
    pipeline.reset()
    with pytest.raises(DloError, match=r"got a model's output computed from 'inward'"):
        pipeline.evaluate(case.micro_batches, forward)
    dist.barrier()
