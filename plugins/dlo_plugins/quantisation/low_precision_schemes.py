"""Schemes of low-precision matrix products in training: what they round to, and the devices that compute them."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch

from dlo_framework.errors import DloError, did_you_mean


@dataclass(frozen=True)
class ProductScheme:
    """Scheme of the three matrix products of a linear layer.

    Attributes:
        name: Name in configs.
        text: Description for messages.
        multiple: Number that must divide the input and the output features of a layer.
        capability: Least compute capability of a CUDA device with its kernels.
        on_cpu: Whether a CPU has its kernels.
        emulated: Whether torchao can emulate it on any device.
    """

    name: str
    text: str
    multiple: int
    capability: tuple[int, int]
    on_cpu: bool = False
    emulated: bool = True


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        ProductScheme("int8", "int8, a scale per row", 1, (7, 5), on_cpu=True, emulated=False),
        ProductScheme("fp8", "float8, a scale per tensor", 16, (8, 9)),
        ProductScheme("fp8_rowwise", "float8, a scale per row", 16, (9, 0)),
        ProductScheme("mxfp8", "float8, a scale per 32 elements", 32, (10, 0)),
    )
}
#: Schemes to name in place of one that a device lacks, the nearest first.
_NEAREST = ("fp8_rowwise", "fp8", "int8")


def find_scheme(name: str) -> ProductScheme:
    """Returns a scheme by its name.

    Raises:
        DloError: There is none; the message has the nearest.
    """
    if name not in SCHEMES:
        raise DloError(
            f"LowPrecision: scheme must be one of {', '.join(SCHEMES)}, got '{name}'{did_you_mean(name, SCHEMES)}"
        )
    return SCHEMES[name]


def check_emulation(scheme: ProductScheme) -> None:
    """Checks that a scheme can be emulated.

    Raises:
        DloError: It has kernels on every device.
    """
    if not scheme.emulated:
        raise DloError(
            f"LowPrecision: emulate must be false for scheme {scheme.name}, which runs on CPUs, got true; remove it"
        )


def check_torchao(scheme: ProductScheme) -> None:
    """Checks that torchao has what a scheme needs, without importing it.

    Raises:
        DloError: It is not installed, or too old.
    """
    if scheme.name == "int8":
        return
    if importlib.util.find_spec("torchao") is None:
        raise DloError(
            f"LowPrecision: torchao must be installed for scheme {scheme.name}, got none; run `pip install"
            " dlo_framework[quantisation]`"
        )


def check_device(scheme: ProductScheme, device: torch.device, emulate: bool) -> None:
    """Checks that a device computes a scheme.

    Raises:
        DloError: It does not; the message has the nearest scheme that works.
    """
    missing = "" if emulate else lacks(scheme, device)
    if not missing:
        return
    works = next((name for name in _NEAREST if not lacks(SCHEMES[name], device)), None)
    major, minor = scheme.capability
    also = " or a CPU" if scheme.on_cpu else ""
    slow = ", or emulate: true, which is slow and shows the numerics" if scheme.emulated else ""
    raise DloError(
        f"LowPrecision: the device must be CUDA of compute capability {major}.{minor} or more{also} for scheme"
        f" {scheme.name}, got {missing}; {f'set scheme: {works}' if works else 'leave LowPrecision out'}{slow}"
    )


def lacks(scheme: ProductScheme, device: torch.device) -> str:
    """Returns what a device lacks for a scheme; empty if it has the kernels."""
    if device.type == "cpu":
        return "" if scheme.on_cpu else "a CPU"
    if device.type != "cuda":
        return f"{device.type}, which has no kernels for it"
    if torch.version.hip is not None:
        return ""  # torch's own error names the architecture.
    found = torch.cuda.get_device_capability(device)
    return "" if found >= scheme.capability else f"{found[0]}.{found[1]}"
