"""Steps are weighted by the loaded samples, and undone without samples: in one process."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor

from dlo_framework.data import CountedBatch, Draw
from dlo_framework.data.evaluation import without_rows
from dlo_framework.errors import DloError
from support.evaluated import Kind, Mse, Plain, Samples, Whole, trainer

LEFT_OUT = {1, 4, 5}


class Holes(Whole):
    """Leaves some samples out: of the first batch of two one, of the third both."""

    def fetch(self, draws: list[Draw]) -> CountedBatch:
        kept = [draw for draw in draws if draw.index not in LEFT_OUT]
        return CountedBatch(super().fetch(kept or draws[:1]), len(kept))


def holes(module: type) -> tuple[Kind, Samples]:
    kind = Kind(module, lambda x, y, c: Holes(x, y))
    return kind, Samples(kind, samples=7, batch_size=2)


def squares(data: Samples) -> Tensor:
    task, dataset = Mse(), data.val_dataloader().dataset
    task.configure_model()
    outputs = task.model.eval()(dataset.x).detach()
    return (outputs - dataset.y).square().mean(1)[[i for i in range(7) if i not in LEFT_OUT]]


@pytest.mark.parametrize("module", [Mse, Plain])
def test_what_a_dataset_leaves_out_counts_for_nothing(module: type) -> None:
    kind, data = holes(module)
    run, made = trainer(1, "auto"), kind.module()
    run.validate(made, data, verbose=False)
    expected = squares(data)
    assert float(run.callback_metrics["val_loss"]) == pytest.approx(float(expected.mean()), rel=1e-5)
    if isinstance(made, Plain):
        assert float(run.callback_metrics["val_count"]) == len(expected)
        assert made.calls == 3
    parts = run.predict(made, data)
    assert [len(part) for part in parts] == [1, 2, 0, 1]
    assert not {"validation_step", "predict_step"} & vars(run.strategy).keys()


def test_loaders_in_parallel_are_refused_where_one_has_no_sample() -> None:
    kind, data = holes(Mse)

    class Two(Samples):
        def val_dataloader(self) -> CombinedLoader:
            return CombinedLoader([data.val_dataloader(), self._loader("other")], "max_size")

    both = Two(kind, samples=7, batch_size=2)
    data.trainer = run = trainer(1, "auto")

    class First(Mse):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch[0], batch_idx)

    with pytest.raises(DloError, match="validation_step must get one batch of one loader at a time"):
        run.validate(First(), both, verbose=False)


def test_a_prediction_of_no_samples_has_no_rows() -> None:
    one = torch.ones(1, 3)
    assert without_rows(one).shape == (0, 3)
    assert without_rows([{"text": "a"}]) == []
    assert {key: len(value) for key, value in without_rows({"a": one, "b": ["x"]}).items()} == {"a": 0, "b": 0}
    assert [len(part) for part in without_rows((one, one))] == [0, 0]
    for unknown in (torch.ones(3, 1), torch.ones(()), {"a": one, "b": 2}, (one, None), "text", None):
        assert without_rows(unknown) is None
