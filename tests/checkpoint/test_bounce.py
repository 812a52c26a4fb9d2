"""A save copies a device's tensors through two buffers of one size, whatever the tensors' sizes."""

import pytest
import torch

from dlo_framework.checkpoint.saving import BounceBuffers

TENSORS = {
    "larger than the buffers": torch.arange(1000, dtype=torch.float32),
    "as large": torch.arange(16, dtype=torch.int64),
    "smaller": torch.arange(5, dtype=torch.int16),
    "none": torch.empty(0, 3),
    "without dims": torch.tensor(2.5, dtype=torch.float64),
    "bytes": torch.tensor([True, False, True]),
    "halves": torch.randn(33).bfloat16(),
    "complex, conjugate": torch.randn(40, dtype=torch.complex64).conj(),
    "transposed": torch.randn(20, 30).t(),
    "expanded": torch.randn(3, 1).expand(3, 50),
}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_copies_are_the_tensors_and_have_memory_of_their_own(device: str) -> None:
    tensors = {name: tensor.to(device) for name, tensor in TENSORS.items()}
    bounce = BounceBuffers(torch.device(device), size=128)
    copies = {name: bounce.copy(tensor) for name, tensor in tensors.items()}
    bounce.finish()
    for name, tensor in tensors.items():
        assert torch.equal(copies[name], tensor.cpu()), name
        assert copies[name].is_contiguous(), name
        assert copies[name].data_ptr() != tensor.data_ptr() or not tensor.numel(), name
        assert not copies[name].is_pinned(), name
