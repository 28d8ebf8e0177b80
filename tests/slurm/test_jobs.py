"""The job scripts on a real Slurm cluster of two nodes: stopped, killed and cut off, a run ends as if left alone."""

import importlib
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from data_prep.__main__ import STAGES
from tests.finetune.tasks import write_base, write_entities
from tests.launch import ROOT, catches, environment
from tests.slurm.cluster import SLURM_CONF, SMALL, Cluster, Job, slurm, wait_until
from xlme_ds.io.help import checked_arguments
from xlme_ds.recipes import RECIPES
from xlme_ds.run_commands import child_environment, launch_command
from xlme_ds.train.run_folder import RunFolder

STEPS = 48
SETTINGS = {
    "model.vocabulary": 160,
    "model.vocabulary-blocks": 2,
    "model.width": 32,
    "model.heads": 4,
    "model.feed-forward": 64,
    "model.max-positions": 32,
    "model.generator-layers": 1,
    "model.discriminator-layers": 2,
    "data.mono-rows": 8,
    "data.para-rows": 4,
    "data.micro-batch": 2,
    "engine.precision": "fp32",
    "optimizer.warmup-steps": 4,
    "train.steps": STEPS,
    "train.log-every": 1,
    "train.save-every": 6,
}


def words(**changes: object) -> list[str]:
    settings = SETTINGS | {key.replace("__", "."): value for key, value in changes.items()}
    return ["--train.audit", *(word for key, value in settings.items() for word in (f"--{key}", str(value)))]


def every_row_was_read_once(out: Path, data: Path) -> bool:
    """What the run's own records prove, up to its newest checkpoint."""
    command = [sys.executable, "-m", "xlme_ds.audit", "--run", str(out), "--data", str(data)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return "each was read once" in done.stdout


def write_corpus(folder: Path) -> str:
    """Two languages and a pair in made-up words; returns the flags of data_prep that name them."""
    rng = random.Random(0)
    syllables = {"en": ["ka", "lo", "mi", "ter", "un"], "de": ["ve", "sa", "dor", "in", "pe"]}

    def line(language: str) -> str:
        return " ".join("".join(rng.choices(syllables[language], k=rng.randint(1, 4))) for _ in range(8))

    (folder / "mono").mkdir(parents=True)
    (folder / "para").mkdir()
    for language in syllables:
        text = "\n\n".join("\n".join(line(language) for _ in range(4)) for _ in range(80))
        (folder / "mono" / f"{language}.txt").write_text(text)
        (folder / "para" / f"de-en.{language}").write_text("\n".join(line(language)[:24] for _ in range(300)))
    return f"--mono {shlex.quote(str(folder / 'mono'))} --para {shlex.quote(str(folder / 'para'))}"


def step(out: Path) -> int:
    return RunFolder(out).last_logged_step()


def wait_for_step(job: Job, out: Path, number: int) -> None:
    wait_until(
        lambda: step(out) >= number or job.field("JobState") in ("FAILED", "CANCELLED"),
        f"step {number} of job {job.number}",
    )
    assert job.field("JobState") == "RUNNING", job.said()


def wait_for_checkpoint(job: Job, out: Path, after: str = "") -> str:
    """Wait for a checkpoint other than `after`, which a thread writes while steps go on; its name."""
    latest = out / "checkpoints/latest.json"

    def name() -> str:
        return str(json.loads(latest.read_text())["checkpoint"]) if latest.exists() else after

    wait_until(lambda: name() != after or job.field("JobState") != "RUNNING", f"a checkpoint of job {job.number}")
    assert name() != after, job.said()
    return name()


def processes(out: Path, module: str = "xlme_ds.pretrain") -> list[int]:
    """The processes of `module` that write into `out`, on all nodes: their file system and process table are this
    one's."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            arguments = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except (FileNotFoundError, ProcessLookupError):
            continue
        if module.encode() in arguments and str(out).encode() in arguments and b"srun" not in arguments[0]:
            found.append(int(entry.name))
    return found


def caches(**given: str) -> list[Path]:
    """Where the compilers of a process of job 7 cache."""
    names = ("TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "NUMBA_CACHE_DIR")
    own = {name: value for name, value in environment().items() if name not in (*names, "TMPDIR", "XLME_CACHE")}
    show = f"import os, xlme_ds.data.compiled; print(*(os.environ[name] for name in {names}))"
    shown = subprocess.run(["bash", "-c", f'. slurm/env.sh; python -c "{show}"'], cwd=ROOT, text=True,
                           env=own | {"SLURM_JOB_ID": "7"} | given, capture_output=True, check=True).stdout  # fmt: skip
    return [Path(place) for place in shown.split()]


def test_caches_are_in_a_folder_of_the_job_on_the_nodes_disk(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    for given in ({"TMPDIR": str(tmp_path)}, {"TMPDIR": str(tmp_path), "SLURM_TMPDIR": str(tmp_path / "s")}):
        job = Path(given.get("SLURM_TMPDIR", given["TMPDIR"])) / f"xlme-{os.getuid()}-7"
        assert caches(**given, TRITON_CACHE_DIR="/mine") == [Path("/mine"), job / "inductor", job / "numba"]
        assert job.stat().st_mode & 0o777 == 0o700
    for planted in ("link", "writable", "group-writable", "another's"):
        job = tmp_path / planted / f"xlme-{os.getuid()}-7"
        theirs = tmp_path / planted / "theirs"
        theirs.mkdir(parents=True)
        if planted == "link":
            job.symlink_to(theirs)
        else:
            job.mkdir()
            job.chmod({"writable": 0o702, "group-writable": 0o720}.get(planted, 0o755))
        if planted == "another's":
            if os.geteuid():
                continue  # needs root
            os.chown(job, 12345, 12345)
        ours = {place.parent for place in caches(TMPDIR=str(tmp_path / planted))}
        (made,) = ours
        assert made not in (job, theirs) and made.stat().st_mode & 0o777 == 0o700 and made.parent == job.parent


def test_processes_have_the_cores_of_their_task() -> None:
    """srun takes none of sbatch's by itself; threads may be set apart from them."""

    def found(**given: str) -> str:
        names = ("SLURM_CPUS_PER_TASK", "OMP_NUM_THREADS", "SRUN_CPUS_PER_TASK")
        own = {name: value for name, value in environment().items() if name not in names}
        line = ". slurm/env.sh; printenv OMP_NUM_THREADS SRUN_CPUS_PER_TASK"
        return subprocess.check_output(["bash", "-c", line], cwd=ROOT, text=True, env=own | given)

    assert found() == "1\n1\n" and found(SLURM_CPUS_PER_TASK="8") == "8\n8\n"
    assert found(SLURM_CPUS_PER_TASK="8", OMP_NUM_THREADS="2") == "2\n8\n"


def test_code_in_the_current_folder_is_not_run_by_helpers(tmp_path: Path) -> None:
    """Neither by a step of a larger command, nor by what draws the page of a run."""
    for name in ("jinja2", "numpy", "data_prep"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('planted')")
    step = launch_command("data_prep.inspect.show", 1, ["--help"])
    page = ["-c", "import jinja2, numpy, data_prep, xlme_ds; print(xlme_ds.__file__)"]
    for command in (step, [sys.executable, *page]):
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=child_environment() | {"PYTHONWARNINGS": "ignore"},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0 and "planted" not in done.stdout + done.stderr, done.stderr
    with_path = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", "import os; from xlme_ds.run_commands import child_environment, run\n"
         "os.chdir(__import__('sys').argv[1])\n"
         "command = [__import__('sys').executable, '-c', 'import data_prep; print(data_prep.__file__)']\n"
         "run(command, child_environment())",
         str(tmp_path)],
        cwd=ROOT, env=with_path, capture_output=True, text=True,
    )  # fmt: skip
    assert str(ROOT / "data_prep") in done.stdout, "of a checkout that is not installed, too"


def script(tmp_path: Path, name: str, srun: str, *words: str, **variables: str) -> "subprocess.CompletedProcess[str]":
    """A job script with a program in srun's place."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    (tmp_path / "bin/srun").write_text(f"#!/bin/bash\n{srun}\n")
    (tmp_path / "bin/srun").chmod(0o755)
    place = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM", "XLME"))}
    place |= {"PATH": f"{tmp_path}/bin:{place['PATH']}", "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(ROOT)} | variables
    return subprocess.run(["bash", f"slurm/{name}", *words], cwd=ROOT, env=place, capture_output=True, text=True)


def test_what_slurm_is_asked_for() -> None:
    """Another try keeps what the one before printed. The signal before the time limit is for the ranks, which save, or
    for the script of a stage. A process has a GPU, and all GPUs are as many as the script says."""
    scripts = {path.name: path.read_text() for path in (ROOT / "slurm").glob("*.sh") if "#SBATCH" in path.read_text()}
    assert scripts.keys() == {"stage.sh", "finetune.sh", *(f"pretrain_{size}.sh" for size in ("base", "large", "xl"))}
    for name, text in scripts.items():
        asked = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?", text, re.MULTILINE))
        assert asked["open-mode"] == "append" and "requeue" in asked, name
        assert re.fullmatch("B:USR1@[0-9]+" if name == "stage.sh" else "USR1@[0-9]+", asked["signal"]), name
        if name.startswith("pretrain"):
            assert asked["ntasks-per-node"] == asked["gpus-per-node"] and "exclusive" in asked and asked["mem"] == "0"
            assert f"on {int(asked['nodes']) * int(asked['gpus-per-node'])} GPUs" in text, name
            assert asked["kill-on-invalid-dep"] == "yes"


def test_a_step_that_a_signal_ends_ends_its_stage(tmp_path: Path) -> None:
    """As after `scancel --signal=USR1`, which tells the ranks alone."""
    done = script(tmp_path, "stage.sh", "kill -USR1 $$", "encode", "--out", str(tmp_path / "out"))
    assert done.returncode == 128 + signal.SIGUSR1 and "saved nothing new" in done.stderr


def program(tmp_path: Path, name: str, does: str) -> None:
    """A program in the place of one of Slurm's."""
    (tmp_path / "bin").mkdir(exist_ok=True)
    (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{does}\n")
    (tmp_path / "bin" / name).chmod(0o755)


@pytest.mark.parametrize(
    ("name", "progress"),
    [
        ("mono/tasks/en-000.begun.json", False),
        ("mono/tasks/en-000.00000.json", True),
        ("mono/tasks/en-000.json", True),
        ("mono/manifest.json", True),
        ("pos-en/seed1/scores.json", True),
        ("checkpoints/latest.json", True),
        ("config.json", False),
    ],
)
def test_only_what_the_next_try_does_not_do_again_is_progress(tmp_path: Path, name: str, progress: bool) -> None:
    program(tmp_path, "scontrol", "")
    path = tmp_path / "out" / name
    ends = f"mkdir -p {path.parent}; date +%N >{path}; exit 1"
    done = script(tmp_path, "stage.sh", ends, "encode", "--out", str(tmp_path / "out"))
    assert done.returncode == 1 and ("requeueing job 7" in done.stdout + done.stderr) == progress
    assert ("saved nothing new" in done.stderr) == (not progress)


@pytest.mark.parametrize("name", ["tasks/en-000.json", "checkpoints/latest.json"])
def test_progress_behind_a_link_is_seen(tmp_path: Path, name: str) -> None:
    """As of a folder on another disk."""
    program(tmp_path, "scontrol", "")
    path, link = tmp_path / "disk" / name, tmp_path / "out"
    path.parent.mkdir(parents=True)
    link.symlink_to("disk")
    done = script(tmp_path, "stage.sh", f"date +%N >{path}; exit 1", "encode", "--out", str(link))
    assert done.returncode == 1 and "requeueing job 7" in done.stdout, done.stderr


@pytest.mark.parametrize("stage", ["vocab", "vocap", "encode", "mix", "stats"])
@pytest.mark.parametrize("tries", [2, 3, 4])
def test_stages_that_continue_are_tried_again_as_often_as_is_set(tmp_path: Path, stage: str, tries: int) -> None:
    program(tmp_path, "scontrol", f'echo "$@" >{tmp_path}/told')
    tasks, place = tmp_path / "out/tasks", {"SLURM_RESTART_COUNT": str(tries), "XLME_REQUEUES": "3"}
    ends = f"touch {tmp_path}/ran; mkdir -p {tasks}; touch {tasks}/$$.json; exit 1"
    done = script(tmp_path, "stage.sh", ends, stage, f"--out={tmp_path}/out", **place)
    assert (tmp_path / "ran").exists() == (tries < 4), "the last of three more tries runs, too"
    assert (tmp_path / "told").exists() == (tries < 3 and stage != "stats"), done.stderr
    if (tmp_path / "told").exists():
        assert (tmp_path / "told").read_text() == "requeue 7\n"


def test_each_try_meets_at_a_port_of_its_own(tmp_path: Path) -> None:
    """At the next one where another program listens, and where the user says."""

    def port(**variables: str) -> int:
        place = {"XLME_OUT": str(tmp_path / "run"), "XLME_DATA": str(tmp_path)} | variables
        return int(script(tmp_path, "pretrain_base.sh", "echo $MASTER_PORT; exit 2", **place).stdout)

    first = port(SLURM_JOB_ID="1234")
    assert first == 10_000 + 12_340 and port(SLURM_JOB_ID="1234", SLURM_RESTART_COUNT="2") == first + 2 * 1009
    assert port(SLURM_JOB_ID="3234") == first, "below 30,000, where systems begin to hand out their own"
    with socket.create_server(("", first)):
        assert port(SLURM_JOB_ID="1234") == first + 1
    assert port(SLURM_JOB_ID="1234", MASTER_PORT="7") == 7
    assert port(SLURM_JOB_ID="1899", SLURM_RESTART_COUNT="1") == 29_999
    with socket.create_server(("", 29_999)):
        assert port(SLURM_JOB_ID="1899", SLURM_RESTART_COUNT="1") == 10_000


@pytest.mark.parametrize(
    ("size", "engines"), [("base", [""]), ("large", ["", "zero2", "pipe"]), ("xl", ["", "zero3", "pipe"])]
)
def test_a_script_trains_its_recipe(tmp_path: Path, size: str, engines: list[str]) -> None:
    for engine in engines:
        place = {"XLME_OUT": str(tmp_path / "run"), "XLME_DATA": f"{tmp_path}/one:{tmp_path}/two"}
        place |= {"XLME_ENGINE": engine} if engine else {}
        words = script(tmp_path, f"pretrain_{size}.sh", 'printf "%s\\n" "$@"; exit 2', "--seed", "5", **place).stdout
        chosen = f"{size}_{engine}" if engine else size
        assert words.split()[words.split().index("xlme_ds.pretrain") :] == [
            "xlme_ds.pretrain", "--recipe", chosen, "--data", f"{tmp_path}/one", f"{tmp_path}/two",
            "--out", f"{tmp_path}/run", "--seed", "5",
        ]  # fmt: skip
        assert chosen in RECIPES
        place["XLME_BRANCH"] = "runs/first@30"
        words = script(tmp_path, f"pretrain_{size}.sh", 'printf "%s\n" "$@"; exit 2', **place).stdout
        assert words.split("xlme_ds.pretrain\n")[1].startswith("--branch\nruns/first@30\n--data\n"), "and no recipe"


def test_without_held_out_text_all_is_trained_on(tmp_path: Path) -> None:
    """Job numbers are those of a cluster of several, which sbatch names after them."""
    program(tmp_path, "sbatch", f'echo "$@" >>{tmp_path}/jobs; echo "$(wc -l <{tmp_path}/jobs);big"')
    place = {"XLME_WORK": str(tmp_path), "XLME_TEXT": "--mono mono", "XLME_VOCAB": "--model m", "XLME_MIX": "--alpha 1"}
    done = script(tmp_path, "prep.sh", "", **place, XLME_HELDOUT_SHARE="")
    assert (done.returncode, done.stdout) == (0, "4\n"), done.stderr
    jobs = (tmp_path / "jobs").read_text().splitlines()
    vocab, encoded, mixed = (f"{tmp_path}/{name}" for name in ("vocab", "encoded", "mixed"))
    assert [job.partition("slurm/stage.sh ")[2] for job in jobs] == [
        f"vocab --model m --out {vocab}",
        f"encode --mono mono --vocab {vocab} --out {encoded}",
        f"mix --encoded {encoded} --vocab {vocab} --out {mixed} --alpha 1",
        f"verify --data {mixed}",
    ]
    assert [re.findall(r"--dependency=(\S+)", job) for job in jobs] == [[], *([f"afterok:{n}"] for n in (1, 2, 3))]
    assert ["--nodes=1 " in job for job in jobs] == [True, False, False, False]


def test_held_out_text_that_is_named_is_not_left_out(tmp_path: Path) -> None:
    data, heldout = tmp_path / "mixed", tmp_path / "heldout"

    def read(*flags: str, **variables: str) -> list[str]:
        place = {"XLME_DATA": str(data), "XLME_OUT": str(tmp_path / "run")} | variables
        words = script(tmp_path, "pretrain_base.sh", 'printf "%s\\n" "$@"; exit 2', *flags, **place).stdout.splitlines()
        assert "xlme_ds.pretrain" in words
        return [words[n + 1] for n, word in enumerate(words) if word == "--heldout"]

    assert read() == [] and read(XLME_HELDOUT=f"{tmp_path}/heldot") == [f"{tmp_path}/heldot"]
    heldout.mkdir()
    assert read() == [str(heldout)] and read(XLME_HELDOUT="") == []
    assert read("--heldout", "other") == read("--heldout", "other", XLME_HELDOUT="mine") == ["other"]
    assert read(XLME_DATA=f"{data}:{tmp_path}/later/mixed") == [str(heldout)], "beside the first phase's folder"


@pytest.mark.parametrize("name", ["stage.sh", "pretrain_base.sh", "finetune.sh"])
def test_a_rank_that_ends_with_2_is_no_fault_of_the_others(tmp_path: Path, name: str) -> None:
    """srun kills them then, and its own exit code is theirs; something new was saved, and yet no other try follows."""
    out = tmp_path / "out"
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/scontrol").write_text(f"#!/bin/bash\necho $@ >{tmp_path}/requeued\n")
    (tmp_path / "bin/scontrol").chmod(0o755)
    place = dict(XLME_OUT=str(out), XLME_DATA=str(tmp_path), XLME_MODEL="m", SLURM_ARRAY_TASK_ID="0",
                 SLURM_ARRAY_JOB_ID="7", XLME_SUBMITTED="1", XLME_PYTHON=f"{tmp_path}/bin/python")  # fmt: skip
    (tmp_path / "bin/python").write_text(f"#!/bin/bash\necho {out}/none\n")  # --list
    (tmp_path / "bin/python").chmod(0o755)
    words = ["encode", "--out", str(out)] if name == "stage.sh" else []
    seed = out / "pos-en/seed1"
    saves = f"mkdir -p {out}/tasks {seed}; date +%N | tee {out}/latest.json {seed}/latest.json >{out}/tasks/$$.json;"
    saves += "echo progress;"
    end = "echo 'srun: error: n1: task 0: Exited with exit code {}' >&2; printf 'no end of line' >&2; exit 143"
    done = script(tmp_path, name, saves + end.format(2), *words, **place)
    assert done.returncode == 2 and not (tmp_path / "requeued").exists(), done.stderr
    assert "progress\n" in done.stdout and "task 0: Exited with exit code 2\nno end of line" in done.stderr
    done = script(tmp_path, name, saves + end.format(1), *words, **place)
    assert done.returncode == 143 and (tmp_path / "requeued").read_text() == "requeue 7_0\n", done.stderr


def test_an_array_without_its_variables_trains_nothing(tmp_path: Path) -> None:
    done = script(tmp_path, "finetune.sh", f"touch {tmp_path}/ran", SLURM_ARRAY_TASK_ID="0", SLURM_ARRAY_JOB_ID="7")
    assert done.returncode == 2 and not (tmp_path / "ran").exists()
    assert "the variables of its submission did not reach this job" in done.stderr


def test_held_out_rows_have_every_language_alike(tmp_path: Path) -> None:
    program(tmp_path, "sbatch", f'echo "$@" >>{tmp_path}/jobs\nwc -l <{tmp_path}/jobs')
    rows = "--row-tokens 32 --mono-rows 100 --para-rows=100"
    place = {"XLME_MIX": f"--share sw=0.02 en-sw=0.2 {rows} --max-repeats 8 --max-repeats=8 --share=xh=0.1 ta=0.1"}
    place |= {"XLME_WORK": str(tmp_path), "XLME_TEXT": "--mono mono", "XLME_VOCAB": "--model m"}
    done = script(tmp_path, "prep.sh", "", **place)
    mixes = [line.partition(" mix ")[2] for line in (tmp_path / "jobs").read_text().splitlines() if " mix " in line]
    assert done.returncode == 0 and len(mixes) == 2, done.stderr
    assert mixes[0].endswith("--row-tokens 32 --mono-rows 512 --para-rows=512 --alpha 0")
    assert mixes[1].endswith(place["XLME_MIX"])

    (tmp_path / "jobs").unlink()
    place["XLME_MIX"] = "--row_tokens 32 --mono_rows 100 --para_rows=100 --max_repeats 8"
    for words in (["-dafterok:99"], ["--dependency", "afterok:99"], ["--dependency=afterok:99"]):
        (tmp_path / "jobs").unlink(missing_ok=True)
        assert script(tmp_path, "prep.sh", "", *words, "--account", "a", **place).returncode == 0
    assert "--dependency needs a value" in script(tmp_path, "prep.sh", "", "--dependency", **place).stderr
    jobs = (tmp_path / "jobs").read_text().splitlines()
    assert [re.findall(r"--dependency=(\S+)", job) for job in jobs[:3]] == [
        ["afterok:99"],
        ["afterok:1"],
        ["afterok:2"],
    ]
    assert all("--account a" in job for job in jobs)
    assert jobs[2].endswith("--row-tokens 32 --mono-rows 512 --para-rows=512 --alpha 0")


def test_a_run_that_was_made_longer_is_not_finished_by_its_older_end(tmp_path: Path) -> None:
    """A signal before its first step leaves what the run wrote when it ended; a run that ends writes it anew."""
    done, place = tmp_path / "run/finished.json", {"XLME_DATA": str(tmp_path), "XLME_OUT": str(tmp_path / "run")}
    done.parent.mkdir()
    done.write_text('{"steps": 4}')
    said = script(tmp_path, "pretrain_base.sh", "exit 0", "--train.steps", "8", **place)
    assert said.returncode == 2 and "not finished (exit code 0), and this try saved nothing new" in said.stderr
    ends = f"cp {done} {done}.new; mv {done}.new {done}"
    assert script(tmp_path, "pretrain_base.sh", ends, "--train.steps", "4", **place).returncode == 0


def test_both_parts_of_the_text_have_the_share_that_was_set(tmp_path: Path) -> None:
    program(tmp_path, "sbatch", f'echo "$@" >>{tmp_path}/jobs\nwc -l <{tmp_path}/jobs')
    place = {"XLME_WORK": str(tmp_path), "XLME_TEXT": "--mono 'my mono'", "XLME_HELDOUT_SHARE": "0.25"}
    assert script(tmp_path, "prep.sh", "", **place).returncode == 0
    encodes = [line for line in (tmp_path / "jobs").read_text().splitlines() if "slurm/stage.sh encode" in line]
    flags = f"--mono my mono --vocab {tmp_path}/vocab --out {tmp_path}"
    assert [line.partition(" encode ")[2] for line in encodes] == [
        f"{flags}/encoded_heldout --split heldout --heldout-share 0.25",
        f"{flags}/encoded --split train --heldout-share 0.25",
    ]


def test_an_array_hands_on_all_that_was_set(tmp_path: Path) -> None:
    """Every task, kind of training and seed once; what sbatch hands on is what the job reads."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/sbatch").write_text(
        f'#!/bin/bash\nenv | grep ^XLME_ >{tmp_path}/env; echo "$@" >{tmp_path}/submitted\n'
    )
    (tmp_path / "bin/sbatch").chmod(0o755)
    place = dict(XLME_MODEL="runs/m", XLME_DATA="'my data' more", XLME_OUT=str(tmp_path / "out"), XLME_TASKS="pos xnli",
                 XLME_TRAIN="en all", XLME_SEEDS="3 4", XLME_SETTINGS="--grid")  # fmt: skip
    assert script(tmp_path, "finetune.sh", "", "--account", "a", **place).returncode == 0
    assert (tmp_path / "submitted").read_text().split() == ["--array=0-7", "--account", "a", "slurm/finetune.sh"]
    handed_on = dict(line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines())
    (tmp_path / "bin/python").write_text(f'#!/bin/bash\n[ "${{!#}}" = --list ] || printf "%s|" "$@" >>{tmp_path}/runs\n'
                                         f'[ "${{!#}}" = --list ] || echo >>{tmp_path}/runs\n')  # fmt: skip
    (tmp_path / "bin/python").chmod(0o755)
    for number in range(8):
        own = handed_on | {"XLME_PYTHON": f"{tmp_path}/bin/python", "SLURM_ARRAY_TASK_ID": str(number)}
        done = script(tmp_path, "finetune.sh", 'while [[ $1 == --* ]]; do shift; done; exec "$@"', **own)
        assert done.returncode == 0, done.stderr
    asked = [(task, train, seed) for task in ("pos", "xnli") for train in ("en", "all") for seed in ("3", "4")]
    assert (tmp_path / "runs").read_text().splitlines() == [
        f"-m|xlme_ds.finetune|--task|{task}|--model|runs/m|--data|my data|more|"
        f"--out|{tmp_path}/out/{task}-{train}/seed{seed}|--seeds|{seed}|--tuning.train-languages|{train}|--grid|"
        for task, train, seed in asked
    ]


@pytest.mark.parametrize("without_scores", [(), ("a",), ("b",)])
def test_an_array_job_has_ended_when_all_its_runs_have_scores(tmp_path: Path, without_scores: tuple[str, ...]) -> None:
    """Of two settings of --grid; srun's exit code is 0, as after a signal."""
    program(tmp_path, "python", f"printf '%s\\n' {tmp_path}/a {tmp_path}/b  # --list")
    for run in {"a", "b"} - {*without_scores}:
        (tmp_path / run).mkdir()
        (tmp_path / run / "scores.json").touch()
    place = dict(XLME_OUT=str(tmp_path / "out"), XLME_MODEL="m", XLME_PYTHON=f"{tmp_path}/bin/python",
                 SLURM_ARRAY_TASK_ID="0", SLURM_ARRAY_JOB_ID="7", XLME_SUBMITTED="1")  # fmt: skip
    done = script(tmp_path, "finetune.sh", "exit 0", **place)
    assert done.returncode == (2 if without_scores else 0)
    assert ("not finished (exit code 0), and this try saved nothing new" in done.stderr) == bool(without_scores)


def test_a_try_waits_for_the_lock_that_a_lost_node_held(tmp_path: Path) -> None:
    """For half a second here; the first try of a job does not wait, or else until the lock is given up."""
    (tmp_path / "run").mkdir()
    for tries, waits, seconds in (({"SLURM_RESTART_COUNT": "1"}, True, 0.5), ({}, False, 60)):
        held = ["flock", f"{tmp_path}/run/.lock", "bash", "-c", f"echo locked; read -t {seconds}; date +%s%N"]
        with subprocess.Popen(held, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
            assert holder.stdout is not None and holder.stdout.readline() == "locked\n"
            place = {"XLME_DATA": str(tmp_path), "XLME_OUT": str(tmp_path / "run")} | tries
            began = int(script(tmp_path, "pretrain_base.sh", "date +%s%N; exit 2", **place).stdout)
            assert (began > int(holder.communicate("\n")[0])) == waits


def test_settings_of_preparation_are_those_of_its_jobs(tmp_path: Path) -> None:
    """The rows of held-out text, and the defaults of what was not set."""
    program(tmp_path, "sbatch", f'echo "$@" >>{tmp_path}/jobs\nwc -l <{tmp_path}/jobs')
    assert script(tmp_path, "prep.sh", "", XLME_HELDOUT_ROWS="48").returncode == 0
    jobs = (tmp_path / "jobs").read_text().splitlines()
    rows = "--row-tokens 512{1} --mono-rows {0} --para-rows {0}"
    text = "--mono mono --para para --vocab ./vocab"
    stages = [job.partition("slurm/stage.sh ")[2] for job in jobs]
    for name, *flags in map(str.split, stages):
        stage = importlib.import_module(f"data_prep.{STAGES[name][0]}")
        assert sorted(checked_arguments(getattr(stage, f"{name.capitalize()}Config"), flags)) == sorted(flags)
    assert stages == [
        "vocab --model sentencepiece.bpe.model --out ./vocab",
        f"encode {text} --out ./encoded_heldout --split heldout --heldout-share 0.001",
        f"mix --encoded ./encoded_heldout --vocab ./vocab --out ./heldout {rows.format(48, '')} --alpha 0",
        "verify --data ./heldout",
        f"encode {text} --out ./encoded --split train --heldout-share 0.001",
        f"mix --encoded ./encoded --vocab ./vocab --out ./mixed {rows.format(256_000_000, ' --alpha 0.7')}",
        "verify --data ./mixed",
    ]
    assert all("--kill-on-invalid-dep=yes" in job for job in jobs)
    assert [re.findall(r"--job-name=(\S+)", job) for job in jobs[:2]] == [["xlme-vocab"], ["xlme-encode"]]


def test_a_stage_runs_on_all_ranks_with_its_words(tmp_path: Path) -> None:
    """Words with spaces stay whole, and so does a Python of several words."""
    place = {"XLME_MPI_TYPE": "pmix", "XLME_PYTHON": "apptainer exec 'my image' python"}
    done = script(tmp_path, "stage.sh", 'printf "%s\\n" "$@"', "encode", "--mono", "my text", "--out", "o", **place)
    assert (done.returncode, done.stdout.splitlines()) == (0, [
        "--mpi=pmix", "--kill-on-bad-exit=1", "--wait=0", "apptainer", "exec", "my image", "python",
        "-m", "data_prep", "encode", "--mono", "my text", "--out", "o",
    ])  # fmt: skip


@pytest.mark.parametrize(("stage", "requeued"), [("mix", True), ("stats", False)])
def test_a_stage_that_the_time_limit_will_end(tmp_path: Path, stage: str, requeued: bool) -> None:
    """Slurm's signal before the limit reaches the script; the step goes on, and the script waits for it."""
    program(tmp_path, "scontrol", f'echo "$@" >>{tmp_path}/told')
    find = "p=$$; while q=$(ps -o ppid= -p $p) && grep -q stage.sh /proc/${q// /}/cmdline; do p=${q// /}; done"
    step = f"mkdir -p {tmp_path}/out; touch {tmp_path}/out/manifest.json; {find}; kill -USR1 $p; sleep 0.5; exit 3"
    done = script(tmp_path, "stage.sh", step, stage, "--out", str(tmp_path / "out"))
    assert done.returncode == 3, "of the step"
    assert (tmp_path / "told").exists() == requeued
    if requeued:
        assert (tmp_path / "told").read_text() == "requeue 7\n", "once"
    said = "stats does not continue in another try: if the time limit ends it, raise --time"
    assert (said in done.stderr) != requeued


def test_no_rows_of_a_task_are_none_in_held_out_text_too(tmp_path: Path) -> None:
    program(tmp_path, "sbatch", f'echo "$@" >>{tmp_path}/jobs\nwc -l <{tmp_path}/jobs')
    for rows in ("--mono-rows 100 --para-rows 0", "--mono-rows=100 --para-rows=0"):
        (tmp_path / "jobs").unlink(missing_ok=True)
        place = {"XLME_MIX": rows, "XLME_WORK": str(tmp_path), "XLME_TEXT": "--mono mono", "XLME_VOCAB": "--model m"}
        assert script(tmp_path, "prep.sh", "", **place).returncode == 0
        mixes = [line.partition(" mix ")[2] for line in (tmp_path / "jobs").read_text().splitlines() if " mix " in line]
        assert mixes[0].endswith(f"{rows.replace('100', '512')} --alpha 0") and mixes[1].endswith(rows)


def test_a_dry_run_is_no_try(tmp_path: Path) -> None:
    for word in ("--dry-run", "--dry_run"):
        done = script(tmp_path, "pretrain_base.sh", "exit 0", word, XLME_OUT=str(tmp_path / "run"))
        assert done.returncode == 0 and "saved nothing" not in done.stderr
    done = script(tmp_path, "pretrain_base.sh", "exit 2", "--dry-run", XLME_OUT=str(tmp_path / "run"))
    assert done.returncode == 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slurm") / "my runs"
    folder.mkdir()
    return folder


@pytest.fixture(scope="module")
def prepared(cluster: Cluster, folder: Path) -> Job:
    """The last job of data preparation, which may still have to run."""
    text = write_corpus(folder / "corpus")
    variables = {
        "XLME_WORK": folder,
        "XLME_TEXT": text,
        "XLME_VOCAB": f"{text} --size 160",
        "XLME_MIX": "--row-tokens 32 --alpha 0.7 --mono-rows 100 --para-rows 100",
        "XLME_HELDOUT_SHARE": 0.2,
        "XLME_HELDOUT_ROWS": 8,
    }
    command = ["bash", "slurm/prep.sh", "--output", str(cluster.logs / "%j.out"), *SMALL]
    return cluster.job(slurm(*command, **variables))


@pytest.fixture(scope="module")
def mixed(folder: Path, prepared: Job) -> Path:
    """The data, when they are ready."""
    prepared.wait("COMPLETED")
    return folder / "mixed"


@pytest.fixture(scope="module")
def disturbed(cluster: Cluster, folder: Path, prepared: Job) -> Job:
    """XL under ZeRO-3, submitted before its data exist; told to stop, then a node loses its power."""
    out = folder / "disturbed"
    after = [f"--dependency=afterok:{prepared.number}"]
    job = cluster.submit(
        "pretrain_xl.sh", *words(), options=after, XLME_ENGINE="zero3", XLME_DATA=folder / "mixed", XLME_OUT=out
    )
    wait_for_step(job, out, 5)
    slurm("scancel", "--signal=USR1", str(job.number))  # as --signal does before the time limit
    job.wait_for_restart(1)
    wait_for_step(job, out, step(out) + 7)
    cluster.fail("n2")
    job.wait_for_restart(2)
    cluster.recover("n2")
    job.wait("COMPLETED")
    return job


@pytest.fixture(scope="module")
def alone(cluster: Cluster, folder: Path, disturbed: Job) -> Path:
    """The same run under another script, left alone."""
    out = folder / "alone"
    job = cluster.submit(
        "pretrain_large.sh", *words(), XLME_RECIPE="xl_zero3", XLME_DATA=folder / "mixed", XLME_OUT=out
    )
    job.wait("COMPLETED")
    return out


def test_stages_run_over_mpi_one_after_the_other(cluster: Cluster, disturbed: Job, prepared: Job) -> None:
    said = [cluster.job(str(number)).said() for number in range(prepared.number - 6, prepared.number + 1)]
    stages = ("vocab", "encoded_heldout", "heldout", "heldout", "encoded", "mixed", "mixed")
    for stage, text in zip(stages, said, strict=True):
        assert stage in text, said


def test_a_run_survives_a_signal_and_the_loss_of_a_node(disturbed: Job, folder: Path, alone: Path) -> None:
    said = disturbed.said()
    assert disturbed.field("Restarts") == "2"
    assert said.count("starting at step 0 ") == 1 and said.count("resuming after step ") == 2, said
    assert "requeueing job" in said and (folder / "disturbed/report.html").exists()
    assert (folder / "disturbed/heldout.jsonl").exists(), "the job passes --heldout"
    ours, theirs = (load_file(out / "model/model.safetensors") for out in (folder / "disturbed", alone))
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert ours[name].tobytes() == theirs[name].tobytes(), name
    assert every_row_was_read_once(folder / "disturbed", folder / "mixed")


def test_every_step_is_logged_once(disturbed: Job, folder: Path, alone: Path) -> None:
    ours, theirs = ((out / "metrics.jsonl").read_text().splitlines() for out in (folder / "disturbed", alone))
    assert [json.loads(line)["step"] for line in ours] == list(range(1, STEPS + 1))
    assert [json.loads(line)["loss"] for line in ours] == [json.loads(line)["loss"] for line in theirs]


def test_a_dead_rank_fewer_nodes_and_scancel(cluster: Cluster, folder: Path, disturbed: Job) -> None:
    """A fault is tried again; without a lost node the run goes on as a smaller job, and saves when that is
    cancelled."""
    out, settings = folder / "killed", words(train__steps=1000)
    job = cluster.submit("pretrain_base.sh", *settings, XLME_DATA=folder / "mixed", XLME_OUT=out)
    wait_for_step(job, out, 8)
    wait_for_checkpoint(job, out)
    os.kill(processes(out)[-1], signal.SIGKILL)
    job.wait_for_restart(1)
    first = wait_for_checkpoint(job, out)
    wait_for_step(job, out, step(out) + 7)
    wait_for_checkpoint(job, out, after=first)
    cluster.fail("n2")
    try:
        job.wait_for_restart(2)
        slurm("scancel", str(job.number))
        smaller = cluster.submit(
            "pretrain_base.sh", *settings, options=["--nodes=1"], XLME_DATA=folder / "mixed", XLME_OUT=out
        )
        wait_for_step(smaller, out, step(out) + 7)
        slurm("scancel", str(smaller.number))
        smaller.wait("CANCELLED")
        wait_until(lambda: not processes(out), "the end of its processes")
    finally:
        cluster.recover("n2")
    said = job.said() + smaller.said()
    assert re.search(r"not finished \(exit code [1-9]\d*\), requeueing", said), said
    starts = re.findall(r"(?:starting at|resuming after) step (\d+) of 1000, (\d) process(?:es)?,", said)
    assert [processes for _, processes in starts] == ["2", "2", "1"], said
    assert 6 <= int(starts[1][0]) < int(starts[2][0]), said
    saved = json.loads((out / "checkpoints/latest.json").read_text())["checkpoint"]
    assert saved == f"step_{step(out):08d}", "scancel sends SIGTERM: the last step is saved"
    assert every_row_was_read_once(out, folder / "mixed"), "on two nodes and then on one"


def test_a_branch_that_reads_two_folders(cluster: Cluster, folder: Path, alone: Path) -> None:
    out, data = folder / "branch", folder / "mixed"
    changed = ["--schedule.name", "wsd", "--schedule.decay-steps", "4", "--data.phase-steps", str(STEPS + 2)]
    places = {"XLME_BRANCH": f"{alone}@{STEPS}", "XLME_DATA": f"{data}:{data}", "XLME_OUT": out}
    said = cluster.submit("pretrain_large.sh", *changed, **places).wait("COMPLETED")
    assert json.loads((out / "finished.json").read_text()) == {"format": 1, "steps": STEPS + 4}
    assert f"phases: from step 0 {data}, 15% predicted; from step {STEPS + 2} {data}" in said, said


def test_a_pipeline_across_nodes(cluster: Cluster, folder: Path, disturbed: Job) -> None:
    out = folder / "pipe"
    changed = [*words(train__steps=4), "--engine.pipeline-stages", "2"]
    job = cluster.submit("pretrain_xl.sh", *changed, XLME_ENGINE="pipe", XLME_DATA=folder / "mixed", XLME_OUT=out)
    job.wait("COMPLETED")
    assert json.loads((out / "finished.json").read_text()) == {"format": 1, "steps": 4}


def test_a_users_mistake_is_not_tried_again(cluster: Cluster, folder: Path, disturbed: Job) -> None:
    job = cluster.submit(
        "pretrain_base.sh", "--train.stepz", 3, XLME_DATA=folder / "mixed", XLME_OUT=folder / "mistake"
    )
    said = job.wait("FAILED")
    assert job.field("Restarts") == "0" and "train.steps" in said, said
    after = [f"--dependency=afterok:{job.number}"]
    waiting = cluster.submit("pretrain_base.sh", options=after, XLME_DATA=folder / "mixed", XLME_OUT=folder / "mistake")
    waiting.wait("CANCELLED")  # it does not stay in the queue for what cannot come


LISTEN = "import socket, sys; s = socket.create_server(('', int(sys.argv[1]))); "
LISTEN += "print('listening', flush=True); sys.stdin.read()"


def test_a_port_in_use_and_a_try_without_a_step(cluster: Cluster, folder: Path, mixed: Path) -> None:
    """Another program has the port; the first try saves and is requeued, the second is told to stop before it took a
    step."""
    out = folder / "fruitless"
    places = {"XLME_DATA": mixed, "XLME_OUT": out}
    job = cluster.submit(
        "pretrain_base.sh", *words(train__steps=1000), options=["--hold", "--exclusive=user"], **places
    )
    port = str(10_000 + 10 * job.number % 20_000)  # that of its first step, were it free
    listen = ["srun", "--mpi=none", "--nodelist=n1", "--ntasks=1", "--mem=100", sys.executable, "-c", LISTEN, port]
    env = environment(SLURM_CONF=SLURM_CONF)
    with subprocess.Popen(
        listen, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as listening:
        assert listening.stdout is not None and listening.stdout.readline() == "listening\n"
        slurm("scontrol", "release", str(job.number))
        wait_for_step(job, out, 3)
        listening.communicate("")
    slurm("scancel", "--signal=USR1", str(job.number))
    job.wait_for_restart(1)
    done = step(out)
    wait_until(
        lambda: len(ranks := processes(out)) == 2 and all(catches(rank, signal.SIGUSR1) for rank in ranks), "two ranks"
    )
    slurm("scancel", "--signal=USR1", str(job.number))
    said = job.wait("FAILED")
    assert job.field("Restarts") == "1" and job.field("ExitCode") == "2:0", said
    assert (
        "stopped before the next step" in said and "this try saved nothing new, so the job is not requeued" in said
    ), said
    assert done == step(out) > 0


def test_what_slurm_itself_requeues_is_bounded(cluster: Cluster, folder: Path, mixed: Path) -> None:
    """As after the loss of a node or preemption: the script never comes to its end, and so never counts."""
    places = {"XLME_DATA": mixed, "XLME_OUT": folder / "lost"}
    job = cluster.submit("pretrain_base.sh", *words(), XLME_REQUEUES=0, **places)
    wait_until(lambda: job.field("JobState") == "RUNNING", "the start")
    slurm("scontrol", "requeue", str(job.number))
    said = job.wait("FAILED")
    assert job.field("Restarts") == "1" and "requeued more often than XLME_REQUEUES=0" in said, said


def test_a_signal_to_a_stage(cluster: Cluster, folder: Path, mixed: Path, tmp_path: Path) -> None:
    """It ends neither vocab nor verify; encode is requeued once it has finished something, and not before."""
    (tmp_path / "my text").mkdir()
    rng, line = random.Random(1), "kalo miter un velosa dor inka lo miun pe sador "
    (tmp_path / "my text/en.txt").write_text(line)
    (tmp_path / "my text/de.txt").write_text("\n".join(line * rng.randint(1, 9) + str(n) for n in range(30_000)))
    out = tmp_path / "encoded text"
    job = cluster.submit("stage.sh", "verify", "--data", mixed)
    wait_until(lambda: processes(mixed, "data_prep"), "verify")
    slurm("scancel", "--batch", "--signal=USR1", str(job.number))
    assert "verify does not continue in another try" in job.wait("COMPLETED")
    job = cluster.submit(
        "stage.sh", "encode", "--mono", tmp_path / "my text", "--vocab", folder / "vocab", "--out", out
    )
    wait_until(lambda: processes(out, "data_prep"), "encode")
    slurm("scancel", "--batch", "--signal=USR1", str(job.number))
    wait_until(lambda: "saved nothing new" in job.said(), "the signal")
    assert job.field("Restarts") == "0"
    wait_until(lambda: list(out.glob("**/tasks/en*[!n].json")), "the end of a task")
    for process in processes(out, "data_prep"):
        os.kill(process, signal.SIGSTOP)  # as if the rest took long
    slurm("scancel", "--batch", "--signal=USR1", str(job.number))
    job.wait_for_restart(1)
    said = job.wait("COMPLETED")
    assert job.field("Restarts") == "1" and "requeueing job" in said, said


def test_ranks_that_do_not_know_of_each_other_are_refused(cluster: Cluster, folder: Path, disturbed: Job) -> None:
    command = ["srun", "--mpi=none", *SMALL, "python", "-m", "data_prep", "verify", "--data", str(folder / "mixed")]
    done = subprocess.run(command, cwd=ROOT, env=environment(SLURM_CONF=SLURM_CONF), capture_output=True, text=True)
    assert done.returncode != 0
    assert "the launcher started 2 processes, but MPI does not connect them" in done.stderr


# Holes of many sizes between letters: whatever is read past the end of a block is text, as now and then by chance.
LETTERS = """
import ctypes, sys
from data_prep.parallel import communicator
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
for size in range(200, 1000, 16):
    blocks = [(libc.malloc(bytes), bytes) for _ in range(100) for bytes in (4000, size)]
    for block, bytes in blocks:
        ctypes.memset(block, 65, bytes)
    for block, _ in blocks[1::2]:
        libc.free(block)
# One write, which the other rank's cannot split as it could the two of `print`.
sys.stdout.write(f"{communicator().allgather(communicator().Get_rank())}\\n")
"""


def test_ranks_find_each_other_whatever_their_memory_holds(cluster: Cluster) -> None:
    shown = slurm("srun", "--mpi=pmi2", "--time=5", *SMALL, sys.executable, "-c", LETTERS)
    assert shown == "[0, 1]\n" * 2


def test_fine_tuning_as_an_array(cluster: Cluster, tmp_path: Path) -> None:
    """Two seeds of a task, one of them told to leave on the way and requeued: both end with scores. A third may not be
    requeued."""
    base, data, out = write_base(tmp_path / "base"), write_entities(tmp_path / "panx"), tmp_path / "out"
    settings = "--tuning.learning-rate 3e-3 --engine.precision fp32 --train.save-every 5 --train.log-every 1"
    variables = {"XLME_MODEL": base, "XLME_DATA": data, "XLME_OUT": out, "XLME_TASKS": "ner", "XLME_SEEDS": "1 2"}
    variables |= {"XLME_SETTINGS": f"{settings} --tuning.epochs 6"}
    options = [*SMALL, "--nodes=1", "--output", str(cluster.logs / "%A_%a.out")]
    number = slurm("bash", "slurm/finetune.sh", *options, **variables).split()[-1]
    # far more steps than it takes until it is told to leave
    once = variables | {"XLME_SEEDS": "3", "XLME_REQUEUES": "0", "XLME_SETTINGS": f"{settings} --tuning.epochs 500"}
    bounded = slurm("bash", "slurm/finetune.sh", *options, **once).split()[-1]
    wait_until(lambda: step(out / "ner-en" / "seed1") >= 3, "step 3 of the first seed")
    slurm("scancel", "--signal=USR1", f"{number}_0")
    wait_until(lambda: step(out / "ner-en" / "seed3") >= 3, "step 3 of the third seed")
    slurm("scancel", "--signal=USR1", f"{bounded}_0")
    folders = [out / "ner-en" / f"seed{seed}" for seed in (1, 2)]
    wait_until(
        lambda: not slurm("squeue", "--noheader", "--jobs", f"{number},{bounded}").strip(), "the end of the arrays"
    )
    assert "requeued XLME_REQUEUES=0 times" in (cluster.logs / f"{bounded}_0.out").read_text()
    assert "requeueing" in (cluster.logs / f"{number}_0.out").read_text()
    for seed, folder in zip((1, 2), folders, strict=True):
        assert json.loads((folder / "scores.json").read_text())["seed"] == seed, (
            cluster.logs / f"{number}_{seed - 1}.out"
        ).read_text()
