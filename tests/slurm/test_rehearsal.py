"""bench.rehearsal on the small cluster: with a rank, a step and a node killed, the bytes are those of an undisturbed
run."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from bench.rehearsal import __main__ as rehearsal
from bench.rehearsal.__main__ import RESUMABLE, BatchJob, Jobs, Rehearsal, main, prepare, report, run
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

    monkeypatch.setattr(rehearsal, "KILL_METHODS", [*rehearsal.KILL_METHODS, lose_node])
    settings = Rehearsal(0.01, CORPUS, tmp_path / "killed", ids=12_000, rows=4000, sentences=2000, keep=True)
    done = run(settings)
    killed = {name: done["stages"][name]["kills"] for name in RESUMABLE}
    ways = {way for some in killed.values() for way in some}
    assert ways >= {"kill_rank", "kill_step", "lose_node"}, killed
    assert done["stages"]["train"]["kills"] and "each was read once" in done["checks"]["audit"]
    assert done["checks"]["planted"]["lines"] > 50_000
    assert "| mix | " in report(done)
    alone = Jobs(replace(settings, out=tmp_path / "alone", kills=False))
    (alone.out / "text").symlink_to(tmp_path / "killed/text")
    # What writes neither a vocabulary nor rows is not done again.
    for name in ("text", "stats", "verify"):
        alone.done["stages"][name] = done["stages"][name]
    alone.done["checks"] = done["checks"]
    write_json(alone.path, alone.done)
    prepare(alone.rehearsal)
    assert manifests(alone.out) == manifests(settings.out)


def manifests(out: Path) -> dict[str, bytes]:
    """The manifests of all stages, which have the checksums of all shards."""
    folders = ("vocap", "vocab", "encoded", "mixed")
    found = {
        str(path.relative_to(out)): path.read_bytes()
        for name in folders
        for path in out.glob(f"{name}/**/manifest.json")
    }
    assert len(found) >= 4
    return found


def test_slurm_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="2"):
        main(["--gigabytes", "0.06", "--source", str(tmp_path), "--out", str(tmp_path / "out")])
    assert "there is no sbatch here: start the rehearsal on a login node" in capsys.readouterr().err


def test_training_has_a_process_for_each_of_two_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data stages of the documented command have 128 ranks; a step of training has 8 rows of each task."""
    for name, says in (("sbatch", f'echo "$@" >{tmp_path}/job; echo 7'), ("scontrol", "echo JobState=COMPLETED")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{says}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    options = ("--nodes=4", "--ntasks-per-node=32")
    Jobs(Rehearsal(0.06, tmp_path, tmp_path / "out", options=options)).train()
    before_script = (tmp_path / "job").read_text().partition(" slurm/pretrain_base.sh ")[0].split()
    chosen = dict(word.removeprefix("--").split("=") for word in before_script if "=" in word)  # the last one counts
    assert (chosen["nodes"], chosen["ntasks-per-node"], chosen["gpus-per-node"]) == ("1-2", "1", "1")


@pytest.mark.parametrize(
    ("words", "size"), [("0.06", 150_000), ("40", 524_288), ("0.06 --ids 7000", 7000), ("40 --ids 600000", 600_000)]
)
def test_the_vocabulary_is_one_that_the_text_suffices_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, size: int
) -> None:
    """60 MB have 333,158 pieces. With programs in Slurm's place, which note the jobs: vocap's is the second."""
    for name, says in (("sbatch", f'echo "$@" >>{tmp_path}/jobs; echo 7'), ("scontrol", "echo JobState=COMPLETED")):
        (tmp_path / name).write_text(f"#!/bin/bash\n{says}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    (tmp_path / "mono").mkdir()
    (tmp_path / "mono/de.txt.xz").write_bytes(b"x")
    with pytest.raises(SystemExit, match="2"):  # nothing was encoded
        main(["--source", str(tmp_path), "--out", str(tmp_path / "out"), "--gigabytes", *words.split()])
    jobs = (tmp_path / "jobs").read_text().splitlines()
    assert (
        f"stage.sh vocap --allow-missing --corpus cc100 --where cc100={tmp_path}/out/text/cc100 --size {size} "
        in jobs[1]
    )
