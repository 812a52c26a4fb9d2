"""A strategy and callbacks that dlo has never heard of: what they declare is all that features ask of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor

from dlo_framework.callback import PluginCallback
from dlo_framework.distributed.strategy import SingleProcessStrategy
from dlo_framework.errors import DloError
from dlo_framework.strategy_abilities import Replicas, StepsInBackward
from dlo_framework.strategy_contract import StrategyContract
from dlo_framework.testing import run_distributed
from dlo_plugins.compression.diloco import DiLoCo
from dlo_plugins.memory.optimizer_in_backward import OptimizerInBackward
from dlo_tasks.imagenet.digits import DigitsData
from support.fsdp_nets import trainer
from support.plain_nets import Plain
from support.trainers import quiet_trainer


class Averaging(StrategyContract, Replicas, StepsInBackward, DDPStrategy):
    """Averages each gradient when it is complete, without torch's wrapper."""

    ready: Callable[[list[Tensor]], None] | None = None

    def configure_ddp(self) -> None:
        for parameter in self.lightning_module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._complete)

    def _complete(self, parameter: Tensor) -> None:
        if not self.separates:
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.world_size
        if self.ready is not None:
            self.ready([parameter])

    def watch_gradients(self, ready: Callable[[list[Tensor]], None] | None) -> None:
        self.ready = ready


CASES: dict[str, tuple[Callable[[], Any], Callable[[], list[Any]]]] = {
    "ddp": (lambda: "ddp", list),
    "alone": (Averaging, list),
    "DiLoCo": (Averaging, lambda: [DiLoCo(period=1, outer_lr=1.0, outer_momentum=0.0)]),
    "OptimizerInBackward": (Averaging, lambda: [OptimizerInBackward()]),
}


def _weights(rank: int, world_size: int) -> dict[str, dict[str, Tensor]]:
    found = {}
    for name, (strategy, callbacks) in CASES.items():
        torch.manual_seed(4)
        module = Plain("sgd").double()
        run = trainer(world_size, strategy(), max_steps=5, callbacks=callbacks(), precision="64-true")
        run.fit(module, datamodule=DigitsData(image_size=16, batch_size=48))
        found[name] = {key: value.clone() for key, value in module.state_dict().items()}
    return found


def test_a_third_partys_strategy_with_two_abilities_serves_the_features_that_ask_for_them() -> None:
    for found in run_distributed(_weights, 2):
        first = Plain("sgd").double().state_dict()
        assert not torch.equal(found["ddp"]["head.weight"], first["head.weight"])
        torch.testing.assert_close(found, dict.fromkeys(CASES, found["ddp"]), rtol=1e-9, atol=1e-12)


class Judges(PluginCallback):
    needs_equal_copies = True

    def on_before_optimizer_step(self, *_: Any) -> None:
        """By this hook it needs gradients."""


@pytest.mark.parametrize("feature", [DiLoCo(), OptimizerInBackward()])
def test_a_third_partys_callback_is_told_by_its_traits(feature: PluginCallback) -> None:
    run = quiet_trainer(strategy=SingleProcessStrategy(), callbacks=[feature, Judges()])
    with pytest.raises(DloError, match=f"{type(feature).__name__}: .*Judges"):
        run.fit(Plain("sgd"), datamodule=DigitsData(image_size=16))
