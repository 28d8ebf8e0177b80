"""Runs every command that touches a GPU on a small text, and runs that are killed and resumed."""

import contextlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.measure import Figures
from data_prep.__main__ import main as data_prep
from xlme_ds.run_commands import environment

STEPS, SAVED, KILLED = 60, 20, 33  # of a run that is killed: all, from one checkpoint to the next, at the kill
RUNS = {  # that are killed, by name: a recipe and settings
    "default": "--recipe quickstart",
    "graphs": "--recipe quickstart --model.compile graphs",
    "not compiled": "--recipe quickstart --model.compile none",
    "modern": "--recipe modern_base --model.generator-layers 2",
}
TAGS = ("NOUN", "VERB", "ADJ", "ADV", "DET")
_FIRST = "pretrain, by the launcher"
_API = """import sys, xlme_ds
model = xlme_ds.load(sys.argv[1])
print(len(model.judge("ba ce di")), model.fill("ba <mask> di", top=2), model.encode(["ba ce", "di"]).shape)"""


def write_text(folder: Path) -> None:
    """Write 100 documents, 1,000 pairs and some tagged sentences of two made-up languages; German reverses the words of
    English, and tags follow from the length of the word."""
    rng = random.Random(0)
    words = ["".join(rng.choice("bcdfgklmnprst") + rng.choice("aeiou") for _ in range(rng.randint(1, 4)))
             for _ in range(600)]  # fmt: skip

    def sentences(count: int) -> list[list[str]]:
        return [rng.choices(words, range(600, 0, -1), k=rng.randint(5, 20)) for _ in range(count)]

    def lines(text: Sequence[Sequence[str]], language: str) -> list[str]:
        return [" ".join(word if language == "en" else word[::-1] for word in sentence) for sentence in text]

    for part in ("mono", "para", "tags"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    pairs = sentences(1000)
    for language, name in (("de", "source"), ("en", "reference")):
        paragraphs = lines(sentences(1000), language)
        documents = ["\n".join(paragraphs[start : start + 10]) for start in range(0, len(paragraphs), 10)]
        (folder / "mono" / f"{language}.txt").write_text("\n\n".join(documents) + "\n")
        (folder / "para" / f"X.de-en.{language}").write_text("\n".join(lines(pairs, language)) + "\n")
        (folder / name).write_text("\n".join(lines(pairs[:20], language)) + "\n")
    for name in ("train-en", "dev-en", "test-en", "test-de"):
        tagged = ["".join(f"{word}\t{TAGS[len(word) % len(TAGS)]}\n" for word in text) for text in sentences(60)]
        (folder / "tags" / f"{name}.tsv").write_text("\n".join(tagged))


@dataclass(frozen=True)
class Small:
    """Folder of the data, and the size of the models: on a GPU with heads of 64, as in Base."""

    folder: Path
    quick: bool

    @property
    def row_tokens(self) -> int:
        """Tokens of a row."""
        return 64 if self.quick else 256

    def settings(self, rows: int) -> str:
        """Settings of a model, and rows of each task in a step and in a micro-batch."""
        width, rows = (32, 2) if self.quick else (256, rows)
        return (
            f"--model.vocabulary 1000 --model.max-positions {self.row_tokens} --model.width {width} --model.heads 4 "
            f"--model.feed-forward {4 * width} --model.discriminator-layers 2 --model.init-std 0.05 "
            f"--optimizer.warmup-steps 2 --data.mono-rows {rows} --data.para-rows {rows} --data.micro-batch {rows}"
        )

    def prepare(self) -> None:
        """Write the text and the rows of all commands, once."""
        folder = self.folder
        if (folder / "done").exists():
            return
        write_text(folder / "text")
        text = f"--mono {folder}/text/mono --para {folder}/text/para"
        vocab = f"--vocab {folder}/vocab"
        mix = f"mix {vocab} --row-tokens {self.row_tokens}"
        stages = [
            f"vocab {text} --size 1000 --sentences 4000 --out {folder}/vocab",
            f"encode --mono {folder}/text/mono --sentences {vocab} --out {folder}/encoded/alone",
            f"{mix} --mono-rows 640 --sentences --layout xlm --encoded {folder}/encoded/alone --out {folder}/sentences",
        ]
        for part, rows in (("train", 640), ("heldout", 16)):
            encoded = f"{folder}/encoded/{part}"
            stages += [f"encode {text} {vocab} --max-pair-tokens 61 --out {encoded} --split {part} --heldout-share 0.1"]
            mixed = f"{mix} --mono-rows {rows} --para-rows {rows} --encoded {encoded}"
            stages += [f"{mixed} --layout {layout} --out {folder}/{layout}_{part}" for layout in ("xlme", "xlm")]
        for stage in stages:
            data_prep(stage.split())
        (folder / "done").touch()


class Command:
    """A process whose output goes to a file; it is killed after `seconds`."""

    def __init__(self, arguments: Sequence[str], log: Path, seconds: float):
        self.log, self.begin, self.seconds = log, time.monotonic(), seconds
        with log.open("a") as file:
            share = str(max((os.cpu_count() or 1) // 8, 1))  # several run at a time
            env = environment() | dict.fromkeys(("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"), share)
            self.process = subprocess.Popen(arguments, stdout=file, stderr=subprocess.STDOUT, env=env)

    def result(self) -> Figures | None:
        """The end of its output or how it failed, and its seconds; None while it runs."""
        took = time.monotonic() - self.begin
        if self.process.poll() is None and took > self.seconds:
            self.process.kill()
            self.process.wait()
            return {"failed": f"no end after {self.seconds:.0f} s", "seconds": took}
        if self.process.returncode is None:
            return None
        output = " / ".join(self.log.read_text(errors="replace").split("\n")[-4:]).strip(" /")
        if self.process.returncode:
            return {"failed": f"exit code {self.process.returncode}: {output[-600:]}", "seconds": took}
        return {"said": output[-160:], "seconds": took}

    def wait(self) -> Figures:
        """Its result, once it has ended."""
        while (result := self.result()) is None:
            time.sleep(0.05)
        return result


def _xlme(arguments: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "xlme_ds", *arguments.split()]


def _commands(small: Small, out: Path) -> dict[str, tuple[str, list[str]]]:
    """Every command by its name: the name of the command that must run before it, and its arguments."""
    data = small.folder
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "1", "--module", "xlme_ds.pretrain"]
    steps = "--train.steps 20 --train.log-every 9 --train.eval-every 20"
    xlme = f"--recipe quickstart {small.settings(8)} {steps} --data {data}/xlme_train --heldout {data}/xlme_heldout"
    xlm = f"pretrain {small.settings(16)} --model.language-embeddings de en"
    pairs = f"{xlm} {steps} --data {data}/xlm_train --heldout {data}/xlm_heldout"
    text, heldout, tuning = f"{data}/text", f"{data}/xlme_heldout", "--task pos --tuning.epochs 1"
    commands = {
        "pretrain XLM": ("", f"{pairs} --recipe xlm --out {out}/xlm"),
        "pretrain XLM to translate": (
            "pretrain XLM", f"{pairs} --recipe xlm_mt --data.mono-rows 0 --start.folder {out}/xlm --out {out}/mt"
        ),
        "translate": (
            "pretrain XLM to translate",
            f"translate --model {out}/mt --source {text}/source --from de --to en --out {out}/translated "
            f"--reference {text}/reference",
        ),
        "pretrain XLM to translate without pairs": (
            "pretrain XLM",
            f"{xlm} --recipe xlm_umt --data {data}/sentences --data.para-rows 0 --train.steps 4 --train.log-every 2 "
            f"--start.folder {out}/xlm --out {out}/umt",
        ),
        "finetune": (_FIRST, f"finetune {tuning} --model {out}/xlme --data {text}/tags --out {out}/pos"),
        "evaluate pairs": (_FIRST, f"evaluate pairs --model {out}/xlme --data {heldout} --out {out}/pairs"),
        "evaluate losses": (_FIRST, f"evaluate losses --model {out}/xlme --data {heldout} --out {out}/losses"),
        "export": (_FIRST, f"export --run {out}/xlme --to {out}/export"),
    }  # fmt: skip
    return {
        _FIRST: ("", [*launcher, *f"{xlme} --profile 2 --out {out}/xlme".split()]),
        **{name: (before, _xlme(arguments)) for name, (before, arguments) in commands.items()},
        "Python": (_FIRST, [sys.executable, "-W", "ignore", "-c", _API, f"{out}/xlme"]),
    }


def smoke(folder: Path, seconds: float, quick: bool) -> Iterator[Figures]:
    """Run every command, several at a time, each after the one that it needs; yields the result of each."""
    deadline, out, small = time.monotonic() + seconds, folder / "smoke", Small(folder / "data", quick)
    small.prepare()
    waiting = _commands(small, out)
    out.mkdir(exist_ok=True)
    running: dict[str, Command] = {}
    results: dict[str, Figures] = {"": {}}
    while waiting or running:
        ended = {name: result for name, command in running.items() if (result := command.result()) is not None}
        for name in ended:
            del running[name]
        for name, (before, arguments) in list(waiting.items()):
            if before not in results:
                continue
            if not results[before].keys().isdisjoint(("failed", "left_out")):
                ended[name] = {"left_out": f"it needs what failed: {before}"}
            elif time.monotonic() > deadline:
                ended[name] = {"left_out": "the time of this section is up"}
            elif len(running) < max((os.cpu_count() or 1) // 2, 1):
                log = out / f"{name.replace(' ', '_')}.log"
                running[name] = Command(arguments, log, deadline - time.monotonic())
            else:
                continue
            del waiting[name]
        results |= ended
        yield from ({"command": name} | result for name, result in ended.items())
        time.sleep(0.05)


def resume(folder: Path, seconds: float, runs: Sequence[str], quick: bool) -> Iterator[Figures]:
    """Compare an undisturbed run with one that is killed and resumed, bit for bit: losses, norms and weights.

    `runs` are names in `RUNS`; all train at the same time.
    """
    deadline, small = time.monotonic() + seconds, Small(folder / "data", quick)
    small.prepare()

    def start(name: str, run: Path) -> Command:
        arguments = _xlme(
            f"pretrain {RUNS[name]} {small.settings(8)} --engine.deepspeed zero1 --train.steps {STEPS} "
            f"--train.log-every 1 --train.save-every {SAVED} --data {small.folder}/xlme_train --out {run}"
        )
        return Command(arguments, run.with_suffix(".log"), deadline - time.monotonic())

    (folder / "resume").mkdir(parents=True)
    alone, killed = (
        {name: folder / "resume" / f"{name.replace(' ', '_')}_{end}" for name in runs} for end in ("alone", "killed")
    )
    undisturbed, first = ({name: start(name, run) for name, run in group.items()} for group in (alone, killed))
    second: dict[str, tuple[int, Command]] = {}
    while len(second) < len(runs):
        for name in [name for name in runs if name not in second]:
            if len(_lines(killed[name])) >= KILLED or first[name].result() is not None:
                first[name].process.kill()
                first[name].process.wait()
                second[name] = len(_lines(killed[name])), start(name, killed[name])
        time.sleep(0.005)
    for name, (step, resumed) in second.items():
        results = {"alone": undisturbed[name].wait(), "resumed": resumed.wait()}
        failed = [f"{end}: {result['failed']}" for end, result in results.items() if "failed" in result]
        row = {"failed": "; ".join(failed)} if failed else _compared(alone[name], killed[name])
        yield {"run": name, "killed_after_step": step} | row


def _lines(run: Path) -> list[Figures]:
    """The steps in a run's log, without a line that is being written."""
    steps = []
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        for line in (run / "metrics.jsonl").read_text().splitlines():
            steps.append(json.loads(line))
    return steps


def _compared(alone: Path, killed: Path) -> Figures:
    """Whether two runs have the same losses, norms and weights."""
    ours, theirs = (
        {line["step"]: (line["loss"], line["grad_norm"]) for line in _lines(run)} for run in (alone, killed)
    )
    different = [step for step in ours if ours[step] != theirs.get(step)]
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (alone, killed)]
    same = weights[0] == weights[1]
    return {"steps": len(ours), "first_that_differs": min(different, default=None), "same_weights": same,
            "ok": len(ours) == STEPS and not different and same}  # fmt: skip
