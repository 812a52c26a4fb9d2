"""``dlo profile``: profiles some steps of a config's training, and predicts its memory over batch and length."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from dlo_framework.cli.config_scan import CommandParser, ConfigScan
from dlo_framework.cli.run import prepared_process, train
from dlo_framework.errors import DloError, check_number
from dlo_framework.run import runs

_HELP = """Profile some steps of a config's training: where their time and memory go, what the machine allows, which
lines wait for the device, which rank is slow; and the memory of larger batches and longer sequences.

It trains for these steps, without validation and checkpoints, in a folder `profile` among the config's runs."""

_EPILOG = """All other options are those of `dlo fit`: --config, once or more, and any override.

exit codes: 0, or 2 for bad input"""


def main(argv: list[str]) -> int:
    """Profile some steps of a config's training: time, memory, roofline, waits and slow ranks.

    Example:
        dlo profile --config my.yaml --steps 20

    Raises:
        DloError: If an option is invalid.
    """
    parser = CommandParser("dlo profile", description=_HELP, epilog=_EPILOG)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps in all; the last ones are recorded")
    parser.add_argument("--active", type=int, default=3, help="steps that are recorded (default: 3)")
    parser.add_argument("--machine", help="machine of `dlo plan` or its file, for the roofline (default: measure)")
    parser.add_argument("--batches", help="rows of a rank in the table of memory, such as 8,16,32; none leaves it out")
    parser.add_argument("--lengths", help="lengths of sequences in the table of memory, such as 512,1024")
    parser.add_argument("--graph", action="store_true", help="draw the graph of the model's modules (torchview)")
    options, config_scan = parser.parse_with_run(argv)
    check_number("profile: --active", options.active, "at least 1", "set 3")
    least = options.active + 4  # Two of the run's first steps, one to warm up, one that is searched for waits.
    check_number("profile: --steps", options.steps, f"at least {least} to record {options.active}", f"set {least}")
    batches, lengths = (_numbers(name, getattr(options, name)) for name in ("batches", "lengths"))
    if options.graph and importlib.util.find_spec("torchview") is None:
        raise DloError("profile: --graph must have torchview, got none installed; pip install 'dlo_framework[profile]'")
    folder: list[Path] = []

    def build() -> None:
        folder.append(_profile(config_scan, options))

    code = train(config_scan, build)
    if code == 0 and folder and runs.is_first_process():
        _describe_model(config_scan, folder[0], options, batches, lengths)
    return code


def _profile(config_scan: ConfigScan, options: argparse.Namespace) -> Path:
    """Profiles the last of some steps of a config's training; returns the run's folder."""
    from dlo_framework.cli.lightning_cli import open_run, train_briefly
    from dlo_plugins.profile.callback import Profile
    from dlo_plugins.profile.energy import Energy

    steps, active = options.steps, options.active
    reasons = {"fast_dev_run": f"a profile has {steps} steps", "ckpt_path": "time does not depend on the weights"}
    cli = open_run(config_scan, "profile", reasons)
    callbacks = cli.callbacks()
    given = next((each for each in callbacks if isinstance(each, Profile)), None) or Profile()
    warmup = min(2, steps - active - 3)
    own = Profile(
        wait=steps - active - warmup - given.waits,
        warmup=warmup,
        active=active,
        ranks=given.ranks,
        formats=given.formats,
        waits=given.waits,
        machine=options.machine or given.machine,
    )
    callbacks = [own, *(each for each in callbacks if each is not given)]
    if not any(isinstance(each, Energy) for each in callbacks):
        callbacks.insert(0, Energy())
    # Each epoch has a step, so that max_steps ends the run; points in percent need a number of epochs.
    epochs = max(cli.options.trainer.max_epochs or 0, steps)
    return train_briefly(cli, "profile", callbacks, max_steps=steps, max_epochs=epochs, max_time=None)


def _describe_model(
    config_scan: ConfigScan,
    folder: Path,
    options: argparse.Namespace,
    batches: list[int] | None,
    lengths: list[int] | None,
) -> None:
    """Prints and writes what needs no run: the table of memory, and the graph of the model."""
    if options.batches == "none" and not options.graph:
        return
    with prepared_process(config_scan):
        from dlo_plugins.parallel.mesh.simulated_run import SimulatedRun
        from dlo_plugins.profile.model_report import draw_model, memory_table

        run = SimulatedRun(config_scan, 1, "dlo profile", unplanned=True)
        if options.batches != "none":
            try:
                table = memory_table(run.user_config, run.model, run.datamodule, batches, lengths)
            except DloError as error:
                if batches is not None or lengths is not None:
                    raise
                print(f"\nno table of memory over batch and length: {error}", flush=True)
            else:
                print(f"\n{table.text()}", flush=True)
                table.write(folder / "profile")
        if options.graph:
            print(f"\ngraph of the model: {draw_model(run.model, run.datamodule, folder / 'profile')}", flush=True)


def _numbers(name: str, text: str | None) -> list[int] | None:
    """Returns the numbers of an option; None without it.

    Raises:
        DloError: They are not positive numbers.
    """
    if text is None or (name == "batches" and text == "none"):
        return None
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdigit() and int(word) > 0 for word in words):
        raise DloError(f"profile: --{name} must be positive numbers, got {text}; such as --{name} 8,16,32")
    return sorted({int(word) for word in words})
