"""Checks of a rehearsal's results. Each check raises ValueError at the first difference."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from bench.rehearsal.text import TextFile, note_of
from data_prep.languages import canonical
from xlme_ds.data.schema import read_manifest

# Reasons to drop a line that depend on the vocabulary; such lines are not planted.
BY_TOKENS = ("length_ratio", "length", "too_long", "no_token")
# corpus -> (task, the manifest's key of the number of lines, the manifest's key of the dropped lines by reason)
TASKS = {"cc100": ("mono", "paragraphs_in", "removed"), "ccaligned": ("para", "pairs_in", "dropped")}


def planted(text: Path, files: Sequence[TextFile], encoded: Path) -> dict[str, int]:
    """Check that stage encode counted the planted defects and duplicates of each language and pair, and no others.
    Returns the number of planted lines of each kind, over all files."""
    total = Counter[str]()
    for file in files:
        task, lines_key, dropped_key = TASKS[file.corpus]
        name = "-".join(map(canonical, file.name.split("-")))
        counts = read_manifest(encoded / task).counts["by_language"][name]
        counted = Counter({"lines": counts[lines_key]}) + Counter(counts[dropped_key]) + Counter(counts["repaired"])
        expected = Counter[str](json.loads(note_of(file, text).read_text()))
        dropped_by_tokens = sum(counted.pop(reason, 0) for reason in BY_TOKENS)
        total["dropped for their tokens"] += dropped_by_tokens
        missing = expected["exact_duplicates"] - counted["exact_duplicates"]
        if 0 < missing <= dropped_by_tokens:  # planted duplicates may be among the lines dropped for their tokens
            expected["exact_duplicates"] -= missing
        if counted != +expected:
            raise ValueError(f"{encoded / task}: {name} has {dict(counted)}, {dict(expected)} were planted")
        total.update(expected)
    return dict(total)


def audit(run: Path, mixed: Path) -> str:
    """Run `xlme_ds.audit` on the training, and return its report. Raises ValueError if the audit fails."""
    command = [sys.executable, "-m", "xlme_ds.audit", "--run", str(run), "--data", str(mixed)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{run}: {(done.stdout + done.stderr).strip()[-400:]}")
    return done.stdout.strip()
