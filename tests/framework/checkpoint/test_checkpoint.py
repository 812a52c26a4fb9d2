import os
import resource
import signal

import pytest
import torch

from dlo_framework.checkpoint import SafeCheckpointIO, loading, recover
from dlo_framework.checkpoint.loading import refuse_unsafe
from dlo_framework.errors import DloError

RUN = {"state_dict": {}, "pytorch-lightning_version": "2.6.6"}


class Bomb:
    """Runs a command where it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self):
        return os.system, (self.command,)


def test_a_write_that_fails_leaves_the_previous_checkpoint(tmp_path):
    """The file size limit takes the part of a disk that fills in the middle of a write."""
    path = tmp_path / "last.ckpt"
    SafeCheckpointIO().save_checkpoint(RUN | {"x": torch.zeros(10)}, path)
    ended, said = os.pipe()
    if not (process := os.fork()):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            SafeCheckpointIO().save_checkpoint({"x": torch.zeros(100_000)}, path)
        except BaseException as error:
            os.write(said, str(error).encode())
        os._exit(0)
    os.close(said)
    message = os.read(ended, 10_000).decode()
    assert "previous last.ckpt intact" in message or "File too large" in message
    os.waitpid(process, 0)
    assert SafeCheckpointIO().load_checkpoint(path)["x"].shape == (10,)
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


def test_a_checkpoint_larger_than_the_disk_is_refused_before_it_is_written(tmp_path, monkeypatch):
    monkeypatch.setattr(loading, "free_bytes", lambda folder: 1000)
    with pytest.raises(DloError, match=r"need 4\.0 kB, 1\.0 kB free in .*; no earlier checkpoint there"):
        SafeCheckpointIO().save_checkpoint({"x": torch.zeros(1000)}, tmp_path / "last.ckpt")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("legacy", [False, True])
def test_a_pickle_bomb_is_refused_and_not_executed(tmp_path, legacy):
    path, proof = tmp_path / "bomb.ckpt", tmp_path / "executed"
    torch.save({"state_dict": Bomb(f"touch {proof}")}, path, _use_new_zipfile_serialization=not legacy)
    for read in (refuse_unsafe, SafeCheckpointIO().load_checkpoint):
        message = r"refusing .*bomb\.ckpt: pickle global \w+\.system not allowed; nothing executed"
        with pytest.raises(DloError, match=message):
            read(path)
    assert not proof.exists()


def test_what_a_killed_save_left_is_removed(tmp_path):
    (tmp_path / "last.ckpt.dlo-partial").write_bytes(b"half")
    (tmp_path / "last.ckpt").write_bytes(b"whole")
    recover(tmp_path)
    assert [file.name for file in tmp_path.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("content", [[1, 2], {"state_dict": {}}])
def test_a_file_that_is_no_checkpoint_of_a_run_is_refused(tmp_path, content):
    torch.save(content, tmp_path / "other.pt")
    with pytest.raises(DloError, match=r"other\.pt is not a checkpoint of a run"):
        SafeCheckpointIO().load_checkpoint(tmp_path / "other.pt")


def test_noise_and_folders_are_refused_in_one_sentence(tmp_path):
    (tmp_path / "noise.ckpt").write_bytes(bytes(range(256)) * 40)
    with pytest.raises(
        DloError, match=r"noise\.ckpt \(10\.2 kB\): it is damaged, truncated, or not a checkpoint"
    ) as caught:
        refuse_unsafe(tmp_path / "noise.ckpt")
    assert "weights_only" not in str(caught.value)
    with pytest.raises(DloError, match="a checkpoint must be a file, or hold a manifest, got"):
        refuse_unsafe(tmp_path)
