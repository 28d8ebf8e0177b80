"""The whole road of data preparation and the start of a training, as Slurm jobs on synthetic text of any size.

    python -m bench.rehearsal --gigabytes 40 --source ../shared/data/corpus --out FOLDER

Writes the text (`bench.rehearsal_text`), then submits every stage from the repository's folder as a batch job and kills
it once at a random moment: a VoCap vocabulary and two joint ones, encode, mix of each task, verify, stats, and a short
training that is stopped and resumed. What comes out is compared with what was planted and with formulas; the first
difference ends it with a sentence. FOLDER/rehearsal.json keeps what every stage took (`bench.measured`), next to what
docs/howto/corpus.md predicts, and the same command goes on after an interruption. Without a cluster,
`tests/slurm/minislurm.sh start 2` makes one of two nodes on a machine.
"""

import json
import lzma
import math
import os
import random
import shlex
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from bench.rehearsal_text import TextFile, files, repeated, write_text
from data_prep.sampling import Order, apportion, temperature_shares
from xlme_ds.config import DataConfig
from xlme_ds.data.order import plan_step
from xlme_ds.data.schema import read_manifest, write_json
from xlme_ds.data.vocabulary import Vocabulary
from xlme_ds.train.run_folder import RunFolder

_CORPORA = ("cc100", "multiun", "iitb", "opus", "wikimatrix", "ccaligned")
_OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
_ALPHA = 0.7
_READ = "read"
_SHORT = {
    "data.mono-rows": 8,
    "data.para-rows": 8,
    "data.micro-batch": 4,
    "engine.precision": "fp32",
    "optimizer.warmup-steps": 4,
    "train.steps": 20,
    "train.log-every": 1,
    "train.save-every": 5,
}
_LINES = 2_000  # of a language, whose tokens are counted under every vocabulary
# MB a second of one core, of what: docs/lab_log.md has how they were measured.
_RATES = {"text": 12.0, "sample": 41.0, "encode": 10.0, "mix": 120.0, "verify": 400.0}


@dataclass(frozen=True)
class Rehearsal:
    """Rehearse data preparation at a size of your choice."""

    gigabytes: float
    """Text in 10⁹ bytes. Needs about 1.6 times as much of disk, or 0.3 times after --lean has removed what is read."""
    source: Path
    """Folder with mono/ and para/ of real text, from which lines are recombined."""
    out: Path
    """Folder for everything: text, vocabularies, encoded and mixed data, and rehearsal.json."""
    ids: int = 524_288
    """Ids of the VoCap vocabulary and of a joint one; another joint one has fewer than half as many."""
    rows: int = 10_000_000
    """Training rows of each task."""
    row_tokens: int = 512
    """Tokens of a row."""
    seed: int = 0
    """Seed of the text, and of the moments of the kills."""
    sbatch: str = "--nodes=2 --ntasks-per-node=1 --cpus-per-task=1"
    """Options of every job of data preparation."""
    kills: bool = True
    """Kill every stage once."""
    lean: bool = False
    """Remove text, and encoded documents, as soon as no later stage reads them."""
    until: str = ""
    """Name of the last stage to do."""

    @property
    def text_flags(self) -> list[str]:
        """Flags that name the text."""
        return [
            word
            for name in _CORPORA
            for word in ("--corpus", name, "--where", f"{name}={self.out.resolve() / 'text' / name}")
        ]

    @cached_property
    def texts(self) -> list[TextFile]:
        """The files of text."""
        return files(self.gigabytes)

    @property
    def stages(self) -> dict[str, Callable[[], dict[str, Any]]]:
        """What is done, in order."""
        few = ["--sentences", 20_000] if self.gigabytes < 1 else []
        vocap = ["--size", self.ids, *few, "--largest", min(50_000, self.ids // 4), "--step", min(1000, self.ids // 64)]
        half = min(250_002, self.ids // 2)
        encoded, mixed = self.out / "encoded", self.out / "mixed"
        mix = ["--encoded", encoded, "--vocab", self.out / "vocap", "--row-tokens", self.row_tokens, "--alpha", _ALPHA]
        job = self.job
        return {
            "text": self.write_texts,
            "vocap": partial(job, "vocap", "vocap", *self.text_flags, *vocap),
            "joint": partial(job, "joint", "vocab", *self.text_flags, "--size", half, *few),
            "joint_large": partial(job, "joint_large", "vocab", *self.text_flags, "--size", self.ids, *few),
            "tokens": self.count_tokens,
            "encode": partial(job, "encoded", "encode", *self.text_flags, "--vocab", self.out / "vocap"),
            "planted": self.check_planted,
            "mix_mono": partial(job, "mixed", "mix", *mix, "--mono-rows", self.rows, task="mono"),
            "mix_para": partial(job, "mixed", "mix", *mix, "--para-rows", self.rows, task="para"),
            "verify": partial(job, "", "verify", "--data", mixed),
            "stats": partial(job, "stats", "stats", "--encoded", encoded, "--data", mixed),
            "order": self.check_order,
            "train": self.train,
        }

    def run(self) -> None:
        """Do what is left."""
        self.out.mkdir(parents=True, exist_ok=True)
        path = self.out / "rehearsal.json"
        record = json.loads(path.read_text()) if path.exists() else {}
        for name, do in self.stages.items():
            if name not in record:
                print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
                began = time.monotonic()
                record[name] = {"seconds": None, **do()}
                record[name]["seconds"] = record[name]["seconds"] or time.monotonic() - began
                write_json(path, record)
                print(f"{'':8} {json.dumps(_rounded(record[name]))[:1000]}", flush=True)
            if name == self.until:
                return
            if self.lean and name in ("encode", "mix_mono"):
                self._remove_read(name)

    def _remove_read(self, stage: str) -> None:
        """Remove what no later stage reads: text, and documents' shards."""
        if stage == "encode":
            for name in _CORPORA:
                shutil.rmtree(self.out / "text" / name, ignore_errors=True)
        else:
            for path in (self.out / "encoded" / "mono").rglob("*.arrow"):
                path.unlink()

    # Stages

    def write_texts(self) -> dict[str, Any]:
        """Write the text with as many processes as there are cores."""
        write = partial(write_text, source=self.source, out=self.out / "text", seed=self.seed)
        with ProcessPoolExecutor(os.cpu_count()) as pool:
            planted = list(pool.map(write, self.texts))
        stored = sum(path.stat().st_size for path in (self.out / "text").rglob("*") if path.is_file())
        return {
            "text_bytes": sum(p.text_bytes for p in planted),
            "lines": sum(p.lines for p in planted),
            "disk": stored,
        }

    def job(self, folder: str, stage: str, *flags: object, task: str = "") -> dict[str, Any]:
        """Submit a stage, kill its processes once, submit it again if that ended the job; what it took."""
        name = folder + task if folder else stage
        out = ["--out", self.out / folder] if folder else []
        measured, log = self.out / "measured" / name, self.out / "logs" / f"{name}.out"
        for path in (measured, log.parent):
            path.mkdir(parents=True, exist_ok=True)
        began, kill = time.monotonic(), Kill(self, name, folder, task)
        for _ in range(2):
            python = f"{sys.executable} -m bench.measured {measured.resolve()}"
            options = [f"--output={log}", *shlex.split(self.sbatch)]
            number = _slurm("sbatch", *options, "--parsable", "slurm/stage.sh", stage, *flags, *out, XLME_PYTHON=python)
            number = number.strip().split(";")[0]
            while (state := _field(number, "JobState")) not in _OVER:
                kill.look(number, state)
                time.sleep(0.2 if self.gigabytes < 1 else 2)
            if state == "COMPLETED" or not kill.done:
                break
        _refuse(state == "COMPLETED", f"job {number} of {stage} ended as {state}: see {log}")
        done = {"seconds": time.monotonic() - began, "kills": kill.done, "requeues": int(_field(number, "Restarts"))}
        return done | self._taken(measured, self.out / folder / task)

    def _taken(self, measured: Path, folder: Path) -> dict[str, Any]:
        """Sums and peaks over all processes, those of a killed try too."""
        samples = [json.loads(path.read_text()) for path in measured.glob("*.json")]
        total = {key: sum(sample[key] for sample in samples) for key in ("cpu_seconds", "rchar", "wchar", "read_bytes")}
        peaks = {f"most_{key}": max(sample[key] for sample in samples) for key in ("peak_bytes", "open_files")}
        left = [path for path in folder.rglob("*") if path.is_file()] if folder != self.out else []
        return total | peaks | {"files": len(left), "disk": sum(path.stat().st_size for path in left)}

    def count_tokens(self) -> dict[str, Any]:
        """Tokens per character of every language's first lines under each vocabulary."""
        vocabularies = {name: Vocabulary(self.out / name) for name in ("vocap", "joint", "joint_large")}
        found: dict[str, dict[str, float]] = {}
        for file in self.texts:
            if file.corpus == "cc100":
                lines = _first_lines(self.out / "text" / file.path)
                characters = sum(map(len, lines))
                found[file.name] = {
                    name: sum(len(vocabulary.encode(line)) for line in lines) / characters
                    for name, vocabulary in vocabularies.items()
                }
        ratios = {
            name: float(np.median([counts["vocap"] / counts[name] for counts in found.values()]))
            for name in ("joint", "joint_large")
        }
        return {"tokens_per_character": found, "vocap_over": ratios}

    def check_planted(self) -> dict[str, Any]:
        """What encode removed and repaired is what was planted, to the line."""
        checked = 0
        for task in ("mono", "para"):
            counts = read_manifest(self.out / "encoded" / task).counts["by_language"]
            for name, found in counts.items():
                lines, wanted = self._planted(task, name)
                got = Counter(found["removed" if task == "mono" else "dropped"]) + Counter(found["repaired"])
                by_tokens = got.pop("length_ratio", 0) + got.pop("length", 0)
                got[_READ] = found["paragraphs_in" if task == "mono" else "pairs_in"]
                wanted[_READ] = lines
                # of the pairs that token counts drop, some were duplicates
                less = wanted["exact_duplicates"] - got["exact_duplicates"]
                if 0 < less <= by_tokens:
                    wanted["exact_duplicates"] -= less
                _refuse(got == +wanted, f"{name}: encode counted {dict(got)}, planted are {dict(wanted)}")
                checked += lines
        return {"lines": checked}

    def _planted(self, task: str, name: str) -> tuple[int, Counter[str]]:
        notes = [
            self.out / "text" / "planted" / f"{f.path}.json"
            for f in self.texts
            if (len(f.languages) == 2) == (task == "para") and f.name == name
        ]
        planted = [json.loads(note.read_text()) for note in notes]
        wanted: Counter[str] = sum((Counter(each["damaged"]) for each in planted), Counter())
        wanted["exact_duplicates"] = planted[0]["exact_duplicates"]
        if task == "para":
            wanted["exact_duplicates"] = repeated(np.concatenate([np.load(n.with_suffix(".npy")) for n in notes]))
        return sum(each["lines"] for each in planted), wanted

    def check_order(self) -> dict[str, Any]:
        """Shares, repeats and passes of the monolingual rows by formulas; and 512 ranks read every row once."""
        manifest = read_manifest(self.out / "mixed" / "mono")
        counts = manifest.counts["by_language"]
        examples = [counts[name]["available"] for name in counts]
        weights = np.array(examples, float) ** _ALPHA
        wanted = self.rows * weights / weights.sum()
        used = np.array([counts[name]["used"] for name in counts])
        _refuse(used.sum() == self.rows and np.abs(used - wanted).max() < 1.001, "the shares of mix are not m^0.7")
        repeats = {name: each["used"] / each["available"] for name, each in counts.items()}
        order = self._order(list(counts), examples)
        _refuse(list(order.quotas) == used.tolist(), "the order has other uses than the manifest")
        _passes(order)
        ranks = self._ranks_read_once(manifest.rows)
        most = max(repeats, key=lambda name: repeats[name])
        shares = {name: [counts[name]["share_before"], counts[name]["share_after"]] for name in ("en", most)}
        return {"most_repeated": [most, repeats[most]], "shares": shares, "ranks": ranks}

    def _order(self, names: list[str], examples: list[int]) -> Order:
        """The order that mix follows, made from its record and encode's."""
        settings = read_manifest(self.out / "mixed" / "mono").settings
        block, stretch = (int(number) for number in settings["order"].split() if number.isdigit())
        encoded = read_manifest(self.out / "encoded" / "mono").counts["by_language"]
        mean = sum(counts["tokens"] for counts in encoded.values()) / sum(examples)
        shares = tuple(temperature_shares(examples, _ALPHA))
        quotas = tuple(apportion(self.rows, shares))
        kept = tuple(names), tuple(examples), shares, quotas, settings["seed"], "mono", block, int(stretch / mean)
        return Order(*kept)

    def _ranks_read_once(self, rows: int, ranks: int = 512) -> int:
        """Whether the steps of an epoch, each by all ranks, read every row exactly once; the number of ranks."""
        ranks = min(ranks, rows // 4)
        data = DataConfig(mono_rows=4 * ranks, para_rows=0, micro_batch=2)
        plan, read = plan_step(data, ranks), np.zeros(rows, np.int64)
        for step in range(rows // data.mono_rows):
            for rank in range(ranks):
                for micro_batch in range(plan.accumulation):
                    read[plan.numbers(step, rank, micro_batch, 0)] += 1
        left = rows % data.mono_rows
        _refuse(bool((read[: rows - left] == 1).all() and not read[rows - left :].any()), "a row was not read once")
        return ranks

    def train(self) -> dict[str, Any]:
        """Twenty steps of Base's recipe at reduced width, stopped and resumed; the first batch; XL's plan."""
        out, log = self.out / "run", self.out / "logs" / "train.out"
        model = {"vocabulary": self.ids, "width": 64, "heads": 2, "feed-forward": 128, "max-positions": self.row_tokens}
        settings = {f"model.{key}": value for key, value in model.items()} | _SHORT
        words = [word for key, value in settings.items() for word in (f"--{key}", str(value))]
        places = {"XLME_DATA": str(self.out / "mixed"), "XLME_OUT": str(out), "XLME_HELDOUT": ""}
        options = [f"--output={log}", "--gpus-per-node=0", "--mem=0", *shlex.split(self.sbatch)]
        number = _slurm("sbatch", *options, "--parsable", "slurm/pretrain_base.sh", *words, "--train.audit", **places)
        number, stopped = number.strip().split(";")[0], False
        while (state := _field(number, "JobState")) not in _OVER:
            if not stopped and RunFolder(out).steps_logged() >= 8:
                subprocess.run(["scancel", "--signal=USR1", f"{number}.0"], check=True)
                stopped = True
            time.sleep(0.2)
        _refuse(state == "COMPLETED", f"job {number} of the training ended as {state}: see {log}")
        audit = [sys.executable, "-m", "xlme_ds.audit", "--run", str(out), "--data", str(self.out / "mixed")]
        said = subprocess.run(audit, check=True, capture_output=True, text=True).stdout.strip()
        xl = [sys.executable, "-m", "xlme_ds.plan", "--recipe", "xl", "--model.vocabulary", str(self.ids), "--json"]
        planned = json.loads(subprocess.run(xl, check=True, capture_output=True, text=True).stdout)
        requeues = int(_field(number, "Restarts"))
        return {"requeues": requeues, "audit": said, "xl": planned["parameters"], "first_batch": self._first_batch()}

    def _first_batch(self) -> dict[str, float]:
        """Seconds from opening the data, evicted from the cache, to a rank's batch in the middle of them."""
        folder = self.out / "mixed"
        for path in folder.rglob("*.arrow"):
            with open(path, "rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        code = f"""
import time
from pathlib import Path
from xlme_ds.config import DataConfig
from xlme_ds.data.loader import Loader
began = time.perf_counter()
loader = Loader(Path({str(folder)!r}), DataConfig(mono_rows=32, para_rows=32, micro_batch=16), 0, 0.15, 1, 2)
loader.batch({self.rows // 64}, 0)
print(time.perf_counter() - began)
"""
        seconds = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
        return {"seconds": float(seconds), "bytes": sum(path.stat().st_size for path in folder.rglob("*.arrow"))}


class Kill:
    """Kills the processes of a job once, a random while after its first finished task; of verify and stats, which
    record none, after their start."""

    def __init__(self, rehearsal: Rehearsal, name: str, folder: str, task: str):
        self.done = not rehearsal.kills
        self.tasks = rehearsal.out / folder if folder not in ("", "stats") else None
        self.delay = random.Random(f"{rehearsal.seed} {name}").uniform(0, 2 + 3 * rehearsal.gigabytes)
        self.task, self.due = task, math.inf

    def look(self, number: str, state: str) -> None:
        """Kill the job's processes when it is time."""
        if self.done or state != "RUNNING":
            return
        if self.due == math.inf and self._begun():
            self.due = time.monotonic() + self.delay
        if time.monotonic() > self.due:
            subprocess.run(["scancel", "--signal=KILL", f"{number}.0"], check=False)
            self.done = True

    def _begun(self) -> bool:
        if self.tasks is None:
            return True
        markers = self.tasks.glob(f"{self.task}/tasks/*.json" if self.task else "**/tasks/*.json")
        return any(not path.name.endswith(".begun.json") for path in markers)


def _passes(order: Order) -> None:
    """Every example of a language comes once before any comes again: the order of all slots, language by language."""
    parts = [
        order.locate(np.arange(first, min(first + order.block, order.total)))
        for first in range(0, order.total, order.block)
    ]
    languages, examples = (np.concatenate(column) for column in zip(*parts, strict=True))
    by_language = np.argsort(languages, kind="stable")
    ends = np.cumsum(np.bincount(languages, minlength=len(order.names)))
    for name, size, uses in zip(order.names, order.examples, np.split(examples[by_language], ends[:-1]), strict=True):
        for first in range(0, len(uses), size):
            some = np.sort(uses[first : first + size])
            whole = len(some) < size or bool((some == np.arange(size)).all())
            _refuse(whole and bool((np.diff(some) > 0).all()), f"{name}: pass {first // size} repeats an example")


def _first_lines(path: Path) -> list[str]:
    with lzma.open(path, "rt", encoding="utf-8", errors="replace") as file:
        return [line.strip() for line in islice(file, _LINES) if line.strip()]


def _slurm(*command: object, **variables: str) -> str:
    done = subprocess.run([str(word) for word in command], env=os.environ | variables, capture_output=True, text=True)
    _refuse(done.returncode == 0, f"{command[0]}: {done.stderr.strip()}")
    return done.stdout


def _field(number: str, name: str) -> str:
    shown = _slurm("scontrol", "show", "job", "--oneliner", number)
    return next(word.split("=", 1)[1] for word in shown.split() if word.startswith(f"{name}="))


def _refuse(good: bool, sentence: str) -> None:
    if not good:
        raise ValueError(sentence)


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    return round(value, 3) if isinstance(value, float) else value


if __name__ == "__main__":
    try:
        tyro.cli(Rehearsal).run()
    except ValueError as error:
        sys.exit(f"bench.rehearsal: {error}")
