"""Language models whose weights are divided among ranks: read in parts, writing text, saved, exported."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

from dlo_framework.checkpoint import load
from dlo_framework.cli.main import main
from dlo_framework.data import data_parallel_coordinates
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
from dlo_tasks.language.generation import Sampling, keeps_keys_and_values
from dlo_tasks.language.model_folders import write_folder
from dlo_tasks.language.seq2seq_lm import Seq2SeqLM
from dlo_tasks.language.tokenizer import embedded_tokenizer
from support.causal_types import tiny
from support.seq2seq import FAMILIES as ENCODER_DECODERS
from support.seq2seq import seq2seq_config
from support.strategies import STRATEGIES
from support.token_batches import FAMILIES, GROUPED, Batches, built_model
from support.trainers import quiet_trainer

#: Rows of the tokenizer of :class:`Words`.
VOCABULARY = 280


class Words(LightningDataModule):
    """Random tokens to train on, and a tokenizer."""

    def __init__(self, folder: Path, rank: int, world_size: int) -> None:
        super().__init__()
        self.tokenizer = embedded_tokenizer([Path(__file__)], VOCABULARY, folder)
        self.rank, self.world_size = rank, world_size

    def train_dataloader(self) -> DataLoader:
        ids = torch.randint(270, (3, 4, 13), generator=torch.Generator().manual_seed(0))
        mine = slice(self.rank * 4 // self.world_size, (self.rank + 1) * 4 // self.world_size)
        batches = [{"input_ids": rows[mine, :-1], "labels": rows[mine, 1:]} for rows in ids]
        return DataLoader(Batches(batches), batch_size=None)

    val_dataloader = train_dataloader


def small_config(family: str, **more: Any) -> dict[str, Any]:
    return {"model_type": family, **FAMILIES.get(family, GROUPED), "vocab_size": VOCABULARY, **more}


def config_of(family: str, **more: Any) -> Any:
    return AutoConfig.for_model(**small_config(family, **more))


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


DORA = Lora(rank=2, dora=True)
#: Under what each case starts, beside FSDPStrategy; ranks that share a model see the same data.
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
    sizes = {"head_dim": 8, "global_head_dim": 8, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0}
    model = AutoModelForCausalLM.from_config(config_of("gemma4_text", **sizes))
    scales = [buffer.fill_(0.25) for name, buffer in model.named_buffers() if name.endswith("layer_scalar")]
    assert len(scales) == GROUPED["num_hidden_layers"]
    model.save_pretrained(folder)
    return folder


#: By family, how the weights are divided each time; the slow test divides each family's in each way.
SOME = {"qwen3": ("zero3", "pp"), "gemma2": ("tp",), "gpt_neox": ()}
EVERY = ("fsdp", "zero3", *MESHES)


@pytest.mark.parametrize("some", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["some", "all"])
def test_each_rank_reads_its_part_of_the_weights(tmp_path: Path, some: bool) -> None:
    cases: list[tuple[str, dict[str, Any]]] = []
    for family in SOME:
        torch.manual_seed(5)
        model = AutoModelForCausalLM.from_config(config_of(family))
        model.save_pretrained(tmp_path / family, max_shard_size="20KB")
        assert len(list((tmp_path / family).glob("*.safetensors"))) > 1
        ways = SOME[family] if some else EVERY
        cases += [(kind, {"model": str(tmp_path / family)}) for kind in ways]
    for lora in (DORA,) if some else (Lora(rank=2), DORA):
        kinds = ("fsdp",) if some else EVERY
        cases += [(kind, {"model": str(tmp_path / "qwen3"), "lora": lora}) for kind in kinds]
    if not some:
        cases.append(("zero2", {"model": str(tmp_path / "qwen3")}))
    moe = AutoModelForCausalLM.from_config(config_of("mixtral", num_local_experts=4))
    moe.save_pretrained(tmp_path / "mixtral")
    cases += [(kind, {"model": str(tmp_path / "mixtral")}) for kind in (("ep",) if some else ("ep", "fsdp", "zero3"))]
    scaled = str(save_with_scales(tmp_path / "scales"))
    cases += [(kind, {"model": scaled}) for kind in (("fsdp",) if some else ("fsdp", "zero3"))]
    (tmp_path / "run").mkdir()
    embedded_tokenizer([Path(__file__)], VOCABULARY, tmp_path / "run")
    given = small_config("qwen3", initializer_range=0.5)
    random: tuple[str, dict[str, Any]] = ("fsdp", {"config": given, "lora": DORA})
    (*answers, drawn), _ = run_distributed(_start, 2, tmp_path / "run", [*cases, random], backend=None)
    check_random(drawn[1])
    losses: dict[str, float] = {}
    for (_, case), (loss, weights, left, built_on) in zip(cases, answers, strict=True):
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


def check_random(weights: dict[str, torch.Tensor]) -> None:
    """Checks that random weights on ranks are drawn as the family draws them."""
    matrices = [t for name, t in weights.items() if name.endswith(("base_layer.weight", "embed_tokens.weight"))]
    norms = {name: tensor for name, tensor in weights.items() if ".lora_magnitude_vector." in name}
    assert matrices
    assert norms
    for tensor in matrices:
        assert float(tensor.std()) == pytest.approx(0.5, rel=0.1)
    assert all((tensor == 1).all() for name, tensor in weights.items() if "norm" in name)
    for name, tensor in norms.items():
        torch.testing.assert_close(tensor, weights[f"{name.split('.lora_')[0]}.base_layer.weight"].norm(dim=1))


@pytest.mark.parametrize(
    ("plain", "double"),
    [((), ("tp",)), pytest.param(("fsdp", "tp", "pp"), ("fsdp", "zero3", "pp"), marks=pytest.mark.slow)],
)
def test_each_rank_quantises_its_own_weights(tmp_path: Path, plain: tuple[str, ...], double: tuple[str, ...]) -> None:
    torch.manual_seed(5)
    source = AutoModelForCausalLM.from_config(config_of("qwen3"))
    source.save_pretrained(tmp_path / "qwen3", max_shard_size="20KB")

    def case(is_double: bool) -> dict[str, Any]:
        lora = Lora(rank=2, base="nf4", base_block=8, double_quantisation=is_double)
        return {"model": str(tmp_path / "qwen3"), "lora": lora}

    cases = [(kind, case(False)) for kind in plain] + [(kind, case(True)) for kind in double]
    (tmp_path / "run").mkdir()
    embedded_tokenizer([Path(__file__)], VOCABULARY, tmp_path / "run")
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


def test_weights_that_are_stored_under_other_names_are_refused(tmp_path: Path) -> None:
    AutoModelForCausalLM.from_config(config_of("llama")).save_pretrained(tmp_path)
    saved = model_folders.open_safetensors(tmp_path)
    assert model_folders._stored_name(["model.layers.0.self_attn.q_proj.base_layer.weight"], saved, "model")
    with pytest.raises(DloError, match=r"weights must include model.embed.weight, .* may store it under another name"):
        model_folders._stored_name(["model.embed.weight"], saved, "model")


# --- text: greedily and sampled, with prompts of several lengths and early ends ------------------------------------


GREEDY, SAMPLED = Sampling(14), Sampling(14, temperature=1.0, top_k=20, top_p=0.9, seed=5)
#: A token that ends a text, which some rows of most cases reach early.
END = 13


class Prompts(LightningDataModule):
    """Prompts of several lengths, each data rank its own; the last batch has one row."""

    def predict_dataloader(self) -> DataLoader:
        rank, ranks = data_parallel_coordinates(self.trainer)
        draw = torch.Generator().manual_seed(2)
        prompts = [torch.randint(96, (length,), generator=draw).tolist() for length in (3, 9, 1, 6, 4)]
        batches = []
        for numbers in ([0, 1, 2, 3], [4] * ranks):
            mine = numbers[rank * len(numbers) // ranks : (rank + 1) * len(numbers) // ranks]
            ids, mask = pad_left([prompts[number] for number in mine], 0, torch.device("cpu"))
            batches.append({"input_ids": ids, "attention_mask": mask, "index": torch.tensor(mine)})
        return DataLoader(Batches(batches), batch_size=None)


def write(strategy: Any, world_size: int, folder: Path, model: str, sampling: Sampling) -> dict[int, list[int]]:
    """Returns the tokens of each prompt that this rank has written, by the prompt's number."""
    trainer = trainer_of(strategy, world_size, folder, precision="64-true")
    kind = Seq2SeqLM if AutoConfig.from_pretrained(model).is_encoder_decoder else CausalLM
    batches: Any = trainer.predict(kind(model=model, sampling=sampling), datamodule=Prompts())
    return {row["index"]: row["tokens"] for batch in batches for row in batch}


def _write(rank: int, world_size: int, folder: Path, cases: list[tuple[str, Sampling, Any]]) -> list[Any]:
    return [write(strategy(), world_size, folder, model, sampling) for model, sampling, strategy in cases]


def save_models(folder: Path, families: list[str], layers: int = 2) -> dict[str, str]:
    found = {}
    for family in families:
        torch.manual_seed(3)
        ends = {"eos_token_id": END, "pad_token_id": 0}
        if family in ENCODER_DECODERS:
            scale = {"initializer_factor": 4.0} if family == "t5" else {"init_std": 0.4}
            config = AutoConfig.for_model(**seq2seq_config(family, decoder_start_token_id=0, **scale, **ends))
            AutoModelForSeq2SeqLM.from_config(config).save_pretrained(folder / family)
        else:
            name = {"gpt2": "n_layer"}.get(family, "num_hidden_layers")
            more = {"initializer_range": 0.4, name: layers, **ends}
            config = AutoConfig.for_model(family, **{**FAMILIES[family], **more})
            AutoModelForCausalLM.from_config(config).save_pretrained(folder / family)
        found[family] = str(folder / family)
    return found


def assert_written(folder: Path, cases: list[tuple[str, Sampling, Any]], world_size: int) -> None:
    answers = run_distributed(_write, world_size, folder, cases, backend=None)
    early = 0
    for number, (model, sampling, strategy) in enumerate(cases):
        expected = write("auto", 1, folder, model, sampling)
        written: dict[int, list[int]] = {}
        for answer in answers:
            assert all(trim(written.setdefault(key, row)) == trim(row) for key, row in answer[number].items()), strategy
        wanted = {key: trim(row) for key, row in expected.items()}
        assert {key: trim(row) for key, row in written.items()} == wanted, (model, sampling, strategy)
        assert max(map(len, expected.values())) == sampling.max_new_tokens  # Some rows do not end early.
        early += any(len(trim(row)) < sampling.max_new_tokens for row in expected.values())
    assert early > len(cases) // 2


def trim(row: list[int]) -> list[int]:
    """A row to its end; what follows is padding, as long as the longest row of its batch."""
    return row[: row.index(END) + 1] if END in row else row


def test_ranks_write_the_tokens_of_one_process(tmp_path: Path) -> None:
    models = save_models(tmp_path, ["llama", "gpt2", "t5"])
    cases: list[Any] = [(model, SAMPLED, STRATEGIES["pp"]) for model in models.values()]
    deep = save_models(tmp_path / "deep", ["mistral"], layers=4)["mistral"]
    cases += [(deep, GREEDY, partial(MeshStrategy, pp=2, schedule="Interleaved1F1B"))]
    assert_written(tmp_path, [*cases, (models["llama"], GREEDY, STRATEGIES["zero3"])], 2)


@pytest.mark.slow
def test_ranks_that_share_layers_or_weights_write_the_tokens_of_one_process(tmp_path: Path) -> None:
    models = save_models(tmp_path, ["llama", "qwen3", "gemma2", "bart"])
    cases: list[Any] = [(model, SAMPLED, partial(MeshStrategy, pp=2, tp=2)) for model in models.values()]
    # Data ranks that gather weights together write as often as the longest row of all.
    shared = ({"pp": 2}, {"dp_shard": 1, "pp": 2, "cp": 2}, {"cp": 2, "cp_method": "ulysses"})
    cases += [(models["llama"], GREEDY, partial(MeshStrategy, **{"dp_shard": 2, **axes})) for axes in shared]
    assert_written(tmp_path, [*cases, (models["llama"], GREEDY, STRATEGIES["fsdp"])], 4)


def test_models_with_another_state_write_without_a_cache() -> None:
    keep = [keeps_keys_and_values(built_model(tiny(family))) for family in ("llama", "mistral", "mamba")]
    assert keep == [True, True, False]


def _train(rank: int, world_size: int, folder: Path, model: str, name: str) -> list[str]:
    register_data_parallel()
    seed_everything(1, workers=True, verbose=False)
    sampling = Sampling(max_new_tokens=12, temperature=1.0, top_k=30)
    task = CausalLM(model=model, prompts=["def test", "x"], sampling=sampling, lr=1e-2)
    trainer = trainer_of(STRATEGIES[name](), world_size, folder, max_epochs=2, max_steps=6)
    trainer.fit(task, datamodule=Words(folder, rank, world_size))
    trainer.save_checkpoint(folder / f"{name}.ckpt")
    return task.samples


@pytest.mark.parametrize("strategy", ["zero3", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_samples_are_the_same_whoever_has_the_weights_and_so_is_an_export(tmp_path: Path, strategy: str) -> None:
    folder, model = tmp_path / "run", tmp_path / "model"
    folder.mkdir()
    embedded_tokenizer([Path(__file__)], VOCABULARY, folder)
    torch.manual_seed(11)
    AutoModelForCausalLM.from_config(config_of("qwen3", initializer_range=0.3)).save_pretrained(model)
    samples = _train(0, 1, folder, str(model), "auto")
    assert run_distributed(_train, 2, folder, str(model), strategy, backend=None) == [samples] * 2
    written = [write_folder(load(folder / f"{name}.ckpt"), tmp_path / name) for name in ("auto", strategy)]
    assert written[0] == written[1]
    reference, weights = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("auto", strategy)
    )
    for key, tensor in reference.items():
        torch.testing.assert_close(weights[key], tensor, rtol=1e-4, atol=1e-5)


# --- folders of `dlo checkpoint export`, which transformers and peft load as it was ---------------------------------


IDS = torch.arange(40).view(2, 20)


def train(folder: Path, task: CausalLM) -> tuple[Path, Words]:
    """Trains a few steps, and returns the checkpoint and its data, with a tokenizer that it is to keep."""
    torch.manual_seed(0)
    trainer, data = trainer_of("auto", 1, folder, max_steps=4, limit_val_batches=0), Words(folder, 0, 1)
    data.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    trainer.fit(task, datamodule=data)
    trainer.save_checkpoint(folder / "run.ckpt")
    return folder / "run.ckpt", data


def export(path: Path, target: Path, *words: str) -> None:
    assert main(["checkpoint", "export", str(path), str(target), *words]) == 0


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_export_prints_one_line(tmp_path: Path, dlo: Any, fresh: bool) -> None:
    """Of a fresh process too: nothing of DeepSpeed, bitsandbytes or torchao, which transformers imports."""
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(config_of("llama")).save_pretrained(tmp_path / "base")
    path, _ = train(tmp_path, CausalLM(model=str(tmp_path / "base"), lora=Lora(rank=2)))
    dlo.fresh = fresh
    done = dlo("checkpoint", "export", str(path), str(tmp_path / "out"))
    assert done.stderr == ""
    assert done.stdout.startswith(f"wrote {tmp_path / 'out'}: a transformers folder: LlamaForCausalLM, ")
    assert done.stdout.count("\n") == 1


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_transformers_loads_the_model_that_was_trained(family: str, tmp_path: Path) -> None:
    more = {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}} if family == "llama" else {}
    task = CausalLM(config=small_config(family) | more, lr=1e-2)
    path, data = train(tmp_path, task)
    export(path, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert type(loaded) is type(task.model)
    assert torch.equal(logits(loaded), logits(task.model))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.get_vocab() == data.tokenizer.get_vocab()
    assert tokenizer.chat_template == data.tokenizer.chat_template
    assert tokenizer.eos_token_id == data.tokenizer.eos_token_id
    written = loaded.generate(input_ids=IDS[:1, :5], attention_mask=torch.ones(1, 5), max_new_tokens=3)
    assert written.shape == (1, 8)


@pytest.mark.parametrize(
    ("family", "kinds"),
    [
        ("llama", [{"merge": False}, {"merge": True, "dora": True}]),
        ("gpt2", [{"merge": True}, {"merge": False, "dora": True}]),
        # An adapted head is no longer the embedding.
        ("gpt2", [{"merge": merge, "targets": ["c_attn", "lm_head"]} for merge in (True, False)]),
    ],
)
def test_adapters_are_merged_or_written_alone(family: str, kinds: Any, tmp_path: Path) -> None:
    torch.manual_seed(2)
    base = AutoModelForCausalLM.from_config(config_of(family))
    base.save_pretrained(tmp_path / "base")
    for number, kind in enumerate(kinds):
        folder = tmp_path / str(number)
        folder.mkdir()
        task = CausalLM(model=str(tmp_path / "base"), lora=Lora(rank=2, **kind), lr=1e-1 if "targets" in kind else 1e-2)
        path, _ = train(folder, task)
        export(path, folder / "out")
        if kind["merge"]:
            loaded = AutoModelForCausalLM.from_pretrained(folder / "out")
        else:
            assert not (folder / "out" / "model.safetensors").exists()
            settings = json.loads((folder / "out" / "adapter_config.json").read_text())
            assert settings["base_model_name_or_path"] == str(tmp_path / "base")
            loaded = peft.PeftModel.from_pretrained(base, folder / "out")
        if kind["merge"] and "targets" in kind:
            assert not loaded.config.tie_word_embeddings
            assert torch.equal(loaded.get_input_embeddings().weight, base.get_input_embeddings().weight)
            assert (loaded.lm_head.weight - base.lm_head.weight).abs().max() > 0.01
        found = logits(task.model)
        torch.testing.assert_close(logits(loaded), found, rtol=1e-4, atol=1e-4 if "targets" in kind else 1e-5)
        plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        assert (logits(plain) - found).abs().max() > 0.01  # the adapters have learned something


@pytest.mark.parametrize("dora", [False, True])
def test_four_bit_weights_are_merged_as_they_were_trained(dora: bool, tmp_path: Path) -> None:
    lora = Lora(rank=2, base="nf4", base_block=16, dora=dora)
    task = CausalLM(config=small_config("llama"), lora=lora, lr=1e-2)
    path, _ = train(tmp_path, task)
    export(path, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(loaded), logits(task.model), rtol=1e-4, atol=1e-5)


def test_weights_are_converted_and_other_exports_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _ = train(tmp_path, CausalLM(config=small_config("llama")))
    export(path, tmp_path / "half", "--dtype", "bfloat16")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "half", dtype="auto").dtype == torch.bfloat16
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note").touch()
    assert main(["checkpoint", "export", str(path), str(tmp_path / "full")]) == 2
    assert "output folder must be new or empty" in capsys.readouterr().err
    assert main(["checkpoint", "export", str(path), str(tmp_path / "out"), "--prefix", "x."]) == 2
    assert "--prefix must be unset to export a folder, got x." in capsys.readouterr().err
    assert main(["checkpoint", "export", str(path), str(tmp_path / "weights.safetensors")]) == 0
    assert main(["checkpoint", "convert", str(tmp_path / "weights.safetensors"), str(tmp_path / "bare.ckpt")]) == 0
    assert main(["checkpoint", "export", str(tmp_path / "bare.ckpt"), str(tmp_path / "out")]) == 2
    assert "has no folder export" in capsys.readouterr().err
