"""A folder that was written with one setting is not taken for that of another: every setting of every stage."""

import random
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from data_prep import encode, mix, vocab, vocap

# Settings that shape no bytes, and those that name what is identified by its content.
NOT_IN_BYTES = {"out", "processes"}
BY_CONTENT = {"mono", "para", "corpus", "where", "allow_missing", "vocab", "encoded", "model", "compare"}
REFUSED = r"begun with other settings|rows of another vocabulary, length or layout"
SYLLABLES = ("ka", "lo", "mi", "ter", "un", "ve", "sa", "dor", "in", "pe")


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any, dict[str, Any]]]:
    """Of every stage what runs it, the settings that it was run with, and another value of each."""
    at, rng = tmp_path_factory.mktemp("identity"), random.Random(0)
    for folder, names in (("mono", ("de.txt", "en.txt")), ("para", ("x.de-en.de", "x.de-en.en"))):
        (at / folder).mkdir()
        for name in names:
            words = ["".join(rng.choices(SYLLABLES, k=rng.randint(1, 3))) for _ in range(200)]
            lines = [" ".join(rng.choices(words, k=rng.randint(3, 9))) for _ in range(300)]
            (at / folder / name).write_text("\n".join(lines) + "\n")
    (at / "without.txt").write_text("kalo\n")
    text: dict[str, Any] = {"mono": at / "mono", "para": at / "para"}
    of_vocab = vocab.VocabConfig(at / "vocab", **text, size=40, sentences=100)
    of_vocap = vocap.VocapConfig(at / "vocap", **text, size=40, step=4, largest=30, sentences=100)
    of_encode = encode.EncodeConfig(of_vocab.out, at / "encoded", **text, split="train", sentences=True)
    rows: dict[str, Any] = {"mono_rows": 20, "para_rows": 20, "row_tokens": 64, "rows_per_shard": 8}
    of_mix = mix.MixConfig(of_encode.out, of_vocab.out, at / "mixed", **rows, sentences=True)
    sampled = {"alpha": 0.5, "sentences": 90, "seed": 1, "character_coverage": 0.99}
    found = {
        "vocab": (vocab.run, of_vocab, {"size": 38} | sampled),
        "vocap": (
            vocap.run,
            of_vocap,
            {"size": 38, "step": 3, "largest": 28, "shrink": 0.7, "beta": 0.6} | sampled,
        ),
        "encode": (
            encode.run,
            of_encode,
            {"max_pair_tokens": 61, "block_bytes": 1000, "split": "heldout", "heldout_share": 0.4, "sentences": False}
            | {"without": (at / "without.txt",)},
        ),
        "mix": (
            mix.run,
            of_mix,
            {"mono_rows": 21, "para_rows": 21, "row_tokens": 65, "alpha": 0.5, "share": ("de=0.7",), "layout": "xlm"}
            | {"max_repeats": 90.0, "seed": 1, "sentences": False, "into": "de", "rows_per_shard": 9},
        ),
    }
    for run, config, _ in found.values():
        run(config)
    return found


@pytest.mark.parametrize("stage", ["vocab", "vocap", "encode", "mix"])
def test_every_setting_is_part_of_what_a_folder_is(
    stages: dict[str, tuple[Any, Any, dict[str, Any]]], stage: str
) -> None:
    run, config, others = stages[stage]
    settings = {field.name for field in fields(config)} - NOT_IN_BYTES - BY_CONTENT
    assert settings == others.keys(), "a new setting needs another value here, and a place in the stage's settings"
    before = {path: path.read_bytes() for path in Path(config.out).rglob("*") if path.is_file()}
    for name, value in others.items():
        assert getattr(config, name) != value
        with pytest.raises(ValueError, match=REFUSED):
            run(replace(config, **{name: value}))
    run(config)
    assert before == {path: path.read_bytes() for path in Path(config.out).rglob("*") if path.is_file()}
