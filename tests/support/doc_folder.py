"""What a reader of the documentation has in the folder: data, models, configs and runs that a page names, in small."""

import json
import re
import shutil
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
import torch

from support.doc_pages import ROOT, read_blocks
from support.seq2seq import SMALL_T5
from support.texts import CHATML, lines, sentences
from support.token_files import npy, write_megatron, write_tar

#: Names of the pages, and the small model or folder that replaces each.
SMALL = {
    r"Qwen/[\w.-]*A3B|mistralai/[\w.-]+": "small_mixture",
    r"/models/t5-small": "small_t5",
    r"(/models|(\$DSDIR/HuggingFace_Models/)?meta-llama|Qwen)/[\w.-]+": "small_model",
    r"(?:/data|\$DSDIR)/(imagenet|chats|pairs|books|summaries)": r"\1",
    r"s3://bucket/web-images": "imagenet",
    r"pretrained: true": "pretrained: false",
    r"s3://bucket/web/": "shards",
}
_TEXT = r"CausalLM|PreferenceLM|TextData|PreferenceData|SequenceLength|DifficultyOrder|ep: |cp: |tp: |llm|sft"


def is_text(words: str) -> bool:
    """Returns whether a config, or what is named, is about text."""
    return re.search(_TEXT, words) is not None


def in_small(text: str) -> str:
    """Returns a config or command with small models and local data."""
    for large, small in SMALL.items():
        text = re.sub(large, small, text)
    return text


@cache
def small_files() -> Path:
    """Returns a folder with the data and the models that pages name."""
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast, T5ForConditionalGeneration

    folder = Path(mkdtemp(prefix="pages"))
    texts = sentences(400, longest=8)
    bytes_of_texts = Tokenizer(models.BPE())
    bytes_of_texts.pre_tokenizer, bytes_of_texts.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["</>"], initial_alphabet=alphabet)
    bytes_of_texts.train_from_iterator(texts, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_of_texts, eos_token="</>", chat_template=CHATML)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "vocab_size": 300}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 8192}
    mixture = {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 32, "head_dim": 8}
    for name, kind in {"small_model": {"model_type": "llama"}, "small_mixture": mixture}.items():
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**kind, **sizes)).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    t5 = AutoConfig.for_model("t5", **{**SMALL_T5, "vocab_size": 400, "decoder_start_token_id": 0})
    T5ForConditionalGeneration(t5).save_pretrained(folder / "small_t5")
    tokenizer.save_pretrained(folder / "small_t5")
    for name in ("chats", "pairs", "books", "web", "code", "shards", "summaries"):
        (folder / name).mkdir()
    turns = [[{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}] for text in texts]
    lines(folder / "chats/1.jsonl", *({"messages": chat} for chat in turns))
    lines(folder / "pairs/1.jsonl", *({"prompt": text, "chosen": text, "rejected": text[::-1]} for text in texts))
    lines(folder / "summaries/1.jsonl", *({"article": text, "summary": text[:9]} for text in texts))
    for name in ("train.jsonl", "web/1.jsonl", "code/1.jsonl"):
        lines(folder / name, *({"text": text} for text in texts))
    write_megatron(folder / "books/1", [np.arange(99) % 300] * 40)
    lines(folder / "questions.jsonl", *({"prompt": text} for text in texts[:4]))
    (folder / "prompts.txt").write_text("import \nfor i in \n")
    members = [(f"{number}.npy", npy(np.arange(99) % 300)) for number in range(40)]
    write_tar(folder / "shards/0.tar", members)
    plan = {"compute_environment": "LOCAL_MACHINE", "distributed_type": "FSDP", "num_processes": 16, "num_machines": 2}
    plan |= {"mixed_precision": "bf16", "fsdp_config": {"fsdp_version": 2, "fsdp_activation_checkpointing": True}}
    (folder / "default_config.yaml").write_text(json.dumps(plan))
    (folder / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, "gradient_clipping": "auto"}))
    weights = {"weight": torch.ones(2)}
    lightning = {"state_dict": weights, "pytorch-lightning_version": "2.6.6", "epoch": 1, "global_step": 2}
    torch.save(lightning, folder / "old-lightning.ckpt")
    for name in ("deepspeed-folder", "their_folder"):
        (folder / "runs" / name / "step").mkdir(parents=True)
        (folder / "runs" / name / "latest").write_text("step")
        states = {"module": weights, "dp_world_size": 1, "ds_version": "0.19.0", "ds_config": {}}
        torch.save(states, folder / "runs" / name / "step/mp_rank_00_model_states.pt")
    (folder / "folder").mkdir()
    save_file(weights, folder / "folder/model.safetensors")
    return folder


def fill_folder(folder: Path, page: Path, photos: Path) -> None:
    """Writes what a page's commands and configs read, and the page does not write itself.

    Args:
        folder: The reader's folder.
        page: The page; its blocks of Python with a file's name are written too.
        photos: Images in folders of classes.
    """
    shutil.copytree(small_files(), folder, dirs_exist_ok=True)
    (folder / "configs").symlink_to(ROOT / "configs")
    for name in ("photos", "imagenet"):
        shutil.copytree(photos, folder / name)
    shutil.copytree(photos / "val/china", folder / "new_photos")
    for file in (ROOT / "examples").glob("own_*"):
        shutil.copy(file, folder)
    shutil.copy(ROOT / "examples/own_module.py", folder / "train.py")
    blocks = read_blocks(page)
    for block in blocks:
        if block.language == "python" and (name := re.match(r"# (\w+\.py)\n", block.text)):
            (folder / name[1]).write_text(block.text)
    own = [
        block.text
        for block in blocks
        if block.language == "yaml" and re.search(r"^model:(.|\n)+^data:", block.text, re.M)
    ]
    kind = "llm/quickstart" if is_text(page.stem + "".join(own)) or "language" in page.stem else "quickstart"
    shipped = (ROOT / f"configs/{kind}.yaml").read_text().replace("run: {name: llm_quickstart}\n", "")
    (folder / "my.yaml").write_text(re.sub("batch_size: 64", "batch_size: 8", in_small(own[0])) if own else shipped)
