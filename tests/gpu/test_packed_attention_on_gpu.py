"""Packed documents on a GPU: each kernel gives a model the loss and gradients of the dense mask, without waiting."""

import pytest
import torch
from torch.nn.attention.varlen import varlen_attn

from dlo_tasks.language import batches, packed_attention
from dlo_tasks.language.causal_lm import CausalLM
from support.token_batches import GROUPED, VOCABULARY

SIZES = {**GROUPED, "hidden_size": 256, "intermediate_size": 256, "max_position_embeddings": 1024}
FAMILIES = {
    "llama": SIZES,
    "mistral": {**SIZES, "sliding_window": 100},
    "qwen3": {
        **SIZES,
        "head_dim": 64,
        "sliding_window": 100,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention"],
    },
}


def packed(rows: int, length: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    begins = torch.rand(rows, length, generator=draw) < 1 / 150
    begins[:, 0] = True
    places = torch.arange(length)
    positions = places - torch.where(begins, places, 0).cummax(dim=1).values
    ids, labels = torch.randint(VOCABULARY, (2, rows, length), generator=draw)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def moved(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = {name: tensor.cuda() for name, tensor in batch.items()}
    batches.attach_counts(found, batches.count_rows(batch))
    return found


def task_of(attention: str, family: str) -> CausalLM:
    torch.manual_seed(0)
    task = CausalLM(config={"model_type": family, **FAMILIES[family]}, attention=attention)
    task.configure_model()
    return task.cuda()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("compiled", [False, True])
def test_packed_documents_are_those_of_the_dense_mask(family, dtype, compiled):
    """In bf16 by varlen_attn, in float32 by FlexAttention; rows are no multiple of a block."""
    batch = moved(packed(2, 600))
    found = {}
    for attention in ("dlo_varlen", "sdpa"):
        task = task_of(attention, family)
        if compiled and attention == "dlo_varlen":
            for layer in task.model.model.layers:
                layer.compile()
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
            loss = task.training_step(batch, 0)["loss"]
        loss.backward()
        found[attention] = loss.item(), [parameter.grad for parameter in task.parameters()]
    tight = dtype == torch.float32
    assert found["dlo_varlen"][0] == pytest.approx(found["sdpa"][0], rel=1e-5 if tight else 1e-3)
    for one, other in zip(found["dlo_varlen"][1], found["sdpa"][1], strict=True):
        assert (one - other).norm() < (1e-3 if tight else 0.05) * other.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_device_is_not_waited_for(dtype):
    batch = moved(packed(2, 600))
    task = task_of("dlo_varlen", "llama")

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=dtype == torch.bfloat16):
            task.training_step(batch, 0)["loss"].backward()

    step()  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("width", [64, 36])
@pytest.mark.parametrize("window", [None, 50])
def test_the_reference_is_torchs_kernel(width, window):
    draw = torch.Generator("cuda").manual_seed(2)
    query = torch.randn(2, 8, 300, width, device="cuda", dtype=torch.bfloat16, generator=draw)
    key, value = torch.randn(2, 2, 2, 300, width, device="cuda", dtype=torch.bfloat16, generator=draw)
    edges = torch.tensor([0, 100, 300, 310, 600], dtype=torch.int32, device="cuda")
    found = packed_attention._by_lengths(query, key, value, edges, 290, 0.1, window)
    rows = [tensor.transpose(1, 2).reshape(600, -1, width) for tensor in (query, key, value)]
    left = -1 if window is None else window - 1
    expected = packed_attention.varlen_reference(
        *rows, edges, edges, 290, 290, scale=0.1, window_size=(left, 0), enable_gqa=True
    )
    torch.testing.assert_close(found.flatten(0, 1), expected, rtol=0.02, atol=0.02)
    assert varlen_attn is packed_attention.varlen_attn


def test_it_is_the_default_of_a_run_on_cuda(tmp_path):
    from lightning.pytorch import Trainer

    task = CausalLM(config={"model_type": "llama", **SIZES})
    trainer = Trainer(accelerator="gpu", devices=1, max_steps=1, logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, default_root_dir=tmp_path)  # fmt: skip
    rows = [{name: tensor[0] for name, tensor in packed(1, 64).items()}] * 2
    trainer.fit(task, torch.utils.data.DataLoader(rows, batch_size=2))
    assert task.model.config._attn_implementation == packed_attention.NAME
