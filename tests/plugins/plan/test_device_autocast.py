"""Autocast of a GPU on fake tensors of a CPU is that of torch on fake tensors of a GPU."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dlo_plugins.plan.model_profile import device_autocast

_WIDTH = 8
#: Functions of models, with operands `[4, 8]` in half precision. `rms_norm` is left out: torch 2.11 does not cast it.
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "linear": lambda x: F.linear(x, x),
    "matmul": lambda x: x @ x.T,
    "layer_norm": lambda x: F.layer_norm(x, (_WIDTH,)),
    "group_norm": lambda x: F.group_norm(x, 2),
    "softmax": lambda x: x.softmax(-1),
    "pow": lambda x: x.pow(2),
    "**": lambda x: x**2,
    "exp": torch.exp,
    "sum": lambda x: x.sum(),
    "cumsum": lambda x: x.cumsum(0),
    "norm": lambda x: torch.norm(x),
    "mse_loss": lambda x: F.mse_loss(x, x),
    "cross_entropy": lambda x: F.cross_entropy(x, x),
    "gelu": F.gelu,
    "mean": lambda x: x.mean(),
    "add": lambda x: x + x,
}


def test_dtypes_are_those_of_a_gpu() -> None:
    def dtypes(device: str) -> dict[str, torch.dtype]:
        operand = torch.empty(4, _WIDTH, dtype=torch.bfloat16, device=device)
        return {name: function(operand).dtype for name, function in FUNCTIONS.items()}

    with FakeTensorMode():
        with device_autocast("cuda", torch.bfloat16):
            found = dtypes("cpu")
        torch.set_autocast_enabled("cuda", True)  # torch.autocast turns itself off without a GPU.
        torch.set_autocast_dtype("cuda", torch.bfloat16)
        torch.autocast_increment_nesting()
        try:
            wanted = dtypes("cuda")
        finally:
            torch.autocast_decrement_nesting()
            torch.set_autocast_enabled("cuda", False)
    assert found == wanted


def test_nothing_changes_without_a_dtype_and_by_the_rules_of_a_cpu() -> None:
    value = torch.ones(4, _WIDTH, dtype=torch.bfloat16)
    for device, dtype in (("cuda", None), ("cpu", torch.bfloat16)):
        with device_autocast(device, dtype):
            assert F.layer_norm(value, (_WIDTH,)).dtype == torch.bfloat16
