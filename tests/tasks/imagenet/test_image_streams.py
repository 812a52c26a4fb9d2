"""Images in local and remote tar shards: the batches of the same images in folders; mixtures; refusals."""

from __future__ import annotations

import io
import json
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image

from dlo_framework.errors import DloError
from dlo_tasks.imagenet.folder import ImageFolderData
from support.token_files import write_tar


def jpeg(number: int) -> bytes:
    generator = np.random.default_rng(number)
    content = io.BytesIO()
    small = Image.fromarray(generator.integers(0, 256, (4, 5, 3), dtype=np.uint8))
    small.resize((40 + number, 36), Image.Resampling.BICUBIC).save(content, "jpeg", quality=95)
    return content.getvalue()


IMAGES = {split: [(jpeg(number + first), number % 3) for number in range(count)]
          for split, count, first in (("train", 24, 0), ("val", 9, 50))}  # fmt: skip


def write_folders(root: Path) -> str:
    for split, images in IMAGES.items():
        for number, (content, label) in enumerate(images):
            folder = root / split / str(label)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{number:03}.jpg").write_bytes(content)
    return str(root)


def ordered(split: str) -> list[tuple[bytes, int]]:
    """Returns the images in the order of class folders."""
    return sorted(IMAGES[split], key=lambda image: image[1])


def write(kind: str, root: Path) -> str:
    root.mkdir(exist_ok=True)
    if kind == "foreign webdataset":
        webdataset = pytest.importorskip("webdataset")
    for split in IMAGES:
        images = ordered(split)
        if kind == "foreign webdataset":
            with webdataset.ShardWriter(str(root / f"{split}-%03d.tar"), maxcount=10, verbose=0) as writer:
                for number, (content, label) in enumerate(images):
                    writer.write({"__key__": f"{number:04}", "jpg": content, "cls": label})
        else:
            for shard, first in enumerate(range(0, len(images), 10)):
                members = []
                for number, (content, label) in enumerate(images[first : first + 10]):
                    members += [
                        (f"{number:04}.jpg", content),
                        (f"{number:04}.json", json.dumps({"label": label}).encode()),
                    ]
                write_tar(root / f"{split}-{shard:03}.tar", members)
    return str(root)


def made(root: str, tmp_path: Path, **options) -> ImageFolderData:
    defaults = {"image_size": 16, "batch_size": 4, "num_workers": 0, "cache_dir": str(tmp_path / "cache")}
    return ImageFolderData(root, **defaults | options)


def batches(loader) -> list:
    return [(images, targets) for images, targets in loader]


def assert_equal(one, other) -> None:
    found = batches(one), batches(other)
    assert len(found[0]) == len(found[1]) > 1
    for (images, targets), (same, labels) in zip(*found, strict=True):
        assert torch.equal(images, same)
        assert torch.equal(targets, labels)


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("kind", ["tar", "foreign webdataset"])
def test_shards_give_the_batches_of_folders(kind, remote, tmp_path):
    folders = made(write_folders(tmp_path / "folders"), tmp_path)
    root = write(kind, tmp_path / "shards")
    memory = fsspec.filesystem("memory")
    if remote:
        memory.put(root, "/images", recursive=True)
        root = "memory://images/shards" if memory.exists("/images/shards") else "memory://images"
    shards = made(root, tmp_path)
    shards.check()
    assert shards.num_classes == 3
    assert_equal(folders.train_dataloader(), shards.train_dataloader())
    assert_equal(folders.val_dataloader(), shards.val_dataloader())
    assert_equal(folders.test_dataloader(), made(root, tmp_path, num_workers=1).test_dataloader())
    buffered = made(root, tmp_path, shuffle="buffer", shuffle_chunk=4, shuffle_buffer=12).train_dataloader()
    labels = torch.cat([targets for _, targets in batches(buffered)])
    assert torch.bincount(labels).tolist() == [8, 8, 8]
    if remote:
        memory.rm("/images", recursive=True)


def test_a_mixture_of_roots_has_its_weights_and_its_epochs(tmp_path):
    first, second = write("tar", tmp_path / "first"), write_folders(tmp_path / "second")
    data = made(second, tmp_path, sources={"clean": first, "web": second}, mix={"clean": 3, "web": 1}, epoch_samples=96)
    data.check()
    loader = data.train_dataloader()
    index = np.array([draw.index for batch in loader.sampler for draw in batch])
    assert (index < 24).sum() == 72
    assert np.bincount(index[index < 24]).tolist() == [3] * 24
    assert sorted(index[index >= 24] - 24) == list(range(24))
    assert len(batches(loader)) == 24


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mix": {"a": 1}}, "mix, mix_ramp and epoch_samples must be set with sources"),
        ({"sources": {}}, "sources must name at least one source"),
        ({"sources": {"a": "x"}, "mix": {"a": -1}}, "mix.a must be positive, got -1"),
        ({"shuffle": "buffer", "shuffle_buffer": 8}, "buffer must have at least one chunk of 64 samples, got 8"),
        ({"batches_ahead": -1}, "batches_ahead must be at least 0"),
    ],
)
def test_wrong_options_are_refused(options, message, tmp_path):
    with pytest.raises(DloError) as error:
        made("x", tmp_path, **options)
    assert message in str(error.value)


def test_wrong_shards_are_refused(tmp_path):
    for name, kind in (("train-0.parquet", "parquet"), ("train/shard.00000.mds", "mds")):
        root = tmp_path / kind
        (root / "train").mkdir(parents=True)
        (root / name).write_bytes(b"x")
        memory = fsspec.filesystem("memory")
        memory.pipe_file(f"/{kind}/{name}", b"x")
        for place in (str(root), f"memory://{kind}"):
            with pytest.raises(DloError, match=rf"got \.{kind} in .*; removed in 0.2: write .* WebDataset"):
                made(place, tmp_path).check()
        memory.rm(f"/{kind}", recursive=True)
    for label, message in ((b"-1", "the label must be 0 or more"), (None, "must have a label, got none; add a.cls")):
        write_tar(tmp_path / "train-0.tar", [("a.jpg", b""), *([("a.cls", label)] if label else [])])
        memory.put(str(tmp_path / "train-0.tar"), "/wrong/train-0.tar")
        with pytest.raises(DloError, match=message):
            made("memory://wrong", tmp_path / str(label)).check()
        memory.rm("/wrong", recursive=True)
    with pytest.raises(DloError, match="root must have train"):
        made("memory://nothing-here", tmp_path).check()
