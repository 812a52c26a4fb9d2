"""A language model's loss is launched while the device still computes the model."""

import pytest
import torch

from dlo_tasks.language import batches, families
from dlo_tasks.language.causal_lm import CausalLM
from support.token_batches import GROUPED, packed_rows


def test_of_what_was_counted_nothing_is_asked_of_the_device():
    task = CausalLM(config={"model_type": "llama", **GROUPED})
    task.configure_model()
    task.cuda()
    batch = packed_rows(4, torch.Generator().manual_seed(3)) | {"tokens_in_step": torch.tensor(50)}
    moved = {name: tensor.cuda() for name, tensor in batch.items()}
    expected = task.loss(task.forward(**task.inputs(moved)[1]), moved)
    documents = families.flash_arguments(moved["position_ids"])
    batches.attach_counts(moved, batches.count_rows(batch))
    hidden = task.forward(**task.inputs(moved)[1])
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = task.loss(hidden, moved)
        found = families.flash_arguments(moved["position_ids"])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert torch.equal(found["cu_seq_lens_q"], documents["cu_seq_lens_q"])
    assert found["max_length_q"] == documents["max_length_q"]
