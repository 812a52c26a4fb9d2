"""The transformer of "A plan": a model of the reader's own is one process's on each axis, and its config runs."""

import importlib
import re
import shutil
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("own_transformer_test")


def test_it_trains_under_pp_and_tp_as_one_process(example: ModuleType) -> None:
    axes = [{"pp": 2, "micro_batches": 4}, {"tp": 2, "sequence_parallel": True}]
    example.assert_parity(example.build, [example.on_mesh(**one) for one in axes], world_size=2, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["test_one_axis", "test_two_axes", "test_four_axes"])
def test_it_trains_on_axes_as_one_process(example: ModuleType, name: str) -> None:
    getattr(example, name)()


@pytest.mark.slow
def test_its_config_trains_on_two_axes(tmp_path: Path, dlo) -> None:
    for file in EXAMPLES.glob("own_transformer.*"):
        shutil.copy(file, tmp_path)
    few = ["--trainer.max_epochs", "1", "--trainer.limit_train_batches", "12", "--trainer.limit_val_batches", "2"]
    done = dlo("fit", "--config", "own_transformer.yaml", *few)
    (loss,) = re.findall(r"best val_loss\s+([\d.]+)", done.stdout)
    assert float(loss) < 4.0  # 5.5 before it has learnt anything.
