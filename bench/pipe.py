"""Memory of `data_prep encode` on a text of any size that is nowhere stored: it comes through a named pipe.

    python -m bench.pipe [--gigabytes 20] [--ranks 2] [--out DIR] [--json]

The text is the documents of a few languages' files, shuffled anew in every round until there is enough. Each rank tells
its own peak (resident set, from the kernel). The encoded text needs about as much disk as the text has bytes; it is
removed at the end.
"""

import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

import tyro

from bench.tokenize_sides import ROOT, mpiexec
from bench.tokenize_text import corpus_files, documents_of, trained

LANGUAGES = ("de", "en", "ru", "th", "zh-Hans")


@dataclass(frozen=True)
class Settings:
    """What is measured."""

    gigabytes: float = 20.0
    """Of text, 10^9 bytes."""
    ranks: int = 2
    corpus: Path | None = None
    """Folder with mono/<lang>.txt.xz; without it ../shared/data/corpus, or else the sample corpus (fetched)."""
    size: int = 32_000
    """Ids of the vocabulary that is trained on the text."""
    out: Path | None = None
    """Where the scratch folder is made; without it where the system keeps temporary files."""
    json: bool = False
    """Print JSON."""


def feed(pipe: Path, documents: list[bytes], size: int) -> None:
    """Write documents to the pipe, in a new order every round, until `size` bytes went through it."""
    order = random.Random(0)
    with open(pipe, "wb") as stream:
        while size > 0:
            order.shuffle(documents)
            for start in range(0, len(documents), 1000):
                part = b"".join(documents[start : start + 1000])
                stream.write(part)
                size -= len(part)
                if size <= 0:
                    break


def measure(settings: Settings, scratch: Path) -> dict[str, float]:
    """Run encode on a pipe, and say what it took."""
    mono, files = corpus_files(settings.corpus, LANGUAGES, 10.0, scratch)
    vocab = trained(mono, scratch / "vocab", settings.size, 50_000)
    documents = [
        "".join(f"{line}\n" for line in document).encode() + b"\n"
        for paths in files.values()
        for path in paths
        for document in documents_of(path)
    ]
    (scratch / "stream").mkdir()
    os.mkfifo(scratch / "stream" / "en.txt")
    feeder = threading.Thread(target=feed, args=(scratch / "stream" / "en.txt", documents, settings.gigabytes * 1e9))
    feeder.daemon = True  # a failed encode leaves it waiting
    feeder.start()
    command = [mpiexec(), "-n", str(settings.ranks), sys.executable, "-m", "bench.pipe", "--rank"]
    done = subprocess.run([*command, vocab, scratch / "stream", scratch / "encoded"], cwd=ROOT, stdout=subprocess.PIPE)
    if done.returncode:
        raise ValueError(f"encode ended with code {done.returncode}")
    counts = json.loads((scratch / "encoded" / "mono" / "manifest.json").read_text())["counts"]["by_language"]["en"]
    peaks = [int(line.split()[1]) for line in done.stdout.decode().splitlines() if line.startswith("peak ")]
    assert len(peaks) == settings.ranks
    return {
        "gigabytes": round(counts["bytes"] / 1e9, 3),
        "tokens": counts["tokens"],
        "documents": counts["documents"],
        "ranks": settings.ranks,
        "peak_mib_of_a_rank": round(max(peaks) / 1024, 1),
    }


def _rank(vocab: str, stream: str, out: str) -> None:
    from data_prep.encode import EncodeConfig, run

    run(EncodeConfig(vocab=Path(vocab), out=Path(out), mono=Path(stream)))
    print(f"peak {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}", flush=True)


def main() -> None:
    """Measure and print."""
    settings = tyro.cli(Settings, description=__doc__)
    try:
        with tempfile.TemporaryDirectory(dir=settings.out) as scratch:
            figures = measure(settings, Path(scratch))
    except ValueError as error:
        sys.exit(f"bench.pipe: error: {error}")
    print(json.dumps(figures, indent=1) if settings.json else "\n".join(f"{k:<24}{v:>18,}" for k, v in figures.items()))


if __name__ == "__main__":
    _rank(*sys.argv[2:]) if sys.argv[1:2] == ["--rank"] else main()
