"""The journal: what several processes append is there once, also after the death of one in mid-line."""

import json
import subprocess
import sys
import time

from optuna.storages.journal import JournalFileBackend

from dlo_plugins.sweep.trial_queue import JournalLock

APPEND = """
import sys
from pathlib import Path
from optuna.storages.journal import JournalFileBackend
from dlo_plugins.sweep.trial_queue import JournalLock
journal = JournalFileBackend(sys.argv[1], JournalLock(Path(sys.argv[1])))
for number in range(50):
    journal.append_logs([{"writer": sys.argv[2], "number": number}, {"writer": sys.argv[2], "again": number}])
"""


def open_journal(path):
    return JournalFileBackend(str(path), JournalLock(path))


def test_operations_of_several_processes_are_there_once_and_in_each_ones_order(tmp_path):
    path = tmp_path / "journal.log"
    writers = [subprocess.Popen([sys.executable, "-c", APPEND, str(path), str(number)]) for number in range(3)]
    seen, reader = [], open_journal(path)
    while any(writer.poll() is None for writer in writers):
        seen += list(reader.read_logs(len(seen)))
        time.sleep(0.01)
    seen += list(reader.read_logs(len(seen)))
    assert all(writer.returncode == 0 for writer in writers)
    assert seen == [json.loads(line) for line in path.read_text().splitlines()]
    for number in "012":
        own = [log for log in seen if log["writer"] == number]
        assert [log.get("number", log.get("again")) for log in own] == [n for n in range(50) for _ in range(2)]


def test_a_line_that_was_cut_off_is_not_read_and_the_next_writer_removes_it(tmp_path):
    path = tmp_path / "journal.log"
    one = open_journal(path)
    one.append_logs([{"n": 0}, {"n": 1}])
    with open(path, "ab") as file:
        file.write(b'{"n": 2')
    assert [log["n"] for log in one.read_logs(0)] == [0, 1]
    open_journal(path).append_logs([{"n": 3}])
    assert [log["n"] for log in one.read_logs(2)] == [3]
    assert [log["n"] for log in open_journal(path).read_logs(1)] == [1, 3]
