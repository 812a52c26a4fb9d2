"""Datamodule of images in class folders or tar shards, in ImageNet's layout."""

from __future__ import annotations

import os
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from dlo_framework.data import ResumableBatchSampler, ResumableLoader, data_parallel_coordinates
from dlo_framework.data.mixture import MixOptions, Ramp
from dlo_framework.data.remote import BlockCache, Storage, cache_folder, is_remote
from dlo_framework.data.sampler import InOrderBatchSampler
from dlo_framework.distributed.groups import control_group
from dlo_framework.errors import DloError, check_number
from dlo_framework.units import parse_bytes
from dlo_tasks.imagenet.augment import EvalView, TrainView, View, build_distortions
from dlo_tasks.imagenet.data_base import IMAGENET_MEAN, IMAGENET_STD, ImageData
from dlo_tasks.imagenet.decode import CorruptImageError
from dlo_tasks.imagenet.folder_dataset import EncodedImages, ImageDataset, check_device_decoding, measure_decoders
from dlo_tasks.imagenet.image_sources import (
    ImageSource,
    JoinedImages,
    find_classes,
    find_shards,
    open_flat_folder,
    open_source,
)
from dlo_tasks.imagenet.rectangles import RectangleBatchSampler, read_sizes, rectangle

#: Name of the loader and the source of ``predict_folder``.
_PREDICT = "predict"


class ImageFolderData(ImageData):
    """Datamodule of images in ``train/`` and ``val/``, as class folders (ImageNet's own layout) or as tar shards.

    ```
    root/train/<class>/**/*.{jpg,jpeg,png,webp,bmp}      root/val/<class>/...
    root/train-*.tar or root/train/*.tar                 root/val-*.tar or root/val/*.tar
    ```

    ```yaml
    data:
      class_path: ImageFolderData
      init_args: {root: /data/imagenet, image_size: 224, batch_size: 1024, rand_augment: rand-m9-mstd0.5}
    ```

    ``root`` may be a URL of fsspec (``hf://``, ``s3://``, ``gs://``, ``https://``) with tar shards.

    Class indices are the positions in the sorted list of ``train/``'s folders. A shard contains ``key.jpg`` and
    ``key.cls`` with the class index, or ``key.json`` with the index under ``label`` (webdataset's layout); an
    optional ``root/classes.txt`` has one class name per line. Shards are read in any order through an index that is
    built once, are never extracted, and shuffle as freely as files do.

    Batches are ``(images, targets)``: float32 ``[B, 3, size, size]``, normalised on the device, and int64 ``[B]``;
    workers pass uint8, a quarter of the bytes. An interrupted run resumes with the very next sample. Images are
    loaded as by torchvision's ``ImageFolder``: as RGB, EXIF orientation ignored.

    Args:
        root: Folder or URL that contains ``train/`` and ``val/``.
        image_size: Height and width of training images, in pixels.
        batch_size: Number of images per micro-step over all data-parallel ranks (the global batch), so that the number
            of ranks does not change the loss curve. Must be divisible by the number of ranks.
        eval_image_size: Height and width in validation, test and prediction. Default: ``image_size``. A larger one
            often helps (Touvron et al. 2019, arXiv:1906.06423).
        eval_batch_size: Global batch in validation, test and prediction. Default: ``batch_size``. It changes no metric.
        crop_pct: Fraction of the shorter side that evaluation crops: it is resized to ``size / crop_pct``, and the
            centre is cropped. Default 0.875, which resizes to 256 for 224.
        scale: Minimum and maximum area of the random crop, as fractions of the image's area.
        ratio: Minimum and maximum aspect ratio (width / height) of the random crop.
        flip: Probability of a horizontal flip.
        interpolation: Resampling filter of crops, always antialiased. DeiT III and most timm recipes use "bicubic".
        rand_augment: RandAugment policy in timm's notation, ``rand-m9-n2`` or ``rand-m9-mstd0.5-inc1`` (magnitude
            0..10), or torchvision's ``{num_ops: 2, magnitude: 9}`` (magnitude 0..30). Default: none.
        three_augment: Whether to apply DeiT III's random choice of grey, solarise or blur to each image.
        color_jitter: Strength of random brightness, contrast and saturation, or a list of the strengths of brightness,
            contrast, saturation and hue. DeiT III uses 0.3.
        random_erase: Probability of erasing a random box.
        erase_mode: Fill of an erased box: the "mean" colour, or random values for each "pixel".
        repeated_augment: Number of differently augmented copies of an image in a batch (Hoffer et al. 2020,
            arXiv:1901.09335); the length of an epoch stays the same. 1 is off.
        sources: Roots by name, in place of ``root`` for training: a mixture of them, with the classes of ``root``.
        mix: Weights by source, such as ``{clean: 0.7, web: 0.3}``; or a list of moments,
            ``[{samples: 0, weights: {...}}, ...]``, counted in samples of the run. Default: in proportion to the number
            of images.
        mix_ramp: Change between two moments of ``mix``: "step" or "linear".
        shuffle: Shuffle of each source: "global", any image at any time; or "buffer", for remote shards: chunks of
            neighbouring images in random order, shuffled in a buffer.
        shuffle_chunk: Images of a chunk, under ``shuffle: buffer``.
        shuffle_buffer: Images of the buffer, under ``shuffle: buffer``.
        epoch_samples: Images per epoch of the mixture. Default: those of all sources together.
        storage_options: Options of the remote file system, such as ``{anon: true}``.
        cache_dir: Folder on a local disk for indices of shards and blocks of remote files. Default:
            ``~/.cache/dlo/images``.
        cache_bytes: Maximum size of the blocks, such as ``20GB``; the least recently used ones are removed.
        batches_ahead: Batches whose images are fetched ahead of the loader, of remote shards.
        decode: Place where training images are decoded: "cpu", in the workers; "gpu", on a CUDA device by torchvision's
            nvJPEG, with the same crops, and without augmentations other than crop and flip; or "auto", which measures
            both for half a minute each when training begins, and otherwise uses the CPU. The GPU path has been tested
            on a CPU only.
        on_corrupt: Reaction to a corrupt image: "raise" stops with the file's name; "skip" replaces it by another image
            (in evaluation: leaves it out) and counts it in ``corrupt_images``.
        num_workers: Number of loader processes per rank. Default: from the rank's CPU cores, see
            :class:`ResumableDataModule`. It changes only the speed, never the data.
        prefetch_factor: Number of batches that each worker prepares ahead; default 2.
        pin_memory: Whether to load into page-locked memory. Default: if the run has an accelerator.
        persistent_workers: Whether to keep the workers between epochs.
        predict_folder: Folder of images to predict, flat or nested, in place of the test images. Then `root` needs no
            images; the classes are those of its ``train/``, or of its ``classes.txt``.
        seed: Seed of the order and of the augmentation.
        mean: Mean of the red, green and blue channels, in 0..1; default ImageNet's.
        std: Standard deviation of the channels, in 0..1; default ImageNet's.
        channels_last: Whether images use channels-last memory, as decoders write them and convolutions read them
            fastest. The shape stays ``[B, 3, H, W]``; set it to false for a model that calls ``.view`` on its input.

    Raises:
        DloError: If arguments are out of range; from :meth:`check`, for missing folders, empty classes, and validation
            classes that training does not have.
    """

    sizes_images = True

    def __init__(
        self,
        root: str,
        image_size: int = 224,
        batch_size: int = 256,
        eval_image_size: int | None = None,
        eval_batch_size: int | None = None,
        crop_pct: float = 0.875,
        scale: tuple[float, float] = (0.08, 1.0),
        ratio: tuple[float, float] = (3 / 4, 4 / 3),
        flip: float = 0.5,
        interpolation: Literal["bilinear", "bicubic"] = "bilinear",
        rand_augment: str | dict[str, float] | None = None,
        three_augment: bool = False,
        color_jitter: float | list[float] | None = None,
        random_erase: float = 0.0,
        erase_mode: Literal["mean", "pixel"] = "mean",
        repeated_augment: int = 1,
        sources: dict[str, str] | None = None,
        mix: dict[str, float] | list[dict[str, Any]] | None = None,
        mix_ramp: Ramp = "step",
        shuffle: Literal["global", "buffer"] = "global",
        shuffle_chunk: int = 64,
        shuffle_buffer: int = 4096,
        epoch_samples: int | None = None,
        storage_options: dict[str, Any] | None = None,
        cache_dir: str | None = None,
        cache_bytes: str | int = "20GB",
        batches_ahead: int = 4,
        decode: Literal["cpu", "gpu", "auto"] = "cpu",
        on_corrupt: Literal["raise", "skip"] = "raise",
        num_workers: int | None = None,
        prefetch_factor: int | None = None,
        pin_memory: bool | None = None,
        persistent_workers: bool = True,
        predict_folder: str | None = None,
        seed: int = 0,
        mean: tuple[float, float, float] = IMAGENET_MEAN,
        std: tuple[float, float, float] = IMAGENET_STD,
        channels_last: bool = True,
    ) -> None:
        super().__init__(
            image_size=image_size,
            mean=mean,
            std=std,
            channels_last=channels_last,
            batch_size=batch_size,
            eval_batch_size=eval_batch_size,
            num_workers=num_workers,
            prefetch_factor=prefetch_factor,
            pin_memory=pin_memory,
            persistent_workers=persistent_workers,
            seed=seed,
        )
        _check_range("scale", scale, 1.0)
        _check_range("ratio", ratio, float("inf"))
        check_number("crop_pct", crop_pct, "above 0 and at most 1", "use 0.875")
        check_number("flip", flip, "at least 0 and at most 1", "use 0.5")
        check_number("eval_image_size", eval_image_size, "at least 1 pixel", "leave it out")
        check_number("repeated_augment", repeated_augment, "at least 1", "1 switches it off")
        check_number("batches_ahead", batches_ahead, "at least 0", "0 switches it off")
        if sources is None and (mix is not None or mix_ramp != "step" or epoch_samples is not None):
            raise DloError("mix, mix_ramp and epoch_samples must be set with sources, got no sources; name them")
        if sources is not None and not sources:
            raise DloError("sources must name at least one source, got none; write {clean: /data/imagenet}")
        self.mixed_roots = sources
        self.mix_options = MixOptions(mix, mix_ramp, shuffle, shuffle_chunk, shuffle_buffer, epoch_samples)
        self.mix_options.check(list(sources or {"root": root}))
        folder = cache_folder(cache_dir, "images")
        self._storage = Storage(
            BlockCache(folder, parse_bytes(cache_bytes, "cache_bytes")), folder, storage_options or {}
        )
        self.batches_ahead = batches_ahead
        self.root = root if is_remote(root) else Path(root)
        self.predict_folder = Path(predict_folder).expanduser() if predict_folder is not None else None
        self.eval_image_size = eval_image_size or image_size
        self.on_corrupt = on_corrupt
        self.repeated_augment = repeated_augment
        distortions = build_distortions(
            rand_augment=rand_augment,
            three_augment_on=three_augment,
            color_jitter=color_jitter,
            random_erase=random_erase,
            erase_mode=erase_mode,
            mean=mean,
        )
        self._train_view = TrainView(image_size, scale, ratio, flip, interpolation, distortions)
        if decode == "gpu" and distortions:
            raise DloError(
                "decode must be cpu with rand_augment, three_augment, color_jitter or random_erase, got gpu; set"
                " decode: cpu, whose workers apply them, or remove them"
            )
        self.decode = decode
        self._eval_view = EvalView(self.eval_image_size, crop_pct, interpolation)
        self._datasets: dict[str, ImageDataset] = {}
        self._sources: dict[str, ImageSource] = {}
        self._val_sizes: list[tuple[int, int]] | None = None

    @cached_property
    def class_names(self) -> list[str]:
        """Names of the classes; a name's position is its class index."""
        return find_classes(self.root, self._storage)

    @property
    def num_classes(self) -> int:
        """Number of classes in training."""
        return len(self.class_names)

    @property
    def corrupt_images(self) -> int:
        """Number of times that a corrupt image was skipped on this rank, over all workers and splits."""
        return sum(dataset.corrupt_images for dataset in self._datasets.values())

    def check(self) -> None:
        """Raises a DloError for data that a run would fail on later; reads folders, but no image."""
        if self.predict_folder is not None:
            self._source(_PREDICT)
            if isinstance(self.root, Path) and not (self.root / "train").is_dir():
                return  # It has classes.txt.
        for split in ("train", "val"):
            self._source(split)
        size = len(self._source("train"))
        if size < self.batch_size:
            raise DloError(
                f"batch_size must be at most {size}, the number of images in {self.root}/train, got"
                f" {self.batch_size}; set batch_size to at most {size}"
            )

    def train_dataloader(self) -> ResumableLoader:
        """Returns the loader of random crops of the training images, in random order."""
        dataset = self._dataset("train", "train", self._train_view)
        dataset.encoded = self._choose_decoder(dataset) == "gpu"
        if self.mixed_roots is None and self.mix_options.shuffle == "global":
            return self.train_loader(dataset, repeats=self.repeated_augment)
        parts = dataset.source.sources if isinstance(dataset.source, JoinedImages) else [dataset.source]
        order = self.mix_options.order(list(self.mixed_roots or {"root": ""}), list(map(len, parts)), self.seed)
        make_sampler = partial(InOrderBatchSampler if self.overfits else ResumableBatchSampler, order.size, order=order)
        return self.train_loader(dataset, repeats=self.repeated_augment, make_sampler=make_sampler)

    def _choose_decoder(self, dataset: ImageDataset) -> str:
        """Returns where training images are decoded, ``cpu`` or ``gpu``, the same on all ranks."""
        if self.decode == "cpu":
            return "cpu"
        device = self.trainer.strategy.root_device if self.trainer is not None else torch.device("cpu")
        if self.decode == "gpu":
            check_device_decoding(device)
            return "gpu"
        if device.type != "cuda" or self._train_view.distortions:
            return "cpu"
        try:
            check_device_decoding(device)
        except DloError as error:
            rank_zero_warn(f"decode: auto uses the CPU: {error}")
            return "cpu"
        chosen = [measure_decoders(dataset, device, self._worker_options()["num_workers"])]
        group = control_group(self.trainer) if self.trainer is not None else None
        if group is not None:
            dist.broadcast_object_list(chosen, src=0, group=group)
        rank_zero_info(f"decode: auto measured that {chosen[0]} is faster")
        return chosen[0]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Decodes encoded images on the device, and normalises."""
        images, targets = batch
        if isinstance(images, EncodedImages):
            try:
                images = images.decode(targets.device)
            except CorruptImageError as error:
                raise CorruptImageError(
                    f"corrupt image in a batch that is decoded on {targets.device}: {error}; set decode: cpu, which"
                    " names it, and can skip it"
                ) from error
        return super().on_after_batch_transfer((images, targets), dataloader_idx)

    def val_dataloader(self) -> ResumableLoader:
        """Returns the loader of centre crops of ``val/``."""
        return self._eval_dataloader("val", "val")

    def test_dataloader(self) -> ResumableLoader:
        """Returns the loader of centre crops of ``test/`` if it exists with labels, else of ``val/``."""
        labelled = bool(find_shards(self.root, "test", self._storage.options))
        if isinstance(self.root, Path):
            labelled |= (self.root / "test").is_dir() or any(self.root.glob("test-*.tar"))
        return self._eval_dataloader("test", "test" if labelled else "val")

    def predict_dataloader(self) -> ResumableLoader:
        """Returns the loader of the images of ``predict_folder``, or of the test images."""
        if self.predict_folder is None:
            return self.test_dataloader()
        return self._eval_dataloader(_PREDICT, _PREDICT)

    def prediction_names(self) -> list[str]:
        """Returns the names of the images that are predicted, in the order of the predictions."""
        dataset = self._datasets.get(_PREDICT) or self._datasets["test"]
        names = [dataset.source.name(number) for number in range(len(dataset.source))]
        base = self.predict_folder or self.root
        return [
            os.path.relpath(name, base) if isinstance(base, Path) and Path(name).exists() else name for name in names
        ]

    def rectangular_val_dataloader(
        self, multiple: int, max_ratio: float, samples: int | None = None
    ) -> ResumableLoader:
        """Returns the loader of near-rectangular crops of ``val/`` for RectangularValidation; reads all files' headers.

        The shorter side is ``eval_image_size``, the longer one a multiple of ``multiple``, at most ``max_ratio`` times
        as long. ``crop_pct`` works as for squares. ``samples`` limits it to that many images, the first.
        """
        if self._val_sizes is None:
            self._val_sizes = read_sizes(self._source("val"), skip_corrupt=self.on_corrupt == "skip")
        sizes = self._val_sizes[:samples]
        shapes = [rectangle(*native, self.eval_image_size, multiple, max_ratio) for native in sizes]
        dataset = self._dataset("rectangular", "val", self._eval_view)
        make_sampler = partial(RectangleBatchSampler, shapes)
        return self.eval_loader(dataset, name="rectangular", make_sampler=make_sampler)

    def _eval_dataloader(self, name: str, split: str) -> ResumableLoader:
        return self.eval_loader(self._dataset(name, split, self._eval_view), name=name)

    def _source(self, split: str) -> ImageSource:
        if split == _PREDICT and split not in self._sources:
            assert self.predict_folder is not None
            self._sources[split] = open_flat_folder(self.predict_folder)
        if split not in self._sources:
            roots = self.mixed_roots if split == "train" else None
            if roots is None:
                self._sources[split] = open_source(self.root, split, self.class_names, self._storage)
            else:
                places = [root if is_remote(root) else Path(root) for root in roots.values()]
                opened = [open_source(place, split, self.class_names, self._storage) for place in places]
                self._sources[split] = JoinedImages(opened)
        return self._sources[split]

    def _dataset(self, name: str, split: str, view: View) -> ImageDataset:
        workers: Any = self._worker_options()["num_workers"]
        roots = self.mixed_roots.values() if split == "train" and self.mixed_roots else [self.root]
        dataset = ImageDataset(
            self._source(split),
            view,
            on_corrupt=self.on_corrupt,
            training=name == "train",
            rank=data_parallel_coordinates(self.trainer)[0],
            slots=workers + 1,
            batches_ahead=self.batches_ahead if any(map(is_remote, map(str, roots))) else 0,
        )
        self._datasets[name] = dataset
        return dataset


def _check_range(name: str, pair: tuple[float, float], most: float) -> None:
    if len(pair) != 2 or not 0 < pair[0] <= pair[1] <= most:
        limit = f" <= {most}" if most != float("inf") else ""
        raise DloError(f"{name} must be two numbers, 0 < minimum <= maximum{limit}, got {list(pair)}")
