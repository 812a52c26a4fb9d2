"""DeepSpeed on ranks: stages, the bridge's options and a JSON, what else a run has, and checkpoints."""

import functools
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything

from dlo_framework.checkpoint.formats import find_importer
from dlo_framework.cli.commands.checkpoint_command import main
from dlo_framework.distributed.strategy import register_data_parallel
from dlo_framework.errors import DloError
from dlo_framework.testing import Case, assert_parity, run_distributed
from dlo_framework.watch.state_bytes import StateReport
from dlo_plugins.compile.callback import Compile
from dlo_plugins.deepspeed.partitions import Stage3Layout, Stage12Layout
from dlo_plugins.deepspeed.strategy import DeepSpeedBridge
from dlo_tasks.imagenet.digits import DigitsData
from support.checkpoints import check_same, tensors
from support.curricula_runs import images
from support.deepspeed_nets import CUT_ALL, SAVED, STEPS, STRATEGIES, Model, ds, runs, train, trainer
from support.runs import Watch

FEW = 3


def _losses(world_size: int, strategy: Any, module: LightningModule) -> list[float]:
    seed_everything(3, workers=True, verbose=False)
    watch = Watch()
    trainer(world_size, strategy, [watch], max_steps=FEW).fit(
        module, datamodule=DigitsData(image_size=16, batch_size=48)
    )
    return watch.losses


def _recomputed(world_size: int) -> None:
    """`cpu_checkpointing` makes a task's blocks run twice a step, and changes no loss."""
    for stage in (2, 3):
        found = []
        for options in ({}, {"cpu_checkpointing": True}):
            bridge = ds(stage, config=CUT_ALL if stage == 3 else None, **options)()
            seed_everything(3, workers=True, verbose=False)
            task, _ = images(model_args={"proj_drop_rate": 0.1, "depth": 2})
            task.configure_model()
            calls: list[int] = []
            for number, block in enumerate(task.model.blocks):
                block.norm1.register_forward_hook(lambda *_, number=number, calls=calls: calls.append(number))
            found.append((_losses(world_size, bridge, task), sorted(calls)))
        (plain, once), (recomputed, twice) = found
        assert once == sorted([0, 1] * FEW), stage
        assert twice == sorted([0, 1] * 2 * FEW), stage
        assert recomputed == plain, stage
    task.recompute = True  # As CausalLM has it.
    with pytest.raises(DloError, match="got recompute: true of ImageClassifier too"):
        ds(2, cpu_checkpointing=True)()._checkpoint_activations(task)


def _options(rank: int, world_size: int, folder: Path) -> None:
    register_data_parallel()
    seed_everything(3, workers=True, verbose=False)
    expected = _losses(world_size, "ddp", Model())
    buckets = {"reduce_bucket_size": 2000, "allgather_bucket_size": 2000}
    profile = {"flops_profiler": {"output_file": str(folder / "flops.txt")}, "wall_clock_breakdown": True}
    accurate = {
        "small buckets": ds(2, overlap_comm=True, contiguous_gradients=False, **buckets),
        "small buckets, stage 1": ds(1, overlap_comm=False, contiguous_gradients=True, **buckets),
        "hpz": ds(3, hpz=2, config={"zero_optimization": {"stage3_param_persistence_threshold": 0}}),
        "profiled": ds(2, flops_profiler=2, comms_logger=True, config=profile),
    }
    for name, bridge in accurate.items():
        seed_everything(3, workers=True, verbose=False)
        strategy, model = bridge(), Model()
        found = _losses(world_size, strategy, model)
        assert found == pytest.approx(expected, rel=1e-5), name
        numel = sum(p.ds_numel if strategy.stage == 3 else p.numel() for p in model.parameters() if p.requires_grad)
        found_size = strategy.engine.deepspeed.zero_reduce_bucket_size()
        assert found_size == (2000 if "small" in name else numel), name
    from deepspeed.comm import comm

    assert comm.cdb.shm_comm_op is None, "nothing is compiled when ranks meet"
    seed_everything(3, workers=True, verbose=False)
    rounded = _losses(world_size, ds(2, communication_dtype="bf16")(), Model())
    assert rounded == pytest.approx(expected, rel=1e-2)
    assert rounded != expected
    _evaluated_alike(world_size)
    _recomputed(world_size)


def _evaluated_alike(world_size: int) -> None:
    """In half precision, evaluation beside the engine is what it is through it."""
    data, options = DigitsData(image_size=16, batch_size=48), {"limit_val_batches": 2, "val_check_interval": FEW}
    made = trainer(world_size, ds(2)(), max_steps=FEW, precision="bf16-mixed", check_val_every_n_epoch=None, **options)
    module = Model()
    made.fit(module, datamodule=data)
    inside = float(made.callback_metrics["val_loss"])
    (after,) = made.validate(module, datamodule=data, verbose=False)
    assert after["val_loss"] == pytest.approx(inside, rel=1e-6)


def test_options_do_what_they_say(tmp_path: Path) -> None:
    run_distributed(_options, 2, tmp_path, backend=None)
    assert "DeepSpeed Flops Profiler" in (tmp_path / "flops.txt").read_text()


def test_short_names_are_presets() -> None:
    from lightning.pytorch.strategies import StrategyRegistry

    DeepSpeedBridge.register_strategies(StrategyRegistry)
    for name, stage in (("deepspeed", 2), ("deepspeed_0", 0), ("deepspeed_1", 1), ("deepspeed_3_offload", 3)):
        found = StrategyRegistry.get(name)
        assert type(found) is DeepSpeedBridge
        assert found.asked["zero_optimization"]["stage"] == stage
    assert StrategyRegistry.get("deepspeed_3_offload").asked["zero_optimization"]["offload_param"]["device"] == "cpu"


# DeepSpeed beside what else a run has: an average of the weights, finders, recomputation, evaluation, a second fit


def _twice(rank: int, world_size: int, folder: Path, names: list[str]) -> dict[str, Any]:
    """Trains, validates and trains again with one trainer; then a new one evaluates what was saved."""
    register_data_parallel()
    found = {}
    for name in names:
        seed_everything(3, workers=True, verbose=False)
        net, data = Model(), DigitsData(image_size=16, batch_size=48)
        report = StateReport()
        made = trainer(world_size, STRATEGIES[name]() if world_size > 1 else "auto", [report], max_steps=3)
        made.fit(net, datamodule=data)
        made.limit_val_batches = 4
        made.validate(net, datamodule=data, verbose=False)
        made.limit_val_batches = 0
        made.fit_loop.epoch_loop.max_steps = 5
        made.fit(net, datamodule=data)
        made.save_checkpoint(folder / name)
        other = trainer(world_size, STRATEGIES[name]() if world_size > 1 else "auto", limit_val_batches=4)
        (measured,) = other.validate(Model(), datamodule=data, ckpt_path=folder / name, verbose=False)
        found[name] = measured["val_loss"], report.summary()
    return found


def test_one_trainer_trains_twice_and_another_evaluates_and_memory_is_counted(tmp_path: Path) -> None:
    names = ["deepspeed2", "deepspeed3_cut"]
    (alone,) = run_distributed(_twice, 1, tmp_path, ["ddp"], backend=None)
    found = run_distributed(_twice, 2, tmp_path, names, backend=None)[0]
    trained = sum(p.numel() for p in Model().parameters() if p.requires_grad) * 4
    for name, (loss, held) in found.items():
        assert loss == pytest.approx(alone["ddp"][0], rel=1e-5), name
        assert held["optimizer"] == pytest.approx(trained, rel=0.02)  # Two moments over two ranks.
        # DeepSpeed holds a master copy beside parameters that are in single precision already, halved in all stages.
        whole = 0.5 if name == "deepspeed3_cut" else 1.0
        assert held["parameters"] == pytest.approx(trained * (whole + 0.5), rel=0.1), name


class Unfreeze(Callback):
    """Lets a frozen block train from the second step on."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        pl_module.blocks[1].requires_grad_(False)

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        pl_module.blocks[1].requires_grad_(batch_idx > 0)


class Adversaries(Model):
    """Two optimizers."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.blocks, self.head)]


class ByHand(Model):
    """Two backward passes a step, the first of them said to be one, or not."""

    def __init__(self, told: bool) -> None:
        super().__init__()
        self.automatic_optimization, self.told = False, told

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        with optimizer.toggle_model(sync_grad=not self.told):
            self.manual_backward(super().training_step(batch, batch_idx) / 2)
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss / 2)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class OwnClipping(Model):
    """Clips by itself."""

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        self.clip_gradients(optimizer, gradient_clip_val=0.3, gradient_clip_algorithm="norm")


#: Modules, strategies, callbacks, and a part of the error.
REFUSED: list[tuple[Any, Any, list[Any], str]] = [
    (partial(Model, "lamb"), "deepspeed2", [], "got Lamb, which needs full tensors"),
    (partial(Model, "lookahead"), "deepspeed1", [], "Lookahead around AdamW: DeepSpeed partitions only the outer one"),
    (Adversaries, "deepspeed2", [], "must return one optimizer under DeepSpeed, got 2"),
    (partial(ByHand, told=False), "deepspeed2", [], "must run one synchronised backward pass per optimizer step"),
    (OwnClipping, "deepspeed3", [], "must clip by norm to 0.0, as DeepSpeed does"),
    (Model, "deepspeed3", [Compile], "it gathers a block's parameters layer by layer"),
    (Model, "deepspeed3_cut", [Unfreeze], "requires_grad of blocks.1.0.bias, blocks.1.0.weight"),
    (Model, ds(2, config={"optimizer": {"type": "AdamW"}}), [], "optimizer and scheduler must be set together"),
]


def _refused(rank: int, world_size: int) -> None:
    data = DigitsData(image_size=16, batch_size=48)
    for module, name, callbacks, message in REFUSED:
        run = trainer(world_size, STRATEGIES.get(name, name)(), [make() for make in callbacks], max_steps=2)
        with pytest.raises(DloError, match=message):
            run.fit(module(), datamodule=data)
    allowed = trainer(world_size, STRATEGIES["deepspeed2"](), max_steps=2)
    allowed.fit(ByHand(told=True), datamodule=data)
    assert allowed.global_step == 2


def test_what_deepspeed_would_get_wrong_is_refused() -> None:
    run_distributed(_refused, 2, backend=None)


# DeepSpeed on several ranks trains as one process does: stages, optimizers, accumulation, clipping, offload


WARMUP = {"warmup_min_lr": 1e-4, "warmup_max_lr": 4e-3, "warmup_num_steps": 2, "warmup_type": "linear"}
ADAMW: dict[str, Any] = {"lr": 4e-3, "betas": (0.8, 0.99), "weight_decay": 0.1}
JSON: dict[str, Any] = {
    "train_batch_size": 96,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "Adam", "params": ADAMW},
    "scheduler": {"type": "WarmupDecayLR", "params": {**WARMUP, "total_num_steps": "auto"}},
}


class AsInJson(Model):
    """Under what :data:`JSON` says, which replaces it on the ranks: torch's AdamW, DeepSpeed's own scheduler."""

    def configure_optimizers(self) -> Any:
        from deepspeed.runtime.lr_schedules import WarmupDecayLR

        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], **ADAMW)
        schedule = WarmupDecayLR(optimizer, self.trainer.max_steps, **WARMUP)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def lr_scheduler_step(self, scheduler, metric) -> None:
        """Steps it: DeepSpeed's schedulers are not torch's, and Lightning leaves those to the module."""
        scheduler.step()


def build(kind: str = "adamw") -> tuple[LightningModule, LightningDataModule]:
    """Returns a task and its data by name."""
    return AsInJson() if kind == "json" else Model(kind), DigitsData(image_size=16, batch_size=48, val_fraction=0.03)


class HostStep(DeepSpeedBridge):
    """Steps offloaded state as beside an accelerator, by torch's fused kernel."""

    steps_on_host = True

    def shard(self, trainer: Trainer) -> None:
        super().shard(trainer)
        assert all(group["fused"] for group in self._running.deepspeed.basic_optimizer.param_groups)


def case(strategy: Any, kind: str = "adamw", **trainer: Any) -> Case:
    return Case(strategy, {"kind": kind}, trainer, f"{strategy.args}, {strategy.keywords}, {kind}, {trainer}")


OFFLOADED = {2: ds(2, offload_optimizer="cpu"), 3: ds(3, offload_optimizer="cpu", offload_parameters="cpu")}
ON_HOST = [functools.partial(HostStep, *bridge.args, **bridge.keywords) for bridge in OFFLOADED.values()]


def test_stages_are_one_process() -> None:
    cases = [
        case(ds(0), "sgd", accumulate_grad_batches=2, gradient_clip_val=0.1),
        case(ds(1, round_robin_gradients=True), accumulate_grad_batches=2),
        case(OFFLOADED[2], accumulate_grad_batches=2, gradient_clip_val=0.1),
        case(ds(3, config=CUT_ALL), "sgd", accumulate_grad_batches=2, gradient_clip_val=0.1),
        case(ON_HOST[1], gradient_clip_val=0.1),
        case(functools.partial(DeepSpeedBridge, config=JSON), "json", accumulate_grad_batches=2, gradient_clip_val=0.5),
    ]
    assert_parity(build, cases, steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_of_it_over_fifty_steps(ranks: int) -> None:
    bridges = [*(ds(stage) for stage in range(4)), *OFFLOADED.values(), ds(3, config=CUT_ALL)]
    cases = [
        case(bridge, kind, accumulate_grad_batches=accumulate, gradient_clip_val=clip)
        for bridge in bridges
        for kind in ("adamw", "sgd")
        for accumulate, clip in ((1, 0.1), (4, None))
    ]
    assert_parity(build, cases, world_size=ranks, steps=50, rtol=1e-5, timeout=3500)
    halves = [case(ds(stage), "sgd", precision="bf16-mixed") for stage in range(4)]
    assert_parity(build, halves, world_size=ranks, steps=8)


# --- checkpoints: what DeepSpeed has saved, others take up, and the other way round, on any number of ranks ---------


BRIDGES = [name for name in STRATEGIES if name.startswith("deepspeed")]
#: How many ranks train, and by what; each goes on from the one before, the first from one process.
SHORT = [(3, "deepspeed3"), (2, "fsdp")]
LONG = [(3, "deepspeed1"), (2, "deepspeed0"), (4, "deepspeed2_offload"), (2, "deepspeed3_cut"), (3, "zero3")]
LONG += [(2, "deepspeed3_offload"), (4, "deepspeed2"), (1, "ddp")]


@pytest.mark.parametrize("chain", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)])
def test_it_goes_on_from_others_and_they_from_it_on_other_ranks(tmp_path: Path, chain: list[tuple[int, str]]) -> None:
    (alone,) = run_distributed(runs, 1, [("ddp", tmp_path / "0", None)], backend=None)
    for number, (world_size, name) in enumerate(chain):
        before, after = tmp_path / str(number), tmp_path / str(number + 1)
        losses = run_distributed(runs, world_size, [(name, after, before)], backend=None)[0][0]
        assert losses == pytest.approx(alone[0][SAVED:], rel=1e-6), name
        check_same(before, after)


@pytest.mark.parametrize(
    "names",
    [["deepspeed3_cut"], pytest.param(BRIDGES, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_a_resumed_run_is_bit_equal(tmp_path: Path, names: list[str]) -> None:
    whole = [(name, tmp_path / name, None) for name in names]
    resumed = [(name, tmp_path / f"{name}-again", tmp_path / name) for name in names]
    found = run_distributed(runs, 2, [*whole, *resumed], backend=None, timeout=200)[0]
    for name, first, second in zip(names, found[: len(whole)], found[len(whole) :], strict=True):
        assert len(first) == STEPS
        assert second == first[SAVED:], name
        check_same(tmp_path / name, tmp_path / f"{name}-again")


HALVES = {"precision": "bf16-mixed"}
WINDOWS = {"accumulate_grad_batches": 4, "max_steps": 3, "limit_train_batches": 12}


@pytest.mark.slow
def test_it_resumes_in_half_precision_and_in_the_middle_of_an_accumulation(tmp_path: Path) -> None:
    """With several ranks' gradients still apart (stages 0 and 1), a resumed sum is rounded in another order."""
    jobs: list[tuple[Any, ...]] = []
    for name in ("deepspeed2", "deepspeed3_cut"):
        jobs.append((name, tmp_path / name, None, HALVES))
        jobs.append((name, tmp_path / f"{name}-again", tmp_path / name, HALVES))
    accumulated = ("deepspeed0", "deepspeed1", "deepspeed2", "deepspeed3", "deepspeed2_offload", "deepspeed3_offload")
    for name in accumulated:
        jobs.append((name, tmp_path / f"{name}-open", None, {**WINDOWS, "after": 6}))
        jobs.append((name, tmp_path / f"{name}-closed", tmp_path / f"{name}-open", WINDOWS))
    found = run_distributed(runs, 2, jobs, backend=None, timeout=280)[0]
    for first, second, (name, _, _, options) in zip(found[::2], found[1::2], jobs[::2], strict=True):
        after = options.get("after", SAVED)
        if name in ("deepspeed0", "deepspeed1"):
            assert second == pytest.approx(first[after:], rel=1e-6), name
        else:
            assert second == first[after:], (name, options)


class Both(Callback):
    """Saves dlo's checkpoint and DeepSpeed's own folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer, pl_module) -> None:
        trainer.save_checkpoint(self.folder / "dlo")
        engine = trainer.strategy.engine
        if engine.master_weights is not None:
            engine.master_weights.hide_partitions()
        engine.deepspeed.save_checkpoint(str(self.folder / "theirs"))
        if engine.master_weights is not None:
            engine.master_weights.expose_partitions()


FOLDERS = {
    "0": ds(0),
    "1": ds(1, round_robin_gradients=True),
    "2": ds(2),
    "3": STRATEGIES["deepspeed3_cut"],
    "aligned": ds(2, config={"zero_optimization": {"parameter_alignment": True}}),
}


def _both(rank: int, world_size: int, folder: Path) -> None:
    register_data_parallel()
    for name, strategy in FOLDERS.items():
        seed_everything(7, workers=True, verbose=False)
        options: dict[str, Any] = {"precision": "bf16-mixed"} if name in ("2", "3", "aligned") else {}
        made = trainer(world_size, strategy(), [Both(folder / name)], max_steps=3, **options)
        made.fit(Model(), datamodule=DigitsData(image_size=16, batch_size=48))


@pytest.mark.slow
def test_deepspeeds_own_folders_become_checkpoints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_distributed(_both, 3, tmp_path, backend=None)
    for name in FOLDERS:
        theirs = tmp_path / name / "theirs"
        assert find_importer(theirs).name == "DeepSpeed"
        assert main(["convert", str(theirs), str(tmp_path / name / "made")]) == 0
        expected, found = tensors(tmp_path / name / "dlo"), tensors(tmp_path / name / "made")
        assert expected.keys() == found.keys(), name
        for key, value in expected.items():
            assert torch.equal(value, found[key].to(value.dtype)), (name, key)
    assert "restarts everything else" in capsys.readouterr().err
    assert len(train(1, "auto", resume=tmp_path / "2" / "made", max_steps=2)) == 2


def import_folder(source: Path, target: Path) -> None:
    find_importer(source).convert(source, target)


def test_a_folder_that_is_unsafe_cut_or_not_whole_is_refused(tmp_path: Path) -> None:
    def folder(name: str, files: dict[str, Any]) -> Path:
        (tmp_path / name / "step").mkdir(parents=True)
        (tmp_path / name / "latest").write_text("step")
        for file, content in files.items():
            torch.save(content, tmp_path / name / "step" / file)
        return tmp_path / name

    unsafe = folder("unsafe", {"mp_rank_00_model_states.pt": {"module": {}, "hook": Both(tmp_path)}})
    with pytest.raises(DloError, match=r"refusing .*Both not allowed; nothing executed"):
        import_folder(unsafe, tmp_path / "out")
    cut = folder("cut", {"mp_rank_00_model_states.pt": {}, "mp_rank_01_model_states.pt": {}})
    with pytest.raises(DloError, match="tensor or pipeline parallelism has split"):
        import_folder(cut, tmp_path / "out")
    part = {"optimizer_state_dict": {"zero_stage": 2}}
    short = folder(
        "short",
        {
            "mp_rank_00_model_states.pt": {"dp_world_size": 2, "module": {}},
            "zero_pp_rank_0_mp_rank_00_optim_states.pt": part,
        },
    )
    with pytest.raises(DloError, match="files of 2 ranks, which saved it, got 1"):
        import_folder(short, tmp_path / "out")
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "latest").write_text("step")
    with pytest.raises(DloError, match="names the folder step, which is not beside it"):
        import_folder(tmp_path / "gone", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# deepSpeed's partitions: every element has one place on one rank, and the places are those of DeepSpeed's own code


SIZES = st.lists(st.integers(1, 40), min_size=1, max_size=8)
RANKS = st.integers(1, 9)


def partitions_of(layout, numels: list[int], ranks: int, length: int) -> list[torch.Tensor]:
    """Returns each rank's partition: elements numbered over all parameters, padding -1."""
    starts = torch.tensor([0, *numels]).cumsum(0).tolist()
    found = []
    for rank in range(ranks):
        flat = torch.full((length,), -1)
        for piece in layout.slices(rank):
            first = starts[piece.parameter] + piece.start
            place = flat[piece.offset : piece.offset + piece.length]
            assert (place == -1).all(), "two pieces in one place"
            place.copy_(torch.arange(first, first + piece.length))
        found.append(flat)
    return found


@given(SIZES, RANKS, st.sampled_from([1, 4, 8]))
def test_a_flat_buffer_is_cut_into_equal_segments(numels: list[int], ranks: int, aligned: int) -> None:
    layout = Stage12Layout(tuple(numels), ranks, aligned)
    found = torch.cat(partitions_of(layout, numels, ranks, layout.segment))
    # As DeepSpeed's flatten_dense_tensors_aligned has it: gaps behind all but the last, then up to the alignment.
    runs, at = [], 0
    for number, numel in enumerate(numels):
        runs.append(torch.arange(sum(numels[:number]), sum(numels[:number]) + numel))
        at += numel
        if number < len(numels) - 1:
            runs.append(torch.full((-at % aligned,), -1))
            at += -at % aligned
    whole = torch.cat(runs)
    padded = torch.cat([whole, torch.full((-len(whole) % (2 * ranks),), -1)])
    assert torch.equal(found, padded)


@given(SIZES, RANKS)
def test_each_parameter_is_cut_by_itself(numels: list[int], ranks: int) -> None:
    layout = Stage3Layout(tuple(numels), ranks)
    found = partitions_of(layout, numels, ranks, sum(layout.segments))
    starts = torch.tensor([0, *numels]).cumsum(0).tolist()
    for rank, flat in enumerate(found):
        for number, part in enumerate(flat.split(layout.segments)):
            whole = torch.full((layout.segments[number] * ranks,), -1)
            whole[: numels[number]] = torch.arange(starts[number], starts[number + 1])
            assert torch.equal(part, whole.chunk(ranks)[rank])
