"""How many training images per CPU-second the data path makes, beside torchvision's ImageFolder.

Both sides do the same work from files in class folders (500 x 400 JPEGs, cut from the two photographs that
ship with scikit-learn, so their contents are real; the files sit in the page cache): read, decode, random
resized crop to 224 with antialiasing, flip, normalise, collate into a float32 batch.

* ``imagefolder``: torchvision's ImageFolder and PIL loader, v1 transforms, ``DataLoader(num_workers=0)``.
* ``imagefolder again``: the same once more, the A/A control: how far its ratio is from 1 is the noise.
* ``v2 tensors``: torchvision's decoder and v2 transforms on uint8 tensors.
* ``dlo``: ImageFolderData's train loader and ``on_after_batch_transfer``.
* ``dlo, to uint8``: the same without normalising, which is what a worker does when an accelerator trains.

Rounds are interleaved; each round's ratio is against ``imagefolder`` in the same round; medians are printed.
CPU time of the process (``time.process_time``) with one thread. Roofline: decoding alone.

Run: ``python benchmarks/data_path.py [--rounds 21] [--quality 90] [--images 128] [--workers 1 2]``
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
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


def measure(runs: dict[str, Callable[[], None]], images: int, rounds: int) -> dict[str, dict[str, float]]:
    """Returns images per CPU-second and the ratio to the first contestant, medians over interleaved rounds."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()  # warm up
    for number in range(rounds):
        names = list(runs) if number % 2 == 0 else list(runs)[::-1]
        for name in names:
            start = time.process_time()
            runs[name]()
            seconds[name].append(time.process_time() - start)
    base = next(iter(seconds.values()))
    return {
        name: {
            "images_per_cpu_second": round(images / statistics.median(taken)),
            "ratio": round(statistics.median(b / t for b, t in zip(base, taken, strict=True)), 3),
        }
        for name, taken in seconds.items()
    }


def scaling(root: Path, workers: list[int], rounds: int) -> dict[str, int]:
    """Returns images per second of wall time by number of workers, medians."""
    taken: dict[int, list[float]] = {count: [] for count in workers}
    loaders = {}
    for count in workers:
        data = ImageFolderData(str(root), image_size=SIZE, batch_size=WORKER_BATCH, num_workers=count)
        loaders[count] = data.train_dataloader()
        drain(loaders[count])
    for _ in range(rounds):
        for count, loader in loaders.items():
            start = time.perf_counter()
            drain(loader)
            taken[count].append(len(loader) * WORKER_BATCH / (time.perf_counter() - start))
    return {str(count): round(statistics.median(rates)) for count, rates in taken.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--quality", type=int, default=90)
    parser.add_argument("--images", type=int, default=128)
    parser.add_argument("--workers", type=int, nargs="*", default=[1, 2])
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        kilobytes = write_jpegs(root, args.images, args.quality)
        images = args.images // BATCH * BATCH
        results = measure(contestants(root), images, args.rounds)
        by_workers = scaling(root, args.workers, max(3, args.rounds // 4)) if args.workers else {}
    print(f"{WIDTH} x {HEIGHT} JPEGs, quality {args.quality}, {kilobytes:.0f} kB; {args.rounds} rounds; {decoders()}")
    print(f"{'':20} {'images/CPU-s':>13} {'ratio':>7}")
    for name, row in results.items():
        print(f"{name:20} {row['images_per_cpu_second']:13.0f} {row['ratio']:7.2f}")
    for count, rate in by_workers.items():
        print(f"{count} worker(s): {rate} images/s of wall time")
    record = {
        "benchmark": "data_path",
        "quality": args.quality,
        "kilobytes": round(kilobytes, 1),
        "rounds": args.rounds,
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "decoders": decoders(),
        "results": results,
        "images_per_second_by_workers": by_workers,
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()
