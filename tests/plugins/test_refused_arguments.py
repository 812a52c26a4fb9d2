"""Arguments that callbacks, appliers and optimizers refuse when they are made, with the rule and the fix."""

from typing import Any

import pytest

from dlo_framework.errors import DloError
from dlo_plugins.batches.dynamic_batch_size import DynamicBatchSize, LRDecay, NoiseScale
from dlo_plugins.batches.micro_batch_finder import MicroBatchFinder
from dlo_plugins.compile.callback import Compile
from dlo_plugins.compression.gradient_compression import GradientCompression
from dlo_plugins.curriculum.difficulty_order import DifficultyOrder
from dlo_plugins.curriculum.freeze import Freeze
from dlo_plugins.curriculum.layer_drop import LayerDrop, StochasticDepthSchedule
from dlo_plugins.curriculum.sequence_length import SequenceLength
from dlo_plugins.curriculum.token_drop import TokenDrop
from dlo_plugins.gradients.clipping_and_noise import AdaptiveGradientClipping, GradientNoise
from dlo_plugins.gradients.skip_spikes import SkipSpikes
from dlo_plugins.images.batch_mix import BatchMix, MixRecipe
from dlo_plugins.images.progressive_resizing import ProgressiveResizing
from dlo_plugins.images.rectangular_validation import RectangularValidation
from dlo_plugins.memory.activation_checkpoint import ActivationCheckpoint
from dlo_plugins.profile.callback import Profile
from dlo_plugins.profile.energy import Energy
from dlo_plugins.prune.callback import Prune
from dlo_plugins.quantise.callback import Quantise
from dlo_plugins.quantise.low_precision import LowPrecision
from dlo_plugins.schedules.lr_curves import WSD, Cyclic, OneCycle, Rewarm, WarmRestarts
from dlo_plugins.schedules.lr_finder import LRFinder


@pytest.mark.parametrize(
    ("make", "arguments", "message"),
    [
        (lambda: DifficultyOrder(), {}, "exactly one of scores and metric must be set"),
        (lambda: DifficultyOrder("x", "rarity"), {}, "exactly one of scores and metric must be set, got "),
        (lambda: DifficultyOrder(metric="length"), {}, "metric must be one of rarity, targets, got length"),
        (lambda: DifficultyOrder(metric="rarity", start=0), {}, "start must be above 0 and at most 1, got 0"),
        (lambda: DifficultyOrder(metric="rarity", growth="log"), {}, "growth must be one of root, linear, got log"),
        (lambda: DifficultyOrder(metric="rarity", until=0), {}, "until must be above 0, got 0"),
        (lambda: Freeze("melt"), {}, "method must be one of"),
        (lambda: Freeze(t0=1.0), {}, "t0 must be above 0 and below 1, got 1.0"),
        (lambda: Freeze("unfreeze", t0=0.5), {}, "t0 must be left out with method unfreeze, got 0.5"),
        (lambda: Freeze(every="1 epochs"), {}, "every must be left out with method freeze_out, got 1 epochs"),
        (lambda: Freeze("unfreeze", lr_decay=0.5), {}, "lr_decay must be at least 1, got 0.5"),
        (lambda: Freeze("unfreeze", every="5 samples"), {}, "every must be in epochs or percent, got"),
        (lambda: Freeze("unfreeze", every=0), {}, "every must be above 0, got"),
        (lambda: LayerDrop(theta=0), {}, "theta must be above 0 and at most 1, got 0"),
        (lambda: StochasticDepthSchedule(start=1.0), {}, "start and end must be at least 0 and differ, got 1.0"),
        (lambda: StochasticDepthSchedule(until=0), {}, "until must be above 0 and at most 1, got 0"),
        (lambda: StochasticDepthSchedule(stages=1), {}, "stages must be at least 2, got 1"),
        (lambda: SequenceLength(), {}, "exactly one of start and lengths must be set"),
        (lambda: SequenceLength(8, lengths={0: 8}), {}, "exactly one of start and lengths must be set, got "),
        (lambda: SequenceLength(8, method="mask"), {}, "method must be one of split, truncate, got mask"),
        (lambda: SequenceLength(4), {}, "a length must be at least 8, the multiple, got 4"),
        (lambda: SequenceLength(lengths={"10%": 8}), {}, "lengths must have the first length of the run under 0"),
        (lambda: SequenceLength(lengths={0: []}), {}, "a list of lengths must not be empty"),
        (lambda: SequenceLength(8, until="9 samples"), {}, "until must be in epochs or percent, got"),
        (lambda: SequenceLength(8, until=0), {}, "until must be above 0, got 0"),
        (lambda: SequenceLength(8, multiple=0), {}, "multiple must be at least 1, got 0"),
        (lambda: TokenDrop(1.0), {}, "start must be above 0 and below 1, got 1.0"),
        (lambda: TokenDrop(multiple=0), {}, "multiple must be at least 1, got 0"),
        (lambda: TokenDrop(until="9 samples"), {}, "until must be in epochs or percent, got '9 samples'"),
        (lambda: Energy(-1), {}, "grams_per_kwh must be at least 0, got -1"),
        (Profile, {"wait": -1}, "wait must be at least 0, got -1"),
        (Profile, {"active": 0}, "active must be at least 1, got 0"),
        (Profile, {"formats": ["chrom"]}, "got chrom; did you mean 'chrome'"),
        (Profile, {"formats": ["nvtx", "chrome"]}, "formats must be \\[nvtx\\] alone"),
        (Profile, {"ranks": []}, "ranks must be different numbers from 0"),
        (Profile, {"machine": "h1000"}, "machine must be one of"),
        (Prune, {}, "amount must be set without a pattern or masks"),
        (Prune, {"amount": 1.5}, "above 0 and below 1, a fraction of the weights, got 1.5; 0.8 prunes four of five"),
        (Prune, {"pattern": "124"}, "pattern must be none or n:m in quotes, such as '2:4', got '124'"),
        (Prune, {"pattern": "4:4"}, "must have 1 <= n < m, got 4:4"),
        (Prune, {"pattern": "2:4", "amount": 0.5}, "amount must be left out with pattern '2:4', which prunes 0.5"),
        (Prune, {"amount": 0.5, "begin": "80%", "end": "40%"}, "begin must be before end, got 80% and 40%"),
        (Prune, {"amount": 0.5, "begin": "500 samples"}, "begin must be in epochs or percent, got '500 samples'"),
        (Prune, {"amount": 0.5, "every": 0}, "every must be at least 1 step, got 0"),
        (Prune, {"amount": 0.5, "method": "random"}, "method must be one of magnitude, movement, got random"),
        (Prune, {"amount": 0.5, "kernels": "semi_structured"}, "semi_structured must have pattern: '2:4', got 'none'"),
        (Quantise, {"scheme": "int9"}, "got int9; did you mean 'int8'"),
        (Quantise, {"start": "100 samples"}, "start must be in epochs or percent, got"),
        (Quantise, {"scheme": "int8", "group_size": 64}, "group_size must be unset for scheme int8"),
        (Quantise, {"scheme": "int4_weights", "group_size": 50}, "one of 32, 64, 128, got 50; set 64"),
        (Quantise, {"scheme": "int8_static", "when": "aware"}, "when must be post for scheme int8_static"),
        (Quantise, {"start_bits": 12}, "when must be aware with start_bits"),
        (Quantise, {"when": "aware", "start_bits": 8}, "start_bits must be from 9 to 16, got 8; set 16"),
        (Quantise, {"when": "aware", "period": 3}, "start_bits must be set with period"),
        (Quantise, {"when": "aware", "mixed_bits": True}, "start_bits must be set with mixed_bits"),
        (Quantise, {"when": "aware", "start_bits": 12, "period": 0}, "period must be at least 1"),
        (Quantise, {"export": ["model.tflite"]}, "export must end in .* got model.tflite; set model.onnx"),
        (Quantise, {"export": ["model.pt2"], "report": False}, "report must be true to export"),
        (ActivationCheckpoint, {"mode": "some"}, "mode must be one of"),
        (ActivationCheckpoint, {"every": 0}, "got 0; use 1"),
        (ActivationCheckpoint, {"mode": "selective", "offload": True}, "use mode full, or leave offload out"),
        (BatchMix, {"label_smoothing": 1.0}, r"label_smoothing must be at least 0 and below 1"),
        (BatchMix, {"group_size": 1}, "at least 2 images"),
        (Compile, {"scope": "block"}, "got block; did you mean 'blocks'"),
        (Compile, {"mode": "max-autotun"}, "did you mean 'max-autotune'"),
        (Compile, {"evaluate": "yes"}, "evaluate must be one of eager, compiled"),
        (Compile, {"backend": "inducter"}, "did you mean 'inductor'"),
        (Compile, {"backend": "aot_eager", "mode": "max-autotune"}, "must be inductor for mode max-autotune, got"),
        (Compile, {"max_sizes": 0}, "at least 1"),
        (lambda: GradientCompression("onebit"), {}, "got onebit; did you mean 'one_bit'"),
        (lambda: GradientCompression("one_bit", block=100), {}, "block must be a multiple of 8, got 100; set 96"),
        (lambda: GradientCompression("powersgd", start_step=1), {}, "start_step must be at least 2 for powersgd"),
        (DynamicBatchSize, {}, "got none; set one"),
        (DynamicBatchSize, {"schedule": {0: 8}, "noise_scale": NoiseScale(max_batch_size=8)}, "got schedule and noise"),
        (DynamicBatchSize, {"schedule": {0: 0}}, "at least 1"),
        (DynamicBatchSize, {"schedule": {0: 8}, "max_micro_batch": 0}, "max_micro_batch must be at least 1"),
        (DynamicBatchSize, {"schedule": {0: 8}, "lr_rule": "cubic"}, "none, sqrt, linear"),
        (DynamicBatchSize, {"decay_to_growth": LRDecay(factor=2, at=[1])}, "above 0 and below 1"),
        (DynamicBatchSize, {"decay_to_growth": LRDecay(factor=0.1)}, "got none; set one"),
        (DynamicBatchSize, {"decay_to_growth": LRDecay(factor=0.1, at=[1], every=1)}, "leave out the others"),
        (DynamicBatchSize, {"decay_to_growth": LRDecay(factor=0.1, every=0)}, "above 0"),
        (DynamicBatchSize, {"decay_to_growth": LRDecay(factor=0.1, at=["soon"])}, "a point must be like"),
        (lambda: AdaptiveGradientClipping(0.0), {}, "clip_factor must be above 0"),
        (lambda: GradientNoise(-0.1), {}, "eta must be at least 0"),
        (lambda: SkipSpikes(1.0), {}, "threshold must be above 1"),
        (lambda: SkipSpikes(window=1), {}, "window must be at least 2"),
        (LowPrecision, {"min_features": 0}, "min_features must be at least 1, got 0"),
        (LowPrecision, {"scheme": "fp8_rowise"}, "scheme must be one of int8, fp8, .*did you mean 'fp8_rowwise'"),
        (LowPrecision, {"emulate": True}, "emulate must be false for scheme int8"),
        (lambda: WSD(warmup=0.5, decay=0.6), {}, "their sum at most 1, got 0.5 and 0.6"),
        (lambda: WSD(shape="exponential"), {}, "final must be above 0 and below 1, got 0.0"),
        (lambda: WSD(max_lr=0.0), {}, "WSD: max_lr must be above 0, got 0.0"),
        (lambda: WarmRestarts(ratio=0), {}, "ratio must be above 0, got 0"),
        (lambda: Cyclic(mode="round"), {}, "mode must be one of triangular, triangular2, exp_range, got round"),
        (lambda: Rewarm(points=[0.5]), {}, "points must be ascending fractions below 1, the first 0, got"),
        (lambda: Rewarm(points=[0.0, 0.6, 0.3]), {}, "points must be ascending"),
        (LRFinder, {"min_lr": 1.0, "max_lr": 0.1}, "min_lr must be above 0 and below max_lr, got 1.0 and 0.1"),
        (LRFinder, {"num_steps": 5}, "at least 20"),
        (LRFinder, {"suggestion": "step"}, "did you mean 'steep'"),
        (MicroBatchFinder, {"max_size": 0}, "max_size must be at least 1"),
        (MicroBatchFinder, {"margin": 1.0}, r"margin must be at least 0 and below 1"),
        (MixRecipe, {"mixup_alpha": 0, "cutmix_alpha": 0}, "got 0 for both"),
        (MixRecipe, {"prob": 1.1}, "prob must be at least 0 and at most 1"),
        (MixRecipe, {"mode": "half"}, "batch, pair, elem"),
        (MixRecipe, {"cutmix_minmax": (0.8, 0.2)}, "the smaller one first"),
        (OneCycle, {"pct_start": 0.6, "three_phase": True}, "at most 0.5 with three phases"),
        (OneCycle, {"max_lr": -1.0}, "above 0"),
        (OneCycle, {"preset": "fast"}, "fastai, torch"),
        (ProgressiveResizing, {}, "got none; set one"),
        (ProgressiveResizing, {"sizes": {0: 8}, "start_size": 8}, "leave out the others"),
        (ProgressiveResizing, {"sizes": {0: 8}, "stages": 2}, "must not be set with sizes, got None and 2"),
        (ProgressiveResizing, {"sizes": {1: 8}}, "the first size of the run under 0"),
        (ProgressiveResizing, {"sizes": {0: 8, "120%": 16}}, "set '100%' or less"),
        (ProgressiveResizing, {"start_size": -8}, "got -8"),
        (ProgressiveResizing, {"start_size": 8, "stages": 1}, "stages must be at least 2"),
        (RectangularValidation, {"every_n_epochs": 0}, "every_n_epochs"),
        (RectangularValidation, {"multiple": 0}, "multiple"),
        (RectangularValidation, {"max_ratio": 0.5}, "max_ratio"),
    ],
)
def test_arguments_are_refused(make: Any, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(DloError, match=message):
        make(**arguments)
