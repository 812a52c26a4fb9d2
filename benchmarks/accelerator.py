"""What an accelerator makes of it: ViT and LLM training and MFU, ZeRO and FSDP, BatchMix, checkpoints, beside peers.

    python benchmarks/accelerator.py [--rounds 5] [--size large] [--parts vit llm strategies ...] [--record FILE]
    python benchmarks/accelerator.py --device cpu --size tiny --backend aot_eager

Without an accelerator it says so and measures nothing; the second line runs all of it on a CPU, to try it.

* ``vit``, ``llm``: images and tokens a second in bf16 of a loop by hand (transformers, timm, fused AdamW, autocast) and
  of dlo as ``dlo fit`` sets it up, everything on but checkpoints; eager and compiled. FLOPs are those that dlo's
  monitor counts, MFU is over the peak of the device. Roofline: an MFU of 1.
* ``vit_s``, ``vit_b``, ``resnet18``: ViT-S/16, ViT-B/16 and ResNet-18 beside timm's own training step.
* ``llama_lora``, ``qwen_lora``, ``llama_full``: Llama 3 8B and Qwen2.5 7B by LoRA, a 1B in full, on rows packed with
  documents, gradients clipped; beside a loop by hand and dlo itself with a dense mask.
* ``loss``: benchmarks/vocabulary_loss.py's contestants at the shape of Liger Kernel's page.
* ``ring``: the kernels of ring attention's blocks, beside torch's attention, and the merge of two blocks.
* ``strategies``: a Llama under dlo's ddp, ZeRO stages 1 to 3 and FSDP, beside torch's DDP and FSDP2 by hand, on one
  device, where nothing is divided and what a strategy costs is seen, and on all of them.
* ``rank_of_8``: ZeRO stages 1 to 3 and FSDP as the first of eight ranks on one device, by torch's fake process group:
  what a rank holds, and the time its host takes to launch a step, beside a loop without a strategy and torch's FSDP2.
* ``batch_mix``: benchmarks/batch_mix.py's contestants. Roofline: the copy of the batch.
* ``checkpoints``: GB a second from the device to the disk and back. Roofline: the disk, or the link to the device.

Batches come from page-locked memory. Times are those of events on the device, where ranks or a disk take part elapsed
ones; nothing waits for the device within what is timed. Peak memory is what a contestant adds to the device's.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path

import torch
from measuring.catalogue import parse_options
from measuring.record import Record
from on_accelerator.subjects import SIZES, llama, size_for, vit

IMAGES = ("vit_s", "vit_b", "resnet18")
LANGUAGE = ("llama_lora", "qwen_lora", "llama_full")
PARTS = ("vit", "llm", *IMAGES, *LANGUAGE, "loss", "ring", "strategies", "rank_of_8", "batch_mix", "checkpoints")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", help="the accelerator by default; cpu to try it")
    parser.add_argument("--size", choices=SIZES, help="by default as the device's memory allows")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--ranks", type=int, nargs="+", help="of the strategies; 1 and the number of devices by default"
    )
    parser.add_argument("--backend", default="inductor", help="torch.compile's")
    parser.add_argument("--folder", type=Path, help="on the disk that checkpoints are written to")
    parser.add_argument("--record", type=Path, help="file of the record, written after each table")
    options = parse_options(parser, __file__)
    if options.device is None and torch.accelerator.is_available():
        options.device = str(torch.accelerator.current_accelerator())
    record = Record.of(__file__, __doc__, options, options.device or "cpu")
    record.path = options.record
    if options.device is None:
        record.without("all of it", "this machine has no accelerator")
    else:
        warnings.filterwarnings("ignore")
        measure(options, record)
    record.finish()


def measure(options: argparse.Namespace, record: Record) -> None:
    """Measures the parts that are chosen."""
    device = torch.device(options.device)
    on_cpu = device.type == "cpu"
    if on_cpu:
        torch.set_num_threads(1)
    name = options.size or size_for(device)
    size, parts = SIZES[name], options.parts
    options.size = name
    if "vit" in parts or "llm" in parts:
        from on_accelerator.throughput import throughput

        for part, make in (("vit", vit), ("llm", llama)):
            if part in parts:
                record.add(throughput(make(size, not on_cpu), size, device, options.rounds, options.backend))
    for part in (part for part in IMAGES if part in parts):
        from on_accelerator.images import has_timms_step, image_table

        if has_timms_step():
            record.add(image_table(part, name, size, device, options.rounds, options.backend))
        else:
            record.without(part, "this timm has no tasks (timm.task), which its training step is made of")
    for part in (part for part in LANGUAGE if part in parts):
        from on_accelerator.language import language_table

        try:
            record.add(language_table(part, name, size, device, options.rounds, options.backend))
        except torch.OutOfMemoryError as error:
            record.without(part, f"it does not fit this device: {str(error).splitlines()[0]}")
    if "loss" in parts:
        from on_accelerator.language import loss_tables

        for table in loss_tables(name, device, options.rounds):
            record.add(table)
    if "ring" in parts:
        from on_accelerator.ring import ring_tables

        for table in ring_tables(name, device, options.rounds, options.backend):
            record.add(table)
    if "strategies" in parts:
        from on_accelerator.strategies import strategies_table

        most = 2 if on_cpu else torch.accelerator.device_count()
        for ranks in options.ranks or sorted({1, most}):
            record.add(strategies_table(name, device.type, ranks, options.rounds))
        if most == 1:
            record.without("strategies on several devices", "this machine has one")
    if "rank_of_8" in parts:
        from on_accelerator.simulated import simulated_table

        record.add(simulated_table(name, device, options.rounds))
    if "batch_mix" in parts:
        import batch_mix

        record.add(batch_mix.table(device, options.rounds, calls=1 if name == "tiny" else 4))
    if "checkpoints" in parts:
        from on_accelerator.checkpoints import checkpoint_tables

        for table in checkpoint_tables(device, size.checkpoint, options.rounds, options.folder):
            record.add(table)


if __name__ == "__main__":
    main()
