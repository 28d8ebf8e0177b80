"""The commands around a run: the launcher, the benchmarks."""

import json
import re
import shutil
import subprocess
import sys
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from tests.launch import ROOT, environment, python
from tests.rows import train_vocabulary, write_data
from xlme_ds import job_scripts
from xlme_ds.benchmarks import benchmarks
from xlme_ds.data.shards import RowStore
from xlme_ds.evaluate.report_data import _shown_records
from xlme_ds.launch import command_line


def xlme(*words: str, **variables: object) -> "subprocess.CompletedProcess[str]":
    return python("-m", "xlme_ds", *words, **variables)


def real(*words: str) -> "subprocess.CompletedProcess[str]":
    """A command that becomes another program."""
    command = [sys.executable, "-m", "xlme_ds", *words]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)


def test_the_launchers_command_line(tmp_path: Path) -> None:
    hosts = str(tmp_path / "hosts")
    Path(hosts).write_text("localhost slots=8\n")
    words = ["--gpus", "8", "--hostfile", hosts, "pretrain", "--recipe", "base", "--include", "x"]
    launcher = command_line(words)
    assert launcher[:3] == ["deepspeed", "--num_gpus", "8"]
    module = launcher.index("--module")
    assert launcher[module - 2 : module] == ["--hostfile", hosts]
    assert launcher[module + 1 :] == ["xlme_ds.pretrain", "--recipe", "base", "--include", "x"]
    assert "--num_gpus" not in command_line(["finetune"])
    one = command_line(["--gpus", "1", "--hostfile", hosts, "--master_port", "5", "pretrain"])
    ports = [port for flag, port in pairwise(one) if flag == "--master_port"]
    assert one[0] == "deepspeed" and ports[1:] == ["5"], "DeepSpeed takes the last, by default a free one"
    assert 1024 <= int(ports[0]) < 65536
    assert command_line(["--gpus=1", "finetune", "--grid"])[-4:] == ["ignore", "-m", "xlme_ds.finetune", "--grid"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--gpus 8", "only pretrain and finetune can be launched: name one, and its flags after it"),
        ("pretrain --gpus 2 --recipe base", "--gpus goes before pretrain: xlme launch --gpus 2 pretrain --recipe base"),
        ("--nproc_per_node 2 pretrain", "there is no --nproc_per_node: did you mean --gpus?"),
        ("--gpus 2 evaluate", "only pretrain and finetune can be launched: name one, and its flags after it"),
        ("--gpu 2 pretrain", "there is no --gpu: did you mean --gpus?"),
        ("--gpu=2 finetune", "there is no --gpu: did you mean --gpus?"),
        ("--gpus 0 pretrain", "--gpus 0: it must be a number of processes, at least 1"),
        ("--gpus eight pretrain", "--gpus eight: it must be a number of processes, at least 1"),
        ("--hostfile no-hosts pretrain", "--hostfile no-hosts names no file: leave it out to use this machine alone"),
        ("-H no-hosts --gpus 2 finetune", "--hostfile no-hosts names no file: leave it out to use this machine alone"),
        ("--host no-hosts finetune", "--hostfile no-hosts names no file: leave it out to use this machine alone"),
        ("--gpus 2 xlme pretrain", "unexpected word xlme before pretrain: leave it out"),
        ("--num_gpus 0 pretrain", "--num_gpus 0: it must be a number of processes, at least 1"),
        (
            "--gpus 2 --hostfile pretrain",
            "an option before pretrain has no value: see `xlme launch --help` and `deepspeed --help`",
        ),
        (
            "-n 2 pretrain",
            "unrecognized arguments: -n before pretrain, which takes its own after its name: see `xlme launch --help` "
            "and `deepspeed --help`",
        ),
        ("--no_ssh pretrain", "several machines need --hostfile FILE, with a line such as `node0 slots=8` for each"),
        ("--gpus 2 --include a:0 pretrain", "--gpus and --include both choose processes: leave one out"),
        ("--num_gpus 3 --gpus 2 pretrain", "--gpus and --num_gpus both choose processes: leave one out"),
        ("--gpus 2 -e a:0 pretrain", "--gpus and -e both choose processes: leave one out"),
        ("--gpus 2 --gpus=3 pretrain", "--gpus is given twice: leave one out"),
    ],
)
def test_a_mistake_of_a_launch(words: str, message: str) -> None:
    done = xlme("launch", *words.split())
    assert (done.returncode, done.stderr) == (2, f"xlme launch: error: {message}\n")


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("# none\n\n", "", "hosts names no host: write a line such as `node0 slots=8` for each"),
        ("a slots=2\nb:8\n", "", "hosts, line 2: `b:8` is not a host and its number of processes, such as"),
        ("\ufeffa slots=2\n", "", "hosts begins with a byte order mark, which ssh would take for a part of the first"),
        ("a slots=0\n", "", "hosts, line 1: `a slots=0` is not a host"),
        ("a slots=2\n\na slots=2\n", "", "hosts, line 3: a is there twice: write one line for each host"),
        ("a slots=2\nb slots=2\n", "--no_ssh", "--node_rank is -1: with --no_ssh, give each machine the number of it"),
        ("a slots=2\nb slots=2\n", "--no_ssh --node_rank 2", "hosts, 0 to 1"),
        ("a slots=2\nb slots=2\n", "--no_ssh --node_rank 1", "--no_ssh needs --master_addr, the address of a, by wh"),
    ],
)
def test_a_mistake_in_a_hostfile(text: str, options: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(text)
    with pytest.raises(ValueError, match=re.escape(message)):
        command_line(["--hostfile", str(tmp_path / "hosts"), *options.split(), "pretrain"])


@pytest.mark.parametrize(
    ("hosts", "options", "is_sent"),
    [
        ("a.invalid slots=2\n", "", True),
        (f"{'a' * 64} slots=2\n", "", True),
        ("192.0.2.1 slots=2\n", "", True),
        ("localhost slots=2\na.invalid slots=2\n", "--include a.invalid", True),
        ("localhost slots=2\na.invalid slots=2\n", "--exclude localhost:0,1", True),
        ("a.invalid slots=2\nlocalhost slots=2\n", "--num_nodes 1", True),
        ("localhost slots=2\na.invalid slots=2\n", "", False),  # it is there anyway
        ("localhost slots=2\na.invalid slots=2\n", "--include localhost:1", False),
        ("localhost slots=2\na.invalid slots=2\n", "--num_nodes 1", False),
        ("localhost slots=2\n", "", False),
        ("127.0.0.1 slots=2\n", "", False),
    ],
)
def test_a_single_other_machine_gets_the_run(
    hosts: str, options: str, is_sent: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DeepSpeed's launcher asked that machine by ssh for its address, and then trained on this one."""
    (tmp_path / "hosts").write_text(hosts)
    words = ["--hostfile", str(tmp_path / "hosts"), *options.split(), "pretrain"]
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ValueError, match="reaches by pdsh: install pdsh") if is_sent else nullcontext():
        command_line(words)
    (tmp_path / "pdsh").touch(0o755)
    assert ("--force_multi" in command_line(words)) == is_sent


@pytest.mark.parametrize(("options", "port"), [("", "29500"), ("--master_port 5", "5")])
def test_machines_without_ssh_meet_at_one_port(options: str, port: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb slots=2\n")
    words = f"--hostfile {tmp_path}/hosts --no_ssh --node_rank 1 --master_addr a {options} pretrain"
    assert [port for flag, port in pairwise(command_line(words.split())) if flag == "--master_port"][-1] == port


@pytest.mark.parametrize("flag", ["--num_gpus", "--num_accelerators", "--include", "-i", "--exclude", "-e"])
def test_gpus_goes_with_no_other_choice_of_processes(flag: str) -> None:
    value = "2" if flag.startswith("--num") else "a:0"
    for words in ([flag, value], [f"{flag}={value}"]):
        with pytest.raises(ValueError, match=rf"--gpus and {' '.join(words).split()[0]} both choose processes"):
            command_line(["--gpus", "2", *words, "pretrain"])
        assert "--num_gpus" not in command_line([*words, "pretrain"]) or flag == "--num_gpus"


@pytest.mark.parametrize(
    ("visible", "words", "is_refused"),
    [
        ("2,3", "--gpus 2", True),
        ("0", "--gpus 2", True),
        ("3", "--gpus 1 --master_port 5", True),
        ("3", "--gpus 1", False),
        ("0,1,2", "--gpus 2", False),
        ("0, 1", "--gpus 2", False),
        ("2,3", "--num_gpus 2", True),
        ("", "--gpus 2", False),
    ],
)
def test_gpus_that_the_user_did_not_choose_are_not_taken(
    visible: str, words: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(ValueError, match="first GPUs, not those of") if is_refused else nullcontext():
        command_line([*words.split(), "pretrain"])
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert command_line([*words.split(), "pretrain"]), "a run on CPUs takes no GPU"


@pytest.mark.parametrize(
    ("words", "is_refused"),
    [("", True), ("--gpus 2", True), ("--master_port 5", True), ("--gpus 1", False), ("--include localhost:0", False)],
)
def test_gpus_that_are_named_by_their_ids(words: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's launcher ended in a traceback, to which the advice to leave out --gpus led too."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937,GPU-1")
    with pytest.raises(ValueError, match="needs the numbers of GPUs") if is_refused else nullcontext():
        command_line([*words.split(), "pretrain"])


def test_a_hostfile_may_have_the_name_of_a_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("gpus").write_text("localhost slots=2\n")
    assert "gpus" in command_line(["--hostfile", "gpus", "pretrain"])


def test_a_launch_of_two_processes(tmp_path: Path) -> None:
    data = tmp_path / "data"
    vocabulary = train_vocabulary(data / "vocab")
    write_data(data, rows=16, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    model = f"--model.vocabulary {vocabulary.size} --model.max-positions 32 --data.mono-rows 4 --data.para-rows 4"
    words = f"launch --gpus 2 pretrain --recipe quickstart {model}"
    words += f" --data.micro-batch 2 --dry-run --data {data} --out {tmp_path}/run"
    done = real(*words.split())
    assert done.returncode == 0 and done.stdout.count("a dry run: nothing was written") == 1, done.stderr
    assert "2 processes" in done.stdout


def test_benchmarks_are_listed_and_run() -> None:
    listed = xlme("bench").stdout
    names = [line.split()[0] for line in listed.splitlines()[2:]]
    assert {"gpu", "loader", "peers.mteb", "rehearsal", "roofline", "step", "tokenize"} <= set(names)
    assert not {"measure", "gpu.worker", "workers"} & set(names)
    assert all(line.split(maxsplit=1)[1:] for line in listed.splitlines()[2:])
    described = benchmarks()
    assert not any(re.search("[:.] ", about) for about in described.values())
    for name in ("loader", "step"):
        text = " ".join((ROOT / f"bench/{name}.py").read_text(encoding="utf-8").split())
        assert text.startswith(f'"""{described[name]}'), "the beginning of its docstring"
    done = real("bench", "gpu", "--help")
    assert done.returncode == 0 and "usage: xlme bench gpu" in done.stdout and "python -m" not in done.stdout, done
    assert "there is no benchmark 'loder': did you mean loader?" in xlme("bench", "loder").stderr


@pytest.mark.parametrize("name", benchmarks())
def test_every_benchmark_has_help(name: str) -> None:
    done = python("-m", f"bench.{name}", "--help")
    assert done.returncode == 0 and done.stdout.startswith("usage: xlme bench"), done.stdout + done.stderr
    assert "{None}" not in done.stdout and "--no-json" not in done.stdout


def test_job_scripts_are_copied_where_none_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A copy that a user has adapted stays."""
    job_scripts.main(["--out", str(tmp_path)])
    ours, theirs = ({path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
                    for folder in (ROOT / "slurm", tmp_path / "slurm"))  # fmt: skip
    assert ours == theirs and capsys.readouterr().out.split()[1:] == [f"{name}," for name in sorted(ours)[:-1]] + [
        max(ours)
    ]
    (tmp_path / "slurm/env.sh").write_text("mine")
    with pytest.raises(SystemExit) as left:
        job_scripts.main(["--out", str(tmp_path)])
    assert left.value.code == 2 and "slurm exists already: remove it" in capsys.readouterr().err
    assert (tmp_path / "slurm/env.sh").read_text() == "mine"


def test_a_wheel_has_no_benchmarks(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="an installed package has none: run this in a clone of the repository"):
        benchmarks(tmp_path / "bench")


def test_data_without_pairs(tmp_path: Path) -> None:
    """A recipe with both tasks names the setting; with it nothing speaks of the task that is not there."""
    data = tmp_path / "data"
    vocabulary = train_vocabulary(data / "vocab")
    write_data(data, rows=16, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    shutil.rmtree(data / "para")
    model = f"--recipe quickstart --model.vocabulary {vocabulary.size} --model.max-positions 32 --data.mono-rows 8"
    words = f"pretrain {model} --train.steps 2 --train.log-every 1 --optimizer.warmup-steps 1"
    words += f" --engine.kind plain --engine.precision fp32 --data {data} --out {tmp_path}/run"
    done = xlme(*words.split())
    said = f"xlme pretrain: error: {data} has no pairs: set data.para_rows to 0 (`--data.para-rows 0`), "
    said += "or name a folder with pairs"
    assert (done.returncode, done.stderr.splitlines()[-1]) == (2, said)
    done = xlme(*words.split(), "--data.para-rows", "0")
    assert done.returncode == 0 and "mlm" in done.stdout, done.stderr
    assert not re.search("tlm|trtd|translation", done.stdout + done.stderr)
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert config["command"].startswith("xlme pretrain --recipe quickstart ") and len(config["started"]) == 16
    page = (tmp_path / "run" / "report.html").read_text()
    assert not re.search(r"\b(tlm|trtd)\b", page.partition("<h2>Settings")[0])


def test_a_file_that_is_not_named_by_its_language(tmp_path: Path) -> None:
    (tmp_path / "mono").mkdir()
    (tmp_path / "mono" / "english.txt").write_text("a line\n")
    vocabulary = train_vocabulary(tmp_path / "vocab").path
    rest = ["--vocab", str(vocabulary), "--out", str(tmp_path / "out")]
    for words, said in (
        ([str(tmp_path / "mono/english.txt")], "unexpected argument "),
        (["--mono", str(tmp_path / "mono/english.txt")], "is not a folder: name the one that holds the corpus files"),
        (["--mono", str(tmp_path / "mono")], "A file name begins with its language's code, as en.txt"),
    ):
        done = xlme("prep", "encode", *words, *rest)
        assert done.returncode == 2 and said in done.stderr and done.stderr.count("\n") == 1, done.stderr


TWICE = """
import sys, xlme_ds as xlme
from dataclasses import replace
from pathlib import Path
data, size = Path(sys.argv[1]), int(sys.argv[2])
run = xlme.recipe("quickstart")
run = replace(
    run,
    model=replace(run.model, vocabulary=size, max_positions=32),
    data=replace(run.data, mono_rows=2, para_rows=2, micro_batch=2),
    train=replace(run.train, steps=2, log_every=1),
    optimizer=replace(run.optimizer, warmup_steps=1),
)
for number, engine in enumerate(("zero1", "zero3_cpu", "zero1")):
    this = replace(run, engine=replace(run.engine, deepspeed=engine))
    xlme.pretrain(this, data, data.with_name(f"run{number}"))
    try:
        xlme.pretrain(replace(this, model=replace(this.model, vocabulary=7)), data, data.with_name("none"))
    except ValueError as error:
        print(error)
"""


def test_several_runs_in_one_process(tmp_path: Path) -> None:
    """With other engines, and after a run that failed; equal settings give equal losses."""
    vocabulary = train_vocabulary(tmp_path / "data" / "vocab")
    data = write_data(tmp_path / "data", rows=16, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    done = python("-c", TWICE, str(data), str(vocabulary.size))
    assert done.returncode == 0 and done.stdout.count("set model.vocabulary to") == 3, done.stderr
    records = [(tmp_path / f"run{number}" / "metrics.jsonl").read_text().splitlines() for number in range(3)]
    losses = [[json.loads(line)["loss"] for line in lines] for lines in records]
    assert losses[0] == losses[2] and len(losses[0]) == 2


def test_sentences_are_of_english_german_and_the_largest_languages(tmp_path: Path) -> None:
    data = write_data(tmp_path / "data", rows=60)
    for task, sides in (("mono", 1), ("para", 2)):
        store = RowStore(data / task)
        rows = [store.read(np.array([record])) for record in range(60)]
        keys = [" ".join(sorted(store.languages[place] for place in row.languages[:sides])) for row in rows]
        shown = [keys[record] for record in _shown_records(store, sides)]
        first = [key for key in ("en", "de", "de en") if key in keys]
        assert shown[: len(first)] == first and len(set(shown)) == len(shown) == min(8, len(set(keys)))
        rest = [keys.count(key) for key in shown[len(first) :]]
        assert rest == sorted(rest, reverse=True)
        assert all(keys.index(key) == record for key, record in zip(shown, _shown_records(store, sides), strict=True))
