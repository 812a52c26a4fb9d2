"""What ``dlo predict`` leaves in a file."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch.utils.data import DataLoader

from dlo_framework.errors import DloError
from dlo_framework.watch import predictions
from dlo_framework.watch.predictions import SavePredictions
from support.trainers import quiet_trainer


class Net(LightningModule):
    """Gives each batch back, of each sample as many numbers as the batch's number asks for."""

    def __init__(self, lengths: list[int]) -> None:
        super().__init__()
        self.lengths = lengths

    def predict_step(self, batch, batch_idx):
        return batch[:, None].expand(-1, self.lengths[batch_idx])


def predict(path, lengths: list[int]):
    trainer = quiet_trainer(
        enable_checkpointing=True,
        callbacks=[SavePredictions(path)],
    )
    trainer.predict(Net(lengths), DataLoader(torch.arange(5.0), batch_size=2), return_predictions=False)
    return torch.load(path, weights_only=True)


def test_batches_of_several_shapes_are_a_list(tmp_path):
    found = predict(tmp_path / "found.pt", [3, 1, 2])
    assert [batch.shape for batch in found] == [(2, 3), (2, 1), (1, 2)]
    assert torch.equal(torch.cat([batch[:, 0] for batch in found]), torch.arange(5.0))


def test_where_no_file_can_be_written_is_told_before_the_first_batch(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setattr(Net, "predict_step", lambda *_: pytest.fail("a batch was predicted"))
    with pytest.raises(DloError, match=r"cannot write the predictions .*file/found\.pt: .*--run\.dir"):
        predict(tmp_path / "file" / "found.pt", [1])


def test_ranks_outputs_pass_over_the_group_on_the_cpu(tmp_path, monkeypatch):
    group, passed = object(), []

    def gather_object(found, into, group):
        passed.append((found, group))
        into[:] = [(0, ["first"]), (1, ["second"])]

    monkeypatch.setattr(predictions, "control_group", lambda trainer: group)
    monkeypatch.setattr(dist, "get_world_size", lambda of: 2 if of is group else pytest.fail("another group"))
    monkeypatch.setattr(dist, "get_rank", lambda of: 0 if of is group else pytest.fail("another group"))
    monkeypatch.setattr(dist, "gather_object", gather_object)
    saving = SavePredictions(tmp_path / "found.pt")
    saving._batches = ["mine"]
    strategy = SingleDeviceStrategy()
    trainer = SimpleNamespace(strategy=strategy, is_global_zero=True, global_rank=0, predict_dataloaders=[])
    saving.on_predict_end(trainer, None)
    assert passed == [((0, ["mine"]), group)]
    assert torch.load(saving.path, weights_only=True) == ["first", "second"]


@pytest.mark.parametrize("size", [7, 8])
@pytest.mark.parametrize("width", [1, 2])
def test_what_a_distributed_sampler_has_dealt_comes_in_the_order_of_the_data(tmp_path, monkeypatch, size, width):
    """Lightning's sampler for predictions gives each of three ranks every third sample, and repeats none."""
    dealt = [torch.arange(float(size))[rank::3] for rank in range(3)]
    shares = [[part[:, None].expand(-1, width) for part in samples.split(2)] for samples in dealt]
    monkeypatch.setattr(predictions, "gather_batches", lambda *_: shares)
    loader = DataLoader(range(size), sampler=UnrepeatedDistributedSampler(range(size), num_replicas=3, rank=0))
    trainer = SimpleNamespace(
        predict_dataloaders=loader, is_global_zero=True, strategy=SingleDeviceStrategy(), global_rank=0
    )
    monkeypatch.setattr(predictions, "control_group", lambda _: None)
    SavePredictions(tmp_path / "found.pt").on_predict_end(trainer, None)
    found = torch.load(tmp_path / "found.pt", weights_only=True)
    assert torch.equal(found, torch.arange(float(size))[:, None].expand(-1, width))
    shares[0][0] = shares[0][0][:, :1].expand(-1, width + 1)
    with pytest.warns(UserWarning, match="are not in the order of the data: a DistributedSampler gave 3 ranks"):
        SavePredictions(tmp_path / "found.pt").on_predict_end(trainer, None)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="a device that is always full is Linux's")
def test_what_cannot_be_written_whole_leaves_what_was_there(tmp_path, monkeypatch):
    path = tmp_path / "found.pt"
    predict(path, [3, 3, 3])
    before, save = path.read_bytes(), torch.save

    def on_a_full_disk(found, partial):
        Path(partial).write_bytes(b"some")
        save(found, "/dev/full")

    monkeypatch.setattr(torch, "save", on_a_full_disk)
    with pytest.raises(DloError, match=r"cannot write the predictions .*found\.pt: .*; free some space, or set"):
        predict(path, [2, 2, 2])
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
