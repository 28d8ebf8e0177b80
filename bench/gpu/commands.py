"""Every command that touches a GPU, in small, on text that is written here; and runs that are killed and resumed."""

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
from typing import Any

from data_prep.__main__ import main as data_prep
from xlme_ds.run_commands import environment

Figures = dict[str, Any]
STEPS, SAVED, KILLED = 60, 20, 33  # of a run that is killed: all, from one checkpoint to the next, and when
TAGS = ("NOUN", "VERB", "ADJ", "ADV", "DET")
_FIRST = "pretrain, by the launcher"
_API = """import sys, xlme_ds
model = xlme_ds.load(sys.argv[1])
print(len(model.judge("ba ce di")), model.fill("ba <mask> di", top=2), model.encode(["ba ce", "di"]).shape)"""


def write_text(folder: Path) -> None:
    """A hundred documents and a thousand pairs of two made-up languages, of which one is the other's words changed; and
    the tags of some sentences, which follow from the word."""
    rng = random.Random(0)
    words = ["".join(rng.choices("bcdfgklmnprst", k=1)[0] + rng.choice("aeiou") for _ in range(rng.randint(1, 4)))
             for _ in range(600)]  # fmt: skip

    def sentences(count: int) -> list[list[str]]:
        return [rng.choices(words, range(600, 0, -1), k=rng.randint(5, 20)) for _ in range(count)]

    def lines(text: Sequence[Sequence[str]], language: str) -> list[str]:
        return [" ".join(word if language == "en" else word[::-1] for word in sentence) for sentence in text]

    for part in ("mono", "para", "tags"):
        (folder / part).mkdir(parents=True)
    pairs, documents = sentences(1000), {language: sentences(1000) for language in ("de", "en")}
    for language, text in documents.items():
        paragraphs = lines(text, language)
        parts = ["\n".join(paragraphs[start : start + 10]) for start in range(0, len(paragraphs), 10)]
        (folder / "mono" / f"{language}.txt").write_text("\n\n".join(parts) + "\n")
        (folder / "para" / f"X.de-en.{language}").write_text("\n".join(lines(pairs, language)) + "\n")
    (folder / "source").write_text("\n".join(lines(pairs[:20], "de")) + "\n")
    (folder / "reference").write_text("\n".join(lines(pairs[:20], "en")) + "\n")
    for name in ("train-en", "dev-en", "test-en", "test-de"):
        tagged = ["".join(f"{word}\t{TAGS[len(word) % len(TAGS)]}\n" for word in text) for text in sentences(60)]
        (folder / "tags" / f"{name}.tsv").write_text("\n".join(tagged))


@dataclass(frozen=True)
class Small:
    """Folder of the data, and the size of the models: on a GPU with heads of 64, as Base has."""

    folder: Path
    quick: bool

    @property
    def row_tokens(self) -> int:
        """Tokens of a row."""
        return 64 if self.quick else 256

    def words(self, rows: int) -> str:
        """Settings of a model, and rows of each task in a step and in a micro-batch."""
        width, rows = (32, 2) if self.quick else (256, rows)
        return (
            f"--model.vocabulary 1000 --model.max-positions {self.row_tokens} --model.width {width} --model.heads 4 "
            f"--model.feed-forward {4 * width} --model.discriminator-layers 2 --model.init-std 0.05 "
            f"--optimizer.warmup-steps 2 --data.mono-rows {rows} --data.para-rows {rows} --data.micro-batch {rows}"
        )

    def prepare(self) -> None:
        """Write the text, and the rows of all commands; what is there is not made again."""
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
    """A process of `words`, whose output goes to a file; `seconds` after its begin it is killed."""

    def __init__(self, words: Sequence[str], log: Path, seconds: float):
        self.log, self.begin, self.seconds = log, time.monotonic(), seconds
        with log.open("a") as file:
            env = environment() | {"OMP_NUM_THREADS": str(max((os.cpu_count() or 1) // 8, 1))}  # several run at a time
            self.process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=env)

    def ended(self) -> Figures | None:
        """How it ended; None while it runs."""
        took = time.monotonic() - self.begin
        if self.process.poll() is None and took > self.seconds:
            self.process.kill()
            self.process.wait()
            return {"failed": f"no end after {self.seconds:.0f} s", "seconds": took}
        if self.process.returncode is None:
            return None
        said = " / ".join(self.log.read_text(errors="replace").split("\n")[-4:]).strip(" /")
        words = {"said": said[-160:]}
        if self.process.returncode:
            words = {"failed": f"exit code {self.process.returncode}: {said[-600:]}"}
        return words | {"seconds": took}


def _xlme(words: str) -> list[str]:
    return [sys.executable, "-W", "ignore", "-m", "xlme_ds", *words.split()]


def _commands(small: Small, out: Path) -> dict[str, tuple[str, list[str]]]:
    """The command before, and the words, of every command by its name."""
    data = small.folder
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", "--num_gpus", "1", "--module", "xlme_ds.pretrain"]
    steps = "--train.steps 20 --train.log-every 9 --train.eval-every 20"
    xlme = f"--recipe quickstart {small.words(8)} {steps} --data {data}/xlme_train --heldout {data}/xlme_heldout"
    xlm = f"pretrain {small.words(16)} --model.language-embeddings de en"
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
    found = {_FIRST: ("", [*launcher, *f"{xlme} --profile 2 --out {out}/xlme".split()])}
    found |= {name: (before, _xlme(words)) for name, (before, words) in commands.items()}
    return found | {"Python": (_FIRST, [sys.executable, "-W", "ignore", "-c", _API, f"{out}/xlme"])}


def smoke(folder: Path, seconds: float, quick: bool) -> Iterator[Figures]:
    """Every command in small, several at a time, each once the one before it has ended; how each ended."""
    deadline, out, small = time.monotonic() + seconds, folder / "smoke", Small(folder / "data", quick)
    small.prepare()
    waiting = _commands(small, out)
    out.mkdir(exist_ok=True)
    running: dict[str, Command] = {}
    ended: dict[str, Figures] = {"": {}}
    while waiting or running:
        for name, (before, words) in list(waiting.items()):
            if "failed" in ended.get(before, {}) or "left_out" in ended.get(before, {}):
                ended[name] = {"left_out": f"it needs what failed: {before}"}
            elif before in ended and time.monotonic() > deadline:
                ended[name] = {"left_out": "the time of this section is up"}
            elif before in ended and len(running) < max((os.cpu_count() or 1) // 2, 1):
                left = deadline - time.monotonic()
                running[name] = Command(words, out / f"{name.replace(' ', '_')}.log", left)
            else:
                continue
            del waiting[name]
            if name in ended:
                yield {"command": name} | ended[name]
        for name, command in list(running.items()):
            found = command.ended()
            if found is not None:
                del running[name]
                ended[name] = found
                yield {"command": name} | found
        time.sleep(0.05)


def resume(folder: Path, seconds: float, modes: Sequence[str], quick: bool) -> Iterator[Figures]:
    """For each form of `model.compile`, all at a time, a run left alone and one that is killed and resumed: are their
    losses, norms and weights equal, bit for bit?"""
    deadline, small = time.monotonic() + seconds, Small(folder / "data", quick)
    small.prepare()

    def start(run: Path) -> Command:
        words = _xlme(
            f"pretrain --recipe quickstart {small.words(8)} --engine.deepspeed zero1 --train.steps {STEPS} "
            f"--train.log-every 1 --train.save-every {SAVED} --data {small.folder}/xlme_train --out {run}"
        )
        mode = run.name.split("_")[0]
        words += [] if mode == "default" else ["--model.compile", mode]
        return Command(words, run.with_suffix(".log"), deadline - time.monotonic())

    (folder / "resume").mkdir(parents=True)
    alone = {mode: folder / "resume" / f"{mode}_alone" for mode in modes}
    killed = {mode: folder / "resume" / f"{mode}_killed" for mode in modes}
    undisturbed, first = ({mode: start(run) for mode, run in runs.items()} for runs in (alone, killed))
    second: dict[str, tuple[int, Command]] = {}
    while len(second) < len(modes):
        for mode in [mode for mode in modes if mode not in second]:
            if len(_lines(killed[mode])) >= KILLED or first[mode].ended() is not None:
                first[mode].process.kill()
                first[mode].process.wait()
                second[mode] = len(_lines(killed[mode])), start(killed[mode])
        time.sleep(0.005)
    for mode, (at, resumed) in second.items():
        ends = {"alone": _wait(undisturbed[mode]), "resumed": _wait(resumed)}
        failed = [f"{name}: {end['failed']}" for name, end in ends.items() if "failed" in end]
        found = {"failed": "; ".join(failed)} if failed else _compared(alone[mode], killed[mode])
        yield {"compile": mode, "killed_after_step": at} | found


def _wait(command: Command) -> Figures:
    while (found := command.ended()) is None:
        time.sleep(0.05)
    return found


def _lines(run: Path) -> list[Figures]:
    """The steps that a run has logged, without a line that is being written."""
    found = []
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
        for line in (run / "metrics.jsonl").read_text().splitlines():
            found.append(json.loads(line))
    return found


def _compared(alone: Path, killed: Path) -> Figures:
    ours, theirs = (
        {line["step"]: (line["loss"], line["grad_norm"]) for line in _lines(run)} for run in (alone, killed)
    )
    other = [step for step in ours if ours[step] != theirs.get(step)]
    weights = [(run / "model" / "model.safetensors").read_bytes() for run in (alone, killed)]
    same = weights[0] == weights[1]
    return {"steps": len(ours), "first_that_differs": min(other, default=None), "same_weights": same,
            "ok": len(ours) == STEPS and not other and same}  # fmt: skip
