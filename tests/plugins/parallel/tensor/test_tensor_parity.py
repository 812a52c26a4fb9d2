"""Models cut over 2 and 4 ranks have the loss, the gradients and the steps of the whole model."""

import functools
from typing import Any

import pytest

from dlo_framework.testing import run_distributed
from support.tensor_models import VIT, compare, image_loss, image_model, language_model, text_loss

NO_DROPOUT = {"attention_dropout": 0.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},  # biases of queries, keys and values
    "qwen3": {},  # norms of each head's queries and keys
    "mistral": {"sliding_window": 4},
    "gemma": {"tie_word_embeddings": True, "num_key_value_heads": 1},  # one key/value head for all
    "gemma2": {"tie_word_embeddings": True},  # soft-capped logits, norms after attention and MLP
    "gemma3_text": {"tie_word_embeddings": True},
    "granite": {},  # scaled logits
    "gpt_neox": NO_DROPOUT,  # fused by head, attention and MLP side by side
    "phi": NO_DROPOUT,  # side by side after one norm, biases everywhere, the head too
    "phi3": {},  # packed queries, keys and values, of different sizes
    "cohere": {"use_qk_norm": True, "tie_word_embeddings": True},
    "olmo2": {},  # norms over all heads
    "starcoder2": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 8, "attn_pdrop": 0.0, "tie_word_embeddings": True},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 0.0},  # MLP in the block
}
FEW = ("llama", "phi3", "gpt2")
ON_FOUR = ("llama", "gemma", "qwen3", "phi3", "gpt_neox", "olmo2", "gemma2")


def _language(rank: int, world_size: int, names: tuple[str, ...]) -> None:
    for name in names:
        make = functools.partial(language_model, name, **FAMILIES[name])
        for sequence_parallel in (False, True) if name != "opt" else (False,):
            compare(make, text_loss, sequence_parallel, f"{name}, sequence {sequence_parallel}")
    for length in (2, 8):  # fewer tokens than ranks; as many for each
        loss = functools.partial(text_loss, length=length)
        compare(functools.partial(language_model, "llama"), loss, True, f"{length} tokens")


VITS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms of queries and keys, layer scale": {"qk_norm": True, "init_values": 0.1},
    "registers, mean of tokens, an even length": {"reg_tokens": 2, "class_token": False, "global_pool": "avg"},
}


def _vision(rank: int, world_size: int) -> None:
    for what, more in VITS.items():
        make = functools.partial(image_model, "vit_tiny_patch16_224", **VIT, **more)
        for sequence_parallel in (False, True):
            compare(make, image_loss, sequence_parallel, f"vit: {what}, sequence {sequence_parallel}")
    packed = functools.partial(image_model, "vit_giant_patch14_reg4_dinov2", **{**VIT, "mlp_ratio": 4})
    compare(packed, image_loss, True, "a gate packed with the values")


def _all(rank: int, world_size: int, names: tuple[str, ...]) -> None:
    _language(rank, world_size, names)
    _vision(rank, world_size)


@pytest.mark.parametrize(
    ("ranks", "names"),
    [
        (2, FEW),
        pytest.param(2, tuple(name for name in FAMILIES if name not in FEW), marks=pytest.mark.slow),
        pytest.param(4, ON_FOUR, marks=pytest.mark.slow),
    ],
)
def test_language_models_and_vision_transformers(ranks: int, names: tuple[str, ...]) -> None:
    run_distributed(_all, ranks, names)


def _coatnets(rank: int, world_size: int, names: tuple[str, ...]) -> None:
    loss = functools.partial(image_loss, size=64)
    for name in names:
        compare(functools.partial(image_model, name, img_size=64, num_classes=5), loss, False, name, steps=1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "names",
    [("coatnet_nano_rw_224",), ("coatnet_rmlp_nano_rw_224",), ("maxvit_tiny_tf_224", "coatnext_nano_rw_224")],
)
def test_attention_over_pixels(names: tuple[str, ...]) -> None:
    run_distributed(_coatnets, 2, names)
