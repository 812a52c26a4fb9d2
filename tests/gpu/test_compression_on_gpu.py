"""Signs, errors and the 1-bit optimizers on one accelerator: what the CPU computes, and NCCL's collectives."""

import torch

from dlo_plugins.compression.compressed_all_reduce import (
    CompressedAllReduce,
    decompress,
    pack_signs,
    subtract_compressed_,
)
from support.compression_by_definition import average_in_one_process, compress


def test_signs_and_scales_are_the_cpus() -> None:
    values = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    counts = torch.full((256,), 256.0)
    packed, scales = compress(values.cuda(), counts.cuda())
    assert torch.equal(packed.cpu(), pack_signs(values))
    sent = decompress(packed, scales)
    torch.testing.assert_close(sent.cpu(), decompress(*compress(values, counts)))
    error = subtract_compressed_(values.cuda(), scales, torch.empty_like(sent))
    torch.testing.assert_close(error, values.cuda() - sent, rtol=0, atol=0)


def test_the_mean_over_nccl_is_its_definition(group) -> None:
    reduce = CompressedAllReduce(block=64)
    generator = torch.Generator().manual_seed(1)
    workers, servers = [], []
    for _ in range(5):
        tensors = [torch.randn(shape, generator=generator) for shape in ((50, 30), (7,), (300, 64))]
        mine = [tensor.cuda() for tensor in tensors]
        reduce.average(mine)
        layout = reduce.layout
        assert layout is not None
        flat = torch.zeros(layout.numel)
        torch._foreach_copy_(layout.views(flat, tensors), tensors)
        workers, servers = workers or [torch.zeros(layout.numel)], servers or [torch.zeros(layout.chunk)]
        mean, workers, servers = average_in_one_process([flat], workers, servers, layout)
        for got, expected in zip(mine, layout.views(mean, tensors), strict=True):
            # A sum in another order may turn the sign of an element that is zero but for rounding.
            close = torch.isclose(got.cpu(), expected, rtol=1e-4, atol=1e-5)
            assert close.float().mean() > 0.999
