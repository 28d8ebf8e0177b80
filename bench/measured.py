"""What a Python program takes, also one that is killed: python -m bench.measured FOLDER -m MODULE ARGUMENT...

Every half second, and at the end, FOLDER/HOST-PID-TIME.json has seconds, processor seconds, bytes read and written (by
calls, and from and to the disk), the peak of memory and the most open files so far.
"""

import atexit
import json
import os
import runpy
import sys
import threading
import time
from pathlib import Path

_BEAT = 0.5  # seconds


class Sampler(threading.Thread):
    """Writes what this process took so far into a file of its own in `folder`."""

    def __init__(self, folder: Path):
        super().__init__(daemon=True)
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / f"{os.uname().nodename}-{os.getpid()}-{time.time_ns()}.json"
        self.began = time.monotonic()
        self.most_files = 0
        self.lock = threading.Lock()

    def run(self) -> None:
        """Sample until the process ends."""
        while True:
            self.sample()
            time.sleep(_BEAT)

    def sample(self) -> None:
        """Write what was taken so far."""
        with self.lock:
            status = _fields("/proc/self/status")
            self.most_files = max(self.most_files, len(os.listdir("/proc/self/fd")) - 1)
            taken = {
                "seconds": time.monotonic() - self.began,
                "cpu_seconds": sum(os.times()[:4]),
                "peak_bytes": 1024 * status["VmHWM"],
                "open_files": self.most_files,
                **_fields("/proc/self/io"),
            }
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text(json.dumps(taken))
            temporary.rename(self.path)


def _fields(path: str) -> dict[str, int]:
    lines = Path(path).read_text().splitlines()
    pairs = (line.split()[:2] for line in lines if len(line.split()) > 1)
    return {name.rstrip(":"): int(value) for name, value in pairs if value.isdigit()}


def main() -> None:
    """Run a module under the sampler."""
    _, folder, flag, module, *arguments = sys.argv
    assert flag == "-m", __doc__
    sampler = Sampler(Path(folder))
    sampler.start()
    atexit.register(sampler.sample)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
