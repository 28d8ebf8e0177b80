"""What objectives share: the settings that each reads, what each refuses, their records, and their probes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.small import SMALL, lively, open_batch, usual_batch
from xlme_ds.config import DataConfig, ObjectiveConfig, RunConfig
from xlme_ds.models.pipeline import split_layers
from xlme_ds.objectives import OBJECTIVES, describe, objective_of
from xlme_ds.objectives.protocol import OBJECTIVE_SETTINGS

GENERATORS = dict.fromkeys(("electra", "all_tokens", "corrective")).keys()  # in one order in every process
MASKS = {"mlm", "ernie_m", "btmlm"}
READ_BY: dict[str, tuple[Any, set[str]]] = {  # another value than the default, and the objectives that read the setting
    "objective.discriminator_weight": (25.0, GENERATORS),
    "objective.generator_temperature": (0.5, GENERATORS),
    "objective.generator_keep_fraction": (0.15, GENERATORS),
    "objective.random_fakes": (("0:1",), GENERATORS),
    "objective.random_fraction": (0.2, MASKS),
    "objective.keep_fraction": (0.2, MASKS),
    "objective.z_loss": (1e-4, GENERATORS | MASKS | {"clm"}),
    "objective.pseudo_fractions": ((0.1,), {"btmlm"}),
    "objective.denoising": (("0:1",), {"mt"}),
    "objective.back_translation": (("0:1",), {"mt"}),
    "model.decoder": ("interleaved", {"mt"}),
    "model.decoder_layers": (1, {"mt"}),
    "start.into": ("decoder", {"mt"}),
    "start.decoder": ("other", {"mt"}),
}


def refusal(run: RunConfig) -> str:
    """Why the objective refuses these settings; empty if it does not."""
    try:
        objective_of(run.objective).check(run)
    except ValueError as error:
        return str(error)
    return ""


def of(name: str, **changes: Any) -> RunConfig:
    """A run of an objective with the settings that it needs."""
    needed: dict[str, Any] = {"mask_fraction": 1.0} if name in ("clm", "mt") else {}
    needed |= {"pseudo_fractions": (0.1,)} if name == "btmlm" else {}
    run = RunConfig("x", objective=ObjectiveConfig(name, **needed), data=DataConfig(8, 0 if name == "btmlm" else 8, 8))
    for setting, value in changes.items():
        section, key = setting.split(".")
        run = replace(run, **{section: replace(getattr(run, section), **{key: value})})
    return run


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_setting_that_an_objective_does_not_read_is_refused(name: str) -> None:
    assert READ_BY.keys() == set(OBJECTIVE_SETTINGS), "a setting is in no table"
    assert name == "mt" or not refusal(of(name))
    for setting, (value, readers) in READ_BY.items():
        told = f"{setting} is {value}, and objective.name {name} does not read it: leave it "
        assert refusal(of(name, **{setting: value})).startswith(told) == (name not in readers), setting


@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_share_of_masked_tokens(name: str) -> None:
    """Neither none nor all, or all alone."""
    fractions = [
        fraction
        for fraction in (0.0, 0.01, 0.99, 1.0)
        if "objective.mask_fraction is" not in refusal(of(name, **{"objective.mask_fraction": fraction}))
    ]
    assert fractions == ([1.0] if name in ("clm", "mt") else [0.01, 0.99])


@pytest.mark.parametrize("name", [*GENERATORS, "mlm", "rts", "ernie_m", "btmlm", "clm"])
@pytest.mark.parametrize(("setting", "value"), [("model.kernels", "triton"), ("model.body", "modern")])
def test_kernels_and_a_body_without_its_attention_mask(name: str, setting: str, value: str) -> None:
    told = f"{setting} {value} lets a position see its whole item, and objective.name {name} does not: set it to "
    assert refusal(of(name, **{setting: value})).startswith(told) == (name in ("ernie_m", "btmlm", "clm"))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_model_and_its_stages_have_the_settings_that_the_objective_reads(name: str) -> None:
    """Of what is shown at masked positions and of the softmax over the vocabulary."""
    usual = dict(z_loss=0.0, generator_temperature=1.0, generator_keep_fraction=0.0)
    values = dict(z_loss=0.01, generator_temperature=0.7, generator_keep_fraction=0.2)
    values |= dict(random_fraction=0.25, keep_fraction=0.3)
    read = {key: value for key, value in values.items() if name in READ_BY[f"objective.{key}"][1]}
    objective = objective_of(replace(of(name).objective, **read))  # type: ignore[arg-type]
    cfg = replace(SMALL, language_embeddings=("de", "en") if name == "mt" else ())
    models = [objective.build(cfg)] + (
        [] if name == "mt" else [objective.build(cfg, part) for part in split_layers((1, 1))]
    )
    if name in MASKS:
        assert {(each.masking.random_fraction, each.masking.keep_fraction) for each in models} == {(0.25, 0.3)}  # type: ignore[union-attr]
    heads = [head for each in models if (head := getattr(each, "masked_head", None)) is not None]
    assert len(heads) == (0 if name == "rts" else 1 if name == "mt" else 2)
    for head in heads:
        expected = [(usual | read)[key] for key in ("z_loss", "generator_temperature")]
        assert [head.z_loss, head.temperature] == expected
    if name in GENERATORS:
        assert {each.keep_fraction for each in models} == {0.2}


def test_back_translation_has_one_layout() -> None:
    assert "needs the layout of pairs in xlme" in refusal(of("btmlm", **{"model.layout": "xlm"}))


@pytest.mark.parametrize(("rows", "left_out"), [((8, 8), ""), ((8, 0), "para"), ((0, 8), "mono")])
@pytest.mark.parametrize("name", ["electra", "corrective", "mlm", "ernie_m", "rts"])
def test_a_record_has_the_terms_of_the_tasks_that_are_read(name: str, rows: tuple[int, int], left_out: str) -> None:
    terms = {"electra": "mlm tlm mrtd trtd", "corrective": "mlm tlm mrtd trtd cmlm ctlm", "rts": "mrtd trtd"}
    of_name = terms.get(name, "mlm tlm" + " camlm" * (name == "ernie_m")).split()
    of_para = {"tlm", "trtd", "ctlm", "camlm"}
    kept = [term for term in of_name if left_out != ("para" if term in of_para else "mono")]
    record = describe(ObjectiveConfig(name), rows)
    assert record["terms"] == kept and all(
        not value["task"] or key in kept for key, value in record["quantities"].items()
    )


def test_a_description_says_what_is_read() -> None:
    for rows, read in (((8, 8), "text and translation pairs"), ((8, 0), "text"), ((0, 8), "translation pairs")):
        said = describe(ObjectiveConfig("mlm"), rows)["description"]
        assert said == f"masked language modelling of one encoder, on {read}"
        assert f"token detection on {read}: " in describe(ObjectiveConfig(), rows)["description"]
    for name in OBJECTIVES:
        assert "{" not in describe(of(name).objective)["description"]


@pytest.mark.parametrize("name", [*GENERATORS, "rts", "mlm", "btmlm"])
def test_no_sample_of_a_probe_depends_on_rounding(name: str) -> None:
    """The generator samples token 0, and open places hold an ordinary one; no other objective samples or writes."""
    batch = open_batch([20, 37], 40, (0.1,)) if name == "btmlm" else usual_batch()
    objective = objective_of(of(name).objective)
    probe = objective.as_probe(batch)
    if name in GENERATORS:
        shown = lively(objective.build(SMALL))(probe).corrupted_BT.flatten()
        assert not shown[batch.masked_M].any() and (batch.uniforms_M > 0).all()
    elif name == "btmlm":
        places = batch.added["open_P"]
        assert (probe.tokens_BT.flatten()[places] == 4).all() and not probe.added
        assert int((probe.tokens_BT != batch.tokens_BT).sum()) == len(places) > 0
    else:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(probe.tensors(), batch.tensors(), strict=True))
