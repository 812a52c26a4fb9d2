"""Faults that other frameworks have shipped, planted on the ranks alone: `dlo parity` finds each, and says where.

Each case is the fault, a strategy under which it is planted, and what the report says. Beside it the same strategy
trains without the fault, and is parity.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dlo_framework.distributed.strategy import DataParallelStrategy
from dlo_framework.norms import collect_gradients, total_norm
from dlo_framework.testing import Case, compare_cases
from dlo_framework.testing.compare import report
from dlo_plugins.parallel.fsdp.sharded_optimizers import OptimizerShards
from dlo_plugins.parallel.fsdp.sharding import ShardedModule
from dlo_plugins.parallel.mesh.mesh_engine import MeshEngine
from dlo_plugins.parallel.zero.zero_engine import ZeroEngine
from dlo_tasks.language import vocabulary_loss
from dlo_tasks.language.causal_lm import CausalLM
from support.strategies import STRATEGIES
from support.token_batches import FAMILIES, Tokens

_PLANTED: list[tuple[Any, str, Any]] = []


def put(target: Any, name: str, value: Any) -> None:
    """Replaces an attribute until the next run begins."""
    _PLANTED.append((target, name, getattr(target, name)))
    setattr(target, name, value)


def wrap(target: Any, name: str, change: Callable[..., Any]) -> None:
    """Replaces a function by one that gets it first."""
    was = getattr(target, name)
    put(target, name, lambda *args, **options: change(was, *args, **options))


def build(optimizer: str = "adamw", micro_batches: int = 1) -> tuple[CausalLM, Tokens]:
    while _PLANTED:
        setattr(*_PLANTED.pop())
    config = {"model_type": "llama", **FAMILIES["llama"]}
    more: dict[str, Any] = {} if optimizer == "muon" else {"optimizer_args": {"eps": 1e-4}}
    return CausalLM(config=config, optimizer=optimizer, lr=1e-3, **more), Tokens(micro_batches)


def planted(name: str) -> Any:
    """Plants a fault, and returns its strategy: called on the ranks, after :func:`build`, and not in one process."""
    fault = FAULTS[name]
    fault.plant()
    return STRATEGIES[fault.strategy]()


# --- faults ----------------------------------------------------------------------------------------------------


def unsummed() -> None:
    put(ShardedModule, "reduce_partial", lambda self, gradients=None: None)


def summed_twice() -> None:
    wrap(ShardedModule, "reduce_partial", lambda was, *args: (was(*args), was(*args)))


def averaged_over_no_ranks() -> None:
    put(DataParallelStrategy, "separates", True)  # As DiLoCo asks for, whose copies train apart.


def scaled_by_the_group() -> None:
    wrap(MeshEngine, "reduce_gradients", lambda was, self: (was(self), double(self.sharded.parameters.values())))


def double(parameters: Any) -> None:
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(2)


def own_shards_norm() -> None:
    put(OptimizerShards, "gradient_norm", lambda self, optimizer: total_norm(collect_gradients(optimizer)))


def muon_off() -> None:
    def configure(was: Any, self: Any) -> Any:
        found = was(self)
        for group in (found["optimizer"] if isinstance(found, dict) else found).param_groups:
            group["use_fallback"] = True  # AdamW, which timm's Muon has for vectors and the head.
        return found

    wrap(CausalLM, "configure_optimizers", configure)


def update_of_each_micro_batch() -> None:
    def normalise(self: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(parameter.grad.norm() + 1e-12)

    put(CausalLM, "on_after_backward", normalise)


def slope_of_own_vocabulary() -> None:
    def losses(was: Any, values: Tensor, *args: Any) -> Any:
        found, _, log_total = was(values, *args)
        return found, values.sum(dim=1, keepdim=True), log_total

    wrap(vocabulary_loss, "exp_and_losses", losses)


def bf16_weights() -> None:
    def configure(was: Any, self: Any) -> None:
        was(self)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(parameter.bfloat16())

    wrap(CausalLM, "configure_model", configure)


def no_gradients_on_rank_1() -> None:
    def after(was: Any, self: Any, automatic: bool) -> None:
        was(self, automatic)
        for tensor in self.shares[0].local_params.values() if dist.get_rank() == 1 else ():
            tensor.grad = None if tensor.grad is None else torch.zeros_like(tensor.grad)

    wrap(ZeroEngine, "after_backward", after)


class Fault(NamedTuple):
    """Fault that was shipped, and what finds it.

    Attributes:
        shipped: Issue.
        plant: Function that plants it in this process.
        strategy: Strategy under which it is planted.
        says: Pattern in the report.
        options: Options of the trainer, and arguments of :func:`build`.
        rtol: Tolerance.
    """

    shipped: str
    plant: Callable[[], None]
    strategy: str
    says: str
    options: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    rtol: float = 1e-5


ALL, NORMS = "after the first step, all 21 parameters differ", r"after the first step, model.*layernorm.weight differ"
ACCUMULATED = {"accumulate_grad_batches": 2}, {"micro_batches": 2}
MEGATRON, AUTOMODEL = "Megatron #7452", "AutoModel #3816, #577, #3817"
FAULTS = {
    "a gradient that ranks have parts of is not summed": Fault(MEGATRON, unsummed, "sp", NORMS),
    "it is summed twice": Fault(MEGATRON, summed_twice, "sp", NORMS),
    "gradients are averaged over no ranks": Fault(MEGATRON, averaged_over_no_ranks, "ddp", ALL),
    "gradients are scaled by a group's size": Fault(MEGATRON, scaled_by_the_group, "cp", ALL),
    "a rank's shards get no gradients": Fault(
        MEGATRON, no_gradients_on_rank_1, "zero2", "after the first step, the parameters that rank 1 steps differ"
    ),
    "Muon's matrices are stepped by AdamW": Fault(
        "DeepSpeed #8438", muon_off, "zero1", "after the first step, ", ({}, {"optimizer": "muon"}), 2**-7
    ),
    "each micro-batch is an update": Fault("DeepSpeed #8600", update_of_each_micro_batch, "ddp", ALL, ACCUMULATED),
    "clipping by a norm over one axis": Fault(AUTOMODEL, own_shards_norm, "sp", ALL, ({"gradient_clip_val": 0.05}, {})),
    "the gradient of a split vocabulary": Fault("pytorch #190746", slope_of_own_vocabulary, "tp", ALL),
    "weights come in bf16 for fp32": Fault("NeMo-RL #3842", bf16_weights, "fsdp", "weights differ before the first"),
}
ORDINARY = ["a rank's shards get no gradients", "weights come in bf16 for fp32"]


@pytest.mark.parametrize("names", [pytest.param(ORDINARY), pytest.param([*FAULTS], marks=pytest.mark.slow)])
def test_parity_finds_what_others_have_shipped(names: list[str]) -> None:
    for rtol in {FAULTS[name].rtol for name in names}:
        faults = {name: FAULTS[name] for name in names if FAULTS[name].rtol == rtol}
        cases = [Case(partial(planted, name), f.options[1], f.options[0], name) for name, f in faults.items()]
        cases += [Case(STRATEGIES[f.strategy], f.options[1], f.options[0]) for f in faults.values()]
        found = compare_cases(build, cases, steps=3, control=False, rtol=rtol)
        for (name, fault), faulty, clean in zip(faults.items(), found, found[len(faults) :], strict=False):
            assert clean.ok, report(clean)
            assert not faulty.ok, name
            assert re.search(fault.says, report(faulty)), report(faulty)
