"""The command ``dlo remat``: ranks of the axes where devices is auto, offloading, and wrong options."""

import json

import pytest

from dlo_framework.errors import DloError
from dlo_plugins.plan.command import remat


@pytest.mark.slow
def test_it_plans_with_offloading_for_the_ranks_of_the_axes(capsys, tmp_path):
    picture = tmp_path / "schedule.png"
    options = ["--config", "digits/mesh", "--budget", "60%", "--offload", "--link", "1TB/s", "--json"]
    options += ["--trainer.strategy.init_args.micro_batches", "2"]
    assert remat([*options, "--png", str(picture), "--trainer.devices", "auto"]) == 0
    found = capsys.readouterr()
    assert "devices is auto; ranks: " in found.err
    for own in json.loads(found.out):
        for plan in own:
            assert plan["predicted_peak"] <= plan["budget"]
            assert plan["offloaded_bytes"] > 0
            assert any(stage["offloaded"] for stage in plan["stages"])
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--link", "25GB/s"], "remat: --link must come with --offload, got 25GB/s without; add --offload"),
        (["--offload", "--link", "auto"], "remat: --link must be a rate, got auto, which a run measures; give 25GB/s"),
        (["--budget", "auto"], "remat: --budget must be a size or a share, got auto"),
    ],
)
def test_wrong_options_name_the_fix(options, message):
    with pytest.raises(DloError, match=message):
        remat(["--config", "digits/rotor", *options])
