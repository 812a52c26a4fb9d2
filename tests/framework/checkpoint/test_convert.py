"""Conversion of checkpoints, the command that does it, formats that packages add, and stores of other kinds."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from hypothesis import given
from hypothesis import strategies as st
from jsonargparse import Namespace
from lightning.pytorch import LightningModule
from lightning.pytorch.demos.boring_classes import RandomDataset
from safetensors.torch import load_file

from dlo_framework.checkpoint import (
    check,
    load,
    loading,
    locate,
    newest_valid,
    note_resumption,
    read_manifest,
    recover,
    remove,
    resumptions,
    save,
    step_of,
    verify,
)
from dlo_framework.checkpoint import store as stores
from dlo_framework.checkpoint.formats.lightning_file import import_lightning, match_by_shape
from dlo_framework.checkpoint.formats.safetensors_file import export_weights, from_single_file, model_weights
from dlo_framework.checkpoint.history import superseded
from dlo_framework.checkpoint.store import LocalStore, store_of
from dlo_framework.cli.lightning_cli import DloCLI
from dlo_framework.cli.main import main
from dlo_framework.errors import DloError
from dlo_framework.shards import FlatShard, full_box
from support import distributions
from support.memory_store import MemoryStore
from support.trainers import quiet_trainer


class Small(LightningModule):
    """Two kinds of groups, frozen weights, buffers: the cases that make numbers hard to match."""

    def __init__(self, groups: bool = False) -> None:
        super().__init__()
        self.groups = groups
        norm = torch.nn.BatchNorm1d(16)
        self.model = torch.nn.Sequential(torch.nn.Linear(32, 16), norm, torch.nn.Linear(16, 4), torch.nn.Linear(4, 1))
        self.model[2].requires_grad_(False)
        self.register_buffer("scale", torch.ones(()))

    def training_step(self, batch, batch_idx):
        return (self.model(batch) * self.scale).square().mean()

    def configure_optimizers(self):
        trained = [p for p in self.parameters() if p.requires_grad]
        groups = [{"params": [p for p in trained if p.ndim > 1]}, {"params": [p for p in trained if p.ndim < 2]}]
        return torch.optim.AdamW(groups if self.groups else trained, lr=0.1)

    def train_dataloader(self):
        return torch.utils.data.DataLoader(RandomDataset(32, 16), batch_size=4)


def check_import(path, module, trainer) -> None:
    run = load(path)
    assert run["global_step"] == 3
    for name, tensor in module.state_dict().items():
        assert torch.equal(run["state_dict"][name], tensor)
    (optimizer,) = run["optimizer_states"]
    parameters = dict(module.named_parameters())
    trained = {name for name, parameter in parameters.items() if parameter.requires_grad}
    assert set(optimizer["state"]) == trained
    assert {name for group in optimizer["param_groups"] for name in group["params"]} == trained
    for name in trained:
        state = trainer.optimizers[0].state[parameters[name]]
        assert torch.equal(optimizer["state"][name]["exp_avg"], state["exp_avg"])
        assert torch.equal(optimizer["state"][name]["exp_avg_sq"], state["exp_avg_sq"])
        assert float(optimizer["state"][name]["step"]) == 3


@pytest.mark.parametrize("groups", [False, True])
def test_lightnings_own_trainer_goes_on_with_what_has_been_ours(tmp_path, groups, capsys):
    """Three steps, Lightning's file, ours, which has all, Lightning's again, three more steps; and six at once."""

    def fit(steps, checkpoint=None):
        torch.manual_seed(0)
        module = Small(groups)
        trainer = quiet_trainer(max_steps=steps, max_epochs=-1, default_root_dir=tmp_path)
        trainer.fit(module, ckpt_path=checkpoint, weights_only=True)
        return module, trainer

    module, trainer = fit(3)
    trainer.save_checkpoint(tmp_path / "theirs.ckpt")
    assert import_lightning(tmp_path / "theirs.ckpt", tmp_path / "ours.ckpt") == []
    check_import(tmp_path / "ours.ckpt", module, trainer)
    assert main(["checkpoint", "convert", str(tmp_path / "ours.ckpt"), str(tmp_path / "back.ckpt")]) == 0
    assert "a Lightning checkpoint file" in capsys.readouterr().out
    theirs, back = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("theirs", "back"))
    assert [group["params"] for group in back["optimizer_states"][0]["param_groups"]] == [
        group["params"] for group in theirs["optimizer_states"][0]["param_groups"]
    ]
    whole, _ = fit(6, tmp_path / "theirs.ckpt")
    after, trainer = fit(6, tmp_path / "back.ckpt")
    assert trainer.global_step == 6
    for name, tensor in whole.state_dict().items():
        assert torch.equal(after.state_dict()[name], tensor)


SHAPES = st.lists(st.sampled_from([(1,), (2,), (2, 2)]), min_size=1, max_size=7)


@given(SHAPES, st.data())
def test_an_assignment_that_is_found_is_the_only_one(shapes, data):
    """Against an exhaustive search for the tensors of each of two groups, in the model's order."""
    homes = [data.draw(st.sampled_from([0, 1, None])) for _ in shapes]
    truth = [[at for at, home in enumerate(homes) if home == group] for group in (0, 1)]
    groups = [[shapes[at] for at in places] for places in truth]
    solutions = set()
    for code in range(3 ** len(shapes)):
        choice = [code // 3**at % 3 for at in range(len(shapes))]
        if [[shapes[at] for at, home in enumerate(choice) if home == group] for group in (0, 1)] == groups:
            solutions.add(tuple(choice))
    found = match_by_shape(shapes, groups)
    assert found == (truth if len(solutions) == 1 else "more than one assignment to the parameters fits")


def test_what_does_not_fit_is_said_so():
    assert match_by_shape([(2,)], [[(3,)]]) == "no assignment to the parameters fits the shapes"
    assert match_by_shape([(2,)], [[(2,), (2,)]]) == "it has 2 parameters, and the model 1"
    assert match_by_shape([(2,), (3,)], [[None, None]]) == [[0, 1]]
    assert match_by_shape([], []) == []


@pytest.fixture
def checkpoint(tmp_path):
    weights = {"model.head.weight": torch.randn(4, 6), "model.head.bias": torch.randn(4), "loss.weight": torch.ones(4)}
    weights["model.scale"] = torch.tensor(1.0, dtype=torch.complex128)
    state = {name: {"exp_avg": torch.randn(t.shape), "step": torch.tensor(5.0)} for name, t in weights.items()}
    run = {
        "global_step": 7,
        "epoch": 2,
        "state_dict": weights,
        "optimizer_states": [{"state": state, "param_groups": [{"lr": 0.1, "params": list(weights)}]}],
        "callbacks": {"a/b": {"x": [FlatShard(torch.ones(4), torch.Size([4]), 0)]}},
        "loops": {"n": 3},
    }
    save(run, tmp_path / "step-7.ckpt", about={"strategy": "ZeroStrategy", "mesh": {"dp_shard": 1}})
    return tmp_path / "step-7.ckpt", run


def test_one_file_and_back(checkpoint, capsys):
    path, run = checkpoint
    one, again = path.with_name("one.safetensors"), path.with_name("again.ckpt")
    assert main(["checkpoint", "convert", str(path), str(one)]) == 0
    assert "model/model.head.weight" in load_file(one)
    assert main(["checkpoint", "convert", str(one), str(again)]) == 0
    assert capsys.readouterr().out == f"wrote {one} and {one.with_suffix('.state.pt')}\nwrote {again}\n"
    verify(again)
    read = load(again)
    assert list(read["state_dict"]) == list(run["state_dict"])
    for name, tensor in run["state_dict"].items():
        assert torch.equal(read["state_dict"][name], tensor)
        assert read["state_dict"].dtype(name) == tensor.dtype
        moment = run["optimizer_states"][0]["state"][name]["exp_avg"]
        assert torch.equal(read["optimizer_states"][0]["state"][name]["exp_avg"], moment)
    assert read["optimizer_states"][0]["param_groups"] == run["optimizer_states"][0]["param_groups"]
    assert read["callbacks"]["a/b"]["x"][0].tolist() == [1.0] * 4
    assert (read["loops"], read["global_step"]) == ({"n": 3}, 7)
    one.with_suffix(".state.pt").unlink()
    with pytest.raises(DloError, match=r"one\.state\.pt is not beside it"):
        main_or_raise("convert", one, path.with_name("no.ckpt"))


def main_or_raise(*words) -> int:
    from dlo_framework.cli.commands.checkpoint_command import main

    return main([str(word) for word in words])


def test_timm_loads_exported_weights_and_its_own_come_back(tmp_path):
    source = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=3)
    weights = {f"model.{name}": tensor for name, tensor in source.state_dict().items()}
    save({"state_dict": {**weights, "loss.weight": torch.ones(3)}}, tmp_path / "a.ckpt")
    assert export_weights(tmp_path / "a.ckpt", tmp_path / "w.safetensors") == (len(weights), 1)
    other = timm.create_model(
        "vit_tiny_patch16_224", img_size=32, num_classes=3, checkpoint_path=str(tmp_path / "w.safetensors")
    )
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, source.state_dict()[name])
    main_or_raise("convert", tmp_path / "w.safetensors", tmp_path / "b.ckpt")
    read = load(tmp_path / "b.ckpt")["state_dict"]
    assert all(torch.equal(read[name], tensor) for name, tensor in source.state_dict().items())


def test_torch_loads_exported_weights_without_us(tmp_path):
    module = Small()
    torch.save(
        {"state_dict": module.state_dict(), "pytorch-lightning_version": "2.6.6", "global_step": 0},
        tmp_path / "theirs.ckpt",
    )
    import_lightning(tmp_path / "theirs.ckpt", tmp_path / "ours.ckpt")
    target = tmp_path / "weights.bin"
    assert main(["checkpoint", "export", str(tmp_path / "ours.ckpt"), str(target), "--dtype", "bfloat16"]) == 0
    found = torch.load(target, weights_only=True)
    assert type(found) is dict
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16, torch.int64}  # the norm's counter
    assert main(["checkpoint", "export", str(tmp_path / "ours.ckpt"), str(tmp_path / "full.pt")]) == 0
    again = Small().model
    again.load_state_dict(torch.load(tmp_path / "full.pt", weights_only=True))
    for name, tensor in module.model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor)


def test_weights_are_exported_in_another_type_or_from_another_place(checkpoint, capsys):
    path, run = checkpoint
    target = path.with_name("w.safetensors")
    assert main_or_raise("export", path, target, "--prefix", "model.head.", "--dtype", "bfloat16") == 0
    assert capsys.readouterr().out == f"wrote {target}: 2 tensors; left out 2 that are not part of the model\n"
    weights = load_file(target)
    assert weights.keys() == {"weight", "bias"}
    assert torch.equal(weights["weight"], run["state_dict"]["model.head.weight"].bfloat16())
    with pytest.raises(DloError, match=r"w\.safetensors exists"):
        main_or_raise("export", path, target)
    with pytest.raises(
        DloError, match=r"must begin the name of a weight, got 'x\.'; the first weight is 'model\.head\.weight'"
    ):
        model_weights(load(path), "x.")
    assert set(model_weights({"state_dict": {"a": torch.ones(1), "n": 3}})) == {"a"}


def test_inspect_shows_what_is_there(checkpoint, capsys):
    path, _ = checkpoint
    assert main(["checkpoint", "inspect", str(path)]) == 0
    out = capsys.readouterr().out
    for line in (
        "model: 4 tensors, 33 elements, 144 B",
        "  model.head.weight          4 x 6   float32     96 B",
        "step 7, epoch 2 (the first is 0), saved ",
        "written on 1 rank\n",
        "strategy: ZeroStrategy",
        'mesh: {"dp_shard": 1}',
        f"torch: {torch.__version__}",
        "shard-00000.safetensors: ",
    ):
        assert line in out
    assert main(["checkpoint", "inspect", str(path), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["step"], record["world_size"], len(record["tensors"])) == (7, 1, 13)
    assert record["tensors"][0]["shape"] == [4, 6]


def test_verify_has_the_exit_code_of_its_answer(checkpoint, capsys):
    path, _ = checkpoint
    assert main(["checkpoint", "verify", str(path)]) == 0
    assert capsys.readouterr().out == f"ok: {path}\n"
    shard = path / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\xff")
    assert main(["checkpoint", "verify", str(path), "--quick"]) == 0
    assert main(["checkpoint", "verify", str(path)]) == 1
    assert f"damaged checkpoint: the SHA-256 of {shard} differs" in capsys.readouterr().out
    assert main(["checkpoint", "verify", str(path / "none")]) == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspet", "x"], "unknown command 'dlo checkpoint inspet'; did you mean 'inspect'?"),
        (["inspect", "none.ckpt"], "no checkpoint none.ckpt"),
        (["inspect", "none://run/last.ckpt"], "begin with the scheme of an installed store, got none://run/last.ckpt"),
        (["convert", "none.ckpt", "x"], "no checkpoint none.ckpt"),
        (["convert", "{}", "other"], "must end in .safetensors, or in .ckpt for a Lightning file"),
        (["export", "{}", "x.onnx"], "TARGET must end in .safetensors or .pt, got x.onnx"),
    ],
)
def test_bad_input_has_code_2_and_one_sentence(checkpoint, capsys, words, message):
    assert main(["checkpoint", *(word.format(checkpoint[0]) for word in words)]) == 2
    assert message in capsys.readouterr().err


# --- packages add formats to `dlo checkpoint convert` by entry points; one that cannot be imported is named ----------


FORMAT = """
import json
from pathlib import Path

import torch

from dlo_framework.checkpoint.formats import CheckpointFormat, ForeignCheckpoint


class TextFormat(CheckpointFormat):
    def recognises(self, path: Path) -> bool:
        return path.suffix == ".weights"

    def read(self, path: Path) -> ForeignCheckpoint:
        weights = {name: torch.tensor(value) for name, value in json.loads(path.read_text()).items()}
        return ForeignCheckpoint({"state_dict": weights, "pytorch-lightning_version": "2.6.6"}, ["it has no step"])
"""

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Puts a distribution with one module and one format on the path."""
    monkeypatch.syspath_prepend(str(tmp_path / "site"))

    def write(dist: str, entry: str, **modules: str) -> None:
        distributions.install(tmp_path / "site", dist, {"dlo_framework.checkpoint_formats": [entry]}, **modules)

    return write


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "theirs.weights"
    path.write_text('{"w": [1.0, 2.0, 3.0]}')
    return path


def test_a_users_format_is_converted(tmp_path, install, weights, capsys) -> None:
    install("text_pack", "Text = ck_text:TextFormat", ck_text=FORMAT)
    assert main(["checkpoint", "convert", str(weights), str(tmp_path / "made")]) == 0
    printed = capsys.readouterr()
    assert "it has no step" in printed.err
    assert printed.out == f"wrote {tmp_path / 'made'}\n"
    assert load(tmp_path / "made")["state_dict"]["w"].tolist() == [1, 2, 3]
    assert read_manifest(tmp_path / "made").about["imported_from"] == "theirs.weights (Text)"
    assert main(["checkpoint", "convert", str(weights), str(tmp_path / "made")]) == 2
    assert f"{tmp_path / 'made'} exists; remove it, or choose another path" in capsys.readouterr().err
    assert main(["checkpoint", "convert", str(weights), str(tmp_path / "one.safetensors")]) == 2
    assert f"TARGET must be a folder for the Text file {weights}, got" in capsys.readouterr().err


def test_a_broken_importer_is_named_with_its_distribution_and_cause(tmp_path, install, weights, capsys) -> None:
    install("broken_pack", "Broken = ck_broken:Format", ck_broken="raise RuntimeError('boom')")
    install("wrong_pack", "Wrong = ck_wrong:Format", ck_wrong="class Format: ...")
    assert main(["checkpoint", "convert", str(weights), str(tmp_path / "made")]) == 2
    message = "checkpoint format 'Broken' (broken_pack 1.2) failed to import: RuntimeError: boom"
    assert message in capsys.readouterr().err
    (tmp_path / "site" / "ck_broken.py").write_text(FORMAT.replace("TextFormat", "Format").replace(".weights", ".x"))
    assert main(["checkpoint", "convert", str(weights), str(tmp_path / "made")]) == 2
    message = "checkpoint format 'Wrong' (wrong_pack 1.2) must be a subclass of dlo_framework.checkpoint.formats"
    assert message in capsys.readouterr().err


def test_a_broken_importer_does_not_disturb_what_others_read(tmp_path, install, weights, capsys) -> None:
    install("broken_pack", "Broken = ck_broken_too:Format", ck_broken_too="raise RuntimeError('boom')")
    install("text_pack", "Text = ck_text_too:TextFormat", ck_text_too=FORMAT)
    assert main(["checkpoint", "convert", str(weights), str(tmp_path / "made")]) == 0
    for target in ("one.safetensors", "again.ckpt"):
        source = tmp_path / "made" if target == "one.safetensors" else tmp_path / "one.safetensors"
        assert main(["checkpoint", "convert", str(source), str(tmp_path / target)]) == 0
    assert load(tmp_path / "again.ckpt")["state_dict"]["w"].tolist() == [1, 2, 3]
    torch.save({"state_dict": {"w": torch.ones(2)}, "pytorch-lightning_version": "2.6.6"}, tmp_path / "lightning.ckpt")
    assert main(["checkpoint", "convert", str(tmp_path / "lightning.ckpt"), str(tmp_path / "folder")]) == 0
    assert "note: checkpoint format 'Broken' (broken_pack 1.2) failed to import" in capsys.readouterr().err


# --- all files of a checkpoint are reached through the store of its path: here a remote one, in memory --------------


RUN = Path("mem:/bucket/run")


@pytest.fixture
def registered(tmp_path, monkeypatch):
    """The store of `mem://`."""
    register(tmp_path, monkeypatch, "mem = support.memory_store:MemoryStore")
    monkeypatch.setattr(MemoryStore, "files", {})
    monkeypatch.setattr(MemoryStore, "log", [])
    return MemoryStore


@pytest.fixture
def memory(registered, monkeypatch):
    """The store, where the file system's is not to be used."""

    def refuse(self, path, *others):
        raise AssertionError(f"{path} is not on a file system")

    for name in ("status", "list", "open", "create", "make_folder", "rename", "remove", "sync", "map"):
        monkeypatch.setattr(LocalStore, name, refuse)
    return registered


def register(folder: Path, monkeypatch, *entries: str, **modules: str) -> None:
    distributions.install(folder / "site", "store_pack", {"dlo_framework.checkpoint_stores": list(entries)}, **modules)
    monkeypatch.syspath_prepend(str(folder / "site"))
    stores._registered.cache_clear()


@pytest.fixture(autouse=True)
def _forget():
    yield
    stores._registered.cache_clear()


def stored_run(step: int) -> dict:
    weights = {"w": torch.arange(600.0).view(20, 30) + step, "b": torch.ones(7, dtype=torch.bfloat16)}
    moments = {"w": {"exp_avg": torch.full((20, 30), float(step)), "step": torch.tensor(step)}}
    optimizer = {"state": moments, "param_groups": [{"params": ["w"], "lr": 0.1}]}
    return {"global_step": step, "epoch": 0, "state_dict": weights, "optimizer_states": [optimizer], "n": step}


def test_a_checkpoint_is_saved_verified_loaded_and_removed_in_another_store(memory):
    save(stored_run(5), RUN / "step-5.ckpt")
    save(stored_run(5), RUN / "last.ckpt")
    save(stored_run(9), RUN / "last.ckpt")
    verify(RUN / "last.ckpt")
    check(RUN / "last.ckpt")
    found = load("mem://bucket/run/last.ckpt")
    assert (found["global_step"], found["n"]) == (9, 9)
    expected = stored_run(9)["state_dict"]
    assert torch.equal(found["state_dict"]["w"], expected["w"])
    assert torch.equal(found["state_dict"]["b"], expected["b"])
    assert found["optimizer_states"][0]["state"]["w"]["exp_avg"].unique().tolist() == [9]
    shard = FlatShard(torch.empty(100), torch.Size([20, 30]), 37)
    found["state_dict"].read_into("w", shard)
    assert torch.equal(shard.data, expected["w"].flatten()[37:137])
    half = torch.empty(20, 30, dtype=torch.float16)
    found["state_dict"].read_into("w", half)
    assert torch.equal(half, expected["w"].half())
    remove(RUN / "step-5.ckpt")
    assert memory().list(RUN) == ["last.ckpt"]


def test_history_is_kept_in_another_store(memory):
    for step in (5, 9):
        save(stored_run(step), RUN / f"step-{step}.ckpt")
    assert newest_valid(RUN) == RUN / "step-9.ckpt"
    note_resumption(RUN / "step-5.ckpt")
    assert resumptions(RUN) == 1
    assert list(superseded(RUN)) == ["step-9.ckpt"]
    assert newest_valid(RUN) == RUN / "step-5.ckpt"
    assert step_of(RUN / "step-5.ckpt") == 5
    assert step_of(RUN / "step-7.ckpt") == -1


def test_damage_in_another_store_is_named_and_the_newest_valid_one_is_offered(memory):
    for step in (5, 9):
        save(stored_run(step), RUN / f"step-{step}.ckpt")
    path = RUN / "step-9.ckpt" / "shard-00000.safetensors"
    memory.files[path] = memory.files[path][:-1] + bytes([memory.files[path][-1] ^ 1])
    with pytest.raises(DloError, match=r"SHA-256 of mem:/.*shard-00000.*; the newest valid one beside it is .*step-5"):
        load(RUN / "step-9.ckpt")
    del memory.files[path]
    with pytest.warns(UserWarning, match=r"skipping mem:/.*step-9\.ckpt: .*shard-00000\.safetensors is missing"):
        assert newest_valid(RUN) == RUN / "step-5.ckpt"


def test_the_manifest_is_written_last_and_names_change_once_the_files_are_durable(memory):
    save(stored_run(5), RUN / "last.ckpt")
    memory.log.clear()
    save(stored_run(9), RUN / "last.ckpt")
    assert memory.log == [
        ("make_folder", "last.ckpt.dlo-partial"),
        ("create", "shard-00000.safetensors"),
        ("create", "state.pt"),
        ("create", "manifest.json"),
        ("sync", "last.ckpt.dlo-partial"),
        ("rename", "last.ckpt", "last.ckpt.dlo-old"),
        ("rename", "last.ckpt.dlo-partial", "last.ckpt"),
        ("sync", "run"),
    ]


def test_a_kill_between_the_renames_is_recovered_in_another_store(memory):
    save(stored_run(5), RUN / "last.ckpt")
    save(stored_run(9), RUN / "new.ckpt")
    memory().rename(RUN / "last.ckpt", RUN / "last.ckpt.dlo-old")
    memory().rename(RUN / "new.ckpt", RUN / "last.ckpt.dlo-partial")
    assert locate(RUN / "last.ckpt") == RUN / "last.ckpt.dlo-partial"
    assert load(RUN / "last.ckpt")["global_step"] == 9
    recover(RUN)
    assert memory().list(RUN) == ["last.ckpt"]
    assert load(RUN / "last.ckpt")["global_step"] == 9


def test_an_existing_checkpoint_in_another_store_is_not_overwritten_by_a_conversion(memory):
    save(stored_run(5), RUN / "last.ckpt")
    with pytest.raises(DloError, match=r"mem:/bucket/run/last\.ckpt exists; remove it, or choose another path"):
        from_single_file(Path("one.safetensors"), RUN / "last.ckpt")


def test_the_commands_read_a_checkpoint_of_another_store(registered, tmp_path, capsys):
    save({**stored_run(9), "pytorch-lightning_version": "2.6.6"}, RUN / "last.ckpt")
    path = "mem://bucket/run/last.ckpt"
    assert main(["checkpoint", "inspect", path]) == 0
    assert "w          20 x 30  float32   2.4 kB" in capsys.readouterr().out
    assert main(["checkpoint", "inspect", path, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 9
    for words in (["verify"], ["verify", "--quick"]):
        assert main(["checkpoint", words[0], path, *words[1:]]) == 0
    targets = {"convert": ("one.safetensors", "theirs.ckpt"), "export": ("w.safetensors", "w.pt")}
    for command, names in targets.items():
        for name in names:
            assert main(["checkpoint", command, path, str(tmp_path / name)]) == 0
            assert (tmp_path / name).is_file()
    assert main(["checkpoint", "convert", str(tmp_path / "one.safetensors"), "mem://bucket/run/back.ckpt"]) == 0
    assert main(["checkpoint", "convert", str(tmp_path / "theirs.ckpt"), "mem://bucket/run/third.ckpt"]) == 0
    for name in ("back.ckpt", "third.ckpt"):
        assert torch.equal(load(RUN / name)["state_dict"]["w"], stored_run(9)["state_dict"]["w"])
    assert main(["checkpoint", "inspect", "mem://bucket/run/none.ckpt"]) == 2
    assert "no checkpoint mem:/bucket/run/none.ckpt" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["inspect", "mem://bucket/run/one.ckpt"],
        ["verify", "mem://bucket/run/one.ckpt"],
        ["convert", "mem://bucket/run/other", "ours.ckpt"],
        ["export", "mem://bucket/run/one.ckpt", "w.safetensors"],
        ["convert", "mem://bucket/run/last.ckpt", "mem://bucket/run/one.safetensors"],
        ["export", "mem://bucket/run/last.ckpt", "mem://bucket/run/w.safetensors"],
    ],
)
def test_the_commands_refuse_what_another_store_does_not_hold(words, registered, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    save(stored_run(9), RUN / "last.ckpt")
    registered().make_folder(RUN / "other")
    registered.files[RUN / "one.ckpt"] = b"PK"
    before = sorted(registered.files)
    assert main(["checkpoint", *words]) == 2
    message = capsys.readouterr().err
    assert re.search(r"must be on a file system, got mem:/.*; a store holds checkpoint folders", message), message
    assert sorted(registered.files) == before, "and it leaves nothing"
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


def test_a_single_file_in_another_store_is_refused_before_a_run_and_skipped_in_the_history(memory):
    save(stored_run(5), RUN / "step-5.ckpt")
    memory.files[RUN / "one.ckpt"] = b"PK"
    for read in (check, load):
        with pytest.raises(DloError, match=r"a checkpoint in one file must be on a file system, got mem:/.*one\.ckpt"):
            read(RUN / "one.ckpt")
    with pytest.warns(
        UserWarning, match=r"skipping mem:/.*one\.ckpt: a checkpoint in one file must be on a file system"
    ):
        assert newest_valid(RUN) == RUN / "step-5.ckpt"


def test_slices_with_gaps_are_read_by_ranges_of_a_bucket_at_most(memory, monkeypatch):
    lengths = []
    read = loading._read_range

    def counted(file, begin, end, dtype):
        lengths.append(end - begin)
        return read(file, begin, end, dtype)

    monkeypatch.setattr(loading, "BUCKET_BYTES", 500)
    monkeypatch.setattr(loading, "_read_range", counted)
    save(stored_run(5), RUN / "last.ckpt")
    state, target = load(RUN / "last.ckpt")["state_dict"], torch.empty(20, 2)
    state.read_part("w", full_box((20, 2)), target)
    assert torch.equal(target, stored_run(5)["state_dict"]["w"][:, :2])
    assert len(lengths) > 3
    assert max(lengths) <= 500


def test_a_store_is_found_by_its_scheme_and_a_broken_one_is_named(tmp_path, monkeypatch):
    sources = {"ck_bad_store": "raise RuntimeError('boom')", "ck_odd_store": "class Store: ..."}
    register(tmp_path, monkeypatch, "bad = ck_bad_store:Store", "odd = ck_odd_store:Store", **sources)
    assert type(store_of(tmp_path)) is LocalStore
    with pytest.raises(DloError, match=r"'bad' \(store_pack 1\.2\) failed to import: RuntimeError: boom"):
        load("bad://bucket/last.ckpt")
    with pytest.raises(
        DloError, match=r"'odd' \(store_pack 1\.2\) must be a subclass of dlo_framework.*CheckpointStore, got ck_odd"
    ):
        load("odd://bucket/last.ckpt")
    with pytest.raises(DloError, match=r"must be on a file system, or .*, got s3://bucket/last\.ckpt"):
        load("s3://bucket/last.ckpt")


def test_predictions_from_another_store_are_written_to_the_runs_of_the_config(memory) -> None:
    cli = DloCLI.__new__(DloCLI)
    cli.command = "predict"
    run, trainer = Namespace(dir=None, name="digits", predictions="pt"), Namespace(default_root_dir=None)
    for folder, expected in ((RUN, "runs/digits"), (Path("kept/version_3"), "kept/version_3")):
        path = str(folder / "checkpoints" / "last.ckpt")
        cli.config = Namespace(predict=Namespace(ckpt_path=path, run=run, trainer=trainer))
        assert cli.predictions_path() == Path(expected) / "predictions-last.pt"
