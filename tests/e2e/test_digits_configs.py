"""Each shipped recipe on the digits trains, on a fifth of the images: what a recipe reaches is measured elsewhere."""

import json
from pathlib import Path

import pytest

CONFIGS = sorted((Path(__file__).parents[2] / "configs" / "digits").glob("*.yaml"))
SMALL = ["--trainer.max_epochs", "2", "--data.init_args.val_fraction", "0.8", "--trainer.limit_val_batches", "2"]
#: The other recipes start ranks, are compiled, or train several times; what they switch on has tests of its own.
SHORT = ("progressive_resizing", "prune_channels")


@pytest.mark.parametrize(
    "path",
    [path if path.stem in SHORT else pytest.param(path, marks=pytest.mark.slow) for path in CONFIGS],
    ids=lambda path: path.stem,
)
def test_a_recipe_trains(dlo, path):
    if path.stem == "distill":  # Its teacher is another run.
        dlo("fit", "--config", "quickstart", "--run.name", "digits_teacher", *SMALL)
    dlo("fit", "--config", f"digits/{path.stem}", *SMALL)
    summary = json.loads((dlo.folder / "runs" / path.stem / "version_0" / "summary.json").read_text())
    assert summary["status"] == "finished"
    assert summary["epochs"] == 2
    assert summary["samples"] >= 2 * 256  # Of 360 images; what does not fill a batch is left out.
    head = path.read_text().split("seed_everything")[0]
    for word in ("expected", "time", f"dlo fit --config digits/{path.stem}"):
        assert word in head, word
