"""Recomputation: gradients stay what they are to the bit, and what is computed again is what was asked for."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from dlo_framework.copy_streams import CopyStreams
from dlo_framework.errors import DloError
from dlo_framework.models.experts.layer import grouped_linear
from dlo_framework.plan import ParallelPlan
from dlo_plugins.memory import activation_checkpoint
from dlo_plugins.memory.activation_checkpoint import ActivationCheckpoint, selective_contexts
from dlo_tasks.language.causal_lm import CausalLM
from support.causal_types import tiny
from support.late import LateStream

DEPTH, WIDTH = 4, 32
PLAN = ParallelPlan(blocks=("blocks.*",), stem=("inward",), head=("norm",))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.dropout = nn.LayerNorm(WIDTH), nn.Dropout(dropout)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, angles: Tensor, scale: float = 1.0) -> Tensor:
        q, k, v = (part.unflatten(-1, (4, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q * angles, k, v).transpose(1, 2).flatten(2)
        x = x + self.dropout(self.out(attended))
        return x + scale * self.dropout(self.down(nn.functional.gelu(self.up(x))))


class Net(nn.Module):
    def __init__(self, dropout: float = 0.1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inward, self.norm = nn.Linear(7, WIDTH), nn.LayerNorm(WIDTH)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(DEPTH))
        self.register_buffer("angles", torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.inward(x)
        for block in self.blocks:
            x = block(x, self.angles, scale=0.5)
        return self.norm(x)


class Count(TorchDispatchMode):
    """Counts calls of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def gradients(net: nn.Module, half: bool = False) -> list[Tensor]:
    torch.manual_seed(1)
    net.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        loss = net(torch.randn(3, 10, 7)).square().mean()
    loss.backward()
    return [loss.detach(), *(parameter.grad for parameter in net.parameters() if parameter.grad is not None)]


def applied(net: nn.Module, **settings: Any) -> nn.Module:
    ActivationCheckpoint(**settings).apply(net, None, PLAN)
    return net


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(
    "settings", [{}, {"every": 2}, {"offload": True}, {"mode": "selective"}, {"mode": "selective", "every": 3}]
)
def test_gradients_are_the_same_to_the_bit(settings: Any, half: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if settings.get("offload"):
        move_on_a_cpu(monkeypatch)
    net = applied(Net(), **settings)
    assert list(net.state_dict()) == list(Net().state_dict())
    for found, expected in zip(gradients(net, half), gradients(Net(), half), strict=True):
        assert torch.equal(found, expected)


def move_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lets inputs be put aside as on an accelerator whose copies are late; returns what is copied, as it starts."""
    started: list[str] = []
    streams = CopyStreams(LateStream(), LateStream())  # type: ignore[arg-type]
    for name, stream in streams._asdict().items():

        def copy(target: Tensor, source: Tensor, name: str = name, original: Any = stream.copy) -> Any:
            started.append(f"{name} {tuple(source.shape)}")
            return original(target, source)

        stream.copy = copy  # type: ignore[method-assign]
    monkeypatch.setattr(activation_checkpoint, "_STAYS", ("meta",))
    monkeypatch.setattr(activation_checkpoint, "copy_streams", lambda device: streams)
    return started


def test_offload_takes_the_blocks_inputs_alone_and_fetches_one_block_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    started = move_on_a_cpu(monkeypatch)
    net, seen = applied(Net(), offload=True), []
    for number, block in enumerate(net.blocks):
        block.register_full_backward_pre_hook(lambda *_, number=number: seen.append((number, len(started))))
    for _ in range(2):  # The second forward's first block has none before it: the first forward's are over.
        started.clear()
        seen.clear()
        gradients(net)
        # Backward of the last block begins before anything is fetched; of each other one, its inputs are on their way.
        expected = [(DEPTH - 1, DEPTH), *((DEPTH - 1 - done, DEPTH + done + 1) for done in range(1, DEPTH))]
        assert seen == expected
        shape = (3, 10, WIDTH)
        assert started == [f"down {shape}"] * DEPTH + [f"up {shape}"] * DEPTH


def calls(net: nn.Module) -> Counter[str]:
    with Count() as count:
        gradients(net)
    return count.calls


def test_what_is_computed_again() -> None:
    plain, full, half = calls(Net()), calls(applied(Net())), calls(applied(Net(), every=2))
    selective = calls(applied(Net(), mode="selective"))
    attention, projections = "_scaled_dot_product_flash_attention_for_cpu", 4
    assert plain[attention] == DEPTH
    assert selective[attention] == DEPTH
    assert full[attention] == 2 * DEPTH
    assert half[attention] == 1.5 * DEPTH
    assert full["addmm"] - plain["addmm"] >= (projections - 1) * DEPTH  # the last one's output is not needed again
    assert selective["addmm"] == plain["addmm"]
    assert selective["gelu"] == full["gelu"] == 2 * DEPTH


def test_products_of_dlos_experts_are_kept() -> None:
    rows, weight = torch.randn(6, 4, requires_grad=True), torch.randn(2, 3, 4, requires_grad=True)

    def forward(rows: Tensor) -> Tensor:
        return grouped_linear(rows.tanh(), weight, torch.tensor([2, 4])).cos()

    with Count() as count:
        checkpoint(forward, rows, use_reentrant=False, context_fn=selective_contexts).sum().backward()
    assert count.calls["grouped_linear"] == 1
    assert count.calls["tanh"] == 2


@pytest.mark.parametrize("mode", [pytest.param("full", marks=pytest.mark.slow), "selective"])
def test_blocks_may_be_compiled(mode: Any) -> None:
    net = applied(Net(dropout=0.0), mode=mode)
    for block in net.blocks:  # type: ignore[union-attr]
        block.compile(backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(net), gradients(Net(dropout=0.0)))


def test_a_plan_without_blocks() -> None:
    with pytest.raises(DloError, match="got none of Net"):
        ActivationCheckpoint().apply(Net(), None, ParallelPlan())


@pytest.mark.gpu
def test_offload_on_an_accelerator() -> None:
    x = torch.randn(64, 256, 7, device="cuda")
    found = []
    for offload in (False, True):
        net = applied(Net(dropout=0.0), offload=offload).cuda()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        loss = net(x).square().mean()
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated() - before
        loss.backward()
        found.append((held, [parameter.grad for parameter in net.parameters()]))
    assert found[1][0] < found[0][0] - 3 * 64 * 256 * WIDTH * 4
    for own, expected in zip(found[1][1], found[0][1], strict=True):
        assert torch.equal(own, expected)


def test_products_that_code_changes_in_place_are_computed_again() -> None:
    """transformers adds the biases of gpt_oss's experts to the output of their product."""
    torch.manual_seed(0)
    task: Any = CausalLM(config=tiny("gpt_oss", dropout=False))
    task.configure_model()
    ids = torch.randint(3, 60, (2, 8))
    found = []
    for recomputes in (False, True):
        task.model.zero_grad()
        if recomputes:
            ActivationCheckpoint("selective").apply(task.model, None, task.parallel_plan())
        task.model(input_ids=ids, use_cache=False).logits.square().sum().backward()
        found.append([parameter.grad.clone() for parameter in task.model.parameters() if parameter.grad is not None])
    assert all(map(torch.equal, *found))
