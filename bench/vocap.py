"""VoCap against a joint unigram vocabulary of the same size: tokens per character of each language on held-out lines.

    python -m bench.vocap --mono ../shared/data/corpus/mono --out runs/vocap [--size 65536] [--processes 2] [--json]

Every 20th line is held out, unless it also occurs among the language's other lines. Both vocabularies are trained on
the rest by the stages `vocab` and `vocap` themselves. A relaunch goes on where the last one stopped.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import tyro

from data_prep import vocab, vocap
from data_prep.clean import Counts
from data_prep.readers import documents, find_documents
from data_prep.vocab import VocabConfig
from data_prep.vocap import VocapConfig
from xlme_ds.data.schema import UNK
from xlme_ds.data.vocabulary import Vocabulary

HELD_OUT = 20  # one line in so many


@dataclass(frozen=True)
class Settings:
    """What is compared."""

    mono: Path
    """Folder of documents, `<lang>.txt[.xz|...]`."""
    out: Path
    """Folder to work in: train/, heldout/, joint/, vocap/."""
    size: int = 65_536
    """Ids of both vocabularies."""
    joint_sentences: int = 200_000
    """Lines for the joint vocabulary, by temperature 0.7."""
    sentences: int = 10_000
    """Lines of a language at most, for its curve."""
    largest: int = 8192
    """Pieces of a language at most."""
    step: int = 250
    shrink: float = 0.6
    beta: float = 0.7
    processes: int = 1
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Measured:
    """One language: characters of training text, tokens a character and unknown tokens in percent on held-out lines."""

    language: str
    characters: int
    held_out: int
    joint: float
    vocap: float
    joint_unknown: float
    vocap_unknown: float

    @property
    def change(self) -> float:
        """Tokens a character of VoCap against the joint vocabulary, in percent."""
        return 100 * (self.vocap / self.joint - 1)


def split(mono: Path, out: Path) -> None:
    """Write out/train and out/heldout, plain text."""
    for folder in ("train", "heldout"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    for source in find_documents(mono):
        lines = [line for document in documents(source, Counts("documents")) for line in document]
        train = [line for i, line in enumerate(lines) if i % HELD_OUT != HELD_OUT // 2]
        known = set(train)
        held = [line for line in lines[HELD_OUT // 2 :: HELD_OUT] if line not in known]
        for folder, texts in (("train", train), ("heldout", held)):
            path = out / folder / f"{source.languages[0]}.txt"
            path.write_text("".join(f"{line}\n" for line in texts), encoding="utf-8")


def measure(out: Path, model: str, joint: str = "joint") -> Iterator[Measured]:
    """Both vocabularies on every language with held-out lines."""
    vocabularies = [Vocabulary(out / joint), Vocabulary(out / model)]
    for path in sorted((out / "heldout").glob("*.txt")):
        lines = path.read_text(encoding="utf-8").split("\n")
        characters = sum(map(len, lines))
        if not characters:
            continue
        ids = [[token for line in lines for token in v.encode(line).tolist()] for v in vocabularies]
        density = [len(tokens) / characters for tokens in ids]
        unknown = [100 * tokens.count(UNK) / len(tokens) for tokens in ids]
        size = len((out / "train" / path.name).read_text(encoding="utf-8"))
        yield Measured(path.stem, size, characters, *density, *unknown)


def table(found: Sequence[Measured]) -> str:
    """Medians by third of the languages by amount of training text, and the ten smallest languages."""
    ranked = sorted(found, key=lambda m: m.characters)
    thirds = [ranked[len(ranked) * i // 3 : len(ranked) * (i + 1) // 3] for i in range(3)]
    head = ("characters", "joint", "VoCap", "change", "joint unknown", "VoCap unknown")
    rows = [
        ("languages", *head),
        *(
            (f"{name} third ({len(group)}), median", *_medians(group))
            for name, group in zip(("smallest", "middle", "largest"), thirds, strict=True)
            if group
        ),
    ]
    rows += [(m.language, *_medians([m])) for m in ranked[:10]]
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:]])


def _medians(group: Sequence[Measured]) -> tuple[str, ...]:
    return (
        f"{median(m.characters for m in group):,.0f}",
        f"{median(m.joint for m in group):.3f}",
        f"{median(m.vocap for m in group):.3f}",
        f"{median(m.change for m in group):+.1f}%",
        f"{median(m.joint_unknown for m in group):.2f}%",
        f"{median(m.vocap_unknown for m in group):.2f}%",
    )


def main(settings: Settings) -> None:
    """Split, make both vocabularies, compare."""
    out, train = settings.out, settings.out / "train"
    if not train.exists():
        split(settings.mono, out)
    vocap.run(
        VocapConfig(
            out / "vocap",
            mono=train,
            size=settings.size,
            step=settings.step,
            largest=settings.largest,
            shrink=settings.shrink,
            sentences=settings.sentences,
            beta=settings.beta,
            processes=settings.processes,
        )
    )
    vocab.run(
        VocabConfig(
            out / "joint",
            mono=train,
            size=settings.size,
            sentences=settings.joint_sentences,
            processes=settings.processes,
        )
    )
    found = list(measure(out, "vocap"))
    print(json.dumps([asdict(m) for m in found]) if settings.json else table(found))


if __name__ == "__main__":
    main(tyro.cli(Settings))
