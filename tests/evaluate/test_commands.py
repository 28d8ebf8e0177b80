"""`xlme evaluate` on small run folders: tables, JSON, files, several models, and mistakes."""

import json
import re
import shutil
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from safetensors.numpy import load_file, save_file
from sentencepiece import sentencepiece_model_pb2 as proto

from tests.evaluate.folders import WORDS, sentence, write_alignment, write_run, write_tatoeba
from tests.launch import python
from tests.rows import write_data
from tests.small import encoder_of
from xlme_ds import evaluate
from xlme_ds.config import ModelConfig
from xlme_ds.data.vocabulary import MODEL_FILE
from xlme_ds.evaluate.__main__ import main
from xlme_ds.evaluate.alignment import alignment_tables
from xlme_ds.evaluate.compared_models import _with_names, default_layer, load_encoders
from xlme_ds.evaluate.heldout_text import loss_tables, perplexity_tables
from xlme_ds.evaluate.lookup_table import word_tables
from xlme_ds.evaluate.output import ResultTable, _plot
from xlme_ds.evaluate.retrieval import LANGUAGE_SETS, XTREME_CODES, accuracy_at_1, mean_of_directions, retrieval_tables
from xlme_ds.io.files import file_sha256
from xlme_ds.models.electra import Electra
from xlme_ds.models.init import initialise
from xlme_ds.trained.encoders import load_encoder

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "first")


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "second", layers=4)


@pytest.fixture
def tatoeba(tmp_path: Path) -> Path:
    for place, code in enumerate(("deu", "fra", "nob")):
        ours = [sentence(number) for number in range(12)]
        write_tatoeba(
            tmp_path / "t",
            code,
            ours,
            [sentence(number, 4) + f" pein {line}" for number, line in enumerate(ours, place)],
        )
    return tmp_path / "t"


@pytest.fixture
def alignment(tmp_path: Path) -> Path:
    lines = [sentence(number) for number in range(6)]
    links = "".join(f"{n} {word} {word} {'SP'[word == 3]}\n" for n in range(1, 7) for word in (1, 2, 3))
    write_alignment(tmp_path / "a/de-en", lines, lines[::-1], links)
    write_alignment(tmp_path / "a/en-ro", lines, lines, links)
    return tmp_path / "a"


def told(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    main(arguments)
    return capsys.readouterr().out


def answer(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(told([*arguments, "--json"], capsys))
    return found


@pytest.mark.parametrize(("depth", "layer"), [(12, 9), (24, 18), (48, 36), (6, 5), (4, 3), (3, 2), (2, 2), (1, 1)])
def test_the_papers_layer_for_other_depths(depth: int, layer: int) -> None:
    assert default_layer(depth) == layer


def test_the_sum_of_other_terms_is_not_compared() -> None:
    models = [
        {"model": name, "terms": terms, "overall": {"loss": 9.0, "mlm": 1.0}, "languages": {}}
        for name, terms in (
            ("a", {"mlm": 1.0, "mrtd": 50.0}),
            ("b", {"mlm": 1.0, "mrtd": 50.0}),
            ("c", {"mlm": 1.0, "mrtd": 25.0}),
            ("d", {"mlm": 1.0, "tlm": 1.0}),
        )
    ]
    compared = (models[:2], models[1:3], [models[0], models[3]])
    rows = [[row[0] for row in loss_tables({"models": of})[0].rows] for of in compared]
    assert rows == [["loss", "mlm"], ["mlm"], ["mlm"]]


def test_a_table_at_its_layer() -> None:
    """Cells and notes by hand: of three layers the second, the mean of a set that is complete, what was left out."""
    ways = ("en_xx", "xx_en", "en_xx_centred", "xx_en_centred")

    def scores(first: float) -> dict[str, list[float]]:
        return {way: [0.99, first + n / 100, 0.98] for n, way in enumerate(ways)}

    model = {"model": "m", "layer": 1, "depth": 2, "cut": 3, "pairs": {"de": 5, "fr": 7}, "dimensions": [1.4, 2.6, 9]}
    model |= {"languages": {"de": scores(0.1), "fr": scores(0.3)}, "overall": scores(0.2), "trained_on": True}
    sets = {"14": scores(0.5) | {"found": 14, "of": 14}, "36": scores(0.6) | {"found": 35, "of": 36}}
    (table,) = retrieval_tables({"models": [model | {"sets": sets, "too_few": {"sw": 4, "xh": 1}}]})
    assert table.title == "m, layer 1 of 2: accuracy@1 (%)" and table.means == 2
    assert table.columns == ["language", "pairs", "en→xx", "xx→en", "en→xx centred*", "xx→en centred*"]
    assert table.rows == [
        ["de", "5", "10.0", "11.0", "12.0", "13.0"],
        ["fr", "7", "30.0", "31.0", "32.0", "33.0"],
        ["mean of 2", "", "20.0", "21.0", "22.0", "23.0"],
        ["mean of the papers' 14", "", "50.0", "51.0", "52.0", "53.0"],
    ]
    assert table.notes == [
        "* not the paper's: the mean vector of each side of a language subtracted",
        "3 sentences were cut to the model's maximum length",
        "dimensions in which the centred vectors vary (effective rank), by layer: 1, 3, 9",
        "not unseen: text that m was trained on",
        "left out, with fewer than 5 pairs without repetitions: sw (4), xh (1)",
    ]
    assert len(retrieval_tables({"models": [model | {"sets": {}, "cut": 0, "trained_on": False}]})[0].notes) == 2
    test = {"aer": [0.1, 0.2, 0.3], "precision": [0.5] * 3, "recall": [0.6] * 3, "aer_cosine": [0.4] * 3}
    of_align = model | {"tests": {"de-en": test}, "overall": test, "pairs": {"de-en": 9}}
    (table,) = alignment_tables({"models": [of_align], "reading": "as it is"})
    assert table.columns == ["test", "pairs", "AER", "precision", "recall", "AER, cosines*"]
    assert table.rows[0] == ["de-en", "9", "20.0", "50.0", "60.0", "40.0"] and "as it is" in table.notes[0]
    assert table.notes[1] == "3 pairs were cut: words beyond the model's maximum length have no link"


def test_means_alone_of_many_rows() -> None:
    """25 languages are printed; of 26 the means, if a file has the others. Markdown has all."""
    for count, with_file, shown in ((25, True, 26), (26, True, 1), (26, False, 27)):
        rows = [[f"l{number}", "1.0"] for number in range(count)] + [["mean", "1.0"]]
        table, console = (
            ResultTable("title", ["language", "score"], rows, ["a note"], means=1),
            Console(file=StringIO()),
        )
        table.show(console, Path("out/pairs.md") if with_file else None)
        assert isinstance(console.file, StringIO)
        printed = console.file.getvalue()
        assert printed.count("1.0") == shown and "mean" in printed and "a note" in printed
        assert ("26 rows are in out/pairs.md" in printed) == (shown == 1)
        assert table.markdown().count("1.0") == count + 1


def test_tables_of_several_models_by_hand() -> None:
    """A column for each model; what one lacks is empty."""
    models: list[dict[str, Any]] = []
    for n, name in enumerate(("a", "b")):
        languages = {code: {"perplexity": 1000 + n + i, "bits_per_character": n + i / 8} for i, code in enumerate("xy")}
        model = {"model": name, "term": ("mlm", "clm")[n], "languages": languages, "trained_on": n == 1}
        models.append(model | {"overall": {"perplexity": 7 + n, "bits_per_character": 0.5 + n}})
    perplexities, bits = perplexity_tables({"models": models, "rows": {"x": 3, "y": 4}})
    assert perplexities.means == bits.means == 1
    assert perplexities.columns == bits.columns == ["language", "rows", "a (mlm)", "b (clm)"]
    assert perplexities.rows == [
        ["x", "3", "1,000.0", "1,001.0"],
        ["y", "4", "1,001.0", "1,002.0"],
        ["mean of 2", "7", "7.0", "8.0"],
    ]
    assert [row[2:] for row in bits.rows] == [["0.000", "1.000"], ["0.125", "1.125"], ["0.500", "1.500"]]
    assert perplexities.notes[0] == "not unseen: text that b was trained on" and not bits.notes

    overall = {"loss": 3.0, "mlm": 1.0, "tlm": 2.0}
    one = {
        "model": "a",
        "terms": {"mlm": 1.0, "tlm": 1.0},
        "overall": overall,
        "languages": {"mlm": {"y": 1.5, "x": 0.5}},
    }
    two = one | {"model": "b", "overall": overall | {"mlm": 4.0}, "languages": {"mlm": {"x": 9.0}, "tlm": {"z": 8.0}}}
    whole, mlm, tlm = loss_tables({"models": [one, two]})
    assert whole.rows == [["loss", "3.0000", "3.0000"], ["mlm", "1.0000", "4.0000"], ["tlm", "2.0000", "2.0000"]]
    assert (mlm.title, mlm.columns) == ("mlm by language", ["language", "a", "b"])
    assert mlm.rows == [["x", "0.5000", "9.0000"], ["y", "1.5000", ""]] and tlm.rows == [["z", "", "8.0000"]]

    judged = {"pairs": 9, "pearson": 0.1, "spearman": 0.2, "score": 0.3, "unknown": 4}
    found = {
        "pairs": 8,
        "identical": 1,
        "cosine": 0.5,
        "distance": 2.5,
        "precision": 0.25,
        "candidates": 6,
        "unknown": 3,
    }
    similarity, dictionaries = word_tables({"models": [
        {"model": name, "similarity": {"t": judged | {"score": score}}, "dictionaries": {"d": found}}
        for name, score in (("a", 0.3), ("b", 0.4))
    ]})  # fmt: skip
    assert similarity.rows == [
        [*"ta", "9", "0.100", "0.200", "0.300", "4"],
        [*"tb", "9", "0.100", "0.200", "0.400", "4"],
    ]
    assert dictionaries.rows[0] == [*"da", "8", "1", "0.500", "2.500", "25.0%", "6", "3"]
    assert dictionaries.columns[2:] == ["pairs", "identical", "cosine", "L2 distance", "P@1", "candidates", "unknown"]


def test_tatoeba_as_json_is_what_the_vectors_say(run: Path, tatoeba: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from xlme_ds.evaluate.vectors import sentence_vectors

    (model,) = answer(["tatoeba", "--model", str(run), "--data", str(tatoeba)], capsys)["models"]
    assert (model["model"], model["depth"], model["layer"], model["cut"]) == ("first", 2, 2, 0)
    assert model["pairs"] == {"de": 12, "fr": 12, "nob": 12}
    saved = load_encoder(run)
    sides = [(tatoeba / f"tatoeba.fra-eng.{end}").read_text().splitlines() for end in ("eng", "fra")]
    ours, theirs = (
        sentence_vectors(saved.encoder, [saved.vocabulary.encode(line) for line in side]).astype(np.float64)
        for side in sides
    )
    ways = list(zip(*(accuracy_at_1(a, b) for a, b in zip(ours, theirs, strict=True)), strict=True))
    assert [tuple(model["languages"]["fr"][way]) for way in ("en_xx", "xx_en")] == ways
    assert any(0 < value < 1 for way in ways for value in way)
    for way in ("en_xx", "xx_en", "en_xx_centred", "xx_en_centred"):
        by_language = [model["languages"][code][way] for code in ("de", "fr", "nob")]
        assert model["overall"][way] == pytest.approx(np.mean(by_language, axis=0))
        assert model["sets"]["14"][way] == pytest.approx(np.mean(by_language[:2], axis=0))
    assert [(name, scores["found"], scores["of"]) for name, scores in model["sets"].items()] == [
        ("14", 2, 14),
        ("36", 2, 36),
    ]


def test_the_papers_averages_show_when_all_their_languages_are_there(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for iso, code in XTREME_CODES.items():
        if code in LANGUAGE_SETS["14"]:
            lines = [sentence(number + len(iso)) for number in range(5)]
            write_tatoeba(tmp_path / "t", iso, lines, lines[1:] + lines[:1])
    table = told(["tatoeba", "--model", str(run), "--data", str(tmp_path / "t")], capsys)
    assert "mean of the papers' 14" in table and "papers' 36" not in table and "mean over 14 languages" in table


def test_the_curve_is_of_the_36_languages_only_when_they_are_complete() -> None:
    scores = {way: [0.2] for way in ("en_xx", "xx_en")}
    half = {"found": 35, "of": 36, "en_xx": [0.6], "xx_en": [0.8]}
    assert mean_of_directions({"overall": scores, "sets": {"36": half}}) == [0.2]
    assert mean_of_directions({"overall": scores, "sets": {"36": half | {"found": 36}}}) == [pytest.approx(0.7)]


def test_several_models_and_an_untrained_one_in_one_table_and_plot(
    run: Path, other: Path, tatoeba: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    models = ["--model", str(run), "--model", str(other), "--random", "--layer", "1"]
    table = told(["tatoeba", *models, "--data", str(tatoeba), "--out", str(out)], capsys)
    names = ["first", "second", "untrained, seed 1, as first", "untrained, seed 1, as second"]
    assert all(f"{name}, layer 1 of " in table for name in names)
    written = json.loads((out / "tatoeba.json").read_text())
    assert [(model["model"], len(model["overall"]["en_xx"])) for model in written["models"]] == list(
        zip(names, (3, 5, 3, 5), strict=True)
    )
    expected = [f"{100 * value:.1f}" for value in mean_of_directions(written["models"][1])]
    lines = [line.split() for line in table[table.index("By layer") :].splitlines()]
    rows = [line for line in lines if line and line[0].isdigit()]
    assert [row[0] for row in rows] == list("01234") and [row[2] for row in rows[:3]] == expected[:3]
    assert [row[1] for row in rows[3:]] == expected[3:]  # the shallow models have no entry
    assert table.splitlines()[-1] == str(out / "tatoeba.json")
    assert sorted(path.name for path in out.iterdir()) == ["tatoeba.json", "tatoeba.md", "tatoeba.png", "tatoeba.svg"]
    assert (out / "tatoeba.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "<svg" in (out / "tatoeba.svg").read_text() and "| language |" in (out / "tatoeba.md").read_text()


def test_names_are_shown_as_they_are(
    run: Path, tatoeba: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not as Rich's markup, emoji codes, a formula, or what matplotlib keeps out of a legend; and nothing is lost."""
    names = ["m[lr]", "m[wd]", ":smile:", r"c$\x$", "a$b", "_best"]
    words = ["tatoeba", "--data", str(tatoeba), "--out", str(tmp_path / "out")]
    copies = [shutil.copytree(run, tmp_path / "copies" / name) for name in names]
    said = told([*words, *(word for copy in copies for word in ("--model", str(copy)))], capsys)
    for name in names:
        assert f"{name}, layer 2 of 2: accuracy@1 (%)" in said, name
    assert [model["model"] for model in json.loads((tmp_path / "out/tatoeba.json").read_text())["models"]] == names
    drawn_names = re.findall(r"<!-- (.*?) -->", (tmp_path / "out/tatoeba.svg").read_text())
    assert all(any(name in text for text in drawn_names) for name in names), drawn_names


@pytest.mark.parametrize(("which", "said"), [("discriminator", ""), ("generator", " (generator)")])
def test_the_untrained_model_is_the_runs_own_start(run: Path, which: str, said: str) -> None:
    trained, start = load_encoders([run], None, with_untrained=True, which=which)
    model = Electra(ModelConfig(**json.loads((run / "config.json").read_text())["config"]["model"]))
    initialise(model, 1, model.cfg.init_std)
    expected = encoder_of(model, which).state_dict()
    assert expected.keys() == start.encoder.state_dict().keys()
    assert all((value.cpu() == expected[name]).all() for name, value in start.encoder.state_dict().items())
    assert (start.name, start.layer) == (f"untrained{said}, seed 1", trained.layer)


def test_layers_from_the_embeddings_to_the_last_exist(run: Path) -> None:
    assert [load_encoders([run], layer, False)[0].layer for layer in (0, 2)] == [0, 2]
    for layer in (-1, 3):
        with pytest.raises(ValueError, match=f"layer {layer} does not exist in"):
            load_encoders([run], layer, False)


def test_models_whose_folders_have_one_name_are_named_by_their_paths(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [tmp_path / "a/run", tmp_path / "b/run", tmp_path / "b/other"]
    assert [name for _, name in _with_names(folders)] == [str(folders[0]), str(folders[1]), "other"]
    assert _with_names(str(folders[0])) == [(folders[0], "run")]
    monkeypatch.chdir(tmp_path)
    assert _with_names(".") == [(tmp_path.resolve(), tmp_path.name)]


def test_untrained_models_differ_by_seed_and_shape(run: Path, tmp_path: Path) -> None:
    """One for models that start alike, of each seed one of its own."""
    alike, other = (write_run(tmp_path / name, seed, like=run) for name, seed in (("alike", 1), ("other", 7)))
    started = load_encoders([run, alike, other], None, with_untrained=True)[3:]
    assert [start.name for start in started] == ["untrained, seed 1, as first", "untrained, seed 7, as other"]
    first, second = ({name: value.cpu() for name, value in start.encoder.state_dict().items()} for start in started)
    assert any(not (value == second[name]).all() for name, value in first.items())


def test_a_plot_is_in_per_cent_and_names_what_is_centred(tmp_path: Path) -> None:
    """A colour for each model, also of its centred vectors."""
    curves = {"a": [[0.25, 0.75], [0.5, 0.9]], "b": [[0.3, 0.4]]}
    _plot(curves, "accuracy (%)", tmp_path / "plot")
    svg = (tmp_path / "plot.svg").read_text()
    texts = re.findall(r"<!-- (.*?) -->", svg)
    assert {"a", "a, centred (not the paper's)", "b", "accuracy (%)"} <= set(texts)
    assert {"40", "80"} <= set(texts) and set(re.findall("#(?:1f77b4|ff7f0e|2ca02c)", svg)) == {"#1f77b4", "#ff7f0e"}


def test_pairs_are_limited_after_repetitions_are_left_out(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = [sentence(number) for number in range(12)]
    for code, side in (("en", lines[:3] + lines), ("de", lines[2::-1] + lines[::-1])):
        (tmp_path / f"X.en-de.{code}").write_text("".join(line + "\n" for line in side))
    command = ["pairs", "--model", str(run), "--data", str(tmp_path)]
    assert answer(command, capsys)["models"][0]["pairs"] == {"de": 9}  # 3 English lines and 3 German ones come again
    found = answer([*command, "--limit", "7"], capsys)
    assert found["test"] == "pairs" and found["models"][0]["pairs"] == {"de": 7}
    for language, few in (("sw", lines[:4] * 2), ("fr", lines[:5])):
        for code in ("en", language):
            (tmp_path / f"X.en-{language}.{code}").write_text("".join(line + "\n" for line in few))
    table = told(command, capsys)
    assert "left out, with fewer than 5 pairs without repetitions: sw (4)" in table
    assert "mean of 2 " in table and "mean over 2 languages" in table
    assert answer([*command, "--limit", "5"], capsys)["models"][0]["pairs"] == {"de": 5, "fr": 5}


def test_a_language_that_one_vocabulary_cannot_tell_apart_is_left_out_for_all_models(
    run: Path, other: Path, tmp_path: Path
) -> None:
    knowing, letters = Path(shutil.copytree(other, tmp_path / "knowing")), "абвгдежз"
    model = proto.ModelProto.FromString((knowing / "model" / MODEL_FILE).read_bytes())
    for piece, letter in zip(model.pieces[-len(letters) :], letters, strict=True):
        piece.piece = letter
    (knowing / "model" / MODEL_FILE).write_bytes(model.SerializeToString())
    config = json.loads((knowing / "config.json").read_text())
    config["data"]["vocabulary_sha256"] = file_sha256(knowing / "model" / MODEL_FILE)
    (knowing / "config.json").write_text(json.dumps(config))
    sides = {"de": [sentence(number + 300) for number in range(8)], "ru": letters}
    for language, lines in sides.items():
        (tmp_path / f"X.en-{language}.en").write_text("".join(sentence(number) + "\n" for number in range(8)))
        (tmp_path / f"X.en-{language}.{language}").write_text("".join(line + "\n" for line in lines))
    (alone,) = evaluate.pairs(knowing, tmp_path)["models"]
    assert alone["pairs"] == {"de": 8, "ru": 8}
    for found in evaluate.pairs([knowing, run], tmp_path)["models"]:
        assert (found["pairs"], found["too_few"]) == ({"de": 8}, {"ru": 1})


def test_align_averages_over_its_tests(
    run: Path, alignment: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["align", "--model", str(run), "--data", str(alignment), "--out", str(tmp_path / "out")]
    table = told(command, capsys)
    found = json.loads((tmp_path / "out/align.json").read_text())
    (model,) = found["models"]
    assert model["pairs"] == {"de-en": 6, "en-ro": 6} and model["cut"] == 0
    rates = [model["tests"][name]["aer"] for name in ("de-en", "en-ro")]
    assert model["overall"]["aer"] == pytest.approx(np.mean(rates, axis=0)) and rates[0] != rates[1]
    by_layer = [line.split() for line in table[table.index("By layer") :].splitlines()]
    assert [row[1] for row in by_layer if row and row[0] in "012"] == [
        f"{100 * v:.1f}" for v in model["overall"]["aer"]
    ]
    assert (
        f"{100 * rates[1][2]:.1f}" in table and "a pair read as one item" in table and "mean over de-en, en-ro" in table
    )
    _plot({"first": [model["overall"]["aer"]]}, "mean alignment error rate (%)", tmp_path / "expected")
    assert (tmp_path / "out/align.svg").read_bytes() == (tmp_path / "expected.svg").read_bytes()
    apart = answer([*command, "--apart"], capsys)
    assert apart["models"][0]["tests"] != model["tests"] and apart["reading"] == "each sentence read alone"


@pytest.mark.parametrize(
    ("test", "settings"),
    [
        (evaluate.tatoeba, {"layer": 1, "which": "generator", "random": True}),
        (evaluate.pairs, {"limit": 6, "layer": 0, "which": "generator", "random": True}),
        (evaluate.align, {"apart": True, "layer": 0, "which": "generator", "random": True}),
        (evaluate.losses, {"rows": 3, "seed": 5, "random": True}),
        (evaluate.perplexity, {"passes": 2, "seed": 5, "limit": 1, "random": True}),
        (evaluate.words, {"which": "generator", "random": True}),
    ],
)
def test_every_option_reaches_its_test(
    run: Path,
    tatoeba: Path,
    alignment: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    test: Callable[..., dict[str, Any]],
    settings: dict[str, Any],
) -> None:
    """Alone it gives what the function gives, which is another answer than without it."""
    lines = [f"{word} {other}" for word in WORDS for other in WORDS[:2]]
    words = tmp_path / "words/en-de.txt"
    words.parent.mkdir()
    words.write_text("\n".join(lines))
    vocabulary = load_encoder(run).vocabulary
    rows = write_data(tmp_path / "rows", 12, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    data = {"tatoeba": tatoeba, "align": alignment, "words": words.parent}.get(test.__name__, rows)
    usual = json.loads(json.dumps(test([run], data)))
    for name, value in settings.items():
        flags = [f"--{name}", *([] if value is True else [str(value)])]
        found = answer([test.__name__, "--model", str(run), "--data", str(data), *flags], capsys)
        assert found == json.loads(json.dumps(test([run], data, **{name: value}))) != usual, name


def test_mistakes_end_in_one_sentence_and_exit_code_2(
    run: Path, tatoeba: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fault(*arguments: str) -> str:
        with pytest.raises(SystemExit) as left:
            main(list(arguments))
        assert left.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        test = arguments[0] if arguments[0] != "pair" else ""
        assert line.startswith(f"xlme evaluate {test}".rstrip() + ": error: ")
        return line

    data = ["--data", str(tatoeba)]
    assert "there is no test 'pair': did you mean pairs?" in fault("pair", *data)
    with pytest.raises(ValueError, match="no model is named: "):
        evaluate.tatoeba([], tatoeba)
    assert "has no config.json" in fault("tatoeba", "--model", str(tmp_path), *data)
    assert "nowhere does not exist: name the folder of a run" in fault("tatoeba", "--model", "nowhere", *data)
    missing = fault("losses", "--model", str(run), "--data", str(tmp_path / "none"))
    assert "none does not exist: name a data folder that `xlme prep mix` wrote" in missing
    assert " layer 3 does not exist in" in fault("tatoeba", "--model", str(run), "--layer", "3", *data)
    assert "have the same name" in fault("tatoeba", "--model", str(run), "--model", str(run), *data)
    assert "it must be at least 5" in fault("pairs", "--model", str(run), "--limit", "4", *data)
    (tmp_path / "X.en-de.en").write_text("kalo\n")
    (tmp_path / "X.en-de.de").write_text("kalo\n")
    broken = write_run(tmp_path / "broken")
    weights = load_file(broken / "model/model.safetensors")
    next(value for name, value in weights.items() if name.startswith("discriminator.")).flat[0] = np.nan
    save_file(weights, broken / "model/model.safetensors")
    assert "is not finite, because the training diverged" in fault("tatoeba", "--model", str(broken), *data)
    assert "has no language with 5 pairs" in fault("pairs", "--model", str(run), "--data", str(tmp_path))
    for side in ("swh", "eng"):
        (tatoeba / f"tatoeba.swh-eng.{side}").write_text("kalo\nlomi\n")
    assert "has fewer than 5 pairs for sw: complete or remove" in fault("tatoeba", "--model", str(run), *data)
    (tatoeba / "tatoeba.nob-eng.nob").write_text("kalo\n")
    out = tmp_path / "out"
    assert "nob-eng.eng has 12 lines" in fault("tatoeba", "--model", str(run), "--out", str(out), *data)
    assert not out.exists()
    (tmp_path / "file").touch()
    for test in evaluate.__all__:  # before the model is looked for
        said = fault(test, "--model", "nowhere", *data, "--out", str(tmp_path / "file/scores"))
        assert f"{tmp_path / 'file'} is a file, not a folder: choose another output folder" in said


def test_what_one_model_cannot_read_is_said_before_another_is_scored(
    run: Path, tatoeba: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = write_run(tmp_path / "few", like=run, language_embeddings=("de", "en"))
    vocabulary = load_encoder(run).vocabulary
    data = write_data(tmp_path / "data", 40, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    write_alignment(tmp_path / "fr-en", ["kalo"], ["kalo"], "1 1 1 S\n")
    scoring = "retrieval.sentence_vectors", "alignment.hidden_states", "heldout_text._losses"
    for name in (*scoring, "heldout_text.mean_nlls"):
        monkeypatch.setattr(f"xlme_ds.evaluate.{name}", None)  # scoring would raise TypeError
    for test, folder in (
        (evaluate.tatoeba, tatoeba), (evaluate.pairs, data), (evaluate.align, tmp_path / "fr-en"),
        (evaluate.losses, data), (evaluate.perplexity, data),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"model\.language_embeddings"):
            test([run, few], folder)
    (data / "mono").rename(tmp_path / "mono")
    of_text = write_run(tmp_path / "of_text", objective="btmlm", like=run)
    with pytest.raises(ValueError, match=r"has no rows that .*of_text was trained to predict \(btmlm\)"):
        evaluate.losses([run, of_text], data)


def test_the_module_is_a_command(run: Path, alignment: Path) -> None:
    words = ["align", "--model", str(run), "--data", str(alignment), "--json"]
    result = python("-m", "xlme_ds.evaluate", *words)
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["test"] == "align"
