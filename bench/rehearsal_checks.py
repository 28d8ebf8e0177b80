"""What a rehearsal must have made, computed apart from the program: each check raises ValueError at the first
difference, and returns what it looked at."""

import json
import lzma
import math
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from bench.rehearsal_text import TextFile, note_of, repeated
from xlme_ds.config import DataConfig
from xlme_ds.data.order import plan_step
from xlme_ds.data.schema import TASKS, read_manifest
from xlme_ds.data.vocabulary import Vocabulary
from xlme_ds.io.files import file_sha256

ALPHA, WORLD, ROW_TOKENS = 0.7, 512, 512
# Bytes/s of a core, of text or of rows: lab log.
RATES = {"xz": 72e6, "vocap": 41e6, "encode": 6.5e6, "mix": 110e6, "mix.para": 23e6, "verify": 120e6}
BY_TOKENS = ("length_ratio", "length", "too_long", "no_token")  # the vocabulary decides: nothing of the kind is planted
CURVE = 45.0  # seconds of a core, of a million lines
LINES = 2_000  # of a language, whose tokens are counted
SUMS = ("cpu_seconds", "read", "written", "disk_read", "disk_written")


def _refuse(different: bool, words: str) -> None:
    if different:
        raise ValueError(words)


def predicted(gigabytes: float, rows: int, cores: int = 2) -> dict[str, float]:
    """Seconds of each stage by the rates of the lab log; a curve for each language, and half a minute of vocab's
    training, which one core does, for each million lines."""
    text, made = gigabytes * 1e9, rows * 4 * ROW_TOKENS
    sampled = text / RATES["vocap"]
    few = min(1.0, gigabytes / 10)  # of less text, curves are shorter
    seconds = {"vocap": sampled + 100 * CURVE * few, "vocab": sampled + 2 * 300 * few, "encode": text / RATES["encode"]}
    seconds |= {name: made / RATES[name] for name in ("mix", "mix.para")} | {"verify": 2 * made / RATES["verify"]}
    return {name: value / cores for name, value in seconds.items()}


def measured(notes: Path) -> dict[str, Any]:
    """All processes of a stage, with those that were killed: sums, and the largest peak and number of open files."""
    samples = [json.loads(path.read_text()) for path in notes.glob("*.json")]
    found: dict[str, Any] = {key: sum(sample[key] for sample in samples) for key in SUMS}
    for key in ("peak_bytes", "open_files"):
        found[key] = max((sample[key] for sample in samples), default=0)
    return found | {"processes": len(samples)}


def planted(text: Path, written: Sequence[TextFile], encoded: Path) -> dict[str, int]:
    """Every defect and duplicate that was planted was counted, to the line, by language and by pair; and no other."""
    looked = Counter[str]()
    for task, read, lost in (("mono", "paragraphs_in", "removed"), ("para", "pairs_in", "dropped")):
        for name, counts in read_manifest(encoded / task).counts["by_language"].items():
            notes = [
                note_of(file, text) for file in written if (file.name, file.corpus == "cc100") == (name, task == "mono")
            ]
            found = Counter({"lines": counts[read]}) + Counter(counts[lost]) + Counter(counts["repaired"])
            wanted = _planted(notes, task)
            own = sum(found.pop(reason, 0) for reason in BY_TOKENS)
            looked["dropped for their tokens"] += own
            less = wanted["exact_duplicates"] - found["exact_duplicates"]
            if 0 < less <= own:  # a planted duplicate may be among them
                wanted["exact_duplicates"] -= less
            for what in sorted(wanted.keys() | found.keys()):
                words = f"{name} has {found[what]} {what}, {wanted[what]} were planted"
                _refuse(found[what] != wanted[what], f"{encoded / task}: {words}")
            looked.update(wanted)
    _refuse(looked["lines"] == 0, f"{encoded} has no text")
    return dict(looked)


def _planted(notes: Sequence[Path], task: str) -> Counter[str]:
    """What is planted in all files of a language or pair."""
    wanted = Counter[str]()
    for note in (json.loads(path.read_text()) for path in notes):
        wanted.update(note["damaged"] | {"lines": note["lines"], "exact_duplicates": note["exact_duplicates"]})
    if task == "para":  # duplicates are sought in all files of a pair
        wanted["exact_duplicates"] = repeated(np.concatenate([np.load(path.with_suffix(".npy")) for path in notes]))
    return wanted


def tokens(out: Path, written: Sequence[TextFile]) -> dict[str, Any]:
    """Tokens per character of the first lines of every language under each vocabulary, and medians of their ratios."""
    names = ("vocap", "vocab", "vocab_large")
    vocabularies = [Vocabulary(out / name) for name in names]
    found = {}
    for file in written:
        if file.corpus == "cc100":
            with lzma.open(out / "text" / file.path, "rt", encoding="utf-8", errors="replace") as lines:
                some = [line.strip() for line in islice(lines, LINES) if line.strip()]
            characters = sum(map(len, some))
            found[file.name] = [sum(len(v.encode(line)) for line in some) / characters for v in vocabularies]
    table = np.array(list(found.values()))
    by_size = np.array_split(np.arange(len(table)), 3)  # largest first, as the files are
    thirds = {f"vocap/{name}": [float(np.median(table[part, 0] / table[part, column])) for part in by_size]
              for column, name in enumerate(names) if column}  # fmt: skip
    return {"by_language": found, "median_of_thirds": thirds}


def mixed_rows(out: Path, task: str, rows: int) -> dict[str, Any]:
    """Exactly the rows asked; shares of p_j = m_j^0.7 / sum; and what mix read next to the ids that it used."""
    mixed, folder = read_manifest(out / "mixed" / task), out / "mixed" / task
    held = sum(_rows(folder / shard.name) for shard in mixed.shards)
    _refuse(held != rows, f"{folder} holds {held} rows, {rows} were asked for")
    by_language = mixed.counts["by_language"]
    weights = {name: entry["available"] ** ALPHA for name, entry in by_language.items()}
    total, used = math.fsum(weights.values()), sum(entry["used"] for entry in by_language.values())
    cut = mixed.counts["sampled"] - used  # pairs that were sampled and did not fit into the last row
    worst = 0.0
    for name, entry in by_language.items():
        off = entry["used"] - mixed.counts["sampled"] * weights[name] / total
        _refuse(not -1 - cut <= off <= 1, f"{folder}: {name} is used {entry['used']} times, {off:+.2f} of its share")
        worst = max(worst, abs(off))
    bytes_used = 4 * mixed.counts["tokens"]
    stage = json.loads((out / "rehearsal.json").read_text())["stages"][f"mix.{task}"]
    ratio = max(stage["read"], stage["disk_read"]) / bytes_used
    most = 2 + len(stage["kills"])  # a new try reads what the one before wrote, to compare checksums
    _refuse(bytes_used > 1e9 and ratio > most, f"mix {task} read {ratio:.2f} bytes a byte of ids")
    return {"rows": held, "worst_share": worst, "read_a_byte": ratio, "fill": mixed.counts["fill"],
            "most_repeats": max(entry["repeat"] for entry in by_language.values())}  # fmt: skip


def _rows(path: Path) -> int:
    with pa.memory_map(str(path)) as source:
        file = pa.ipc.open_file(source)
        return sum(file.get_batch(number).num_rows for number in range(file.num_record_batches))


def passes(folder: Path) -> dict[str, int]:
    """A language's rows come all once before any comes again: of the rows as they lie, by a hash of their ids."""
    manifest = read_manifest(folder)
    factors = np.random.default_rng(0).integers(1, 1 << 63, ROW_TOKENS, dtype=np.uint64) | np.uint64(1)
    hashes, languages = [], []
    for shard in manifest.shards:
        with pa.memory_map(str(folder / shard.name)) as source:
            file = pa.ipc.open_file(source)
            for number in range(file.num_record_batches):
                batch = file.get_batch(number)
                ids = batch.column("tokens").flatten().to_numpy().reshape(batch.num_rows, ROW_TOKENS).astype(np.uint64)
                hashes.append((ids * factors).sum(axis=1, dtype=np.uint64))
                languages.append(batch.column("languages").flatten().to_numpy().copy())
    every, of = np.concatenate(hashes), np.concatenate(languages)
    complete = repeated = 0
    for index, code in enumerate(manifest.languages):
        mine, available = every[of == index], manifest.counts["by_language"].get(code, {}).get("available", 0)
        parts = [mine[first : first + available] for first in range(0, len(mine), max(available, 1))]
        known = np.unique(parts[0]) if parts else mine
        for part in parts:
            distinct = np.unique(part)
            _refuse(len(distinct) != len(part), f"{folder}: a row of {code} comes twice in one pass")
            _refuse(
                len(np.setdiff1d(distinct, known)) > 0,
                f"{folder}: a later pass of {code} has rows that the first lacks",
            )
            complete += len(part) == available
        repeated += len(parts) > 1
    return {"rows": len(every), "languages_repeated": repeated, "complete_passes": complete}


def epoch(rows: int) -> dict[str, int]:
    """Every row once, by the orders of 512 ranks at the paper's batch; the last step reads beyond the end."""
    plan = plan_step(DataConfig(), WORLD)
    steps = -(-rows // plan.rows[0])
    for task in range(len(TASKS)):
        seen = np.zeros(steps * plan.rows[task], np.uint8)
        for step in range(steps):
            for rank in range(WORLD):
                for micro_batch in range(plan.accumulation):
                    seen[plan.numbers(step, rank, micro_batch, task)] += 1
        _refuse(
            not (seen == 1).all(), f"{TASKS[task]} row {int(np.argmax(seen != 1))} is not read exactly once an epoch"
        )
    return {"steps": steps, "ranks": WORLD, "rows": 2 * steps * plan.rows[0]}


def first_batch(mixed: Path) -> dict[str, float]:
    """Seconds to the first batch of a run that begins in the middle of the data; its rows are those that lie there."""
    from xlme_ds.data.loader import Loader

    rows = read_manifest(mixed / "mono").rows
    step, begin = rows // 2 // 16, time.perf_counter()
    (batch,) = Loader(mixed, DataConfig(16, 16, 16), 1, 0.15).step(step)
    seconds, first = time.perf_counter() - begin, step * 16
    for shard in read_manifest(mixed / "mono").shards:
        if first < shard.rows:
            with pa.memory_map(str(mixed / "mono" / shard.name)) as source:
                column = pa.ipc.open_file(source).read_all().column("tokens").slice(first, 1)
                row = np.array(column.to_pylist()[0])
            break
        first -= shard.rows
    _refuse(not (batch.tokens_BT[0].numpy() == row).all(), f"{mixed}: step {step} does not begin with row {step * 16}")
    return {"step": step, "seconds": seconds}


def audit(run: Path, mixed: Path) -> str:
    """What `xlme_ds.audit` says of the training."""
    command = [sys.executable, "-m", "xlme_ds.audit", "--run", str(run), "--data", str(mixed)]
    done = subprocess.run(command, capture_output=True, text=True)
    _refuse(done.returncode != 0, f"{run}: {(done.stdout + done.stderr).strip()[-400:]}")
    return done.stdout.strip()


def xl(ids: int) -> dict[str, float]:
    """XL's parameters with this vocabulary, by the planner, which builds it on the meta device."""
    command = [sys.executable, "-m", "xlme_ds.plan", "--recipe", "xl", "--model.vocabulary", str(ids), "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    _refuse(done.returncode != 0, f"the plan of XL failed: {done.stderr.strip()[-400:]}")
    found = json.loads(done.stdout)
    return {key: value for key, value in found.items() if isinstance(value, int | float)}


def cut_slice(text: Path, out: Path, gigabytes: float) -> dict[str, int]:
    """Lines of the largest files of documents, each a document and a shard by this block size: 70,000, fewer for less
    than a gigabyte."""
    out.mkdir(parents=True, exist_ok=True)
    shards = int(70_000 * min(gigabytes, 1.0))
    paths = sorted((text / "cc100").glob("*.txt.xz"), key=lambda path: (-path.stat().st_size, path.name))[:8]
    size = 0
    for path in paths:
        with lzma.open(path) as stream:
            lines = islice((line for line in stream if len(line) > 64), -(-shards // len(paths)))
            size += (out / path.name.removesuffix(".xz")).write_bytes(b"\n".join(lines))
    return {"shards": shards, "block_bytes": 32, "bytes": size}


def shards(folder: Path) -> int:
    """Shards of an encoded folder, by its manifest."""
    return len(read_manifest(folder).shards)


def sums(out: Path) -> dict[str, str]:
    """SHA-256 of every manifest, which has those of all shards."""
    found = {path.relative_to(out).as_posix(): file_sha256(path) for path in sorted(out.glob("*/**/manifest.json"))}
    return {name: value for name, value in found.items() if not name.startswith(("views", "text", f"run{os.sep}"))}
