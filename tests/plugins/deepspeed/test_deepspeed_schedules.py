"""Schedules and optimizers of a DeepSpeed JSON: DeepSpeed's own, step by step, and beside a task's or a callback's."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import timm.optim
import torch

from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.config import merge_options
from dlo_plugins.deepspeed.optimizer_and_schedule import build_scheduler, make_optimizer_args
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_plugins.schedules.lr_curves import OneCycle
from support.foreign_transformer import ForeignTask

STEPS = 60


def adam(groups=1):
    return torch.optim.AdamW(
        [{"params": [torch.nn.Parameter(torch.zeros(2))], "lr": 0.1 / (n + 1)} for n in range(groups)]
    )


def rates(optimizer, scheduler):
    """Returns rate and momentum at each optimizer step, as an engine steps: the optimizer, then the scheduler."""
    found = []
    for _ in range(STEPS):
        found.append([(float(group["lr"]), *group["betas"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("WarmupLR", {"warmup_min_lr": 1e-3, "warmup_max_lr": 0.2, "warmup_num_steps": 20, "warmup_type": "linear"}),
        ("WarmupLR", {"warmup_max_lr": [0.2, 0.3], "warmup_num_steps": 1}),
        ("WarmupDecayLR", {"total_num_steps": 5, "warmup_num_steps": 10, "warmup_min_lr": 1e-4}),
        ("WarmupCosineLR", {"total_num_steps": 8, "warmup_num_steps": 10, "cos_min_ratio": 0.1}),
        ("LRRangeTest", {"lr_range_test_step_size": 7, "lr_range_test_staircase": True}),
        (
            "OneCycle",
            {
                "cycle_min_lr": [0.01, 0.02],
                "cycle_max_lr": [0.1, 0.3],
                "cycle_first_step_size": 9,
                "cycle_second_step_size": 21,
                "decay_step_size": 5,
                "decay_lr_rate": 0.5,
                "decay_mom_rate": 0.01,
                "cycle_min_mom": 0.7,
            },
        ),
        ("OneCycle", {"cycle_min_lr": 0.01, "cycle_max_lr": 0.1, "cycle_first_step_size": 20, "cycle_momentum": False}),
    ],
)
def test_each_schedule_is_deepspeeds_own_step_by_step(name, params):
    from deepspeed.runtime import lr_schedules

    theirs, ours = adam(2), adam(2)
    expected = rates(theirs, getattr(lr_schedules, name)(theirs, **copy.deepcopy(params)))
    scheduler = build_scheduler(merge_options({}, {"scheduler": {"type": name, "params": params}}), ours)
    assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)
    assert rates(ours, scheduler) == expected


def test_a_schedule_goes_on_where_it_was_saved():
    params = {"total_num_steps": 40, "warmup_num_steps": 10}
    config = merge_options({}, {"scheduler": {"type": "WarmupDecayLR", "params": params}})
    whole = adam()
    expected = rates(whole, build_scheduler(config, whole))
    first, second = adam(), adam()
    scheduler = build_scheduler(config, first)
    for _ in range(17):
        first.step()
        scheduler.step()
    state, optimizer_state = copy.deepcopy(scheduler.state_dict()), first.state_dict()
    resumed = build_scheduler(config, second)
    second.load_state_dict(optimizer_state)
    resumed.load_state_dict(state)
    assert rates(second, resumed)[: STEPS - 17] == expected[17:]


def test_auto_is_filled_from_the_run():
    params = {"total_num_steps": "auto", "warmup_max_lr": "auto", "warmup_min_lr": "auto", "warmup_num_steps": 10}
    config = merge_options({}, {"scheduler": {"type": "WarmupDecayLR", "params": params}})
    ours, theirs = adam(2), adam(2)
    given_steps = build_scheduler(config, ours, total_steps=50)
    explicit = {"total_num_steps": 50, "warmup_max_lr": [0.1, 0.05], "warmup_num_steps": 10}
    same = build_scheduler(merge_options({}, {"scheduler": {"type": "WarmupDecayLR", "params": explicit}}), theirs)
    assert rates(ours, given_steps) == rates(theirs, same)
    with pytest.raises(DloError, match="the run has no known end"):
        build_scheduler(config, adam())
    config["scheduler"]["params"]["warmup_num_steps"] = "auto"
    with pytest.raises(DloError, match="the task sets no warm-up"):
        build_scheduler(config, adam(), 50)
    assert build_scheduler(config, adam(), 50, 20).arguments["warmup_num_steps"] == 20
    assert build_scheduler(config, adam(), 50, 0).arguments["warmup_num_steps"] == 1  # DeepSpeed has none shorter.


# --- the optimizer -----------------------------------------------------------------------------------------


def made(section, own=None):
    return make_optimizer_args(merge_options({"stage": 0}, {"optimizer": section}), own)


def test_deepspeeds_adam_is_adamw_unless_it_is_told_not_to_be_with_the_defaults_of_its_class():
    assert made({"type": "Adam", "params": {"lr": 0.1}})[0] is torch.optim.AdamW
    assert made({"type": "adamw", "params": {}})[0] is torch.optim.AdamW
    assert made({"type": "Adam", "params": {"adam_w_mode": False}})[0] is torch.optim.Adam
    assert made({"type": "AdamW", "params": {"adam_w_mode": False}})[0] is torch.optim.AdamW
    # FusedAdam and CPUAdam decay nothing by default; torch's AdamW by 0.01.
    assert made({"type": "AdamW"})[1] == {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    assert made({"type": "AdamW", "params": {"torch_adam": True, "lr": 0.1}})[1] == {"lr": 0.1}
    lion = {"lr": 0.01, "betas": [0.9, 0.99]}
    expected = {"lr": 0.01, "betas": (0.9, 0.99), "weight_decay": 0.0}
    assert made({"type": "Lion", "params": lion}) == (timm.optim.Lion, expected)


def _lamb_kernel(weight, steps, *, lr, betas, eps, decay, inside, corrects, bounds):
    """DeepSpeed 0.19.8's csrc/lamb/fused_lamb_cuda_kernel.cu, line by line."""
    p, m, v = weight.clone(), torch.zeros_like(weight), torch.zeros_like(weight)
    for step, gradient in enumerate(steps, 1):
        m = betas[0] * m + (1 - betas[0]) * gradient
        v = betas[1] * v + (1 - betas[1]) * gradient * gradient
        denominator = (v + eps).sqrt() if inside else v.sqrt() + eps
        update = m / denominator + decay * p
        coefficient = min(max(float(p.norm() / update.norm()), bounds[0]), bounds[1])
        corrected = lr * (1 - betas[1] ** step) ** 0.5 / (1 - betas[0] ** step)
        p = p - (corrected if corrects else lr) * coefficient * update
    return p


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize("bounds", [(0.01, 10.0), (0.01, 0.3), (5.0, 6.0)])
def test_lamb_is_deepspeeds_kernel(inside, corrects, bounds):
    params = {"lr": 0.01, "betas": [0.9, 0.99], "eps": 1e-3, "weight_decay": 0.1, "eps_inside_sqrt": inside}
    params |= {"bias_correction": corrects, "min_coeff": bounds[0], "max_coeff": bounds[1]}
    kind, arguments = made({"type": "Lamb", "params": params})
    draw = torch.Generator().manual_seed(1)
    weight, *steps = (torch.randn(3, 5, generator=draw, dtype=torch.float64) for _ in range(4))
    parameter = torch.nn.Parameter(weight.clone())
    optimizer = kind([parameter], **arguments)
    for gradient in steps:
        parameter.grad = gradient.clone()
        optimizer.step()
    options = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-3, "decay": 0.1}
    expected = _lamb_kernel(weight, steps, **options, inside=inside, corrects=corrects, bounds=bounds)
    torch.testing.assert_close(parameter.detach(), expected)


@pytest.mark.parametrize(("name", "mode"), [("AdamW", True), ("Adam", False)])
def test_adam_without_bias_correction(name, mode):
    """The update is m / (sqrt(v) + eps), as in DeepSpeed's csrc/adam/cpu_adam_impl.cpp without the two corrections."""
    params = {"lr": 0.1, "betas": [0.9, 0.99], "eps": 1e-3, "weight_decay": 0.1, "bias_correction": False}
    kind, arguments = made({"type": name, "params": params | {"adam_w_mode": mode}})
    draw = torch.Generator().manual_seed(1)
    weight, *steps = (torch.randn(6, generator=draw, dtype=torch.float64) for _ in range(4))
    parameter = torch.nn.Parameter(weight.clone())
    optimizer, m, v = kind([parameter], **arguments), torch.zeros_like(weight), torch.zeros_like(weight)
    for gradient in steps:
        parameter.grad = gradient.clone()
        optimizer.step()
        g = gradient if mode else gradient + 0.1 * weight
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g * g
        weight = weight * (1 - 0.1 * 0.1 * mode) - 0.1 * m / (v.sqrt() + 1e-3)
    torch.testing.assert_close(parameter.detach(), weight)
    assert merge_options({"stage": 2}, {"optimizer": {"type": name, "params": params}})


def test_auto_is_filled_from_the_tasks_optimizer():
    own = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(2))], lr=0.25, betas=(0.5, 0.6), weight_decay=0.3)
    section = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "weight_decay": "auto", "eps": 1e-6}}
    assert made(section, own)[1] == {"lr": 0.25, "betas": (0.5, 0.6), "weight_decay": 0.3, "eps": 1e-6}
    with pytest.raises(DloError, match=r'optimizer\.params\.lr must be a number, got "auto"'):
        made(section)
    with pytest.raises(DloError, match=r'momentum must be a number, got "auto", .* optimizer AdamW cannot'):
        made({"type": "SGD", "params": {"lr": 0.1, "momentum": "auto"}}, own)


BACKWARDS = {"cycle_min_lr": 0.1, "cycle_max_lr": 1.0, "cycle_second_step_size": -5}


@pytest.mark.parametrize(
    ("kind", "name", "params", "message"),
    [
        ("optimizer", "AdamX", {}, "unknown optimizer.type 'AdamX'; did you mean 'Adamax'?"),
        ("optimizer", "AdamW", {"bettas": [0.9, 0.9]}, "did you mean 'betas'?"),
        ("optimizer", "AdamW", {"lr": "1e-3"}, "optimizer.params.lr must be a number"),
        ("optimizer", "AdamW", {"max_grad_norm": 1.0}, 'set "gradient_clipping": 1.0'),
        ("optimizer", "AdamW", {"fp32_optimizer_states": False}, "must be True, as in dlo's AdamW, got False"),
        ("optimizer", "Muon", {}, "to use the task's optimizer"),
        ("optimizer", "Lamb", {}, "got Lamb, which needs their norms"),
        ("scheduler", "WarmupLR", {"warmup_steps": 3}, "did you mean 'warmup_num_steps'?"),
        ("scheduler", "WarmupDecayLR", {}, "of WarmupDecayLR must have total_num_steps"),
        ("scheduler", "WarmupLR", {"warmup_num_steps": 0}, "warmup_num_steps must be an integer of at least 1"),
        ("scheduler", "OneCycle", BACKWARDS, "cycle_second_step_size must be at least 0, got -5; leave it out"),
        ("scheduler", "WarmupLR", {"warmup_type": "cosine"}, "log or linear, got 'cosine'"),
    ],
)
def test_an_optimizer_or_a_schedule_that_is_not_one_is_refused(kind, name, params, message):
    with pytest.raises(DloError) as caught:
        merge_options({"stage": 1}, {kind: {"type": name, "params": params}})
    assert message in str(caught.value)


# A DeepSpeed JSON's scheduler beside a task's or a callback's own: found before ranks start, with the file's name


ADAM = {"type": "AdamW", "params": {"lr": 1e-3}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": 10}}


class Scheduled(ForeignTask):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}


class InAList(Scheduled):
    def configure_optimizers(self) -> Any:
        return [super().configure_optimizers()]


class ByTrainer(ForeignTask):
    """Its schedule needs the run's length, as those of dlo's tasks do."""

    schedule = "cosine"

    def configure_optimizers(self) -> Any:
        return self.trainer.estimated_stepping_batches


def bridge(folder: Path, **sections: Any) -> DeepSpeedBridge:
    path = folder / "ours.json"
    path.write_text(json.dumps(sections))
    return DeepSpeedBridge(config=str(path))


def test_a_callback_that_sets_the_rate(tmp_path: Path) -> None:
    strategy = bridge(tmp_path, optimizer=ADAM, scheduler=WARMUP)
    with pytest.raises(DloError, match=r"ours.json: scheduler must be unset .* OneCycle .* got WarmupLR; remove"):
        strategy.check_model(ForeignTask(), callbacks=[OneCycle()])
    strategy.check_model(ForeignTask())
    strategy.check_model(ForeignTask(), trains=False, callbacks=[OneCycle()])
    bridge(tmp_path, optimizer=ADAM).check_model(ForeignTask(), callbacks=[OneCycle()])


@pytest.mark.parametrize("task", [Scheduled, InAList, ByTrainer])
def test_an_optimizer_alone_under_a_tasks_schedule(tmp_path: Path, task: Any) -> None:
    with pytest.raises(DloError, match=r"ours.json: optimizer and scheduler must be set together .* add a scheduler"):
        bridge(tmp_path, optimizer=ADAM).check_model(task())
    bridge(tmp_path, optimizer=ADAM, scheduler=WARMUP).check_model(task())
    bridge(tmp_path, scheduler=WARMUP).check_model(task())
