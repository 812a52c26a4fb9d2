import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanAbsoluteError

from dlo_framework.data.description import DataDescription
from dlo_framework.errors import DloError
from dlo_framework.task import Task
from dlo_framework.task_abilities import CompileTarget, Distillable, Resizable, WeighsMicroBatches
from support.trainers import quiet_trainer


class Line(Task):
    """y = w x, with a mean that is known: batches of 4, 4 and 2 make averages of averages differ."""

    def __init__(self) -> None:
        super().__init__()
        self.builds = 0
        self.error = MeanAbsoluteError()

    def configure_model(self) -> None:
        if not self.has_model:
            self.builds += 1
            self.model = nn.Linear(1, 1, bias=False)
            nn.init.zeros_(self.model.weight)

    def loss(self, outputs, batch):
        return nn.functional.mse_loss(outputs, batch[1])

    def metrics(self, outputs, batch):
        self.error.update(outputs, batch[1])
        return {"error": self.error, "first": outputs.new_tensor(self.stage == "val")}

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.0)


def loader() -> DataLoader:
    y = torch.arange(10.0)[:, None]
    return DataLoader(TensorDataset(torch.ones(10, 1), y), batch_size=4)


def trainer(tmp_path, **options) -> Trainer:
    return quiet_trainer(default_root_dir=tmp_path, **options)


def test_it_fits_validates_tests_and_predicts_with_exact_means(tmp_path):
    task, run = Line(), trainer(tmp_path, max_epochs=1)
    run.fit(task, loader(), loader())
    # mean of y**2 and of |y| over ten samples, not over three batches
    assert run.callback_metrics["val_loss"].item() == pytest.approx(28.5)
    assert run.callback_metrics["val_error"].item() == pytest.approx(4.5)
    assert run.callback_metrics["val_first"].item() == 1.0
    assert task.builds == 1
    (found,) = run.test(task, loader(), verbose=False)
    assert found["test_error"] == pytest.approx(4.5)
    assert found["test_first"] == 0.0
    assert torch.cat(run.predict(task, loader())).shape == (10, 1)


def test_training_step_returns_the_loss_and_logs_nothing(tmp_path):
    task, run = Line(), trainer(tmp_path, max_epochs=1)
    run.fit(task, loader())
    assert not run.callback_metrics
    out = task.training_step(next(iter(loader())), 0)
    assert list(out) == ["loss"]
    assert out["loss"].item() == pytest.approx((0 + 1 + 4 + 9) / 4)


def test_inputs_of_tuples_dicts_and_bare_tensors():
    task, x = Line(), torch.ones(2)
    assert task.inputs((x, x))[0] == (x,)
    assert task.inputs(x) == ((x,), {})
    assert task.inputs({"x": x}) == ((), {"x": x})


def test_the_default_plan_is_found_or_refused():
    task = Line()
    task.configure_model()
    with pytest.raises(DloError, match=r"Task\.parallel_plan"):
        task.parallel_plan()
    task.model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    assert task.parallel_plan().blocks == ("0", "1")


def test_micro_batches_weigh_as_their_samples_whatever_their_targets():
    parts = [(torch.zeros(size, 1), -torch.ones(size, dtype=torch.long)) for size in (1, 3)]
    assert Line().ability(WeighsMicroBatches).micro_batch_weights(parts) == [1 / 4, 3 / 4]


def test_a_prediction_has_a_row_for_each_sample_whatever_its_target():
    task = Line()
    task.configure_model()
    x = torch.zeros(3, task.model.in_features)
    assert len(task.predict_step((x, torch.tensor([1, -1, 1])), 0)) == 3


def test_a_class_with_methods_of_an_ability_has_it_for_one_version():
    with pytest.warns(
        DeprecationWarning, match=r"Old has `called`, .* derive it from dlo_framework\.task_abilities\.Comp"
    ):

        class Old(Line):
            def called(self):
                return self.model.inner

    task = Old()
    task.model = nn.ModuleDict({"inner": nn.Linear(1, 1)})
    assert task.ability(CompileTarget).compile_target() is task.model["inner"]
    with pytest.raises(
        DloError, match="dlo prune does not support Old: it does not say how its model is built in other"
    ):
        task.ability(Resizable)
    assert task.ability(Distillable).class_count is None


def test_a_datamodule_is_asked_for_attributes_that_it_may_lack():
    class Digits(LightningDataModule):
        num_classes = 10

    assert DataDescription(Digits()).num_classes == 10
    assert DataDescription(None).seq_len is None
    with pytest.raises(AttributeError, match="no attribute 'classes' is declared by DataDescription"):
        _ = DataDescription(Digits()).classes
