"""The command: a finished run becomes a folder that transformers and sentence-transformers load, whole or not at
all."""

import hashlib
import json
import re
import shlex
import shutil
import subprocess
import sys
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentencepiece import sentencepiece_model_pb2
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    XLMRobertaConfig,
    XLMRobertaModel,
)

import xlme_ds as xlme
from tests.evaluate.folders import write_run
from tests.launch import ROOT, environment
from tests.small import MODERN
from xlme_ds.checkpoint import __main__ as checkpoint
from xlme_ds.checkpoint.state_files import MARKER_FILE, STATE_JSON
from xlme_ds.config import ModelConfig
from xlme_ds.data.vocabulary import Vocabulary
from xlme_ds.evaluate.compared_models import load_encoders
from xlme_ds.evaluate.vectors import sentence_vectors
from xlme_ds.export.__main__ import main
from xlme_ds.export.card import escape
from xlme_ds.export.export_run import truncate_encoder
from xlme_ds.finetune.downstream_tasks import DOWNSTREAM_TASKS
from xlme_ds.first_weights import _all_parameters
from xlme_ds.io.folders import lock_folder
from xlme_ds.models.electra import Electra
from xlme_ds.models.init import initialise
from xlme_ds.models.text_encoder import TextEncoder, positions_and_segments
from xlme_ds.report.__main__ import main as report
from xlme_ds.trained.config_json import read_run_config
from xlme_ds.trained.encoders import load_encoder
from xlme_ds.trained.runs import load_run
from xlme_ds.trained.weights import read_weights, save_weights

SENTENCES = ["kalo mi ter un", "dorin", "ve sa pe  kalo inun mi", ""]
TOKENS = torch.tensor([[0, 11, 12, 13, 17, 19, 2], [0, 21, 2, 1, 1, 1, 1]])


@pytest.fixture(scope="module")
def exported(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    to = tmp_path_factory.mktemp("export") / "deep" / "folder"
    main(["--run", str(run), "--out", str(to)])
    return to


def test_run_and_export_hold_the_same_encoders(run: Path, exported: Path) -> None:
    for which in ("discriminator", "generator"):
        ours, theirs = (load_encoder(folder, which) for folder in (run, exported))  # type: ignore[arg-type]
        assert ours.vocabulary.sha256 == theirs.vocabulary.sha256
        wanted = ours.encoder.state_dict()
        assert wanted.keys() == theirs.encoder.state_dict().keys()
        assert all(torch.equal(value, wanted[name]) for name, value in theirs.encoder.state_dict().items())
    assert {"embedding_0", "difference_0"} <= load_run(
        run
    ).state.keys()  # gdes: what the discriminator reads is their sum


def test_a_flipped_bit_in_weights_is_found(
    run: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Anywhere in the tensors of a run or an export, by what reads them and by the check."""
    config, vocabulary = read_run_config(run), load_run(run).vocabulary
    for folder, reads in ((run, load_run), (exported, lambda each: _all_parameters(each, config, vocabulary))):
        checkpoint.main(["check", "--run", str(folder)])
        assert "model.safetensors  " in capsys.readouterr().out
        for weights in sorted(path.relative_to(folder) for path in folder.rglob("*.safetensors")):
            if "checkpoints" in weights.parts:
                continue
            damaged = tmp_path / "-".join((folder.name, *weights.parts))
            shutil.copytree(folder, damaged)
            content = bytearray((damaged / weights).read_bytes())
            first = 8 + int.from_bytes(content[:8], "little")
            for place in (first, (first + len(content)) // 2, len(content) - 1):
                content[place] ^= 4
                (damaged / weights).write_bytes(content)
                with pytest.raises(ValueError, match=rf"{weights.name} has changed since it was written \(checksum\)"):
                    reads(damaged)
                with pytest.raises(SystemExit):
                    checkpoint.main(["check", "--run", str(damaged)])
                assert f"{weights}  not usable: " in capsys.readouterr().out
                content[place] ^= 4
            (damaged / weights).write_bytes(content)
            reads(damaged)


def test_a_changed_file_next_to_the_weights_of_an_export_is_found(
    exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By what reads it: the settings and the vocabulary; by the check: every file that another library reads."""
    for name in ("config.json", "sentencepiece.bpe.model", "tokenizer.json", "modeling_xlme.py"):
        folder = tmp_path / name
        shutil.copytree(exported, folder)
        content = (folder / name).read_bytes()
        changes = [content[: len(content) // 2], content + b" "]
        if name == "config.json":  # without any effect on the shapes
            settings = json.loads(content)
            changes = [json.dumps(settings | {key: value}).encode() for key, value in (
                ("num_attention_heads", 2), ("layer_norm_eps", 0.1), ("relative_max_distance", 9), ("norm", "pre"),
            )]  # fmt: skip
        for changed in changes:
            (folder / name).write_bytes(changed)
            with pytest.raises(SystemExit):
                checkpoint.main(["check", "--run", str(folder)])
            assert f"{folder}/{name} " in capsys.readouterr().out
            if name in ("config.json", "sentencepiece.bpe.model"):
                with pytest.raises(ValueError, match=rf"{folder}/{name} "):
                    load_encoder(folder)
        (folder / name).write_bytes(content)
        checkpoint.main(["check", "--run", str(folder)])
    config = tmp_path / "config.json" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"problem_type": "regression"}))
    load_encoder(config.parent)


def test_changed_settings_of_a_finished_run_are_found(run: Path, tmp_path: Path) -> None:
    """Those that change what the model computes, and no others."""
    shutil.copytree(run, tmp_path / "run")
    config = tmp_path / "run" / "config.json"
    content = json.loads(config.read_text())
    for name, value, changes in (("heads", 8, True), ("norm_epsilon", 0.1, True), ("head_chunk", 7, False)):
        settings = content["config"] | {"model": content["config"]["model"] | {name: value}}
        config.write_text(json.dumps(content | {"config": settings}))
        if changes:
            with pytest.raises(
                ValueError, match=rf"config\.json has {name} {value}, and model\.safetensors was written"
            ):
                load_run(tmp_path / "run")
        else:
            load_run(tmp_path / "run")


def test_the_head_of_a_causal_model_is_no_masked_one(tmp_path: Path) -> None:
    run = write_run(tmp_path / "clm", objective="clm")
    main(["--run", str(run), "--out", str(tmp_path / "exported")])
    assert json.loads((tmp_path / "exported/config.json").read_text())["architectures"] == ["XLMEModel"]
    assert not [name for name in load_file(tmp_path / "exported/model.safetensors") if "head" in name]
    with pytest.raises(ValueError, match="was not trained with masked language modelling"):
        xlme.load(run).fill("kalo <mask>")


def test_an_export_knows_which_encoder_it_has(run: Path, exported: Path, tmp_path: Path) -> None:
    """`--which` refuses another as the run does, and `--random` has the depth of the encoder."""
    mlm, alone = tmp_path / "mlm", tmp_path / "alone"
    main(["--run", str(write_run(tmp_path / "run", objective="mlm")), "--out", str(mlm)])
    main(["--run", str(run), "--out", str(alone), "--which", "generator"])
    for folder, there, not_there in ((mlm, "encoder", "discriminator"), (alone, "generator", "discriminator")):
        trained, untrained = load_encoders(folder, None, True, there)
        assert trained.encoder.state_dict().keys() == untrained.encoder.state_dict().keys()
        with pytest.raises(ValueError, match=f"{folder.name} has no {not_there}: set --which or start.take to {there}"):
            load_encoder(folder, not_there)
    for which in ("discriminator", "generator"):
        trained, untrained = load_encoders(exported, None, True, which)
        assert trained.encoder.state_dict().keys() == untrained.encoder.state_dict().keys()
    settings = json.loads((mlm / "config.json").read_text())
    del settings["which"]  # as after fine-tuning
    (mlm / "config.json").write_text(json.dumps(settings))
    assert load_encoder(mlm, "encoder").encoder.cfg.discriminator_layers == 2


def test_the_card_of_a_generator_has_no_figures_of_the_discriminator(run: Path, tmp_path: Path) -> None:
    main(["--run", str(run), "--out", str(tmp_path / "whole")])
    main(["--run", str(run), "--out", str(tmp_path / "alone"), "--which", "generator"])
    whole, alone = ((tmp_path / name / "README.md").read_text() for name in ("whole", "alone"))
    assert "## Sentence retrieval" in whole and "alone." not in whole
    assert "This is the generator alone." in alone and "## Sentence retrieval" not in alone
    assert "kept out of training, the whole run after step" in alone


def test_heads_are_the_runs(run: Path, exported: Path) -> None:
    state, cfg, *_ = load_run(run)[1:]
    whole = Electra(cfg)
    whole.load_state_dict(state)
    hidden = whole.discriminator(whole.embed_for_discriminator(TOKENS), *positions_and_segments(TOKENS))
    found = AutoModelForPreTraining.from_pretrained(exported, trust_remote_code=True)(TOKENS).logits
    torch.testing.assert_close(found, whole.replaced_head(hidden), rtol=0, atol=1e-5)
    generator = AutoModelForMaskedLM.from_pretrained(exported / "generator", trust_remote_code=True)
    expected = {name: value for name, value in state.items() if name.startswith("masked_head.")}
    assert all(torch.equal(generator.state_dict()[name], value) for name, value in expected.items())


def vectors(folder: Path) -> np.ndarray:
    return SentenceTransformer(str(folder), trust_remote_code=True, device="cpu").encode(SENTENCES)


@pytest.mark.parametrize("layer", [None, 2])
def test_sentence_transformers_gives_the_mean_of_the_last_layer(
    run: Path, exported: Path, tmp_path: Path, layer: int
) -> None:
    if layer is not None:
        exported = tmp_path / "cut"
        main(["--run", str(run), "--out", str(exported), "--layer", str(layer)])
        assert not (exported / "generator").exists()
    encoder, vocabulary = load_encoder(run)
    expected = sentence_vectors(encoder, [vocabulary.encode(text) for text in SENTENCES])[layer or -1]
    np.testing.assert_allclose(vectors(exported), expected, atol=1e-5)


def test_a_long_sentence_is_cut_to_the_longest_item(exported: Path) -> None:
    model = SentenceTransformer(str(exported), trust_remote_code=True, device="cpu")
    assert model.max_seq_length == 32
    assert model.encode("kalo " * 200).shape == (32,)


@pytest.mark.parametrize("shape", ["xlme", "xlm_roberta", "modernbert"])
@pytest.mark.parametrize("task", ["ner", "xnli", "xquad"])
def test_a_fine_tuned_run(tmp_path: Path, task: str, shape: str) -> None:
    """With transformers' own classes where it has some."""
    from xlme_ds.finetune.objective import TaskModel

    auto: Any = {
        "ner": AutoModelForTokenClassification,
        "xnli": AutoModelForSequenceClassification,
        "xquad": AutoModelForQuestionAnswering,
    }[task]
    settings: dict[str, Any] = {"xlm_roberta": {"relative_bias": "none"}, "modernbert": MODERN}.get(shape, {})
    run = write_run(tmp_path / "run", **settings)
    cfg, kind, labels = load_run(run).model, DOWNSTREAM_TASKS[task].kind, DOWNSTREAM_TASKS[task].labels
    ours = TaskModel(cfg, kind, len(labels) or 2).eval()
    initialise(ours, seed=3, std=0.1)
    tuned = tmp_path / "tuned"
    (tuned / "model").mkdir(parents=True)
    settings = json.loads((run / "config.json").read_text())
    settings["config"] |= {"task": task, "tuning": {"train_languages": ["en"], "batch": 8, "epochs": 1}}
    settings["config"]["tuning"] |= {"dropout": 0.1, "layer_decay": 1.0}
    (tuned / "config.json").write_text(json.dumps(settings))
    save_file(ours.state_dict(), tuned / "model" / "model.safetensors")
    shutil.copy(run / "model" / "sentencepiece.model", tuned / "model")
    scores = {"split": "test", "metric": ["f1", "em"], "languages": {"de": {"f1": 61.25, "em": 50.0}}, "settings": 9}
    scores["dev"] = {"languages": {"en": {}, "fr": {}}, "mean": {"f1": 71.25, "em": 60.0}, "held_out": task == "ner"}
    (tuned / "scores.json").write_text(json.dumps({"format": 1, **scores}))
    main(["--run", str(tuned), "--out", str(tmp_path / "out")])
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"Fine-tuned on {task}, languages en." in card
    assert "| language | f1 | em |\n|---|---|---|\n| de | 61.2 | 50.0 |\n" in card
    of = "training examples held out" if task == "ner" else "dev sets"
    assert f"Scores on {of}, which settings are chosen on (en, fr): f1 71.2, em 60.0. One of 9 settings.\n" in card
    theirs = auto.from_pretrained(tmp_path / "out", trust_remote_code=shape == "xlme")
    assert type(theirs).__module__.startswith(f"transformers.models.{shape}") == (shape != "xlme")
    hidden, inside = ours.encoder(TOKENS, *positions_and_segments(TOKENS)), TOKENS != 1
    found, expected = theirs(TOKENS, inside.long()), ours.head(hidden[:, 0] if task == "xnli" else hidden)
    logits = torch.stack([found.start_logits, found.end_logits], -1) if kind == "span" else found.logits
    compared = ... if task == "xnli" else inside
    torch.testing.assert_close(logits[compared], expected[compared], rtol=0, atol=1e-5)
    if labels:
        assert tuple(theirs.config.id2label[n] for n in range(len(labels))) == labels
        assert theirs.config.label2id[labels[-1]] == len(labels) - 1
    torch.testing.assert_close(load_encoder(tuned).encoder(TOKENS, *positions_and_segments(TOKENS)), hidden)
    assert "## Scores in per cent, split test\n" in card
    main(["--run", str(tuned), "--out", str(tmp_path / "cut"), "--layer", "2"])
    assert "split test, of the whole model\n" in (tmp_path / "cut" / "README.md").read_text()
    with pytest.raises(ValueError, match="was fine-tuned and has no generator"):
        load_encoder(tuned, "generator")


def test_the_card_tells_of_the_run(run: Path, exported: Path, tmp_path: Path) -> None:
    card = (exported / "README.md").read_text()
    last = json.loads((run / "heldout.jsonl").read_text().splitlines()[-1])
    assert (
        f"| Discriminator: AUC, replaced against original tokens, translation pairs | {last['auc_para']:.3f} |" in card
    )
    retrieval = json.loads((run / "retrieval.json").read_text())
    assert f"| 3 | {retrieval['after']['overall']['en_xx'][3]:.1%} |" in card
    assert "| layer | en → xx | xx → en | untrained, en → xx | untrained, xx → en |" in card
    assert "3 layers, width 32, 4 heads" in card and "| steps | 2 |" in card
    assert "<" not in card and "{" not in card
    assert yaml.safe_load(card.split("---")[1]).keys() == {"library_name", "tags"}

    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    table = {"share": 0.5, "share_before": 0.5, "repeat": 1.0}
    codes = ["de", "zh-Hans", "hi_rom", "nds-nl", "<script>x</script>", "no: *yes*\nlicense: mit"]
    (copy / "languages.json").write_text(
        json.dumps({"format": 1, "mono": dict.fromkeys(codes, table), "para": {"en-sw": table}})
    )
    assert retrieval["step"] == 2 and "15% predicted" in card
    (copy / "retrieval.json").write_text(json.dumps(retrieval | {"step": 1}))
    main(["--run", str(copy), "--out", str(tmp_path / "earlier")])
    earlier = (tmp_path / "earlier/README.md").read_text()
    assert "## Sentence retrieval" in card and "## Sentence retrieval" not in earlier, "of step 1, the model is of 2"
    tested = {"en_xx": [0.5, 0.25, 0.75, 0.875], "xx_en": [0.625, 0.125, 0.375, 1.0]}
    before = {"en_xx": [0.1, 0.2, 0.3, 0.4], "xx_en": [0.05, 0.15, 0.25, 0.35]}
    retrieval |= {"after": {"overall": tested}, "before": {"overall": before}}
    (copy / "retrieval.json").write_text(json.dumps(retrieval))
    config = json.loads((copy / "config.json").read_text())
    config["config"]["name"] = "a|b [x](y) <b>\n# z"
    config["config"]["data"] |= {"mono_rows": 6, "para_rows": 4}
    config["config"]["optimizer"] |= {"learning_rate": 0.0625, "warmup_steps": 7}
    (copy / "config.json").write_text(json.dumps(config))
    terms = {"mlm": 6.125, "tlm": 5.25, "mrtd": 0.375, "trtd": 0.5}
    terms |= {"auc_mono": 0.625, "auc_para": 0.75}
    last = terms | {"step": 2, "unigram_nll_mono": 7.125, "unigram_nll_para": 7.25}
    (copy / "heldout.jsonl").write_text(f'{{"step": 1, "mlm": 9.0}}\n{json.dumps(last)}\n')
    (copy / "metrics.jsonl").write_text('{"step": 1, "tokens": 1024}\n{"step": 2, "tokens": 2048}\n')
    main(["--run", str(copy), "--out", str(tmp_path / "out")])
    card = (tmp_path / "out" / "README.md").read_text()
    assert yaml.safe_load(card.split("---")[1])["language"] == ["de", "en", "hi", "nds", "sw", "zh"]
    assert r"# a\|b \[x\](y) \<b\> \# z" in card.splitlines()
    rows = [line for line in card.splitlines() if re.match(r"\| \d \|", line)]
    assert rows[:2] == ["| 0 | 50.0% | 62.5% | 10.0% | 5.0% |", "| 1 | 25.0% | 12.5% | 20.0% | 15.0% |"]
    assert r"\<script\>x\</script\> 50.00%" in card and "\nlicense" not in card and "en-sw 50.00%" in card
    assert escape("\\") == "\\\\"
    assert "| peak learning rate, warm-up | 0.0625, 7 steps |" in card
    assert "| tokens, padding included | 2,048 |" in card
    assert "| rows a step, monolingual and pairs | 6 and 4 |" in card
    section = card.partition("## On text kept out of training, after step 2\n")[2].partition("\n## ")[0]
    masked, unigram = "Masked-token loss in nats a token", "the same of a unigram model"
    judged, auc = (
        "Discriminator: replaced-token loss in nats a token",
        "Discriminator: AUC, replaced against original tokens",
    )
    mono, para = "monolingual text", "translation pairs"
    assert dict(re.findall(r"\| (.+) \| ([\d.]+) \|", section)) == {
        f"{masked}, {mono}": "6.125", f"{masked}, {para}": "5.250", f"{unigram}, {mono}": "7.125",
        f"{unigram}, {para}": "7.250", f"{judged}, {mono}": "0.375", f"{judged}, {para}": "0.500",
        f"{auc}, {mono}": "0.625", f"{auc}, {para}": "0.750",
    }  # fmt: skip


def refusal(capsys: pytest.CaptureFixture[str], to: Path, *arguments: str) -> str:
    before = sorted(to.parent.iterdir())
    with pytest.raises(SystemExit) as stop:
        main([*arguments, "--out", str(to)])
    assert stop.value.code == 2 and sorted(to.parent.iterdir()) == before
    (line,) = capsys.readouterr().err.splitlines()
    return line.removeprefix("xlme export: error: ")


def test_refusals(run: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    no = tmp_path / "no"
    assert "either --run PATH or --from-hf PATH" in refusal(capsys, no)
    assert "either --run PATH or --from-hf PATH" in refusal(capsys, no, "--run", str(run), "--from-hf", str(run))
    assert "missing does not exist: name" in refusal(capsys, no, "--run", str(tmp_path / "missing"))
    assert f"{exported} is an export (a Hugging Face folder), not a run" in refusal(capsys, no, "--run", str(exported))
    said = refusal(capsys, no, "--from-hf", str(run))
    assert said == f"{run} is a run, not a model in Hugging Face's form: name it by --run"
    said = refusal(capsys, no, "--run", str(run), "--layer", "4")
    assert said.startswith("layer 4 does not exist: the model has layers 1 to 3")
    for option in ("--run", "--from-hf"):  # said before the model is looked for
        assert "exists already: choose another output folder" in refusal(capsys, exported, option, "missing")
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "retrieval.json").write_text('{"format": 1, "step": 2, "before": {}}')
    assert "a JSON file of the run run is incomplete" in refusal(capsys, no, "--run", str(copy))
    (copy / "retrieval.json").unlink()
    state = load_file(copy / "model" / "model.safetensors")
    save_file({name: t for name, t in state.items() if "qkv" not in name}, copy / "model" / "model.safetensors")
    assert "does not hold the model of" in refusal(capsys, no, "--run", str(copy))
    last = max(state)
    for value in (float("nan"), float("inf")):
        state[last].view(-1)[-1] = value
        save_file(state, copy / "model" / "model.safetensors")
        assert f"{last} is not finite, because the training diverged" in refusal(capsys, no, "--run", str(copy))
    (copy / "model" / "model.safetensors").unlink()
    assert "no complete checkpoint of step 7: it has those of step 2" in refusal(capsys, no, "--run", f"{copy}@7")
    assert "is not a run and has no steps: leave out @2" in refusal(capsys, no, "--run", f"{exported}@2")
    shutil.rmtree(copy / "checkpoints")
    assert "has no complete checkpoint: wait for its first" in refusal(capsys, no, "--run", str(copy))


def unfinished(run: Path, copy: Path) -> Path:
    """The run as it was before it wrote its model, with a checkpoint that was half written when it ended."""
    shutil.copytree(run, copy)
    for name in ("model/model.safetensors", "finished.json", "report.html", "retrieval.json", "samples.json"):
        (copy / name).unlink()
    shutil.copytree(copy / "checkpoints/step_00000002", copy / "checkpoints/step_00000003")
    next((copy / "checkpoints/step_00000003").glob("state_0*")).write_bytes(b"half")
    return copy


def test_what_to_export(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One model, of a run or in Hugging Face's form, and all that its card shows."""
    no, which = tmp_path / "no", "--which works only with --run, because XLM-R has one encoder: leave --which out"
    for given in ([], ["--run", str(run), "--from-hf", str(run)]):
        assert refusal(capsys, no, *given) == "name what to export: either --run PATH or --from-hf PATH"
    assert refusal(capsys, no, "--from-hf", str(run), "--which", "encoder") == which
    copy = shutil.copytree(run, tmp_path / "copy")
    scores = {"format": 1, "step": 2, "layers": [0], "pairs": {}, "before": {"overall": {}}}
    (copy / "retrieval.json").write_text(json.dumps(scores))
    said = "a JSON file of the run copy is incomplete ('after'): restore or remove it"
    assert refusal(capsys, no, "--run", str(copy)) == said


def test_a_run_is_read_before_its_end(run: Path, exported: Path, tmp_path: Path) -> None:
    """GDES and both encoders; the checkpoint has the layout of one process of plain torch."""
    copy = unfinished(run, tmp_path / "run")
    with open(copy / "heldout.jsonl", "a", encoding="utf-8") as records:  # of a step that is not exported
        records.write(json.dumps({"step": 4, "mlm": 98.765}) + "\n")
    found = load_run(copy)
    assert found.step == 2 and load_run(run).step is None
    assert {"embedding_0", "difference_0"} <= found.state.keys()
    for name, value in load_run(run).state.items():
        assert torch.equal(found.state[name], value), name
    for folder in (f"{copy}@2", f"{run}@2", copy):
        to = tmp_path / f"export{len(list(tmp_path.iterdir()))}"
        assert xlme.export.run(folder, to) == to
        for name in ("model.safetensors", "generator/model.safetensors"):
            assert (to / name).read_bytes() == (exported / name).read_bytes()
        card = (to / "README.md").read_text()
        assert "**After step 2 of 2**" in card and "98.765" not in card and "AUC, replaced against" in card
    assert "After step" not in (exported / "README.md").read_text()
    whole, early = (xlme.load(folder).judge("kalo mi") for folder in (run, copy))
    assert whole == early
    named = tmp_path / "run@2"
    shutil.copytree(run, named)
    assert load_run(named).step is None  # a folder of that name


def test_the_page_of_a_run_is_brought_up_to_date(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = unfinished(run, tmp_path / "runs/run")
    settings = json.loads((copy / "config.json").read_text())
    assert not Path(settings["data"]["folder"]).is_absolute()
    for name in ("folder", "heldout"):
        settings["data"][name] = str((run / settings["data"][name]).resolve())
    settings["config"]["train"]["steps"] = 5
    (copy / "config.json").write_text(json.dumps(settings))
    monkeypatch.chdir(tmp_path)
    report(["--run", "runs/run"])
    for name in ("samples.json", "retrieval.json", "languages.json"):  # as the run wrote them at its end
        assert json.loads((copy / name).read_text()) == json.loads((run / name).read_text())
    page = (copy / "report.html").read_text()
    assert '<meta http-equiv="refresh"' in page and "refresh" not in (run / "report.html").read_text()
    assert "Step 2 of 5; sentences and retrieval of step 2." in " ".join(page.split())
    written = (copy / "samples.json").stat().st_mtime_ns
    report(["--run", "runs/run"])
    assert (copy / "samples.json").stat().st_mtime_ns == written  # nothing is newer
    values = json.loads((copy / "retrieval.json").read_text())
    values["before"]["overall"]["en_xx"][0] = 0.125  # so that it is seen where it comes from
    (copy / "retrieval.json").write_text(json.dumps(values))
    samples = json.loads((copy / "samples.json").read_text())
    samples["samples"][0]["step"] = 1
    (copy / "samples.json").write_text(json.dumps(samples))
    report(["--run", "runs/run"])
    assert json.loads((copy / "retrieval.json").read_text()) == values
    (copy / "samples.json").unlink()
    settings["data"]["fingerprints"]["mono"] = "other"
    (copy / "config.json").write_text(json.dumps(settings))
    capsys.readouterr()
    report(["--run", "runs/run"])
    assert "does not hold the data of runs/run any more: restore them" in capsys.readouterr().err
    assert (
        not (copy / "samples.json").exists() and "come after the first checkpoint" in (copy / "report.html").read_text()
    )


def test_a_checkpoint_that_the_run_deletes_while_it_is_read(run: Path, tmp_path: Path) -> None:
    copy = unfinished(run, tmp_path / "run")
    folder = copy / "checkpoints"
    shutil.rmtree(folder / "step_00000003")
    opened = 0

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        """At the third opening of a file of its state, after the checksums: the run is at step 9 by then."""
        nonlocal opened
        if event != "open" or not str(arguments[0]).startswith(str(folder / "step_00000002/state_0")):
            return
        opened += 1
        if opened == 3:
            shutil.copytree(folder / "step_00000002", tmp_path / "next")
            state, marker = tmp_path / "next" / STATE_JSON, tmp_path / "next" / MARKER_FILE
            state.write_text(json.dumps(json.loads(state.read_text()) | {"step": 9}))
            whole = {"bytes": state.stat().st_size, "crc32": zlib.crc32(state.read_bytes())}
            marker.write_text(json.dumps(json.loads(marker.read_text()) | {STATE_JSON: whole}))
            (tmp_path / "next").rename(folder / "step_00000009")
            shutil.rmtree(folder / "step_00000002")

    sys.addaudithook(hook)
    found = load_run(copy)
    assert opened >= 3 and found.step == 9
    assert all(torch.equal(found.state[name], value) for name, value in load_run(run).state.items())
    with pytest.raises(ValueError, match="no complete checkpoint of step 2: it has those of step 9"):
        load_run(Path(f"{copy}@2"))


def test_another_vocabulary_is_refused_and_leaves_nothing(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    config = json.loads((copy / "config.json").read_text())
    config["config"]["model"]["vocabulary"] = 119
    (copy / "config.json").write_text(json.dumps(config))
    cut_down = {"embedding_0", "difference_0", "masked_head.bias"}
    state = load_file(copy / "model" / "model.safetensors")
    smaller = {name: value[:119].contiguous() if name in cut_down else value for name, value in state.items()}
    save_file(smaller, copy / "model" / "model.safetensors")
    assert "has 120 ids, the model 119" in refusal(capsys, tmp_path / "no", "--run", str(copy))


def other_pieces(model: Path, to: Path) -> Path:
    """The vocabulary `model` with two pieces exchanged: another one of the same size."""
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.read_bytes())
    first, second = proto.pieces[20], proto.pieces[21]
    first.piece, second.piece = second.piece, first.piece
    to.write_bytes(proto.SerializeToString())
    return to


def test_another_vocabulary_of_the_same_size_is_refused(
    run: Path, exported: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything that reads a model asks `load_run` or `load_encoder` for it, or is `checkpoint weights`."""
    right = run / "model" / "sentencepiece.model"
    known = json.loads((run / "config.json").read_text())["data"]["vocabulary_sha256"]
    assert known == hashlib.sha256(right.read_bytes()).hexdigest()
    copy, other = tmp_path / "run", other_pieces(right, tmp_path / "other.model")
    shutil.copytree(run, copy)
    shutil.copytree(exported, tmp_path / "export")
    shutil.copy(other, copy / "model" / "sentencepiece.model")
    shutil.copy(other, tmp_path / "export/sentencepiece.bpe.model")
    wrong = r"is not the vocabulary that the model in \S+ was trained with: restore or name that one"
    for read, folder in ((load_run, copy), (load_encoder, copy), (load_encoder, tmp_path / "export")):
        with pytest.raises(ValueError, match=wrong):
            read(folder)
    shutil.rmtree(copy / "model")  # as one that is not finished
    weights = ["weights", "--run", str(copy), "--out", str(tmp_path / "weights"), "--vocab"]
    with pytest.raises(SystemExit) as end:
        checkpoint.main([*weights, str(other)])
    assert end.value.code == 2 and re.search(wrong, capsys.readouterr().err) and not (tmp_path / "weights").exists()
    checkpoint.main([*weights, str(right)])
    assert load_run(tmp_path / "weights").vocabulary.sha256 == known
    config = json.loads((tmp_path / "weights/config.json").read_text())
    del config["data"]["vocabulary_sha256"]
    (tmp_path / "weights/config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"config\.json has no vocabulary_sha256: restore the file"):
        load_run(tmp_path / "weights")


def test_what_a_killed_export_left_is_in_nobodys_way(run: Path, tmp_path: Path) -> None:
    lock_folder(tmp_path / "out.partial").close()
    (tmp_path / "out.partial" / "model.safetensors").write_bytes(b"half")
    main(["--run", str(run), "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out.partial").exists() and len(load_file(tmp_path / "out" / "model.safetensors")) > 10


def test_pre_ln_models_are_not_cut(vocabulary: Vocabulary) -> None:
    cfg = ModelConfig(vocabulary.size, 24, 3, 40, 1, 3, 32)
    assert truncate_encoder(TextEncoder(replace(cfg, norm="pre")), 3).cfg.discriminator_layers == 3
    with pytest.raises(ValueError, match=r"leave out layer, and read hidden_states\[2\]"):
        truncate_encoder(TextEncoder(replace(cfg, norm="pre")), 2)


def test_the_guides_commands(
    run: Path, tmp_path: Path, vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every command and every piece of Python in docs/howto/export.md."""
    text = (ROOT / "docs/howto/export.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.S | re.M)
    (export, imported) = (body.strip() for kind, body in blocks if not kind)
    code = "\n".join(body for kind, body in blocks if kind == "python")
    assert [kind for kind, _ in blocks] == ["", "python", "output", "python", "bash", ""]
    shutil.copytree(run, tmp_path / "runs" / "quickstart")
    config = XLMRobertaConfig(vocab_size=vocabulary.size, hidden_size=24, num_hidden_layers=1, layer_norm_eps=1e-5)
    XLMRobertaModel(config).save_pretrained(tmp_path / "xlm-roberta-base")
    shutil.copy(vocabulary.path, tmp_path / "xlm-roberta-base" / "sentencepiece.bpe.model")
    monkeypatch.chdir(tmp_path)
    subprocess.run(export.replace("xlme", f"{sys.executable} -m xlme_ds", 1), shell=True, env=environment(), check=True)
    program, *arguments = shlex.split(imported, comments=True)
    assert [program, arguments[0]] == ["xlme", "export"]
    main(arguments[1:])
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["states"].shape[0] == len(names["vectors"]) == 2
    assert load_encoder(tmp_path / "exports/xlmr").encoder.cfg.relative_bias == "none"


def test_a_type_of_numbers_that_torch_does_not_have_is_refused(tmp_path: Path) -> None:
    """The file is written by hand: the length of the header, the header, and three bytes of four numbers of 6 bits."""
    header = json.dumps({"w": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    with pytest.raises(
        ValueError, match=r"model.safetensors is not a safetensors file that torch reads \(.*F6_E2M3.*: copy it"
    ):
        read_weights(path)


def test_a_file_that_cannot_be_opened_is_not_called_missing(tmp_path: Path) -> None:
    (path := tmp_path / "model.safetensors").symlink_to(path)  # as root, no permission is missing
    with pytest.raises(OSError, match=r"Too many levels of symbolic links: '.*model\.safetensors'"):
        read_weights(path)


def test_names_types_and_shapes_of_tensors_are_in_their_checksum(tmp_path: Path) -> None:
    path, state = tmp_path / "model.safetensors", {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4)}
    save_weights(state, path)
    assert all(torch.equal(value, state[name]) for name, value in read_weights(path).items())
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    a, b = state.values()
    for other in ({"a": a.view(3, 2), "b": b}, {"a": a.view(torch.int32), "b": b}, {"a": a, "c": b}, {"b": a, "a": b}):
        save_file(other, path, metadata)
        with pytest.raises(ValueError, match="has changed since it was written"):
            read_weights(path)
