"""What block-sparse attention costs in time and memory, beside dense causal attention, by sequence length.

Forward and backward of attention alone, queries, keys and values [1, heads, length, 64] in float32, causal.

* ``SDPA, causal``: ``scaled_dot_product_attention(is_causal=True)``; the unit.
* ``SDPA, causal again``: the same once more, the A/A control.
* ``SDPA, dense mask``: the window as a mask of length x length, which skips nothing.
* ``dlo, window``: :class:`SlidingWindow` by gathered blocks. ``dlo, BSLongformer`` and ``dlo, BigBird``: these patterns
  with windows of the same width.
* ``FlexAttention``: compiled, the same window; on a CPU forward only, because its kernel there has no backward.

DeepSpeed's sparse attention is not among them: its kernels need Triton 1 and a GPU, and 0.19 no longer has them. It
states sequences up to 10 times longer, and up to 6 times faster, at comparable accuracy (deepspeed.ai, September
2020).

Memory is the peak that a call adds to the resident set, in a process per contestant; on a GPU, to allocated memory.
Time is the CPU time of the process with one thread, or the GPU's own time.

Run: ``python benchmarks/attention.py [--lengths 2048 4096 8192] [--window 512] [--device cuda]``
"""

from __future__ import annotations

import argparse
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
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from dlo_framework.attention import AttentionMask, BigBird, BSLongformer, SlidingWindow, SparsityPattern
from dlo_framework.attention.gathered_blocks import attend_blocks

#: Time over that of causal SDPA that is to be reached on a CPU at 8192 positions and windows of 512.
TIME_BAR, BAR_LENGTH, BAR_WINDOW = 0.35, 8192, 512
WIDTH, BLOCK = 64, 128

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def with_dense_mask(window: int) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        places = torch.arange(q.shape[2], device=q.device)
        behind = places[:, None] - places
        return F.scaled_dot_product_attention(q, k, v, (behind >= 0) & (behind < window))

    return attend


def by_blocks(pattern: SparsityPattern, heads: int) -> Attend:
    mask = AttentionMask(pattern, causal=True, num_heads=heads)
    return lambda q, k, v: attend_blocks(q, k, v, mask)


def by_flex(window: int, length: int, device: str) -> Attend:
    def sees(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (q - k < window)

    mask = create_block_mask(sees, None, None, length, length, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)  # type: ignore[return-value]


def contestants(options: argparse.Namespace, length: int) -> dict[str, Attend]:
    window, heads = options.window, options.heads
    blocks = 2 * (window // BLOCK) - 1  # both sides: as many keys before a block as the window has
    found: dict[str, Attend] = {
        "SDPA, causal": causal,
        "SDPA, causal again": causal,
        "SDPA, dense mask": with_dense_mask(window),
        "dlo, window": by_blocks(SlidingWindow(window, BLOCK), heads),
        "dlo, BSLongformer": by_blocks(BSLongformer(BLOCK, blocks), heads),
        "dlo, BigBird": by_blocks(BigBird(BLOCK, num_sliding_window_blocks=blocks), heads),
    }
    if options.device != "cpu":
        found["FlexAttention"] = by_flex(window, length, options.device)
    return found


def inputs(options: argparse.Namespace, length: int) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    shape = 1, options.heads, length, WIDTH
    return tuple(torch.randn(shape, device=options.device, requires_grad=True) for _ in range(3))


def call(attend: Attend, tensors: tuple[Tensor, ...]) -> Tensor:
    """Returns the output, after its backward."""
    for tensor in tensors:
        tensor.grad = None
    out = attend(*tensors)
    out.backward(torch.ones_like(out))
    return out.detach()


def status(key: str) -> int:
    """Returns a number of this process from the kernel, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])


def memory_here(options: argparse.Namespace, name: str, length: int) -> int:
    """Returns the most bytes that a call adds, in this process."""
    attend, tensors = contestants(options, length)[name], inputs(options, length)
    if options.device != "cpu":
        call(attend, tensors)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(attend, tensors)
        return torch.cuda.max_memory_allocated() - before
    call(attend, inputs(options, 2 * BLOCK)) if name != "FlexAttention" else None
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    before = status("VmRSS")
    call(attend, tensors)
    return status("VmHWM") - before


def memory_of(name: str, length: int) -> int:
    """Returns the same from a process of its own."""
    words = [sys.executable, __file__, *sys.argv[1:], "--only", name, str(length)]
    return int(subprocess.run(words, check=True, capture_output=True, text=True).stdout.split()[-1])


def tables(options: argparse.Namespace, length: int) -> list[Table]:
    """Measures times, then memory, at a length."""
    attends, tensors = contestants(options, length), inputs(options, length)
    windowed = [call(attends[name], tensors) for name in ("SDPA, dense mask", "dlo, window")]
    assert torch.allclose(*windowed, atol=1e-4), "the window is not the same"
    clock = clock_of(torch.device(options.device))
    runs = {
        name: (lambda attend=attend: clock.seconds(lambda: call(attend, tensors))) for name, attend in attends.items()
    }
    seconds = take_turns(runs, options.rounds)
    what = f"{length} positions, windows of {options.window}, {options.heads} heads"
    base = "SDPA, causal"
    time, memory = Table(f"time: {what}", base, clock), Table(f"memory: {what}", base, "bytes that a call adds")
    megabytes = {name: memory_of(name, length) / 1e6 for name in attends}
    has_bar = options.device == "cpu" and (length, options.window) == (BAR_LENGTH, BAR_WINDOW)
    for name, over_base in all_ratios(seconds, base).items():
        ours, control = name.startswith("dlo"), name.endswith("again")
        bar = TIME_BAR if name == "dlo, window" and has_bar else None
        time.add(name, over_base, bar=bar, ours=ours, control=control, ms=statistics.median(seconds[name]) * 1e3)
        memory.add(name, [megabytes[name] / megabytes[base]], ours=ours, control=control, MB=megabytes[name])
    return [time, memory]


def forward_table(options: argparse.Namespace, length: int) -> Table:
    """Measures forward alone, with FlexAttention's kernel for CPUs."""
    attends = {**contestants(options, length), "FlexAttention": by_flex(options.window, length, options.device)}
    tensors = tuple(tensor.detach() for tensor in inputs(options, length))
    clock = clock_of(torch.device(options.device))
    names = ("SDPA, causal", "SDPA, causal again", "dlo, window", "FlexAttention")
    with torch.no_grad():
        assert torch.allclose(attends["dlo, window"](*tensors), attends["FlexAttention"](*tensors), atol=1e-4)
        runs = {name: (lambda attend=attends[name]: clock.seconds(lambda: attend(*tensors))) for name in names}
        seconds = take_turns(runs, options.rounds)
    table = Table(f"forward alone: {length} positions, windows of {options.window}", "SDPA, causal", clock)
    for name, over_base in all_ratios(seconds, "SDPA, causal").items():
        ours, control = name.startswith("dlo"), name.endswith("again")
        table.add(name, over_base, ours=ours, control=control, ms=statistics.median(seconds[name]) * 1e3)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096, 8192])
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs=2, metavar=("NAME", "LENGTH"), help=argparse.SUPPRESS)
    options = parse_options(parser, __file__)
    torch.set_num_threads(1)
    if options.only:
        print(memory_here(options, options.only[0], int(options.only[1])))
        return
    record = Record.of(__file__, __doc__, options, options.device)
    record.without("DeepSpeed's sparse attention", "it needs Triton 1 and a GPU, and 0.19 no longer has it")
    for length in options.lengths:
        for table in tables(options, length):
            record.add(table)
    if options.device == "cpu":
        try:
            record.add(forward_table(options, options.lengths[-1]))
        except torch._dynamo.exc.BackendCompilerFailed as error:
            record.without("FlexAttention", str(error).strip().splitlines()[0])
    record.finish()


if __name__ == "__main__":
    main()
