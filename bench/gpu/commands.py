"""Runs every command that touches a GPU on a small text, and compares killed and resumed runs with undisturbed ones."""

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.measure import Figures
from data_prep.__main__ import main as data_prep
from xlme_ds.report.run_files import read_records
from xlme_ds.run_commands import child_environment

# A killed run has STEPS steps in all, saves a checkpoint every SAVE_EVERY steps, and is killed after STEPS_BEFORE_KILL.
STEPS, SAVE_EVERY, STEPS_BEFORE_KILL = 60, 20, 33
RUNS = {  # name of a run that is killed -> recipe and settings
    "default": "--recipe quickstart",
    "not compiled": "--recipe quickstart --model.compile none",
    "modern": "--recipe modern_base --model.generator-layers 2",
}
ROW_TOKENS = {False: 256, True: 64}  # whether the bench is quick -> tokens of a row
TAGS = ("NOUN", "VERB", "ADJ", "ADV", "DET")
_API = """import sys, xlme_ds
model = xlme_ds.load(sys.argv[1])
print(len(model.judge("ba ce di")), model.fill("ba <mask> di", top=2), model.encode(["ba ce", "di"]).shape)"""


def write_text(folder: Path) -> None:
    """Write 100 documents in each of two made-up languages, 1,000 sentence pairs, the first 20 of them once more as
    text to translate, and four files of tagged sentences. In documents and pairs, a "German" word is an "English" word
    spelled backwards. A word's tag follows from its length."""
    rng = random.Random(0)
    syllables = [consonant + vowel for consonant in "bcdfgklmnprst" for vowel in "aeiou"]
    words = ["".join(rng.choices(syllables, k=rng.randint(1, 4))) for _ in range(600)]

    def sentences(count: int) -> list[list[str]]:
        return [rng.choices(words, range(600, 0, -1), k=rng.randint(5, 20)) for _ in range(count)]

    for part in ("mono", "para", "tags"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    pairs = sentences(1000)
    for language, name in (("de", "source"), ("en", "reference")):
        text, lines = (
            [" ".join(word if language == "en" else word[::-1] for word in sentence) for sentence in english]
            for english in (sentences(1000), pairs)
        )
        documents = ["\n".join(text[start : start + 10]) for start in range(0, len(text), 10)]
        (folder / "mono" / f"{language}.txt").write_text("\n\n".join(documents) + "\n")
        (folder / "para" / f"X.de-en.{language}").write_text("\n".join(lines) + "\n")
        (folder / name).write_text("\n".join(lines[:20]) + "\n")
    for name in ("train-en", "dev-en", "test-en", "test-de"):
        tagged = ["".join(f"{word}\t{TAGS[len(word) % len(TAGS)]}\n" for word in text) for text in sentences(60)]
        (folder / "tags" / f"{name}.tsv").write_text("\n".join(tagged))


def _settings(rows: int, quick: bool) -> str:
    """Command-line options of a small model, whose heads have size 64 as in Base. A step has one micro-batch, with
    `rows` rows of each task. If `quick`, heads and micro-batches are smaller."""
    width, rows = (32, 2) if quick else (256, rows)
    return (
        f"--model.vocabulary 1000 --model.max-positions {ROW_TOKENS[quick]} --model.width {width} --model.heads 4 "
        f"--model.feed-forward {4 * width} --model.discriminator-layers 2 --model.init-std 0.05 "
        f"--optimizer.warmup-steps 2 --data.mono-rows {rows} --data.para-rows {rows} --data.micro-batch {rows}"
    )


def prepare(folder: Path, quick: bool) -> None:
    """Write the text and the packed rows that all commands read, unless `folder` has them already."""
    if (folder / "done").exists():
        return
    write_text(folder / "text")
    corpora = f"--mono {folder}/text/mono --para {folder}/text/para"
    vocab = f"--vocab {folder}/vocab"
    mix = f"mix {vocab} --row-tokens {ROW_TOKENS[quick]}"
    stages = [
        f"vocab {corpora} --size 1000 --sentences 4000 --out {folder}/vocab",
        f"encode --mono {folder}/text/mono --sentences {vocab} --out {folder}/encoded/alone",
        f"{mix} --mono-rows 640 --sentences --layout xlm --encoded {folder}/encoded/alone --out {folder}/sentences",
    ]
    for part, rows in (("train", 640), ("heldout", 16)):
        encoded = f"{folder}/encoded/{part}"
        stages += [f"encode {corpora} {vocab} --max-pair-tokens 61 --out {encoded} --split {part} --heldout-share 0.1"]
        mixed = f"{mix} --mono-rows {rows} --para-rows {rows} --encoded {encoded}"
        stages += [f"{mixed} --layout {layout} --out {folder}/{layout}_{part}" for layout in ("xlme", "xlm")]
    for stage in stages:
        data_prep(stage.split())
    (folder / "done").touch()


def _run(arguments: Sequence[str], log: Path, deadline: float, killed: Callable[[], bool] = lambda: False) -> Figures:
    """Run a command, until it ends or `killed()` is true, at most until `deadline` (time.monotonic). Returns its
    `seconds`, and either `said`, the end of its output, or `failed`, the reason of its failure. If `deadline` is past,
    returns only `left_out`."""
    begin = time.monotonic()
    if begin > deadline:
        return {"left_out": "the time of this section is up"}
    threads = str(max((os.cpu_count() or 1) // 8, 1))  # few, because several commands run at the same time
    env = child_environment() | dict.fromkeys(("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), threads)
    with log.open("a") as file:
        process = subprocess.Popen(arguments, stdout=file, stderr=subprocess.STDOUT, env=env)
    while process.poll() is None and time.monotonic() < deadline and not killed():
        time.sleep(0.005)
    seconds = {"seconds": time.monotonic() - begin}
    if process.poll() is None:
        process.kill()
        process.wait()
        return {"failed": f"no end after {deadline - begin:.0f} s"} | seconds
    output = " / ".join(log.read_text(errors="replace").split("\n")[-4:]).strip(" /")
    failed = {"failed": f"exit code {process.returncode}: {output[-600:]}"}
    return (failed if process.returncode else {"said": output[-160:]}) | seconds


def _xlme(arguments: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "xlme_ds", *arguments.split()]


def _waves(data: Path, out: Path, quick: bool) -> list[dict[str, list[str]]]:
    """Returns one dict per wave, from a command's name to its arguments. Waves run one after another, because the
    commands of a wave read what earlier waves wrote."""
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "1", "--module", "xlme_ds.pretrain"]
    steps = "--train.steps 20 --train.log-every 9 --train.eval-every 20"
    xlme = f"--recipe quickstart {_settings(8, quick)} {steps} --data {data}/xlme_train --heldout {data}/xlme_heldout"
    xlm = f"pretrain {_settings(16, quick)} --model.language-embeddings de en"
    pairs = f"{xlm} {steps} --data {data}/xlm_train --heldout {data}/xlm_heldout"
    text, heldout, tuning = f"{data}/text", f"{data}/xlme_heldout", "--task pos --tuning.epochs 1"
    second_wave = {
        "pretrain XLM to translate":
            f"{pairs} --recipe xlm_mt --data.mono-rows 0 --start.folder {out}/xlm --out {out}/mt",
        "pretrain XLM to translate without pairs":
            f"{xlm} --recipe xlm_umt --data {data}/sentences --data.para-rows 0 --train.steps 4 --train.log-every 2 "
            f"--start.folder {out}/xlm --out {out}/umt",
        "finetune": f"finetune {tuning} --model {out}/xlme --data {text}/tags --out {out}/pos",
        "evaluate pairs": f"evaluate pairs --model {out}/xlme --data {heldout} --out {out}/pairs",
        "evaluate losses": f"evaluate losses --model {out}/xlme --data {heldout} --out {out}/losses",
        "export": f"export --run {out}/xlme --out {out}/export",
    }  # fmt: skip
    translate = (
        f"translate --model {out}/mt --source {text}/source --from de --to en --out {out}/translated "
        f"--reference {text}/reference"
    )
    return [
        {
            "pretrain, by the launcher": [*launcher, *f"{xlme} --profile 2 --out {out}/xlme".split()],
            "pretrain XLM": _xlme(f"{pairs} --recipe xlm --out {out}/xlm"),
        },
        {name: _xlme(arguments) for name, arguments in second_wave.items()}
        | {"Python": [sys.executable, "-W", "ignore", "-c", _API, f"{out}/xlme"]},
        {"translate": _xlme(translate)},
    ]


def smoke(folder: Path, seconds: float, quick: bool) -> Iterator[Figures]:
    """Run the commands of all waves, and yield a row for each. The commands of one wave run at the same time."""
    deadline, out = time.monotonic() + seconds, folder / "smoke"
    prepare(folder / "data", quick)
    out.mkdir(exist_ok=True)
    with ThreadPoolExecutor(max((os.cpu_count() or 1) // 2, 1)) as pool:
        for wave in _waves(folder / "data", out, quick):
            results = {
                name: pool.submit(_run, arguments, out / f"{name.replace(' ', '_')}.log", deadline)
                for name, arguments in wave.items()
            }
            for name, result in results.items():
                yield {"command": name} | result.result()


def resume(folder: Path, seconds: float, runs: Sequence[str], quick: bool) -> Iterator[Figures]:
    """Train each of `runs` (names in `RUNS`) twice at the same time: undisturbed, and killed and resumed. Yields a row
    for each name, which says whether losses, gradient norms and weights of the two runs are bitwise equal."""
    deadline = time.monotonic() + seconds
    prepare(folder / "data", quick)
    (folder / "resume").mkdir(parents=True)

    def train(name: str, run: Path, killed: Callable[[], bool] = lambda: False) -> Figures:
        arguments = (
            f"pretrain {RUNS[name]} {_settings(8, quick)} --engine.deepspeed zero1 --train.steps {STEPS} "
            f"--train.log-every 1 --train.save-every {SAVE_EVERY} --data {folder}/data/xlme_train --out {run}"
        )
        return _run(_xlme(arguments), run.with_suffix(".log"), deadline, killed)

    def kill_and_resume(name: str, run: Path) -> tuple[int, Figures]:
        metrics = run / "metrics.jsonl"
        train(name, run, lambda: len(read_records(metrics)) >= STEPS_BEFORE_KILL)
        return len(read_records(metrics)), train(name, run)

    with ThreadPoolExecutor(2 * len(runs)) as pool:
        started = []
        for name in runs:
            alone, killed = (folder / "resume" / f"{name.replace(' ', '_')}_{end}" for end in ("alone", "killed"))
            results = pool.submit(train, name, alone), pool.submit(kill_and_resume, name, killed)
            started.append((name, alone, killed, *results))
        for name, alone, killed, undisturbed, resumed in started:
            step, result = resumed.result()
            results_by_end = {"alone": undisturbed.result(), "resumed": result}
            failed = [f"{end}: {result}" for end, result in results_by_end.items() if "said" not in result]
            row = {"failed": "; ".join(failed)} if failed else _compared(alone, killed)
            yield {"run": name, "killed_after_step": step} | row


def _compared(alone: Path, killed: Path) -> Figures:
    """Compare the undisturbed run `alone` with the run `killed`. In the row returned, `ok` says whether they have the
    same losses, gradient norms and weights."""
    alone_steps, killed_steps = (
        {line["step"]: (line["loss"], line["grad_norm"]) for line in read_records(run / "metrics.jsonl")}
        for run in (alone, killed)
    )
    different = [step for step in alone_steps if alone_steps[step] != killed_steps.get(step)]
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (alone, killed)]
    same_weights = weights[0] == weights[1]
    return {"steps": len(alone_steps), "first_that_differs": min(different, default=None), "same_weights": same_weights,
            "ok": len(alone_steps) == STEPS and not different and same_weights}  # fmt: skip
