"""The comparisons of translation, in small: test sets that are in no training text, a score at every point, and the
same training by Hugging Face."""

import json
import lzma
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.peers.translation import Peer, race, translated
from bench.translation import main
from tests.translate.test_command import english, german, sentences
from xlme_ds.config import RunConfig, from_json
from xlme_ds.data.vocabulary import Vocabulary
from xlme_ds.engine.build import build_engine, open_data
from xlme_ds.first_weights import starting_weights
from xlme_ds.trained import read_config

SIZES = "--test 20 --vocabulary 46 --width 32 --layers 1 --pretrain-steps 10 --steps 4 --every 2 --starts both"


def write_corpus(corpus: Path, language: str, texts: dict[str, list[str]]) -> None:
    for task in ("mono", "para"):
        (corpus / task).mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(corpus / "para" / f"en-{language}.txt.zip", "w") as file:
        for code, lines in texts.items():
            file.writestr(f"SoftwareText.en-{language}.{code}", "".join(f"{line}\n" for line in lines))
            with lzma.open(corpus / "mono" / f"{code}.txt.xz", "wt") as text:
                text.write("\n".join(lines))


def test_the_comparisons(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus, out = tmp_path / "corpus", tmp_path / "out"
    words = sentences(300, 0)
    texts = {"de": [german(one) for one in words], "en": [english(one) for one in words]}
    write_corpus(corpus, "de", texts)
    main(["--corpus", str(corpus), "--out", str(out), *SIZES.split()])
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert [(each["start"], each["step"]) for each in found] == [("copy", 0), ("both", 2), ("both", 4)]
    assert all(len(each["de-en"]) == len(each["en-de"]) == 2 for each in found)
    test = [(out / "text" / f"test.{code}").read_text().splitlines() for code in ("de", "en")]
    pairs = list(zip(*texts.values(), strict=True))
    assert len(test[0]) == 20 and all(pair in pairs for pair in zip(*test, strict=True))
    held = set().union(*test)
    for path in [*(out / "text" / "mono").iterdir(), *(out / "text" / "para").iterdir()]:
        assert not held & set(path.read_text().splitlines()) and path.stat().st_size
    trains_as_hugging_face(out)


def trains_as_hugging_face(out: Path) -> None:
    """BERT's layers of transformers, with its own loss and torch's AdamW, have our losses and our weights."""
    run = from_json(RunConfig, read_config(out / "both")["config"])
    run = replace(run, model=replace(run.model, dropout=0.0, attention_dropout=0.0))
    vocabulary = Vocabulary(out / "mixed" / "vocab")
    engine = build_engine(run, open_data(run, out / "mixed"), None, starting_weights(run, vocabulary))
    peer = Peer(run, engine.full_state())
    found = race(engine, peer, run, 6, 6)
    assert len(found["losses"]) == 6 and found["losses"][-1][0] < found["losses"][0][0] - 0.1
    for ours, theirs in found["losses"]:
        assert ours == pytest.approx(theirs, rel=1e-5)
    state = peer.state()
    for name, value in engine.full_state().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=2e-5, msg=name)
    assert translated(run, state, vocabulary, out / "text").keys() == {"de-en", "en-de"}


def test_halves_have_no_translations_of_each_other(tmp_path: Path) -> None:
    """Of every sentence of one language, the other has its translation in the test set or nowhere. Trained on, they
    begin with denoising alone."""
    words, corpus = [tuple(one) for one in sentences(400, 1)], tmp_path / "corpus"
    of = {"de": german, "gl": lambda words: english(words).upper()}
    for code, said in of.items():
        texts = {"en": [english(list(one)) for one in words], code: [said(list(one)) for one in words]}
        write_corpus(corpus, code, texts)
    options = "--languages de gl --unsupervised --relative-bias gated --back-translation 0:0 2:0 3:1"
    main(["--corpus", str(corpus), "--out", str(tmp_path), *SIZES.split(), *options.split()])
    run = from_json(RunConfig, read_config(tmp_path / "both")["config"])
    assert run.objective.back_translation == ("0:0", "2:0", "3:1") and run.model.relative_bias == "gated"
    assert json.loads((tmp_path / "both" / "metrics.jsonl").read_text().splitlines()[-1]).keys() >= {"ae", "bt"}
    text = tmp_path / "text"
    test = [(text / f"test.{code}").read_text().splitlines() for code in of]
    assert len(test[0]) == 20
    assert set(zip(*test, strict=True)) <= {tuple(said(list(one)) for said in of.values()) for one in words}
    for task in ("mono", "sentences"):
        one, two = (set((text / task / f"{code}.txt").read_text().splitlines()) - {""} for code in of)
        assert len(one) > 100 and len(two) > 100 and not one & set(test[0]) and not two & set(test[1])
        assert not {of["gl"](list(each)) for each in words if german(list(each)) in one} & two
