"""``dlo checkpoint``: shows what is in a checkpoint, checks it, turns it into other forms; executes nothing in it."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from dlo_framework.errors import DloError, did_you_mean

if TYPE_CHECKING:
    from dlo_framework.checkpoint import Manifest

COMMANDS = ("inspect", "verify", "convert", "export")
DTYPES = ("float32", "float16", "bfloat16")


class _Parser(argparse.ArgumentParser):
    """argparse, but bad input is a :class:`DloError` for the caller to print."""

    def error(self, message: str) -> NoReturn:
        raise DloError(f"{message}; see '{self.prog} --help'")


def main(argv: list[str]) -> int:
    """Runs ``dlo checkpoint``.

    Args:
        argv: the words after ``checkpoint``.

    Returns:
        The exit code: 0; 1 if ``verify`` finds damage.

    Raises:
        DloError: on bad input.
    """
    first = argv[0] if argv else "--help"
    if not first.startswith("-") and first not in COMMANDS:
        hint = did_you_mean(first, COMMANDS)
        raise DloError(f"unknown command 'dlo checkpoint {first}'{hint or ';'} available: {', '.join(COMMANDS)}")
    given = _parser().parse_args(argv or ["--help"])
    path = Path(given.path)
    if given.command == "inspect":
        return _inspect(path, as_json=given.json)
    if given.command == "verify":
        return _verify(path, level="size" if given.quick else "hash")
    if given.command == "convert":
        return _convert(path, Path(given.target))
    return _export(path, Path(given.target), given.prefix, given.dtype)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="dlo checkpoint", description="Show, check, convert or export a checkpoint.")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND", required=True)

    def command(name: str, text: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        added.add_argument("path", metavar="PATH", help="a checkpoint")
        return added

    inspect = command("inspect", "show the tensors, the step and the ranks it was written on")
    inspect.add_argument("--json", action="store_true", help="print JSON, for machines")
    verify = command("verify", "check every byte; exit code 1 and the file's name if one is damaged")
    verify.add_argument("--quick", action="store_true", help="only look for files that are missing or cut off")
    convert = command("convert", "turn one form of a checkpoint into another, by the endings of the names")
    convert.add_argument(
        "target",
        metavar="TARGET",
        help="NAME.safetensors: one file, with the other state beside it; anything else: a checkpoint's folder, or,"
        " of a folder, NAME.ckpt: a file for Lightning's own Trainer",
    )
    export = command("export", "write the model alone: its weights to a file of safetensors or of torch, or a folder")
    export.add_argument(
        "target",
        metavar="TARGET",
        help="NAME.safetensors: the weights; NAME.pt, .pth or .bin: likewise, for torch.load; anything else: a folder"
        " in the form of the task's own library",
    )
    export.add_argument("--prefix", help="what the names begin with and lose (default: 'model.', where there is one)")
    export.add_argument("--dtype", choices=DTYPES, help="convert floating weights (default: as they are)")
    return parser


def _verify(path: Path, level: Any) -> int:
    from dlo_framework.checkpoint import locate
    from dlo_framework.checkpoint.verify import damage

    if locate(path) is None:
        raise DloError(f"no checkpoint {path}")
    problem = damage(path, level)
    print(problem or f"ok: {path}")
    return 1 if problem else 0


def _convert(path: Path, target: Path) -> int:
    from dlo_framework.checkpoint import convert, locate
    from dlo_framework.checkpoint.deepspeed_folder import import_deepspeed, is_deepspeed_folder

    found = locate(path)
    if found is None:
        raise DloError(f"no checkpoint {path}")
    if is_deepspeed_folder(found):
        if target.suffix == ".safetensors":
            raise DloError(f"{path} is a folder of DeepSpeed's; convert it to a checkpoint's folder first")
        for note in import_deepspeed(found, target):
            print(f"note: {note}", file=sys.stderr)
        print(f"wrote {target}")
    elif target.suffix == ".safetensors":
        if found.is_file():
            raise DloError(
                f"{path} is a file; convert it to a checkpoint's folder first, or take its weights alone with"
                f" `dlo checkpoint export {path} {target}`"
            )
        print(f"wrote {target} and {convert.to_single_file(path, target)}")
    elif path.suffix == ".safetensors" and found.is_file():
        convert.from_single_file(path, target)
        print(f"wrote {target}")
    elif found.is_file():
        for note in convert.import_lightning(path, target):
            print(f"note: {note}", file=sys.stderr)
        print(f"wrote {target}")
    elif target.suffix == ".ckpt":
        convert.to_lightning(path, target)
        print(f"wrote {target}, a file of Lightning's")
    else:
        raise DloError(
            f"{path} is a checkpoint's folder; name a TARGET that ends in .safetensors, or in .ckpt for a file of"
            f" Lightning's, given {target}"
        )
    return 0


def _export(path: Path, target: Path, prefix: str | None, dtype: str | None) -> int:
    import torch

    from dlo_framework.checkpoint.convert import TORCH_ENDINGS, export_weights

    if target.suffix not in (".safetensors", *TORCH_ENDINGS):
        return _export_folder(path, target, prefix, getattr(torch, dtype) if dtype else None)

    written, left = export_weights(path, target, prefix=prefix, dtype=getattr(torch, dtype) if dtype else None)
    print(f"wrote {target}: {written} tensors" + (f"; {left} that are not the model's left out" if left else ""))
    return 0


def _export_folder(path: Path, target: Path, prefix: str | None, dtype: Any) -> int:
    """Lets the task that a checkpoint is of write its folder: it has left its plug-in's name there."""
    from dlo_framework.checkpoint import load
    from dlo_framework.registry import Registry

    checkpoint = load(path)
    about = checkpoint.get("exporter")
    if not isinstance(about, dict) or not isinstance(about.get("plugin"), str):
        raise DloError(
            f"{path} is of a task that writes no folders; its weights are exported to a file that ends in"
            f" .safetensors or .pt, given {target}"
        )
    if prefix is not None:
        raise DloError("--prefix is for a file of weights; a folder has the names that its library knows")
    task: Any = Registry().load(about["plugin"], "task")
    if not hasattr(task, "export_folder"):
        raise DloError(f"{about['plugin']} writes no folders; export to a file that ends in .safetensors or .pt")
    print(f"wrote {target}: {task.export_folder(checkpoint, target, dtype)}")
    return 0


def _inspect(path: Path, *, as_json: bool) -> int:
    manifest = _manifest(path)
    tensors = [_record(group, name, t) for group, named in manifest.tensors.items() for name, t in named.items()]
    summary = {
        "path": str(path),
        "step": manifest.step,
        "epoch": manifest.epoch,
        "world_size": manifest.world_size,
        "saved": time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time)),
        "weights_only": manifest.weights_only,
        "versions": manifest.versions,
        "about": manifest.about,
        "bytes": sum(tensor["bytes"] for tensor in tensors),
        "files": manifest.files,
    }
    if as_json:
        print(json.dumps({**summary, "tensors": tensors}, indent=2))
    else:
        _print(summary, tensors)
    return 0


def _manifest(path: Path) -> Manifest:
    """Reads the manifest of a folder, or makes one of a single file's content."""
    from dlo_framework.checkpoint import locate, read_manifest
    from dlo_framework.checkpoint.torch_file import read_file

    found = locate(path)
    if found is None:
        raise DloError(f"no checkpoint {path}")
    if found.is_dir():
        return read_manifest(found)
    if path.suffix == ".safetensors":
        from dlo_framework.checkpoint.convert import manifest_of_file

        return manifest_of_file(found)
    from dlo_framework.checkpoint.convert import manifest_of_lightning

    return manifest_of_lightning(read_file(found, mmap=True), found)


def _record(group: str, name: str, tensor: Any) -> dict[str, Any]:
    from dlo_framework.checkpoint.dtypes import dtype_of

    size = math.prod(tensor.shape) * dtype_of(tensor.dtype).itemsize
    files = sorted({chunk.file for chunk in tensor.chunks})
    shape = list(tensor.shape)
    return {"group": group, "name": name, "dtype": tensor.dtype, "shape": shape, "bytes": size, "files": files}


def _print(summary: dict[str, Any], tensors: list[dict[str, Any]]) -> None:
    from dlo_framework.amounts import human

    rows = [(t["name"], " x ".join(map(str, t["shape"])) or "scalar", t["dtype"], human(t["bytes"])) for t in tensors]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    group = None
    for tensor, row in zip(tensors, rows, strict=True):
        if tensor["group"] != group:
            group = tensor["group"]
            of_group = [t for t in tensors if t["group"] == group]
            numbers = sum(math.prod(t["shape"]) for t in of_group)
            total = human(sum(t["bytes"] for t in of_group))
            print(f"{group}: {len(of_group)} tensors, {numbers:,} numbers, {total}")
        print(f"  {'  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))}".rstrip())
    print(f"\nstep {summary['step']}, epoch {summary['epoch']} (the first is 0), saved {summary['saved']}")
    print(f"written on {summary['world_size']} rank{'s' if summary['world_size'] > 1 else ''}", end="")
    print(", weights only" if summary["weights_only"] else "")
    for key, value in [*summary["versions"].items(), *summary["about"].items()]:
        print(f"{key}: {value if isinstance(value, str | int | float) else json.dumps(value)}")
    for name, file in summary["files"].items():
        print(f"{name}: {human(file['bytes'])}, sha256 {file['sha256'][:16]}")
    print(f"{len(tensors)} tensors, {human(summary['bytes'])}")
