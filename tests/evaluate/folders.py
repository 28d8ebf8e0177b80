"""Finished run folders and test sets, small enough to write in every test."""

import json
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.rows import train_vocabulary
from tests.small import SMALL, lively
from xlme_ds.config import DataConfig, ObjectiveConfig, RunConfig
from xlme_ds.objectives import objective_of
from xlme_ds.trained.config_json import CONFIG_FILE
from xlme_ds.trained.runs import MODEL_FOLDER
from xlme_ds.trained.weights import WEIGHTS_FILE
from xlme_ds.validate import validate

WORDS = ("kalo", "miter", "unve", "sador", "inpe", "terka", "vesa", "dormi", "loun", "pein")


def write_run(
    folder: Path,
    seed: int = 1,
    layers: int = 2,
    objective: str = "electra",
    like: Path | None = None,
    **settings: object,
) -> Path:
    """A run folder as `load_encoder` reads it, with lively random weights and a real SentencePiece model, or that of
    the run `like`."""
    vocabulary = train_vocabulary(folder / MODEL_FOLDER)
    if like is not None:
        shutil.copy(like / MODEL_FOLDER / vocabulary.path.name, vocabulary.path)
    of = ObjectiveConfig(objective, mask_fraction=1.0 if objective in ("clm", "mt") else 0.15)
    of = replace(of, pseudo_fractions=(0.1, 0.3) if objective == "btmlm" else ())
    cfg = replace(SMALL, vocabulary=vocabulary.size, discriminator_layers=layers, **settings)  # type: ignore[arg-type]
    data = {"mt": DataConfig(0, 256, 256), "btmlm": DataConfig(256, 0, 256)}.get(objective, DataConfig())
    config = validate(RunConfig(name="small", model=cfg, seed=seed, objective=of, data=data))
    pretrained = lively(objective_of(of).build(cfg), seed)
    save_file(pretrained.state_dict(), folder / MODEL_FOLDER / WEIGHTS_FILE)
    (folder / CONFIG_FILE).write_text(
        json.dumps({"format": 1, "config": asdict(config), "data": {"vocabulary_sha256": vocabulary.sha256}}),
        encoding="utf-8",
    )
    return folder


def sentence(number: int, words: int = 3) -> str:
    """A sentence of made-up words, another one for every number below 10 ** words."""
    return " ".join(WORDS[int(digit)] for digit in f"{number:0{words}d}"[::-1])


def write_tatoeba(folder: Path, code: str, ours: list[str], theirs: list[str]) -> None:
    """A language of the Tatoeba test."""
    folder.mkdir(exist_ok=True)
    for end, lines in (("eng", ours), (code, theirs)):
        (folder / f"tatoeba.{code}-eng.{end}").write_text("".join(line + "\n" for line in lines), encoding="utf-8")


def write_alignment(folder: Path, source: list[str], target: list[str], links: str, file: str = "alignv2.txt") -> Path:
    """A word alignment test; `folder` is named after its languages."""
    folder.mkdir(parents=True)
    first, second = folder.name.split("-")
    for code, lines in ((first, source), (second, target)):
        (folder / f"test.{code}").write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    (folder / file).write_text(links, encoding="utf-8")
    return folder


assert SMALL.max_positions == 40, "tests of what is cut count on it"
torch.set_num_threads(1)
