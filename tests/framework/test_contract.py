"""What the framework asks of a strategy is declared in one place, and asked of nobody behind its back."""

import ast
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy
from torch import nn

from dlo_framework.distributed.strategy import SingleProcessStrategy
from dlo_framework.strategy_contract import ForeignStrategy, StrategyContract, contract_of

ROOT = Path(__file__).resolve().parents[2]


def questions_behind_its_back(source: str) -> list[str]:
    """Returns the calls of ``getattr`` and ``hasattr`` on a strategy that name an attribute."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in ("getattr", "hasattr") or len(node.args) < 2:
            continue
        asked, name = ast.unparse(node.args[0]), node.args[1]
        of_strategy = asked.rpartition(".")[2].strip("_") == "strategy" or asked == "_strategy_of(self)"
        if of_strategy and isinstance(name, ast.Constant) and not str(name.value).startswith("__"):
            found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def test_no_strategy_is_asked_by_getattr() -> None:
    found = {}
    for folder in ("dlo_framework", "plugins/dlo_plugins", "tasks/dlo_tasks"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name != "strategy_contract.py" and (asked := questions_behind_its_back(path.read_text())):
                found[path.relative_to(ROOT).as_posix()] = asked
    assert found == {}
    seen = questions_behind_its_back("getattr(trainer.strategy, 'refresh', None)\nhasattr(strategy, 'describe')\n")
    assert len(seen) == 2


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
    contract.check_predict(module)
    assert contract.data_share() == (0, 1)
    assert contract.data_group is None
    assert contract.full_size("layer.weight", module.layer.weight) == 6
    assert contract.describe(module) is None
    assert not contract.is_saving
    assert not contract.forward_needs_all_ranks
    assert not contract.watch_losses(lambda loss: None)
    with contract.full_sequences():
        pass


def test_a_foreign_strategy_is_wrapped_once_and_let_go_with_it() -> None:
    strategy = DDPStrategy()
    contract = contract_of(strategy)
    assert isinstance(contract, ForeignStrategy)
    assert contract_of(strategy) is contract
    assert contract.strategy is strategy
    assert contract.zero_stage is None
    assert contract.collective_timeout == strategy._timeout
    del strategy
    with pytest.raises(AssertionError, match="is gone"):
        contract.local_tensors()


def test_each_question_has_a_docstring_or_a_comment() -> None:
    lines = Path(ROOT / "dlo_framework" / "strategy_contract.py").read_text().splitlines()
    for name in (name for name in vars(StrategyContract) if not name.startswith("_")):
        member = vars(StrategyContract)[name]
        if callable(member) or isinstance(member, property):
            assert member.__doc__, name
        else:
            (line,) = (number for number, text in enumerate(lines) if text.startswith(f"    {name}"))
            assert lines[line - 1].strip().startswith("#:"), name
