"""A finished folder is taken up again only by the settings that made it: every setting of a stage, and every key of a
description, either shapes its bytes, and is refused, or is told here to be a place or a number of processes.

The tables are compared with the settings that there are: a new one fails until it is in its table.
"""

import json
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from data_prep.encode import encode
from data_prep.filters.clean import _FILTERS, LANGUAGE
from data_prep.filters.columns import ColumnFilter
from data_prep.mix import mix
from data_prep.readers import description
from data_prep.vocab import vocab as vocab_stage
from data_prep.vocab import vocap

FREE = "free"  # shapes no bytes
TEXT_FLAGS = {"mono", "para", "corpus", "where", "allow_missing"}  # whose files, and keys, are looked at below
REFUSED = "was begun with other settings"

DESCRIPTIONS: dict[str, dict[str, Any]] = {
    "d": {"name": "d", "format": "jsonl", "files": "{lang}.jsonl", "languages": ["en", "de"], "columns": ["text"]},
    "p": {
        "name": "p",
        "format": "tsv",
        "files": "{src}-{tgt}.tsv",
        "pairs": ["en-de"],
        "columns": {"source": 1, "target": 2, "score": 3},
    },
}


class Text:
    """Text, with descriptions to read it by."""

    def __init__(self, folder: Path, sentences: list[str]):
        self.folder = folder
        for name in ("one", "two"):
            (folder / name).mkdir()
            for code, place in (("en", 0), ("de", 1), ("fr", 2)):
                lines = [f"{sentences[place]} {number}" for number in range(40)]
                rows = [json.dumps({"text": f"{line} x|y", "other": line, "n": 5}) for line in lines]
                (folder / name / f"{code}.jsonl").write_text("".join(f"{row}\n" for row in rows))
                (folder / name / f"{code}.txt").write_text("".join(f"{line}\n\n" for line in lines))
            for pair in ("en-de", "en-fr"):
                (folder / name / f"{pair}.tsv").write_text(f"{sentences[0]}\t{sentences[1]}\t2\t1\n" * 40)
        (folder / "held.txt").write_text("nothing of it\n")
        (folder / "held2.txt").write_text("nothing of it either\n")

    def describe(self, which: str, filters: str = "", where: str = "one", **changes: Any) -> str:
        values = DESCRIPTIONS[which] | {"where": str(self.folder / where)} | changes
        lines = [f"{key} = {toml(value)}" for key, value in values.items() if value is not None]
        path = self.folder / f"{which}.toml"
        path.write_text("\n".join([*lines, filters]))
        return str(path)


def toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {number}" for key, number in value.items()) + "}"
    return json.dumps(value)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory, sentences: list[str]) -> Text:
    return Text(tmp_path_factory.mktemp("text"), sentences)


def refused(run: Callable[[Any], None], config: Any) -> bool:
    """Whether a finished folder is refused for its settings."""
    try:
        run(config)
    except ValueError as error:
        assert REFUSED in str(error), error
        return True
    return False


def compare(run: Callable[[Any], None], config: Any, changes: dict[str, Any]) -> None:
    """Every setting but those of the text: a value in `changes`, or FREE; each other value is refused."""
    assert changes.keys() == {field.name for field in fields(config)} - TEXT_FLAGS
    run(config)
    asked = {name: replace(config, **{name: value}) for name, value in changes.items() if value != FREE}
    taken = [name for name, changed in asked.items() if not refused(run, changed)]
    assert not taken, f"a finished folder of {config} is that of other {taken} too"
    assert not refused(run, config)


def test_settings_of_encode(text: Text, vocab: Path, tmp_path: Path) -> None:
    flags = {"corpus": (text.describe("d"), text.describe("p")), "split": "train", "heldout_share": 0.1}
    config = encode.EncodeConfig(vocab, tmp_path / "out", without=(text.folder / "held.txt",), **flags)
    changes = {"max_pair_tokens": 400, "block_bytes": 1000, "split": "heldout", "heldout_share": 0.2, "sentences": True}
    changes |= {"without": (text.folder / "held2.txt",), "vocab": FREE, "out": FREE, "processes": FREE}
    compare(encode.run, config, changes)


def test_settings_of_mix(text: Text, vocab: Path, tmp_path: Path) -> None:
    flags = {"corpus": (text.describe("d"), text.describe("p"))}
    for sentences in (False, True):
        encode.run(encode.EncodeConfig(vocab, tmp_path / f"encoded{sentences}", sentences=sentences, **flags))
    config = mix.MixConfig(tmp_path / "encodedTrue", vocab, tmp_path / "out", 6, 6, row_tokens=128, max_repeats=90)
    changes = {"mono_rows": 7, "para_rows": 7, "row_tokens": 120, "alpha": 0.5, "share": ("en=0.6",), "max_repeats": 80}
    changes |= {"layout": "xlm", "seed": 1, "sentences": True, "into": "de", "rows_per_shard": 3}
    changes |= {"encoded": tmp_path / "encodedFalse", "vocab": FREE, "out": FREE, "processes": FREE}
    compare(mix.run, config, changes | {"documents": FREE})
    of_documents = replace(config, encoded=tmp_path / "encodedFalse", out=tmp_path / "documents")
    mix.run(of_documents)
    assert refused(mix.run, replace(of_documents, documents=True))


def test_settings_of_vocab(text: Text, vocab: Path, tmp_path: Path) -> None:
    """Of one that is extended, which has all of them."""
    lines = [" ".join(f"palabra{n} nueva{n % 7}" for n in range(start, start + 40)) for start in range(6)]
    for name in ("one", "two"):
        (text.folder / name / "es").mkdir(exist_ok=True)
        (text.folder / name / "es" / "es.txt").write_text("\n\n".join(lines[: 5 if name == "one" else 6]))
    one, two = (text.folder / name / "es" for name in ("one", "two"))
    other = tmp_path / "other"
    vocab_stage.run(vocab_stage.VocabConfig(other, mono=one, size=50, sentences=9))
    config = vocab_stage.VocabConfig(tmp_path / "out", model=vocab, mono=one, compare=one, size=178, sentences=9)
    changes = {"size": 177, "alpha": 0.5, "sentences": 8, "seed": 1, "character_coverage": 0.99, "model": other}
    compare(vocab_stage.run, config, changes | {"compare": two, "out": FREE, "processes": FREE})


def test_settings_of_vocap(text: Text, tmp_path: Path) -> None:
    config = vocap.VocapConfig(
        tmp_path / "out", corpus=(text.describe("d"),), size=50, step=5, largest=60, sentences=40
    )
    changes = {"size": 51, "step": 4, "largest": 61, "shrink": 0.7, "sentences": 39, "alpha": 0.5, "beta": 0.5}
    changes |= {"seed": 1, "character_coverage": 0.99, "out": FREE, "processes": FREE}
    compare(vocap.run, config, changes)


KEYS: dict[str, dict[str, Any]] = {  # by the description that has them
    "d": {
        "name": "e",
        "format": "parquet",
        "files": "{lang}.txt",
        "languages": ["en"],
        "columns": ["other"],
        "line_end": "|",
    },
    "p": {"pairs": ["en-fr"], "columns": {"source": 2, "target": 1, "score": 3}},
}


@pytest.mark.parametrize("which", KEYS)
def test_keys_of_a_description(text: Text, vocab: Path, tmp_path: Path, which: str) -> None:
    assert set().union(*KEYS.values()) == description._KEYS - {"where", "filters"}, "a key is in no table"
    config = encode.EncodeConfig(vocab, tmp_path / "out", corpus=(text.describe(which),))
    encode.run(config)
    for key, value in KEYS[which].items():
        text.describe(which, **{key: value})
        assert refused(encode.run, config), f"text of {key} = {value!r} is that of another one"
    text.describe(which, where="two")
    assert not refused(encode.run, config)


def test_the_order_of_descriptions(text: Text, vocab: Path, tmp_path: Path) -> None:
    """Of two whose files have the same names, the text of the first comes first."""
    corpora = []
    for name in ("one", "two"):
        path = Path(text.describe("d", name=name, where=name))
        corpora.append(str(path.rename(text.folder / f"{name}.toml")))
    config = encode.EncodeConfig(vocab, tmp_path / "out", corpus=tuple(corpora))
    encode.run(config)
    assert not refused(encode.run, config)
    assert refused(encode.run, replace(config, corpus=tuple(corpora[::-1])))


@pytest.mark.parametrize(("which", "task"), [("d", "mono"), ("p", "para")])
def test_settings_of_filters(text: Text, vocab: Path, tmp_path: Path, which: str, task: str) -> None:
    """Each filter, each of its settings, and their order."""
    filters: dict[str, dict[str, Any]] = {"column.n" if which == "d" else "column.score": {"min": 1, "max": 9}}
    for name, (*functions, tasks) in _FILTERS.items():
        if task in tasks and name != LANGUAGE:
            filters[name] = {key: 0.01 for function in functions if function for key in function.__kwdefaults__ or ()}
    filters["length"] |= {"max_characters": 900, "max_tokens": 900}
    filters.get("length_ratio", {}).update(largest=900)

    def written(changed: dict[str, dict[str, Any]]) -> str:
        return "\n".join(
            line
            for name, own in changed.items()
            for line in (f"[filters.{name}]", *(f"{k} = {toml(v)}" for k, v in own.items()))
        )

    def described(changed: dict[str, dict[str, Any]]) -> bool:
        text.describe(which, written(changed))
        return refused(encode.run, config)

    config = encode.EncodeConfig(vocab, tmp_path / "out", corpus=(text.describe(which, written(filters)),))
    encode.run(config)
    assert {field.name for field in fields(ColumnFilter)} == {"column", "min", "max", "one_of"}, "look at it here"
    assert described(filters | {next(iter(filters)): {"min": 1, "max": 9, "one_of": [5, 2]}})
    assert described(dict(reversed(filters.items())))
    for name, own in filters.items():
        assert described({other: values for other, values in filters.items() if other != name}), name
        for key, value in own.items():
            assert described(filters | {name: own | {key: value + 0.5}}), f"{key} of {name}"
    assert not described(filters)
