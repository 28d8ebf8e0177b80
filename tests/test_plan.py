"""The plan of every recipe: legal, counted on the meta device, and in agreement with the published figures."""

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.launch import python
from tests.small import SMALL, language_model, lively, model, usual_batch
from xlme_ds.config import DataConfig, ModelConfig, ObjectiveConfig, OptimizerConfig, RunConfig, TrainConfig
from xlme_ds.counting import (
    count_parameters,
    flops_of,
    flops_per_step,
    paper_forward_per_token,
    paper_training_flops,
)
from xlme_ds.engine_file import deepspeed_settings
from xlme_ds.models.electra import Electra
from xlme_ds.models.masked_head import GROUP_SIZE
from xlme_ds.models.text_encoder import LanguageModel
from xlme_ds.objectives import objective_of
from xlme_ds.plan.__main__ import main
from xlme_ds.plan.planner import plan
from xlme_ds.recipes import RECIPES, recipe
from xlme_ds.validate import validate

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = {"base": 279e6, "large": 840e6, "xl": 2.2e9}  # parameters of the discriminator


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_is_legal_and_can_be_built(name: str) -> None:
    run = validate(recipe(name))
    assert run.model.width % run.model.heads == 0
    if run.engine.deepspeed != "auto":
        (stage,) = re.findall(r"zero(\d)", run.engine.deepspeed)
        assert deepspeed_settings(run.engine)["zero_optimization"]["stage"] == int(stage)
    with torch.device("meta"):
        built = objective_of(run.objective).build(run.model)
    assert all(parameter.is_meta for parameter in built.parameters())
    assert count_parameters(run)["trained_total"] == sum(parameter.numel() for parameter in built.parameters())


@pytest.mark.parametrize(("size", "vocabulary"), [("base", 250_002), ("large", 2**19), ("xl", 2**19)])
def test_published_parameters(size: str, vocabulary: int) -> None:
    names = [name for name in RECIPES if name.split("_")[0] == size]
    assert names
    for name in names:
        run = recipe(name)
        assert run.model.vocabulary == vocabulary
        result = plan(run)
        assert result["parameters"]["discriminator"] == pytest.approx(PUBLISHED[size], rel=0.02)
        assert all(word in result["accounting"] for word in ("encoder", "head", "token embeddings", "2^19 = 524,288"))


def by_hand(cfg: ModelConfig) -> dict[str, int]:
    """Sizes from the dimensions alone."""
    d, f, heads, size = cfg.width, cfg.feed_forward, cfg.heads, cfg.width // cfg.heads
    layer = 3 * (d * d + d) + (d * d + d) + (d * f + f) + (f * d + d) + 2 * 2 * d + (2 * size + heads)
    around = cfg.max_positions * d + cfg.relative_buckets * heads + 2 * d
    embedding = cfg.vocabulary * d
    return {
        "embedding": embedding,
        "discriminator": embedding + cfg.discriminator_layers * layer + around + (d * d + d) + (d + 1),
        "generator": cfg.generator_layers * layer + around + (d * d + d) + 2 * d + cfg.vocabulary,
    }


@pytest.mark.parametrize("name", ["base_zero1", "xl_zero3"])
def test_parameters_by_hand(name: str) -> None:
    cfg, counts = recipe(name).model, plan(recipe(name))["parameters"]
    expected = by_hand(cfg)
    assert {key: counts[key] for key in expected} == expected
    assert counts["trained_total"] == expected["discriminator"] + expected["generator"]
    assert sum(counts["components"].values()) == counts["trained_total"]
    assert counts["components"]["embedding"] == expected["embedding"]


def test_a_difference_of_its_own_is_trained_on_top() -> None:
    tied, gdes = (
        count_parameters(RunConfig("test", model=replace(SMALL, embedding_sharing=kind))) for kind in ("tied", "gdes")
    )
    assert gdes == tied | {"trained_total": tied["trained_total"] + tied["embedding"]}


def test_published_operations_of_base() -> None:
    flops = plan(recipe("base_zero1"))["flops"]
    paper = flops["paper_convention"]
    assert round(paper["forward_per_token"] / 1e6, 2) == 252.84
    assert round(paper["mono"] / 1e19, 2) == 6.32 and round(paper["both"] / 1e19, 2) == 9.48
    assert round(flops["standard"]["both_para_half"] / 1e20, 2) == 1.83
    assert flops["standard"]["both"] == pytest.approx(2 * flops["standard"]["mono"])
    assert flops["per_step"] * 125_000 == pytest.approx(flops["standard"]["both"])


@pytest.mark.parametrize(
    ("settings", "layers", "head"),
    [
        (dict(), 1 + 2, 2 * (24**2 + 24)), (dict(name="all_tokens"), 1 + 2, 2 * (24**2 + 24)),
        (dict(name="rts"), 2, 2 * (24**2 + 24)), (dict(name="mlm"), 2, 0),
        (dict(name="btmlm", pseudo_fractions=(0.25,)), 2, 0),
    ],
)  # fmt: skip
def test_operations_as_the_paper_counts_them(settings: dict[str, Any], layers: int, head: float) -> None:
    """Without any softmax; as much again backwards, and the layers once more where a first pass precedes. 2^20 tokens
    count as a million, and half of the tokens of pairs."""
    two_passes = "pseudo_fractions" in settings
    rows = DataConfig(8, 0 if two_passes else 4)
    run = RunConfig("test", model=SMALL, objective=ObjectiveConfig(**settings), data=rows, train=TrainConfig(steps=10))
    layer = 2 * (4 * 24**2 + 2 * 24 * 40 + 2 * 32 * 24)
    assert paper_forward_per_token(run, 32) == layers * layer + head
    per_step = 32 * 1e6 / 2**20 * (2 * (layers * layer + head) + 2 * layer * two_passes)
    found = paper_training_flops(run, 32)
    assert found == pytest.approx({"mono": 80 * per_step, "both": (80 + run.data.para_rows * 10 / 2) * per_step})


def causal() -> LanguageModel:
    return lively(objective_of(ObjectiveConfig("clm", mask_fraction=1.0)).build(SMALL))


def no_generator() -> Electra:
    return lively(objective_of(ObjectiveConfig("rts")).build(SMALL))


def all_tokens() -> Electra:
    return lively(objective_of(ObjectiveConfig("all_tokens")).build(SMALL))


def corrective() -> Electra:
    return lively(objective_of(ObjectiveConfig("corrective")).build(SMALL))


def linear_head(**changes: Any) -> LanguageModel:
    return language_model(masked_head="linear", **changes)


@pytest.mark.parametrize(
    ("name", "built"),
    [
        ("electra", model),
        ("mlm", language_model),
        ("mlm", linear_head),
        ("clm", causal),
        ("rts", no_generator),
        ("all_tokens", all_tokens),
        ("corrective", corrective),
    ],
)
def test_operations_equal_torchs_counter(name: Any, built: Any) -> None:
    """Matrix products that a real forward pass performs, counted by torch, every position masked as the fraction
    says."""
    from torch.utils.flop_counter import FlopCounterMode

    batch = usual_batch(40)
    rows, tokens = batch.tokens_BT.shape
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        built()(batch)
    objective = ObjectiveConfig(name, mask_fraction=len(batch.masked_M) / (rows * tokens))
    cfg = replace(SMALL, masked_head="linear") if built is linear_head else SMALL
    expected = rows * tokens * flops_of(RunConfig("test", model=cfg, objective=objective), tokens).forward
    # Logits of groups of ids are computed again, of one for the most likely id and of another for the generator's
    # sample; that, as all that is computed twice, is no work done.
    masked = len(batch.masked_M)
    softmaxes = {"electra": 2 * masked, "rts": 0, "corrective": 3 * masked, "all_tokens": 2 * masked + rows * tokens}
    groups = softmaxes.get(name, masked)
    expected += 2 * groups * GROUP_SIZE * SMALL.width
    # The gates' products with a vector are left out by both.
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-9)


def test_operations_of_a_step_follow_the_rows() -> None:
    run = RunConfig(
        "test",
        model=SMALL,
        data=DataConfig(8, 4),
        train=TrainConfig(steps=10, log_every=1),
        optimizer=OptimizerConfig(warmup_steps=5),
    )
    assert flops_per_step(run, 32) == pytest.approx(3 * 12 * 32 * flops_of(run, 32).forward)
    mono = plan(replace(run, data=DataConfig(8, 0)))["flops"]["paper_convention"]
    assert mono["both"] == mono["mono"]
    both, row_tokens = plan(run), SMALL.max_positions  # twice as much text as pairs
    assert (both["tokens"]["mono"], both["tokens"]["para"]) == (10 * 8 * row_tokens, 10 * 4 * row_tokens)
    standard = both["flops"]["standard"]
    assert standard["mono"] == pytest.approx(3 * flops_of(run, row_tokens).forward * 10 * 8 * row_tokens)
    assert standard["both"] / standard["mono"] == pytest.approx(1.5)
    assert standard["both_para_half"] / standard["mono"] == pytest.approx(1.25)
    turns = replace(run, data=DataConfig(8, 8, alternate=True))
    assert flops_per_step(turns, 32) == pytest.approx(flops_per_step(replace(run, data=DataConfig(8, 0)), 32))
    assert plan(turns)["tokens"]["mono"] == plan(turns)["tokens"]["para"] == 10 * 4 * SMALL.max_positions


def test_published_parameters_of_xlm() -> None:
    """250M, as XLM-R's paper lists XLM on fifteen languages; each language adds a vector, the head no more than a
    bias."""
    counts = plan(recipe("xlm"))["parameters"]
    assert counts["encoder"] == pytest.approx(250e6, rel=0.006)
    d, layer = 1024, 4 * (1024**2 + 1024) + 2 * 1024 * 4096 + 4096 + 1024 + 4 * 1024
    assert counts["encoder"] == 95_000 * d + (256 + 15 + 2) * d + 12 * layer + 95_000
    assert counts["components"]["encoder.languages"] == 15 * 1024


def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return python("-m", "xlme_ds.plan", *arguments)


def test_the_command_prints_json_with_overrides() -> None:
    done = command("--recipe", "base_zero1", "--json", "--model.discriminator-layers", "6")
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    expected = plan(replace(recipe("base_zero1"), model=replace(recipe("base_zero1").model, discriminator_layers=6)))
    assert printed == expected


def test_the_command_prints_tables(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--recipe", "xl_zero3", "--details", "--gpus", "64"])
    printed = capsys.readouterr().out
    for words in ("trained_total", "2,168,381,569", "524,288", "the paper's"):
        assert words in printed
    found = plan(recipe("xl_zero3"), 64)
    standard, paper = found["flops"]["standard"], found["flops"]["paper_convention"]
    rows = {line.split("│")[1].strip(): re.findall(r"\d\S*", line) for line in printed.splitlines() if "│" in line}
    assert rows["standard"] == [f"{standard[kind]:.3g}" for kind in ("mono", "both", "both_para_half")]
    assert rows["the paper's"] == [f"{paper[kind]:.3g}" for kind in ("mono", "both")]
    words, seconds, of_gpu = " ".join(printed.split()), found["seconds_per_step"], found["tokens_per_s_per_gpu"]
    assert of_gpu == pytest.approx(found["tokens_per_s"] / 64, abs=1)
    assert f"sends {found['communication_bytes_per_step']['total'] / 1e9:.3g} GB a step" in words
    assert f"8 rows a micro-batch, {found['accumulation']} micro-batches a step" in words
    assert f"estimated {found['tokens_per_s']:,} tokens/s ({of_gpu:,} a GPU)" in words
    parts = [f"{name} {seconds[name]:.3g}" for name in ("compute", "bubble", "transfer", "offload")]
    assert f"a step {seconds['step']:.3g} s ({', '.join(parts)})" in words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--recipe", "base_zero9"], "there is no recipe 'base_zero9': did you mean base_zero1?"),
        (["--recipe", "base_zero1", "--layouts", "0"], "layouts is 0: it must be at least 1"),
        (["--recipe", "base_zero1", "--model.heads", "7"], "model.width 768 is not a multiple of model.heads 7"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    printed = capsys.readouterr().err
    assert words in printed and printed.count("\n") == 1
