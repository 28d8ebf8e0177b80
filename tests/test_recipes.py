"""Every published recipe against the tables of its paper, written out as numbers: nothing is read from a recipe or a
default.

A setting that no table has is stated with the reason why it is so (docs/papers.md). A new recipe, or a new setting of
the sections that shape a curve, fails until it is stated here.
"""

from dataclasses import asdict
from typing import Any

import pytest
from transformers import ModernBertConfig

from data_prep.mix.mix import MixConfig
from tests.small import SMALL, lively, model
from xlme_ds.config import EngineConfig, RunConfig, TrainConfig
from xlme_ds.engine.optimizer import build_optimizer
from xlme_ds.engine_file import zero_stage
from xlme_ds.finetune.downstream_tasks import DOWNSTREAM_TASKS
from xlme_ds.finetune.settings import TuningConfig, grid, run_config
from xlme_ds.objectives import objective_of
from xlme_ds.recipes import RECIPES, ernie_m, recipe
from xlme_ds.train.schedule import learning_rate
from xlme_ds.trained.modernbert import modernbert_config

# XLM-E, Tables 8 (generator) and 9 (discriminator). "250K" is XLM-R's vocabulary, 250,002 with `<mask>`; "500K" is
# 2^19.
XLME = {
    "base": dict(
        generator_layers=4, discriminator_layers=12, width=768, feed_forward=3072, heads=12, vocabulary=250_002
    ),
    "large": dict(
        generator_layers=6, discriminator_layers=24, width=1024, feed_forward=4096, heads=16, vocabulary=524_288
    ),
    "xl": dict(
        generator_layers=8, discriminator_layers=48, width=1536, feed_forward=6144, heads=24, vocabulary=524_288
    ),
}
# Settled for its sizes: 48 post-LN layers do not train reliably, and larger models get finer buckets.
SETTLED = {
    "base": dict(norm="post", relative_buckets=32, relative_max_distance=128),
    "large": dict(norm="pre", relative_buckets=128, relative_max_distance=256),
    "xl": dict(norm="pre", relative_buckets=128, relative_max_distance=256),
}
# Of every model of XLM-E: section 3.3's bias next to absolute positions, no dropout, tied embeddings, a head as
# XLM-R's.
ALL = dict(
    max_positions=512, absolute_positions=True, layout="xlme", language_embeddings=(), dropout=0.0,
    attention_dropout=0.0,
    embedding_norm=False, decoder="xlm", decoder_layers=0, body="xlme",
    norm_epsilon=1e-5, relative_bias="gated", embedding_sharing="tied", masked_head="dense",
    init_std=0.02,
)  # fmt: skip
# XLM-E, Table 10.
TABLE_10 = dict(
    learning_rate=5e-4, warmup_steps=10_000, beta1=0.9, beta2=0.98, epsilon=1e-6, weight_decay=0.01, clip=2.0
)
# ERNIE-M, Table 10; the clipping, which it has not, is XLM-E's.
ERNIE_M = {
    "base": dict(
        learning_rate=2e-4, warmup_steps=10_000, beta1=0.98, beta2=0.999, epsilon=1e-6, weight_decay=0.01, clip=2.0
    ),
    "large": dict(
        learning_rate=1e-4, warmup_steps=10_000, beta1=0.98, beta2=0.999, epsilon=1e-6, weight_decay=0.01, clip=2.0
    ),
}
ERNIE_M_MODEL = {
    "base": dict(discriminator_layers=12, width=768, feed_forward=3072, heads=12, vocabulary=250_002),
    "large": dict(discriminator_layers=24, width=1024, feed_forward=4096, heads=16, vocabulary=250_002),
}
# XLM, section 5.1 and its code: Adam at 1e-4 with torch's betas and epsilon, clipping at 5, no decay. The warm-up is
# XLM-E's.
XLM_ADAM = dict(
    learning_rate=1e-4, warmup_steps=10_000, beta1=0.9, beta2=0.999, epsilon=1e-8, weight_decay=0.0, clip=5.0
)
XLM_MODEL = dict(
    discriminator_layers=12, width=1024, feed_forward=4096, heads=8, vocabulary=95_000, max_positions=256, layout="xlm",
    language_embeddings=("ar", "bg", "de", "el", "en", "es", "fr", "hi", "ru", "sw", "th", "tr", "ur", "vi", "zh-Hans"),
    dropout=0.1, attention_dropout=0.1, norm="post", norm_epsilon=1e-12, relative_bias="none", masked_head="linear",
)  # fmt: skip
# XLM's translation: section 5.1 and its code's `adam_inverse_sqrt,beta1=0.9,beta2=0.98,lr=0.0001`, of 4,000 steps of
# warm-up.
MT_ADAM = XLM_ADAM | dict(warmup_steps=4000, beta2=0.98)
LINEAR = dict(name="linear", decay_steps=0)
INVERSE_SQRT = dict(name="inverse_sqrt", decay_steps=0)
ONE_ENCODER = dict(norm="post", relative_bias="none")  # XLM-R's, and what goes on from it
MILLION = 2048  # rows of 512: 2^20 tokens, "1M" (XLM-E, appendix B)

# λ of XLM-E (section 3.2) and what is masked; 80/10/10 for the others (BERT's, of XLM-R and XLM).
OBJECTIVE = dict(
    mask_fraction=0.15, random_fraction=0.1, keep_fraction=0.1, discriminator_weight=50.0, pseudo_fractions=(),
    denoising=(), back_translation=(),
    generator_temperature=1.0, generator_keep_fraction=0.0, random_fakes=(), z_loss=0.0,
)  # fmt: skip
ELECTRA, MLM = OBJECTIVE | dict(name="electra"), OBJECTIVE | dict(name="mlm")
STAGE_1 = OBJECTIVE | dict(name="ernie_m")
STAGE_2 = OBJECTIVE | dict(name="btmlm", pseudo_fractions=(0.05, 0.1, 0.15, 0.2))
CLM = OBJECTIVE | dict(name="clm", mask_fraction=1.0)
MT = OBJECTIVE | dict(name="mt", mask_fraction=1.0)


def xlme(size: str, rows: tuple[int, int] = (MILLION, MILLION), **model: Any) -> dict[str, Any]:
    return dict(
        model=ALL | SETTLED[size] | XLME[size] | model, objective=ELECTRA, optimizer=TABLE_10, rows=rows, steps=125_000
    )


def one(model: dict[str, Any], objective: dict[str, Any], optimizer: dict[str, Any], **others: Any) -> dict[str, Any]:
    rest: dict[str, Any] = dict(rows=(MILLION, 0), steps=125_000) | others
    return dict(model=ALL | ONE_ENCODER | model, objective=objective, optimizer=optimizer, **rest)


def stage(size: str, steps: int, objective: dict[str, Any], rows: tuple[int, int]) -> dict[str, Any]:
    of = ERNIE_M_MODEL[size] | dict(dropout=0.1, attention_dropout=0.1)
    return one(of, objective, ERNIE_M[size], rows=rows, steps=steps, take="encoder")


_BASE = {name: value for name, value in XLME["base"].items() if name != "generator_layers"}
EXPECTED: dict[str, dict[str, Any]] = {
    "base": xlme("base"),
    "large": xlme("large"),
    "xl": xlme("xl"),
    "base_zero1": xlme("base"),
    "large_zero2": xlme("large"),
    "large_pipe": xlme("large"),
    "xl_zero3": xlme("xl"),
    "xl_pipe": xlme("xl"),
    # Table 2: without TRTD, and besides without the bias; XLM-R under the same training, alone and with TLM.
    "xlme": xlme("base"),
    "xlme_no_trtd": xlme("base", (MILLION, 0)),
    "xlme_no_gate": xlme("base", (MILLION, 0), relative_bias="none"),
    # ELECTRA's control (section 3.4) under the same training.
    "xlme_all_tokens": xlme("base") | dict(objective=OBJECTIVE | dict(name="all_tokens")),
    "xlmr": one(_BASE, MLM, TABLE_10),
    "xlmr_tlm": one(_BASE, MLM, TABLE_10, rows=(MILLION, MILLION)),
    # Ours: XLM-E's models in XLM-R's shape at the rates at which ERNIE-M goes on from it, a quarter of the warm-up.
    "continue_xlmr": xlme("base")
    | dict(optimizer=TABLE_10 | dict(learning_rate=2e-4, warmup_steps=2500), steps=50_000, take="encoder"),
    "continue_xlmr_large": xlme("large", norm="post", vocabulary=250_002)
    | dict(optimizer=TABLE_10 | dict(learning_rate=1e-4, warmup_steps=2500), steps=50_000, take="encoder"),
    "ernie_m": stage("base", 150_000, STAGE_1, (1024, 1024)),
    "ernie_m_stage2": stage("base", 150_000, STAGE_2, (2048, 0)),
    "ernie_m_large": stage("large", 200_000, STAGE_1, (1024, 1024)),
    "ernie_m_large_stage2": stage("large", 200_000, STAGE_2, (2048, 0)),
    # 64 streams of 256 tokens on each of 64 GPUs (section 5.1); MLM and TLM in turns.
    "xlm": one(XLM_MODEL, MLM, XLM_ADAM, rows=(4096, 4096), alternate=True),
    "xlm_clm": one(XLM_MODEL, CLM, XLM_ADAM, rows=(4096, 0)),
    # 64 rows of 256 are 2,000 tokens on each of 8 GPUs; 60,000 is the number of its codes.
    "xlm_mt": one(
        XLM_MODEL | dict(vocabulary=60_000, discriminator_layers=6, language_embeddings=("en", "ro")),
        MT,
        MT_ADAM,
        rows=(0, 64),
        steps=100_000,
        take="encoder",
        schedule=INVERSE_SQRT,
    ),
    # The weights of section 5.2's code: denoising fades from 1 to 0.1 at 100,000 steps, to 0 at 300,000.
    "xlm_umt": one(
        XLM_MODEL | dict(vocabulary=60_000, discriminator_layers=6, language_embeddings=("en", "fr")),
        MT | dict(denoising=("0:1", "100000:0.1", "300000:0"), back_translation=("0:1",)),
        MT_ADAM,
        rows=(64, 0),
        steps=100_000,
        take="encoder",
        schedule=INVERSE_SQRT,
    ),
    # Base with half as many layers in DeltaLM's decoder (its 12 + 6), and XNLI's languages.
    "xlme_mt": dict(
        model=ALL
        | SETTLED["base"]
        | XLME["base"]
        | dict(dropout=0.1, decoder="interleaved", language_embeddings=XLM_MODEL["language_embeddings"]),
        objective=MT,
        optimizer=MT_ADAM,
        rows=(0, 64),
        steps=100_000,
        take="discriminator",
        schedule=INVERSE_SQRT,
    ),
}
ENGINES = {"zero1": ("deepspeed", 1), "zero2": ("deepspeed", 2), "zero3": ("deepspeed", 3), "pipe": ("pipeline", 1)}
# These change speed and memory, not the curve; or only ModernBERT's body reads them.
FREE = (
    *("vocabulary_blocks", "kernels", "compile", "head_chunk", "activation_checkpointing"),
    *("local_window", "global_every", "rotary_base", "local_rotary_base"),
)
NOT_READ = (
    "generator_layers",
    "relative_buckets",
    "relative_max_distance",
    "embedding_sharing",
)  # of one encoder without bias


def stated(run: RunConfig) -> dict[str, Any]:
    """A recipe's settings in the form of `EXPECTED`, with all that may shape its curve."""
    sections = asdict(run)
    without = FREE if "generator" in objective_of(run.objective).encoders else FREE + NOT_READ
    assert sections["optimizer"].pop("layer_decay") == 1.0, "it is for fine-tuning"
    assert sections["optimizer"].pop("discriminator_rate") == 1.0, "no paper has two rates"
    data = sections["data"]
    of_phases = {"phase_steps", "phase_mask_fractions", "phase_rotary_bases"}
    assert data.keys() == {"mono_rows", "para_rows", "micro_batch", "alternate"} | of_phases
    assert not any(data[name] for name in of_phases), "all read one folder"
    return {
        "model": {name: value for name, value in sections["model"].items() if name not in without},
        "objective": sections["objective"],
        "optimizer": sections["optimizer"],
        "rows": (data["mono_rows"], data["para_rows"]),
        "alternate": data["alternate"],
        "steps": run.train.steps,
        "schedule": sections["schedule"],
        "take": run.start.take,
    }


def test_every_recipe_is_stated() -> None:
    others = {"quickstart", *MODERN}  # chosen by trial; see below
    assert EXPECTED.keys() == RECIPES.keys() - others
    assert all(run.name == name for name, run in RECIPES.items())


@pytest.mark.parametrize("name", EXPECTED)
def test_a_recipe_is_its_papers_tables(name: str) -> None:
    run, expected = recipe(name), dict(alternate=False, take="all", schedule=LINEAR) | EXPECTED[name]
    found = stated(run)
    if "generator" not in objective_of(run.objective).encoders:
        expected["model"] = {key: value for key, value in expected["model"].items() if key not in NOT_READ}
    assert found.pop("model") == expected.pop("model")
    assert found == expected
    kind, stage = ENGINES.get(name.rsplit("_", 1)[1] if "_" in name else "", ("deepspeed", 1))
    assert run.engine.kind == kind
    assert run.engine.deepspeed == "auto" if name in ("base", "large", "xl") else zero_stage(run.engine) == stage
    assert run.seed == 1
    assert not run.start.folder or name.startswith("continue_xlmr"), "which would be something else without it"


# Rows of a micro-batch, with which a run fits the GPUs of its summary (tests/plan/test_planner.py).
MICRO_BATCHES = {"base": 64, "large": 32, "xl": 8, "large_zero2": 8, "large_pipe": 8, "xl_zero3": 4, "xl_pipe": 4}
MICRO_BATCHES |= {"continue_xlmr_large": 8, "ernie_m_large": 8, "ernie_m_large_stage2": 8, "xlm": 64, "xlm_clm": 64}
MICRO_BATCHES |= {"xlm_mt": 8, "xlm_umt": 8, "xlme_mt": 8, "quickstart": 8}
STAGES = {"large_pipe": 2, "xl_pipe": 4}
ENGINE = dict(
    kind="deepspeed", precision="auto", gradient_precision="auto", pipeline_stages=2, pipeline_schedule="1f1b",
    balance=(), offload_optimizer="none", offload_parameters="none", nvme_folder="",
)  # fmt: skip
TRAIN = dict(
    eval_every=5000, eval_rows=512, save_every=2500, keep_last=3, keep_every=25_000, save_buffer_gib=4.0,
    max_bad_steps=10, spike_sigma=0.0, watchdog_minutes=30.0, wandb="", audit=False,
)  # fmt: skip
STARTS = {"continue_xlmr": "xlm-roberta-base", "continue_xlmr_large": "xlm-roberta-large"}


@pytest.mark.parametrize("name", RECIPES)
def test_how_a_recipe_is_run(name: str) -> None:
    """What no paper has: 16 rows at once if nothing else is stated; XL under 24 GB drops activations; all else is as
    ever, but that tasks in turns are logged in turns."""
    run = recipe(name)
    assert run.data.micro_batch == MICRO_BATCHES.get(name, 16)
    assert run.start.folder == STARTS.get(name, "")
    assert run.model.activation_checkpointing == (name in ("xl_zero3", "xl_pipe"))
    changes = dict(kind="pipeline", pipeline_stages=STAGES[name]) if name in STAGES else {}
    assert asdict(run.engine) == ENGINE | dict(deepspeed=run.engine.deepspeed) | changes
    if name != "quickstart":
        assert asdict(run.train) == TRAIN | dict(steps=run.train.steps, log_every=11 if name == "xlm" else 10)


MODERN = ("modern_base", "modern_base_mlm")


@pytest.mark.parametrize("name", MODERN)
def test_modern_base_is_modernbert_base(name: str) -> None:
    """The size and shape that transformers has as ModernBERT's defaults, next to another vocabulary."""
    run, theirs = recipe(name), ModernBertConfig()
    ours, config = modernbert_config(run.model), theirs.to_dict()
    assert {key: value for key, value in ours.items() if config.get(key, value) != value}.keys() <= {
        "vocab_size",
        "max_position_embeddings",  # rows of its first phase
        *("cls_token_id", "sep_token_id"),
    }
    assert 3 * run.model.generator_layers <= run.model.discriminator_layers + 2
    found = stated(run)
    assert found["objective"] == (MLM | dict(mask_fraction=0.3) if name.endswith("mlm") else ELECTRA)
    assert (found["rows"], found["steps"], found["optimizer"]) == ((1024, 1024), 125_000, TABLE_10), "1M tokens of each"
    assert (found["schedule"], found["alternate"], found["take"]) == (LINEAR, False, "all")


SCHEDULES = {
    "large_pipe": (5e-4, 125_000),
    "ernie_m": (2e-4, 150_000),
    "ernie_m_large": (1e-4, 200_000),
    "xlm": (1e-4, 125_000),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_its_schedule_is_linear(name: str) -> None:
    """Up to the published peak in 10,000 steps, then down to 0 at the last; of XLM-E 125,000 (Table 10)."""
    peak, steps = SCHEDULES[name]
    cfg = recipe(name).optimizer
    rates = {step: learning_rate(step, steps, cfg) for step in range(0, steps, 2500)} | {
        9_999: learning_rate(9_999, steps, cfg)
    }
    for step, rate in rates.items():
        expected = peak * (step + 1) / 10_000 if step < 10_000 else peak * (steps - step) / (steps - 10_000)
        assert rate == pytest.approx(expected, rel=1e-12)
    assert max(rates.values()) == rates[9_999] == peak


def test_sampling() -> None:
    """XLM-E and XLM sample languages with α = 0.7, which is `mix`'s default; ERNIE-M's 0.1 has to be asked for, and
    the recipes say so."""
    assert MixConfig.__dataclass_fields__["alpha"].default == 0.7
    assert "--alpha 0.1" in (ernie_m.__doc__ or "")


# XLM-E, Table 11: batches, rates (1e-6), epochs, and XNLI's warm-up in steps; linear, no decay, else a tenth of
# warm-up.
TABLE_11 = {
    "pos": ((8, 16, 32), (10, 20, 30), (10,), 0),
    "ner": ((8,), (5, 6, 7, 8, 9), (10,), 0),
    "xquad": ((32,), (20, 30, 40), (4,), 0),
    "mlqa": ((32,), (20, 30, 40), (2, 3, 4), 0),
    "tydiqa": ((32,), (20, 30, 40), (10, 20, 40), 0),
    "xnli": ((32,), (5, 6, 7, 8), (10,), 12_500),
    "pawsx": ((32,), (8, 9, 10, 20), (10,), 0),
}


@pytest.mark.parametrize("name", TABLE_11)
def test_fine_tuning_has_its_published_grid(name: str) -> None:
    task, (batches, rates, epochs, warmup) = DOWNSTREAM_TASKS[name], TABLE_11[name]
    assert (task.batch_sizes, task.epochs, task.warmup_steps) == (batches, epochs, warmup)
    assert task.learning_rates == pytest.approx([rate * 1e-6 for rate in rates])
    found = {(one.batch, round(one.learning_rate * 1e6), one.epochs) for one in grid(name, TuningConfig())}
    assert found == {(batch, rate, number) for batch in batches for rate in rates for number in epochs}
    tuning = TuningConfig().completed(task, SMALL)
    run = run_config(name, tuning, SMALL, EngineConfig(), TrainConfig(), 1, 400_000, "")
    assert run.optimizer.weight_decay == 0 and run.optimizer.layer_decay == 1
    assert run.optimizer.warmup_steps == (warmup or run.train.steps // 10)


# Of a small model with every kind of parameter: decay on matrices and tables, none on biases, norms and other vectors.
DECAY = {
    "embedding_0", "difference_0",
    *(
        f"{encoder}.{name}"
        for encoder in ("generator", "discriminator")
        for name in (
            "positions", "languages", "relative.weight", "layers.0.attention.qkv.weight",
            "layers.0.attention.output.weight",
            "layers.0.up.weight", "layers.0.down.weight",
        )
    ),
    "masked_head.dense.weight", "replaced_head.dense.weight", "replaced_head.output.weight",
}  # fmt: skip
NO_DECAY = {
    *(
        f"{encoder}.{name}"
        for encoder in ("generator", "discriminator")
        for name in (
            "input_norm.weight", "input_norm.bias", "output_norm.weight", "output_norm.bias",
            "layers.0.attention.qkv.bias", "layers.0.attention.output.bias", "layers.0.up.bias", "layers.0.down.bias",
            "layers.0.attention.gate.update", "layers.0.attention.gate.reset", "layers.0.attention.gate.scale",
            "layers.0.attention_norm.weight", "layers.0.attention_norm.bias",
            "layers.0.feed_forward_norm.weight", "layers.0.feed_forward_norm.bias",
        )
    ),
    "masked_head.dense.bias", "masked_head.norm.weight", "masked_head.norm.bias", "masked_head.bias",
    "replaced_head.dense.bias", "replaced_head.output.bias",
}  # fmt: skip


@pytest.mark.parametrize("name", ["large_zero2", "ernie_m", "xlm"])
def test_weight_decay_and_the_settings_of_the_optimizer(name: str) -> None:
    of = lively(
        model(
            norm="pre",
            embedding_norm=True,
            embedding_sharing="gdes",
            language_embeddings=("de", "en"),
            discriminator_layers=1,
        )
    )
    optimizer = build_optimizer(of, recipe(name).optimizer)
    names = {id(parameter): name for name, parameter in of.named_parameters()}
    groups = {names[id(parameter)]: group for group in optimizer.param_groups for parameter in group["params"]}
    assert groups.keys() == DECAY | NO_DECAY == set(names.values())
    table = {"large_zero2": TABLE_10, "ernie_m": ERNIE_M["base"], "xlm": XLM_ADAM}[name]
    for parameter, group in groups.items():
        assert group["weight_decay"] == (table["weight_decay"] if parameter in DECAY else 0.0), parameter
        assert group["betas"] == (table["beta1"], table["beta2"]) and group["eps"] == table["epsilon"]
        assert group["lr"] == table["learning_rate"] and group["scale"] == 1.0
    assert type(optimizer).__name__ == "AdamW", "its decay is decoupled"
