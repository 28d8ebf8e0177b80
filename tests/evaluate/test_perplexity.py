"""Perplexity by language against a softmax written out row by row; runs, exports, unigram model, masks."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.evaluate.folders import write_run
from tests.rows import write_data
from tests.small import batch_of
from xlme_ds.config import ObjectiveConfig
from xlme_ds.data.batch import Batch
from xlme_ds.data.masking import draw_masks
from xlme_ds.data.schema import UNK, Rows, read_manifest, write_manifest
from xlme_ds.data.shards import RowStore
from xlme_ds.data.vocabulary import MODEL_FILE, Vocabulary
from xlme_ds.evaluate import heldout_text
from xlme_ds.evaluate.__main__ import main
from xlme_ds.evaluate.compared_models import load_predictors, trained_on_entry
from xlme_ds.evaluate.heldout_text import losses, perplexities, perplexity, perplexity_tables, rows_by_language
from xlme_ds.export.export_run import export_run
from xlme_ds.models.init import initialise
from xlme_ds.models.text_encoder import take_encoder
from xlme_ds.objectives import objective_of
from xlme_ds.trained.runs import MODEL_FOLDER, load_run

ROWS = 60
OBJECTIVES = ("electra", "mlm", "ernie_m")
VOCABULARY = Path(MODEL_FOLDER, MODEL_FILE)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three runs, their vocabulary's training data and held-out data."""
    root = tmp_path_factory.mktemp("perplexity")
    for objective in OBJECTIVES:  # the file of a vocabulary names its own place, so each run would have one of its own
        write_run(
            root / objective, objective=objective, like=None if objective == OBJECTIVES[0] else root / OBJECTIVES[0]
        )
    vocabulary = Vocabulary(root / OBJECTIVES[0] / VOCABULARY)
    for seed, name in enumerate(("train", "heldout")):
        write_data(root / name, ROWS, vocabulary=vocabulary.size, sha256=vocabulary.sha256, seed=seed)
    return root


def test_a_unigram_model_of_the_text_itself_is_refused(root: Path) -> None:
    with pytest.raises(ValueError, match="have the same text: name the training data for the unigram model"):
        perplexity(root / "mlm", root / "heldout", unigram=root / "heldout")


def test_pairs_do_not_count_for_an_objective_without_a_loss_on_them(root: Path, tmp_path: Path) -> None:
    """BTMLM trains on pseudo translations of text alone."""
    run = write_run(tmp_path / "btmlm", objective="btmlm", like=root / OBJECTIVES[0])
    shutil.copytree(root / "heldout" / "mono", tmp_path / "text" / "mono")
    both, text = (losses(run, data)["models"][0] for data in (root / "heldout", tmp_path / "text"))
    assert (both["overall"], both["languages"]) == (text["overall"], text["languages"])


def answer(capsys: pytest.CaptureFixture[str], root: Path, *arguments: str) -> dict[str, Any]:
    main(["perplexity", "--data", str(root / "heldout"), "--json", *arguments])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def rows_of(root: Path, count: int = ROWS) -> list[tuple[str, np.ndarray]]:
    """(language, ids without padding) of every held-out row."""
    store = RowStore(root / "heldout/mono")
    rows = [store.read(np.array([record])) for record in range(count)]
    return [(store.manifest.languages[int(row.languages[0])], row.tokens[0][: row.lengths[0]]) for row in rows]


def written_out(folder: Path, which: str, root: Path, passes: int) -> dict[str, list[float]]:
    """−log p of every masked token, by language: each row alone, in float64, with all of the softmax."""
    run = load_run(folder)
    encoder, head = take_encoder(run.state, run.model, which).double(), run.state  # type: ignore[arg-type]
    head = {name.removeprefix("masked_head."): value.double() for name, value in head.items() if "masked_head" in name}
    costs: dict[str, list[float]] = {}
    for number in range(passes):
        for record, (language, ids) in enumerate(rows_of(root)):
            row = Rows(ids[None], np.array([1]), np.array([len(ids)]), np.array([0]))
            where, _ = draw_masks([(0, row, np.array([record + number * ROWS]))], 7, 0.15)
            read = torch.from_numpy(ids.astype(np.int64))[None]
            targets = read[0, where].clone()
            read[0, where] = run.vocabulary.mask_id
            with torch.no_grad():
                hidden = encoder(read, torch.arange(len(ids))[None], torch.ones_like(read))[0, where]
                features = F.gelu(hidden @ head["dense.weight"].T + head["dense.bias"])
                features = F.layer_norm(features, features.shape[1:], head["norm.weight"], head["norm.bias"], 1e-5)
                logits = features @ encoder.embedding_blocks[0].T + head["bias"]
            costs.setdefault(language, []).extend(F.cross_entropy(logits, targets, reduction="none").tolist())
    return costs


@pytest.mark.parametrize(("objective", "which"), zip(OBJECTIVES, ("generator", "encoder", "encoder"), strict=True))
def test_it_is_the_softmax_written_out(
    objective: str, which: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, root, "--model", str(root / objective), "--seed", "7", "--passes", "2")
    (model,) = found["models"]
    expected = written_out(root / objective, which, root, passes=2)
    assert model["term"] == "mlm" and list(model["languages"]) == sorted(expected) == ["de", "en", "fr"]
    for language, costs in expected.items():
        value = model["languages"][language]
        assert value["predicted"] == len(costs)
        assert value["nll"] == pytest.approx(np.mean(costs), rel=1e-5)
        assert value["perplexity"] == pytest.approx(math.exp(value["nll"]))
    # The command `losses` reads the rows once; each pass masks as many tokens of a row.
    once = {language: costs[: len(costs) // 2] for language, costs in expected.items()}
    (scores,) = losses(root / objective, root / "heldout", rows=ROWS, seed=7)["models"]
    assert scores["languages"]["mlm"] == pytest.approx({code: np.mean(costs) for code, costs in once.items()}, rel=1e-5)
    assert scores["overall"]["mlm"] == pytest.approx(np.mean(np.concatenate(list(once.values()))), rel=1e-5)
    mean = np.mean([value["nll"] for value in model["languages"].values()])
    assert model["overall"]["perplexity"] == pytest.approx(math.exp(mean))


def test_a_causal_model_predicts_every_token(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """From the tokens before it, whatever comes behind; and in the language that the model calls so, not the data."""
    codes = ("fr", "xx", "de", "en")
    run = write_run(tmp_path / "clm", objective="clm", like=root / "mlm", language_embeddings=codes)
    (model,) = answer(capsys, root, "--model", str(run))["models"]
    saved = load_run(run)
    whole = objective_of(saved.objective).build(saved.model).double()
    saved.load_into(whole)
    assert model["term"] == "clm"
    costs: dict[str, list[float]] = {}
    for language, ids in rows_of(root):
        for end in range(1, len(ids) - 1):
            tokens = torch.from_numpy(ids[: end + 1].astype(np.int64))[None]
            places, ones = torch.arange(end + 1)[None], torch.ones_like(tokens)
            batch = Batch(
                tokens, places, ones, 0 * ones, codes.index(language) * ones, torch.zeros(1, dtype=torch.int64),
                torch.zeros(1, dtype=torch.int64), torch.tensor([end]), torch.zeros(1),
            )  # fmt: skip
            with torch.no_grad():
                costs.setdefault(language, []).append(float(whole(batch).nll_M))
    for language, values in costs.items():
        assert model["languages"][language]["predicted"] == len(values)
        assert model["languages"][language]["nll"] == pytest.approx(np.mean(values), rel=1e-5)


@pytest.mark.parametrize("limit", [None, 4])
def test_bits_per_character_count_the_characters_of_the_text(
    root: Path, capsys: pytest.CaptureFixture[str], limit: int | None
) -> None:
    of_limit = [] if limit is None else ["--limit", str(limit)]
    found = answer(capsys, root, "--model", str(root / "mlm"), "--unigram", str(root / "train"), *of_limit)
    vocabulary = Vocabulary(root / "mlm/model")
    for model in found["models"]:
        of_languages = [value["bits_per_character"] for value in model["languages"].values()]
        assert model["overall"]["bits_per_character"] == pytest.approx(np.mean(of_languages))
    for language, value in found["models"][0]["languages"].items():
        rows = [ids[1:-1] for code, ids in rows_of(root) if code == language][:limit]
        assert found["models"][1]["languages"][language]["predicted"] == sum(map(len, rows))
        assert found["rows"][language] == len(rows)
        letters = sum(len("".join(map(vocabulary.piece, row))) for row in rows)
        bits = value["nll"] * sum(map(len, rows)) / math.log(2)
        assert value["bits_per_character"] == pytest.approx(bits / letters)


def test_bits_per_character_of_a_causal_model_pay_for_the_ends_of_documents(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The bits of all tokens that it predicts, over the characters of the text."""
    run = write_run(tmp_path / "clm", objective="clm", like=root / "mlm")
    vocabulary = Vocabulary(run / "model")
    write_data(tmp_path / "heldout", 20, vocabulary=vocabulary.size, sha256=vocabulary.sha256, documents=True)
    (model,) = answer(capsys, tmp_path, "--model", str(run), "--passes", "2")["models"]
    predicted: dict[str, int] = dict.fromkeys(("de", "en", "fr"), 0)
    letters = dict(predicted)
    for language, ids in rows_of(tmp_path, 20):
        predicted[language] += len(ids) - 2
        letters[language] += len("".join(vocabulary.piece(token) for token in ids if token > UNK))
    for language, value in model["languages"].items():
        assert value["predicted"] == 2 * predicted[language]
        bits = value["nll"] * predicted[language] / math.log(2)
        assert value["bits_per_character"] == pytest.approx(bits / letters[language])


def test_a_model_that_diverged_has_an_infinite_perplexity() -> None:
    scores = perplexities({"de": (1e6, 3), "en": (700.0, 3)}, {"de": 1.0, "en": 1.0})
    assert [scores["languages"][code]["perplexity"] for code in ("de", "en")] == [math.inf, math.exp(700)]
    table, _ = perplexity_tables({"models": [scores | {"model": "m", "term": "mlm"}], "rows": {"de": 1, "en": 1}})
    assert [row[2] for row in table.rows] == ["inf", f"{math.exp(700):,.1f}", "inf"]


def test_an_export_gives_what_its_run_gives(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for objective in ("electra", "mlm"):
        export_run(root / objective, tmp_path / f"{objective} export")
        models = [str(root / objective), str(tmp_path / f"{objective} export")]
        run, export = answer(capsys, root, "--model", models[0], "--model", models[1])["models"]
        assert run["overall"] == pytest.approx(export["overall"], rel=1e-5)


def test_the_untrained_model_is_the_runs_own_start(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, start = answer(capsys, root, "--model", str(root / "mlm"), "--random", "--limit", "4")["models"]
    assert start["model"] == "untrained, seed 1"
    size = Vocabulary(root / "mlm/model").size
    assert 0.9 * size < start["overall"]["perplexity"] < 1.1 * size  # nearly uniform


def test_untrained_weights_are_drawn_from_the_runs_seed(root: Path) -> None:
    _, _, start, _ = load_predictors([root / "mlm", root / "electra"], with_untrained=True)
    expected = objective_of(ObjectiveConfig("mlm")).build(start.cfg)
    initialise(expected, 1, start.cfg.init_std)
    assert all((value.cpu() == expected.state_dict()[name]).all() for name, value in start.model.state_dict().items())


def test_all_models_are_scored_under_masks_alone(root: Path) -> None:
    """Whatever share of the masked tokens they read in training."""
    folder = root / "kept"
    shutil.copytree(root / "electra/model", folder / "model")
    written = json.loads((root / "electra/config.json").read_text())
    written["config"]["objective"]["generator_keep_fraction"] = 0.5
    (folder / "config.json").write_text(json.dumps(written))
    usual, kept = load_predictors([root / "electra", folder], with_untrained=False)
    batch = batch_of([[[0, *range(10, 40), 2]]], [], 32)
    for one, other in zip(usual.model(batch), kept.model(batch), strict=True):
        assert torch.equal(one, other)


def test_a_unigram_model_has_a_column(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, root, "--model", str(root / "mlm"), "--unigram", str(root / "train"))["models"][1]
    tokens = RowStore(root / "train/mono").read(np.arange(ROWS)).tokens
    counts = np.bincount(tokens[tokens > UNK], minlength=Vocabulary(root / "mlm/model").size) + 1
    costs = -np.log(counts / counts.sum())
    for language, value in found["languages"].items():
        ids = np.concatenate([ids[1:-1] for code, ids in rows_of(root) if code == language])
        assert value["nll"] == pytest.approx(costs[ids].mean()) and value["predicted"] == len(ids)


def test_rows_of_a_language_stand_together_in_the_order_of_the_data(root: Path) -> None:
    store, languages = RowStore(root / "heldout/mono"), [language for language, _ in rows_of(root)]
    found: dict[str, list[int]] = {}
    for language, rows, records in rows_by_language(store, limit=11, rows_per_batch=4):
        assert len(records) <= 4 and (rows.tokens == store.read(records).tokens).all()
        found.setdefault(language, []).extend(records.tolist())
    assert found == {code: [n for n, each in enumerate(languages) if each == code][:11] for code in ("de", "en", "fr")}


def test_models_stand_side_by_side_in_tables_and_files(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [part for objective in OBJECTIVES for part in ("--model", str(root / objective))]
    main(["perplexity", *models, "--data", str(root / "heldout"), "--out", str(tmp_path / "out")])
    shown = capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["perplexity.json", "perplexity.md"]
    found = json.loads((tmp_path / "out/perplexity.json").read_text())
    assert [model["model"] for model in found["models"]] == list(OBJECTIVES)
    lines = [line.split() for line in shown.splitlines()]
    values = [f"{model['languages']['de']['perplexity']:,.1f}" for model in found["models"]]
    assert ["de", str(found["rows"]["de"]), *values] in lines
    predicted = [[value["predicted"] for value in model["languages"].values()] for model in found["models"]]
    assert predicted[0] == predicted[1] == predicted[2]  # the same tokens are asked of all


def test_mistakes_end_in_one_sentence(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fault(model: Path, data: Path, *more: str) -> str:
        with pytest.raises(SystemExit) as left:
            main(["perplexity", "--model", str(model), "--data", str(data), *more])
        assert left.value.code == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    run, data = root / "mlm", root / "heldout"
    other = write_data(tmp_path / "other", 8)
    assert " passes 0 leaves nothing to read" in fault(run, data, "--passes", "0")
    assert " limit 0 leaves nothing to read" in fault(run, data, "--limit", "0")
    assert " seed is 18446744073709551616: it must be" in fault(run, data, "--seed", str(2**64))
    with pytest.raises(ValueError, match=r"^seed is -1: it must be at least 0"):
        losses(run, data, seed=-1)
    with pytest.raises(ValueError, match=r"^rows 0 leaves nothing to read: it must be at least 1"):
        losses(run, data, rows=0)
    with pytest.raises(ValueError, match="mono has neither mono/ nor para/: name a data folder"):
        losses(run, data / "mono")
    like_xlm = write_data(tmp_path / "xlm", 8, vocabulary=Vocabulary(run / "model").size, layout="xlm",
                          sha256=Vocabulary(run / "model").sha256)  # fmt: skip
    with pytest.raises(ValueError, match=r"xlm/mono was mixed with --layout xlm, but the model in .* on xlme: mix"):
        losses(run, like_xlm)
    assert f"{data / 'para'} has no mono/" in fault(run, data / "para")
    with pytest.raises(ValueError, match=f"has no mono/: name the folder that `xlme prep mix` wrote, such as {data}$"):
        read_manifest(data.parent / "mono")
    assert "other/mono was encoded with another vocabulary than that of" in fault(run, other)
    assert "other/mono was encoded with another vocabulary than" in fault(run, data, "--unigram", str(other))
    vocabulary = Vocabulary(run / "model")
    for size in (40, 41):  # as long as the model's longest item, and longer
        long = write_data(
            tmp_path / str(size), 8, row_tokens=size, vocabulary=vocabulary.size, sha256=vocabulary.sha256
        )
        if size == 40:
            losses(run, long)
    assert "41/mono has rows of 41 tokens, but the model in" in fault(run, long)
    strange = write_data(tmp_path / "strange", 16, vocabulary=vocabulary.size, sha256=vocabulary.sha256, unknown="fr")
    assert "strange/mono has no token of fr that the vocabulary knows: mix without this language" in fault(run, strange)
    sentences = write_data(tmp_path / "sentences", 8, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    manifest = read_manifest(sentences / "mono")
    write_manifest(sentences / "mono", replace(manifest, settings=manifest.settings | {"sentences": True}))
    assert "sentences/mono was mixed with --sentences, so a row may have several languages" in fault(run, sentences)
    codes = dict(language_embeddings=("de", "en", "fr"), layout="xlm", relative_bias="none", masked_head="linear")
    noisy = write_run(tmp_path / "mt", objective="mt", like=run, **codes)
    settings = json.loads((noisy / "config.json").read_text())
    settings["config"]["objective"]["denoising"] = ["0:1"]
    (noisy / "config.json").write_text(json.dumps(settings))
    assert "mt predicts no tokens of monolingual text: use `evaluate losses`" in fault(noisy, data)
    export_run(run, tmp_path / "cut", layer=1)
    headless = "cut has no masked_head.*, so it predicts no tokens: name the run that it was exported from"
    assert headless in fault(tmp_path / "cut", data)
    settings = json.loads((run / "config.json").read_text())
    settings["config"]["task"] = "ner"
    tuned = tmp_path / "tuned"
    tuned.mkdir()
    (tuned / "config.json").write_text(json.dumps(settings))
    (tuned / "model").symlink_to(run / "model")
    assert "tuned was fine-tuned and predicts no tokens" in fault(tuned, data)


@pytest.mark.parametrize(
    ("data", "split", "said"),
    [
        ({}, {}, False),
        ({"fingerprints": {"mono": "another"}, "encoded": ["another"]}, {"split": "heldout"}, False),
        ({"fingerprints": {"para": "its own"}}, {}, True),
        ({"phases": {"mono from step 9": "its own"}}, {}, True),
        ({"encoded": ["another", "its text"]}, {}, True),
        ({}, {"split": "train"}, True),
    ],
)
def test_text_that_a_run_was_trained_on_is_marked(
    root: Path, tmp_path: Path, data: dict[str, Any], split: dict[str, str], said: bool
) -> None:
    """By the fingerprints of its data, of any phase or of the encoded text, or where the text is for training."""
    folder = shutil.copytree(root / "heldout/mono", tmp_path / "mono")
    manifest = read_manifest(folder)
    write_manifest(folder, replace(manifest, settings=manifest.settings | {"encoded": "its text"} | split))
    own = read_manifest(folder).fingerprint()
    config = json.loads((root / "mlm/config.json").read_text())
    config["data"] |= json.loads(json.dumps(data).replace("its own", own))
    (tmp_path / "config.json").write_text(json.dumps(config))
    (trained, start) = load_predictors([root / "mlm"], with_untrained=True)
    assert trained_on_entry(replace(trained, folder=tmp_path), RowStore(folder)) == (
        {"trained_on": True} if said else {}
    )
    assert not trained_on_entry(replace(start, folder=tmp_path), RowStore(folder))


def test_losses_are_of_the_rows_that_were_asked_for(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever number is read at once, also more than are left."""
    found = []
    for at_once in (1, 7, 16, 100):
        monkeypatch.setattr(heldout_text, "_ROWS_PER_BATCH", at_once)
        (scores,) = losses(root / "mlm", root / "heldout", rows=20)["models"]
        found.append(scores["overall"] | scores["languages"]["mlm"])
    assert all(one == pytest.approx(found[0], rel=1e-5) for one in found)


@pytest.mark.parametrize("objective", OBJECTIVES[:2])
def test_a_run_that_masked_another_share_is_scored_under_the_same_masks(
    root: Path, tmp_path: Path, objective: str
) -> None:
    """The weights of a run again, in a folder that says that 40% were masked."""
    other = tmp_path / "other"
    shutil.copytree(root / objective, other)
    config = json.loads((other / "config.json").read_text())
    config["config"]["objective"]["mask_fraction"] = 0.4
    (other / "config.json").write_text(json.dumps(config))
    for measure in (losses, perplexity):
        models = measure([root / objective, other], root / "heldout")["models"]
        one, two = ({key: scores[key] for key in scores if key not in ("model", "folder")} for scores in models)
        assert one == two and one["languages"], measure
