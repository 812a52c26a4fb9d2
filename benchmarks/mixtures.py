"""What the experts of a mixture cost beside transformers' loop over experts, and its grouped products.

Forward and backward of gated experts of Mixtral's form, with equal weights and choices. The matrix products are the
same for each number of experts: 2 experts compute a token.

* ``transformers' loop``: ``experts_implementation="eager"``; the unit.
* ``transformers' loop again``: the same once more, the A/A control: how far its ratio is from 1 is the noise.
* ``transformers' grouped_mm``: ``torch.nn.functional.grouped_mm``, transformers' default.
* ``dlo``: :class:`dlo_framework.experts.layer.Experts`.

Time is the CPU time of the process with one thread, or the GPU's own time.

Run: ``python benchmarks/mixtures.py [--rounds 7] [--experts 8 32 128] [--device cuda]``
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import all_ratios, clock_of, take_turns
from torch import Tensor
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from dlo_framework.experts.layer import Experts

LOOP = "transformers' loop"
#: What is to be reached on a CPU: time over that of transformers' loop, by the number of experts.
BARS = {8: 1.0, 32: 1.0, 128: 1 / 3}

Compute = Callable[[Tensor, Tensor, Tensor], Tensor]


def transformers_experts(ours: Experts, implementation: str) -> Any:
    """Returns transformers' experts with the weights of ours."""
    count, dim, hidden = ours.down_proj.shape
    config = MixtralConfig(num_local_experts=count, hidden_size=dim, intermediate_size=hidden)
    config._experts_implementation = implementation
    found = MixtralExperts(config).to(ours.down_proj)
    found.load_state_dict({name: parameter.detach() for name, parameter in ours.named_parameters()})
    return found


def contestants(options: argparse.Namespace, count: int) -> dict[str, Any]:
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    ours = Experts(count, options.width, options.hidden, torch.nn.functional.silu, gated=True)
    for parameter in ours.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    ours = ours.to(options.device, dtype)
    return {
        LOOP: transformers_experts(ours, "eager"),
        f"{LOOP} again": transformers_experts(ours, "eager"),
        "transformers' grouped_mm": transformers_experts(ours, "grouped_mm"),
        "dlo": ours,
    }


def call(experts: Any, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """Returns the output, after its backward; gradients are new ones."""
    experts.zero_grad(set_to_none=True)
    x.grad = None
    out = experts(x, index, weights)
    out.backward(torch.ones_like(out))
    return out.detach()


def table_of(options: argparse.Namespace, count: int) -> Table:
    """Measures times with a number of experts."""
    experts = contestants(options, count)
    dtype = getattr(torch, options.dtype)
    x = torch.randn(options.tokens, options.width, device=options.device, dtype=dtype, requires_grad=True)
    scores = torch.randn(options.tokens, count, device=options.device).softmax(-1)
    weights, index = scores.topk(2, dim=-1)
    weights = weights.to(dtype)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    expected = call(experts[LOOP], x, index, weights)
    for name, module in experts.items():
        assert torch.allclose(call(module, x, index, weights), expected, atol=tolerance), f"{name} computes another sum"
    clock = clock_of(torch.device(options.device))
    runs = {
        name: (lambda module=module: clock.seconds(lambda: call(module, x, index, weights)))
        for name, module in experts.items()
    }
    seconds = take_turns(runs, options.rounds)
    what = f"{count} experts, 2 of a token, {options.tokens} tokens, width {options.width}, hidden {options.hidden}"
    table = Table(f"{what}, {options.dtype}", LOOP, clock)
    for name, ratios in all_ratios(seconds, LOOP).items():
        bar = BARS.get(count) if name == "dlo" and options.device == "cpu" else None
        own, control = name == "dlo", name.endswith("again")
        table.add(name, ratios, bar=bar, ours=own, control=control, ms=statistics.median(seconds[name]) * 1e3)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--experts", type=int, nargs="+", default=[8, 32, 128])
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=344)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="cpu")
    options = parse_options(parser, __file__)
    torch.set_num_threads(1)
    record = Record.of(__file__, __doc__, options, options.device)
    for count in options.experts:
        record.add(table_of(options, count))
    record.finish()


if __name__ == "__main__":
    main()
