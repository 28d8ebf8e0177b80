"""The formats of the tasks, and what is said of files that are not in them."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tests.launch import ROOT
from xlme_ds.compare.scoring import require_tunable
from xlme_ds.finetune.downstream_tasks import DOWNSTREAM_TASKS as TASKS
from xlme_ds.finetune.predictions import write_predictions
from xlme_ds.finetune.settings import FinetuneSettings, TuningConfig
from xlme_ds.finetune.task_files import (
    Question,
    Sentence,
    TaskFile,
    TaskSets,
    TextPair,
    choose_sets,
    find_task_files,
    have_labels,
    read_examples,
    training_examples,
)

REAL = ROOT.parent / "shared" / "data" / "eval"


def source(path: Path, content: str | bytes) -> TaskFile:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return TaskFile(path, "en", "train", True)


def test_a_word_and_its_tag_a_line(tmp_path: Path) -> None:
    text = "New\tB-LOC\nYork\tI-LOC\n\n\n»\tO\n\u2028\tO"
    assert read_examples(source(tmp_path / "train-en.tsv", text), TASKS["ner"]) == [
        Sentence(["New", "York"], ["B-LOC", "I-LOC"]),
        Sentence(["»", "\u2028"], ["O", "O"]),
    ]


def test_conll_has_more_columns_and_its_own_encoding(tmp_path: Path) -> None:
    text = "-DOCSTART- -X- O O\n\nMünchen NNP I-NP I-LOC\r\nlebt VB I-VP O\n\n".encode("latin-1")
    assert read_examples(source(tmp_path / "deu.testa", text), TASKS["conll"]) == [
        Sentence(["München", "lebt"], ["I-LOC", "O"])
    ]
    found = find_task_files(TASKS["conll"], [tmp_path])
    assert [(one.language, one.split) for one in found] == [("de", "dev")]


def test_a_damaged_byte_makes_no_file_latin_1(tmp_path: Path) -> None:
    whole = "Köln I-LOC\n\nMünchen I-LOC\nlebt O\n".encode()
    damaged = whole.replace("ü".encode(), b"\xc3")  # half of the letter is lost
    with pytest.raises(ValueError, match="line 3 is not UTF-8: convert the file"):
        read_examples(source(tmp_path / "deu.train", damaged), TASKS["conll"])
    latin = "Köln I-LOC\nMünchen I-LOC\nÃ¤ O\n".encode("latin-1")  # the last line is UTF-8 by chance
    words = [sentence.words for sentence in read_examples(source(tmp_path / "deu.testa", latin), TASKS["conll"])]  # type: ignore[union-attr]
    assert words == [["Köln", "München", "Ã¤"]]


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_language_before_words_of_raw_panx(tmp_path: Path, split: str) -> None:
    path = tmp_path / f"{split}-de.tsv"
    file = source(path, "de:Neu\tB-LOC\nde::\tO\n\nde:de:\tO\n")._replace(language="de", split=split)
    assert read_examples(file, TASKS["ner"]) == [Sentence(["Neu", ":"], ["B-LOC", "O"]), Sentence(["de:"], ["O"])]
    mixed = source(path, "de:Neu\tB-LOC\nYork\tI-LOC\n")._replace(language="de", split=split)  # a word of the text
    assert read_examples(mixed, TASKS["ner"]) == [Sentence(["de:Neu", "York"], ["B-LOC", "I-LOC"])]
    if split == "test":
        bare = source(path, "de:Neu\nde:York\n")._replace(language="de", split=split)
        assert read_examples(bare, TASKS["ner"]) == [Sentence(["Neu", "York"], ["", ""])]


def test_two_texts_and_a_label_a_line(tmp_path: Path) -> None:
    text = 'A man.\tA person.\tentailment\nA "man"\tNobody\tcontradiction\n'
    assert read_examples(source(tmp_path / "train-en.tsv", text), TASKS["xnli"]) == [
        TextPair("A man.", "A person.", "entailment"),
        TextPair('A "man"', "Nobody", "contradiction"),
    ]


def squad(context: str, start: int, text: str) -> str:
    answer = {"text": text, "answer_start": start}
    question = {"id": "q1", "question": "Who?", "answers": [answer]}
    return json.dumps({"data": [{"paragraphs": [{"context": context, "qas": [question]}]}]})


def test_questions(tmp_path: Path) -> None:
    found = read_examples(source(tmp_path / "xquad.en.json", squad("It was Ann.", 7, "Ann")), TASKS["xquad"])
    assert found == [Question("q1", "Who?", "It was Ann.", [("Ann", 7)])]


EMPTY = {"answer_start": 0, "text": ""}


def test_tests_without_labels(tmp_path: Path) -> None:
    """As XTREME's scripts leave them, and a training or dev set like that is refused."""
    words = bare_or_not(tmp_path / "test-de.tsv", "Neu\r\nYork\r\n\r\n\u00a0\r\n»\r\n\r\n")
    for task in ("ner", "pos"):
        bare = read_examples(words, TASKS[task])
        assert bare == [Sentence(["Neu", "York"], ["", ""]), Sentence(["\u00a0", "»"], ["", ""])] and not have_labels(
            bare
        )
    named = bare_or_not(tmp_path / "test-vi.tsv", "kalo\nMalcolm X\nsador\n")  # as Vietnamese words have spaces
    assert read_examples(named, TASKS["pos"]) == [Sentence(["kalo", "Malcolm X", "sador"], [""] * 3)]
    half = bare_or_not(tmp_path / "test-sw.tsv", "Juma B-PER\nyuko O\n" + "hapa\n" * 3)
    with pytest.raises(ValueError, match=r"test-sw\.tsv has a tag in 2 of 5 lines: give all words a tag, or none"):
        read_examples(half, TASKS["ner"])
    texts = bare_or_not(tmp_path / "test-fr.tsv", "Un\tDeux\r\nTrois\tQuatre\r\n")
    bare = read_examples(texts, TASKS["pawsx"])
    assert bare == [TextPair("Un", "Deux", ""), TextPair("Trois", "Quatre", "")] and not have_labels(bare)
    asked = bare_or_not(tmp_path / "xquad.de.json", questions(EMPTY, EMPTY))
    bare = read_examples(asked, TASKS["xquad"])
    assert [question.answers for question in bare] == [[], []] and not have_labels(bare)
    for source, task, said in (
        (words, "ner", "line 1: a word without a tag"),
        (texts, "pawsx", r"line 1: 2 columns, expected text.*: is it a file of another task\?"),
        (asked, "xquad", "question 0 has no answer"),
    ):
        for split in ("dev", "train"):
            with pytest.raises(ValueError, match=said):
                read_examples(source._replace(split=split), TASKS[task])


def test_labels_of_half_a_test_are_an_error(tmp_path: Path) -> None:
    answer = {"answer_start": 7, "text": "Ann"}
    for task, name, content, said in (
        ("ner", "test-de.tsv", "a\tO\nb\n", "line 2: a word without a tag"),
        ("conll", "deu.testb", "a NN O\nb\n", "line 2: a word without a tag"),
        ("xnli", "test-fr.tsv", "a\tb\tneutral\nc\td\n", "line 2: 2 columns, expected text, text and label"),
        ("xnli", "test-fr.tsv", "a\tb\nc\td\tneutral\n", "line 2: 3 columns, expected two as in the lines before"),
        ("xquad", "xquad.de.json", questions(answer, EMPTY), "question 1 has no answer"),
        (
            "xquad",
            "xquad.de.json",
            questions(EMPTY, answer),
            "question 1 has an answer, but those before it have none",
        ),
        ("xquad", "xquad.de.json", questions(answer, answer).replace('"1"', '"0"'), "has two questions 0"),
    ):
        with pytest.raises(ValueError, match=said):
            read_examples(bare_or_not(tmp_path / name, content), TASKS[task])


def test_a_comparison_needs_labels_of_another_language(tmp_path: Path) -> None:
    """The measure is the mean over those: without any it would be no number, at the end of all training."""
    for name in ("train-en", "test-en", "test-de"):
        (tmp_path / f"{name}.tsv").write_text("a\tO\n")
    command = FinetuneSettings("ner", tmp_path, (tmp_path,), tmp_path)
    require_tunable(tmp_path, "ner", command)
    (tmp_path / "test-de.tsv").write_text("a\n")
    with pytest.raises(ValueError, match="has no test with labels in a language other than English"):
        require_tunable(tmp_path, "ner", command)


def bare_or_not(path: Path, content: str) -> TaskFile:
    return source(path, content)._replace(split="test")


def questions(*answers: dict[str, object]) -> str:
    asked = [{"id": str(number), "question": "Who?", "answers": [one]} for number, one in enumerate(answers)]
    return json.dumps({"data": [{"paragraphs": [{"context": "It was Ann.", "qas": asked}]}]})


@pytest.mark.parametrize(
    ("task", "name", "content", "said"),
    [
        ("ner", "train-en.tsv", "a\tO\nb\n", "train-en.tsv, line 2: a word without a tag"),
        ("ner", "train-en.tsv", "a\tB-CITY\n", "train-en.tsv, line 1: tag 'B-CITY' is none of O, B-PER"),
        ("ner", "train-en.tsv", b"a\tO\n\xff\tO\n", "train-en.tsv, line 2 is not UTF-8"),
        ("ner", "train-en.tsv", "\n\n", "train-en.tsv is empty"),
        ("ner", "train-en.tsv", "a\tO\rb\tO\r", "train-en.tsv ends its lines by carriage returns alone"),
        ("xnli", "train-en.tsv", "a\tb\tneutral\na\tneutral\n", "train-en.tsv, line 2: 2 columns"),
        ("pawsx", "train-en.tsv", "a\tb\t2\n", "train-en.tsv, line 1: label '2' is none of 0, 1"),
        ("xquad", "xquad.en.json", "[]", "xquad.en.json is not in SQuAD's JSON format"),
        (
            "xquad",
            "xquad.en.json",
            squad("It was Ann.", 6, "Ann"),
            "question q1: its context does not read 'Ann' at character 6",
        ),
        ("xquad", "xquad.en.json", squad("Ann.", -4, "Ann"), "its context does not read 'Ann' at character -4"),
        ("xquad", "xquad.en.json", squad("Ann", 0, "Ann").replace('"Who?"', "3"), "question q1: not in SQuAD's format"),
        ("xquad", "xquad.en.json", squad("Ann \ud83d", 0, "Ann"), "question q1: not in SQuAD's format"),
        ("xquad", "xquad.en.json", "[" * 100_000, "xquad.en.json is not in SQuAD's JSON format"),
    ],
)
def test_a_bad_file_is_named_with_its_line(
    tmp_path: Path, task: str, name: str, content: str | bytes, said: str
) -> None:
    with pytest.raises(ValueError, match=said.replace("[", r"\[").replace("(", r"\(")):
        read_examples(source(tmp_path / name, content), TASKS[task])


def test_files_are_found_by_their_usual_names(tmp_path: Path) -> None:
    for name in ("a/xquad.de.json", "b/train-v1.1.json", "b/tydiqa.goldp.sw.train.json", "a/README.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    found = {
        (one.path.name, one.language, one.split, one.own_dataset) for one in find_task_files(TASKS["xquad"], [tmp_path])
    }
    assert found == {
        ("xquad.de.json", "de", "test", True),
        ("train-v1.1.json", "en", "train", False),
        ("tydiqa.goldp.sw.train.json", "sw", "train", False),
    }
    for name in (".snapshot", ".ipynb_checkpoints/old"):
        (tmp_path / "a" / name).mkdir(parents=True)
        (tmp_path / "a" / name / "xquad.fr.json").write_text("{}")
    assert len(find_task_files(TASKS["xquad"], [tmp_path])) == 3
    (tmp_path / "b" / "xquad.de.json").write_text("{}")
    with pytest.raises(ValueError, match="are both the test set of de"):
        find_task_files(TASKS["xquad"], [tmp_path])
    with pytest.raises(ValueError, match=r"no file of the task in .*: name a folder with files like train-en\.tsv"):
        find_task_files(TASKS["ner"], [tmp_path / "a"])
    examples = {"dev-context-en-question-en.json", "tydiqa.goldp.en.train.json", "xquad.en.json", "eng.train"}
    assert {task.example_file_name for task in TASKS.values()} == examples | {"train-en.tsv"}
    assert all(re.fullmatch(task.file_patterns[0], task.example_file_name) for task in TASKS.values())


def test_xtremes_download_as_a_whole(tmp_path: Path) -> None:
    """Its tasks have files of the same names; each finds its own, and a second training set is not left out in
    silence."""
    for name in (
        "panx/train-en.tsv",
        "udpos/train-en.tsv",
        "xnli/test-de.tsv",
        "squad/train-v1.1.json",
        "squad/dev-v1.1.json",
        "xquad/xquad.de.json",
        "tydiqa/tydiqa.goldp.en.train.json",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")

    def found(task: str, *folders: Path) -> list[str]:
        return sorted(one.path.relative_to(tmp_path).as_posix() for one in find_task_files(TASKS[task], list(folders)))

    assert found("ner", tmp_path) == ["panx/train-en.tsv"] and found("pos", tmp_path) == ["udpos/train-en.tsv"]
    assert found("xquad", tmp_path) == ["squad/dev-v1.1.json", "squad/train-v1.1.json", "xquad/xquad.de.json"]
    assert found("xquad", tmp_path / "xquad", tmp_path / "tydiqa") == [
        "tydiqa/tydiqa.goldp.en.train.json",
        "xquad/xquad.de.json",
    ]
    assert found("xquad", tmp_path, tmp_path / "squad") == found("xquad", tmp_path), "a file that two folders reach"
    with pytest.raises(ValueError, match="are both the train set of en: keep one"):
        found("xquad", tmp_path / "xquad", tmp_path / "tydiqa", tmp_path / "squad")


@pytest.mark.skipif(not REAL.is_dir(), reason="the evaluation sets of ../shared/data are not here")
@pytest.mark.parametrize(
    ("task", "folder", "sets", "examples"),
    [
        ("pos", "udpos", 6, 3974), ("ner", "panx", 7, 10000), ("xnli", "xnli", 5, 2490), ("pawsx", "pawsx", 3, 2000),
        ("xquad", "xquad", 4, 1190), ("mlqa", "mlqa", 4, 1148), ("tydiqa", "tydiqa", 2, 3696),
    ],
)  # fmt: skip
def test_the_real_sets(task: str, folder: str, sets: int, examples: int) -> None:
    """Every file of every set is read; the published number of examples of English comes out."""
    found = find_task_files(TASKS[task], [REAL / folder])
    assert len(found) == sets
    assert any(len(read_examples(one, TASKS[task])) == examples for one in found if one.language == "en")


def chosen(task: str, names: str, several: bool = True, split: str = "test", **tuning: Any) -> TaskSets:
    """Of files by these names; the task's own folder first."""
    found = []
    for name in names.split():
        for patterns, own in ((TASKS[task].file_patterns, True), (TASKS[task].train_file_patterns, False)):
            for match in filter(None, (re.fullmatch(pattern, name) for pattern in patterns)):
                named = match.groupdict()
                found.append(TaskFile(Path(name), named.get("language", "en"), named.get("split", "test"), own))
    return choose_sets(found, task, TuningConfig(**tuning), several, split)


def names(sources: list[TaskFile]) -> str:
    return " ".join(sorted(source.path.name for source in sources))


def test_settings_are_chosen_on_the_dev_sets_of_the_languages_trained_on() -> None:
    """Never on what is scored: without another dev set a part of the training examples is held out."""
    files = "train-en.tsv train-de.tsv dev-en.tsv dev-de.tsv dev-fr.tsv test-en.tsv test-de.tsv"
    sets = chosen("xnli", files)
    assert (names(sets.train), names(sets.dev), names(sets.test)) == (
        "train-en.tsv",
        "dev-en.tsv",
        "test-de.tsv test-en.tsv",
    )
    assert not sets.held_out and sets.dev_only == ["fr"], "a dev set alone is not scored where others have tests"
    assert chosen("ner", "train-en.tsv dev-en.tsv test-de.tsv", several=False).dev_only == [], "en's dev set is scored"
    assert chosen("xnli", "train-en.tsv dev-de.tsv test-de.tsv").has_dev and chosen("xnli", files).has_dev
    assert not chosen("ner", "train-en.tsv test-de.tsv").has_dev, "held-out training examples are no dev set"
    on_dev = chosen("xnli", files, split="dev")
    assert names(on_dev.test) == "dev-de.tsv dev-en.tsv dev-fr.tsv" and on_dev.held_out and on_dev.dev_only == []
    assert not chosen("xnli", files, several=False, split="dev").held_out
    with pytest.raises(ValueError, match="no dev set of ner in the data"):
        chosen("ner", "train-en.tsv test-de.tsv", split="dev")
    files_of = {"xquad": "train-v1.1.json dev-v1.1.json xquad.de.json"}  # SQuAD's dev set is not the task's
    files_of["tydiqa"] = "tydiqa.goldp.en.train.json tydiqa.goldp.en.dev.json"
    for task, of_task in files_of.items():
        with pytest.raises(ValueError, match=f"{task} has no dev sets: leave out --split dev"):
            chosen(task, of_task, split="dev")
    for all_of in (("all",), ("all", "de")):
        assert names(chosen("xnli", files, train_languages=all_of).dev) == "dev-de.tsv dev-en.tsv"
    both = chosen(
        "pos",
        "train-en.tsv train-zh-Hans.tsv test-zh-Hans.tsv test-pt-BR.tsv test-en-old.tsv",
        False,
        train_languages=("all",),
    )
    assert [one.language for one in (*both.train, *both.test)] == ["en", "zh-Hans", "zh-Hans", "pt-BR"]
    assert names(chosen("xnli", files, several=False).dev) == "dev-en.tsv", "scored whether or not there is a choice"
    held = chosen("xnli", files, held_out=True)
    assert names(held.dev) == "train-en.tsv" and held.held_out

    sets = chosen("ner", "train-en.tsv dev-en.tsv dev-de.tsv")  # no tests: the dev sets are scored
    assert (names(sets.test), names(sets.dev), sets.held_out) == ("dev-de.tsv dev-en.tsv", "train-en.tsv", True)
    sets = chosen("ner", "train-en.tsv dev-en.tsv dev-de.tsv", several=False)
    assert sets.dev == [] and not sets.held_out

    for files, said in (
        ("train-en.tsv", "no test or dev set of ner in the data"),
        ("test-en.tsv dev-en.tsv", "no training set of en in the data, only of none"),
    ):
        with pytest.raises(ValueError, match=said):
            chosen("ner", files)
    with pytest.raises(ValueError, match="no training set of any language in the data, only of none"):
        chosen("ner", "test-en.tsv", train_languages=("all",))

    squad, mlqa = "train-v1.1.json dev-v1.1.json", "test-context-en-question-en.json dev-context-en-question-en.json"
    assert names(chosen("xquad", f"{squad} xquad.en.json").dev) == "dev-v1.1.json"
    for files in (f"{squad} {mlqa}", f"{mlqa} {squad}"):
        assert names(chosen("mlqa", files).dev) == "dev-context-en-question-en.json", "its own, if it has one"
    assert names(chosen("mlqa", f"{squad} {mlqa.split()[0]}").dev) == "dev-v1.1.json"
    assert chosen("xquad", "train-v1.1.json xquad.en.json").held_out
    sets = chosen("tydiqa", "tydiqa.goldp.en.train.json tydiqa.goldp.en.dev.json tydiqa.goldp.fi.dev.json")
    assert (names(sets.test), sets.held_out) == ("tydiqa.goldp.en.dev.json tydiqa.goldp.fi.dev.json", True)
    assert {source.split for source in sets.test} == {"test"}, "XTREME's tests are TyDiQA's dev sets"


def test_every_tenth_is_held_out_and_no_context_is_on_both_sides(tmp_path: Path) -> None:
    paragraphs = []
    for number in range(25):
        asked = [
            {"id": f"{number}.{i}", "question": "Who?", "answers": [{"answer_start": 0, "text": "a"}]} for i in range(3)
        ]
        paragraphs.append({"context": f"a{number}", "qas": asked})
    file = source(tmp_path / "train-v1.1.json", json.dumps({"data": [{"paragraphs": paragraphs}]}))._replace(
        own_dataset=False
    )
    tuning = TuningConfig(held_out=True)
    kept, held = (training_examples(file, TASKS["xquad"], tuning, held_out) for held_out in (False, True))
    assert [one.context for one in held] == ["a9"] * 3 + ["a19"] * 3 and len(kept) == 69
    assert not {one.context for one in kept} & {one.context for one in held}
    lines = "".join(f"a{number}\tb\tneutral\n" for number in range(40))
    pairs = source(tmp_path / "train-en.tsv", lines)
    tuning = TuningConfig(held_out=True, train_examples=30)
    kept, held = (training_examples(pairs, TASKS["xnli"], tuning, held_out) for held_out in (False, True))
    assert [one.first for one in held] == ["a9", "a19", "a29"] and len(kept) == 27
    assert len(training_examples(pairs, TASKS["xnli"], TuningConfig())) == 40
    ten = TuningConfig(held_out=True, train_examples=10)
    assert [one.first for one in training_examples(pairs, TASKS["xnli"], ten, held_out=True)] == ["a9"]
    few = (
        r"gives 9 examples, too few to hold out every tenth: add a dev set to the data, or raise tuning.train_examples"
    )
    with pytest.raises(ValueError, match=few):
        training_examples(pairs, TASKS["xnli"], TuningConfig(held_out=True, train_examples=9))


def test_predictions_of_one_example(tmp_path: Path) -> None:
    """As XTREME's evaluation reads them: a tag or a label a line, or answers by the question's id."""
    sentence, pair = Sentence(["a", "b"], ["O", "O"]), TextPair("a", "b", "0")
    write_predictions(tmp_path / "tags.tsv", [sentence], [["B-LOC", "I-LOC"]])
    assert (tmp_path / "tags.tsv").read_text() == "B-LOC\nI-LOC\n\n"
    write_predictions(tmp_path / "labels.tsv", [pair], ["1"])
    assert (tmp_path / "labels.tsv").read_text() == "1\n"
    write_predictions(tmp_path / "answers.json", [Question("q7", "?", "c", [])], ["Rhein"])
    assert json.loads((tmp_path / "answers.json").read_text()) == {"q7": "Rhein"}
