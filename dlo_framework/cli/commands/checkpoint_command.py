"""``dlo checkpoint``: inspects, verifies, converts and exports a checkpoint, and executes no code from it."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dlo_framework.cli.config_scan import CommandParser
from dlo_framework.errors import DloError, did_you_mean

if TYPE_CHECKING:
    from dlo_framework.checkpoint import Manifest

COMMANDS = ("inspect", "verify", "convert", "export")
DTYPES = ("float32", "float16", "bfloat16")


def main(argv: list[str]) -> int:
    """Runs ``dlo checkpoint``; returns 1 if ``verify`` finds damage, else 0."""
    first = argv[0] if argv else "--help"
    if not first.startswith("-") and first not in COMMANDS:
        hint = did_you_mean(first, COMMANDS)
        raise DloError(f"unknown command 'dlo checkpoint {first}'{hint or ';'} available: {', '.join(COMMANDS)}")
    given = _parser().parse_args(argv or ["--help"])
    from dlo_framework.checkpoint.store import checkpoint_path
    from dlo_framework.run.process import silence_warnings

    silence_warnings()
    named = _find_named(given.path, given.run)
    if named is not None:
        print(f"{given.path}: {named}", file=sys.stderr)
    path = named or checkpoint_path(given.path)
    if given.command == "inspect":
        return _inspect(path, as_json=given.json)
    if given.command == "verify":
        return _verify(path, level="size" if given.quick else "hash")
    if given.command == "convert":
        return _convert(path, checkpoint_path(given.target))
    return _export(path, checkpoint_path(given.target), given.prefix, given.dtype)


def _parser() -> CommandParser:
    parser = CommandParser("dlo checkpoint", description="Show, check, convert or export a checkpoint.")
    commands = parser.add_subparsers(dest="command", title="commands", metavar="COMMAND", required=True)

    def command(name: str, text: str) -> CommandParser:
        added = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        added.add_argument("path", metavar="PATH", help="a checkpoint; or last or best, of a run")
        added.add_argument(
            "--run", metavar="RUN", help="run of last or best: a name, or a folder (default: the newest run in runs/)"
        )
        return added

    inspect = command("inspect", "show the tensors, the step and the number of ranks that wrote it")
    inspect.add_argument("--json", action="store_true", help="print JSON, for machines")
    verify = command("verify", "check every byte; exit code 1 and the file's name if a file is damaged")
    verify.add_argument("--quick", action="store_true", help="check only for missing or truncated files")
    convert = command("convert", "convert a checkpoint to another format, chosen by the file endings")
    convert.add_argument(
        "target",
        metavar="TARGET",
        help="NAME.safetensors: one file, with the remaining state beside it; NAME.ckpt: a file for Lightning's own"
        " Trainer, from a checkpoint folder; anything else: a checkpoint folder",
    )
    export = command("export", "write only the model: its weights as a safetensors or torch file, or a model folder")
    export.add_argument(
        "target",
        metavar="TARGET",
        help="NAME.safetensors: the weights; NAME.pt, .pth or .bin: the weights for torch.load; anything else: a"
        " folder in the format of the task's library",
    )
    export.add_argument("--prefix", help="prefix to remove from the names (default: 'model.' if present)")
    export.add_argument("--dtype", choices=DTYPES, help="dtype for floating-point weights (default: unchanged)")
    return parser


def _find_named(which: str, run: str | None) -> Path | None:
    """Returns the checkpoint `last` or `best` of a run; None for a path.

    Args:
        which: Checkpoint as the user names it.
        run: Name of a run in `runs/`, the folder of all versions of a run, or that of one version; None for the newest.

    Raises:
        DloError: If the run or the checkpoint does not exist, or a run is given for a path.
    """
    if which not in ("last", "best") or Path(which).exists():
        if run is not None:
            raise DloError(f"--run must come with last or best, got the path {which}; remove --run")
        return None
    from dlo_framework.run import runs

    folder = _find_run(run)
    if runs.versions(folder):
        return runs.find_checkpoint(folder, which)
    return runs.find_checkpoint(folder.parent, which, only=folder)  # It is one version.


def _find_run(run: str | None) -> Path:
    """Returns the folder of a run, or of its versions."""
    from dlo_framework.run import runs

    root = Path("runs")
    if run is None:
        versions = [path for path in root.glob("*/version_*") if (path / runs.CHECKPOINTS).is_dir()]
        if not versions:
            raise DloError(f"--run must name a run, got none, and there is none in {root.absolute()}; set --run FOLDER")
        return max(versions, key=lambda path: (path / runs.CHECKPOINTS).stat().st_mtime)
    folders = [path for path in (Path(run), root / run) if path.is_dir()]
    # A folder of another kind, such as the data, may have the run's name.
    holds = [path for path in folders if runs.versions(path) or (path / runs.CHECKPOINTS).is_dir()]
    folder = next(iter(holds or folders), None)
    if folder is None:
        names = [path.name for path in root.iterdir()] if root.is_dir() else []
        raise DloError(f"--run must name a run in runs/, or a folder, got {run}{did_you_mean(run, names)}")
    return folder


def _find(path: Path) -> Path:
    """Returns the current path of a checkpoint: a folder in any store, or a single file on a file system."""
    from dlo_framework.checkpoint.store import is_folder, locate, refuse_remote

    current_path = locate(path)
    if current_path is None:
        raise DloError(f"no checkpoint {path}; choose an existing path, or 'last' or 'best'")
    if not is_folder(current_path):
        refuse_remote(current_path)
    return current_path


def _verify(path: Path, level: Any) -> int:
    from dlo_framework.checkpoint.verify import find_damage

    _find(path)
    problem = find_damage(path, level)
    print(problem or f"ok: {path}")
    return 1 if problem else 0


def _convert(path: Path, target: Path) -> int:
    from dlo_framework.checkpoint.formats import find_importer, lightning_file, safetensors_file
    from dlo_framework.checkpoint.store import is_folder, is_folder_checkpoint, refuse_remote

    current_path = _find(path)
    is_file = not is_folder(current_path)
    known = current_path.suffix == ".safetensors" if is_file else is_folder_checkpoint(current_path)
    if not known:
        refuse_remote(current_path, "another program's checkpoint")
    importer = None
    try:
        importer = None if known else find_importer(current_path)
    except DloError as error:  # A broken importer does not stop the conversion of Lightning's own files.
        if current_path.suffix != ".ckpt":
            raise
        print(f"note: {error}", file=sys.stderr)
    if importer is not None:
        if target.suffix == ".safetensors":
            kind = f"{importer.name} {'file' if is_file else 'folder'}"
            raise DloError(f"TARGET must be a folder for the {kind} {path}, got {target}; remove the ending")
        for note in importer.convert(current_path, target):
            print(f"note: {note}", file=sys.stderr)
        print(f"wrote {target}")
    elif target.suffix == ".safetensors":
        if is_file:
            raise DloError(
                f"PATH must be a checkpoint folder for a .safetensors TARGET, got the file {path}; convert it to a"
                f" folder first, or export its weights alone with `dlo checkpoint export {path} {target}`"
            )
        print(f"wrote {target} and {safetensors_file.to_single_file(path, target)}")
    elif path.suffix == ".safetensors" and is_file:
        safetensors_file.from_single_file(path, target)
        print(f"wrote {target}")
    elif is_file:
        for note in lightning_file.import_lightning(path, target):
            print(f"note: {note}", file=sys.stderr)
        print(f"wrote {target}")
    elif target.suffix == ".ckpt":
        lightning_file.to_lightning(path, target)
        print(f"wrote {target}, a Lightning checkpoint file")
    else:
        raise DloError(
            f"TARGET must end in .safetensors, or in .ckpt for a Lightning file, to convert the checkpoint folder"
            f" {path}; got {target}"
        )
    return 0


def _export(path: Path, target: Path, prefix: str | None, dtype: str | None) -> int:
    import torch

    from dlo_framework.checkpoint.formats.safetensors_file import TORCH_ENDINGS, export_weights
    from dlo_framework.checkpoint.store import refuse_remote

    refuse_remote(target, "TARGET")
    cast = getattr(torch, dtype) if dtype else None
    if target.suffix not in (".safetensors", *TORCH_ENDINGS):
        return _export_folder(path, target, prefix, cast)
    written, left = export_weights(path, target, prefix=prefix, dtype=cast)
    print(f"wrote {target}: {written} tensors" + (f"; left out {left} that are not part of the model" if left else ""))
    return 0


def _export_folder(path: Path, target: Path, prefix: str | None, dtype: Any) -> int:
    """Exports a model folder through the task whose plug-in name the checkpoint records."""
    from dlo_framework.checkpoint import load
    from dlo_framework.registry import Registry

    checkpoint = load(path)
    about = checkpoint.get("exporter")
    if not isinstance(about, dict) or not isinstance(about.get("plugin"), str):
        raise DloError(
            f"TARGET must end in .safetensors or .pt, got {target}; the task that wrote {path} has no folder export"
        )
    if prefix is not None:
        raise DloError(f"--prefix must be unset to export a folder, got {prefix}; a folder keeps its library's names")
    task: Any = Registry().load(about["plugin"], "task")
    if not hasattr(task, "export_folder"):
        raise DloError(f"TARGET must end in .safetensors or .pt, got {target}; {about['plugin']} has no folder export")
    print(f"wrote {target}: {task.export_folder(checkpoint, target, dtype)}")
    return 0


def _inspect(path: Path, *, as_json: bool) -> int:
    manifest = _read_manifest(path)
    tensors = [_to_json(group, name, t) for group, named in manifest.tensors.items() for name, t in named.items()]
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


def _read_manifest(path: Path) -> Manifest:
    """Returns the manifest of a checkpoint folder, or one built from the content of a single file."""
    from dlo_framework.checkpoint.loading import read_file
    from dlo_framework.checkpoint.verify import open_checkpoint

    current_path, manifest = open_checkpoint(path)
    if manifest is not None:
        return manifest
    if path.suffix == ".safetensors":
        from dlo_framework.checkpoint.formats.safetensors_file import manifest_of_file

        return manifest_of_file(current_path)
    from dlo_framework.checkpoint.formats.lightning_file import manifest_of_lightning

    return manifest_of_lightning(read_file(current_path, mmap=True), current_path)


def _to_json(group: str, name: str, tensor: Any) -> dict[str, Any]:
    from dlo_framework.checkpoint.manifest import dtype_of

    size = math.prod(tensor.shape) * dtype_of(tensor.dtype).itemsize
    files = sorted({chunk.file for chunk in tensor.chunks})
    shape = list(tensor.shape)
    return {"group": group, "name": name, "dtype": tensor.dtype, "shape": shape, "bytes": size, "files": files}


def _print(summary: dict[str, Any], tensors: list[dict[str, Any]]) -> None:
    from dlo_framework.units import format_bytes

    rows = [
        (t["name"], " x ".join(map(str, t["shape"])) or "scalar", t["dtype"], format_bytes(t["bytes"])) for t in tensors
    ]
    widths = [max((len(row[column]) for row in rows), default=0) for column in range(4)]
    group = None
    for tensor, row in zip(tensors, rows, strict=True):
        if tensor["group"] != group:
            group = tensor["group"]
            of_group = [t for t in tensors if t["group"] == group]
            numbers = sum(math.prod(t["shape"]) for t in of_group)
            total = format_bytes(sum(t["bytes"] for t in of_group))
            print(f"{group}: {len(of_group)} tensors, {numbers:,} elements, {total}")
        print(f"  {'  '.join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))}".rstrip())
    print(f"\nstep {summary['step']}, epoch {summary['epoch']} (the first is 0), saved {summary['saved']}")
    print(f"written on {summary['world_size']} rank{'s' if summary['world_size'] > 1 else ''}", end="")
    print(", weights only" if summary["weights_only"] else "")
    for key, value in [*summary["versions"].items(), *summary["about"].items()]:
        print(f"{key}: {value if isinstance(value, str | int | float) else json.dumps(value)}")
    for name, file in summary["files"].items():
        print(f"{name}: {format_bytes(file['bytes'])}, sha256 {file['sha256'][:16]}")
    print(f"{len(tensors)} tensors, {format_bytes(summary['bytes'])}")
