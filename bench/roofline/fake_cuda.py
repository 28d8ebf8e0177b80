"""Lets a CPU build of torch make fake tensors on the device cuda. Import this module before torch.

A CPU build has no guard and no hooks for the device cuda; fake_cuda.cpp registers a guard and hooks that do nothing.
The first import compiles that file with g++, once per version of torch and of the file. A build of torch with CUDA
needs neither g++ nor a GPU.
"""

import ctypes
import importlib.metadata
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from xlme_ds.io.folders import private_folder

SOURCE = Path(__file__).with_suffix(".cpp")


def _compiled(torch: Path) -> Path:
    version = importlib.metadata.version("torch")
    folder = private_folder(Path(tempfile.gettempdir()) / f"xlme_ds-{os.getuid()}")
    library = folder / f"fake_cuda-{version}-{int(SOURCE.stat().st_mtime)}.so"
    if not library.exists():
        partial = library.with_suffix(f".{os.getpid()}")
        include, linked = torch / "include", torch / "lib"
        flags = ["-std=c++20", "-shared", "-fPIC", "-O1", f"-I{include}", f"-I{include}/torch/csrc/api/include"]
        command = ["g++", *flags, str(SOURCE), "-o", str(partial), f"-L{linked}", "-lc10", "-ltorch_cpu"]
        subprocess.run(command, check=True)
        partial.rename(library)
    return library


READY = "torch" not in sys.modules  # torch looks for hooks only during its import
if READY:
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.origin is not None
    torch = Path(spec.origin).parent
    if not (torch / "lib" / "libtorch_cuda.so").exists():
        library = _compiled(torch)
        for pattern in ("libgomp*", "libc10.so", "libtorch_cpu.so"):
            for path in sorted((torch / "lib").glob(pattern)):
                ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
        ctypes.CDLL(str(library))
