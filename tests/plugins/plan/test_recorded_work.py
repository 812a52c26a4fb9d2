"""Work of operations: bytes that each moves, and the kernels of compiled code."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from dlo_plugins.plan.operation_recorder import Operation, Record, Recorder, summarise

X = torch.ones(4, 8, 16)
WEIGHT, BIAS = torch.ones(16), torch.zeros(16)


def _recorded(run: Callable[[], object]) -> list[Operation]:
    recorder = Recorder(lambda _: ("", False))
    with recorder:
        recorder.record = record = Record()
        run()
    return record.operations


def test_parts_of_one_tensor_are_read_each_and_the_same_part_once() -> None:
    (joined,) = _recorded(lambda: torch.cat(X.chunk(2, dim=-1)[::-1], dim=-1))
    (squared,) = _recorded(lambda: X * X)
    assert joined.moved == squared.moved == 2 * X.nbytes


def test_a_compiled_kernel_reads_and_writes_once() -> None:
    first, last = torch.ones(32, 64), torch.ones(64, 8)

    def run() -> Tensor:
        x = nn.functional.gelu(torch.mm(first, first.T))
        return torch.mm(torch.cat([x, x + 1], dim=-1), last)

    work = summarise(_recorded(run), set())
    assert work.compiled.number == 1
    assert work.compiled.moved.total == 4 * (32 * 32 + 32 * 64)  # It reads the product, and writes the joined tensors.
    assert work.eager.number == 3
    assert work.eager.moved.total == 4 * (2 + 2 + 2 + 2) * 32 * 32


def test_a_compiled_normalisation_writes_the_dtype_of_the_product_alone() -> None:
    weight = torch.ones(16, 4, dtype=torch.bfloat16)
    work = summarise(
        _recorded(lambda: nn.functional.layer_norm(X, [16], WEIGHT, BIAS).bfloat16().reshape(32, 16) @ weight), set()
    )
    assert work.compiled.number == 1
    assert work.compiled.moved.total == X.numel() * (4 + 2) + 4 * (16 + 16)
