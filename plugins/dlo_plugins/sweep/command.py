"""``dlo sweep``: searches hyperparameters; each trial is a run of ``dlo fit``."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib import resources
from pathlib import Path
from typing import Any

import yaml

from dlo_framework.cli.config_scan import CommandParser, ConfigScan, scan
from dlo_framework.errors import DloError, check_number, did_you_mean
from dlo_framework.yaml_text import read_yaml

_HELP = """Search the hyperparameters of a config: each trial is a run of `dlo fit` in a process of its own.

The space file maps keys of the config to values:
  model.init_args.lr: {log: [1e-4, 1e-1]}
  model.init_args.optimizer: [sgd, adamw]
  model.init_args.momentum: {uniform: [0.8, 0.99], when: {model.init_args.optimizer: sgd}}

Start the command again to continue a sweep that was stopped, or in other jobs at the same time to run its trials in
parallel: all take their trials from the storage in the sweep's folder. `dlo sweep report FOLDER` reports on it."""

_EPILOG = """All other options are those of `dlo fit`: --config, once or more, and any override.

exit codes: 0; 2 for bad input; 1 if a worker failed; 130 or 143 if stopped by Ctrl-C or SIGTERM"""

#: Options of ``dlo fit`` that the sweep sets for each trial.
_OWN = ("--ckpt_path", "--run.dir", "--run.name", "--trainer.callbacks")
_MODES = {"min": "minimize", "max": "maximize"}


def main(argv: list[str]) -> int:
    """Search hyperparameters: each trial is a run, resumed after a kill, in parallel processes or jobs.

    Example:
        dlo sweep --config my.yaml --space space.yaml --trials 50 --jobs 4 --pruner asha
        dlo sweep report runs/sweeps/my

    Raises:
        DloError: If the input is invalid, or the folder holds another sweep.
    """
    if argv[:1] == ["report"]:
        return report(argv[1:])
    parser = _parser()
    options, config_scan = parser.parse_with_run(argv)
    options.argv = argv
    check_options(options, config_scan)
    folder = Path(options.folder or Path("runs") / "sweeps" / Path(next(iter(config_scan.configs))).stem)
    settings = make_settings(options, config_scan, folder)
    if options.engine == "ray":
        from dlo_plugins.sweep.ray_engine import run_on_ray

        code = run_on_ray(folder, settings, options)
    else:
        code = run_workers(folder, settings, options)
    if code == 0:
        print_report(folder)
    return code


def _parser() -> CommandParser:
    from dlo_plugins.sweep.search_space import PRUNERS, SAMPLERS

    parser = CommandParser("dlo sweep", description=_HELP, epilog=_EPILOG)
    parser.add_argument("--space", help="YAML file of the space, or the name of a shipped one")
    parser.add_argument("--trials", type=int, help="number of trials (default: 20; of a grid, all its points)")
    parser.add_argument("--engine", choices=("optuna", "ray"), default="optuna", help="default: optuna")
    parser.add_argument("--jobs", type=int, default=1, help="number of trials at the same time here (default: 1)")
    parser.add_argument("--storage", default="", help="database URL, such as sqlite:///s.db (default: a journal file)")
    parser.add_argument("--sampler", default="tpe", help=f"{', '.join(SAMPLERS)} (default: tpe)")
    parser.add_argument("--pruner", default="none", help=f"{', '.join(PRUNERS)}; with ray also pbt (default: none)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sampler (default: 0)")
    parser.add_argument("--first", type=int, default=1, help="validations before a trial can be pruned (default: 1)")
    parser.add_argument("--factor", type=int, default=3, help="reduction factor of asha, hyperband, bohb (default: 3)")
    parser.add_argument("--metric", help="metric of the validation (default: the task's best_metric)")
    parser.add_argument("--mode", choices=tuple(_MODES), help="direction of --metric")
    parser.add_argument("--trial-cpus", type=float, default=1.0, help="CPUs of a trial on Ray (default: 1)")
    parser.add_argument("--trial-gpus", type=float, default=0.0, help="GPUs of a trial on Ray (default: 0)")
    parser.add_argument("--folder", help="folder of the sweep (default: runs/sweeps/CONFIG)")
    parser.add_argument("--no-wait", action="store_true", help="end when no trial is left to start, as in a job array")
    return parser


def check_options(options: argparse.Namespace, config_scan: ConfigScan) -> None:
    """Checks the command's own options.

    Raises:
        DloError: One is missing or out of range.
    """
    from dlo_plugins.sweep.search_space import check_installed, check_methods

    if not options.space:
        raise DloError("sweep: --space must name a YAML file of config keys and values, got none; add --space s.yaml")
    for name, least in (("trials", 1), ("jobs", 1), ("first", 1), ("factor", 2)):
        value = getattr(options, name)
        check_number(f"sweep: --{name}", value, f"at least {least}", "raise it")
    if (options.metric is None) != (options.mode is None):
        raise DloError(
            f"sweep: --metric and --mode must be set together, got --metric {options.metric} and --mode {options.mode};"
            " set both, or none for the task's own"
        )
    unused = [name for name in ("trial_cpus", "trial_gpus") if getattr(options, name) < 0]
    if unused:
        raise DloError(f"sweep: --{unused[0].replace('_', '-')} must be at least 0, got {getattr(options, unused[0])}")
    check_methods(options.sampler, options.pruner, options.engine)
    check_installed(options.sampler, options.engine)
    for word in config_scan.argv:
        name = word.partition("=")[0]
        if name in _OWN:
            fix = "put them into the config, or use --trainer.callbacks+" if name.endswith("callbacks") else "remove it"
            raise DloError(f"sweep: {name} must be left out, as the sweep sets it, got {word}; {fix}")
    if any(variable in os.environ for variable in ("RANK", "LOCAL_RANK")) or _is_second_task():
        raise DloError(
            "sweep: the command must be started once a job, as each trial starts its own ranks, got a launcher's rank;"
            " start it without torchrun or srun, with --trainer.devices"
        )


def _is_second_task() -> bool:
    return int(os.environ.get("SLURM_PROCID", "0")) > 0


# --- the settings --------------------------------------------------------------------------------------------


def make_settings(options: argparse.Namespace, config_scan: ConfigScan, folder: Path) -> Any:
    """Returns the settings of the sweep; a process that is the first one writes them, another compares its own.

    Raises:
        DloError: The config or the space is invalid, or the folder holds another sweep.
    """
    from dlo_framework.lock import ProcessLock
    from dlo_plugins.sweep.search_space import SearchSpace, SweepSettings, merge_configs, read_settings

    space = SearchSpace(read_space(options.space))
    words = without_configs(config_scan.argv[1:])
    for option, key in space.conflicting(words):
        raise DloError(f"sweep: {option} must be left out, as the space sets {key}; remove one of them")
    config = merge_configs(config_scan.configs.values())
    check_nodes(config, words)
    trials = count_trials(options, space)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DloError(f"sweep: --folder must be a folder, got {folder}: {error.strerror}; choose another") from error
    with ProcessLock(folder / "create.lock").held():
        known = read_settings(folder)
        said: dict[str, Any] = (
            {"metric": known.metric, "mode": known.direction[:3], "validations": known.validations}
            if known is not None
            else preflight(config, words, space, options)
        )
        own = SweepSettings(
            config=config,
            space=space.content,
            metric=options.metric or said["metric"],
            direction=_MODES[options.mode or said["mode"]],
            trials=trials,
            words=words,
            sampler=options.sampler,
            pruner=options.pruner,
            seed=options.seed,
            first=options.first,
            factor=options.factor,
            validations=said["validations"],
            storage=options.storage,
        )
        if known is not None:
            known.check_same(folder, own)
        own.write(folder)
    return own


def without_configs(words: list[str]) -> list[str]:
    """Returns the options of ``dlo fit`` without ``--config`` and its values."""
    options, place = [], iter(words)
    for word in place:
        if word in ("--config", "-c"):
            next(place)
        else:
            options.append(word)
    return options


def read_space(name: str) -> Any:
    """Returns the content of a space file, or of a shipped one: ``digits/sweep_space``.

    Raises:
        DloError: There is none, or it is not YAML.
    """
    path = Path(name)
    if not path.is_file():
        root = Path(str(resources.files("dlo_framework.configs")))
        shipped = {one.relative_to(root).with_suffix("").as_posix(): one for one in sorted(root.rglob("*_space.yml"))}
        if name not in shipped:
            near = did_you_mean(name, shipped) or f"; shipped: {', '.join(shipped)}"
            raise DloError(f"sweep: --space must be a file or a shipped space, got {name}{near}")
        path = shipped[name]
    return read_yaml(path, "space")


def count_trials(options: argparse.Namespace, space: Any) -> int:
    """Returns the number of trials: the option's, or that of the grid's points.

    Raises:
        DloError: The option is not the number of the grid's points.
    """
    if options.sampler != "grid":
        return options.trials or 20
    points = len(space.grid())
    if options.trials not in (None, points):
        raise DloError(
            f"sweep: --trials must be the grid's {points} points, got {options.trials}; leave it out, or use"
            " --sampler random"
        )
    return points


def check_nodes(config: dict[str, Any], words: list[str]) -> None:
    """Checks that a trial runs on one node: its worker starts it there.

    Raises:
        DloError: The config has more.
    """
    nodes = [(config.get("trainer") or {}).get("num_nodes")]
    nodes += [value for word, value in itertools.pairwise(words) if word == "--trainer.num_nodes"]
    if str(nodes[-1] or 1) != "1":
        raise DloError(f"sweep: trainer.num_nodes must be 1, as a trial runs on its worker's node, got {nodes[-1]}")


def preflight(config: dict[str, Any], words: list[str], space: Any, options: argparse.Namespace) -> dict[str, Any]:
    """Lets a process of its own check configs of the space, and returns the task's metric, mode and validations.

    Raises:
        DloError: A config is invalid, or the task has no metric and the options name none.
    """
    from dlo_plugins.sweep.search_space import apply_values
    from dlo_plugins.sweep.trial_process import trial_environment

    with tempfile.TemporaryDirectory(prefix="dlo-sweep-") as name:
        paths = []
        for number, values in enumerate(space.probes()):
            paths.append(Path(name) / f"probe_{number}.yaml")
            paths[-1].write_text(yaml.safe_dump(apply_values(config, values), sort_keys=False))
        asked = Path(name) / "asked.json"
        asked.write_text(json.dumps({"configs": [str(path) for path in paths], "words": words}))
        command = [sys.executable, "-m", "dlo_plugins.sweep.command", str(asked)]
        done = subprocess.run(command, capture_output=True, text=True, env=trial_environment({}), check=False)
        if done.returncode != 0:
            raise DloError(f"sweep: the config could not be checked: {(done.stderr.splitlines() or ['no output'])[-1]}")
        said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        if "error" in said:
            named = next((n for n, path in enumerate(paths) if str(path) in said["error"]), None)
            text = said["error"].replace(f"{name}{os.sep}", "")
            at = f" (with {json.dumps(space.probes()[named])})" if named is not None else ""
            raise DloError(f"sweep: {text}{at}")
    if said["metric"] is None and options.metric is None:
        raise DloError("sweep: the task must have a best_metric, got None; set --metric val_loss --mode min")
    return said


# --- workers -------------------------------------------------------------------------------------------------


def run_workers(folder: Path, settings: Any, options: argparse.Namespace) -> int:
    """Runs the trials that are left; returns the exit code."""
    from dlo_plugins.sweep.trial_queue import SweepWorkers, TrialQueue

    queue = TrialQueue(folder, settings, create=True)
    print(
        f"dlo sweep: {settings.metric} ({settings.direction}), {queue.unfinished()} of {settings.trials} trials left in"
        f" {folder}",
        file=sys.stderr,
        flush=True,
    )
    if "SLURM_ARRAY_TASK_ID" not in os.environ and shutil.which("sbatch") is not None:
        words = shlex.join(["dlo", "sweep", *options.argv, "--no-wait"])
        print(f"more workers: sbatch --array=1-8 --wrap {shlex.quote(words)}", file=sys.stderr, flush=True)
    return SweepWorkers(queue, options.jobs, waits=not options.no_wait).run()


def report(argv: list[str]) -> int:
    """Prints a sweep's table, and writes its best config and its plots."""
    from dlo_plugins.sweep.search_space import check_installed

    parser = CommandParser("dlo sweep report", description="Report on a sweep: table, best config and plots.")
    parser.add_argument("folder", help="folder of the sweep, such as runs/sweeps/my")
    parser.add_argument("--top", type=int, default=10, help="number of trials in the table (default: 10)")
    options = parser.parse_args(argv)
    check_installed()
    check_number("sweep: --top", options.top, "at least 1", "10 is the default")
    print_report(Path(options.folder), options.top)
    return 0


def print_report(folder: Path, top: int = 10) -> None:
    """Writes a sweep's files and prints its table."""
    from dlo_plugins.sweep.sweep_report import SweepReport

    made = SweepReport(folder)
    print(made.text(top))
    print("\n".join(made.write()))
    print(f"look at it:  tensorboard --logdir {folder / 'trials'}")


# --- the check of configs ------------------------------------------------------------------------------------


def inspect(configs: list[str], words: list[str]) -> dict[str, Any]:
    """Parses the configs, and instantiates the task of the first one; returns what it says of the run.

    Raises:
        DloError: A config has an unknown key or a wrong value.
    """
    from dlo_framework.cli.run import prepared_process

    together = scan(["fit", *(word for path in configs for word in ("--config", path)), *words])
    with prepared_process(together):
        from dlo_framework.cli.lightning_cli import DloCLI
        from dlo_framework.defaults import find_best_metric
        from dlo_framework.run_setup import check_strategy
        from dlo_framework.testing.training import silence_lightning

        more = without_configs(together.argv[1:])
        first, *others = (["fit", "--config", path, *more] for path in configs)
        silence_lightning()
        cli = DloCLI(scan(first), "dlo sweep")
        cli.build()
        for words in others:
            check_strategy(cli.parser.parse_args(words).fit.trainer.strategy)
        metric, mode = find_best_metric(cli.model) or (None, None)
        return {"metric": metric, "mode": mode, "validations": count_validations(cli.trainer_options)}


def count_validations(trainer: dict[str, Any]) -> int | None:
    """Returns the number of validations of a full run; None if it depends on more than the trainer's epochs."""
    epochs, every = trainer.get("max_epochs"), trainer.get("check_val_every_n_epoch")
    if not isinstance(epochs, int) or epochs < 1 or trainer.get("max_steps") not in (None, -1) or not every:
        return None
    interval = trainer.get("val_check_interval")
    if interval is None or (isinstance(interval, float) and interval <= 1):
        return math.ceil(epochs / every) * round(1 / (interval or 1.0))
    return None


if __name__ == "__main__":  # The check, in a process of its own, so that the sweep's own imports no torch.
    asked = json.loads(Path(sys.argv[1]).read_text())
    try:
        answer = inspect(asked["configs"], asked["words"])
    except DloError as refused:
        answer = {"error": str(refused)}
    print(json.dumps(answer))
