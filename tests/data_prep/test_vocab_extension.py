"""A vocabulary that SentencePiece trained on real text, extended by two languages: one in a script that it lacks."""

import lzma
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import sentencepiece as spm
from sentencepiece import sentencepiece_model_pb2 as proto
from transformers import XLMRobertaTokenizer

from data_prep.vocab.extension import extend
from data_prep.vocab.line_sample import sample_lines
from data_prep.vocab.vocab import VocabConfig, run
from xlme_ds.data.schema import read_manifest
from xlme_ds.data.vocabulary import Vocabulary

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "corpus" / "mono"
OLD, NEW = ("de", "en"), ("eu", "ka")
SIZE, LARGER = 2000, 2500

if not SHARED.is_dir():
    pytest.skip("../shared/data/corpus/mono is absent", allow_module_level=True)


def read(code: str) -> list[str]:
    with lzma.open(SHARED / f"{code}.txt.xz", "rt", encoding="utf-8") as file:
        lines = [line.strip() for _, line in zip(range(3000), file, strict=False)]
    return [line for line in lines if line]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, list[str]]]:
    """Folders `old` and `new` of four fifths of the lines, and the others by language."""
    root, rest = tmp_path_factory.mktemp("text"), {}
    for code in OLD + NEW:
        lines = read(code)
        rest[code] = lines[::5]
        folder = root / ("old" if code in OLD else "new")
        folder.mkdir(exist_ok=True)
        kept = [line for number, line in enumerate(lines) if number % 5]
        (folder / f"{code}.txt").write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    return root, rest


@pytest.fixture(scope="module")
def old(text: tuple[Path, dict[str, list[str]]]) -> Vocabulary:
    """By SentencePiece's own trainer, as XLM-R's."""
    root, _ = text
    files = [str(root / "old" / f"{code}.txt") for code in OLD]
    spm.SentencePieceTrainer.train(input=files, model_prefix=str(root / "spm"), vocab_size=SIZE - 2, minloglevel=2)
    return Vocabulary(root / "spm.model")


@pytest.fixture(scope="module")
def config(text: tuple[Path, dict[str, list[str]]], old: Vocabulary) -> VocabConfig:
    root, _ = text
    return VocabConfig(root / "extended", mono=root / "new", model=old.path, size=LARGER, compare=root / "old")


@pytest.fixture(scope="module")
def new(config: VocabConfig) -> Vocabulary:
    run(config)
    return Vocabulary(config.out)


def test_old_pieces_keep_ids_and_scores(old: Vocabulary, new: Vocabulary, config: VocabConfig) -> None:
    assert (old.size, new.size, new.mask_id) == (SIZE, LARGER, LARGER - 1)
    assert [new.piece(token) for token in range(old.mask_id)] == [old.piece(token) for token in range(old.mask_id)]
    for number in range(3, SIZE - 2):
        assert new.processor.get_score(number) == old.processor.get_score(number)
    pieces = [new.piece(token) for token in range(LARGER)]
    assert len(set(pieces)) == LARGER and pieces[-1] == "<mask>"
    assert new.begins_with(old) and not old.begins_with(new)
    manifest = read_manifest(config.out)
    assert (manifest.vocabulary_size, manifest.vocabulary_sha256) == (LARGER, new.sha256)


@pytest.mark.parametrize("room", [28, 33, 37, 40])
def test_every_new_character_comes_before_longer_pieces(old: Vocabulary, room: int) -> None:
    """Also one that the text has once, where there is room for a few pieces."""
    lines = [*read("eu")[:300], "haus Ω"]
    model = extend(old.path, lines, old.size + room, coverage=1.0)
    old_pieces = {old.piece(token) for token in range(old.size)}
    new = {piece.piece for piece in proto.ModelProto.FromString(model).pieces} - old_pieces
    characters = {character for line in lines for character in line.replace(" ", "")} - old_pieces
    assert "Ω" in characters < new and len(new) == room


def tokens(vocabulary: Vocabulary, lines: list[str]) -> list[list[int]]:
    return [vocabulary.encode(line).tolist() for line in lines]


def test_new_pieces_are_used_where_they_help(
    text: tuple[Path, dict[str, list[str]]], old: Vocabulary, new: Vocabulary
) -> None:
    """On lines that no vocabulary was trained on: Basque takes far fewer tokens, Georgian is unknown no more, and
    German and English stay as they were."""
    counts = {code: [sum(map(len, tokens(one, lines))) for one in (old, new)] for code, lines in text[1].items()}
    assert counts["eu"][1] < 0.75 * counts["eu"][0]
    for one, least, most in ((old, 0.3, 1.0), (new, 0.0, 0.01)):
        ids = [token for line in tokens(one, text[1]["ka"]) for token in line]
        assert least <= ids.count(3) / len(ids) <= most
    for code in OLD:
        before, after = (tokens(one, text[1][code]) for one in (old, new))
        assert 0.98 < counts[code][1] / counts[code][0] <= 1.0
        assert sum(a != b for a, b in zip(before, after, strict=True)) < 0.15 * len(before)


def test_the_change_is_stored_and_said(
    text: tuple[Path, dict[str, list[str]]],
    config: VocabConfig,
    old: Vocabulary,
    new: Vocabulary,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of every language, by hand from its file."""
    found = read_manifest(config.out).counts["segmentation"]
    assert found.keys() == set(OLD + NEW)
    for code, both in found.items():
        lines = (text[0] / ("old" if code in OLD else "new") / f"{code}.txt").read_text(encoding="utf-8").splitlines()
        for when, one in (("before", old), ("after", new)):
            ids = [token for line in tokens(one, lines) for token in line]
            assert both[when]["tokens_per_character"] == pytest.approx(len(ids) / sum(map(len, lines)))
            assert both[when]["unknown"] == pytest.approx(ids.count(3) / len(ids))
    run(replace(config, out=config.out.with_name("two"), processes=2))
    assert Vocabulary(config.out.with_name("two")).sha256 == new.sha256
    shown, eu = capsys.readouterr().out, found["eu"]["after"]["tokens_per_character"]
    assert f"now {eu:.3f} (-" in shown and "2,500 ids" in shown


def test_output_that_ends_early_does_not_cost_the_model(
    config: VocabConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def ended(text: str) -> None:
        raise SystemExit(141)

    monkeypatch.setattr("data_prep.vocab.vocab.print_stdout", ended)
    with pytest.raises(SystemExit):
        run(replace(config, out=tmp_path, compare=None))
    assert read_manifest(tmp_path).counts["segmentation"].keys() == set(NEW)


def test_a_model_that_changes_while_text_is_read_is_refused(
    text: tuple[Path, dict[str, list[str]]],
    config: VocabConfig,
    new: Vocabulary,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its ids would not be those of the recorded model."""
    config = replace(config, out=tmp_path / "out", model=tmp_path / "old.model", size=LARGER + 100, compare=None)
    shutil.copy(text[0] / "spm.model", tmp_path / "old.model")

    def sample(*arguments: object) -> object:
        shutil.copy(new.path, tmp_path / "old.model")
        return sample_lines(*arguments)  # type: ignore[arg-type]

    with monkeypatch.context() as patch, pytest.raises(ValueError, match=r"old\.model changed since the command began"):
        patch.setattr("data_prep.vocab.vocab.sample_lines", sample)
        run(config)
    run(config)  # as the error says
    assert Vocabulary(config.out).piece(LARGER - 2) == new.piece(LARGER - 2)


def test_ids_are_those_of_hugging_face(
    text: tuple[Path, dict[str, list[str]]], new: Vocabulary, tmp_path: Path
) -> None:
    shutil.copy(new.path, tmp_path / "sentencepiece.bpe.model")
    tokenizer = XLMRobertaTokenizer.from_pretrained(str(tmp_path))
    assert (len(tokenizer), tokenizer.mask_token_id) == (LARGER, LARGER - 1)
    for lines in text[1].values():
        for line in lines[:100]:
            assert tokenizer(line)["input_ids"] == [0, *new.encode(line).tolist(), 2], line


def test_refusals(text: tuple[Path, dict[str, list[str]]], config: VocabConfig, tmp_path: Path) -> None:
    def refused(words: str, **changes: object) -> None:
        with pytest.raises(ValueError, match=words):
            run(replace(config, out=tmp_path / str(len(list(tmp_path.iterdir()))), **changes))

    refused("--size is 2000, but .* has 2000 ids already: take a larger size", size=SIZE)
    refused("--size is 2010, but with the new characters alone it is 20", size=2010)
    with pytest.raises(ValueError) as told:  # the size that the sentence names is one that works
        run(replace(config, out=tmp_path.with_name("least"), size=2010))
    least = int(str(told.value).split("alone it is ")[1].split(":")[0])
    run(replace(config, out=tmp_path.with_name("least"), size=least))
    assert Vocabulary(tmp_path.with_name("least")).size == least
    refused("--size is 900000, but the sampled text allows no more than", size=900_000)
    refused("--compare is for a vocabulary that is extended", model=None)
    assert not list(tmp_path.rglob("sentencepiece.model"))
