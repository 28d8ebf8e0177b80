"""`vocab` on small texts in several scripts, and agreement with Hugging Face's XLM-R tokenizer."""

import gzip
import lzma
import math
import os
import re
import shutil
import unicodedata
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
from sentencepiece import sentencepiece_model_pb2 as proto

import data_prep.vocab.line_sample as line_sample
from data_prep.readers import Input
from data_prep.sampling import derive_key, keyed_hash
from data_prep.store import Stage
from data_prep.vocab import unigram
from data_prep.vocab.extension import describe_change, extend, segmentation
from data_prep.vocab.line_sample import sample_lines, sampled_inputs
from data_prep.vocab.model_file import serialize
from data_prep.vocab.unigram import UnigramTrainer
from data_prep.vocab.vocab import VocabConfig, run
from data_prep.vocab.word_counts import count_words
from tests.rows import train_vocabulary
from xlme_ds.data.schema import read_manifest
from xlme_ds.data.vocabulary import MODEL_FILE, Vocabulary

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data" / "corpus" / "mono"

ARTICLES = {
    "en": "All human beings are born free and equal in dignity and rights. They should act in a spirit of brotherhood.",
    "de": "Alle Menschen sind frei und gleich an Würde und Rechten geboren. Sie sind mit Vernunft begabt.",
    "ru": "Все люди рождаются свободными и равными в своём достоинстве и правах. Они наделены разумом и совестью.",
    "el": "Όλοι οι άνθρωποι γεννιούνται ελεύθεροι και ίσοι στην αξιοπρέπεια και τα δικαιώματα.",
    "hi": "सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।",
    "ar": "يولد جميع الناس أحرارًا متساوين في الكرامة والحقوق. وقد وهبوا عقلاً وضميراً.",
    "th": "มนุษย์ทั้งหลายเกิดมามีอิสระและเสมอภาคกันในเกียรติศักดิ์และสิทธิ",
    "ja": "すべての人間は、生まれながらにして自由であり、かつ、尊厳と権利とについて平等である。",
    "zh-Hans": "人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心。",
}
COPIES = {"en": 300, "de": 100, "sw": 0}
HARD = [
    "ﬁne ｆｕｌｌｗｉｄｔｈ ①②③ ½",
    "tabs\tand  several   spaces ",
    "\u200bzero\u200dwidth\ufeff",
    "emoji 🙂🏳️‍🌈 unseen ꙮ",
    "İstanbul ǅ ß",
    "नमस्ते​दुनिया",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every word order of an article's words by rotation, and a number, so that sentences differ."""
    folder = tmp_path_factory.mktemp("text")
    for language, text in ARTICLES.items():
        words = text.split() if " " in text else list(text)
        joint = " " if " " in text else ""
        turns = [(i, i % len(words)) for i in range(COPIES.get(language, 30))]
        lines = [f"{joint.join(words[turn:] + words[:turn])} {i}" for i, turn in turns]
        (folder / f"{language}.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def config(corpus: Path, out: Path, **settings: object) -> VocabConfig:
    return replace(VocabConfig(out, mono=corpus, size=330, sentences=300, character_coverage=1.0), **settings)


def folder_bytes(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_sample_follows_the_formula_and_bytes_do_not_depend_on_processes(corpus: Path, tmp_path: Path) -> None:
    run(config(corpus, tmp_path / "one"))
    run(config(corpus, tmp_path / "two", processes=2))
    assert folder_bytes(tmp_path / "one") == folder_bytes(tmp_path / "two")
    run(config(corpus, tmp_path / "seed", seed=1))
    assert (tmp_path / "seed" / MODEL_FILE).read_bytes() != (tmp_path / "one" / MODEL_FILE).read_bytes()

    manifest = read_manifest(tmp_path / "one")
    vocabulary = Vocabulary(tmp_path / "one")
    assert vocabulary.size == manifest.vocabulary_size == 330
    assert vocabulary.sha256 == manifest.vocabulary_sha256 == manifest.shards[0].sha256
    lines = {code: COPIES.get(code, 30) for code in ARTICLES}
    weights = {code: count**0.7 for code, count in lines.items()}
    for code, counts in manifest.counts["by_language"].items():
        quota = 300 * weights[code] / sum(weights.values())
        assert counts["lines"] == lines[code]
        assert abs(counts["sampled"] - min(quota, lines[code])) < 1
        assert counts["share_before"] == lines[code] / sum(lines.values())
        sampled = sum(of_code["sampled"] for of_code in manifest.counts["by_language"].values())
        assert counts["share_after"] == counts["sampled"] / sampled


def test_a_language_with_too_few_lines_gives_all_once(corpus: Path, tmp_path: Path) -> None:
    run(config(corpus, tmp_path, sentences=5000))
    assert all(
        counts["sampled"] == counts["lines"] for counts in read_manifest(tmp_path).counts["by_language"].values()
    )


def test_both_sides_of_pairs_are_text_of_their_languages(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "para").mkdir()
    for code in ("de", "en"):
        shutil.copy(corpus / "de.txt", tmp_path / "para" / f"X.de-en.{code}")
    run(config(corpus, tmp_path / "out", para=tmp_path / "para"))
    counts = read_manifest(tmp_path / "out").counts["by_language"]
    assert (counts["de"]["lines"], counts["en"]["lines"], counts["ru"]["lines"]) == (100, 400, 30)


@pytest.mark.parametrize("counted", [512, 40])
def test_a_line_counts_once_however_many_pairs_it_is_in(
    corpus: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, counted: int
) -> None:
    """English in nine pairs has the weight of English in one; from few lines the number is estimated."""
    monkeypatch.setattr(line_sample, "_COUNTED_HASHES", counted)
    english = [f"{number} All human beings are born free" for number in range(200)]
    for out, pairs in (("one", 1), ("nine", 9)):
        for number in range(pairs):
            for side, code in enumerate(("de", "en")):
                path = tmp_path / out / f"X{number}.de-en.{code}"
                path.parent.mkdir(exist_ok=True)
                lines = english if side else [f"{number} Alle Menschen {i}" for i in range(200)]
                path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        run(config(corpus, tmp_path / f"{out}-vocab", para=tmp_path / out, sentences=100))
    one, nine = (read_manifest(tmp_path / f"{out}-vocab").counts["by_language"] for out in ("one", "nine"))
    assert one["en"]["lines"] == 500 and one["de"]["lines"] == 300
    assert nine["de"]["lines"] == 100 + 9 * 200
    assert nine["en"]["lines"] == 500 if counted > 200 else abs(nine["en"]["lines"] - 500) < 40
    english_lines = read_sample(tmp_path / "nine-sample", tmp_path / "nine")
    assert len(english_lines) == len(set(english_lines)) == 150


def read_sample(out: Path, para: Path) -> list[str]:
    """The English lines that are chosen from pairs, 150 of each language."""
    inputs, _ = sampled_inputs(VocabConfig(out, para=para))
    stage = Stage(out, "vocab", {})
    with stage.open():
        assert not stage.check_finished(1)
        _, chosen, files = sample_lines(stage, inputs, lambda lines: dict.fromkeys(lines, 150), 150, 3, 1)
    assert chosen == {"de": 150, "en": 150}
    return files["en"].read_text(encoding="utf-8").splitlines()


@pytest.fixture(scope="module")
def described(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[str, str], Path]:
    """Descriptions of two corpora with lines that their filters drop; and a folder with the others, in two layouts."""
    folder = tmp_path_factory.mktemp("described")
    for name in ("dirty", "pairs", "clean/mono", "clean/para"):
        (folder / name).mkdir(parents=True)
    english = (corpus / "en.txt").read_text(encoding="utf-8").splitlines()
    russian = (corpus / "ru.txt").read_text(encoding="utf-8").splitlines()
    dirty = "".join(f"{line}\n{russian[0]}\n\n{'Home' if i % 3 else ''}\n\n" for i, line in enumerate(english))
    with lzma.open(folder / "dirty" / "en.txt.xz", "wt", encoding="utf-8") as file:
        file.write(dirty)
    scored = [(1.0 + 0.01 * (i % 9), *lines) for i, lines in enumerate(zip(english, russian, strict=False))]
    table = "".join(f"{score}\t{a}\t{b}\n1.5\t{a}\t{a.upper()}\nno number\t{a}\t{b}\n" for score, a, b in scored)
    (folder / "pairs" / "en-ru.tsv").write_text(table, encoding="utf-8")
    (folder / "clean" / "mono" / "en.txt").write_text("\n".join(english), encoding="utf-8")
    for side, code in enumerate(("en", "ru")):
        kept = [lines[side] for score, *lines in scored if score >= 1.04]
        (folder / "clean" / "para" / f"en-ru.{code}").write_text(
            "".join(f"{line}\n" for line in kept), encoding="utf-8"
        )
    (folder / "web.toml").write_text(
        f'name = "web"\nwhere = "{folder / "dirty"}"\nformat = "cc100"\nfiles = "{{lang}}.txt.xz"\n'
        'languages = ["en", "de"]\n[filters.script]\n[filters.boilerplate_length]\n[filters.exact_duplicates]\n'
    )
    (folder / "mined.toml").write_text(
        'name = "mined"\nformat = "wikimatrix_tsv"\nfiles = "{src}-{tgt}.tsv"\npairs = "any"\n'
        "[filters.score]\nleast = 1.04\n[filters.identical_sides]\n[filters.length]\nmax_tokens = 1\n"
    )
    return (str(folder / "web.toml"), str(folder / "mined.toml")), folder


def test_described_corpora_are_sampled_after_their_filters(
    described: tuple[tuple[str, str], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The vocabulary is that of the text that the filters leave; those that count tokens or compare lines wait."""
    descriptions, folder = described
    base = VocabConfig(tmp_path / "clean", size=80, sentences=200, character_coverage=1.0)
    run(replace(base, mono=folder / "clean" / "mono", para=folder / "clean" / "para"))
    text = {"corpus": descriptions, "where": (f"mined={folder / 'pairs'}",), "allow_missing": True}
    run(replace(base, out=tmp_path / "one", **text))
    run(replace(base, out=tmp_path / "two", processes=2, **text))
    assert "no file of web for 1 of 2 languages" in capsys.readouterr().err
    assert folder_bytes(tmp_path / "one") == folder_bytes(tmp_path / "two")
    assert (tmp_path / "one" / MODEL_FILE).read_bytes() == (tmp_path / "clean" / MODEL_FILE).read_bytes()
    counts = read_manifest(tmp_path / "one").counts["by_language"]
    assert {code: c["lines"] for code, c in counts.items()} == {"en": 300, "ru": 15}
    with pytest.raises(ValueError, match=r"of web for 1 of 2 languages \(de\): fetch them, or give --allow-missing"):
        run(replace(base, out=tmp_path / "three", **text | {"allow_missing": False}))


def test_a_change_of_segmentation_in_words() -> None:
    before, after = ({"tokens_per_character": n, "unknown": u} for n, u in ((0.5, 0.2), (0.4, 0.0125)))
    assert describe_change("eu", before, after) == (
        "eu: 0.500 tokens a character, 20.0% of the tokens unknown; now 0.400 (-20.0%) and 1.2%"
    )
    assert "; now 0.500 (+0.0%) and" in describe_change("eu", before, before | {"tokens_per_character": 0.49999})


def test_segmentation_is_counted_in_the_first_ten_thousand_lines() -> None:
    """Of two characters, one of which is unknown, in two tokens besides that of the space; then of others."""
    model = serialize({"▁": -1.0, "a": -2.0})
    lines = ["ab"] * 10_000 + ["aaaa"] * 10_000
    assert segmentation(model, iter(lines)) == {"tokens_per_character": 1.5, "unknown": 1 / 3}
    assert segmentation(model, lines[9_999:]) == {
        "tokens_per_character": (3 + 9_999 * 5) / (2 + 9_999 * 4),
        "unknown": 1 / (3 + 9_999 * 5),
    }
    assert segmentation(model, []) == {"tokens_per_character": 0.0, "unknown": 0.0}


def test_a_named_pipe_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "de.txt")
    with pytest.raises(ValueError, match=r"de\.txt is a named pipe, but a vocabulary"):
        run(VocabConfig(tmp_path / "out", mono=tmp_path))
    old = train_vocabulary(tmp_path / "old")  # would wait for ever for a second writer of the pipe
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "en.txt").write_text("sador\n")
    with pytest.raises(ValueError, match=r"de\.txt is a named pipe, but a vocabulary"):
        run(VocabConfig(tmp_path / "out", mono=tmp_path / "new", model=old.path, compare=tmp_path, size=old.size + 1))
    assert not (tmp_path / "out").exists()


# the sample


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[Input, ...], dict[str, list[list[str]]]]:
    """Inputs of several blocks each, and their lines by language: Swahili has fewer than are wanted."""
    folder = tmp_path_factory.mktemp("texts")
    counts = {"mono/en.txt": 7000, "mono/sw.txt": 90, "para/X.de-en.de": 6000, "para/X.de-en.en": 6000}
    counts |= {"para/Y.de-en.de": 2000, "para/Y.de-en.en": 2000}
    lines: dict[str, list[list[str]]] = {"de": [], "en": [], "sw": []}
    for name, count in counts.items():
        path, code = folder / name, name.split(".")[-1 if "para" in name else 0].split("/")[-1]
        lines[code].append([f"{number} {name} {'word ' * 14}".strip() for number in range(count)])
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines[code][-1]) + "\n", encoding="utf-8")
    inputs, _ = sampled_inputs(VocabConfig(folder, mono=folder / "mono", para=folder / "para"))
    return inputs, lines


def few(lines: dict[str, int]) -> dict[str, int]:
    return {code: min(1500, number) for code, number in lines.items()}


def draw(key: np.uint64, line: str) -> int:
    """Hash of a line: 32 bits of its CRC by the seed, and 32 of its BLAKE2b."""
    second = int.from_bytes(blake2b(line.encode(), digest_size=4).digest(), "little")
    return int(keyed_hash(key, crc32(line.encode()))[0]) >> 32 << 32 | second


def brute_force(inputs: tuple[Input, ...], lines: dict[str, list[list[str]]], seed: int) -> dict[str, list[str]]:
    """All lines sorted by hash, the first 1,500 taken, and put back in their order."""
    chosen = {}
    for code, parts in lines.items():
        numbers = [number for number, source in enumerate(inputs) if code in source.languages]
        keyed = []
        for number, part in zip(numbers, parts, strict=True):
            draws = [draw(derive_key(seed, "lines", code), line) for line in part]
            keyed += [(draw, number, index, line) for index, (draw, line) in enumerate(zip(draws, part, strict=True))]
        chosen[code] = [line for *_, line in sorted(sorted(keyed)[:1500], key=lambda entry: entry[1:3])]
    return chosen


@pytest.fixture
def inputs_read(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The inputs that are read in this process, one entry a pass over one."""
    read: list[str] = []
    sides = line_sample.filtered_lines

    def counted(source: Input, *arguments: object) -> object:
        read.append(source.paths[0].name)
        return sides(source, *arguments)

    monkeypatch.setattr(line_sample, "filtered_lines", counted)
    return read


def sample(folder: Path, inputs: tuple[Input, ...], seed: int = 3, processes: int = 1) -> dict[str, list[str]]:
    """The chosen lines by language."""
    stage = Stage(folder, "vocab", {"seed": seed})
    with stage.open():
        assert not stage.check_finished(processes)
        counted, wanted, files = sample_lines(stage, inputs, few, 1500, seed, processes)
    assert counted == {"de": 8000, "en": 15000, "sw": 90} and wanted == {"de": 1500, "en": 1500, "sw": 90}
    assert sorted((folder / line_sample.SAMPLE).iterdir()) == sorted(files.values())  # and no candidates
    return {code: path.read_text(encoding="utf-8").splitlines() for code, path in files.items()}


def test_the_least_hashes_are_chosen_in_one_pass(
    texts: tuple[tuple[Input, ...], dict[str, list[list[str]]]], inputs_read: list[str], tmp_path: Path
) -> None:
    assert sample(tmp_path / "one", texts[0]) == brute_force(*texts, seed=3)
    assert sorted(inputs_read) == ["X.de-en.de", "Y.de-en.de", "en.txt", "sw.txt"]
    assert sample(tmp_path / "three", texts[0], processes=3) == brute_force(*texts, seed=3)


def test_of_a_long_line_the_first_thousand_characters_are_kept(tmp_path: Path) -> None:
    """Lines that differ only after these are two."""
    beginning = ("wörter " * 143)[:1000]
    (tmp_path / "en.txt").write_text(f"{beginning}a\n{beginning}b\nkurz\n", encoding="utf-8")
    inputs, _ = sampled_inputs(VocabConfig(tmp_path / "out", mono=tmp_path))
    stage = Stage(tmp_path / "out", "vocab", {})
    with stage.open():
        assert not stage.check_finished(1)
        counted, _, files = sample_lines(stage, inputs, few, 1500, 3, 1)
    assert counted == {"en": 3} and files["en"].read_text(encoding="utf-8").split("\n") == [
        *[beginning] * 2,
        "kurz",
        "",
    ]


def test_inputs_that_kept_too_few_lines_are_read_again(
    texts: tuple[tuple[Input, ...], dict[str, list[list[str]]]],
    inputs_read: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(line_sample, "_CANDIDATE_FACTOR", 0)
    monkeypatch.setattr(line_sample, "_COUNTED_HASHES", 200)
    assert sample(tmp_path, texts[0]) == brute_force(*texts, seed=3)
    assert inputs_read.count("en.txt") == 2 and inputs_read.count("sw.txt") == 1


def test_a_sample_is_taken_up_after_a_kill_and_damage(
    texts: tuple[tuple[Input, ...], dict[str, list[list[str]]]],
    inputs_read: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    """Killed when German is chosen; then candidates are damaged, and a file that was chosen is lost."""
    choose = line_sample._choose_lines

    def killed(*arguments: object) -> object:
        if arguments[-1] == "en":
            raise KeyboardInterrupt
        return choose(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(line_sample, "_choose_lines", killed)
        sample(tmp_path, texts[0])
    assert (tmp_path / line_sample.SAMPLE / "de.txt").exists() and len(inputs_read) == 4
    with open(tmp_path / line_sample.SAMPLE / "en" / "00000.hashes", "r+b") as file:
        file.write(b"damage")
    assert sample(tmp_path, texts[0]) == brute_force(*texts, seed=3)
    assert inputs_read[4:] == ["en.txt"]
    (tmp_path / line_sample.SAMPLE / "de.txt").unlink()
    assert sample(tmp_path, texts[0]) == brute_force(*texts, seed=3)
    assert inputs_read[5:] == ["X.de-en.de", "Y.de-en.de"]


def test_every_line_is_chosen_as_often() -> None:
    """4 of 12 lines by 6,000 seeds: chi-squared of the lines, and of neighbours chosen together."""
    counts, together = np.zeros(12), 0
    for seed in range(6000):
        draws = [draw(derive_key(seed, "lines", "en"), f"line {number}") for number in range(12)]
        chosen = np.argsort(np.array(draws, np.uint64))[:4]
        counts[chosen] += 1
        together += int((np.diff(np.sort(chosen)) == 1).sum())
    assert ((counts - 2000) ** 2 / (2000 * 2 / 3)).sum() * 11 / 12 < 40  # 11 degrees of freedom
    assert abs(together / 6000 - 11 * (4 * 3) / (12 * 11)) < 0.06


def test_too_large_a_size_names_the_largest_that_works(corpus: Path, tmp_path: Path) -> None:
    """The same folder then takes a size that works."""
    with pytest.raises(ValueError, match="--size is 100000, but the sampled text allows no more than") as error:
        run(config(corpus, tmp_path / "largest", size=100_000))
    largest = int(re.search(r"no more than (\d+)", str(error.value))[1])
    run(config(corpus, tmp_path / "largest", size=largest))
    assert Vocabulary(tmp_path / "largest").size == largest
    with pytest.raises(ValueError, match="no more than"):
        run(config(corpus, tmp_path / "beyond", size=largest + 1))
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/de.txt").write_text("ab ab\n")
    with pytest.raises(ValueError, match=r"--size is 20, but the sampled text allows no more than \d: add text$"):
        run(VocabConfig(tmp_path / "out", mono=tmp_path / "tiny", size=20))


@pytest.mark.parametrize("shrink", [0.75, 0.95])
def test_every_size_up_to_the_largest_is_reached(monkeypatch: pytest.MonkeyPatch, shrink: float) -> None:
    """Words of stems, so that some pieces are not needed where others are: 2 of these sizes lacked some."""
    monkeypatch.setattr(unigram, "_SHRINK", shrink)
    rng = np.random.default_rng(6)
    stems = ["".join(rng.choice(list("abcdefgh"), rng.integers(1, 4))) for _ in range(30)]
    text = count_words([" ".join("".join(rng.choice(stems, rng.integers(1, 5))) for _ in range(150))])
    for size in range(100, UnigramTrainer(text, 1.0).size + 1):
        assert len(UnigramTrainer(text, 1.0, size).prune_to(size).pieces) == size


def test_lines_without_a_visible_character_are_an_error(vocab: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/de.txt").write_text("\u200b\n\u200b \u200b\n", encoding="utf-8")
    for number, model in enumerate((None, vocab)):
        with pytest.raises(ValueError, match="the sampled lines have nothing but white space and invisible characters"):
            run(VocabConfig(mono=tmp_path / "in", out=tmp_path / f"out{number}", model=model, size=500))


def test_a_folder_accepts_text_after_inputs_without_any(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "in/de.txt").write_text("\n \n")
    with pytest.raises(ValueError, match=f"there is no text in {tmp_path / 'in'}: a vocabulary needs some lines"):
        run(config(tmp_path / "in", tmp_path / "out"))
    (tmp_path / "in/de.txt").write_bytes((corpus / "de.txt").read_bytes())
    with pytest.raises(ValueError, match="the sampled text allows no more than"):
        run(config(tmp_path / "in", tmp_path / "out", size=100_000))


def test_a_damaged_file_may_be_fetched_again_in_another_size(
    corpus: Path, inputs_read: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the same size, too: the other files are then not read again."""
    shutil.copytree(corpus, tmp_path / "in")
    whole = gzip.compress((tmp_path / "in/th.txt").read_bytes())
    (tmp_path / "in/th.txt").unlink()
    for damaged, times in ((whole[:-9], 2), (bytes(len(whole)), 1)):
        (tmp_path / "in/th.txt.gz").write_bytes(damaged)
        with pytest.raises(ValueError, match=r"th\.txt\.gz cannot be read .* Fetch it again"):
            run(config(tmp_path / "in", tmp_path / f"out{times}"))
        (tmp_path / "in/th.txt.gz").write_bytes(whole)
        run(config(tmp_path / "in", tmp_path / f"out{times}"))
        assert inputs_read.count("ar.txt") == times and "damaged" not in capsys.readouterr().err
        inputs_read.clear()


def test_too_small_a_size_for_the_characters(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--size is 50, but the characters alone need") as error:
        run(config(corpus, tmp_path / "least", size=50))
    least = int(re.search(r"alone need (\d+)", str(error.value))[1])
    with pytest.raises(ValueError, match=f"--size is {least - 1}, but the characters alone need {least}: take"):
        run(config(corpus, tmp_path / "less", size=least - 1))
    run(config(corpus, tmp_path / "least", size=least))
    assert Vocabulary(tmp_path / "least").size == least


def test_a_finished_vocabulary_is_kept_and_changed_settings_are_refused(
    corpus: Path, inputs_read: list[str], tmp_path: Path
) -> None:
    run(config(corpus, tmp_path))
    before = folder_bytes(tmp_path)
    assert sorted(before) == [".lock", "manifest.json", MODEL_FILE, "settings.json"]
    run(config(corpus, tmp_path))
    assert folder_bytes(tmp_path) == before and len(inputs_read) == len(ARTICLES)
    with pytest.raises(ValueError, match="size was 330, now 331"):
        run(config(corpus, tmp_path, size=331))


def test_what_is_the_users_stays(corpus: Path, tmp_path: Path) -> None:
    """A corpus in OUT/sample, a file that a run or another stage is writing below OUT; and no folder is begun by a
    mistake."""
    with pytest.raises(ValueError, match="alpha"):
        run(config(corpus, tmp_path / "out", alpha=70.0))
    assert not (tmp_path / "out").exists()
    text, written = tmp_path / "out/sample/train/de.txt", tmp_path / "out/mono/.000.arrow.7.tmp"
    for path in (text, written, written.with_name(".lock"), tmp_path / "out/.left.arrow.7.tmp"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    for _ in range(2):
        run(config(corpus, tmp_path / "out"))
        assert text.exists() and written.exists() and not (tmp_path / "out/.left.arrow.7.tmp").exists()


def test_an_existing_model_is_taken_over(corpus: Path, tmp_path: Path) -> None:
    run(config(corpus, tmp_path / "trained"))
    shutil.copy(tmp_path / "trained" / MODEL_FILE, tmp_path / "sentencepiece.bpe.model")
    run(VocabConfig(tmp_path / "taken", model=tmp_path / "sentencepiece.bpe.model"))
    assert (tmp_path / "taken" / MODEL_FILE).read_bytes() == (tmp_path / "trained" / MODEL_FILE).read_bytes()
    assert read_manifest(tmp_path / "taken").vocabulary_size == 330
    with pytest.raises(ValueError, match="--size is 300, but --model without text is taken as it is: leave --size out"):
        run(VocabConfig(tmp_path / "sized", model=tmp_path / "sentencepiece.bpe.model", size=300))
    (tmp_path / "text.model").write_text("no model")
    with pytest.raises(ValueError, match="is not a SentencePiece model"):
        run(VocabConfig(tmp_path / "no", model=tmp_path / "text.model"))


def _agree(vocabulary: Vocabulary, folder: Path, sentences: list[str]) -> None:
    """Same ids as Hugging Face's XLM-R tokenizer on the same model file."""
    transformers = pytest.importorskip("transformers")
    folder.mkdir()
    shutil.copy(vocabulary.path, folder / "sentencepiece.bpe.model")
    tokenizer = transformers.XLMRobertaTokenizer.from_pretrained(str(folder))
    assert len(tokenizer) == vocabulary.size
    assert tokenizer.mask_token_id == vocabulary.mask_id
    assert (tokenizer.bos_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id) == (
        0,
        1,
        2,
        3,
    )
    for sentence in sentences:
        assert tokenizer(sentence)["input_ids"] == [0, *vocabulary.encode(sentence).tolist(), 2], sentence


def test_ids_are_those_of_hugging_face(corpus: Path, tmp_path: Path) -> None:
    run(config(corpus, tmp_path / "vocab"))
    _agree(Vocabulary(tmp_path / "vocab"), tmp_path / "hf", [*ARTICLES.values(), *HARD])


def test_ids_are_those_of_hugging_face_on_real_text(tmp_path: Path) -> None:
    if not SHARED.is_dir():
        pytest.skip("../shared/data/corpus/mono is absent")
    (tmp_path / "mono").mkdir()
    sentences = []
    for language in ("ar", "de", "el", "en", "hi", "ja", "ka", "ko", "my", "ru", "ta", "th", "vi", "zh-Hans"):
        path = SHARED / f"{language}.txt.xz"
        if path.exists():
            with lzma.open(path, "rt", encoding="utf-8") as file:
                lines = [line for _, line in zip(range(600), file, strict=False)]
            (tmp_path / "mono" / f"{language}.txt").write_text("".join(lines), encoding="utf-8")
            # Composed first: SentencePiece composes everything (nmt_nfkc), but Hugging Face's normalizer leaves
            # clusters of six bytes and more, such as decomposed Tamil vowels, as they are.
            sentences += [unicodedata.normalize("NFC", line.strip()) for line in lines[:150] if line.strip()]
    run(VocabConfig(tmp_path / "vocab", mono=tmp_path / "mono", size=4000, sentences=6000))
    _agree(Vocabulary(tmp_path / "vocab"), tmp_path / "hf", sentences)


def test_a_compared_language_of_the_new_text_is_shown_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """German is in both folders, English in the compared one alone."""
    old = train_vocabulary(tmp_path / "old")
    new = "kalo zwölf boxkämpfer jagen victor"  # with letters that the old vocabulary lacks
    for folder, code, text in (("new", "de", new), ("all", "de", "miter unve"), ("all", "en", "sador")):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / f"{code}.txt").write_text(f"{text}\n")
    places = {"mono": tmp_path / "new", "model": old.path, "compare": tmp_path / "all"}
    run(VocabConfig(tmp_path / "vocab", **places, size=old.size + 10, sentences=10))
    found = read_manifest(tmp_path / "vocab").counts["segmentation"]
    assert list(found) == ["de", "de of --compare", "en"]
    assert found["de"] != found["de of --compare"] and "de of --compare: 0." in capsys.readouterr().out


def test_no_new_character_is_left_out_of_an_extension(vocab: Path, sentences: list[str]) -> None:
    """Two thousand words of twelve letters, and twelve letters that are there once, among text of the old languages: of
    more pieces than there is room for the letters come first, at every size from the smallest on."""
    rng, path = np.random.default_rng(0), vocab / "sentencepiece.model"
    letters = [chr(ord("ა") + number) for number in range(24)]
    words = ["".join(rng.choice(letters[:12], rng.integers(2, 7))) for _ in range(2000)]
    text = [*(" ".join(rng.choice(words, 8)) for _ in range(3000)), *letters[12:], *sentences * 20]
    known = proto.ModelProto.FromString(path.read_bytes()).pieces
    smallest = len(known) + 2 + len(letters)
    for more in (0, 1, 100, 333, 500):
        model = extend(path, text, smallest + more, 1.0)
        pieces = [piece.piece for piece in proto.ModelProto.FromString(model).pieces[len(known) :]]
        assert set(letters) <= set(pieces) and len(pieces) == len(letters) + more
        probabilities = [math.exp(piece.score) for piece in proto.ModelProto.FromString(model).pieces[len(known) :]]
        assert 0.005 < sum(probabilities) < 0.01, "a hundredth of theirs in the new text alone"
    with pytest.raises(ValueError, match=rf"with the new characters alone it is {smallest}: take a larger size"):
        extend(path, text, smallest - 1, 1.0)
