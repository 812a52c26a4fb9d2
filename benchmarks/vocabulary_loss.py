"""What the loss over a vocabulary costs, in memory and time, beside plain cross-entropy, torch's and Liger's.

Forward and backward from hidden states [tokens, width] and a head's weight [vocabulary, width], both with gradients.

* ``plain``: logits of all tokens, then ``cross_entropy``; the unit. Three matrix products are its roofline.
* ``plain again``: the same once more, the A/A control: how far its ratio is from 1 is the noise.
* ``torch``: ``torch.nn.functional.linear_cross_entropy`` with ``LinearCrossEntropyOptions()`` (torch 2.15).
* ``dlo``: :func:`dlo_tasks.llm.vocabulary_loss.summed_loss`.
* ``liger``: ``liger_kernel``'s fused linear cross-entropy, where it is installed and there is a GPU: it is Triton.

Memory is the most that a call adds to what stands before it: on a CPU the process's resident set, in a process of its
own for each contestant; on a GPU what torch has allocated. Times are taken in rounds, interleaved in a new random order
each; a round's ratio is to ``plain`` in the same round; medians are printed.

Run: ``python benchmarks/vocabulary_loss.py [--rounds 15] [--vocabularies 32768 131072] [--device cuda]``
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dlo_tasks.llm.vocabulary_loss import VocabularyHead, summed_loss

#: What is to be reached on a CPU: memory over plain's, and time over plain's.
MEMORY_BAR, TIME_BAR = 1 / 7, 0.75

Loss = Callable[[nn.Linear, Tensor, Tensor], Tensor]


def plain(head: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(head(hidden).float(), targets, reduction="sum")


def by_torch(head: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    options = nn.LinearCrossEntropyOptions()  # type: ignore[attr-defined]
    return F.linear_cross_entropy(  # type: ignore[attr-defined]
        hidden, head.weight, targets, reduction="sum", options=options
    )


def ours(head: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    return summed_loss(VocabularyHead(head), hidden, targets)


def by_liger(head: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(reduction="sum")(head.weight, hidden, targets)


def contestants(device: str) -> dict[str, Loss]:
    found: dict[str, Loss] = {"plain": plain, "plain again": plain, "dlo": ours}
    if hasattr(nn, "LinearCrossEntropyOptions"):
        found["torch"] = by_torch
    if device != "cpu" and importlib.util.find_spec("liger_kernel"):
        found["liger"] = by_liger
    return found


def inputs(arguments: argparse.Namespace, vocabulary: int) -> tuple[nn.Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    head = nn.Linear(arguments.width, vocabulary, bias=False, device=arguments.device, dtype=dtype)
    hidden = torch.randn(arguments.tokens, arguments.width, device=arguments.device, dtype=dtype, requires_grad=True)
    return head, hidden, torch.randint(vocabulary, (arguments.tokens,), device=arguments.device)


def call(loss: Loss, head: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    """Returns the loss of a token, after its backward; gradients are new ones."""
    head.weight.grad = hidden.grad = None
    found = loss(head, hidden, targets) / len(targets)
    found.backward()
    return found.detach()


def seconds_of(loss: Loss, head: nn.Linear, hidden: Tensor, targets: Tensor) -> float:
    """Returns the seconds of a call: of this process on a CPU, with one thread; elapsed ones on a GPU."""
    if hidden.device.type == "cpu":
        start = time.process_time()
        call(loss, head, hidden, targets)
        return time.process_time() - start
    torch.cuda.synchronize()
    start = time.perf_counter()
    call(loss, head, hidden, targets)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def status(key: str) -> int:
    """Returns a number of this process from the kernel, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def memory_here(arguments: argparse.Namespace, name: str, vocabulary: int) -> int:
    """Returns the most bytes that a call adds, in this process."""
    loss, tensors = contestants(arguments.device)[name], inputs(arguments, vocabulary)
    small = inputs(argparse.Namespace(**{**vars(arguments), "tokens": 8, "width": 16}), 32)
    call(loss, *small)
    if arguments.device != "cpu":
        call(loss, *tensors)
        tensors[0].weight.grad = tensors[1].grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(loss, *tensors)
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark begins anew
    before = status("VmRSS")
    call(loss, *tensors)
    return status("VmHWM") - before


def memory_of(name: str, vocabulary: int) -> int:
    """Returns the same from a process of its own."""
    words = [sys.executable, __file__, *sys.argv[1:], "--only", name, str(vocabulary)]
    return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()[-1])


def measure(arguments: argparse.Namespace, vocabulary: int) -> dict[str, dict[str, float]]:
    losses, tensors = contestants(arguments.device), inputs(arguments, vocabulary)
    values = {name: float(call(loss, *tensors)) for name, loss in losses.items()}
    assert max(values.values()) - min(values.values()) < 1e-2, values
    seconds: dict[str, list[float]] = {name: [] for name in losses}
    order = list(losses)
    for number in range(arguments.rounds + 1):
        random.shuffle(order)
        for name in order:
            taken = seconds_of(losses[name], *tensors)
            if number:  # the first round warms up
                seconds[name].append(taken)
    found = {}
    for name, taken in seconds.items():
        ratios = [one / base for one, base in zip(taken, seconds["plain"], strict=True)]
        found[name] = {
            "ms": 1e3 * statistics.median(taken),
            "time": statistics.median(ratios),
            "least": min(ratios),
            "most": max(ratios),
            "mb": memory_of(name, vocabulary) / 1e6,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_768, 131_072])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--only", nargs=2, metavar=("NAME", "VOCABULARY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.only:
        print(memory_here(arguments, arguments.only[0], int(arguments.only[1])))
        return
    where = "one CPU thread" if arguments.device == "cpu" else torch.cuda.get_device_name()
    record = {"benchmark": "vocabulary_loss", "device": where, "torch": torch.__version__, **vars(arguments)}
    for vocabulary in arguments.vocabularies:
        found = measure(arguments, vocabulary)
        print(
            f"\n{arguments.tokens} tokens, width {arguments.width}, vocabulary {vocabulary}, {arguments.dtype}, {where}"
        )
        print(f"{'':14}{'ms':>9}{'time':>7}{'min':>7}{'max':>7}{'MB':>9}{'times less':>12}")
        for name, one in found.items():
            less = found["plain"]["mb"] / one["mb"]
            print(
                f"{name:14}{one['ms']:9.1f}{one['time']:7.2f}{one['least']:7.2f}{one['most']:7.2f}"
                f"{one['mb']:9.1f}{less:12.1f}"
            )
        print(f"{'bar':14}{'':9}{TIME_BAR:7.2f}{'':23}{1 / MEMORY_BAR:12.1f}")
        record[str(vocabulary)] = {name: {key: round(v, 3) for key, v in one.items()} for name, one in found.items()}
    print(json.dumps(record))


if __name__ == "__main__":
    main()
