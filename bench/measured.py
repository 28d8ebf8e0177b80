"""Run a module and note what its process takes: `python -m bench.measured FOLDER -m MODULE ARGUMENTS`.

FOLDER/<stage>-<host>-<begin>-<pid>.json is written every half second and at the end, so a killed process leaves its
last sample. Exit code, signals and output are the module's own. In job scripts: XLME_PYTHON="python -m bench.measured
FOLDER".
"""

import atexit
import contextlib
import json
import os
import re
import runpy
import sys
import threading
import time
from pathlib import Path

INTERVAL = 0.5  # seconds
_BEGIN = time.time()


def sample() -> dict[str, float]:
    """What this process has taken so far.

    `read` and `written` are bytes of system calls (`rchar`, `wchar`), the cached ones included; `disk_read` and
    `disk_written` those that reached a disk.
    """
    io = {key: int(value) for key, value in re.findall(r"(\w+): (\d+)", Path("/proc/self/io").read_text())}
    peak = re.search(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
    return {
        "seconds": time.time() - _BEGIN,
        "cpu_seconds": time.process_time(),
        "read": io["rchar"],
        "written": io["wchar"],
        "disk_read": io["read_bytes"],
        "disk_written": io["write_bytes"],
        "peak_bytes": int(peak[1]) * 1024 if peak else 0,
        "open_files": len(os.listdir("/proc/self/fd")),
    }


class Notes:
    """The file of this process; `open_files` in it is the largest number that a sample saw."""

    def __init__(self, folder: Path, stage: str):
        self.path = folder / f"{stage}-{os.uname().nodename}-{_BEGIN:.3f}-{os.getpid()}.json"
        self.about = {"stage": stage, "host": os.uname().nodename, "pid": os.getpid(), "begin": _BEGIN}
        self.most = 0.0
        self.lock = threading.Lock()

    def write(self) -> None:
        """Take a sample, and put it in the place of the last one."""
        with self.lock:
            found = sample()
            self.most = found["open_files"] = max(self.most, found["open_files"])
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text(json.dumps(self.about | found))
            temporary.replace(self.path)

    def keep_writing(self) -> None:
        """For a thread of its own; a full disk must not end the module."""
        while True:
            with contextlib.suppress(OSError):
                self.write()
            time.sleep(INTERVAL)


def main() -> None:
    """Run the module that the arguments name."""
    if len(sys.argv) < 4 or sys.argv[2] != "-m":
        sys.exit("usage: python -m bench.measured FOLDER -m MODULE ARGUMENTS")
    folder, module = Path(sys.argv[1]), sys.argv[3]
    sys.argv = [module, *sys.argv[4:]]
    stage = sys.argv[1] if module == "data_prep" and len(sys.argv) > 1 else module.split(".")[-1]
    folder.mkdir(parents=True, exist_ok=True)
    notes = Notes(folder, stage)
    atexit.register(notes.write)
    threading.Thread(target=notes.keep_writing, daemon=True).start()
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
