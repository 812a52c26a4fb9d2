"""Language models of published tables, profiled as a user's."""

import functools

import torch

from dlo_plugins.plan.model_profile import ModelProfile, profile_model
from dlo_tasks.language.causal_lm import CausalLM


class _Windows:
    def __init__(self, seq_len: int) -> None:
        self.seq_len = seq_len


def _profile(
    config: dict[str, object], length: int, dtype: torch.dtype, attention: str | None, device: str = "cuda"
) -> ModelProfile:
    task = CausalLM(config=config, attention=attention).on_meta()
    return profile_model(task, task.example_batch(_Windows(length)), task.parallel_plan(), dtype=dtype, device=device)  # type: ignore[arg-type]


@functools.cache
def gpt(width: int, layers: int, heads: int, length: int = 2048, vocabulary: int = 51_200) -> ModelProfile:
    """Returns the profile of a GPT-2-like model with unfused attention, as Megatron had it in 2021 and 2022."""
    config = {
        "model_type": "gpt2",
        "n_embd": width,
        "n_layer": layers,
        "n_head": heads,
        "vocab_size": vocabulary,
        "n_positions": length,
        "activation_function": "gelu_pytorch_tanh",
    }
    return _profile(config, length, torch.float16, "eager")


@functools.cache
def llama(
    width: int, hidden: int, layers: int, heads: int, kv: int, length: int = 8192, vocabulary: int = 128_256,
    device: str = "cuda",
) -> ModelProfile:  # fmt: skip
    """Returns the profile of a Llama."""
    config = {
        "model_type": "llama",
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocabulary,
        "max_position_embeddings": length,
    }
    return _profile(config, length, torch.bfloat16, None, device)
