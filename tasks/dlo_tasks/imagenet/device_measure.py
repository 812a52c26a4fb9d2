"""Measures whether images are decoded faster by the workers or on the device."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from dlo_framework.data import Draw
from dlo_tasks.imagenet.device_decode import EncodedImages
from dlo_tasks.imagenet.folder_dataset import ImageDataset

_BATCH = 64


def measure_decoders(dataset: ImageDataset, device: torch.device, workers: int, seconds: float = 30.0) -> str:
    """Returns the faster way to make a dataset's training images on this machine: ``cpu`` or ``gpu``.

    Args:
        dataset: Training images.
        device: Device that decodes, under ``gpu``.
        workers: Number of loading processes.
        seconds: Time of each of the two measurements.
    """
    draws = [Draw(number * 7919 % len(dataset), number, True) for number in range(_BATCH)]
    threads, was_encoded = torch.get_num_threads(), dataset.encoded

    def on_cpu() -> int:
        dataset.encoded = False
        dataset.fetch(draws)
        return _BATCH

    def on_device() -> int:
        dataset.encoded = True
        images = dataset.fetch(draws)[0]
        assert isinstance(images, EncodedImages)
        images.decode(device)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return _BATCH

    try:
        torch.set_num_threads(1)  # as in a worker
        return faster_decoder(on_cpu, on_device, workers, seconds)
    finally:
        torch.set_num_threads(threads)
        dataset.encoded = was_encoded


def faster_decoder(cpu: Callable[[], int], gpu: Callable[[], int], workers: int, seconds: float = 30.0) -> str:
    """Measures both ways to make training images, and returns the faster one: ``cpu`` or ``gpu``.

    Args:
        cpu: Function that makes a batch on one core, and returns its number of images.
        gpu: The same on the device; it waits for the device.
        workers: Number of loading processes, which multiply the rate of the CPU.
        seconds: Time of each measurement.
    """
    rates = {}
    for name, run, times in (("cpu", cpu, max(1, workers)), ("gpu", gpu, 1)):
        run()  # warms up
        images, begin = 0, time.perf_counter()
        while time.perf_counter() - begin < seconds:
            images += run()
        rates[name] = times * images / (time.perf_counter() - begin)
    return max(rates, key=lambda name: rates[name])
