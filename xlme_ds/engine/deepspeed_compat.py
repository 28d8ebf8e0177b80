"""Adapters for DeepSpeed: a check of its version, because we replace private parts of it; the loading of its compiled
extensions; and the reading of gradients that it keeps on a disk.

While torch compiles or loads an extension, it keeps a file `lock` in the extension's folder, and other processes wait
until this file is gone. A killed process leaves the file, and then all later processes wait for ever. So our processes
compile and load extensions one at a time, in our own folder, under a second lock that the system releases when its
holder ends. The holder may delete a file `lock` in that folder: only a killed process can have left it.
"""

import contextlib
import fcntl
import hashlib
import inspect
import io
import os
import pkgutil
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import IO, Any

import deepspeed
import psutil
import torch
from deepspeed.launcher.runner import parse_args as parse_args  # for `launch.py`
from deepspeed.launcher.runner import parse_inclusion_exclusion as parse_inclusion_exclusion
from torch import Tensor
from torch.utils import cpp_extension

TESTED_VERSION = "0.19.8"
_BF16 = "runtime.bf16_optimizer:BF16_Optimizer"
_ZERO3 = "runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3"
# Undocumented functions that we replace or call, with their parameters.
_SIGNATURES = {
    f"{_BF16}._update_hp_grad": "self, lp, group_idx, param_idx, clear_lp_grads",
    f"{_BF16}.clear_hp_grads": "self",
    f"{_BF16}._split_flat_tensor": "self, flat_tensor, num_elem_list",
    f"{_BF16}.step": "self, closure=None",
    f"{_BF16}.update_lp_params": "self",
    "runtime.engine:DeepSpeedEngine.buffered_allreduce_fallback": "self, grads=None, elements_per_buffer=500000000",
    "runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.update_lp_params": "self",
    f"{_ZERO3}._swappable_optimizer_subgroup": "self, sub_group_id",
    f"{_ZERO3}._optimizer_states_and_gradient_swap_in": "self, sub_group_id, timer_names=None",
    f"{_ZERO3}._optimizer_states_and_gradient_swap_out": "self, sub_group_id, timer_names=None",
    f"{_ZERO3}._reassign_or_swap_out_partitioned_parameters": "*args, **kwargs",
    f"{_ZERO3}._release_swap_buffers": "self, sub_group_id",
    "runtime.swap_tensor.optimizer_utils:OptimizerSwapper._adjust_for_misaligned_lengths": "self, tensors, offsets",
    "comm.torch:build_shm_op": "",
    "runtime.pipe.engine:PipelineEngine.reset_activation_shape": "self",
    "runtime.pipe.engine:PipelineEngine._exec_reduce_tied_grads": "self",
}


def check_deepspeed(signatures: Mapping[str, str] = _SIGNATURES) -> None:
    """Raise ValueError unless DeepSpeed has the tested version and private functions with the expected parameters."""
    installed = f"deepspeed {deepspeed.__version__} is installed"
    requirement = f"deepspeed=={TESTED_VERSION}"
    if deepspeed.__version__.split("+")[0] != TESTED_VERSION:
        raise ValueError(
            f"{installed}, but xlme_ds was tested with {TESTED_VERSION} only and replaces private parts of it: pip "
            f"install {requirement}"
        )
    for name, expected in signatures.items():
        try:
            function = pkgutil.resolve_name(f"deepspeed.{name}")
            signature = str(inspect.signature(function))[1:-1]  # without the parentheses
        except (ImportError, AttributeError):
            signature = "missing"
        if signature != expected:
            raise ValueError(
                f"{installed}, but differs from the release, in which {name} has the parameters ({expected}), not "
                f"({signature}): pip install --force-reinstall --no-deps {requirement}"
            )


_torch_load = cpp_extension.load  # `loading_extensions` replaces it for a time
# The programs that a build runs.
_COMPILERS = ("ninja", "c++", "g++", "clang++", "cc1plus", "as", "ld", "collect2", "nvcc", "cicc", "ptxas")


@contextlib.contextmanager
def loading_extensions() -> Iterator[None]:
    """Context for code that may load an extension: `cpp_extension.load` runs in one process at a time, and DeepSpeed's
    messages stay off stdout."""
    cpp_extension.load = _load_alone  # type: ignore[assignment]  # DeepSpeed reads `cpp_extension.load` at each use
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    finally:
        cpp_extension.load = _torch_load


def _load_alone(name: str, **arguments: Any) -> Any:
    """Take our lock, remove the file `lock` of a killed process, and call torch's `load` with a build folder of this
    environment.

    The folder is below TORCH_EXTENSIONS_DIR, or below torch's folder in the user's cache. Each environment has its own
    folder: the build's commands contain torch's path, so in a shared folder each change of environment would compile
    the extension again.
    Raises ValueError if the folder cannot be written or locked.
    """
    parent = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or cpp_extension.get_default_build_root())
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    path_hash = hashlib.sha256(torch.__file__.encode()).hexdigest()[:8]
    folder = parent / f"xlme_ds-{python}-torch{torch.__version__}-{path_hash}" / name
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            _take_lock(stack.enter_context(open(folder / ".xlme_ds.lock", "w")))
            with printing_if_slow(f"waiting for the compilers of a killed process, which write into {folder}", 10.0):
                while _compiler_runs_in(folder):
                    time.sleep(0.1)
            (folder / "lock").unlink(missing_ok=True)
        except OSError as error:
            raise ValueError(
                f"DeepSpeed's extensions cannot be compiled in {folder} ({error.strerror}): set TORCH_EXTENSIONS_DIR "
                "to a folder that this user can write and lock"
            ) from None
        if not (folder / f"{name}.so").exists():
            print(f"compiling {name} in {folder}, once for all runs", file=sys.stderr, flush=True)
        # PATH begins with the folder of this environment's ninja, because another version of ninja may reject the build
        # folder's log, and would then compile everything anew.
        search_path = os.environ.get("PATH", "")
        stack.callback(os.environ.__setitem__, "PATH", search_path)
        os.environ["PATH"] = f"{sysconfig.get_path('scripts')}{os.pathsep}{search_path}"
        return _torch_load(name=name, build_directory=str(folder), **arguments)


def _take_lock(file: IO[str], patience: float = 60.0) -> None:
    """Wait for the lock on `file` and take it; print a message after `patience` seconds of waiting."""
    message = f"waiting for a process of this or another run that compiles or loads an extension; it holds {file.name}"
    with printing_if_slow(message, patience):
        fcntl.flock(file, fcntl.LOCK_EX)


@contextlib.contextmanager
def printing_if_slow(message: str, patience: float, prints: bool = True) -> Iterator[None]:
    """Context that prints `message` to stderr if its block takes longer than `patience` seconds, and if `prints`."""
    timer = threading.Timer(patience, lambda: print(message, file=sys.stderr, flush=True))
    timer.daemon = True
    if prints:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _compiler_runs_in(folder: Path) -> bool:
    """Whether a compiler works in `folder`: it may outlive the process that started it and held the lock."""
    processes = psutil.process_iter(["name", "cwd"])  # `cwd` of another user's process is None
    cwd = str(folder.resolve())
    return any(process.info["name"] in _COMPILERS and process.info["cwd"] == cwd for process in processes)


def align_gradients(optimizer: Any) -> None:
    """If the optimizer is ZeRO-3 with its state on a disk, let it read gradients only into aligned memory. Other
    optimizers stay unchanged.

    DeepSpeed 0.19.8 reads with direct I/O, which fails if the address in memory is no multiple of 512 bytes. DeepSpeed
    ignores the failure, and the buffer keeps its old content. A gradient may begin at any address in its group's
    buffer.
    """
    swapper = getattr(optimizer, "optimizer_swapper", None)
    if swapper is not None:
        swapper._adjust_for_misaligned_lengths = partial(_cut_to_alignment, swapper)


def _cut_to_alignment(
    swapper: Any, tensors: Sequence[Tensor], offsets: Sequence[int]
) -> tuple[list[Tensor], list[int]]:
    """Replaces `_adjust_for_misaligned_lengths`, which cuts a gradient only at its end. Cut flat gradients, which begin
    at `offsets` in their group's buffer, into parts; returns (parts, the parts' offsets).

    DeepSpeed writes the aligned part of a gradient to the disk if this part is large enough, and keeps the short parts
    before and after it in memory.
    """
    parts, part_offsets = [], []
    alignment = swapper.numel_alignment
    for tensor, offset in zip(tensors, offsets, strict=True):
        cuts = [0, tensor.numel()]
        if swapper.is_swappable_tensor(tensor=tensor):
            aligned_begin = -offset % alignment
            aligned_end = aligned_begin + (tensor.numel() - aligned_begin) // alignment * alignment
            cuts = [0, aligned_begin, aligned_end, tensor.numel()]
        for begin, end in pairwise(cuts):
            if begin < end:
                part = tensor[begin:end]
                # A view of a short part would keep the whole gradient in memory.
                parts.append(part.clone() if len(part) < alignment else part)
                part_offsets.append(offset + begin)
    return parts, part_offsets
