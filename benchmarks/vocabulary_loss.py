"""What the loss over a vocabulary costs, in memory and time, beside plain cross-entropy, torch's and Liger's.

Forward and backward from hidden states [tokens, width] and a head's weight [vocabulary, width], both with gradients.

* ``plain``: logits of all tokens, then ``cross_entropy``; the unit. Three matrix products are its roofline.
* ``plain again``: the same once more, the A/A control: how far its ratio is from 1 is the noise.
* ``torch``: ``torch.nn.functional.linear_cross_entropy`` with ``LinearCrossEntropyOptions()`` (torch 2.15).
* ``dlo``: :func:`dlo_tasks.language.vocabulary_loss.summed_loss`; on a GPU also with its kernel ``compiled``.
* ``products alone``: the three products of an exact loss and of its gradients, in `dlo`'s chunks and in its memory,
  with nothing between them. ``products alone, all tokens``: the same at once, in memory that is kept. No exact loss
  that computes them by torch's products is faster than the faster one.
* ``products and exponentials``: the first of these, and one exponential a logit, which an exact loss needs too.
* ``liger``: ``liger_kernel``'s fused linear cross-entropy, where it is installed and there is a GPU: it is Triton.

Memory is the peak that a call adds: on a CPU to the resident set, with one process per contestant; on a GPU to torch's
allocated memory. Time is the CPU time of the process with one thread, or the GPU's own time.

Run: ``python benchmarks/vocabulary_loss.py [--rounds 15] [--vocabularies 32768 131072] [--device cuda]``
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from measuring.catalogue import parse_options
from measuring.record import Record, Table
from measuring.rounds import all_ratios, clock_of, take_turns
from torch import Tensor, nn

from dlo_tasks.language.vocabulary_head import VocabularyHead
from dlo_tasks.language.vocabulary_loss import chunk_tokens, summed_loss

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
    return summed_loss(VocabularyHead(head), hidden, targets, count=len(targets))


def compiled(head: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    return summed_loss(VocabularyHead(head), hidden, targets, count=len(targets), kernel="compiled")


def by_liger(head: nn.Linear, hidden: Tensor, targets: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss(reduction="sum")(head.weight, hidden, targets)


def contestants(device: str) -> dict[str, Loss]:
    found: dict[str, Loss] = {"plain": plain, "plain again": plain, "dlo": ours}
    if hasattr(nn, "LinearCrossEntropyOptions"):
        found["torch"] = by_torch
    if device != "cpu":
        found["dlo, compiled"] = compiled
    if device != "cpu" and importlib.util.find_spec("liger_kernel"):
        found["liger"] = by_liger
    return found


def floors(head: nn.Linear, hidden: Tensor, targets: Tensor) -> dict[str, Callable[[], object]]:
    """Returns parts of the work of any exact loss, by name: lower bounds of its time."""
    weight, x = head.weight.detach(), hidden.detach()
    of_weight, of_hidden = torch.zeros_like(weight), torch.empty_like(x)
    rows = chunk_tokens(len(weight), len(targets), "columns")
    chunk = torch.empty(len(weight), rows, dtype=x.dtype, device=x.device)
    logits = torch.empty(len(x), len(weight), dtype=x.dtype, device=x.device)

    def chunked(exponentials: bool) -> None:
        of_weight.zero_()
        for start in range(0, len(x), rows):
            h = x[start : start + rows]
            out = chunk[:, : len(h)]
            torch.mm(weight, h.t(), out=out)
            if exponentials:
                out.exp_()
            torch.mm(out.t(), weight, out=of_hidden[start : start + rows])
            of_weight.addmm_(out, h)

    def at_once() -> None:
        torch.mm(x, weight.t(), out=logits)
        torch.mm(logits, weight, out=of_hidden)
        torch.mm(logits.t(), x, out=of_weight)

    return {
        "products alone": lambda: chunked(False),
        "products alone, all tokens": at_once,
        "products and exponentials": lambda: chunked(True),
    }


def absent(device: str) -> dict[str, str]:
    """Returns why a peer takes no part, by its name."""
    found = {}
    if not hasattr(nn, "LinearCrossEntropyOptions"):
        found["torch's linear_cross_entropy"] = "this torch has none with options; it is there from 2.15"
    if device == "cpu":
        found["liger"] = "it is Triton, and needs a GPU"
    elif not importlib.util.find_spec("liger_kernel"):
        found["liger"] = "liger-kernel is not installed"
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
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    before = status("VmRSS")
    call(loss, *tensors)
    return status("VmHWM") - before


def memory_of(name: str, vocabulary: int) -> int:
    """Returns the same from a process of its own."""
    words = [sys.executable, __file__, *sys.argv[1:], "--only", name, str(vocabulary)]
    return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()[-1])


def tables(options: argparse.Namespace, vocabulary: int) -> list[Table]:
    """Measures times, then memory."""
    losses, tensors = contestants(options.device), inputs(options, vocabulary)
    values = {name: float(call(loss, *tensors)) for name, loss in losses.items()}
    assert max(values.values()) - min(values.values()) < 1e-2, values
    clock = clock_of(torch.device(options.device))
    runs = {name: (lambda loss=loss: clock.seconds(lambda: call(loss, *tensors))) for name, loss in losses.items()}
    parts = floors(*tensors) if options.device == "cpu" else {}
    runs |= {name: (lambda part=part: clock.seconds(part)) for name, part in parts.items()}
    seconds = take_turns(runs, options.rounds)
    what = f"{options.tokens} tokens, width {options.width}, vocabulary {vocabulary:,}, {options.dtype}"
    time, memory = Table(f"time: {what}", "plain", clock), Table(f"memory: {what}", "plain", "bytes that a call adds")
    megabytes = {} if options.times else {name: memory_of(name, vocabulary) / 1e6 for name in losses}
    on_cpu = options.device == "cpu"
    for name, over_plain in all_ratios(seconds, "plain").items():
        ours, control = name.startswith("dlo"), name == "plain again"
        bars = (TIME_BAR, MEMORY_BAR) if ours and on_cpu else (None, None)
        time.add(name, over_plain, bar=bars[0], ours=ours, control=control, ms=statistics.median(seconds[name]) * 1e3)
        if name not in megabytes:
            continue
        share = megabytes[name] / megabytes["plain"]
        memory.add(name, [share], bar=bars[1], ours=ours, control=control, MB=megabytes[name], times_less=1 / share)
    return [time] if options.times else [time, memory]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[32_768, 131_072])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--times", action="store_true", help="leave memory out")
    parser.add_argument("--only", nargs=2, metavar=("NAME", "VOCABULARY"), help=argparse.SUPPRESS)
    options = parse_options(parser, __file__)
    torch.set_num_threads(1)
    if options.only:
        print(memory_here(options, options.only[0], int(options.only[1])))
        return
    record = Record.of(__file__, __doc__, options, options.device)
    for name, why in absent(options.device).items():
        record.without(name, why)
    for vocabulary in options.vocabularies:
        for table in tables(options, vocabulary):
            record.add(table)
    record.finish()


if __name__ == "__main__":
    main()
