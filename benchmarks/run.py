"""Runs every benchmark beside its peers, and writes the report of this machine and day.

    python benchmarks/run.py [--only NAME ...] [--quick] [--resume] [--results FOLDER] [--minutes 60]
    python benchmarks/run.py --readme
    python benchmarks/run.py --list

Each benchmark runs in its own process, with its output in a log. If one fails, the others still run, and the exit code
is 1. `HARDWARE_DATE.json` with all records is written after each benchmark; `HARDWARE_DATE.md` and plots in the folder
of that name are written at the end. Records of the same day are kept until they are measured again.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from measuring import plots, readme, report, results
from measuring.catalogue import ENTRIES, Entry, chosen
from measuring.record import BadRecord, parse

HERE = Path(__file__).resolve().parent
#: Folder of logs, ignored by git.
LOGS = HERE.parent / "runs" / "benchmarks"


def run_one(entry: Entry, quick: bool, log: Path, seconds: float) -> dict[str, Any]:
    """Runs a benchmark, and returns its entry for the results."""
    words = [f"benchmarks/{entry.name}.py", *(entry.quick if quick else entry.arguments)]
    load, start = os.getloadavg()[0], time.perf_counter()
    with log.open("w", encoding="utf-8") as out:
        code = _call([sys.executable, "-u", *words], out, seconds)
    found: dict[str, Any] = {
        "name": entry.name,
        "command": " ".join(["python", *words]),
        "load": round(load, 2),
        "seconds": round(time.perf_counter() - start, 2),
        "code": code,
        "record": None,
    }
    try:
        record = parse(log.read_text(encoding="utf-8", errors="replace"))
    except BadRecord as error:
        return {**found, "error": f"exit code {code}; {error}"}
    return {**found, "error": f"exit code {code}, after its record"} if code else {**found, "record": record}


def _call(words: list[str], out: Any, seconds: float) -> int:
    """Runs a command and returns its exit code, 124 on a timeout; kills all of its processes."""
    process = subprocess.Popen(words, cwd=HERE.parent, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return 124
    finally:
        with contextlib.suppress(ProcessLookupError):  # All processes have ended.
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def write_report(found: results.Results, path: Path) -> None:
    """Draws the plots and writes the report beside the file of results."""
    folder = path.with_suffix("")
    folder.mkdir(parents=True, exist_ok=True)
    drawn: dict[tuple[str, str], str] = {}
    for key, run in found["runs"].items():
        for table in (run["record"] or {"tables": []})["tables"]:
            if plots.has_peers(table):
                name = f"{results.slug(key + ' ' + table['title'])[:120]}.svg"
                plots.draw(table, folder / name)
                drawn[key, table["title"]] = f"{folder.name}/{name}"
    for left in set(folder.glob("*.svg")) - {path.parent / name for name in drawn.values()}:
        left.unlink()  # Its table no longer exists.
    path.with_suffix(".md").write_text(report.markdown(found, drawn), encoding="utf-8")


def measure(options: argparse.Namespace) -> int:
    """Runs the chosen benchmarks, and returns the exit code."""
    words, machine_slug, accelerator = results.machine()
    date = datetime.date.today().isoformat()
    folder = options.results or HERE / "results"
    if options.quick and options.results is None:
        folder = Path(tempfile.mkdtemp(prefix="dlo-benchmarks-"))
    folder.mkdir(parents=True, exist_ok=True)
    path = results.path_of(folder, machine_slug, date)
    found = results.read(path) if path.exists() else {"runs": {}, "quick": options.quick}
    if found["quick"] != options.quick:
        raise FileExistsError(
            f"--results must be another folder: {path} has results of"
            f" {'a quick run' if found['quick'] else 'a full run'}"
        )
    found = {"hardware": words, "accelerator": accelerator, "date": date, "quick": options.quick, "runs": found["runs"]}
    logs = LOGS / f"{path.stem}{'_quick' if options.quick else ''}"
    logs.mkdir(parents=True, exist_ok=True)
    failed = []
    entries = chosen(options.only, options.quick)
    for number, entry in enumerate(entries, start=1):
        before = found["runs"].get(entry.key)
        if options.resume and before is not None and before["record"] is not None:
            print(f"[{number}/{len(entries)}] {entry.key}: there already", flush=True)
            continue
        log = logs / f"{results.slug(entry.key)}.log"
        usual = "" if options.quick else f"about {entry.minutes:g} min, "
        print(f"[{number}/{len(entries)}] {entry.key}: {usual}log {log}", flush=True)
        run = run_one(entry, options.quick, log, 60 * options.minutes)
        found["runs"][entry.key] = run
        found["finished"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        results.write(found, path)
        if run["record"] is None:
            failed.append(entry.key)
        state = f"FAILED: {run['error']}" if run["record"] is None else "done"
        print(f"    {run['seconds']:.0f} s, {state}", flush=True)
    order = [entry.key for entry in ENTRIES]
    found["runs"] = {key: found["runs"][key] for key in order if key in found["runs"]}
    if found["runs"]:
        write_report(found, path)
        print(path.with_suffix(".md"))
    if not options.quick and (stale := readme.stale(found)):  # A quick run has other sizes, and so other titles.
        print(f"no row for these lines of the README: {', '.join(stale)}", file=sys.stderr)
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="names of benchmark files, without .py")
    parser.add_argument("--quick", action="store_true", help="check in minutes that all run; figures have no meaning")
    parser.add_argument("--resume", action="store_true", help="skip benchmarks that are already in today's file")
    parser.add_argument("--results", type=Path, help="folder; benchmarks/results, or a new temporary one with --quick")
    parser.add_argument("--minutes", type=float, default=60.0, help="timeout of one benchmark")
    parser.add_argument(
        "--readme",
        action="store_true",
        help="write the newest results to benchmarks/README.md, without measuring",
    )
    parser.add_argument("--list", action="store_true", help="list the benchmarks and their durations")
    options = parser.parse_args()
    # A terminated run then also ends the processes that it started.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        chosen(options.only)
        if options.readme:
            page = HERE / "README.md"
            page.write_text(readme.rewritten(page.read_text(encoding="utf-8"), HERE / "results"), encoding="utf-8")
        elif options.list:
            for entry in ENTRIES:
                print(f"{entry.minutes:>5g} min  {entry.key}")
            print(f"{sum(entry.minutes for entry in ENTRIES):>5g} min  in all, on two CPU cores")
        else:
            raise SystemExit(measure(options))
    except (ValueError, FileExistsError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
