"""Made-up data that can be learned, in the format of every kind of task, and an untrained model to start from."""

import json
import random
from dataclasses import asdict
from pathlib import Path

from safetensors.torch import save_file

from tests.rows import train_vocabulary
from xlme_ds.config import ModelConfig, RunConfig
from xlme_ds.io.files import write_versioned
from xlme_ds.models.electra import Electra
from xlme_ds.models.init import initialise

PEOPLE, PLACES, OTHERS = ("kalo", "miter", "unve"), ("sador", "peka", "lomi"), ("ter", "inpe", "kasa", "dor", "veun")


def write_base(folder: Path, seed: int = 1) -> Path:
    """The folder of a finished pre-training run, with the weights that it would start with."""
    vocabulary = train_vocabulary(folder / "model")
    cfg = ModelConfig(
        vocabulary=vocabulary.size, width=32, heads=4, feed_forward=64, generator_layers=1, discriminator_layers=2,
        max_positions=64, embedding_sharing="gdes", vocabulary_blocks=2,
    )  # fmt: skip
    model = Electra(cfg)
    initialise(model, seed, 0.1)
    save_file(model.state_dict(), folder / "model" / "model.safetensors")
    config = asdict(RunConfig(name="tiny", model=cfg))
    write_versioned(folder / "config.json", {"config": config, "data": {"vocabulary_sha256": vocabulary.sha256}})
    return folder


def write_entities(folder: Path, sentences: int = 120) -> Path:
    """PAN-X's files: the tag follows from the word."""
    folder.mkdir(parents=True)
    for seed, name in enumerate(("train-en", "train-de", "dev-en", "test-en", "test-de")):
        rng = random.Random(seed)
        lines = []
        for _ in range(sentences if name.startswith("train") else 30):
            for word in rng.choices(PEOPLE + PLACES + OTHERS, k=rng.randint(3, 9)):
                lines.append(f"{word}\t{'B-PER' if word in PEOPLE else 'B-LOC' if word in PLACES else 'O'}\n")
            lines.append("\n")
        (folder / f"{name}.tsv").write_text("".join(lines))
    return folder


def write_pairs(folder: Path) -> Path:
    """PAWS-X's files: 1 where both texts begin with the same word."""
    folder.mkdir(parents=True)
    for seed, name in enumerate(("train-en", "test-en", "test-de")):
        rng = random.Random(seed)
        lines = []
        for _ in range(200 if name == "train-en" else 40):
            first, second = rng.choices(PEOPLE, k=2)
            lines.append(f"{first} {rng.choice(OTHERS)}\t{second} {rng.choice(OTHERS)}\t{int(first == second)}\n")
        (folder / f"{name}.tsv").write_text("".join(lines))
    return folder


def write_questions(folder: Path) -> Path:
    """TyDiQA's training file and XQuAD's tests: the answer is the one place in the context."""
    folder.mkdir(parents=True)
    for seed, name in enumerate(("tydiqa.goldp.en.train", "xquad.en", "xquad.de")):
        rng = random.Random(seed)
        paragraphs = []
        for number in range(150 if "train" in name else 20):
            words = rng.choices(OTHERS, k=rng.randint(4, 60))
            place, at = rng.choice(PLACES), rng.randrange(4)
            words.insert(at, place)
            context = " ".join(words)
            answer = {"text": place, "answer_start": len(" ".join([*words[:at], ""]))}
            paragraphs.append(
                {"context": context, "qas": [{"id": f"q{number}", "question": "in pe ka", "answers": [answer]}]}
            )
        (folder / f"{name}.json").write_text(json.dumps({"data": [{"title": "t", "paragraphs": paragraphs}]}))
    return folder
