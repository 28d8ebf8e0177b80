"""Checks of what a rehearsal made, computed apart from the program.

Each check raises ValueError at the first difference, and returns its counts.
"""

import json
import lzma
import math
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench.rehearsal.text import TextFile, note_of, repeated
from xlme_ds.data.schema import read_manifest
from xlme_ds.io.files import file_sha256

ALPHA = 0.7
BY_TOKENS = ("length_ratio", "length", "too_long", "no_token")  # depend on the vocabulary, and are not planted


def _require(condition: object, message: str) -> None:
    if not condition:
        raise ValueError(message)


def planted(text: Path, files: Sequence[TextFile], encoded: Path) -> dict[str, int]:
    """Encoding counted every planted defect and duplicate, to the line, by language and by pair, and no other."""
    total = Counter[str]()
    for task, read, lost in (("mono", "paragraphs_in", "removed"), ("para", "pairs_in", "dropped")):
        for name, counts in read_manifest(encoded / task).counts["by_language"].items():
            notes = [
                note_of(file, text) for file in files if (file.name, file.corpus == "cc100") == (name, task == "mono")
            ]
            counted = Counter({"lines": counts[read]}) + Counter(counts[lost]) + Counter(counts["repaired"])
            expected = _planted(notes, task)
            by_tokens = sum(counted.pop(reason, 0) for reason in BY_TOKENS)
            total["dropped for their tokens"] += by_tokens
            missing = expected["exact_duplicates"] - counted["exact_duplicates"]
            if 0 < missing <= by_tokens:  # a planted duplicate may be among them
                expected["exact_duplicates"] -= missing
            for reason in sorted(expected.keys() | counted.keys()):
                message = f"{name} has {counted[reason]} {reason}, {expected[reason]} were planted"
                _require(counted[reason] == expected[reason], f"{encoded / task}: {message}")
            total.update(expected)
    _require(total["lines"], f"{encoded} has no text")
    return dict(total)


def _planted(notes: Sequence[Path], task: str) -> Counter[str]:
    """Counts of what is planted in all files of a language or pair."""
    expected = Counter[str]()
    for note in (json.loads(path.read_text()) for path in notes):
        expected.update(note["damaged"] | {"lines": note["lines"], "exact_duplicates": note["exact_duplicates"]})
    if task == "para":  # duplicates are sought in all files of a pair
        expected["exact_duplicates"] = repeated(np.concatenate([np.load(path.with_suffix(".npy")) for path in notes]))
    return expected


def mixed_rows(mixed: Path, task: str, rows: int) -> dict[str, Any]:
    """The folder has exactly `rows` rows, in shares p_j = m_j^0.7 / sum."""
    manifest, folder = read_manifest(mixed / task), mixed / task
    shards = (pa.memory_map(str(folder / shard.name)) for shard in manifest.shards)
    stored = sum(pa.ipc.open_file(shard).read_all().num_rows for shard in shards)
    _require(stored == rows, f"{folder} holds {stored} rows, {rows} were asked for")
    by_language, sampled = manifest.counts["by_language"], manifest.counts["sampled"]
    weights = {name: entry["available"] ** ALPHA for name, entry in by_language.items()}
    total = math.fsum(weights.values())
    cut = sampled - sum(entry["used"] for entry in by_language.values())  # pairs that did not fit into the last row
    worst = 0.0
    for name, entry in by_language.items():
        off = entry["used"] - sampled * weights[name] / total
        _require(-1 - cut <= off <= 1, f"{folder}: {name} is used {entry['used']} times, {off:+.2f} of its share")
        worst = max(worst, abs(off))
    return {"rows": stored, "worst_share": worst, "fill": manifest.counts["fill"],
            "most_repeats": max(entry["repeat"] for entry in by_language.values())}  # fmt: skip


def audit(run: Path, mixed: Path) -> str:
    """The report of `xlme_ds.audit` on the training."""
    command = [sys.executable, "-m", "xlme_ds.audit", "--run", str(run), "--data", str(mixed)]
    done = subprocess.run(command, capture_output=True, text=True)
    _require(done.returncode == 0, f"{run}: {(done.stdout + done.stderr).strip()[-400:]}")
    return done.stdout.strip()


def cut_slice(text: Path, out: Path, gigabytes: float) -> dict[str, int]:
    """Write lines of the largest files, each a document and a shard by this block size: 70,000, fewer for less than a
    gigabyte."""
    out.mkdir(parents=True, exist_ok=True)
    shards = int(70_000 * min(gigabytes, 1.0))
    paths = sorted((text / "cc100").glob("*.txt.xz"), key=lambda path: (-path.stat().st_size, path.name))[:8]
    size = 0
    for path in paths:
        with lzma.open(path) as stream:
            lines = islice((line for line in stream if len(line) > 64), -(-shards // len(paths)))
            size += (out / path.name.removesuffix(".xz")).write_bytes(b"\n".join(lines))
    return {"shards": shards, "block_bytes": 32, "bytes": size}


def shards(folder: Path, expected: int) -> dict[str, int]:
    """The encoded folder has nearly the expected number of shards."""
    count = len(read_manifest(folder).shards)
    _require(count >= 0.9 * expected, f"{folder} has {count} shards, not about {expected}")
    return {"shards": count}


def sums(out: Path) -> dict[str, str]:
    """SHA-256 of every manifest, which has those of all shards."""
    paths = {path.relative_to(out).as_posix(): path for path in sorted(out.glob("*/**/manifest.json"))}
    made = ("views", "text", f"run{os.sep}")
    return {name: file_sha256(path) for name, path in paths.items() if not name.startswith(made)}
