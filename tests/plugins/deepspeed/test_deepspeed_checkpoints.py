"""What DeepSpeed has saved, others take up, and the other way round, on any number of ranks, bit for bit."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback, seed_everything

from dlo_framework.checkpoint.formats import find_importer
from dlo_framework.cli.commands.checkpoint_command import main
from dlo_framework.distributed.strategy import register_data_parallel
from dlo_framework.errors import DloError
from dlo_framework.testing import run_distributed
from dlo_plugins.deepspeed.partitions import Stage3Layout, Stage12Layout
from dlo_tasks.imagenet.digits import DigitsData
from support.checkpoints import check_same, tensors
from support.deepspeed_nets import SAVED, STEPS, STRATEGIES, Model, ds, runs, train, trainer

BRIDGES = [name for name in STRATEGIES if name.startswith("deepspeed")]
#: How many ranks train, and by what; each goes on from the one before, the first from one process.
SHORT = [(3, "deepspeed3"), (2, "fsdp")]
LONG = [(3, "deepspeed1"), (2, "deepspeed0"), (4, "deepspeed2_offload"), (2, "deepspeed3_cut"), (3, "zero3")]
LONG += [(2, "deepspeed3_offload"), (4, "deepspeed2"), (1, "ddp")]


@pytest.mark.parametrize("chain", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)])
def test_it_goes_on_from_others_and_they_from_it_at_other_world_sizes(
    tmp_path: Path, chain: list[tuple[int, str]]
) -> None:
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


class Joined(Model):
    """Has one parameter group, where the checkpoint has two with other settings."""

    def configure_optimizers(self):
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad])


class Other(Model):
    """Has the groups' settings, and an optimizer with other state."""

    def configure_optimizers(self):
        (before,), _ = super().configure_optimizers()
        return torch.optim.Adamax(
            [{key: group[key] for key in ("params", "weight_decay")} for group in before.param_groups]
        )


def _changed(rank: int, world_size: int, folder: Path) -> list[str]:
    register_data_parallel()
    train(world_size, STRATEGIES["deepspeed3_cut"](), folder)
    found = []
    for kind in (Joined, Other):
        made = trainer(world_size, STRATEGIES["deepspeed3_cut"]())
        with pytest.raises(DloError) as refusal:
            made.fit(kind(), datamodule=DigitsData(image_size=16, batch_size=48), ckpt_path=folder)
        found.append(str(refusal.value))
    return found


def test_other_parameter_groups_and_another_optimizer_are_refused(tmp_path: Path) -> None:
    for joined, other in run_distributed(_changed, 2, tmp_path / "saved", backend=None):
        assert "parameter groups must be those of the checkpoint" in joined
        assert "optimizer must be the checkpoint's, with the settings and state of AdamW for Adamax" in other


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
