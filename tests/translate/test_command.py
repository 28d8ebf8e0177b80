"""The whole road: pairs of text are prepared, a model is trained on them, and a file is translated in both
directions."""

import bz2
import gzip
import json
import lzma
import os
import shutil
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import xlme_ds as xlme
from data_prep.__main__ import main as data_prep
from tests.evaluate.folders import write_run
from tests.rows import write_data
from xlme_ds.__main__ import main as command
from xlme_ds.api import pretrain
from xlme_ds.config import (
    DataConfig,
    EngineConfig,
    ModelConfig,
    ObjectiveConfig,
    OptimizerConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)
from xlme_ds.data.schema import EOS, PAD
from xlme_ds.data.shards import RowStore
from xlme_ds.data.vocabulary import Vocabulary
from xlme_ds.evaluate.heldout_text import losses, perplexity
from xlme_ds.io.files import read_json, write_json
from xlme_ds.io.folders import lock_folder
from xlme_ds.train.data import open_loader
from xlme_ds.trained.encoders import load_encoder
from xlme_ds.trained.runs import load_run
from xlme_ds.translate.pairs import write_pairs
from xlme_ds.translate.translator import bleu_and_chrf, load_translator, read_lines, seen_lines, translate_lines

GERMAN = ["haus", "baum", "hund", "katze", "fluss", "berg", "vogel", "fisch", "stein", "wind"]
ENGLISH = ["house", "tree", "dog", "cat", "river", "mountain", "bird", "fish", "stone", "wind"]
STEPS = 150
Words = list[int]


def sentences(count: int, seed: int) -> list[Words]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 10, rng.integers(3, 7)).tolist() for _ in range(count)]


def german(words: Words) -> str:
    return " ".join(GERMAN[word] for word in words)


def english(words: Words) -> str:
    """The same backwards."""
    return " ".join(ENGLISH[word] for word in reversed(words))


def write(folder: Path, name: str, words: list[Words]) -> None:
    for code, said in (("de", german), ("en", english)):
        (folder / f"{name}.{code}").write_text("".join(f"{said(one)}\n" for one in words), encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`data` and `heldout`, and 60 new pairs in test.de and test.en."""
    folder = tmp_path_factory.mktemp("translate")
    for part, seed, rows in (("data", 0, 512), ("heldout", 1, 16)):
        para = folder / f"para-{part}"
        para.mkdir()
        write(para, "toy.de-en", sentences(2000 if part == "data" else 100, seed))
        if part == "data":
            assert not data_prep(f"vocab --para {para} --out {folder}/vocab --size 46 --processes 1".split())
        encode = f"encode --para {para} --vocab {folder}/vocab --out {folder}/encoded-{part} --processes 1"
        mix = f"mix --encoded {folder}/encoded-{part} --vocab {folder}/vocab --out {folder}/{part}"
        assert not data_prep(encode.split())
        assert not data_prep(f"{mix} --row-tokens 48 --para-rows {rows} --layout xlm".split())
    write(folder, "test", sentences(60, 2))
    return folder


@pytest.fixture(scope="module")
def config(folder: Path) -> RunConfig:
    size = read_json(folder / "data" / "para" / "manifest.json", dict)["vocabulary_size"]
    return RunConfig(
        "toy",
        model=ModelConfig(
            size, 64, 4, 128, discriminator_layers=2, max_positions=48, layout="xlm", language_embeddings=("de", "en"),
            relative_bias="none", init_std=0.08, masked_head="linear",
        ),
        objective=ObjectiveConfig("mt", mask_fraction=1.0),
        data=DataConfig(0, 16, 16),
        optimizer=OptimizerConfig(3e-3, warmup_steps=30, clip=5.0),
        schedule=ScheduleConfig("inverse_sqrt"),
        engine=EngineConfig("plain"),
        train=TrainConfig(steps=STEPS, log_every=50, eval_every=0, save_every=75, keep_every=0),
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(config: RunConfig, folder: Path) -> Path:
    return pretrain(config, folder / "data", folder / "run", heldout=folder / "heldout")


def translate(run: Path | str, folder: Path, source: str, to: str, *more: str) -> Path:
    out = folder / f"out.{to}"
    words = ["--model", str(run), "--source", str(folder / f"test.{source}"), "--from", source, "--to", to]
    command(["translate", *words, "--out", str(out), *more])
    return out


@pytest.mark.parametrize(("source", "target"), [("de", "en"), ("en", "de")])
def test_new_sentences_are_translated(
    run: Path, folder: Path, source: str, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Words of the other language in the other order; scores as sacreBLEU's own function gives them."""
    from sacrebleu import corpus_bleu, corpus_chrf

    out = translate(run, folder, source, target, "--reference", str(folder / f"test.{target}"))
    first, bleu, chrf = capsys.readouterr().out.splitlines()
    lines, expected = (path.read_text().splitlines() for path in (out, folder / f"test.{target}"))
    assert first == f"{out}: {len(lines)} lines" and len(lines) == 60
    score = corpus_bleu(lines, [expected]).score
    assert score > 50 and sum(map(str.__eq__, lines, expected)) > 20
    assert bleu.startswith("BLEU|nrefs:1|case:mixed|eff:no|tok:13a|smooth:exp|version:") and f" = {score:.2f} " in bleu
    assert chrf.startswith("chrF2|") and chrf.endswith(f" = {corpus_chrf(lines, [expected]).score:.2f}")
    text = (folder / f"test.{source}").read_text().splitlines()
    assert xlme.translate.lines(run, text[:5], source, target) == lines[:5]
    for given, said in (
        ({"text": "haus"}, "is one string"),
        ({"beam": 0}, "^beam 0 "),
        ({"length_penalty": 1e9}, "10"),
    ):
        with pytest.raises(ValueError, match=said):
            xlme.translate.lines(**{"model": run, "text": text, "source": source, "target": target} | given)  # type: ignore[arg-type]


def test_every_line_has_one_line(run: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Empty ones stay empty, long ones are cut and told of, five by number; an earlier checkpoint translates too."""
    long = " ".join(["baum"] * 60)
    (folder / "lines.de").write_bytes(
        f"haus baum hund\r\n\n  \n{long}\nwind wind stein".encode() + f"\n{long}".encode() * 5
    )
    words = f"translate --source {folder}/lines.de --from de --to en --out {folder}/lines.en --beam 1 --model"
    command([*words.split(), str(run)])
    found, said = (folder / "lines.en").read_text(), capsys.readouterr()
    assert found.endswith("\n") and [bool(line) for line in found.splitlines()] == [True, False, False, *[True] * 7]
    assert found.splitlines()[0] == "dog tree house"
    assert "lines.de: 6 lines have more than 46 tokens and were cut: 4 6 7 8 9 ...\n" in said.err
    command([*words.split(), f"{run}@{STEPS // 2}"])
    assert (folder / "lines.en").read_text() != found


def test_a_run_that_was_stopped_goes_on_to_the_same_weights(config: RunConfig, run: Path, folder: Path) -> None:
    short = replace(config, train=replace(config.train, steps=6, save_every=3, keep_every=3))
    short = replace(short, optimizer=replace(config.optimizer, warmup_steps=2))
    whole = pretrain(short, folder / "data", folder / "whole")
    before = load_file(whole / "model" / "model.safetensors")
    shutil.rmtree(whole / "checkpoints" / "step_00000006")
    for name in ("finished.json", "model/model.safetensors"):
        (whole / name).unlink()
    after = load_file(pretrain(short, folder / "data", whole) / "model" / "model.safetensors")
    assert {name: value.tobytes() for name, value in after.items()} == {n: v.tobytes() for n, v in before.items()}


def test_its_encoder_is_one_without_a_head(run: Path, folder: Path) -> None:
    """The head was trained on the decoder: nothing is predicted from the encoder by it."""
    to = folder / "export"
    xlme.export.run(run, to, which="encoder")
    assert read_json(to / "config.json", dict)["architectures"] == ["XLMEModel"]
    ours, theirs = (load_encoder(each).encoder.state_dict() for each in (run, to))
    assert all(np.array_equal(ours[name], theirs[name]) for name in ours)
    with pytest.raises(ValueError, match="was not trained with masked language modelling"):
        xlme.load(run).fill("haus <mask> hund", language="de")
    vocabulary = load_run(run).vocabulary
    text = write_data(folder / "text", 4, 48, vocabulary.size, sha256=vocabulary.sha256)
    with pytest.raises(ValueError, match="predicts no tokens of monolingual text: use `evaluate losses`"):
        perplexity(run, text)


def test_its_losses_are_evaluated(run: Path, folder: Path) -> None:
    """On the held-out pairs, as the run itself did after its last step."""
    (found,) = losses(run, folder / "heldout")["models"]
    at_the_end = json.loads((run / "heldout.jsonl").read_text().splitlines()[-1])
    assert found["overall"]["mt"] == pytest.approx(at_the_end["mt"], rel=1e-5)
    assert found["languages"]["mt"].keys() == {"de", "en"}


def test_lines_of_the_python_function(run: Path) -> None:
    """An iterator's lines too; a lone surrogate is refused before the model is loaded."""
    text = ["ein haus", "zwei"]
    assert xlme.translate.lines(run, iter(text), "de", "en") == xlme.translate.lines(run, text, "de", "en")
    with pytest.warns(UserWarning, match="2 of 4 lines were cut to the length"):
        xlme.translate.lines(run, ["zwei", "zwei " * 200, "haus", "haus " * 200], "de", "en")
    with pytest.raises(ValueError, match="the text has no Unicode character at position 0: decode it as UTF-8"):
        xlme.translate.lines("no model", ["\udc80"], "de", "en")


def test_what_is_shown_of_the_run(run: Path) -> None:
    """The predictions are in the second sides alone, and its encoder is one as any other."""
    samples = read_json(run / "samples.json", dict)["samples"]
    assert {sample["task"] for sample in samples} == {"para"}
    for sample in samples:
        first = [token["original"] for token in sample["tokens"]].index("</s>", 1)
        marks = [token["masked"] for token in sample["tokens"]]
        assert not any(marks[: first + 2]) and all(marks[first + 2 :])  # </s> e </s></s> f </s>
    assert load_encoder(run).encoder.cfg.discriminator_layers == 2
    assert (run / "report.html").exists()
    line = read_json(run / "config.json", dict)["objective"]
    assert line["terms"] == ["mt"]
    assert "directions" not in line["description"], "mix --into leaves one"


def test_sentences_alone(config: RunConfig, run: Path, folder: Path) -> None:
    """Denoising and back-translation by the whole program: records, samples, report, held-out losses, and a run that
    was stopped and goes on to the same weights."""
    for part, seed in (("mono", 4), ("mono-heldout", 5)):
        (folder / part).mkdir()
        for code, said in (("de", german), ("en", english)):
            (folder / part / f"{code}.txt").write_text("\n".join(map(said, sentences(200, seed + (code == "en") * 10))))
        out = folder / f"encoded-{part}"
        vocab = f"--vocab {folder}/vocab --processes 1"
        assert not data_prep(f"encode --mono {folder}/{part} --out {out} --sentences {vocab}".split())
        mix = f"mix --encoded {out} --out {folder}/mixed-{part} {vocab} --layout xlm --row-tokens 48"
        assert not data_prep(f"{mix} --mono-rows 32 --sentences".split())
    of_sentences = replace(
        config,
        objective=ObjectiveConfig("mt", 1.0, denoising=("0:1", "4:0"), back_translation=("0:0", "1:0.5")),
        data=DataConfig(8, 0, 8),
        optimizer=replace(config.optimizer, warmup_steps=2),
        train=replace(config.train, steps=6, save_every=3, keep_every=3, eval_every=3, eval_rows=8, log_every=1),
    )
    data, heldout = folder / "mixed-mono", folder / "mixed-mono-heldout"
    whole = pretrain(of_sentences, data, folder / "sentences", heldout=heldout)
    lines = [json.loads(line) for line in (whole / "metrics.jsonl").read_text().splitlines()]
    assert ["ae" in line for line in lines] == [True] * 4 + [False] * 2
    assert ["bt" in line for line in lines] == [False] + [True] * 5
    assert lines[1]["loss"] == pytest.approx(0.75 * lines[1]["ae"] + 0.5 * lines[1]["bt"])
    unseen = json.loads((whole / "heldout.jsonl").read_text().splitlines()[-1])
    assert {"ae", "bt", "accuracy_denoising", "accuracy_back", "unigram_nll_mono"} <= unseen.keys()
    assert unseen["loss"] == pytest.approx(0.5 * unseen["bt"]), "the weights of the last step"
    (evaluated,) = losses(whole, heldout)["models"]
    assert evaluated["terms"] == {"ae": 0.0, "bt": 0.5, "mt": 1.0}
    samples = read_json(whole / "samples.json", dict)["samples"]
    assert {sample["task"] for sample in samples} == {"mono"} and (whole / "report.html").exists()
    tokens = [token for sample in samples for token in sample["tokens"]]
    assert any(token["replaced"] for token in tokens), "no model of six steps is right everywhere"
    before = load_file(whole / "model" / "model.safetensors")
    shutil.rmtree(whole / "checkpoints" / "step_00000006")
    for name in ("finished.json", "model/model.safetensors"):
        (whole / name).unlink()
    after = load_file(pretrain(of_sentences, data, whole, heldout=heldout) / "model" / "model.safetensors")
    assert {name: value.tobytes() for name, value in after.items()} == {n: v.tobytes() for n, v in before.items()}
    assert len(read_lines(translate(whole, folder, "de", "en"))) == 60
    (found,) = losses(whole, heldout, rows=8, seed=of_sentences.seed)["models"]
    assert [found["overall"][term] for term in ("ae", "bt")] == pytest.approx([unseen["ae"], unseen["bt"]], rel=1e-5)
    mix = f"mix --encoded {folder}/encoded-mono --out {folder}/stream --vocab {folder}/vocab --layout xlm"
    assert not data_prep(f"{mix} --row-tokens 48 --mono-rows 4 --processes 1".split())
    xlme.export.run(whole, folder / "exported-sentences")
    for model in (folder / "exported-sentences", run):  # pairs alone
        with pytest.raises(ValueError, match=r"has no rows that .* was trained to predict \(mt\): name other data"):
            losses(model, heldout)
    with pytest.raises(ValueError, match=r"was mixed without --sentences, and this objective reads"):
        losses(whole, folder / "stream")
    later = replace(of_sentences, data=replace(of_sentences.data, phase_steps=(3,)))
    with pytest.raises(ValueError, match=r"stream/mono was mixed without --sentences, and this objective reads"):
        open_loader(later, [data, folder / "stream"])


@pytest.fixture(scope="module")
def without_decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("mlm"), objective="mlm")


def test_back_translation_is_resumed_and_read(
    run: Path, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """English text becomes pairs; a command that dies at its second part goes on to the same bytes."""
    from xlme_ds.translate import pairs

    monkeypatch.setattr(pairs, "_PART_LINES", 16)
    lines = [english(one) for one in sentences(40, 3)]
    text = [*lines[:20], "", "\u200b", " ".join(["tree"] * 60), *lines[20:]]
    with gzip.open(folder / "mono.en.gz", "wt") as file:
        file.write("\n".join(text))
    words = f"translate --model {run} --source {folder}/mono.en.gz --from en --to de --beam 1 --pairs".split()
    command([*words, str(folder / "whole")])
    assert (
        "40 pairs; left out: 1 lines too long, 2 without words, 0 with an empty translation" in capsys.readouterr().out
    )
    (folder / "long.en").write_text(" ".join(["tree"] * 60) + "\n")
    long_line = f"translate --model {run} --source {folder}/long.en --from en --to de --beam 1 --pairs".split()
    command([*long_line, str(folder / "no-pairs")])
    assert "no pair is left: a model that writes empty translations needs more" in capsys.readouterr().err
    synthetic, real = ((folder / "whole" / f"back_de.de-en.{code}").read_text().splitlines() for code in ("de", "en"))
    assert real == lines
    (folder / "again.en").write_text("".join(f"{line}\n" for line in lines))
    command([*words[:4], str(folder / "again.en"), *words[5:-1], "--out", str(folder / "again.de")])
    assert synthetic == (folder / "again.de").read_text().splitlines()
    done, translate_part = [], pairs.translate_lines

    def dies(*given: object) -> object:
        if len(done) == 2:
            raise OSError("stopped")
        done.append(1)
        return translate_part(*given)  # type: ignore[arg-type]

    with monkeypatch.context() as dying:
        dying.setattr(pairs, "translate_lines", dies)
        with pytest.raises(SystemExit):
            command([*words, str(folder / "parts")])
    assert {path.name[0] for path in (folder / "parts").iterdir()} == {"."}
    for changed in ("--length-penalty 2 --beam 1", "--beam 2"):
        with pytest.raises(SystemExit):
            command([*" ".join(words[:-1]).replace("--beam 1", changed).split(), "--pairs", str(folder / "parts")])
        assert "has pairs of other text, another model or other settings" in capsys.readouterr().err
    (folder / "other.en").write_text("\n".join([*lines[:30], "tree", *lines[31:]]))
    other = [*words[:4], str(folder / "other.en"), *words[5:]]
    for begun in ("parts", "whole"):  # and finished
        with pytest.raises(SystemExit):
            command([*other, str(folder / begun)])
        assert f"{begun} has pairs of other text" in capsys.readouterr().err
    command([*words, str(folder / "parts")])
    for code in ("de", "en"):
        name = f"back_de.de-en.{code}"
        assert (folder / "parts" / name).read_bytes() == (folder / "whole" / name).read_bytes()
    assert len([path for path in (folder / "parts").iterdir() if path.name[0] != "."]) == 2
    capsys.readouterr()
    command([*words, str(folder / "parts")])
    assert "is complete" in capsys.readouterr().out
    (folder / "parts" / "back_de.de-en.en").unlink()  # half of the pairs is not all of them
    command([*words, str(folder / "parts")])
    assert (folder / "parts" / "back_de.de-en.en").read_text().splitlines() == lines
    encode = f"encode --para {folder}/parts --vocab {folder}/vocab --out {folder}/encoded-back --processes 1"
    assert not data_prep(encode.split())
    counts = read_json(folder / "encoded-back" / "para" / "manifest.json", dict)["counts"]["by_language"]
    assert counts["en-de"]["pairs"] == 40


def ending_sooner(run: Path, lines: list[str], to: Path) -> tuple[Path, int]:
    """A copy of the run to whom `</s>` is so likely that some translations are empty, and how many of these lines'."""
    shutil.copytree(run, to)
    path = to / "model" / "model.safetensors"
    least, most = 0.0, 60.0  # what `</s>` is more likely by: none is empty, all are
    for _ in range(20):
        weights = load_file(run / "model" / "model.safetensors")
        weights["masked_head.bias"][EOS] += (least + most) / 2
        save_file(weights, path)
        found = translate_lines(load_translator(to), lines, (1, 0), 1, 1.0)[0]
        empty = sum(not line.strip() for line in found)
        if 0 < empty < len(lines):
            return to, empty
        least, most = ((least + most) / 2, most) if not empty else (least, (least + most) / 2)
    raise AssertionError("all or none are empty")


def test_pairs_of_another_format_fail(run: Path, tmp_path: Path) -> None:
    given, record = (tmp_path, ("de", "en"), load_translator(run), ["haus"], (0, 1), 1, 1.0), ".back_en.de-en.json"
    write_pairs(*given)
    provenance = read_json(tmp_path / record, dict)
    assert provenance.pop("format") == 1 and provenance["beam"] == 1
    write_json(tmp_path / record, provenance)
    with pytest.raises(ValueError, match=r"\.back_en\.de-en\.json has format None, this version reads 1: make it"):
        write_pairs(*given)


def test_one_process_writes_pairs(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, parts = (tmp_path, ("de", "en"), load_translator(run), ["haus"], (0, 1), 1, 1.0), ".back_en.de-en.parts"
    with lock_folder(tmp_path / parts), pytest.raises(ValueError, match="another process is still working in"):
        write_pairs(*given)
    write_pairs(*given)
    assert not (tmp_path / parts).exists() and "is complete" not in capsys.readouterr().out
    write_pairs(*given)
    assert "is complete" in capsys.readouterr().out


def test_complete_pairs_are_not_translated_again(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stop may come while the parts are removed: some of them are missing then."""
    given, parts = (tmp_path, ("de", "en"), load_translator(run), ["haus"], (0, 1), 1, 1.0), ".back_en.de-en.parts"
    write_pairs(*given)
    (tmp_path / parts).mkdir()
    monkeypatch.delattr("xlme_ds.translate.pairs.translate_lines")
    write_pairs(*given)
    assert not (tmp_path / parts).exists() and "is complete" in capsys.readouterr().out


def test_pairs_are_of_the_weights_that_began_them(run: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Another model in the same folder is refused, the same one in another folder goes on; empty translations are
    counted."""
    lines = read_lines(folder / "test.en")
    here, empty = ending_sooner(run, lines, folder / "here")
    other = shutil.copytree(here, folder / "elsewhere")
    words = f"translate --source {folder}/test.en --from en --to de --beam 1 --pairs {folder}/same --model".split()
    command([*words, str(here)])
    counted = f"{60 - empty} pairs; left out: 0 lines too long, 0 without words, {empty} with an empty"
    assert counted in capsys.readouterr().out
    assert len(read_lines(folder / "same" / "back_de.de-en.en")) == 60 - empty
    command([*words, str(other)])
    assert "is complete" in capsys.readouterr().out
    (folder / "foreign").mkdir()
    text = shutil.copy(folder / "test.en", folder / "foreign" / "back_de.de-en.en")
    for pairs_of in (folder / "test.en", text):
        own = ["--source", str(pairs_of), "--pairs", str(folder / "foreign"), "--model", str(other)]
        with pytest.raises(SystemExit):
            command(["translate", "--from", "en", "--to", "de", "--beam", "1", *own])
        assert "back_de.de-en.en exists already, and this command did not write it" in capsys.readouterr().err
    assert text.read_bytes() == (folder / "test.en").read_bytes() and len(list(text.parent.iterdir())) == 1
    weights = load_file(here / "model" / "model.safetensors")
    save_file(weights | {"masked_head.bias": weights["masked_head.bias"] + 1}, here / "model" / "model.safetensors")
    with pytest.raises(SystemExit):
        command([*words, str(here)])
    assert "same has pairs of other text, another model or other settings" in capsys.readouterr().err


def test_pairs_of_another_stream_fail(run: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe has been read when its text is recorded: other text from a second one does not count as complete."""

    def piped(text: str) -> None:
        reading, writing = os.pipe()
        os.write(writing, text.encode())
        os.close(writing)
        words = f"translate --model {run} --source /dev/fd/{reading} --from en --to de --beam 1".split()
        try:
            command([*words, "--pairs", str(folder / "piped")])
        finally:
            os.close(reading)

    first, second = (folder / "test.en").read_text().splitlines()[:2]
    piped(first + "\n")
    with pytest.raises(SystemExit):
        piped(second + "\n")
    assert "piped has pairs of other text" in capsys.readouterr().err


@pytest.mark.parametrize("to", ["--out", "--pairs"])
def test_the_search_is_the_one_asked_for(to: str, run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from xlme_ds.translate import pairs, translator

    seen: list[tuple[object, ...]] = []
    for module in (translator, pairs):

        def watched(*given: object, of: object = module.translate_lines) -> object:
            seen.append(given[2:])
            return of(*given)  # type: ignore[operator]

        monkeypatch.setattr(module, "translate_lines", watched)
    words = f"translate --model {run} --source {folder}/test.de --from de --to en --beam 3 --length-penalty 0.5"
    command([*words.split(), to, str(folder / f"asked{to}")])
    assert seen == [((0, 1), 3, 0.5)]


def test_the_last_row_of_every_folder_is_looked_at(
    run: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of pairs and of sentences; rows are read three at a time. Rows that are no sentences are named."""
    from xlme_ds.translate import translator

    monkeypatch.setattr(translator, "_ROWS_PER_READ", 3)
    vocabulary = load_run(run).vocabulary
    lines = [german(one) for one in sentences(60, 8)]
    (folder / "last" / "mono").mkdir(parents=True)
    for code, said in (("de", german), ("en", english)):
        text = "\n".join(map(said, sentences(60, 8)))
        (folder / "last" / "mono" / f"{code}.txt").write_text(text)
        (folder / "last" / f"toy.de-en.{code}").write_text(text)
    out, given = folder / "encoded-last", f"--vocab {folder}/vocab --processes 1"
    encode = f"encode --mono {folder}/last/mono --para {folder}/last --out {out} --sentences {given}"
    assert not data_prep(encode.split())
    mixed = [folder / "last-para", folder / "last-mono"]
    for path, asked in zip(mixed, ("--para-rows 7", "--mono-rows 7 --sentences"), strict=True):
        assert not data_prep(f"mix --encoded {out} --out {path} {given} --layout xlm --row-tokens 48 {asked}".split())
    for path, task in zip(mixed, ("para", "mono"), strict=True):
        tokens = RowStore(path / task).read(np.array([6])).tokens.ravel().tolist()
        last = vocabulary.decode(tokens[1 : tokens.index(EOS, 1)])
        assert last in lines or last in map(english, sentences(60, 8))
        (found,) = seen_lines(mixed, [[vocabulary.encode(last)]], vocabulary)
        (alone,) = seen_lines([path], [[vocabulary.encode(last)] * 2], vocabulary)
        assert (found, alone) == ({0}, {0, 1})  # every one of equal lines
    text, stream = folder / "encoded-stream", folder / "last-stream"
    assert not data_prep(f"encode --mono {folder}/last/mono --para {folder}/last --out {text} {given}".split())
    asked = "--mono-rows 5 --para-rows 7 --layout xlm --row-tokens 48"
    assert not data_prep(f"mix --encoded {text} --out {stream} {given} {asked}".split())
    capsys.readouterr()
    seen_lines([stream], [[vocabulary.encode(lines[0])]], vocabulary)
    said = f"{stream}/mono was mixed without --sentences: lines were not looked for in its 5 rows\n"
    assert capsys.readouterr().err == said
    only = [[vocabulary.encode(line)] for line in lines]
    both = [seen_lines(mixed, [one], vocabulary)[0] for one in only]
    each = [[seen_lines([path], [one], vocabulary)[0] for one in only] for path in mixed]
    assert both == [one | two for one, two in zip(*each, strict=True)]


def test_only_a_line_with_more_tokens_than_are_read_is_cut(run: Path, folder: Path) -> None:
    translator = load_translator(run)
    for more, cut in ((0, []), (1, [1])):
        line = next(line for n in range(80) if len(translator.vocabulary.encode(line := "n" * n)) == 46 + more)
        assert translate_lines(translator, [line, "haus"], (0, 1), 1, 1.0)[1] == cut


def test_what_is_left_out_of_training_is_what_is_counted_as_trained_on(run: Path, folder: Path) -> None:
    """A test set of lines that training text has in other spellings, with letters that the vocabulary lacks, and of
    lines that it has not: `--without` drops the pairs of exactly those lines that `--trained-on` counts."""
    words, vocabulary = sentences(40, 12), load_run(run).vocabulary
    odd = ["\u00a0", "  ", "\u3000", "\u200b", "\t"]
    for code, said in (("de", german), ("en", english)):
        text = [said(one).replace(" ", odd[n % 5]) for n, one in enumerate(words)]
        text += ["haus ᚠ baum", "ᚠ", "wind"] if code == "de" else ["house", "ᚠ ᚠ", "tree ᚠ"]
        (folder / "seen").mkdir(exist_ok=True)
        (folder / "seen" / f"toy.de-en.{code}").write_text("".join(f"{line}\n" for line in text))
    tests = {
        "de": [*map(german, words[:10]), "haus ᛏ baum", "haus baum", "ᛏ", "ᛏ ᛏ", "fluss"],
        "en": [*map(english, words[30:]), "tree ᛏ", "tree", "ᛏ", "ᛏ ᛏ", "river"],
    }
    known = {*range(10), 10, 12, 13}  # of either side, in whichever language it was
    for code, lines in tests.items():
        (folder / f"seen.{code}").write_text("".join(f"{line}\n" for line in lines))
    ids = [[vocabulary.encode(line) for line in tests[code]] for code in ("de", "en")]
    given = f"--vocab {folder}/vocab --processes 1"
    without = f"--without {folder}/seen.de --without {folder}/seen.en"
    for name, more in (("with", ""), ("without", without)):
        encode = f"encode --para {folder}/seen --out {folder}/encoded-{name} {given} {more}"
        mix = f"mix --encoded {folder}/encoded-{name} --out {folder}/mixed-{name} {given} --layout xlm"
        assert not data_prep(encode.split())
        assert not data_prep(f"{mix} --row-tokens 48 --para-rows 64".split())
        found = seen_lines([folder / f"mixed-{name}"], ids, vocabulary)
        assert found == ([known, known] if name == "with" else [set(), set()])
    counts = read_json(folder / "encoded-without" / "para" / "manifest.json", dict)["counts"]["by_language"]["en-de"]
    assert counts["dropped"] == {"held_out_text": 10 + 10 + 3}


def test_lines_that_were_trained_on_are_counted(run: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Three sources and two references, of four lines, are planted among new ones."""
    known, new = sentences(2000, 0), [[9, 9, 9, 9, n] for n in range(8)]
    pairs = [(german(one), english(one)) for one in (*known[:1], *new[:6])]
    pairs[1] = german(known[700]), pairs[1][1]
    pairs[2] = pairs[2][0], english(known[900])
    pairs[3] = german(known[1500]), pairs[3][1]
    pairs[4] = german(known[300]), pairs[4][1]
    for number, code in enumerate(("de", "en")):
        (folder / f"leak.{code}").write_text("".join(f"{pair[number]}\n" for pair in pairs))
    vocabulary, texts, side = load_run(run).vocabulary, set[str](), list[int]()
    for token in RowStore(folder / "data" / "para").read(np.arange(512)).tokens.ravel().tolist():
        if token in (EOS, PAD):
            texts.add(vocabulary.decode(side))
            side = []
        else:
            side.append(token)
    expected = [{n for n, pair in enumerate(pairs) if pair[side] in texts} for side in (0, 1)]
    options = f"--source {folder}/leak.de --reference {folder}/leak.en --from de --to en --out {folder}/leak.out"
    command(["translate", "--model", str(run), *options.split(), "--trained-on", str(folder / "data")])
    both, (source, target) = len(expected[0] | expected[1]), map(len, expected)
    assert 0 < target < source < both
    assert capsys.readouterr().out.splitlines()[-1] == (
        f"{folder}/leak.de: {both} of 7 lines ({both / 7:.1%}) are in {folder}/data, {source} by the source, {target} "
        "by the reference"
    )


MISTAKES: dict[str, tuple[str, str]] = {
    "beam": ("--beam 0", "beam 0 keeps no hypothesis: it must be at least 1"),
    "wide": ("--beam 500", "beam 500 is more than a vocabulary of"),
    "from": ("--from fr", "--from fr is no language of {run}: choose one of de en"),
    "to": ("--to xx", "--to xx is no language of {run}: choose one of de en"),
    "model": ("--model {mlm}", "{mlm} was trained for mlm and has no decoder: name a run of objective.name mt"),
    "export": ("--model {folder}/encoder", "{folder}/encoder is an export without a decoder: name a run of objective"),
    "no source": ("--source {folder}/none", "{folder}/none does not exist: name a text file with a sentence per line"),
    "no model": ("--model {folder}/none", "{folder}/none does not exist: name the folder of a run"),
    "bytes": ("--source {folder}/bytes", "{folder}/bytes is not UTF-8 at byte 3: convert it"),
    "penalty": ("--length-penalty nan", "length_penalty is nan: it must be from -10 to 10, such as 1"),
    "no folder": ("--out {folder}/none/out", "--out {folder}/none/out is in no folder that exists: make {folder}/none"),
    "compressed": ("--out {folder}/wrong.gz", "--out {folder}/wrong.gz would be plain text: leave out .gz"),
    "source folder": ("--source {folder}/data", "{folder}/data is a folder: name a text file with a sentence per line"),
    "itself": ("--out {folder}/test.de", "--out {folder}/test.de is the source: name another file"),
    "over": (
        "--out {folder}/last.en --reference {folder}/last.en",
        "--out {folder}/last.en is the reference: name another",
    ),
    "a link": ("--out {folder}/link", "--out {folder}/link is no regular file: name another"),
    "a folder": ("--out {folder}/data", "--out {folder}/data is a folder: name a file in it"),
    "no text": ("--source {folder}/blank", "{folder}/blank has no text: name another --source"),
    "no lines": ("--source {folder}/empty", "{folder}/empty has no text: name another --source"),
    "high": ("--length-penalty 1000", "length_penalty is 1000.0: it must be from -10 to 10, such as 1"),
    "low": ("--length-penalty -1000", "length_penalty is -1000.0: it must be from -10 to 10, such as 1"),
    "damaged": ("--source {folder}/damaged.gz", "{folder}/damaged.gz is damaged (Error -3"),
    "two outputs": ("--pairs {folder}/pairs", "--out names a file to write and --pairs a folder: give one of them"),
    "no rows": ("--trained-on {folder}/none", "{folder}/none has neither pairs nor rows that were mixed with --sent"),
    "reference": ("--reference {folder}/short", "{folder}/short has 1 lines, {folder}/test.de 60"),
}


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("--to de", "--from de and --to de are one language, and --pairs needs two: change one"),
        (
            "--to en --reference {folder}/test.en",
            "--pairs is for text without a translation: leave out --reference and --trained",
        ),
        (
            "--to en --trained-on {folder}/data",
            "--pairs is for text without a translation: leave out --reference and --trained",
        ),
    ],
)
def test_what_pairs_are_not_for(
    more: str, said: str, run: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"translate --model {run} --source {folder}/test.de --from de --pairs {folder}/refused "
    with pytest.raises(SystemExit):
        command((words + more.format(folder=folder)).split())
    assert said in capsys.readouterr().err and not (folder / "refused").exists()


def test_the_widest_beam(run: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of half the tokens that a translation may have."""
    (folder / "one.de").write_text((folder / "test.de").read_text().splitlines()[0])
    words = f"translate --model {run} --source {folder}/one.de --from de --to en --out {folder}/one.en --beam"
    most = (Vocabulary(run / "model").size - 5) // 2
    command([*words.split(), str(most)])
    assert len((folder / "one.en").read_text().splitlines()) == 1
    with pytest.raises(SystemExit):
        command([*words.split(), str(most + 1)])
    assert f"has room for: it can be at most {most}" in capsys.readouterr().err


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence_and_nothing_is_written(
    mistake: str, run: Path, without_decoder: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bytes").write_bytes(b"abc\xff")
    (folder / "link").unlink(missing_ok=True)
    (folder / "link").symlink_to("/dev/null")
    for name, text in (("short", "one\n"), ("last.en", "one\n"), ("blank", "\n \n"), ("empty", "")):
        (folder / name).write_text(text)
    packed = bytearray(gzip.compress(b"haus " * 50))
    packed[12:20] = b"\xff" * 8
    (folder / "damaged.gz").write_bytes(packed)
    if mistake == "export":
        xlme.export.run(run, folder / "encoder", which="encoder")
    words, sentence = (each.format(run=run, mlm=without_decoder, folder=folder) for each in MISTAKES[mistake])
    usual = {"model": run, "source": folder / "test.de", "from": "de", "to": "en", "out": folder / "wrong"}
    given = {f"--{name}": str(value) for name, value in usual.items()} | dict(
        zip(words.split()[::2], words.split()[1::2], strict=True)
    )
    with pytest.raises(SystemExit) as left:
        command(["translate", *(word for pair in given.items() for word in pair)])
    said = capsys.readouterr().err
    assert left.value.code == 2 and said.count("\n") == 1 and sentence in said
    assert not list(folder.glob("*wrong*")) and (folder / "last.en").read_text() == "one\n"


@pytest.mark.parametrize(("ending", "module"), [("xz", lzma), ("bz2", bz2), ("gz", gzip)])
def test_a_damaged_later_stream_is_no_end(ending: str, module: Any, tmp_path: Path) -> None:
    path, parts = tmp_path / f"text.{ending}", [module.compress(text) for text in (b"one\ntwo\n", b"three\n")]
    for after in (b"", bytes(8)):  # a stream may be padded
        path.write_bytes(b"".join(parts) + after)
        assert read_lines(path) == ["one", "two", "three"]
    for later in (b"\xff" + parts[1][1:], parts[1][:20] + b"\xff" * 4 + parts[1][24:], parts[1][:-3]):
        path.write_bytes(parts[0] + later)
        with pytest.raises(ValueError, match=rf"text\.{ending} is damaged"):
            read_lines(path)


def test_bleu_has_the_tokenizer_of_the_language() -> None:
    """Chinese without spaces: three of four characters are right, and no whole clause."""
    bleu, _ = bleu_and_chrf(["他喜欢看新书和电影"], ["他喜欢看旧书和电影"], "zh-Hans")
    assert "|tok:zh|" in bleu and float(bleu.split(" = ")[1].split()[0]) > 20
    assert "|tok:13a|" in bleu_and_chrf(["a"], ["a"], "de")[0]
    if find_spec("MeCab") is None:
        with pytest.raises(ValueError, match=r"--reference in ja needs a tokenizer: pip install 'sacrebleu\[ja\]'"):
            bleu_and_chrf(["a"], ["a"], "ja")


def test_weights_that_are_no_numbers_translate_nothing(run: Path, folder: Path) -> None:
    diverged = shutil.copytree(run, folder / "diverged")
    state = load_file(diverged / "model/model.safetensors")
    save_file(
        state | {"masked_head.bias": state["masked_head.bias"] * float("nan")}, diverged / "model/model.safetensors"
    )
    with pytest.raises(ValueError, match=r"masked_head\.bias is not finite, because the training diverged"):
        load_translator(diverged)


def test_a_line_ends_at_a_line_feed_alone(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes("one\rtwo\u2028three\nfour\r\n".encode())
    assert read_lines(tmp_path / "x") == ["one\rtwo\u2028three", "four"]
    (tmp_path / "x").write_bytes(b"one\rtwo")
    with pytest.raises(ValueError, match="x ends its lines by carriage returns alone: end them by line feeds"):
        read_lines(tmp_path / "x")
