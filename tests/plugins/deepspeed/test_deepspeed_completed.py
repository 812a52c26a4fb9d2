"""A DeepSpeed configuration completed by the Trainer's settings: what they add and what they contradict."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlo_framework.errors import DloError
from dlo_plugins.deepspeed.config import merge_options
from dlo_plugins.deepspeed.json_file import get
from dlo_plugins.deepspeed.trainer_settings import MICRO, STEPS, TRAIN, TrainerSettings, fill_from_trainer
from support.deepspeed_configs import CONFIGS, RANKS

PLAIN = TrainerSettings("32-true", 1, None, None, None, 2)


def contradiction(config, **facts):
    values = {"precision": "32-true", "accumulation": 1, "clip_val": None, "clip_algorithm": None}
    values |= {"micro_batch_size": None, "world_size": 2} | facts
    with pytest.raises(DloError) as caught:
        fill_from_trainer(merge_options({}, config), TrainerSettings(**values))
    return str(caught.value)


# --- the Trainer -------------------------------------------------------------------------------------------


def test_what_is_absent_or_auto_comes_from_the_trainer():
    facts = TrainerSettings("bf16-mixed", 4, 0.5, "norm", 8, 2)
    want = {
        "train_batch_size": 64,
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": 4,
        "gradient_clipping": 0.5,
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 0},
    }
    assert fill_from_trainer(merge_options({}, {}), facts) == want
    auto: dict[str, object] = dict.fromkeys(want, "auto") | {"bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    auto["zero_optimization"] = {"stage": "auto"}
    assert fill_from_trainer(merge_options({}, auto), facts) == want
    off = fill_from_trainer(merge_options({}, {"fp16": {"enabled": "auto", "loss_scale": 0}}), facts)
    assert off["fp16"] == {"enabled": False, "loss_scale": 0}


def test_without_clipping_in_either_place_deepspeeds_own_default_is_off():
    """DeepSpeed 0.19 clips to a norm of 1 where its configuration says nothing."""
    assert fill_from_trainer(merge_options({}), PLAIN)["gradient_clipping"] == 0.0


def test_what_only_the_json_sets_is_taken():
    config = {"gradient_clipping": 1.0, "train_batch_size": 16, "gradient_accumulation_steps": 1}
    found = fill_from_trainer(merge_options({}, config), PLAIN)
    assert (found["gradient_clipping"], found["train_micro_batch_size_per_gpu"]) == (1.0, 8)


@pytest.mark.parametrize(
    ("config", "facts", "parts"),
    [
        (
            {"gradient_clipping": 1.0},
            {"clip_val": 0.5},
            ["gradient_clipping must equal trainer.gradient_clip_val 0.5, got 1.0"],
        ),
        ({"gradient_clipping": -1.0}, {}, ["must be a norm"]),
        ({}, {"clip_val": 0.5, "clip_algorithm": "value"}, ["gradient_clip_algorithm must be norm"]),
        (
            {"gradient_accumulation_steps": 4},
            {},
            ["must equal trainer.accumulate_grad_batches 1, got 4", "--trainer.accumulate_grad_batches 4"],
        ),
        (
            {"train_batch_size": 64, "train_micro_batch_size_per_gpu": 8},
            {},
            ["train_batch_size 64 / (train_micro_batch_size_per_gpu 8 x 2 ranks)", "accumulate_grad_batches 4"],
        ),
        (
            {"train_batch_size": 65, "train_micro_batch_size_per_gpu": 8},
            {},
            ["per_gpu 8 x gradient_accumulation_steps 1 x 2 ranks = 16, got 65; set train_batch_size 16"],
        ),
        (
            {"train_micro_batch_size_per_gpu": 16},
            {"micro_batch_size": 8},
            [
                "per_gpu 16 of",
                "16 samples per rank",
                "got 16 (the global batch: 8 per rank)",
                "set --data.batch_size 32",
            ],
        ),
        (
            {"fp16": {"enabled": True}},
            {},
            ["agree with trainer.precision 32-true, got true", "16-mixed"],
        ),
        ({"bf16": {"enabled": True}}, {"precision": "16-mixed"}, ["bf16.enabled must agree", "bf16-mixed"]),
        ({}, {"precision": "64-true"}, ["trainer.precision must be one of", "got 64-true"]),
    ],
)
def test_a_contradiction_names_both_and_the_fix(config, facts, parts):
    message = contradiction(config, **facts)
    assert all(part in message for part in parts), message


# --- against DeepSpeed itself ------------------------------------------------------------------------------


def facts_for(config):
    """Returns what a Trainer would say that agrees with a configuration."""
    resolved = merge_options({}, config)
    precision = {"fp16": "16-mixed", "bf16": "bf16-mixed"}
    chosen = next((precision[key] for key in precision if get(resolved, f"{key}.enabled") is True), "32-true")
    train, micro = resolved.get("train_batch_size"), resolved.get("train_micro_batch_size_per_gpu")
    steps = resolved.get("gradient_accumulation_steps")
    if not isinstance(steps, int):
        steps = train // (micro * RANKS) if isinstance(train, int) and isinstance(micro, int) else 1
    return TrainerSettings(chosen, steps, None, None, None, RANKS)


@pytest.mark.parametrize("name", CONFIGS)
def test_deepspeed_itself_takes_every_sample_completed(name):
    from deepspeed.runtime.config import DeepSpeedConfig

    completed = fill_from_trainer(merge_options({}, CONFIGS[name]), facts_for(CONFIGS[name]))
    json.dumps(completed)
    theirs = DeepSpeedConfig(dict(completed) | {"train_batch_size": completed["train_batch_size"] // RANKS})
    assert theirs.zero_optimization_stage == (get(completed, "zero_optimization.stage") or 0)
    assert theirs.gradient_clipping == completed["gradient_clipping"]


@settings(max_examples=40)
@given(
    micro=st.integers(1, 8),
    steps=st.integers(1, 8),
    ranks=st.integers(1, 8),
    said=st.sets(
        st.sampled_from(["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
    ),
)
def test_any_part_of_the_batch_sizes_gives_the_others_as_deepspeed_derives_them(micro, steps, ranks, said):
    whole = {TRAIN: micro * steps * ranks, MICRO: micro, STEPS: steps}
    config = merge_options({}, {key: whole[key] for key in said})
    for known in (micro, None) if {TRAIN, MICRO} & said else (micro,):
        found = fill_from_trainer(config, TrainerSettings("32-true", steps, None, None, known, ranks))
        assert {key: found[key] for key in whole} == whole
