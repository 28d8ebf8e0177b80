"""Data that do not belong to the model are refused, by the setting that differs; precisions follow from what fits."""

import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch import run_ranks
from tests.rows import train_vocabulary, write_data
from tests.small import SMALL
from xlme_ds.config import DataConfig, EngineConfig, OptimizerConfig, RunConfig
from xlme_ds.data.loader import Loader
from xlme_ds.data.schema import read_manifest, write_manifest
from xlme_ds.engine.build import _deepspeed_config, resolve_gradient_precision, resolve_precision
from xlme_ds.engine_file import deepspeed_settings
from xlme_ds.train.data import require_fitting_data


@pytest.fixture(scope="module")
def loader(tmp_path_factory: pytest.TempPathFactory) -> Loader:
    """Data in XLM's layout, as far as their manifests say."""
    folder = tmp_path_factory.mktemp("data") / "mixed"
    vocabulary = train_vocabulary(folder / "vocab")
    write_data(folder, 16, vocabulary=vocabulary.size, sha256=vocabulary.sha256)
    for task in ("mono", "para"):
        manifest = read_manifest(folder / task)
        write_manifest(folder / task, replace(manifest, settings=manifest.settings | {"layout": "xlm"}))
    return Loader(folder, DataConfig(4, 4, 4), 1, 0.15)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocabulary": 99}, r"the model has 99: set model\.vocabulary to "),
        ({"max_positions": 16}, r"rows of 32 tokens, but model\.max_positions is 16: raise model\.max_positions to 32"),
        ({"layout": "xlme"}, r"mixed with --layout xlm, but model\.layout is xlme: set model\.layout to xlm"),
    ],
)
def test_a_setting_that_differs(loader: Loader, changes: dict[str, object], words: str) -> None:
    model = replace(SMALL, vocabulary=loader.vocabulary_size, layout="xlm")
    require_fitting_data(loader, model)
    with pytest.raises(ValueError, match=words):
        require_fitting_data(loader, replace(model, **changes))  # type: ignore[arg-type]


def test_another_vocabulary_beside_the_rows(loader: Loader, tmp_path: Path) -> None:
    shutil.copytree(loader.folders[0], tmp_path / "mixed")
    shutil.rmtree(tmp_path / "mixed" / "vocab")
    folders = [loader.folders[0], tmp_path / "mixed"]
    others = [
        Loader(folders[1], DataConfig(4, 4, 4), 1, 0.15),
        Loader(folders, DataConfig(4, 4, 4, phase_steps=(1,)), 1, 0.15),
    ]
    train_vocabulary(tmp_path / "mixed" / "vocab", size=90)
    model = replace(SMALL, vocabulary=loader.vocabulary_size, layout="xlm")
    for other in others:
        with pytest.raises(ValueError, match=f"{folders[1]}/vocab is not the vocabulary of the rows next to it: mix"):
            require_fitting_data(other, model)


def test_held_out_text_of_another_vocabulary(loader: Loader, tmp_path: Path) -> None:
    """Its ids are not those of the training data."""
    shutil.copytree(loader.folders[0], tmp_path / "mixed")
    for task in ("mono", "para"):
        manifest = read_manifest(tmp_path / "mixed" / task)
        write_manifest(tmp_path / "mixed" / task, replace(manifest, vocabulary_sha256="1" * 64))
    model = replace(SMALL, vocabulary=loader.vocabulary_size, layout="xlm")
    trained = Loader(tmp_path / "mixed", DataConfig(4, 4, 4), 1, 0.15)
    with pytest.raises(ValueError, match=rf"{loader.folders[0]} and {trained.folders[0]} were encoded with different"):
        require_fitting_data(loader, model, trained)


@pytest.mark.parametrize("other", ["vocabulary", "layout"])
def test_held_out_text_is_changed_and_not_the_model_that_the_training_data_fit(
    loader: Loader, tmp_path: Path, other: str
) -> None:
    shutil.copytree(loader.folders[0], tmp_path / "heldout")
    for task in ("mono", "para"):
        manifest = read_manifest(tmp_path / "heldout" / task)
        changed = {"settings": manifest.settings | {"layout": "xlme"}}
        if other == "vocabulary":
            changed = {"vocabulary_size": manifest.vocabulary_size + 1, "vocabulary_sha256": "1" * 64}
        write_manifest(tmp_path / "heldout" / task, replace(manifest, **changed))  # type: ignore[arg-type]
    heldout = Loader(tmp_path / "heldout", DataConfig(4, 4, 4), 1, 0.15)
    model = replace(SMALL, vocabulary=loader.vocabulary_size, layout="xlm")
    with pytest.raises(ValueError, match=rf"heldout does not fit {loader.folders[0]}: encode and mix it with .* xlm$"):
        require_fitting_data(heldout, model, loader)


@pytest.mark.parametrize(
    ("gpu", "in_bf16", "precision"),
    [
        (True, {"cuda"}, "bf16"),
        (True, {"avx512", "amx"}, "fp32"),
        (False, {"cuda"}, "fp32"),
        (False, {"avx512"}, "bf16"),
        (False, {"amx"}, "bf16"),
    ],
)
def test_auto_is_the_precision_of_the_processor(
    gpu: bool, in_bf16: set[str], precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except under plain torch, the reference of all engines."""
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpu)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: "cuda" in in_bf16)
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: "avx512" in in_bf16)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: "amx" in in_bf16)
    for kind in ("deepspeed", "pipeline"):
        assert resolve_precision(EngineConfig(kind)) == precision  # type: ignore[arg-type]
    assert resolve_precision(EngineConfig("plain")) == "fp32"
    assert resolve_precision(EngineConfig(precision="fp32")) == "fp32"
    assert resolve_precision(EngineConfig(precision="bf16")) == "bf16"

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")  # there may be a GPU all the same
    assert resolve_precision(EngineConfig()) == ("bf16" if in_bf16 & {"avx512", "amx"} else "fp32")


SHARED = """
import os, torch
from xlme_ds.config import EngineConfig
from xlme_ds.engine import build
from xlme_ds.engine.ranks import process_group
build.on_gpu = torch.cpu._is_amx_tile_supported = lambda: False
torch.cpu._is_avx512_bf16_supported = lambda: os.environ["RANK"] in "{with_bf16}".split()
with process_group(EngineConfig("deepspeed", "zero1"), 1):
    print(build.with_shared_precision(EngineConfig("deepspeed", "zero1")).precision)
"""


@pytest.mark.parametrize(("with_bf16", "precision"), [("0", "fp32"), ("1", "fp32"), ("0 1", "bf16")])
def test_ranks_on_different_processors_compute_in_one_precision(with_bf16: str, precision: str) -> None:
    ranks = run_ranks(2, ["-c", SHARED.format(with_bf16=with_bf16)])
    assert [rank.stdout.split()[-1:] for rank in ranks] == [[precision]] * 2, ranks


@pytest.mark.parametrize(
    ("changes", "precision", "micro_batches", "expected"),
    [
        ({}, "bf16", 1, "bf16"),
        ({}, "bf16", 2, "fp32"),
        ({}, "fp32", 1, "fp32"),
        ({"deepspeed": "zero2"}, "bf16", 1, "fp32"),
        ({"deepspeed": "zero3"}, "bf16", 1, "fp32"),
        ({"offload_optimizer": "cpu"}, "bf16", 1, "fp32"),
        ({"kind": "pipeline", "deepspeed": "pipe_zero1"}, "bf16", 1, "fp32"),
        ({"gradient_precision": "fp32"}, "bf16", 1, "fp32"),
        ({"gradient_precision": "bf16"}, "bf16", 2, "bf16"),
        ({"gradient_precision": "bf16", "deepspeed": "zero3"}, "bf16", 2, "bf16"),
        ({"gradient_precision": "bf16"}, "fp32", 1, ""),
    ],
)
def test_gradients_are_in_bf16_where_no_bit_is_lost(
    changes: dict[str, str], precision: str, micro_batches: int, expected: str
) -> None:
    engine = EngineConfig(**changes)  # type: ignore[arg-type]
    if expected:
        assert resolve_gradient_precision(engine, precision, micro_batches) == expected
    else:
        with pytest.raises(ValueError, match=r"bf16 needs a run that computes in bf16, .* set it to auto"):
            resolve_gradient_precision(engine, precision, micro_batches)


def test_what_deepspeed_is_told(tmp_path: Path) -> None:
    """Its sizes are those of the plan; sums are in bf16 only where that is set; what an engine file says of a place
    stays."""
    data = DataConfig(8, 4, 2)
    loader = Loader(write_data(tmp_path / "mixed", 16), data, 1, 0.15)
    (tmp_path / "nvme").mkdir()
    folder = os.path.relpath(tmp_path / "nvme")

    def told(gradients: str, clip: float = 2.0, **engine: str) -> dict[str, Any]:
        of = EngineConfig(precision="bf16", **engine)  # type: ignore[arg-type]
        config = RunConfig("x", data=data, engine=of, optimizer=OptimizerConfig(clip=clip))
        return _deepspeed_config(config, loader, gradients)

    plain = told("bf16", clip=0.5, deepspeed="zero1")
    assert (plain["train_micro_batch_size_per_gpu"], plain["gradient_accumulation_steps"]) == (3, 4)
    assert plain["gradient_clipping"] == 0.5 and plain["bf16"]["enabled"]
    assert not {"offload_optimizer", "offload_param"} & plain["zero_optimization"].keys()
    for stage, gradients, setting, added, sent in (
        (1, "bf16", "auto", "fp32", "fp32"),
        (1, "bf16", "bf16", "fp32", "bf16"),
        (3, "bf16", "bf16", "bf16", "bf16"),
        (3, "fp32", "auto", "fp32", "fp32"),
    ):
        found = told(gradients, deepspeed=f"zero{stage}", gradient_precision=setting)
        assert found["data_types"] == {"grad_accum_dtype": added} and found["communication_data_type"] == sent
    of_file = deepspeed_settings(EngineConfig(deepspeed="zero3_offload"))["zero_optimization"]
    cpu = told("fp32", deepspeed="zero3_offload", offload_optimizer="cpu")["zero_optimization"]
    assert cpu == of_file | {"offload_optimizer": of_file.get("offload_optimizer", {}) | {"device": "cpu"}}
    places = dict(offload_optimizer="cpu", offload_parameters="nvme", nvme_folder=folder)
    nvme = told("fp32", deepspeed="zero3_offload", **places)["zero_optimization"]
    assert (nvme["offload_optimizer"]["device"], nvme["offload_param"]["device"]) == ("cpu", "nvme")
    place = Path(nvme["offload_param"]["nvme_path"])
    assert place.is_absolute() and place.samefile(tmp_path / "nvme")
    assert nvme["offload_param"].items() >= {**of_file.get("offload_param", {}), "device": "nvme"}.items()
    for setting, prefetched in (("offload_parameters", 0), ("offload_optimizer", 50_000_000)):
        zero = told("fp32", deepspeed="zero3", nvme_folder=folder, **{setting: "nvme"})["zero_optimization"]
        assert zero["stage3_prefetch_bucket_size"] == prefetched
