"""model.onnx in ONNX Runtime computes what the exported model does in torch."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import onnxruntime
import pytest
import torch
from torch import Tensor
from transformers import AutoModel, AutoModelForQuestionAnswering

import xlme_ds as xlme
from tests.evaluate.folders import write_run
from tests.small import MODERN, lively
from xlme_ds.export import onnx_model
from xlme_ds.export.__main__ import main
from xlme_ds.finetune.downstream_tasks import DOWNSTREAM_TASKS
from xlme_ds.finetune.objective import TaskModel
from xlme_ds.trained.runs import load_run
from xlme_ds.trained.weights import save_weights

# Two texts and three, in lengths other than those that the graph is traced with, padded on either side; one text.
ROWS = [
    torch.tensor([[0, 5, 6, 7, 2], [0, 8, 2, 1, 1]]),
    torch.tensor([[0, *range(5, 20), 2], [0, 8, 2, *[1] * 14], [*[1] * 13, 0, 8, 9, 2]]),
    torch.tensor([[0, 2]]),
]


def compare(folder: Path, auto: Any, names: tuple[str, ...], **inputs: Tensor) -> None:
    """The outputs `names` of the model in `folder` by both."""
    theirs = auto.from_pretrained(folder, trust_remote_code=True)
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    assert [output.name for output in session.get_outputs()] == list(names)
    for tokens in ROWS:
        inside = tokens != 1
        given = {"input_ids": tokens, "attention_mask": inside.long()}
        given |= {name: value[: len(tokens)] for name, value in inputs.items()}
        with torch.no_grad():
            expected = theirs(**given)
        found = session.run(None, {name: value.numpy() for name, value in given.items()})
        for name, values in zip(names, found, strict=True):
            torch.testing.assert_close(torch.from_numpy(values)[inside], expected[name][inside], rtol=0, atol=1e-5)


def test_the_gated_bias(tmp_path: Path) -> None:
    main(["--run", str(write_run(tmp_path / "run")), "--out", str(tmp_path / "x"), "--onnx"])
    compare(tmp_path / "x", AutoModel, ("last_hidden_state",))
    assert not (tmp_path / "x/generator/model.onnx").exists()


def test_languages_and_positions_that_restart(tmp_path: Path) -> None:
    """XLM's pre-LN relative: the graph has the languages as its third input."""
    settings: dict[str, Any] = dict(layout="xlm", language_embeddings=("fr", "de"), relative_bias="plain", norm="pre")
    xlme.export.run(write_run(tmp_path / "run", **settings), tmp_path / "x", onnx=True)
    compare(tmp_path / "x", AutoModel, ("last_hidden_state",), language_ids=torch.tensor([1, 0, 1]))


@pytest.mark.parametrize("shape", [{"relative_bias": "none"}, MODERN], ids=["xlm-roberta", "modernbert"])
def test_the_head_of_a_task(tmp_path: Path, shape: dict[str, Any]) -> None:
    """Of a native model."""
    run, tuned = write_run(tmp_path / "run", **shape), tmp_path / "tuned"
    settings = json.loads((run / "config.json").read_text())
    tuning = {"train_languages": ["en"], "batch": 8, "epochs": 1, "dropout": 0.1, "layer_decay": 1.0}
    settings["config"] |= {"task": "xquad", "tuning": tuning}
    (tuned / "model").mkdir(parents=True)
    (tuned / "config.json").write_text(json.dumps(settings))
    whole = lively(TaskModel(load_run(run).model, DOWNSTREAM_TASKS["xquad"].kind, 2))
    save_weights(whole.state_dict(), tuned / "model/model.safetensors")
    shutil.copy(run / "model/sentencepiece.model", tuned / "model")
    main(["--run", str(tuned), "--out", str(tmp_path / "x"), "--onnx"])
    compare(tmp_path / "x", AutoModelForQuestionAnswering, ("start_logits", "end_logits"))


def test_errors_before_anything_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    translating = write_run(
        tmp_path / "mt", objective="mt", decoder="xlm", language_embeddings=("de", "en"), relative_bias="none"
    )
    with pytest.raises(ValueError, match=r"this model has a decoder: export its encoder alone \(--which encoder\)"):
        xlme.export.run(translating, tmp_path / "no", onnx=True)
    monkeypatch.setattr(onnx_model, "_PACKAGES", ("onnx", "onnx_that_is_missing"))
    words = "onnx needs onnx_that_is_missing: pip install onnx_that_is_missing"
    with pytest.raises(ValueError, match=f"^{re.escape(words)}"):
        xlme.export.run(write_run(tmp_path / "run"), tmp_path / "no", onnx=True)
    assert not list(tmp_path.glob("no*"))
