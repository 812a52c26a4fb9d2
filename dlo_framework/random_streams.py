"""Random streams of a run: one for initialisation, the same on all ranks, and one in training for each data share.

In one process training goes on with the stream of initialisation. After a run, on any number of ranks, the stream
depends only on where initialisation left it, so that a second fit of a script draws the weights of one process.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: States of torch's generators of the CPU and of a device; None without a device of its own.
TorchState = tuple[Tensor, Tensor | None]


def seed_all(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's CPU generators, and no accelerator's; about 15 us."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


def seed_torch(seed: int, device: torch.device) -> None:
    """Seeds torch's generators of the CPU and of a device."""
    torch.default_generator.manual_seed(seed % 2**63)
    if device.type not in ("cpu", "meta"):
        torch.get_device_module(device).manual_seed(seed % 2**63)


def seed_generators(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's generators, those of all accelerators too."""
    seed_all(seed)
    torch.manual_seed(seed)


def reseed(key: int) -> None:
    """Seeds all generators, accelerators' too, by torch's next random number and a key; the same key, the same stream.

    Args:
        key: Number of the new stream; 0 or more.
    """
    drawn = int(torch.randint(2**63 - 1, (), device="cpu"))
    seed_generators(int(np.random.SeedSequence([drawn, key]).generate_state(1, np.uint64)[0] >> np.uint64(1)))


def random_state() -> dict[str, Any]:
    """Returns the state of the random generators of Python, NumPy, torch and the current accelerator.

    It holds plain numbers and tensors only, so that its checkpoint loads with ``weights_only=True``.
    """
    (version, internal, gauss), (name, keys, *rest), of_torch, of_cuda = raw_random_state()
    state: dict[str, Any] = {
        "python": (version, torch.tensor(internal, dtype=torch.int64), gauss),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest),
        "torch": of_torch,
    }
    return state if of_cuda is None else {**state, "cuda": of_cuda}


def restore_random_state(state: dict[str, Any]) -> None:
    """Sets the random generators to a state of :func:`random_state`."""
    version, internal, gauss = state["python"]
    name, keys, *rest = state["numpy"]
    of_cuda = state.get("cuda") if torch.cuda.is_available() else None
    of_numpy = (name, keys.numpy().astype(np.uint32), *rest)
    restore_raw_random_state(((version, tuple(internal.tolist()), gauss), of_numpy, state["torch"], of_cuda))


def raw_random_state() -> tuple[Any, ...]:
    """Returns the same state in the generators' own forms, which is quicker."""
    of_cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
    return random.getstate(), np.random.get_state(), torch.get_rng_state(), of_cuda


def restore_raw_random_state(state: tuple[Any, ...]) -> None:
    """Sets the random generators to a state of :func:`raw_random_state`."""
    of_python, of_numpy, of_torch, of_cuda = state
    random.setstate(of_python)
    np.random.set_state(of_numpy)
    torch.set_rng_state(of_torch)
    if of_cuda is not None:
        torch.cuda.set_rng_state(of_cuda)


def restore_stream(saved: dict[str, Any], stream: list[int]) -> None:
    """Sets the random generators to a rank's state of a checkpoint.

    Without a state of this stream, as after a change of the number of ranks, rank 0's state makes it: that rank's own
    in a run with one share, else a stream that follows from it and the share.

    Args:
        saved: Entry of a checkpoint: ``random_state``, each rank's state, and ``streams``, their streams.
        stream: Stream of this rank: its share of the samples, their number, its pipeline stage, their number.
    """
    states, streams = saved["random_state"], saved.get("streams", [])
    if stream in streams:
        restore_random_state(states[streams.index(stream)])
    else:
        restore_random_state(states[0])
        if stream[1] > 1:
            reseed(stream[0])


@contextlib.contextmanager
def preserved_random_state() -> Iterator[None]:
    """Restores the states of Python's, NumPy's and torch's CPU generators after the block."""
    state = random.getstate(), np.random.get_state(), torch.get_rng_state(), None
    try:
        yield
    finally:
        restore_raw_random_state(state)


def get_torch_state(device: torch.device) -> TorchState:
    """Returns the random states of torch's generators of the CPU and of a device."""
    if device.type in ("cpu", "meta"):
        return torch.get_rng_state(), None
    return torch.get_rng_state(), torch.get_device_module(device).get_rng_state(device)


def set_torch_state(state: TorchState, device: torch.device) -> None:
    """Sets the random states of torch's generators of the CPU and of a device."""
    torch.set_rng_state(state[0])
    if state[1] is not None:
        torch.get_device_module(device).set_rng_state(state[1], device)


@contextlib.contextmanager
def random_stream(seed: int, device: torch.device, *, also_python: bool = False) -> Iterator[None]:
    """Seeds torch's generators of the CPU and of a device inside the block, and restores their states after it.

    Args:
        seed: Seed; any integer.
        device: Device.
        also_python: Whether to do so with Python's and NumPy's generators too.
    """
    state = get_torch_state(device)
    with preserved_random_state() if also_python else contextlib.nullcontext():
        if also_python:
            seed_all(seed % 2**63)
        seed_torch(seed, device)
        try:
            yield
        finally:
            set_torch_state(state, device)
