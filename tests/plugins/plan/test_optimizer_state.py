"""State of a task's own optimizer: its bytes follow from a step, for plain, quantised and factored states."""

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

from dlo_plugins.plan.run_memory import measure_optimizer
from dlo_tasks.language.causal_lm import CausalLM

CONFIG = {
    **{"model_type": "llama", "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 256},
    **{"num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 64},
}


def _task(optimizer: str) -> Any:
    return CausalLM(config=dict(CONFIG), optimizer=optimizer, schedule="constant").on_meta()


@pytest.mark.parametrize(
    ("optimizer", "moments", "kind"),
    [("adamw", 2.0, "elementwise"), ("lion", 1.0, "elementwise"), ("adamw8bit", 2 * (1 + 4 / 256) / 4, "tensor")],
)
def test_bytes_follow_from_a_step(optimizer: str, moments: float, kind: str) -> None:
    found = measure_optimizer(_task(optimizer), torch.float32)
    assert found.moments == pytest.approx(moments, rel=0.02)  # Norms keep single precision under 8 bits.
    assert (found.kind, found.error) == (kind, "")


def test_a_factored_state_has_the_shapes_of_rows_and_columns() -> None:
    found = measure_optimizer(_task("adafactor"), torch.float32)
    assert 0 < found.moments < 0.05


class _NeedsTrainer(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1 / self.trainer.max_steps)


def test_an_optimizer_that_needs_a_trainer_is_taken_as_adam_and_says_so() -> None:
    found = measure_optimizer(_NeedsTrainer(), torch.float32)
    assert found.moments == 2.0
    assert "not attached to a `Trainer`" in found.error
