"""Each shipped recipe on the digits trains, by the command's own entry point.

One process for all that need one, for its imports, and a fifth of the images: what a recipe reaches is measured
elsewhere.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "digits").glob("*.yaml"))
SMALL = ["--trainer.max_epochs", "2", "--data.init_args.val_fraction", "0.8", "--trainer.limit_val_batches", "2"]
SCRIPT = f"""
import os, sys
from dlo_framework.cli.main import main
if "distill" in sys.argv[1:]:  # Its teacher is another run.
    assert main(["fit", "--config", "quickstart", "--run.name", "digits_teacher", *{SMALL}]) == 0
for name in sys.argv[1:]:
    os.environ.pop("DLO_RUN_FOLDER", None)  # Each is a run of its own.
    assert main(["fit", "--config", f"digits/{{name}}", *{SMALL}]) == 0
"""


#: Which take long: one is compiled in C++ first, others train several times, or start ranks, of which one is not left
#: out. What they switch on has tests of its own.
LONG = ("compile", "deepspeed", "fsdp", "lr_finder", "mesh", "micro_batch_finder", "one_bit_adam", "race")
LONG += (
    "batch_mix",
    "diloco",
    "distill",
    "freeze_out",
    "gradients",
    "layer_drop",
    "profile",
    "prune",
    "prune_2_4",
    "quantise",
)
LONG += (
    "rotor",
    "rotor_offload",
    "optimizer_in_backward",
    "schedule_free",
    "ticket",
    "time_to_target",
    "token_drop",
    "vmoe",
    "wsd",
    "zero",
)


@pytest.fixture(scope="module")
def runs(shared_dlo, request):
    chosen = [item.callspec.params["path"] for item in request.session.items if item.fspath == request.node.fspath]
    on_ranks = [path.stem for path in chosen if "devices" in yaml.safe_load(path.read_text())["trainer"]]
    for name in on_ranks:
        shared_dlo("fit", "--config", f"digits/{name}", *SMALL)
    names = [path.stem for path in chosen if path.stem not in on_ranks]
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *names],
        cwd=shared_dlo.folder,
        env=shared_dlo.environment(),
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return shared_dlo.folder / "runs"


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow) if path.stem in LONG else path for path in CONFIGS],
    ids=lambda path: path.stem,
)
def test_a_recipe_trains(runs, path):
    summary = json.loads((runs / path.stem / "version_0" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["epochs"] == 2
    assert summary["samples"] >= 2 * 256  # Of 360 images; what does not fill a batch is left out.
    head = path.read_text().split("seed_everything")[0]
    for word in ("expected", "time", f"dlo fit --config digits/{path.stem}"):
        assert word in head, word
