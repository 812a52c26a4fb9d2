"""``dlo ticket``: finds lottery tickets by iterative magnitude pruning; each round is a run of ``dlo fit``."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlo_framework.cli.config_scan import CommandParser, read_config
from dlo_framework.errors import DloError, check_number
from dlo_framework.run import runs
from dlo_framework.units import parse_fraction

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_HELP = """Find lottery tickets: train, prune the smallest weights, rewind the others to early values, train again.

Each round is a run of `dlo fit` in the output folder. If the command is stopped, start it again with the same options:
finished rounds are kept, and the unfinished one continues from its last checkpoint."""

_EPILOG = """All other options are those of `dlo fit`: --config, once or more, and any override.

exit codes: 0, 2 for bad input, or the exit code of a round that failed"""

#: Class paths of the callbacks that the command adds to the rounds.
_PRUNE = "dlo_plugins.prune.callback.Prune"
_START = "dlo_plugins.prune.callback.TicketStart"
#: Offset of the seed of the runs with new random weights.
_REINIT_SEED = 10_000


def main(argv: list[str]) -> int:
    """Find lottery tickets by iterative magnitude pruning with rewinding.

    Example:
        dlo ticket --config my.yaml --rounds 7 --amount 20%
    """
    parser = CommandParser("dlo ticket", description=_HELP, epilog=_EPILOG)
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds after the dense one (default: 5)")
    parser.add_argument("--amount", default="20%", help="part of the remaining weights that a round prunes")
    parser.add_argument("--rewind", type=int, default=0, help="step to rewind to (default: 0, the initial weights)")
    parser.add_argument("--scope", choices=("global", "layer"), default="global", help="weights that are compared")
    parser.add_argument("--skip", action="append", help="layer that stays dense; repeat it (default: the output layer)")
    parser.add_argument("--reinit", action="store_true", help="also train each round's mask on new random weights")
    parser.add_argument("--output", help="folder of the rounds (default: runs/CONFIG/ticket)")
    options, config_scan = parser.parse_with_run(argv)
    rounds = Rounds(options, config_scan.argv[1:], list(config_scan.configs))
    return rounds.run()


def _callbacks_of(path: str) -> list[str]:
    """Returns the class names of the callbacks in a config."""
    given = (read_config(path).get("trainer") or {}).get("callbacks") or []
    entries = given if isinstance(given, list) else [given]
    paths = [entry.get("class_path", "") if isinstance(entry, dict) else entry for entry in entries]
    return [str(name).rpartition(".")[2] for name in paths]


class Rounds:
    """Rounds of one search for tickets.

    Args:
        options: Options of the command.
        words: Options of ``dlo fit``.
        configs: Paths of the configs.

    Raises:
        DloError: If an option is out of range, or the folder holds a search with other options.
    """

    def __init__(self, options: argparse.Namespace, words: list[str], configs: list[str]) -> None:
        self.amount = parse_fraction(options.amount, "ticket: --amount")
        self.number, self.rewind = options.rounds, options.rewind
        self.scope, self.skip, self.reinit = options.scope, options.skip, options.reinit
        self.words = words
        check_number("ticket: --rounds", self.number, "at least 1", "set 5")
        check_number("ticket: --rewind", self.rewind, "at least 0 steps", "0 is the initial weights")
        for word in words:
            name = word.partition("=")[0]
            if name in ("--ckpt_path", "--run.dir", "--run.name"):
                raise DloError(f"ticket: {name} must be left out, as the rounds set it, got {word}; use --output")
        for path in configs:
            if _PRUNE.rpartition(".")[2] in _callbacks_of(path):
                raise DloError(
                    f"ticket: the config must have no Prune, which the rounds add, got one in {path}; remove it from"
                    " trainer.callbacks"
                )
        if any(variable in os.environ for variable in ("RANK", "SLURM_PROCID")):
            raise DloError(
                "ticket: the command must be started once, as each round starts its own ranks, got a launcher's rank;"
                " start it without torchrun or srun, with --trainer.devices"
            )
        self.folder = Path(options.output or Path("runs") / Path(configs[0]).stem / "ticket")
        self.settings = {
            "amount": self.amount,
            "rewind": self.rewind,
            "scope": self.scope,
            "skip": self.skip,
            "options": words,
        }

    def run(self) -> int:
        """Runs all rounds, and writes the report after each; returns the exit code."""
        self._check_settings()
        for number in range(self.number + 1):
            code = self._round(number) or (self._reinit_round(number) if number and self.reinit else 0)
            if code:
                return code
            self._report(number)
        self._print()
        return 0

    def _check_settings(self) -> None:
        path = self.folder / "settings.json"
        if path.exists():
            before = json.loads(path.read_text())
            changed = [key for key, value in self.settings.items() if before.get(key) != value]
            if changed:
                raise DloError(
                    f"ticket: options must be those of the search in {self.folder}, got another {changed[0]}:"
                    f" {self.settings[changed[0]]} after {before.get(changed[0])}; choose another --output"
                )
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.settings, indent=1) + "\n")

    # --- one round -----------------------------------------------------------------------------------------

    def _round(self, number: int) -> int:
        """Trains a round, unless it has finished; round 0 is dense."""
        name = f"round_{number}"
        if self._summary(name) is not None:
            return 0
        if number == 0:
            init: dict[str, Any] = {"folder": str(self.folder), "step": self.rewind, "skip": self.skip}
            return self._fit(name, {"class_path": _START, "init_args": init}, "auto")
        prune, continued = self._prune(number), self._checkpoint(name) is not None
        return self._fit(name, prune, "auto" if continued else str(self.folder / "start.ckpt"))

    def _reinit_round(self, number: int) -> int:
        """Trains a round's mask on new random weights, unless that has finished."""
        name = f"round_{number}_reinit"
        if self._summary(name) is not None:
            return 0
        seed = _REINIT_SEED + number + self._seed()
        return self._fit(name, self._prune(number), "auto", "--seed_everything", str(seed))

    def _prune(self, number: int) -> dict[str, Any]:
        return {"class_path": _PRUNE, "init_args": {"masks": str(self._masks(number)), "skip": self.skip}}

    def _seed(self) -> int:
        """Returns the seed of the dense round, from the config that it has kept; 0 if it has none."""
        run = self._version("round_0")
        seed = read_config(str(run / "config.yaml")).get("seed_everything") if run is not None else 0
        return seed if isinstance(seed, int) and not isinstance(seed, bool) else 0

    def _masks(self, number: int) -> Path:
        """Returns the masks of a round, made from the weights of the round before."""
        path = self.folder / f"masks_{number}.ckpt"
        if path.exists():
            return path
        from dlo_plugins.prune.callback import next_masks, save_masks, ticket_sparsity

        names = json.loads((self.folder / "layers.json").read_text())
        checkpoint = self._checkpoint(f"round_{number - 1}")
        assert checkpoint is not None, "a finished round has a checkpoint"
        save_masks(next_masks(checkpoint, names, ticket_sparsity(number, self.amount), self.scope), path)
        return path

    def _fit(self, name: str, callback: dict[str, Any], checkpoint: str, *more: str) -> int:
        """Runs ``dlo fit`` for a round, in a process of its own."""
        words = [sys.executable, "-m", "dlo_framework", "fit", *self.words, *more]
        words += ["--run.dir", str(self.folder), "--run.name", name, "--ckpt_path", checkpoint]
        words += [f"--trainer.callbacks+={json.dumps(callback)}"]
        print(f"dlo ticket: {name.replace('_', ' ')} of {self.number}", file=sys.stderr, flush=True)
        return subprocess.run(words, check=False).returncode

    def _version(self, name: str) -> Path | None:
        return next(iter(runs.versions(self.folder / name)), None)

    def _checkpoint(self, name: str) -> Path | None:
        from dlo_framework.checkpoint import newest_valid

        run = self._version(name)
        return newest_valid(run / runs.CHECKPOINTS) if run is not None else None

    def _summary(self, name: str) -> dict[str, Any] | None:
        """Returns the summary of a finished round."""
        run = self._version(name)
        summary = runs.current_summary(run) if run is not None else None
        return summary if summary is not None and summary["status"] == "finished" else None

    # --- the report ----------------------------------------------------------------------------------------

    def points(self, last: int) -> list[dict[str, Any]]:
        """Returns the results of the rounds so far: kept fraction, metric, seconds; of tickets and of new weights."""
        from dlo_plugins.prune.callback import kept_fraction, read_masks

        points = []
        for number in range(last + 1):
            kept = kept_fraction(read_masks(self._masks(number))) if number else 1.0
            for kind, name in (("ticket", f"round_{number}"), ("reinit", f"round_{number}_reinit")):
                summary = self._summary(name)
                if summary is None:
                    continue
                metric = next(iter(summary["best_metric"] or {"val_loss": None}))
                best = summary["best_metric"] or {}
                point = {"round": number, "kind": kind, "kept": kept, "metric": metric}
                point |= {"value": summary["metrics"].get(metric), "best": best.get(metric)}
                points.append(point | {key: summary[key] for key in ("seconds", "steps")})
        return points

    def _report(self, last: int) -> None:
        """Writes ``ticket.json`` and ``ticket.png``, and the picture for TensorBoard."""
        from dlo_framework.atomic_file import write_atomic
        from dlo_framework.watch.media import draw_figure

        points = self.points(last)
        write_atomic(self.folder / "ticket.json", json.dumps({**self.settings, "points": points}, indent=1) + "\n")
        figure = draw_figure("dlo ticket", lambda: draw_tickets(points))
        if figure is not None:
            figure.savefig(self.folder / "ticket.png", dpi=120)
            log_to_tensorboard(figure, self.folder / "report", "ticket/accuracy_over_sparsity", last)

    def _print(self) -> None:
        points = self.points(self.number)
        print(f"{'round':>5} {'kept':>7} {'ticket':>9} {'seconds':>8}" + (f" {'reinit':>9}" if self.reinit else ""))
        for number in range(self.number + 1):
            own = {point["kind"]: point for point in points if point["round"] == number}
            ticket, other = own["ticket"], own.get("reinit")
            line = f"{number:>5} {ticket['kept']:>7.1%} {_number(ticket['value']):>9} {ticket['seconds']:>8.0f}"
            print(line + (f" {_number(other['value']):>9}" if other else ""))
        print(f"report: {self.folder / 'ticket.json'}, {time.strftime('%H:%M')}")


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def draw_tickets(points: Sequence[Mapping[str, Any]]) -> Figure:
    """Returns a figure of the rounds of `dlo ticket`: the metric over the kept weights, and the time that they took.

    Args:
        points: Results with ``kind`` (``ticket`` or ``reinit``), ``kept``, ``metric``, ``value`` and ``seconds``.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for kind, label in (("ticket", "rewound weights"), ("reinit", "new random weights")):
        own = [point for point in points if point["kind"] == kind and point["value"] is not None]
        if own:
            left.plot([100 * point["kept"] for point in own], [point["value"] for point in own], "o-", label=label)
    left.set_xscale("log")
    left.invert_xaxis()
    kept = sorted({100 * point["kept"] for point in points})
    left.set_xticks(kept, [f"{value:.3g}" for value in kept])
    left.minorticks_off()
    left.set_xlabel("kept weights, percent")
    left.set_ylabel(points[-1]["metric"] if points else "")
    left.set_title("how much?")
    if left.lines:
        left.legend()
    tickets = [point for point in points if point["kind"] == "ticket"]
    total = 0.0
    for point in tickets:
        right.bar(point["round"], point["seconds"], bottom=total, color="tab:blue")
        total += point["seconds"]
    right.set_xticks([point["round"] for point in tickets])
    right.set_xlabel("round")
    right.set_ylabel("seconds of training so far")
    right.set_title("what time does it cost?")
    return figure


def log_to_tensorboard(figure: Figure, folder: Path, tag: str, step: int) -> None:
    """Writes a figure as TensorBoard's event into a folder."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        writer.add_figure(tag, figure, global_step=step, close=False)
