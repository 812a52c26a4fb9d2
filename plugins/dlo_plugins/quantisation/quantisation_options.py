"""Options of a quantisation, shared by the conversion and the exports."""

from __future__ import annotations

from dataclasses import dataclass, replace

from dlo_plugins.quantisation.schemes import Scheme


@dataclass(frozen=True)
class QuantisationOptions:
    """Options of a quantisation.

    Attributes:
        scheme: Scheme of quantisation.
        group_size: Number of input features of a group.
        skip: Patterns of modules to leave out.
        calibration_batches: Number of training batches for static activations.
        limit_val_batches: Number or fraction of validation batches; None for all.
        targets: Files and folders to export to, relative to the run's folder ``quantised``.
        measures_latency: Whether to measure the latency on the CPU.
        exports_faster: Whether to export, without targets, to the one of ONNX and torch.export that is faster on the
            CPU, where the model can be exported to both.
    """

    scheme: Scheme
    group_size: int
    skip: tuple[str, ...] = ()
    calibration_batches: int = 8
    limit_val_batches: int | float | None = None
    targets: tuple[str, ...] = ()
    measures_latency: bool = True
    exports_faster: bool = False

    def with_limit(self, limit_val_batches: int | float | None) -> QuantisationOptions:
        """Returns these options with another number or fraction of validation batches."""
        return replace(self, limit_val_batches=limit_val_batches)
