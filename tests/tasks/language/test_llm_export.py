"""What `dlo checkpoint export` makes of a language model's checkpoint, transformers and peft load as it was."""

import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from lightning.pytorch import LightningDataModule
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from dlo_framework.cli.main import main
from dlo_framework.distributed.strategy import use_canonical_checkpoints
from dlo_tasks.language.adapters import Lora
from dlo_tasks.language.causal_lm import CausalLM
from dlo_tasks.language.tokenizer import embedded_tokenizer
from support.token_batches import SMALL
from support.trainers import quiet_trainer

SIZES: dict[str, Any] = {**SMALL, "vocab_size": 300, "max_position_embeddings": 64}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**SIZES, "num_key_value_heads": 2, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    "qwen3": {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
    "gpt2": {"vocab_size": 300, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}
IDS = torch.arange(40).view(2, 20)


class Tokens(LightningDataModule):
    """Random tokens, with a tokenizer that a checkpoint is to keep."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.tokenizer = embedded_tokenizer([Path(__file__)], 290, folder)
        self.tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"

    def train_dataloader(self) -> DataLoader:
        ids = torch.randint(290, (4, 2, 17), generator=torch.Generator().manual_seed(0))
        batches = [{"input_ids": rows[:, :-1], "labels": rows[:, 1:]} for rows in ids]
        return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


def train(folder: Path, task: CausalLM) -> tuple[Path, Tokens]:
    """Trains a few steps, and returns the checkpoint."""
    torch.manual_seed(0)
    trainer = quiet_trainer(max_steps=4, default_root_dir=folder)
    use_canonical_checkpoints(trainer)
    data = Tokens(folder)
    trainer.fit(task, datamodule=data)
    trainer.save_checkpoint(folder / "run.ckpt")
    return folder / "run.ckpt", data


def export(path: Path, target: Path, *words: str) -> None:
    assert main(["checkpoint", "export", str(path), str(target), *words]) == 0


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_export_prints_one_line(tmp_path: Path, dlo: Any, fresh: bool) -> None:
    """Of a fresh process too: nothing of DeepSpeed, bitsandbytes or torchao, which transformers imports."""
    torch.manual_seed(2)
    config = AutoConfig.for_model("llama", **FAMILIES["llama"])
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    path, _ = train(tmp_path, CausalLM(model=str(tmp_path / "base"), lora=Lora(rank=2)))
    dlo.fresh = fresh
    done = dlo("checkpoint", "export", str(path), str(tmp_path / "out"))
    assert done.stderr == ""
    assert done.stdout.startswith(f"wrote {tmp_path / 'out'}: a transformers folder: LlamaForCausalLM, ")
    assert done.stdout.count("\n") == 1


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_loads_the_model_that_was_trained(family: str, tmp_path: Path) -> None:
    task = CausalLM(config={"model_type": family, **FAMILIES[family]}, lr=1e-2)
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
    base = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **FAMILIES[family]))
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
    task = CausalLM(config={"model_type": "llama", **FAMILIES["llama"]}, lora=lora, lr=1e-2)
    path, _ = train(tmp_path, task)
    export(path, tmp_path / "out")
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(logits(loaded), logits(task.model), rtol=1e-4, atol=1e-5)


def test_weights_are_converted_and_what_cannot_be_exported_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, _ = train(tmp_path, CausalLM(config={"model_type": "llama", **FAMILIES["llama"]}))
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
