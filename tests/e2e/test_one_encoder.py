"""A run with one encoder, from the command to what is made of it: resumed bitwise, reported, exported, evaluated,
started from."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.launch import TIMED, python, run_ranks
from tests.rows import train_vocabulary, write_data
from xlme_ds.audit import examine
from xlme_ds.config import ModelConfig, ObjectiveConfig, RunConfig, StartConfig
from xlme_ds.first_weights import starting_weights
from xlme_ds.trained.encoders import load_encoder
from xlme_ds.trained.runs import load_run

STEPS = 8
SETTINGS = (
    f"--recipe quickstart --objective.name mlm --engine.precision fp32 --train.steps {STEPS} --train.save-every 4 "
    "--train.log-every 1 --train.eval-every 4 --optimizer.warmup-steps 1 --data.mono-rows 4 --data.para-rows 4 "
    "--data.micro-batch 2 --model.width 32 --model.heads 4 --model.feed-forward 64 --model.discriminator-layers 3 "
    "--model.max-positions 32 --model.vocabulary-blocks 2"
)


def pretrain(folder: Path, out: Path, *more: str) -> str:
    """ZeRO-3 on two processes, with `more` settings; what the first one said."""
    vocabulary = json.loads((folder / "data/mono/manifest.json").read_text())["vocabulary_size"]
    words = [*SETTINGS.split(), "--model.vocabulary", str(vocabulary), "--out", str(out)]
    words += ["--data", str(folder / "data"), "--heldout", str(folder / "heldout"), *more]
    done = run_ranks(2, ["-m", "xlme_ds.pretrain", *words])
    assert all(rank.returncode == 0 for rank in done), "\n".join(rank.stderr[-3000:] for rank in done)
    return done[0].stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`alone`: a run that was never stopped; `again`: the same from its middle on."""
    folder = tmp_path_factory.mktemp("mlm")
    vocabulary = train_vocabulary(folder / "data" / "vocab")
    write_data(folder / "data", rows=40, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    write_data(folder / "heldout", rows=16, vocabulary=vocabulary.size, seed=1, sha256=vocabulary.sha256)
    shutil.copytree(folder / "data" / "vocab", folder / "heldout" / "vocab")
    pretrain(folder, folder / "alone")
    shutil.copytree(folder / "alone", folder / "again")
    shutil.rmtree(folder / "again/checkpoints" / f"step_{STEPS:08d}")
    shutil.rmtree(folder / "again/model")
    assert "resuming after step 4 of 8" in pretrain(folder, folder / "again")
    return folder


def records(path: Path) -> list[dict[str, float]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{key: value for key, value in record.items() if key not in TIMED} for record in found]


def test_resumed_bitwise(folder: Path) -> None:
    alone, again = (load_file(folder / name / "model/model.safetensors") for name in ("alone", "again"))
    assert alone.keys() == again.keys()
    assert all(torch.equal(again[name], value) for name, value in alone.items())
    for name in ("metrics.jsonl", "heldout.jsonl"):
        assert records(folder / "alone" / name) == records(folder / "again" / name)


def test_records(folder: Path) -> None:
    last = records(folder / "alone/metrics.jsonl")[-1]
    assert last["step"] == STEPS and last["loss"] == pytest.approx(last["mlm"] + last["tlm"])
    assert {"accuracy_mono", "accuracy_para"} <= last.keys() and not {"mrtd", "auc_mono"} & last.keys()
    parameters = json.loads((folder / "alone/config.json").read_text())["parameters"]
    total = sum(value.numel() for value in load_file(folder / "alone/model/model.safetensors").values())
    assert parameters["encoder"] == parameters["trained_total"] == total


def test_report(folder: Path) -> None:
    samples = json.loads((folder / "alone/samples.json").read_text())["samples"]
    tokens = [token for sample in samples for token in sample["tokens"]]
    assert all(token["score"] is None for token in tokens)
    assert any(token["masked"] for token in tokens)
    assert all(token["masked"] or not token["replaced"] for token in tokens)
    page = (folder / "alone/report.html").read_text()
    shown = re.sub(r'<p class="note command">.*?</p>', "", page).split("Settings</h2>")[
        0
    ]  # the command names its layers
    assert "masked language modelling of one encoder" in shown and "discriminator" not in shown
    wrong = sum(token["replaced"] for token in tokens if token["original"] not in ("<s>", "</s>"))
    assert f"it chose another token: {wrong}<" in page
    assert {sample["step"] for sample in samples} == {STEPS}
    retrieval = json.loads((folder / "alone/retrieval.json").read_text())
    assert retrieval["step"] == STEPS
    assert len(retrieval["after"]["overall"]["en_xx"]) == 4
    assert retrieval["after"] != retrieval["before"]


def test_a_checkpoint_holds_the_model(folder: Path) -> None:
    """Of ZeRO-3 on two processes; and of the middle, what the run that went on from there had."""
    whole, last, middle = (load_run(folder / name) for name in ("alone", f"alone@{STEPS}", "alone@4"))
    assert all(torch.equal(last.state[name], value) for name, value in whole.state.items())
    assert whole.state.keys() == middle.state.keys()
    assert not torch.equal(middle.state["embedding_0"], whole.state["embedding_0"])
    config = RunConfig("next", model=whole.model, objective=whole.objective, start=StartConfig(f"{folder}/alone@4"))
    values = starting_weights(config, whole.vocabulary)
    assert values is not None
    assert all(torch.equal(values(name), value) for name, value in middle.state.items())  # type: ignore[arg-type]


def test_export_and_evaluation(folder: Path, tmp_path: Path) -> None:
    done = python("-m", "xlme_ds.export", "--run", str(folder / "alone"), "--out", str(tmp_path / "export"))
    assert done.returncode == 0, done.stderr
    config = json.loads((tmp_path / "export/config.json").read_text())
    assert config["architectures"] == ["XLMEForMaskedLM"] and not (tmp_path / "export/generator").exists()
    assert "Pre-trained for masked language modelling" in (tmp_path / "export/README.md").read_text()
    state, exported = load_run(folder / "alone").state, load_file(tmp_path / "export/model.safetensors")
    heads = {name for name in state if name.startswith("masked_head.")}
    assert heads and all(torch.equal(exported[name], state[name]) for name in heads)
    ours, theirs = (load_encoder(path).encoder.state_dict() for path in (folder / "alone", tmp_path / "export"))
    assert torch.equal(torch.cat([ours["embedding_0"], ours["embedding_1"]]), theirs["embedding_0"])
    assert all(torch.equal(theirs[name], value) for name, value in ours.items() if not name.startswith("embedding"))
    pairs = ["xlme_ds.evaluate", "pairs", "--data", str(folder / "heldout"), "--model", str(folder / "alone")]
    done = python("-m", *pairs, "--random", "--json")
    assert done.returncode == 0, done.stderr
    trained, untrained = json.loads(done.stdout)["models"]
    retrieval = json.loads((folder / "alone/retrieval.json").read_text())
    for found, when in ((trained, "after"), (untrained, "before")):
        assert found["overall"]["en_xx"] == pytest.approx(retrieval[when]["overall"]["en_xx"])
    done = python("-m", *pairs, "--which", "generator")
    assert done.returncode == 2 and "for mlm and has no generator: set --which or start.take to enc" in done.stderr


def test_ernie_m_goes_on_from_it(folder: Path) -> None:
    settings = ["--objective.name", "ernie_m", "--start.folder", str(folder / "alone"), "--start.take", "encoder"]
    settings += ["--train.steps", "2", "--train.log-every", "2"]
    pretrain(folder, folder / "ernie", *settings)
    last = records(folder / "ernie/metrics.jsonl")[-1]
    assert last["loss"] == pytest.approx(last["mlm"] + last["tlm"] + last["camlm"])
    assert {"accuracy_mono", "accuracy_para", "accuracy_crossed"} <= last.keys()
    ours, theirs = (load_run(folder / name).state for name in ("ernie", "alone"))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():  # two steps of at most 1.2e-3, behind weights of 5e-2
        assert (ours[name] - value).abs().max() < 1e-2, name
    assert "predicted from the other alone" in (folder / "ernie/report.html").read_text()


def test_its_second_stage_goes_on_from_it(folder: Path) -> None:
    shutil.copytree(folder / "alone", folder / "first")
    settings = ["--objective.name", "btmlm", "--objective.pseudo-fractions", "0.05", "0.2", "--data.para-rows", "0"]
    settings += ["--start.folder", str(folder / "first"), "--start.take", "encoder", "--train.audit"]
    settings += ["--train.steps", "4", "--train.log-every", "1", "--train.save-every", "2", "--train.eval-every", "2"]
    pretrain(folder, folder / "second", *settings)
    shutil.copytree(folder / "second", folder / "second_again")
    shutil.rmtree(folder / "second_again/checkpoints/step_00000004")
    shutil.rmtree(folder / "second_again/model")
    shutil.rmtree(folder / "first")  # a run that resumes does not read what it started from
    assert "resuming after step 2 of 4" in pretrain(folder, folder / "second_again", *settings)
    one, again = (load_file(folder / name / "model/model.safetensors") for name in ("second", "second_again"))
    assert one.keys() == again.keys() and all(torch.equal(again[name], value) for name, value in one.items())
    for name in ("metrics.jsonl", "heldout.jsonl"):
        assert records(folder / "second" / name) == records(folder / "second_again" / name)
    last = records(folder / "second/metrics.jsonl")[-1]
    assert last["loss"] == last["btmlm"] and "accuracy_mono" in last
    assert "tokens of another language that it writes" in (folder / "second/report.html").read_text()
    for name, value in load_run(folder / "alone").state.items():  # four steps of at most 1.2e-3
        assert (one[name] - value).abs().max() < 1e-2, name
    faults, summary = examine(folder / "second_again", (folder / "data",))
    assert (faults, summary) == ([], "16 mono rows of 4 steps"), "the audit is told of the rows as the data hold them"


def test_other_models_start_from_it(folder: Path, tmp_path: Path) -> None:
    run = load_run(folder / "alone")

    def known(take: str, objective: str, source: Path = folder / "alone", **changes: object) -> dict[str, torch.Tensor]:
        cfg = ModelConfig(**{**run.model.__dict__, **changes})
        start = StartConfig(str(source), take)  # type: ignore[arg-type]
        config = RunConfig("x", model=cfg, objective=ObjectiveConfig(objective), start=start)  # type: ignore[arg-type]
        values = starting_weights(config, run.vocabulary)
        assert values is not None
        names = {"embedding_0", "masked_head.bias", "encoder.layers.2.up.weight"}
        names |= {"generator.layers.0.up.weight", "discriminator.layers.2.up.weight"}
        return {name: value for name in names if (value := values(name)) is not None}

    state = run.state
    for take in ("all", "encoder"):
        found = known(take, "mlm")
        assert found.keys() == {"embedding_0", "masked_head.bias", "encoder.layers.2.up.weight"}
        assert all(torch.equal(value, state[name]) for name, value in found.items())
    found = known("encoder", "electra", embedding_sharing="tied")
    assert found.keys() == {
        "embedding_0", "masked_head.bias", "generator.layers.0.up.weight", "discriminator.layers.2.up.weight"
    }  # fmt: skip
    assert torch.equal(found["masked_head.bias"], state["masked_head.bias"])
    for name in ("generator.layers.0.up.weight", "discriminator.layers.2.up.weight"):
        assert torch.equal(found[name], state["encoder" + name[name.index(".") :]])
    with pytest.raises(ValueError, match="was trained for mlm, whose model has other parts than that of electra: set"):
        known("all", "electra")
    with pytest.raises(ValueError, match=r"for mlm and has no discriminator: set --which or start.take to encoder"):
        known("discriminator", "mlm")
    words = ["--run", str(folder / "alone"), "--out", str(tmp_path / "export")]
    assert python("-m", "xlme_ds.export", *words).returncode == 0
    found = known("encoder", "mlm", tmp_path / "export")
    assert torch.equal(found["masked_head.bias"], state["masked_head.bias"])  # an export keeps its head
