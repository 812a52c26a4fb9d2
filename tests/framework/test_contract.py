"""What the framework asks of a strategy is declared in one place, and asked of nobody behind its back."""

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import nn

from dlo_framework.ability import Ability, HasAbilities
from dlo_framework.distributed.strategy import SingleProcessStrategy
from dlo_framework.errors import DloError
from dlo_framework.strategy_abilities import ArrangesRanks, Pipelined, Replicas, StepsInBackward, full_sequences
from dlo_framework.strategy_contract import ForeignStrategy, contract_of, data_share


def with_module(strategy: Strategy) -> tuple[Strategy, LightningModule]:
    module = LightningModule()
    module.layer = nn.Linear(2, 3)
    module.norm = nn.BatchNorm1d(3)
    strategy._lightning_module = module
    return strategy, module


@pytest.mark.parametrize("kind", [SingleDeviceStrategy, SingleProcessStrategy])
def test_lightnings_own_strategy_answers_as_dlos_does(kind: type[Strategy]) -> None:
    strategy, module = with_module(kind())
    contract = contract_of(strategy)
    assert contract is contract_of(strategy)
    held = contract.local_tensors()
    assert [id(t) for t in held] == [id(t) for t in [*module.parameters(), *module.buffers()]]
    module.layer.weight.grad = torch.ones(3, 2)
    gradients = contract.accumulated_gradients()
    assert list(gradients) == ["layer.weight"]
    module.layer.weight.grad = None
    if isinstance(contract, ForeignStrategy):  # dlo's read from checkpoints.
        contract.restore_gradients(gradients)
        assert torch.equal(module.layer.weight.grad, torch.ones(3, 2))
    contract.refresh()
    contract.finish_step()
    contract.check_model(module)
    assert data_share(strategy) == (0, 1)
    assert contract.data_group is None
    assert contract.full_size("layer.weight", module.layer.weight) == 6
    assert contract.find_ability(ArrangesRanks) is None
    assert not contract.forward_needs_all_ranks
    assert contract.find_ability(Replicas) is not None
    assert contract.find_ability(Pipelined) is None
    with full_sequences(contract):
        pass


class Copies(Ability):
    feature = "averaging"
    missing = "it has 1 copy; use ddp"

    def __init__(self, count: int = 2) -> None:
        self.count = count


class Owner(HasAbilities):
    def __init__(self, ranks: int) -> None:
        self.ranks = ranks

    def abilities(self) -> dict[type[Ability], Ability | str]:
        return {Copies: Copies(self.ranks) if self.ranks > 1 else "it has 1 rank; set devices: 2"}


class IsCopies(HasAbilities, Copies):
    pass


def test_an_ability_is_declared_or_refused_with_its_reason() -> None:
    assert Owner(3).ability(Copies).count == 3
    assert IsCopies().ability(Copies).count == 2
    with pytest.raises(DloError, match="averaging does not support Owner: it has 1 rank; set devices: 2"):
        Owner(1).ability(Copies)
    strategy = DDPStrategy()
    with pytest.raises(DloError, match="DiLoCo does not support DDPStrategy: it has 1 copy; use ddp"):
        contract_of(strategy).ability(Copies, "DiLoCo")
    assert contract_of(strategy).find_ability(Copies) is None


def test_lightnings_strategy_that_derives_from_an_ability_has_it() -> None:
    class Own(Copies, DDPStrategy):
        pass

    own = Own()
    assert contract_of(own).ability(Copies) is own


def test_an_ability_without_its_method_is_refused_when_the_strategy_is_made() -> None:
    class Forgetful(DDPStrategy, StepsInBackward):
        pass

    with pytest.raises(TypeError, match="watch_gradients"):
        Forgetful()
