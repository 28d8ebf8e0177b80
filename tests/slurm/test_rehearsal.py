"""bench.rehearsal on the small cluster: with a rank, a step and a node killed, the bytes are those of an undisturbed
run."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from bench.rehearsal.__main__ import RESUMABLE, BatchJob, Jobs, Rehearsal, ids_of, main, prepare, report, run
from tests.launch import ROOT
from tests.slurm.cluster import SLURM_CONF, Cluster, wait_until
from xlme_ds.io.files import write_json

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

    settings = Rehearsal(0.01, CORPUS, tmp_path / "killed", ids=12_000, rows=4000, sentences=2000, keep=True,
                         rows_per_shard=200, ways=(lose_node,))  # fmt: skip
    done = run(settings)
    killed = {name: taken["kills"] for name, taken in done["stages"].items() if name.split(".")[0] in RESUMABLE}
    ways = {way for name, some in killed.items() for way in some if not name.endswith(".many")}
    assert ways >= {"kill_rank", "kill_step", "lose_node"}, killed
    assert done["stages"]["train"]["kills"] and "each once" in done["checks"]["audit"]
    assert done["checks"]["planted"]["lines"] > 50_000 and done["checks"]["many"]["shards"] > 500
    table = report(done, settings.gigabytes, settings.rows)
    assert "mix.para" in table and "whole corpus, h" in table
    alone = Jobs(replace(settings, out=tmp_path / "alone", kills=False, ways=()))
    (alone.out / "text").symlink_to(tmp_path / "killed/text")
    # What writes neither a vocabulary nor rows is not done again.
    for name in ("text", "stats.mono", "stats.para", "verify"):
        alone.done["stages"][name] = done["stages"][name]
    alone.done["checks"] = {name: check for name, check in done["checks"].items() if name != "sha256"}
    write_json(alone.path, alone.done)
    assert prepare(alone.rehearsal).done["checks"]["sha256"] == done["checks"]["sha256"]


def test_the_vocabulary_follows_the_text_and_slurm_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ids_of(0.06) < 333_158 and ids_of(50) == 524_288
    if shutil.which("sbatch") is None:
        with pytest.raises(SystemExit, match="2"):
            main(["--gigabytes", "0.06", "--out", str(tmp_path / "out")])
        assert "sbatch is not here: start it on a login node" in capsys.readouterr().err
