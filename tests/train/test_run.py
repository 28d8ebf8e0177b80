"""A run as a process: which held-out rows it evaluates, how it is stopped, and what it shows meanwhile."""

import fcntl
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.engine.worker import tiny
from tests.launch import ROOT, environment, free_port, python
from tests.rows import train_vocabulary, write_data
from xlme_ds.checkpoint_names import checkpoints_of, saved_step
from xlme_ds.config import DataConfig
from xlme_ds.data.collate import collate
from xlme_ds.data.loader import HeldOutLoader, Loader
from xlme_ds.data.rows import TASKS
from xlme_ds.data.schema import read_manifest, write_manifest
from xlme_ds.data.shards import RowStore
from xlme_ds.data.unigram import unigram_nll_by_language
from xlme_ds.engine.build import build_engine
from xlme_ds.objectives import objective_of
from xlme_ds.train.opening import heldout_data_config, pretraining_info
from xlme_ds.train.run_folder import RunFolder

_TINY = (
    "--engine.kind plain --engine.precision fp32 --data.mono-rows 4 --data.para-rows 4 --data.micro-batch 4 "
    "--optimizer.warmup-steps 1 --model.width 16 --model.heads 2 --model.feed-forward 32 "
    "--model.discriminator-layers 2 --model.generator-layers 1 --model.max-positions 32"
)


@pytest.mark.parametrize("rows", [1, 7, 50, 100])
@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("micro_batch", [1, 8, 16])
def test_held_out_rows_depend_on_the_settings_of_evaluation_alone(
    tmp_path: Path, rows: int, world: int, micro_batch: int
) -> None:
    """Neither on the processes nor on the micro-batch: each of the first rows counts once, with the same masks."""
    folder = write_data(tmp_path / "data", rows=rows)
    shutil.copytree(write_data(tmp_path / "more", rows=9) / "para", folder / "para", dirs_exist_ok=True)
    config = tiny({"kind": "plain"}, 8)
    config = replace(
        config, data=replace(config.data, micro_batch=micro_batch), train=replace(config.train, eval_rows=60)
    )
    data = heldout_data_config(config, folder, row_tokens=32)
    assert (data.mono_rows, data.para_rows) == (min(rows, 60), 9)
    for row_tokens, expected in ((32, micro_batch), (64, 2 * micro_batch), (16, max(micro_batch // 2, 1)), (1, 1)):
        # as many tokens at once as in training on rows of that length, and a row at least
        assert heldout_data_config(config, folder, row_tokens).micro_batch == expected
    found, sizes = [], set()
    for rank in range(world):
        loader = HeldOutLoader(folder, data, 1, 0.15, rank, world)
        batches = loader.micro_batches(0)
        sizes.add(tuple((len(batch.tokens_BT), int(batch.task_B[0])) for batch in batches))
        for batch, counts in zip(batches, loader.counted, strict=True):
            masked = torch.zeros(batch.tokens_BT.numel(), dtype=torch.bool).index_fill(0, batch.masked_M, True)
            parts = batch.task_B.tolist(), batch.tokens_BT.tolist(), masked.view_as(batch.tokens_BT).tolist()
            found += [str(row) for row in zip(*parts, strict=True)] if counts else []
    assert len(sizes) == 1, "the collectives of an engine need the same of all ranks"
    assert {size for size, _ in sizes.pop()} <= {1, micro_batch}, "torch compiles for every shape"
    numbers = {0: np.arange(min(rows, 60)), 1: np.arange(9)}
    whole = [(task, RowStore(folder / name).read(numbers[task]), numbers[task]) for task, name in enumerate(TASKS)]
    batch = collate(whole, 1, 0.15)
    masked = torch.zeros(batch.tokens_BT.numel(), dtype=torch.bool).index_fill(0, batch.masked_M, True)
    parts = batch.task_B.tolist(), batch.tokens_BT.tolist(), masked.view_as(batch.tokens_BT).tolist()
    assert sorted(found) == sorted(str(row) for row in zip(*parts, strict=True))


@pytest.mark.parametrize("rank", [0, 1])
def test_what_a_rank_reads_twice_counts_in_no_number_of_an_evaluation(tmp_path: Path, rank: int) -> None:
    """Of two ranks the second has a row less of each task; pairs have a language more than text."""
    config, folder = tiny({"kind": "plain"}, 2), write_data(tmp_path, rows=9)
    manifest = read_manifest(folder / "para")
    write_manifest(folder / "para", replace(manifest, languages=(*manifest.languages, "xx")))
    heldout = HeldOutLoader(folder, DataConfig(5, 3, 2), 1, 0.15, rank, 2)
    engine = build_engine(config, Loader(folder, config.data, 1, 0.15), heldout, None)
    found, module, objective = engine.eval_batch(), engine.module.eval(), engine.objective
    assert heldout.counted.count(False) == 2 * rank
    batches = [batch for batch, counts in zip(heldout.micro_batches(0), heldout.counted, strict=True) if counts]
    assert torch.equal(found["counts"], sum(objective.counts(batch) for batch in batches))
    with torch.no_grad():
        sums = sum(objective.sums(module(batch), batch).double() for batch in batches)
    assert found["sums"].tolist() == pytest.approx(sums.tolist(), rel=1e-5)
    assert found["by_language"].shape == (2, 4, 4)
    assert found["by_language"][0].sum(1).tolist() == pytest.approx(sums.tolist(), rel=1e-5)


def test_what_an_evaluation_reports(tmp_path: Path) -> None:
    """Means by language where there are tokens and their sum is a number; weights of the step; a unigram model's losses
    on the rows that are evaluated, four of nine."""
    folder, unseen = (write_data(tmp_path / str(rows), rows=rows, seed=rows) for rows in (16, 9))
    languages = ("fr", "en", "de")
    config = tiny({"kind": "plain"}, 8, objective="mt", language_embeddings=languages, para_rows=0,
                  denoising=("0:1", "10:0.5"))  # fmt: skip
    config = replace(config, train=replace(config.train, eval_rows=4))
    objective = objective_of(config.objective)
    read = config.seed, 1.0, 0, 1, languages, objective
    loader = Loader(folder, config.data, *read)
    heldout = HeldOutLoader(unseen, heldout_data_config(config, unseen, loader.row_tokens), *read)
    info = pretraining_info(config, loader, heldout, root=True)
    assert info.summarise is not None and objective.terms == ("ae", "mt")
    store = heldout.stores[0]
    first = store.languages[0]
    by_language = torch.tensor([[[6.0, np.inf, 0.0], [0.0, 0.0, 0.0]], [[3.0, 2.0, 0.0], [0.0, 0.0, 0.0]]])
    totals = {"sums": torch.tensor([6.0, 0.0]), "counts": torch.tensor([3.0, 0.0])}
    statistics = torch.zeros(objective.statistics_shape)
    overall, parts = info.summarise(5, by_language, statistics=statistics, **totals)
    assert overall["loss"] == pytest.approx(0.75 * 2)
    assert (parts["terms"], parts["tokens"]) == ({"ae": {first: 2.0}}, {"ae": {first: 3}})
    sums, counts = unigram_nll_by_language(loader.shares(0, config.train.steps), store, 0, 4)
    assert overall["unigram_nll_mono"] == pytest.approx(sums.sum() / counts.sum())
    means = {code: sums[n] / counts[n] for n, code in enumerate(store.languages) if counts[n]}
    assert parts["unigram"]["mono"] == pytest.approx(means) and 0 < len(means) < 3
    other = pretraining_info(config, loader, heldout, root=False)
    assert other.summarise is not None, "collective, but only the root needs the unigram model"
    assert other.summarise(5, by_language, statistics=statistics, **totals)[1]["unigram"] == {}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("place", ["full_state", "write_report"])
def test_a_signal_after_the_last_step_loses_nothing(tmp_path: Path, place: str, number: int) -> None:
    """While the state is gathered it waits; while the report is drawn the command ends, and draws it next time."""
    vocabulary = train_vocabulary(tmp_path / "mixed/vocab")
    write_data(tmp_path / "mixed", rows=8, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    for signalled in (True, False):
        child = os.fork()
        if not child:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
            _pretrain_one_step(tmp_path, vocabulary.size, place if signalled else "")
        if signalled:
            while not (tmp_path / "there").exists():
                time.sleep(0.01)
            os.kill(child, number)
            (tmp_path / "sent").touch()
        _, status = os.waitpid(child, 0)
        assert status == 0
        assert (tmp_path / "run/finished.json").exists() == (not signalled or place == "full_state")


def test_a_process_that_waits_for_others_says_so_and_can_be_stopped(tmp_path: Path) -> None:
    """In C++, where Python runs no handler: the other processes of its run never come."""
    words = f"--recipe quickstart --data {tmp_path} --out {tmp_path}/run --engine.kind deepspeed".split()
    waiting = {}
    for sent in ((signal.SIGTERM,), (signal.SIGINT, signal.SIGINT)):
        port = free_port()
        place = dict(RANK=0, LOCAL_RANK=0, WORLD_SIZE=2, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
        command = [sys.executable, "-m", "xlme_ds.pretrain", *words]
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment(**place), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
        waiting[process] = sent, f"rank 0 waits for the others of 2 at 127.0.0.1:{port}"
    for process, (_, said) in waiting.items():
        assert process.stderr is not None
        assert any(said in line for line in process.stderr), "it must be said while it waits"
    for process, (sent, _) in waiting.items():
        for number in sent:
            process.send_signal(number)
            time.sleep(0.2)
    for process, (sent, _) in waiting.items():
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 128 + sent[0], errors
        assert errors.count("while it waited for other processes") == 1 and errors.startswith(sent[0].name), errors


# The main thread is in C++ from before the signal is sent until what came of it is printed.
WAITS = """
import os, signal, sys, threading, time
from pathlib import Path
from xlme_ds.train import stop
stop._PATIENCE = 0.2
request = stop.StopRequest()
request.has_work = True
def tell():
    deadline = time.monotonic() + 60
    while request.received is None and time.monotonic() < deadline:
        time.sleep(0.01)
    for thread in threading.enumerate():
        if "_act_if_unhandled" in thread.name:  # it says what it has done
            thread.join()
    print(request.received, flush=True)
    Path(sys.argv[1]).touch()
threading.Thread(target=tell).start()
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # so that another thread receives it, and this one waits on
os.system(f"kill -TERM $PPID; until [ -e '{sys.argv[1]}' ]; do sleep 0.05; done")
"""


def test_a_process_with_work_to_save_stops_when_the_others_have_come(tmp_path: Path) -> None:
    done = python("-c", WAITS, str(tmp_path / "told"))
    assert (done.returncode, done.stdout) == (0, "SIGTERM\n"), done.stderr
    assert done.stderr.startswith("SIGTERM: this process waits for other processes, and saves and stops when they have")


LATE = """
import ctypes, os, signal, time
from xlme_ds.train import stop
stop._PATIENCE = 0.2
request = stop.StopRequest()
os.kill(os.getpid(), signal.SIGTERM)
ctypes.PyDLL(None).sleep(2)  # no other thread of Python runs, as while a library is loaded
print(request.received, flush=True)
time.sleep(2)
"""


def test_a_signal_that_was_handled_before_the_listening_thread_ran_ends_nothing() -> None:
    done = python("-c", LATE)
    assert (done.returncode, done.stdout, done.stderr) == (0, "SIGTERM\n", "")


TWICE = """
import gc
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from deepspeed import DeepSpeedEngine
from tests.engine.worker import tiny
from xlme_ds.api import pretrain
from xlme_ds.train.stop import StopRequest
folder, size = Path(sys.argv[1]), int(sys.argv[2])
config = tiny(dict(kind="deepspeed", deepspeed="zero3"), 8, steps=5)
config = replace(config, model=replace(config.model, vocabulary=size))
for name in ("one", "two"):
    assert pretrain(config, folder / "mixed", folder / name) == folder / name
stop = StopRequest()
os.kill(os.getpid(), signal.SIGINT)
assert pretrain(config, folder / "mixed", folder / "three", stop=stop) is None, "a run that was stopped"
stop.release()
assert "RANK" not in os.environ, "what this process starts is not a rank of its runs"
def engines():
    return sum(isinstance(thing, DeepSpeedEngine) for thing in gc.get_objects())
gc.disable()  # so that only `pretrain` itself frees an engine
before = engines()
pretrain(replace(config, engine=replace(config.engine, deepspeed="zero1")), folder / "mixed", folder / "four")
assert engines() == before
"""


def test_two_runs_in_one_process(tmp_path: Path) -> None:
    """Under DeepSpeed, which keeps the groups of a run that has ended."""
    vocabulary = train_vocabulary(tmp_path / "mixed/vocab")
    write_data(tmp_path / "mixed", rows=24, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    done = python("-c", TWICE, str(tmp_path), str(vocabulary.size))
    assert done.returncode == 0, done.stderr
    one, two = (load_file(tmp_path / name / "model/model.safetensors") for name in ("one", "two"))
    assert one.keys() == two.keys() and all(torch.equal(value, two[name]) for name, value in one.items())


@pytest.mark.parametrize("lost", ["terminal", "pipe", "nohup"])
def test_a_lost_terminal_costs_no_step(tmp_path: Path, lost: str) -> None:
    """It prints to the terminal itself, or to a program like tee that dies with it while the pipe is full."""
    vocabulary = train_vocabulary(tmp_path / "mixed/vocab")
    write_data(tmp_path / "mixed", rows=8, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    out, (ours, theirs) = tmp_path / "run", pty.openpty() if lost == "terminal" else os.pipe()
    words = f"--recipe quickstart --data {tmp_path}/mixed --out {out} --model.vocabulary {vocabulary.size} {_TINY} "
    words += "--train.steps 1000000 --train.log-every 1 --train.save-every 1000000"

    def become_leader() -> None:
        os.setsid()
        if lost == "terminal":
            fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)
        # The tests themselves may run under nohup.
        signal.signal(signal.SIGHUP, signal.SIG_IGN if lost == "nohup" else signal.SIG_DFL)

    command = [sys.executable, "-m", "xlme_ds.pretrain", *words.split()]
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, stdout=theirs, stderr=theirs,
        preexec_fn=become_leader,
    )  # fmt: skip
    os.close(theirs)

    def until(step: int) -> None:
        while RunFolder(out).last_logged_step() < step:
            assert os.read(ours, 65536)

    until(3)
    if lost == "pipe":  # full, so that the run waits in the middle of a line
        before = -1
        while before < (before := RunFolder(out).last_logged_step()):
            time.sleep(1)
    if lost != "terminal":
        process.send_signal(signal.SIGHUP)
    if lost == "nohup":
        until(RunFolder(out).last_logged_step() + 3)
        process.send_signal(signal.SIGTERM)
        while os.read(ours, 65536):
            pass
    os.close(ours)
    assert process.wait(timeout=300) == 0
    (saved,) = checkpoints_of(out)
    assert saved_step(saved) == RunFolder(out).last_logged_step() >= 3


@pytest.mark.parametrize("options", [[], ["-u"]])
def test_a_line_is_printed_at_once(options: list[str]) -> None:
    """DeepSpeed's launcher starts Python with -u; a killed process has lost nothing that it printed."""
    code = "import os, sys; from xlme_ds.train.stop import StopRequest; StopRequest(); print('lost?', file=sys.stderr)"
    words = [sys.executable, *options, "-c", f"{code}; os.kill(os.getpid(), 9)"]
    variables = {name: value for name, value in environment().items() if name != "PYTHONUNBUFFERED"}
    assert subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True).stderr == "lost?\n"


@pytest.mark.parametrize("streams", [">&- 2>&-", ">/dev/full 2>/dev/full"])
def test_streams_that_are_closed_or_on_a_full_disk_are_no_error(streams: str) -> None:
    code = "from xlme_ds.train.stop import StopRequest; stop = StopRequest(); print('nowhere'); stop.release()"
    words = f'"{sys.executable}" -c "{code}" {streams}'
    assert subprocess.run(words, shell=True, cwd=ROOT, env=environment()).returncode == 0


def _pretrain_one_step(folder: Path, vocabulary: int, place: str) -> None:
    """Run the command in this process, in `place` not before the signal has been sent, and leave."""
    from xlme_ds.engine.engine import Engine
    from xlme_ds.pretrain import main as pretrain
    from xlme_ds.report import run_page

    def slow(real):  # type: ignore[no-untyped-def]
        def call(*arguments):  # type: ignore[no-untyped-def]
            (folder / "there").touch()
            while not (folder / "sent").exists():  # the handler runs before it is seen
                time.sleep(0.01)
            return real(*arguments)

        return call

    for owner, name in ((Engine, "full_state"), (run_page, "write_report")):
        if name == place:
            setattr(owner, name, slow(getattr(owner, name)))
    code: object = 1
    try:
        pretrain(
            f"--recipe quickstart --data {folder}/mixed --out {folder}/run --model.vocabulary {vocabulary} "
            f"--train.steps 1 {_TINY}".split()
        )
        code = 0
    except SystemExit as left:
        code = left.code
    finally:
        os._exit(0 if code in (0, None) else 1)


def test_a_run_shows_itself_while_it_trains(tmp_path: Path) -> None:
    """Sentences, retrieval and page come from a process of their own, whose fault is a line, and which ends with the
    run, however that ends."""
    vocabulary = train_vocabulary(tmp_path / "data/vocab")
    for seed, name in enumerate(("data", "heldout")):
        write_data(tmp_path / name, rows=16, vocabulary=vocabulary.size, sha256=vocabulary.sha256, seed=seed)
    shutil.copytree(tmp_path / "data/vocab", tmp_path / "heldout/vocab")
    out, said = tmp_path / "run", tmp_path / "stderr"

    def start() -> subprocess.Popen[bytes]:
        words = f"--recipe quickstart --data {tmp_path}/data --heldout {tmp_path}/heldout --out {out} {_TINY} "
        words += f"--model.vocabulary {vocabulary.size} --train.steps 1000000 --train.eval-every 5 --train.save-every 5"
        command = [sys.executable, "-m", "xlme_ds.pretrain", *words.split()]
        with said.open("wb") as errors:
            return subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.DEVNULL, stderr=errors)

    def until(there: Callable[[], object], run: "subprocess.Popen[bytes]") -> None:
        # A hang must not hold the suite; but a page has the lowest priority, and other tests leave it little.
        deadline = time.monotonic() + 1200
        while not there():
            assert run.poll() is None and time.monotonic() < deadline, said.read_text()[-3000:]
            time.sleep(0.05)

    def shown() -> int:
        return (
            json.loads((out / "samples.json").read_text())["samples"][0]["step"]
            if (out / "samples.json").exists()
            else 0
        )

    def told() -> bool:
        return "training continues, but the report page is not updated: " in said.read_text()

    run = start()
    until(lambda: _page_processes(out), run)
    run.send_signal(signal.SIGSTOP)  # leaves it the processor
    until(shown, run)
    until(lambda: not _page_processes(out), run)
    step = shown()
    assert step % 5 == 0 and json.loads((out / "retrieval.json").read_text())["step"] == step
    page = (out / "report.html").read_text()
    assert '<meta http-equiv="refresh"' in page and f"sentences and retrieval of step {step}." in " ".join(page.split())
    (out / "samples.json").unlink()
    (out / "samples.json").mkdir()
    run.send_signal(signal.SIGCONT)
    until(lambda: _page_processes(out) or told(), run)
    run.send_signal(signal.SIGSTOP)
    until(lambda: not _page_processes(out), run)
    run.send_signal(signal.SIGCONT)
    until(told, run)
    assert "samples.json: Is a directory" in said.read_text()
    until(lambda: _page_processes(out), run)
    run.kill()
    run.wait()
    while _page_processes(out):
        time.sleep(0.05)

    run = start()
    until(lambda: _page_processes(out), run)
    run.terminate()
    assert run.wait() == 0 and not _page_processes(out)
    assert not [path for path in out.iterdir() if path.suffix == ".tmp"]


def _page_processes(run: Path) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if str(run).encode() in words and any(b"write_report_in_child" in word for word in words):
                found.append(path.parent.name)
    return found
