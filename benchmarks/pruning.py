"""How much of a model can be pruned, what accuracy is left, and what does it cost?

Tickets: LeNet-300-100 (784 inputs in the paper, 64 here) on the digits, by iterative magnitude pruning with rewinding
to the initial weights, beside the same masks on new random weights; Frankle & Carbin 2019, arXiv 1803.03635. Each run
is a ``Trainer.fit`` with the callbacks that `dlo ticket` adds, in one process. Adam at the paper's rate of 1.2e-3,
batches of 60; ten epochs were chosen on other seeds than those reported.

Gradual pruning and 2:4: the same network, dense, at four sparsities with the cubic schedule, and with SR-STE's 2:4;
every layer's groups are counted.

Cost: seconds of a training step with Prune over one without, in turns; `dense again` is the A/A control.

Run: ``python benchmarks/pruning.py [--seeds 5] [--epochs 10] [--rounds 15]``
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import PROCESS, all_ratios, clock_of, take_turns
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_framework.testing.training import silence_lightning
from dlo_plugins.callbacks.prune import Prune
from dlo_plugins.callbacks.prune.ticket_start import START, TicketStart
from dlo_plugins.pruning.nm_pattern import NMPattern, follows_pattern
from dlo_plugins.pruning.sparsity_schedule import ticket_sparsity
from dlo_plugins.pruning.tickets import kept_fraction, next_masks, save_masks

#: Seed of the digits' split, and the number of held-out images.
SPLIT, HELD_OUT = 0, 360
#: Rounds of pruning a third of the remaining weights: a fifth is left after four.
ROUNDS, AMOUNT = 4, 1 - 0.2**0.25
SPARSITIES = (0.5, 0.8, 0.9, 0.95)


class LeNet(LightningModule):
    """LeNet-300-100 of the paper, on 8 x 8 images."""

    best_metric = ("val_acc1", "max")

    def __init__(self, width: int = 300) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width // 3), nn.ReLU(), nn.Linear(width // 3, 10)
        )

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Returns the loss of a batch."""
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        """Logs the accuracy."""
        self.log("val_acc1", (self.net(batch[0]).argmax(1) == batch[1]).float().mean(), batch_size=len(batch[0]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Returns Adam at the paper's rate."""
        return torch.optim.Adam(self.parameters(), lr=1.2e-3)


def digits() -> tuple[TensorDataset, TensorDataset]:
    """Returns the training and the held-out digits."""
    data = load_digits()
    images, labels = torch.tensor(data.images / 16, dtype=torch.float32).flatten(1), torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT))
    train, held = order[:-HELD_OUT], order[-HELD_OUT:]
    return TensorDataset(images[train], labels[train]), TensorDataset(images[held], labels[held])


def fit(
    folder: Path, seed: int, epochs: int, callbacks: Sequence[Callback], ckpt_path: Path | None = None
) -> tuple[float, LightningModule]:
    """Trains from a seed, saves ``last.ckpt`` in the folder, and returns the accuracy after the last epoch."""
    seed_everything(seed, verbose=False)
    module = LeNet()
    train, held = digits()
    loader = DataLoader(train, batch_size=60, shuffle=True, generator=torch.Generator().manual_seed(seed))
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=epochs,
        check_val_every_n_epoch=epochs,
        num_sanity_val_steps=0,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
        callbacks=list(callbacks),
    )
    use_canonical_checkpoints(trainer)
    trainer.fit(module, loader, DataLoader(held, batch_size=HELD_OUT), ckpt_path=ckpt_path, weights_only=False)
    trainer.save_checkpoint(folder / "last.ckpt")
    return float(trainer.callback_metrics["val_acc1"]), module


def search(seed: int, epochs: int) -> list[tuple[float, float, float]]:
    """Returns kept fraction, accuracy of the ticket and of the same mask on new weights, of each round."""
    found = []
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        last = home / "round_0"
        dense, _ = fit(last, seed, epochs, [TicketStart(str(home), 0)])
        found.append((1.0, dense, dense))
        names = json.loads((home / "layers.json").read_text())
        for number in range(1, ROUNDS + 1):
            masks = next_masks(last / "last.ckpt", names, ticket_sparsity(number, AMOUNT), "global")
            path = home / f"masks_{number}.ckpt"
            save_masks(masks, path)
            last = home / f"round_{number}"
            ticket, _ = fit(last, seed, epochs, [Prune(masks=str(path))], home / START)
            other, _ = fit(home / f"new_{number}", 10_000 + 50 * seed + number, epochs, [Prune(masks=str(path))])
            found.append((kept_fraction(masks), ticket, other))
    return found


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean and its standard error."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    return statistics.mean(values), error


def tickets(record: Record, seeds: int, epochs: int) -> None:
    """Adds the table of tickets."""
    found = [search(seed, epochs) for seed in range(seeds)]
    table = Table("tickets on the digits", "held-out accuracy", "count", better="higher")
    dense, dense_error = spread([one[0][1] for one in found])
    for number in range(ROUNDS + 1):
        kept = statistics.mean(one[number][0] for one in found)
        columns = (("ticket", 1), ("new weights", 2)) if number else (("dense", 1),)
        for label, column in columns:
            values = [one[number][column] for one in found]
            mean, error = spread(values)
            is_last = number == ROUNDS and label == "ticket"
            table.add(
                f"{kept:.0%} kept, {label}",
                values,
                ours=label == "ticket",
                bar=dense - dense_error if is_last else None,
                mean=mean,
                standard_error=error,
            )
    ticket, error = spread([one[-1][1] for one in found])
    fresh, fresh_error = spread([one[-1][2] for one in found])
    pairs = [one[-1][1] - one[-1][2] for one in found]
    table.notes.append(
        f"at {found[0][-1][0]:.1%} of the weights: ticket {ticket:.4f} +- {error:.4f}, dense {dense:.4f} +-"
        f" {dense_error:.4f}, new weights {fresh:.4f} +- {fresh_error:.4f}; ticket minus new weights, by seed:"
        f" {', '.join(f'{pair:+.4f}' for pair in pairs)}"
    )
    record.add(table)


def sparsities(record: Record, seeds: int, epochs: int) -> None:
    """Adds the table of accuracy over sparsity, and of the groups of 2:4."""
    table = Table("gradual pruning and 2:4 on the digits", "held-out accuracy", "count", better="higher")
    options: dict[str, dict[str, Any] | None] = {"dense": None}
    options |= {f"{amount:.0%} pruned": {"amount": amount} for amount in SPARSITIES}
    options |= {f"{amount:.0%} pruned, each layer": {"amount": amount, "scope": "layer"} for amount in SPARSITIES[1:2]}
    options |= {"2:4, SR-STE": {"pattern": "2:4"}, "2:4, one shot": {"pattern": "2:4", "schedule": "one_shot"}}
    for label, settings in options.items():
        values, layers, exact = [], 0, 0
        for seed in range(seeds):
            prune = [] if settings is None else [Prune(**settings)]
            with tempfile.TemporaryDirectory() as name:
                accuracy, module = fit(Path(name), seed, epochs, prune)
            values.append(accuracy)
            if settings is not None and "pattern" in settings:
                weights = dict(module.named_parameters())
                layers += len(prune[0].layers)
                exact += sum(
                    follows_pattern(weights[layer.name].detach(), NMPattern(2, 4), layer.input_dim)
                    for layer in prune[0].layers
                )
        mean, error = spread(values)
        counted = {"exact_layers": f"{exact} of {layers}"} if layers else {}
        table.add(label, values, ours=settings is not None, mean=mean, standard_error=error, **counted)
    record.add(table)


class Timed(Callback):
    """Seconds of CPU time from the tenth part of a run's steps to its end; without start and report."""

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Starts the clock."""
        if trainer.global_step == trainer.max_steps // 10:
            self.begin = PROCESS.mark()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Reads the clock."""
        self.seconds = PROCESS.mark() - getattr(self, "begin", 0.0)


def costs(record: Record, rounds: int, steps: int) -> None:
    """Adds the table of a step's cost."""
    folder = tempfile.TemporaryDirectory()  # For the reports.

    def run(settings: dict[str, Any] | None) -> float:
        seed_everything(0, verbose=False)
        timed = Timed()
        trainer = Trainer(
            accelerator="cpu",
            max_steps=steps,
            max_epochs=-1,
            limit_val_batches=0,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=folder.name,
            callbacks=[*([] if settings is None else [Prune(**settings)]), timed],
        )
        train, _ = digits()
        trainer.fit(LeNet(1500), DataLoader(train, batch_size=60))
        return timed.seconds

    runs: dict[str, dict[str, Any] | None] = {
        "dense": None,
        "dense again": None,
        "Prune, 80%, every 20 steps": {"amount": 0.8, "begin": "0%"},
        "Prune, movement, every 20 steps": {"method": "movement", "amount": 0.8, "begin": "0%"},
        "Prune, 2:4, every step": {"pattern": "2:4", "begin": "0%"},
    }
    clock = clock_of(torch.device("cpu"))
    seconds = take_turns({name: (lambda settings=settings: run(settings)) for name, settings in runs.items()}, rounds)
    table = Table("cost of a step, an MLP of 0.8M weights", "the same run without Prune", clock)
    for name, values in all_ratios(seconds, "dense").items():
        table.add(name, values, ours=name.startswith("Prune"), control=name == "dense again")
    record.add(table)
    folder.cleanup()


def main() -> None:
    """Measures, and prints tables and the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=80)
    options = parse_options(parser, __file__)
    silence_lightning()
    torch.set_num_threads(1)
    record = Record.of(__file__, __doc__, options)
    tickets(record, options.seeds, options.epochs)
    sparsities(record, options.seeds, options.epochs)
    costs(record, options.rounds, options.steps)
    record.finish()


if __name__ == "__main__":
    main()
