"""Language models whose weights are divided among ranks: read in parts, writing text, saved, exported."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM

from dlo_framework.checkpoint import load
from dlo_framework.distributed.strategy import register_data_parallel, use_canonical_checkpoints
from dlo_framework.errors import DloError
from dlo_framework.models.four_bit_linear import quantise, quantise_scales
from dlo_framework.testing import run_distributed
from dlo_framework.testing.record import gather_full_weights
from dlo_plugins.parallel.fsdp.strategy import FSDPStrategy
from dlo_plugins.parallel.mesh.strategy import MeshStrategy
from dlo_plugins.parallel.zero.strategy import ZeroStrategy
from dlo_tasks.language import model_folders
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.batches import pad_left
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.generation import Sampling
from dlo_tasks.language.model_folders import write_folder
from dlo_tasks.language.tokenizer import embedded_tokenizer
from support.token_batches import Batches
from support.trainers import quiet_trainer

SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIG: dict[str, Any] = {"model_type": "qwen3", **SIZES, "num_key_value_heads": 2, "head_dim": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
    "gemma2": {"num_key_value_heads": 2, "head_dim": 8},
    "gpt_neox": {},
}


class Words(LightningDataModule):
    """Prompts that end at different times on different ranks, and random tokens to train on."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        super().__init__()
        self.tokenizer = embedded_tokenizer([Path(__file__)], 280, folder)
        self.rank, self.world_size = rank, world_size

    def _loader(self, batches: list[dict[str, Tensor]]) -> DataLoader:
        return DataLoader(Batches(batches), batch_size=None)

    def train_dataloader(self) -> DataLoader:
        ids = torch.randint(270, (3, 4, 13), generator=torch.Generator().manual_seed(0))
        mine = slice(self.rank * 4 // self.world_size, (self.rank + 1) * 4 // self.world_size)
        return self._loader([{"input_ids": rows[mine, :-1], "labels": rows[mine, 1:]} for rows in ids])

    val_dataloader = train_dataloader

    def predict_dataloader(self) -> DataLoader:
        rows = [self.tokenizer(text)["input_ids"] for text in ("class ", "def test_x", "import torch", "f")]
        ids, mask = pad_left(rows, 0, torch.device("cpu"))
        index = torch.arange(4)
        mine = slice(self.rank * 4 // self.world_size, (self.rank + 1) * 4 // self.world_size)
        return self._loader([{"input_ids": ids[mine], "attention_mask": mask[mine], "index": index[mine]}])


def trainer_of(strategy: Any, world_size: int, folder: Path, **options: Any) -> Trainer:
    trainer = quiet_trainer(
        devices=world_size,
        strategy=strategy,
        default_root_dir=folder,
        num_sanity_val_steps=0,
        **options,
    )
    use_canonical_checkpoints(trainer)
    return trainer


# --- weights that each rank reads its part of ------------------------------------------------------------------


#: Under what each case starts, beside FSDPStrategy; ranks that share a model see the same data.
DORA = Lora(rank=2, dora=True)
MESHES: dict[str, dict[str, Any]] = {"tp": {"tp": 2}, "pp": {"pp": 2, "micro_batches": 2}}


class Noted(CausalLM):
    """Knows where its model was built."""

    built_on = ""

    def configure_model(self) -> None:
        super().configure_model()
        self.built_on = self.built_on or next(self.model.parameters()).device.type


def _start(rank: int, world_size: int, folder: Path, cases: list[tuple[str, dict[str, Any]]]) -> list[Any]:
    found = []
    for mesh, arguments in cases:
        seed_everything(1, workers=True, verbose=False)
        task = Noted(**arguments)
        zero = mesh.removeprefix("zero")
        strategy: Any = ZeroStrategy(int(zero), meta_init=True) if zero != mesh else FSDPStrategy(meta_init=True)  # type: ignore[arg-type]
        place = (rank, world_size)
        if mesh in MESHES:
            strategy, place = MeshStrategy(dp_shard=1, meta_init=True, **MESHES[mesh]), (0, 1)
        elif mesh == "ep":
            strategy = MeshStrategy(dp_shard=2, ep=2, meta_init=True)
        trainer = trainer_of(strategy, world_size, folder)
        (measures,) = trainer.validate(task, datamodule=Words(folder, *place), verbose=False)
        left = sum("reset_parameters" in vars(module) for module in task.model.modules())
        found.append((measures["val_loss"], gather_full_weights(trainer), left, task.built_on))
    return found


def save_with_scales(folder: Path) -> Path:
    """Saves a model whose blocks have a trained scale each, a buffer."""
    sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "global_head_dim": 8, "num_kv_shared_layers": 0}
    config = AutoConfig.for_model("gemma4_text", vocab_size=280, hidden_size_per_layer_input=0, **sizes)
    model = AutoModelForCausalLM.from_config(config)
    scales = [buffer.fill_(0.25) for name, buffer in model.named_buffers() if name.endswith("layer_scalar")]
    assert len(scales) == SIZES["num_hidden_layers"]
    model.save_pretrained(folder)
    return folder


#: By family, how the weights are divided each time; the slow test divides each family's in each way.
SOME = {"qwen3": ("zero3", "pp"), "gemma2": ("tp",), "gpt_neox": ()}
EVERY = ("fsdp", "zero3", *MESHES)


@pytest.mark.parametrize("some", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["some", "all"])
def test_each_rank_reads_its_part_of_the_weights(tmp_path: Path, some: bool) -> None:
    cases: list[tuple[str, dict[str, Any]]] = []
    for family, more in FAMILIES.items():
        torch.manual_seed(5)
        config = AutoConfig.for_model(family, vocab_size=280, **SIZES, **more)
        AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / family, max_shard_size="20KB")
        assert len(list((tmp_path / family).glob("*.safetensors"))) > 1
        ways = SOME[family] if some else EVERY
        cases += [(kind, {"model": str(tmp_path / family)}) for kind in ways]
    for lora in (DORA,) if some else (Lora(rank=2), DORA):
        kinds = ("fsdp",) if some else EVERY
        cases += [(kind, {"model": str(tmp_path / "qwen3"), "lora": lora}) for kind in kinds]
    if not some:
        cases.append(("zero2", {"model": str(tmp_path / "qwen3")}))
    moe = AutoConfig.for_model("mixtral", vocab_size=280, **SIZES, num_key_value_heads=2, num_local_experts=4)
    AutoModelForCausalLM.from_config(moe).save_pretrained(tmp_path / "mixtral")
    cases += [(kind, {"model": str(tmp_path / "mixtral")}) for kind in (("ep",) if some else ("ep", "fsdp", "zero3"))]
    scaled = str(save_with_scales(tmp_path / "scales"))
    cases += [(kind, {"model": scaled}) for kind in (("fsdp",) if some else ("fsdp", "zero3"))]
    (tmp_path / "run").mkdir()
    embedded_tokenizer([Path(__file__)], 280, tmp_path / "run")
    answers = run_distributed(_start, 2, tmp_path / "run", cases, backend=None)
    losses: dict[str, float] = {}
    for (_, case), (loss, weights, left, built_on) in zip(cases, answers[0], strict=True):
        expected = AutoModelForCausalLM.from_pretrained(case["model"]).state_dict()
        adapted = {name.replace(".base_layer.", "."): tensor for name, tensor in weights.items()}
        for name, tensor in expected.items():
            assert torch.equal(adapted[f"model.{name}"], tensor), name
        outside = {name: tensor for name, tensor in adapted.items() if name.removeprefix("model.") not in expected}
        assert all(".lora_" in name and tensor.isfinite().all() for name, tensor in outside.items())
        assert all(not tensor.any() for name, tensor in outside.items() if ".lora_B." in name)
        for name, tensor in outside.items():
            if ".lora_magnitude_vector." in name:
                base = name.split(".lora_")[0].removeprefix("model.")
                torch.testing.assert_close(tensor, expected[f"{base}.weight"].norm(dim=1))
        assert any(".lora_magnitude_vector." in name for name in outside) == (case.get("lora") is DORA)
        if case["model"] not in losses:
            task, data = CausalLM(model=case["model"]), Words(tmp_path / "run", 0, 1)
            (measures,) = trainer_of("auto", 1, tmp_path).validate(task, datamodule=data, verbose=False)
            losses[case["model"]] = measures["val_loss"]
        assert loss == pytest.approx(losses[case["model"]], rel=1e-5)
        assert left == 0
        assert built_on == "meta"


@pytest.mark.parametrize(
    ("plain", "double"),
    [((), ("tp",)), pytest.param(("fsdp", "tp", "pp"), ("fsdp", "zero3", "pp"), marks=pytest.mark.slow)],
)
def test_each_rank_quantises_its_part_of_the_weights(
    tmp_path: Path, plain: tuple[str, ...], double: tuple[str, ...]
) -> None:
    torch.manual_seed(5)
    config = AutoConfig.for_model("qwen3", vocab_size=280, **SIZES, **FAMILIES["qwen3"])
    source = AutoModelForCausalLM.from_config(config)
    source.save_pretrained(tmp_path / "qwen3", max_shard_size="20KB")

    def case(is_double: bool) -> dict[str, Any]:
        lora = Lora(rank=2, base="nf4", base_block=8, double_quantisation=is_double)
        return {"model": str(tmp_path / "qwen3"), "lora": lora}

    cases = [(kind, case(False)) for kind in plain] + [(kind, case(True)) for kind in double]
    (tmp_path / "run").mkdir()
    embedded_tokenizer([Path(__file__)], 280, tmp_path / "run")
    answers = run_distributed(_start, 2, tmp_path / "run", cases, backend=None)
    alone = {
        is_double: trainer_of("auto", 1, tmp_path).validate(
            CausalLM(**case(is_double)), datamodule=Words(tmp_path / "run", 0, 1), verbose=False
        )[0]["val_loss"]
        for is_double in {case["lora"].double_quantisation for _, case in cases}
    }
    for (kind, given), (loss, weights, _, built_on) in zip(cases, answers[0], strict=True):
        assert built_on == "meta"
        is_double = given["lora"].double_quantisation
        quantised = [name for name in weights if name.endswith(".codes")]
        assert len(quantised) == 14
        for name in quantised:
            weight = source.get_parameter(name.removeprefix("model.").replace(".base_layer.codes", ".weight")).detach()
            codes, scales = quantise(weight, "nf4", 8)
            assert torch.equal(weights[name], codes), (kind, name)
            if is_double:
                scales, ranges = quantise_scales(scales)
                assert torch.equal(weights[name.replace(".codes", ".scale_ranges")], ranges), (kind, name)
            assert torch.equal(weights[name.replace(".codes", ".scales")], scales), (kind, name)
        assert loss == pytest.approx(alone[is_double], rel=1e-5)


def test_random_weights_on_ranks_are_drawn_as_the_family_draws_them(tmp_path: Path) -> None:
    embedded_tokenizer([Path(__file__)], 280, tmp_path)
    case = {"config": {**CONFIG, "initializer_range": 0.5}, "lora": DORA}
    ((_, weights, *_), *_), _ = run_distributed(_start, 2, tmp_path, [("fsdp", case)], backend=None)
    matrices = [t for name, t in weights.items() if name.endswith(("base_layer.weight", "embed_tokens.weight"))]
    assert matrices
    for tensor in matrices:
        assert float(tensor.std()) == pytest.approx(0.5, rel=0.1)
    assert all((tensor == 1).all() for name, tensor in weights.items() if "norm" in name)
    norms = {name: tensor for name, tensor in weights.items() if ".lora_magnitude_vector." in name}
    assert norms
    for name, tensor in norms.items():
        torch.testing.assert_close(tensor, weights[f"{name.split('.lora_')[0]}.base_layer.weight"].norm(dim=1))


def test_weights_that_are_stored_under_other_names_are_refused(tmp_path: Path) -> None:
    config = AutoConfig.for_model("llama", vocab_size=50, **SIZES)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    saved = model_folders.open_safetensors(tmp_path)
    assert model_folders._stored_name(["model.layers.0.self_attn.q_proj.base_layer.weight"], saved, "model")
    with pytest.raises(DloError, match=r"weights must include model.embed.weight, .* may store it under another name"):
        model_folders._stored_name(["model.embed.weight"], saved, "model")


# --- text ------------------------------------------------------------------------------------------------------


def _write(rank: int, world_size: int, folder: Path, model: str, strategies: list[str]) -> dict[str, Any]:
    register_data_parallel()
    made = {"ddp": lambda: "ddp", "fsdp": FSDPStrategy, "zero3": lambda: ZeroStrategy(3), "alone": lambda: "auto"}
    found = {}
    for name in strategies:
        seed_everything(1, workers=True, verbose=False)
        sampling = Sampling(max_new_tokens=12, temperature=1.0, top_k=30)
        task = CausalLM(model=model, prompts=["def test", "x"], sampling=sampling, lr=1e-2)
        data = Words(folder, rank, world_size)
        trainer = trainer_of(made[name](), world_size, folder, max_epochs=2, max_steps=6)
        trainer.fit(task, datamodule=data)
        trainer.save_checkpoint(folder / f"{name}.ckpt")
        greedy = CausalLM(model=model, sampling=Sampling(max_new_tokens=20))
        predictor = trainer_of(made[name](), world_size, folder)
        rows = [row for batch in predictor.predict(greedy, datamodule=data) for row in batch]  # type: ignore[union-attr]
        found[name] = (task.samples, rows)
    return found


@pytest.mark.parametrize("strategy", ["zero3", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_text_is_the_same_whoever_holds_the_weights_and_so_is_what_is_exported(tmp_path: Path, strategy: str) -> None:
    folder, model = tmp_path / "run", tmp_path / "model"
    folder.mkdir()
    tokenizer = embedded_tokenizer([Path(__file__)], 280, folder)
    torch.manual_seed(3)
    config = AutoConfig.for_model("qwen3", vocab_size=280, **SIZES, **FAMILIES["qwen3"], initializer_range=0.3)
    torch.manual_seed(11)
    AutoModelForCausalLM.from_config(config).save_pretrained(model)
    (alone,) = run_distributed(_write, 1, folder, str(model), ["alone"], backend=None)
    samples, rows = alone["alone"]
    lengths = {len([token for token in row["tokens"] if token != tokenizer.pad_token_id]) for row in rows}
    assert [row["index"] for row in rows] == [0, 1, 2, 3]
    answers = run_distributed(_write, 2, folder, str(model), [strategy], backend=None)
    expected = write_folder(load(folder / "alone.ckpt"), tmp_path / "alone")
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "alone").state_dict()
    for name in answers[0]:
        found = [row for answer in answers for row in answer[name][1]]
        assert [row["completion"] for row in found] == [row["completion"] for row in rows], (name, lengths)
        assert answers[0][name][0] == answers[1][name][0] == samples, name
        assert write_folder(load(folder / f"{name}.ckpt"), tmp_path / name) == expected
        weights = AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict()
        for key, tensor in reference.items():
            torch.testing.assert_close(weights[key], tensor, rtol=1e-4, atol=1e-5)
