"""Machine translation as an objective: what it refuses, its operations, and which places it predicts."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.worker import tiny
from tests.rows import write_data
from tests.small import SMALL, batch_of
from tests.translate.test_model import MT, config, packed, texts, translator
from xlme_ds.config import DataConfig, ObjectiveConfig, OptimizerConfig, RunConfig, StartConfig, TrainConfig
from xlme_ds.counting import count_parameters, flops_of
from xlme_ds.data.loader import HeldOutLoader, Loader
from xlme_ds.data.schema import LAYOUTS, UNK
from xlme_ds.data.unigram import unigram_nll_by_id
from xlme_ds.engine.build import build_engine
from xlme_ds.models.masked_head import GROUP_SIZE
from xlme_ds.objectives import objective_of
from xlme_ds.train.opening import pretraining_info
from xlme_ds.validate import validate

MT_ON_SENTENCES = dict(objective="mt", language_embeddings=("fr", "en", "de"), para_rows=0)
RUN = RunConfig("test", model=config(), objective=ObjectiveConfig("mt", mask_fraction=1.0), data=DataConfig(0, 8, 8))


@pytest.mark.parametrize(
    ("section", "changes", "message"),
    [
        ("model", dict(language_embeddings=()), "the language to translate into by its embedding: set model.language_"),
        ("model", dict(compile="layers"), "model.compile layers is not for objective.name mt"),
        ("model", dict(decoder_layers=-1), "model.decoder_layers is -1: it must not be negative"),
        (
            "data",
            dict(mono_rows=8),
            "data.mono_rows is 8, but objective.name mt reads .*: set one of these, or data.mono_rows to 0",
        ),
        ("objective", dict(denoising=("0:1",)), "but data.mono_rows is 0: raise data.mono_rows"),
        (
            "objective",
            dict(back_translation=("5:1",)),
            "objective.back_translation: the weights 5:1 do not have the form STEP:WEIGHT with rising steps from 0",
        ),
        (
            "objective",
            dict(denoising=("0:1", "3")),
            "objective.denoising: the weights 0:1 3 do not have the form STEP:",
        ),
        ("objective", dict(back_translation=("0:1", "0:2")), "do not have the form STEP:WEIGHT"),
        ("objective", dict(back_translation=("0:x",)), "do not have the form STEP:WEIGHT"),
        ("objective", dict(mask_fraction=0.15), "predicts every token: set it to 1"),
        (
            "objective",
            dict(pseudo_fractions=(0.1,)),
            r"objective.pseudo_fractions is \(0.1,\), and objective.name mt does not read it: leave it empty",
        ),
        ("objective", dict(z_loss=1e-4), "objective.z_loss is 0.0001, and objective.name mt does not read it"),
        ("objective", dict(keep_fraction=0.2), "objective.keep_fraction is 0.2, and objective.name mt does not read"),
        ("objective", dict(generator_temperature=2.0), "objective.generator_temperature is 2.0, and objective.name mt"),
        ("objective", dict(generator_keep_fraction=0.1), "generator_keep_fraction is 0.1, and objective.name mt"),
        ("objective", dict(discriminator_weight=1.0), "objective.discriminator_weight is 1.0, and objective.name mt"),
        ("engine", dict(kind="pipeline", deepspeed="pipe_zero1"), "engine.kind pipeline does not cut a decoder"),
    ],
)
def test_what_is_refused(section: str, changes: dict[str, Any], message: str) -> None:
    validate(RUN)
    with pytest.raises(ValueError, match=message):
        validate(replace(RUN, **{section: replace(getattr(RUN, section), **changes)}))


def test_there_must_be_a_decoder_to_start() -> None:
    mlm = RunConfig("test", model=SMALL, objective=ObjectiveConfig("mlm"), start=StartConfig(into="decoder"))
    with pytest.raises(
        ValueError, match=r"start.into is decoder, and objective.name mlm does not read it: leave it at both"
    ):
        validate(mlm)
    with pytest.raises(ValueError, match=r"start.into decoder is for a run that starts from another model: set start."):
        validate(replace(RUN, start=StartConfig(into="decoder")))
    with pytest.raises(
        ValueError, match=r"model.decoder_layers is 1, and objective.name mlm does not read it: leave it at 0"
    ):
        validate(replace(mlm, start=StartConfig(), model=replace(SMALL, decoder_layers=1)))
    for start, words in (
        (StartConfig(decoder="other"), "start.decoder other is for a run that starts from another model"),
        (
            StartConfig("run", decoder="other"),
            "start.decoder other works only if one encoder is taken from",
        ),
        (StartConfig("run", "encoder", "decoder", "other"), "each say what the decoder starts from: leave start.into"),
    ):
        with pytest.raises(ValueError, match=words):
            validate(replace(RUN, start=start))
    with pytest.raises(
        ValueError, match=r"start.decoder is other, and objective.name mlm does not read it: leave it empty"
    ):
        validate(replace(mlm, start=StartConfig("run", "encoder", decoder="other")))
    whole = replace(RUN, start=StartConfig("run", "all", "decoder"))
    with pytest.raises(ValueError, match=r"start.into decoder works only if one encoder is taken from start.folder"):
        validate(whole)
    validate(replace(whole, start=replace(whole.start, take="encoder")))


@pytest.mark.parametrize(
    ("denoising", "back", "para_rows", "message"),
    [
        (("0:1", "100:0"), (), 0, "are both 0 in step 100, so this step would train nothing"),
        (("0:1", "100:0"), ("0:0", "99:0", "200:1"), 0, ""),
        (("0:1", "100:0"), ("0:0", "100:0", "200:1"), 0, "are both 0 in step 100"),
        (("0:1", "120:0"), (), 0, ""),  # the run has 120 steps
        (("0:0", "5:1"), (), 0, "are both 0 in step 0"),
        (("0:1", "100:0"), (), 8, ""),
        (("0:1",), ("0:0", "9:0"), 8, "objective.back_translation is 0 in all steps: leave it empty"),
        (("0:1",), ("0:0", "119:0", "200:0", "300:1"), 8, "objective.back_translation is 0 in all steps"),
        (("0:1",), ("0:0", "118:0", "200:1"), 0, ""),  # not 0 in step 119, the last
    ],
)
def test_every_step_has_a_term(denoising: tuple[str, ...], back: tuple[str, ...], para_rows: int, message: str) -> None:
    objective = replace(RUN.objective, denoising=denoising, back_translation=back)
    run = replace(RUN, objective=objective, data=DataConfig(8, para_rows, 8), train=TrainConfig(steps=120))
    run = replace(run, optimizer=OptimizerConfig(warmup_steps=5))
    with pytest.raises(ValueError, match=message) if message else nullcontext():
        validate(run)
    if message == "" and para_rows:  # where tasks alternate, some steps read sentences alone
        with pytest.raises(ValueError, match="are both 0 in step 100"):
            validate(replace(run, data=replace(run.data, alternate=True), train=replace(run.train, log_every=9)))


def test_the_gradient_has_the_weights_of_the_step(tmp_path: Path) -> None:
    """Step 3 of a weight that falls is a step under what it has fallen to."""
    data, norms = write_data(tmp_path / "data", rows=32), []
    for points in (("0:0.4", "2:0.3", "4:0.2"), ("0:0.25",), ("0:1",)):
        run = tiny({"kind": "plain"}, 8, **MT_ON_SENTENCES, denoising=points)
        languages = run.model.language_embeddings
        loader = Loader(data, run.data, run.seed, 1.0, 0, 1, languages, objective_of(run.objective))
        engine = build_engine(run, loader, None)
        norms.append(engine.train_batch(3, 1e-3, detailed=False).gradient_norm)
    assert norms[0] == pytest.approx(norms[1], rel=1e-6) and norms[2] == pytest.approx(4 * norms[1], rel=1e-4)


@pytest.mark.parametrize("changes", [{}, dict(decoder="interleaved"), dict(decoder_layers=1, masked_head="linear")])
def test_operations_equal_torchs_counter(changes: dict[str, object]) -> None:
    """Rows of one pair each, 16 source tokens and 16 targets."""
    from torch.utils.flop_counter import FlopCounterMode

    batch = packed(
        [[(pair[0].repeat(20)[:14], pair[1].repeat(20)[:15]) for pair in row[:1]] for row in texts()], width=32
    )
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        translator(**changes)(batch)
    expected = 64 * flops_of(replace(RUN, model=config(**changes)), 32).forward
    expected += 2 * 32 * GROUP_SIZE * SMALL.width  # the logits of a group of ids for the most likely one
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-9)


def test_operations_of_sentences() -> None:
    """Two sentences of 32 tokens, all of them in the source twice; what is written is no part of the forward pass."""
    from torch.utils.flop_counter import FlopCounterMode

    items = [[[0, *range(10, 40), 2]]] * 2
    batch = batch_of(items, [], 32, mask_fraction=1.0)
    batch = batch.with_added(noised_BT=batch.tokens_BT)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        translator()(batch)
    once = replace(RUN, model=config(), objective=replace(RUN.objective, denoising=("0:1",)))
    both = replace(RUN, model=config(), objective=replace(once.objective, back_translation=("0:1",)))
    flops, twice = flops_of(once, 32), flops_of(both, 32)
    # 62 targets, and the logits of a group of ids for the most likely one.
    expected = 64 * flops.forward - 2 * flops.softmax + 2 * 62 * GROUP_SIZE * SMALL.width
    assert counter.get_total_flops() == pytest.approx(expected, rel=1e-9)
    assert twice.forward == pytest.approx(2 * flops.forward)
    assert twice.training == pytest.approx(3 * twice.forward + flops.forward) and flops.training == 3 * flops.forward


def test_every_parameter_is_counted() -> None:
    counts, model = count_parameters(RUN), translator()
    decoder = sum(value.numel() for value in model.decoder.parameters())
    assert counts["trained_total"] == counts["encoder"] + decoder


@pytest.mark.parametrize("layout", ["xlme", "xlm"])
def test_places(layout: str) -> None:
    """Of 3 and 2 tokens, and of 1 and 4: those of the second sides, and the `</s>` after them."""
    made = [LAYOUTS[layout].item(torch.arange(5, 5 + a).numpy(), torch.arange(30, 30 + b).numpy()).tolist()
            for a, b in ((3, 2), (1, 4))]  # fmt: skip
    batch = batch_of([], [made], 24, mask_fraction=1.0)
    wider = layout == "xlm"
    first = range(5 + wider, 8 + wider)  # after <s> a b c </s>, in XLM's layout with one more </s>
    start = first.stop + 3 + wider
    assert MT.predicted_positions(batch).tolist() == [*first, *range(start, start + 5)]
    assert MT.counts(batch).tolist() == [8.0]


def test_a_unigram_model_is_asked_for_targets_alone(tmp_path: Path) -> None:
    """The sources, which may all be of other languages, are no part of the loss."""
    config = tiny({"kind": "plain"}, 8, objective="mt", language_embeddings=("fr", "en", "de"))
    config = replace(config, data=DataConfig(0, 8, 8))
    data, unseen = (write_data(tmp_path / str(seed), 16, seed=seed) for seed in (0, 1))
    read = config.data, config.seed, 1.0, 0, 1, config.model.language_embeddings, MT
    loader, heldout = Loader(data, *read), HeldOutLoader(unseen, *read)
    info = pretraining_info(config, loader, heldout, root=True)
    assert info.summarise is not None
    totals = {"sums": torch.ones(1), "counts": torch.ones(1), "statistics": torch.zeros(MT.statistics_shape)}
    overall, _ = info.summarise(0, torch.zeros(2, 1, 3), **totals)
    (batch,) = heldout.micro_batches(0)
    tokens = batch.tokens_BT.flatten()[MT.predicted_positions(batch)].numpy()
    costs = unigram_nll_by_id(loader.shares(1, 1))
    assert overall["unigram_nll_para"] == pytest.approx(costs[tokens[tokens > UNK]].mean())
