"""A few faults of the campaign (`python -m tests.faults`) against real training on two ranks."""

import json
import os
from pathlib import Path

import pytest

from tests.launch import python


def campaign(folder: Path, layout: str, *kinds: str) -> dict:
    words = ["--json", "--quick", "--folder", str(folder), "--seed", "3", "--layouts", layout, "--kinds", *kinds]
    done = python("-m", "tests.faults", *words)
    assert done.returncode == 0, done.stderr[-6000:]
    return json.loads(done.stdout)


def test_four_faults(tmp_path: Path) -> None:
    """Two of them mount small file systems, which needs root. e2e/test_resume.py stops a run, test_bad_steps.py has the
    gradients that are no numbers."""
    kinds = ["rank hangs", "shard damaged between two starts"]
    kinds += ["disk full", "checkpoints read only"] * (os.geteuid() == 0)
    figures = campaign(tmp_path, "zero3", *kinds)
    assert {key: figures[key] for key in ("faults", "survived", "lost_rows", "silent_changes")} == {
        "faults": len(kinds),
        "survived": len(kinds),
        "lost_rows": 0,
        "silent_changes": 0,
    }


def test_what_the_audit_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The audit itself: a line that is missing, one too many, and other tokens are each found."""
    from tests.rows import write_data
    from tests.train.test_guard import config, run
    from xlme_ds.audit import examine, main

    data = write_data(tmp_path / "mixed", rows=96)
    out = tmp_path / "run"
    assert run(data, out, config(audit=True), bad=set(), watch=False)
    assert examine(out, (data,)) == ([], "96 mono rows and 96 para rows of 12 steps")
    path = out / "audit/rank_00000.jsonl"
    lines = path.read_text().split("\n")
    path.write_text("\n".join(lines[:-1]))
    assert examine(out, (data,))[0][0] == "mono row 88 of step 11 was read 0 times in that step"
    path.write_text("\n".join([*lines, lines[-1]]))
    assert examine(out, (data,))[0][0] == "mono row 88 of step 11 was read 2 times in that step"
    path.write_text("\n".join([*lines[:-1], lines[-1].replace('"step": 11', '"step": 10')]))
    moved = examine(out, (data,))[0]
    assert moved[0] == "mono row 88 was read in step 10, which does not ask for it" and len(moved) == 2 * 2 * 8
    path.write_text("\n".join([*lines, '{"a": 1}']))
    assert examine(out, (data,))[0] == [], "a damaged line counts as none"
    last = json.loads(lines[-1])
    last["rows"]["para"][0][1] ^= 1
    path.write_text("\n".join([*lines[:-1], json.dumps(last)]))
    assert examine(out, (data,))[0] == ["para row 88 was read with other tokens than the data hold"]
    attempts = out / "audit/attempts.jsonl"
    attempts.write_text(attempts.read_text() + '\n{"start": 8, "world": 1, "audit": true}')
    path.write_text("\n".join(lines))
    assert len(examine(out, (data,))[0]) == 2 * 8 * 4, "steps after 8 were to be done again"
    capsys.readouterr()
    with pytest.raises(SystemExit) as left:
        main(["--run", str(out), "--data", str(data)])
    *faults, summary = capsys.readouterr().out.splitlines()
    assert left.value.code == 1 and faults == examine(out, (data,))[0][:10]
    assert summary == "64 faults in 96 mono rows and 96 para rows of 12 steps"
