"""ImageFolderData: folders and shards, local and remote, corrupt images, bad layouts, and the pixels of a model."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torchvision import transforms
from torchvision.datasets import ImageFolder

from dlo_framework.data import VOID, Draw
from dlo_framework.data.remote import BlockCache, LocalFile, Storage
from dlo_framework.errors import DloError
from dlo_tasks.imagenet.decode import CorruptImageError
from dlo_tasks.imagenet.folder import ImageFolderData
from dlo_tasks.imagenet.image_sources import ShardSource, build_index
from support.token_files import write_tar

PHOTOS = load_sample_images().images
CLASSES = ["china", "flower"]


def jpeg(number: int) -> bytes:
    photo = PHOTOS[number % 2]
    buffer = io.BytesIO()
    Image.fromarray(photo[number : number + 120, 2 * number : 2 * number + 160]).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def write_folders(root: Path, count: int = 12) -> Path:
    for split in ("train", "val"):
        for number in range(count):
            path = root / split / CLASSES[number % 2] / f"{number:02d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg(number))
    return root


def data(root: Path, **kwargs) -> ImageFolderData:
    return ImageFolderData(str(root), **({"image_size": 32, "batch_size": 4, "num_workers": 0} | kwargs))


def assert_equal(one, other) -> None:
    """Asserts that two loaders have the same batches."""
    found = list(one), list(other)
    assert len(found[0]) > 1
    for (images, targets), (same, labels) in zip(*found, strict=True):
        assert images.dtype == torch.uint8
        assert torch.equal(images, same)
        assert torch.equal(targets, labels)


def batches(module: ImageFolderData, loader) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [module.on_after_batch_transfer(batch, 0) for batch in loader]


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("crop_pct", [0.875, 1.0])
def test_evaluation_is_torchvisions(tmp_path: Path, interpolation: str, crop_pct: float) -> None:
    module = data(write_folders(tmp_path), interpolation=interpolation, crop_pct=crop_pct, eval_image_size=56)
    mode = transforms.InterpolationMode(interpolation)
    reference = transforms.Compose(
        [
            transforms.Resize(int(56 / crop_pct), interpolation=mode),
            transforms.CenterCrop(56),
            transforms.ToTensor(),
            transforms.Normalize(module.mean, module.std),
        ]
    )
    expected = ImageFolder(str(tmp_path / "val"), reference)
    images, targets = (torch.cat(part) for part in zip(*batches(module, module.val_dataloader()), strict=True))
    assert images.shape == (12, 3, 56, 56)
    assert images.dtype == torch.float32
    assert targets.tolist() == [label for _, label in expected.samples]
    level = 1 / 255 / 0.224
    for image, (other, _) in zip(images, expected, strict=True):
        assert (image - other).abs().max() < (3 if interpolation == "bilinear" else 12) * level
        assert (image - other).abs().mean() < 0.3 * level


def test_the_same_training_batches_with_any_number_of_workers(tmp_path: Path) -> None:
    folders = write_folders(tmp_path)
    options = {"rand_augment": "rand-m9-mstd0.5", "random_erase": 0.5, "erase_mode": "pixel", "color_jitter": 0.2}
    assert_equal(*(data(folders, num_workers=n, **options).train_dataloader() for n in (0, 2)))


def test_a_draw_s_size_is_obeyed_and_changes_no_random_choice(tmp_path: Path) -> None:
    """Crop, flip, RandAugment's operations and the erased box: at another size it is the same picture."""
    write_folders(tmp_path)
    options = {"rand_augment": "rand-m5-n1", "random_erase": 0.5, "color_jitter": 0.2}
    for given in ({}, options):
        loader = data(tmp_path, image_size=64, batch_size=12, **given).train_dataloader()
        draws = next(iter(loader.batch_sampler))
        own, targets = loader.dataset.fetch(draws)
        assert own.shape == (12, 3, 64, 64)
        for size in (32, 48, 96):
            other, same = loader.dataset.fetch([draw._replace(size=(size, size)) for draw in draws])
            assert other.shape == (12, 3, size, size)
            assert torch.equal(same, targets)
            back = torch.nn.functional.interpolate(other.float(), (64, 64), mode="bilinear", antialias=True)
            difference = (back - own.float()).abs().mean((1, 2, 3))
            assert difference.median() < 8, (size, difference)
            assert (back.roll(1, 0) - own.float()).abs().mean((1, 2, 3)).median() > 40


def test_repeated_augmentation_gives_different_views_of_one_image(tmp_path: Path) -> None:
    loader = data(write_folders(tmp_path), batch_size=6, repeated_augment=3).train_dataloader()
    draws = next(iter(loader.batch_sampler))
    images, _ = next(iter(loader))
    assert draws[0].index == draws[2].index
    assert not torch.equal(images[0], images[2])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_corrupt_image_is_named_and_the_run_stops(tmp_path: Path, workers: int) -> None:
    bad = write_folders(tmp_path) / "train" / "flower" / "03.jpg"
    bad.write_bytes(jpeg(3)[:2000])
    with pytest.raises(CorruptImageError) as caught:
        list(data(tmp_path, num_workers=workers).train_dataloader())
    assert str(caught.value) == f"corrupt image {bad} (index 7, rank 0): truncated; set on_corrupt=skip"


@pytest.mark.parametrize("workers", [0, 2])
def test_corrupt_images_are_replaced_the_same_way_and_counted(tmp_path: Path, workers: int) -> None:
    write_folders(tmp_path)
    for name in ("01", "03"):
        (tmp_path / "train" / "flower" / f"{name}.jpg").write_bytes(b"not a jpeg")
        (tmp_path / "val" / "flower" / f"{name}.jpg").write_bytes(jpeg(1)[:2000])
    module = data(tmp_path, on_corrupt="skip", num_workers=workers)
    assert module.corrupt_images == 0
    train = list(module.train_dataloader())
    count = module.corrupt_images
    assert count >= 2
    targets = torch.cat([targets for _, targets in train])
    assert len(targets) == 12
    assert VOID not in targets
    reference = data(tmp_path, on_corrupt="skip")
    for (images, _), (others, _) in zip(train, reference.train_dataloader(), strict=True):
        assert torch.equal(images, others)
    assert reference.corrupt_images == count
    evaluated = torch.cat([targets for _, targets in module.val_dataloader()])
    assert evaluated.tolist() == [0] * 6 + [1] * 4
    assert module.corrupt_images == count + 2


def test_a_batch_of_corrupt_images_alone_counts_for_nothing(tmp_path: Path) -> None:
    write_folders(tmp_path, count=3)
    (tmp_path / "val" / "flower" / "01.jpg").write_bytes(b"")
    module = data(tmp_path, on_corrupt="skip", eval_batch_size=2)
    (first, samples) = module.val_dataloader().dataset.fetch([Draw(2, 0, True), Draw(0, 0, True)])
    assert (samples, first[1].tolist()) == (1, [0])
    (black, targets), samples = module.val_dataloader().dataset.fetch([Draw(2, 0, True)])
    assert (samples, targets.tolist(), int(black.max())) == (0, [0], 0)
    assert [len(targets) for _, targets in module.val_dataloader()] == [2]


def test_a_dataset_of_corrupt_images_only_ends(tmp_path: Path) -> None:
    write_folders(tmp_path)
    for path in (tmp_path / "train").rglob("*.jpg"):
        path.write_bytes(b"")
    with pytest.raises(DloError, match="got 100 corrupt ones in a row"):
        list(data(tmp_path, on_corrupt="skip").train_dataloader())


@pytest.mark.parametrize("channels_last", [True, False])
def test_normalising_is_exact_and_leaves_targets_and_floats_alone(tmp_path: Path, channels_last: bool) -> None:
    module = data(tmp_path, channels_last=channels_last)
    images = torch.randint(0, 256, (5, 3, 9, 7), dtype=torch.uint8)
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (module.mean, module.std))
    targets = torch.tensor([0, 1, VOID, 2, 3])
    for given in (images, images.contiguous(memory_format=torch.channels_last)):
        normalised, same = module.on_after_batch_transfer((given, targets), 0)
        torch.testing.assert_close(normalised, (images / 255 - mean) / std, atol=2e-6, rtol=0)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        assert normalised.is_contiguous(memory_format=layout)
        assert same is targets
    floats = torch.rand(1, 3, 4, 4)
    assert module.on_after_batch_transfer((floats, targets), 0)[0] is floats


def test_bad_layouts_are_named_before_a_run_starts(tmp_path: Path) -> None:
    module = data(write_folders(tmp_path))
    module.check()
    assert (module.num_classes, module.class_names) == (2, CLASSES)
    with pytest.raises(DloError, match=r"batch_size must be at most 12, .* got 64; set batch_size to at most 12"):
        data(tmp_path, batch_size=64).check()
    train = r"root must have train/<class>/.*, got .* without train/; rename .*/training to train,"
    for old, new, message in (
        ("train", "training", train),
        ("val/flower", "val/flowers", "only the classes of train/, got flowers"),
        ("val", "validation", r"no such folder: .*/val; expected"),
        ("train/flower/01.jpg", "train/zebra/notes.txt", r"got the empty folder .*/train/zebra"),
        ("train", "old/train", "train has no class folders"),
        ("", "../other", "root must be a folder with train/ and val/"),
    ):
        root = write_folders(tmp_path / "images" / new.replace("/", ""))
        (root / new).parent.mkdir(exist_ok=True)
        (root / old).rename(root / new)
        if new == "old/train":
            (root / "train").mkdir()
        with pytest.raises(DloError, match=message):
            data(root).check()


def open_shard(path: Path, indices: Path) -> ShardSource:
    return ShardSource([str(path)], Storage(BlockCache(indices, 10**9), indices, {}), None)


def test_an_index_is_read_from_its_file_until_the_tar_changes(tmp_path: Path) -> None:
    path, indices = tmp_path / "train-0.tar", tmp_path / "indices"
    write_tar(path, [("a.jpg", jpeg(0)), ("a.cls", b"1")])
    assert open_shard(path, indices).name(0) == f"{path}!a.jpg"
    (index,) = indices.glob("labels-*.npz")
    content = index.read_bytes()
    assert open_shard(path, indices).labels.tolist() == [1]
    assert index.read_bytes() == content
    index.write_bytes(b"garbage")
    assert open_shard(path, indices).labels.tolist() == [1]
    write_tar(path, [("b.jpg", jpeg(1)), ("b.cls", b"0"), ("c.jpg", jpeg(2)), ("c.cls", b"2")])
    changed = open_shard(path, indices)
    assert changed.labels.tolist() == [0, 2]
    assert (changed.read(1), changed.read(0)) == (jpeg(2), jpeg(1))
    assert changed.name(1) == f"{path}!c.jpg"
    assert list(tmp_path.glob("*.npz")) == []


def test_a_hostile_tar_reaches_no_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret.jpg"
    secret.write_bytes(jpeg(5))
    path = tmp_path / "train-0.tar"
    with tarfile.open(path, "w") as tar:
        for name, kind in (
            ("link.jpg", tarfile.SYMTYPE),
            ("hard.jpg", tarfile.LNKTYPE),
            ("pipe.jpg", tarfile.FIFOTYPE),
        ):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, str(secret)
            tar.addfile(member)
        member = tarfile.TarInfo("../../escape.jpg")
        member.size = len(jpeg(0))
        tar.addfile(member, io.BytesIO(jpeg(0)))
        label = tarfile.TarInfo("../../escape.cls")
        label.size = 1
        tar.addfile(label, io.BytesIO(b"0"))
    before = set(tmp_path.rglob("*"))
    index = build_index(LocalFile(path), None)
    assert index.names.tolist() == ["../../escape.jpg"]
    assert set(tmp_path.rglob("*")) == before
    assert not (tmp_path.parent.parent / "escape.jpg").exists()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.jpg", b"x")], "'a.jpg' must have a label, got none; add a.cls"),
        ([("a.jpg", b"x"), ("a.cls", b"cat")], "must be a class index"),
        ([("a.jpg", b"x"), ("a.cls", b"-1")], "0 or more"),
        ([("a.jpg", b"x"), ("a.cls", b" " * 70_000)], "at most 64 KiB"),
    ],
)
def test_shards_with_bad_labels_are_refused(tmp_path: Path, members: list, message: str) -> None:
    write_tar(tmp_path / "train-0.tar", members)
    with pytest.raises(DloError, match=message):
        build_index(LocalFile(tmp_path / "train-0.tar"), None)


def test_broken_tars_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "train-0.tar"
    path.write_bytes(np.random.default_rng(0).bytes(5000))
    with pytest.raises(DloError, match="must be a readable, uncompressed tar"):
        build_index(LocalFile(path), None)
    write_tar(path, [("a.cls", b"0"), ("a.jpg", jpeg(0) * 4)])
    path.write_bytes(path.read_bytes()[:4096])
    with pytest.raises(DloError, match=r"got a truncated file|must be a readable"):
        build_index(LocalFile(path), None)


# --- images in local and remote tar shards: the batches of the same images in folders; mixtures; refusals ------------


def write_shards(root: Path, folders: Path) -> str:
    """Writes the images of folders as tars."""
    root.mkdir()
    for split in ("train", "val"):
        images = [(path.read_bytes(), CLASSES.index(path.parent.name)) for path in sorted(folders.glob(f"{split}/*/*"))]
        for first in range(0, len(images), 10):
            members = []
            for number, (content, label) in enumerate(images[first : first + 10]):
                described = json.dumps({"label": label}).encode()
                members += [(f"{number:04}.jpg", content), (f"{number:04}.json", described)]
            write_tar(root / f"{split}-{first:03}.tar", members)
    return str(root)


@pytest.mark.parametrize("remote", [False, True])
def test_shards_give_the_batches_of_folders(remote: bool, tmp_path: Path) -> None:
    options = {"cache_dir": str(tmp_path / "cache")}
    folders = data(write_folders(tmp_path / "folders"))
    root = write_shards(tmp_path / "shards", tmp_path / "folders")
    memory = fsspec.filesystem("memory")
    if remote:
        memory.put(root, "/images", recursive=True)
        root = "memory://images/shards" if memory.exists("/images/shards") else "memory://images"
    shards = data(root, **options)
    shards.check()
    assert shards.num_classes == 2
    assert_equal(folders.train_dataloader(), shards.train_dataloader())
    assert_equal(folders.val_dataloader(), shards.val_dataloader())
    assert_equal(folders.test_dataloader(), data(root, num_workers=1, **options).test_dataloader())
    buffered = data(root, shuffle="buffer", shuffle_chunk=4, shuffle_buffer=8, **options).train_dataloader()
    assert torch.bincount(torch.cat([targets for _, targets in buffered])).tolist() == [6, 6]
    if remote:
        memory.rm("/images", recursive=True)


def test_a_mixture_of_roots_has_its_weights_and_its_epochs(tmp_path: Path) -> None:
    second = write_folders(tmp_path / "second")
    sources = {"clean": write_shards(tmp_path / "first", second), "web": str(second)}
    options = {"mix": {"clean": 3, "web": 1}, "epoch_samples": 48, "cache_dir": str(tmp_path / "cache")}
    module = data(second, sources=sources, **options)
    module.check()
    loader = module.train_dataloader()
    index = np.array([draw.index for batch in loader.sampler for draw in batch])
    assert np.bincount(index).tolist() == [3] * 12 + [1] * 12
    assert len(list(loader)) == 12


def test_wrong_shards_are_refused(tmp_path):
    for name, kind in (("train-0.parquet", "parquet"), ("train/shard.00000.mds", "mds")):
        root = tmp_path / kind
        (root / "train").mkdir(parents=True)
        (root / name).write_bytes(b"x")
        memory = fsspec.filesystem("memory")
        memory.pipe_file(f"/{kind}/{name}", b"x")
        for place in (str(root), f"memory://{kind}"):
            with pytest.raises(DloError, match=rf"got \.{kind} in .*; removed in 0.2: write .* WebDataset"):
                data(place).check()
        memory.rm(f"/{kind}", recursive=True)
    write_tar(tmp_path / "train-0.tar", [("a.jpg", b""), ("a.cls", b"-1")])
    memory.put(str(tmp_path / "train-0.tar"), "/wrong/train-0.tar")
    with pytest.raises(DloError, match="the label must be 0 or more"):
        data("memory://wrong", cache_dir=str(tmp_path / "cache")).check()
    memory.rm("/wrong", recursive=True)
    with pytest.raises(DloError, match="root must have train"):
        data("memory://nothing-here").check()
