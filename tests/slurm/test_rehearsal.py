"""bench/rehearsal.py on the small cluster: with a rank, a step and a node killed, the bytes are those of a run left
alone."""

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.rehearsal.__main__ import GOES_ON, BatchJob, Rehearsal, ids_of, main, prepare, run
from bench.rehearsal.report import report
from tests.launch import ROOT, environment
from tests.slurm.cluster import SLURM_CONF, Cluster, wait_until

CORPUS = ROOT.parent / "shared/data/corpus"


def test_killed_stages_end_with_the_same_bytes(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not CORPUS.exists():
        pytest.skip(f"the rehearsal's text is made from {CORPUS}, which is not here")
    for name, value in {"SLURM_CONF": SLURM_CONF, "DS_ACCELERATOR": "cpu", "PYTHONWARNINGS": "ignore"}.items():
        monkeypatch.setenv(name, value)

    def lose_node(job: BatchJob) -> None:
        restarts = int(job.field("Restarts"))
        cluster.fail("n2")
        wait_until(lambda: int(job.field("Restarts")) > restarts or job.field("JobState") != "RUNNING", "the requeue")
        cluster.recover("n2")

    settings = Rehearsal(0.02, CORPUS, tmp_path / "killed", ids=12_000, rows=4000, sentences=2000, keep=True,
                         rows_per_shard=200, ways=(lose_node,))  # fmt: skip
    found = run(settings)
    killed = {name: taken["kills"] for name, taken in found["stages"].items() if name.split(".")[0] in GOES_ON}
    ways = {way for name, some in killed.items() for way in some if not name.endswith(".many")}
    assert ways >= {"kill_rank", "kill_step", "lose_node"}, killed
    assert found["stages"]["train"]["kills"] and "each once" in found["checks"]["audit"]
    assert found["checks"]["planted"]["lines"] > 100_000 and found["checks"]["many"]["shards"] > 1000
    table = report(found, settings.gigabytes, settings.rows)
    assert "mix.para" in table and "64 x 64 cores" in table
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "text").symlink_to(tmp_path / "killed/text")
    undisturbed = prepare(replace(settings, out=alone, kills=False, ways=()))
    assert undisturbed.done["checks"]["sha256"] == found["checks"]["sha256"]


def test_the_vocabulary_follows_the_text_and_slurm_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ids_of(0.06) < 333_158 and ids_of(50) == 524_288
    if shutil.which("sbatch") is None:
        assert main(["--gigabytes", "0.06", "--out", str(tmp_path / "out")]) == 2
        assert "sbatch is not here: start it on a login node" in capsys.readouterr().err


def test_measuring_changes_neither_exit_code_nor_output(tmp_path: Path) -> None:
    command = ["-m", "data_prep", "verify", "--data", str(tmp_path / "none")]
    plain, noted = (
        subprocess.run([sys.executable, *more, *command], cwd=ROOT, env=environment(), capture_output=True, text=True)
        for more in ([], ["-m", "bench.measured", str(tmp_path / "notes")])
    )
    assert (plain.returncode, plain.stdout, plain.stderr) == (noted.returncode, noted.stdout, noted.stderr)
    assert plain.returncode == 2
    (note,) = (json.loads(path.read_text()) for path in (tmp_path / "notes").glob("*.json"))
    assert note["stage"] == "verify" and note["open_files"] > 2 and 0 < note["cpu_seconds"] < 600
    assert note["peak_bytes"] > 1 << 20 and note["read"] > 0
