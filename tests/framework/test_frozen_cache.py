"""The cache of a second model's outputs: keys, records, several processes, kills."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from dlo_framework.errors import DloError
from dlo_framework.frozen_cache import SEGMENT, OutputCache, join_samples, sample_keys, split_samples

MODEL = {"weights": "abc", "dtype": "float32"}


def test_keys_are_those_of_the_content_alone() -> None:
    torch.manual_seed(0)
    images, ids = torch.randn(6, 3, 5), torch.randint(99, (6, 7))
    keys = sample_keys(((images,), {"ids": ids, "mask": None}))
    assert len(set(keys)) == 6
    order = torch.tensor([3, 1, 5])
    assert sample_keys(((images[order],), {"ids": ids[order], "mask": None})) == [keys[n] for n in order]
    assert sample_keys(((images.transpose(1, 2).contiguous().transpose(1, 2),), {"ids": ids, "mask": None})) == keys
    for number in range(images[0].numel()):  # One bit of any value, in the last place, makes another key.
        changed = images.clone()
        changed.view(torch.int32).view(6, -1)[0, number] ^= 1
        assert sample_keys(((changed,), {"ids": ids, "mask": None}))[0] != keys[0]
    swapped = images.clone()
    swapped.view(6, -1)[0, :2] = swapped.view(6, -1)[0, :2].flip(0)
    assert sample_keys(((swapped,), {"ids": ids, "mask": None}))[0] != keys[0]
    assert sample_keys(images.view(6, 5, 3)) != sample_keys(images)
    assert sample_keys(images, "cp 0 of 2") != sample_keys(images)
    assert sample_keys(ids.to(torch.int32)) != sample_keys(ids)


def test_keys_are_stored_for_years() -> None:
    """Another formula would make every cache on disk useless."""
    keys = sample_keys(torch.arange(10).view(2, 5))
    assert [key.hex() for key in keys] == KNOWN


KNOWN = ["0834c91b929a862b8731886c513e62ff", "4d84877fd4271876a989c86041066056"]


@pytest.mark.parametrize("inputs", [(torch.ones(3, 2), torch.tensor(1.0)), (torch.ones(3, 2), torch.ones(2)), "text"])
def test_inputs_without_samples_are_refused(inputs: Any) -> None:
    with pytest.raises(DloError, match="must be tensors with an entry for each of"):
        sample_keys(inputs)


@pytest.mark.parametrize(
    "outputs",
    [
        torch.randn(4, 3),
        (torch.randn(4, 3, dtype=torch.bfloat16), {"a": torch.arange(4), "b": [torch.randn(4, 0), torch.randn(4) > 0]}),
    ],
)
def test_outputs_come_back_as_they_were(tmp_path: Path, outputs: Any) -> None:
    cache = OutputCache(tmp_path, MODEL)
    keys = sample_keys(torch.arange(4))
    for key, sample in zip(keys, split_samples(outputs, 4), strict=True):
        cache.write(key, sample)
    cache.close()
    again = OutputCache(tmp_path, MODEL)
    found = join_samples([again.read(key) for key in keys], torch.device("cpu"))
    torch.testing.assert_close(found, outputs, rtol=0, atol=0)


def test_outputs_without_samples_are_refused() -> None:
    with pytest.raises(DloError, match=r"got a tensor of shape \[\]; leave cache out"):
        list(split_samples((torch.ones(3, 2), torch.tensor(1.0)), 3))


def _write(folder: Path, first: int, count: int) -> None:
    cache = OutputCache(folder, MODEL)
    for number in range(first, first + count):
        cache.write(sample_keys(torch.tensor([number]))[0], torch.full((50,), float(number)))


def test_processes_write_at_once_and_read_each_others(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_write, args=(tmp_path, 100 * number, 150)) for number in range(3)]
    reader = OutputCache(tmp_path, MODEL)
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        reader.refresh()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    reader.refresh()
    assert len(reader) == 350  # The samples of two neighbours overlap, and are stored once for a reader.
    for number in range(350):
        assert reader.read(sample_keys(torch.tensor([number]))[0]).tolist() == [number] * 50


def _write_until_killed(folder: Path) -> None:
    _write(folder, 0, 10**9)


def test_what_a_kill_has_cut_off_is_computed_again(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writer = context.Process(target=_write_until_killed, args=(tmp_path,))
    writer.start()
    while len(OutputCache(tmp_path, MODEL)) < 20:
        pass
    os.kill(writer.pid or 0, signal.SIGKILL)
    writer.join()
    segment = next(tmp_path.glob(f"*{SEGMENT}"))
    for cut in (1, 3, 60, 200):  # Also inside a record's start, its header and its values.
        os.truncate(segment, segment.stat().st_size - cut)
        found = OutputCache(tmp_path, MODEL)
        complete = len(found)
        for number in range(complete):
            assert found.read(sample_keys(torch.tensor([number]))[0]).tolist() == [number] * 50
        assert sample_keys(torch.tensor([complete]))[0] not in found
    found.write(sample_keys(torch.tensor([complete]))[0], torch.full((50,), float(complete)))
    assert len(OutputCache(tmp_path, MODEL)) == complete + 1


def test_a_damaged_record_is_a_miss(tmp_path: Path) -> None:
    _write(tmp_path, 0, 3)
    segment = next(tmp_path.glob(f"*{SEGMENT}"))
    content = bytearray(segment.read_bytes())
    content[len(content) // 2] ^= 1
    segment.write_bytes(content)
    cache = OutputCache(tmp_path, MODEL)
    keys = [sample_keys(torch.tensor([number]))[0] for number in range(3)]
    found = [cache.read(key) for key in keys]
    assert [None if value is None else value[0].item() for value in found] == [0.0, None, 2.0]
    assert keys[1] not in cache


def test_another_model_is_refused(tmp_path: Path) -> None:
    OutputCache(tmp_path, MODEL)
    with pytest.raises(DloError, match=r"got .* of another \(dtype float32 instead of bfloat16\); choose another"):
        OutputCache(tmp_path, {**MODEL, "dtype": "bfloat16"})
    (tmp_path / "file").write_text("x")
    with pytest.raises(DloError, match="must be a folder that can be written"):
        OutputCache(tmp_path / "file", MODEL)
