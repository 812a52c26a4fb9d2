"""How many training images per CPU-second the data path makes, beside torchvision's ImageFolder.

Both sides do the same work from files in class folders (500 x 400 JPEGs, cut from the two photographs that
ship with scikit-learn, so their contents are real; the files sit in the page cache): read, decode, random
resized crop to 224 with antialiasing, flip, normalise, collate into a float32 batch.

* ``imagefolder``: torchvision's ImageFolder and PIL loader, v1 transforms, ``DataLoader(num_workers=0)``.
* ``imagefolder again``: the same once more, the A/A control: how far its ratio is from 1 is the noise.
* ``v2 tensors``: torchvision's decoder and v2 transforms on uint8 tensors.
* ``dlo``: ImageFolderData's train loader and ``on_after_batch_transfer``.
* ``dlo, to uint8``: the same without normalising, which is what a worker does when an accelerator trains.

Images a CPU-second with one thread, over those of ``imagefolder``. Roofline: decoding alone.

Run: ``python benchmarks/data_path.py [--rounds 21] [--quality 90] [--images 128] [--workers 1 2]``
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from measuring.catalogue import parse_options
from measuring.record import Record, Table, cores
from measuring.rounds import ELAPSED, PROCESS, all_ratios, take_turns
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_image
from torchvision.transforms import v2

from dlo_tasks.imagenet.data_base import IMAGENET_MEAN, IMAGENET_STD
from dlo_tasks.imagenet.decode import Box, decode_crop, decoders
from dlo_tasks.imagenet.folder import ImageFolderData

HEIGHT, WIDTH, SIZE, BATCH = 400, 500, 224, 32
BAR = 2.5  # of dlo's images a CPU-second, over torchvision's ImageFolder
WORKER_BATCH = 8  # many small batches: how an epoch of few images starts and ends then matters little


def write_jpegs(root: Path, count: int, quality: int) -> float:
    """Writes ``count`` JPEGs in two classes and returns their mean size in kB."""
    from sklearn.datasets import load_sample_images

    photos = load_sample_images().images
    random = np.random.default_rng(0)
    sizes = []
    for split in ("train", "val"):
        for number in range(count):
            photo = photos[number % 2]
            top = random.integers(photo.shape[0] - HEIGHT + 1)
            left = random.integers(photo.shape[1] - WIDTH + 1)
            folder = root / split / ("china", "flower")[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{number:04d}.jpg"
            Image.fromarray(photo[top : top + HEIGHT, left : left + WIDTH]).save(path, quality=quality)
            sizes.append(path.stat().st_size)
    return statistics.mean(sizes) / 1000


def drain(loader: object, after: Callable | None = None) -> None:
    for batch in loader:  # type: ignore[attr-defined]
        if after is not None:
            after(batch, 0)


def contestants(root: Path) -> dict[str, Callable[[], None]]:
    crop = {"size": SIZE, "antialias": True}
    pil = v1.Compose(
        [
            v1.RandomResizedCrop(**crop),
            v1.RandomHorizontalFlip(),
            v1.ToTensor(),
            v1.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
    )
    tensors = v2.Compose(
        [
            v2.RandomResizedCrop(**crop),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(IMAGENET_MEAN, IMAGENET_STD),
        ]
    )
    folder = str(root / "train")
    read = {"loader": lambda path: decode_image(path, mode=ImageReadMode.RGB)}
    loaders = {
        "imagefolder": DataLoader(ImageFolder(folder, pil), BATCH, shuffle=True, drop_last=True),
        "imagefolder again": DataLoader(ImageFolder(folder, pil), BATCH, shuffle=True, drop_last=True),
        "v2 tensors": DataLoader(ImageFolder(folder, tensors, **read), BATCH, shuffle=True, drop_last=True),
    }
    ours = ImageFolderData(str(root), image_size=SIZE, batch_size=BATCH, num_workers=0)
    loader = ours.train_dataloader()
    files = [path.read_bytes() for path in sorted((root / "train").rglob("*.jpg"))]
    whole = lambda h, w: Box(0, 0, h, w)
    return {
        **{name: (lambda loader=loader: drain(loader)) for name, loader in loaders.items()},
        "dlo": lambda: drain(loader, ours.on_after_batch_transfer),
        "dlo, to uint8": lambda: drain(loader),
        "decoding alone": lambda: [decode_crop(data, whole, SIZE, exact=False) for data in files] and None,
    }


def path_table(runs: dict[str, Callable[[], None]], images: int, rounds: int, title: str) -> Table:
    """Measures images per CPU-second, and holds them against the first contestant's."""
    seconds = take_turns({name: (lambda run=run: PROCESS.seconds(run)) for name, run in runs.items()}, rounds)
    rates = {name: [images / one for one in taken] for name, taken in seconds.items()}
    table = Table(title, "the images a CPU-second of torchvision's ImageFolder", PROCESS, better="higher")
    for name, values in all_ratios(rates, "imagefolder").items():
        table.add(
            name,
            values,
            bar=BAR if name == "dlo" else None,
            ours=name.startswith("dlo"),
            control=name.endswith("again"),
            images_a_CPU_second=statistics.median(rates[name]),
        )
    return table


def workers_table(root: Path, workers: list[int], rounds: int) -> Table:
    """Measures images per second of elapsed time by number of workers, and holds them against the first."""
    loaders = {}
    for count in workers:
        data = ImageFolderData(str(root), image_size=SIZE, batch_size=WORKER_BATCH, num_workers=count)
        loaders[f"dlo, {count} worker{'s' if count > 1 else ''}"] = data.train_dataloader()
    seconds = take_turns(
        {name: (lambda loader=loader: ELAPSED.seconds(lambda: drain(loader))) for name, loader in loaders.items()},
        rounds,
    )
    rates = {name: [len(loaders[name]) * WORKER_BATCH / one for one in taken] for name, taken in seconds.items()}
    base = next(iter(rates))
    table = Table("workers", f"the images a second of {base}", ELAPSED, better="higher")
    for name, values in all_ratios(rates, base).items():
        table.add(name, values, ours=True, images_a_second=statistics.median(rates[name]))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--quality", type=int, default=90)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    options = parse_options(parser, __file__)
    torch.set_num_threads(1)
    record = Record.of(__file__, __doc__, options)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        kilobytes = write_jpegs(root, options.images, options.quality)
        images = options.images // BATCH * BATCH
        title = f"from JPEGs of quality {options.quality} to batches"
        table = path_table(contestants(root), images, options.rounds, title)
        table.notes.append(f"{WIDTH} x {HEIGHT} JPEGs of {kilobytes:.0f} kB; decoders: {decoders()}.")
        record.add(table)
        if len(options.workers) > cores():
            record.without(f"{options.workers} workers", f"this process may use {cores()} core(s)")
        elif options.workers:
            record.add(workers_table(root, options.workers, max(3, options.rounds // 4)))
    record.finish()


if __name__ == "__main__":
    main()
