"""Peak of the gradients with OptimizerInBackward against the ordinary step: one process, ddp, FSDP, ZeRO 2 and 3.

The ordinary step holds the gradients of all of a rank's parameters at the end of backward: psi elements, or psi / N
where they are sharded. With OptimizerInBackward a rank holds one parameter, bucket or unit at a time.

    python benchmarks/backward_step.py [--blocks 12] [--width 256] [--ranks 2]

It looks at a rank's gradients (`state_bytes` of the strategy) whenever one arrives, and at the end of a step. The
figures are the largest numbers of bytes, as a ratio to the full model's gradients. The weights of the two runs must be
equal.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from torch import Tensor, nn
from torch.utils.data import DataLoader

from dlo_framework.distributed.strategy import DataParallelStrategy, use_canonical_checkpoints
from dlo_framework.strategy_contract import contract_of
from dlo_framework.testing import run_distributed
from dlo_framework.testing.full_state import checksums, gather_full_weights
from dlo_framework.testing.training import leave_group, silence_lightning
from dlo_plugins.callbacks.optimizer_in_backward import OptimizerInBackward
from dlo_plugins.strategies.fsdp import FSDPStrategy
from dlo_plugins.strategies.zero import ZeroStrategy

STRATEGIES: dict[str, Any] = {
    "one process": lambda: "auto",
    "ddp": DataParallelStrategy,
    "zero2": lambda: ZeroStrategy(2, bucket_mb=4),
    "zero3": lambda: ZeroStrategy(3),
    "fsdp": FSDPStrategy,
}


class Blocks(LightningModule):
    """Residual MLP of equal blocks."""

    def __init__(self, blocks: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(blocks)
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Returns the mean square of the outputs."""
        for block in self.blocks:
            batch = batch + block(batch)
        return batch.square().mean()

    def configure_optimizers(self) -> Any:
        """Returns AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


class Peak(Callback):
    """Keeps the largest number of bytes of gradients of this rank."""

    def __init__(self) -> None:
        self.bytes = 0.0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Looks at each arrival of a gradient, before the callbacks that come later."""
        contract = contract_of(trainer.strategy)

        def look(*_: Any) -> None:
            held = contract.state_bytes()
            assert held is not None
            self.bytes = max(self.bytes, held["gradients"])

        for parameter in pl_module.parameters():
            parameter.register_post_accumulate_grad_hook(look)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Looks at the end of a step too."""
        held = contract_of(trainer.strategy).state_bytes()
        assert held is not None
        self.bytes = max(self.bytes, held["gradients"])


def one_run(rank: int, world: int, name: str, blocks: int, width: int, in_backward: bool) -> tuple[float, Any]:
    """Returns this rank's peak of gradients as a ratio to those of the full model, and the weights' checksums."""
    peak, module = Peak(), Blocks(blocks, width)
    total = sum(parameter.nbytes for parameter in module.parameters())
    callbacks: list[Callback] = [peak, OptimizerInBackward()] if in_backward else [peak]
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = Trainer(
        accelerator="cpu", devices=world, strategy=STRATEGIES[name](), max_steps=3, callbacks=callbacks, **quiet
    )
    use_canonical_checkpoints(trainer)
    generator = torch.Generator().manual_seed(rank)
    batches = [torch.randn(8, width, generator=generator) for _ in range(3)]
    trainer.fit(module, DataLoader(batches, batch_size=None))
    return peak.bytes / total, checksums(gather_full_weights(trainer))


def all_runs(rank: int, world: int, folder: Path, blocks: int, width: int) -> dict[str, list[float]]:
    """Returns the two ratios of each strategy of this number of ranks."""
    silence_lightning()
    found = {}
    for name in STRATEGIES:
        if (name == "one process") == (world == 1):
            plain, weights = one_run(rank, world, name, blocks, width, in_backward=False)
            fused, others = one_run(rank, world, name, blocks, width, in_backward=True)
            assert weights == others, f"{name}: the two runs' weights differ"
            found[name] = [plain, fused]
    leave_group()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--blocks", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=2)
    options = parse_options(parser, __file__)
    record = Record.of(__file__, __doc__, options, "cpu")
    with TemporaryDirectory() as folder:
        for world in (1, options.ranks):
            ranks = run_distributed(all_runs, world, Path(folder), options.blocks, options.width, timeout=900)
            for name in ranks[0]:
                plain, fused = (max(rank[name][number] for rank in ranks) for number in (0, 1))
                table = Table(f"gradients at the peak: {name}", "the full model", "bytes of gradients of a rank")
                table.add("ordinary step", [plain])
                table.add("in backward", [fused], ours=True)
                record.add(table)
    record.finish()


if __name__ == "__main__":
    main()
