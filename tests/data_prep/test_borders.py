"""Settings of stages that are just allowed, and the next ones out."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from data_prep.__main__ import main
from data_prep.encode import encode
from data_prep.inspect import show
from data_prep.mix.mix import MixConfig
from data_prep.vocab.vocab import VocabConfig
from data_prep.vocab.vocap import VocapConfig

NOWHERE = Path("nowhere")
STAGES: dict[str, Any] = {
    "mix": MixConfig(NOWHERE, NOWHERE, NOWHERE, mono_rows=1),
    "vocab": VocabConfig(NOWHERE, mono=NOWHERE),
    "vocap": VocapConfig(NOWHERE, mono=NOWHERE),
}
BORDERS: list[tuple[str, str, tuple[float, ...], tuple[float, ...]]] = [  # stage, setting, allowed, refused
    ("mix", "row_tokens", (8, 32767), (7, 32768)),
    ("mix", "mono_rows", (1,), (0, -1)),
    ("mix", "para_rows", (0,), (-1,)),
    ("mix", "rows_per_shard", (1,), (0,)),
    ("mix", "alpha", (0, 1), (-0.01, 1.01)),
    ("mix", "max_repeats", (0, 0.1), (-0.1, float("inf"), float("nan"))),
    ("vocab", "size", (16,), (15,)),
    ("vocab", "sentences", (1,), (0,)),
    ("vocab", "character_coverage", (0.98, 1), (0.97, 1.01)),
    ("vocab", "alpha", (0, 1), (-0.01, 1.01)),
    ("vocap", "size", (16,), (15,)),
    ("vocap", "step", (1, 50_000), (0, 50_001)),
    ("vocap", "largest", (1000,), (999,)),
    ("vocap", "sentences", (1,), (0,)),
    ("vocap", "shrink", (0.5, 0.98), (0.49, 0.99)),
    ("vocap", "alpha", (0, 1), (-0.01, 1.01)),
    ("vocap", "beta", (0, 1), (-0.01, 1.01)),
    ("vocap", "character_coverage", (0.98, 1), (0.97, 1.01)),
]


@pytest.mark.parametrize(("stage", "setting", "allowed", "refused"), BORDERS)
def test_the_last_value_that_is_allowed(
    stage: str, setting: str, allowed: tuple[float, ...], refused: tuple[float, ...]
) -> None:
    for value in allowed:
        replace(STAGES[stage], **{setting: value}).validate()
    for value in refused:
        with pytest.raises(ValueError, match=rf"{setting.replace('_', '-')}|no rows are asked for|alpha"):
            replace(STAGES[stage], **{setting: value}).validate()


def test_a_vocabulary_needs_text_or_a_model() -> None:
    """And a comparison needs both."""
    base = VocabConfig(NOWHERE)
    for given in ({"mono": NOWHERE}, {"para": NOWHERE}, {"corpus": ("cc100",)}, {"model": NOWHERE}):
        replace(base, **given).validate()
    replace(base, mono=NOWHERE, model=NOWHERE, compare=NOWHERE).validate()
    with pytest.raises(ValueError, match="no text is given: set --mono, --para or --corpus to train a vocabulary"):
        base.validate()
    for given in ({"mono": NOWHERE}, {"model": NOWHERE}):
        with pytest.raises(ValueError, match="--compare is for a vocabulary that is extended: give --model and"):
            replace(base, compare=NOWHERE, **given).validate()


LIMITS = [("mix", "mono-rows", 10**11), ("mix", "para-rows", 10**11), ("mix", "rows-per-shard", 10**9)]
LIMITS += [("mix", "seed", 2**63 - 1), ("mix", "processes", 1024), ("encode", "block-bytes", 2**31 - 1)]
LIMITS += [("vocab", "sentences", 10**15), ("show", "rows", 10**15)]


@pytest.mark.parametrize(("stage", "flag", "largest"), LIMITS)
def test_the_largest_number_of_a_flag(
    stage: str, flag: str, largest: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next one is refused before anything is read; the largest itself is not what stops this command."""
    nothing = str(tmp_path / "nothing")
    needed = {"mix": "--encoded --vocab --out", "encode": "--mono --vocab --out", "vocab": "--mono --out"}
    words = [word for name in needed.get(stage, "--data").split() for word in (name, nothing)]
    for value in (largest, largest + 1):
        assert main([stage, *words, f"--{flag}", str(value)]) == 2
        told = f"--{flag} is {value}: it must be at most {largest:,}" in capsys.readouterr().err
        assert told == (value > largest)


@pytest.mark.parametrize("stage", ["encode", "mix", "vocab", "vocap", "minhash"])
def test_no_processes_leave_no_folder(
    stage: str, tmp_path: Path, vocab: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "en.txt").write_text("All human beings\n")
    words = ["--mono", str(tmp_path), "--vocab", str(vocab), "--out", str(tmp_path / "out"), "--processes", "0"]
    words = words[:2] * (stage != "mix") + words[2:4] * (stage in ("encode", "mix")) + words[4:]
    words += ["--encoded", str(tmp_path), "--mono-rows", "1"] * (stage == "mix")
    assert main([stage, *words]) == 2
    assert capsys.readouterr().err == f"xlme prep {stage}: error: --processes is 0: it must be at least 1\n"
    assert not (tmp_path / "out").exists()


def test_the_largest_number_of_a_flag_that_takes_fractions(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--encoded", "nowhere", "--vocab", "nowhere", "--out", "nowhere", "--max-repeats"]
    for value in ("1e15", "2e15"):
        assert main(["mix", *flags, value]) == 2
        told = (
            "--max-repeats is 2000000000000000.0: it must be at most 1,000,000,000,000,000" in capsys.readouterr().err
        )
        assert told == (value == "2e15")


@pytest.mark.parametrize("setting", [{"mono_rows": 0}, {"para_rows": 1, "mono_rows": 0}])
@pytest.mark.parametrize("unit", ["sentences", "documents"])
def test_units_of_monolingual_rows_need_such_rows(unit: str, setting: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"--{unit} is for monolingual rows|no rows are asked for"):
        replace(STAGES["mix"], **{unit: True}, **setting).validate()


def test_encode_and_show(tmp_path: Path, vocab: Path) -> None:
    with pytest.raises(ValueError, match="none does not exist: name the folder that `xlme prep mix` wrote"):
        show.run(show.ShowConfig(tmp_path / "none"))
    (tmp_path / "en.txt").write_text("All human beings\n")
    asked = encode.EncodeConfig(vocab, tmp_path / "out", mono=tmp_path, max_pair_tokens=2, block_bytes=1)
    for setting, value in (("max_pair_tokens", 1), ("block_bytes", 0)):
        with pytest.raises(ValueError, match="--max-pair-tokens must be at least 2 and --block-bytes at least 1"):
            encode.run(replace(asked, **{setting: value}))
    encode.run(asked)
    for setting, value, words in (
        ("rows", 0, "--rows is 0"),
        ("start", -1, "--start is -1"),
        ("mask_fraction", 1, "is 1"),
    ):
        with pytest.raises(ValueError, match=words):
            show.run(replace(show.ShowConfig(tmp_path), **{setting: value}))
    for setting, value in (("rows", 1), ("start", 0), ("mask_fraction", 0), ("mask_fraction", 0.99)):
        with pytest.raises(ValueError, match="holds neither mono"):  # the settings are looked at before
            show.run(replace(show.ShowConfig(tmp_path), **{setting: value}))
