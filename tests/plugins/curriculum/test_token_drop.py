"""Random layer token drop: the result of masked attention with the other tokens passed by, for packed documents."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from dlo_framework.errors import DloError
from dlo_plugins.curriculum.token_drop import TokenDrop, draw_tokens, kept_tokens, select_arguments
from support.curricula_runs import assert_refused, check_resume, fit, images, seeded, texts


def test_the_number_of_tokens_grows_to_all():
    assert [kept_tokens(at, 0.5, 0.8, 32, 8) for at in (0, 0.2, 0.4, 0.8, 1)] == [16, 24, 24, 32, 32]
    assert [kept_tokens(at, 0.5, 0.8, 30, 1) for at in (0, 0.4, 0.8)] == [15, 23, 30]


def test_arguments_are_those_of_the_chosen_tokens():
    index = torch.tensor([0, 2, 3, 5])
    mask = torch.arange(36).view(1, 1, 6, 6)
    found = select_arguments(
        {
            "attention_mask": mask,
            "position_ids": torch.arange(12).view(2, 6),
            "position_embeddings": (torch.arange(24).view(2, 6, 2), torch.arange(24).view(2, 6, 2)),
            "cu_seq_lens_q": torch.tensor([0, 3, 6, 8, 12]),
            "seq_idx": torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1]]),
            "use_cache": False,
            "past_key_values": None,
        },
        *(index, 6, 2, "layer"),
    )
    assert torch.equal(found["attention_mask"], mask[:, :, index][..., index])
    assert found["position_ids"].tolist() == [[0, 2, 3, 5], [6, 8, 9, 11]]
    assert found["position_embeddings"][1][0, :, 0].tolist() == [0, 4, 6, 10]
    assert found["cu_seq_lens_q"].tolist() == [0, 2, 4, 5, 8]
    assert found["seq_idx"].tolist() == [[0, 0, 1, 1], [0, 1, 1, 1]]
    square = {"attention_mask": torch.arange(36).view(6, 6)}  # As many rows as tokens
    assert select_arguments(square, index, 6, 6, "layer")["attention_mask"].shape == (6, 4)
    with pytest.raises(DloError, match=r"got 'rope' of shape \[6, 4\] for 'layer'"):
        select_arguments({"rope": torch.zeros(6, 4)}, index, 6, 2, "layer")
    with pytest.raises(DloError, match="arguments of a block must be tensors, got object"):
        select_arguments({"mask": object()}, index, 6, 2, "layer")


class Reference(Callback):
    """Loss of each batch by attention masks: a token that a block leaves out is no key, and keeps its hidden state."""

    def __init__(self, drop: TokenDrop) -> None:
        self.drop, self.losses, self.fractions = drop, [], []

    @torch.no_grad()
    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        model = pl_module.model.model
        ids, positions = batch["input_ids"], batch["position_ids"]
        _rows, length = ids.shape
        begins = torch.ones_like(positions, dtype=torch.bool)
        begins[:, 1:] = positions.diff(dim=1) != 1
        document = begins.cumsum(1)
        allowed = document[:, :, None] == document[:, None, :]
        allowed &= torch.ones(length, length, dtype=torch.bool).tril()
        hidden = model.embed_tokens(ids)
        rotary = model.rotary_emb(hidden, position_ids=positions)
        for number, layer in enumerate(model.layers):
            chosen = torch.ones(length, dtype=torch.bool)
            if 0 < number < len(model.layers) - 1:
                count = self.drop.kept(length)
                drawn = draw_tokens(length, count, 0, trainer.global_step, number, self.drop.seed)
                chosen = torch.zeros(length, dtype=torch.bool)
                chosen[torch.from_numpy(drawn)] = True
                self.fractions.append(count / length)
            mask = torch.where(allowed & chosen, 0.0, -1e30)[:, None]
            kernel, model.config._attn_implementation = model.config._attn_implementation, "eager"
            out = type(layer).forward(layer, hidden, attention_mask=mask, position_embeddings=rotary)
            model.config._attn_implementation = kernel
            hidden = torch.where(chosen[None, :, None], out, hidden)
        logits = pl_module.model.lm_head(model.norm(hidden))
        self.losses.append(
            float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100))
        )


@pytest.mark.parametrize("attention", ["sdpa", "eager", "dlo_varlen"])
def test_the_loss_is_that_of_masked_attention(folder, tmp_path, attention):
    drop = TokenDrop(0.3, until="90%", seed=2)
    reference = Reference(drop)
    seeded()
    losses, _ = fit(tmp_path, texts(folder, attention=attention), "auto", 1, [drop, reference], epochs=1, batches=6)
    assert losses == pytest.approx(reference.losses, rel=1e-5)
    assert min(reference.fractions) == 0.5  # 9.6 tokens, rounded up to a multiple of 8
    assert max(reference.fractions) == 1


def test_a_class_token_is_always_seen(tmp_path):
    drop, seen = TokenDrop(0.3, multiple=1), []

    class Watch(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            seen.extend(index.tolist() for index in drop._index.values())

    task, data = images()
    fit(tmp_path, (task, data), "auto", 1, [drop, Watch()])
    assert task.model.num_prefix_tokens == 1
    assert all(index[0] == 0 for index in seen)
    assert {len(index) for index in seen} > {6, 8}
    assert type(task.model.blocks[1]).__name__ == "Block"


def test_a_run_resumes_exactly(folder, tmp_path):
    check_resume(tmp_path, TokenDrop, lambda: texts(folder), batches=8, accumulate_grad_batches=2, epochs=1)


def test_models_that_do_not_fit_are_refused(tmp_path):
    shallow = images(model_args={"depth": 2})
    assert_refused("the model must have at least 3 blocks", tmp_path, shallow, TokenDrop())
    task, data = images()
    task = type(task)("resnet18", num_classes=10, log_images=0, schedule="constant")
    assert_refused("a block's hidden state must be [B, N, D]", tmp_path, (task, data), TokenDrop())
