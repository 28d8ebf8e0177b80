"""The settings of a run: frozen dataclasses with each setting's type, range, default and help text.

`xlme_ds.validate` checks the ranges and the relations between settings. A recipe (`xlme_ds.recipes`) returns a
`RunConfig`; each part of the program takes the section that it needs. This module imports no torch.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, TypeVar, get_type_hints

Settings = TypeVar("Settings")
Number = TypeVar("Number", int, float)


@dataclass(frozen=True)
class Range:
    """The numbers that a setting may have. A `Range` is part of the setting's type."""

    wording: str
    """Completes the error "SETTING is VALUE: it must …"."""
    contains: Callable[[float], bool] = field(repr=False)
    most: float = 1e9
    """The largest number allowed: with a larger one, numbers would overflow or the run would never finish."""


Count = Annotated[int, Range("be at least 1", lambda value: value >= 1)]
Size = Annotated[int, Range("be at least 1", lambda value: value >= 1, most=2**20)]
SmallCount = Annotated[int, Range("be at least 1", lambda value: value >= 1, most=1_000)]
Seed = Annotated[int, Range("not be negative", lambda value: value >= 0, most=2**63 - 1)]
NotNegative = Annotated[Number, Range("not be negative", lambda value: value >= 0)]
Positive = Annotated[float, Range("be positive", lambda value: value > 0)]
PositiveOrInfinite = Annotated[float, Range("be positive", lambda value: value > 0, most=math.inf)]
BelowOne = Annotated[float, Range("be at least 0 and below 1", lambda value: 0 <= value < 1)]
# `models.dropout` counts rates in 65,536ths, and no rate may round to 1.
DropoutRate = Annotated[float, Range("be at least 0 and at most 0.9999", lambda value: 0 <= value <= 0.9999)]
UpToOne = Annotated[float, Range("be above 0, up to 1", lambda value: 0 < value <= 1)]
Buckets = Annotated[
    int,
    Range("be even and at least 4 (half for each direction)", lambda value: value >= 4 and value % 2 == 0, most=2**20),
]
Window = Annotated[int, Range("be even and at least 2", lambda value: value >= 2 and value % 2 == 0)]
Stages = Annotated[int, Range("be at least 2, or use engine.kind deepspeed", lambda value: value >= 2, most=1_000)]

# Names of the encoders in pre-training models; an encoder's parameters have names that begin with its name and a dot.
EncoderName = Literal["encoder", "discriminator", "generator"]
ModelType = Literal["xlme", "xlm-roberta", "modernbert"]  # `model_type` of an export

# Metadata of settings that only pre-training reads: `xlme finetune` has no option for them.
PRETRAINING_ONLY = {"only": "pretraining"}


def weight_at(points: Sequence[str], step: int) -> float:
    """The weight of a loss term in `step`, from `points` of the form STEP:WEIGHT, such as 0:1 100000:0.1 300000:0.

    The weight is linear between the steps of two points, and constant after the last point. Without points it is 0.
    Raises ValueError unless the steps begin at 0 and rise.
    """
    try:
        pairs = [(int(at), float(weight)) for at, _, weight in (point.partition(":") for point in points)]
    except ValueError:
        pairs = [(-1, -1.0)]  # fails the check below
    rising = all(a < b for (a, _), (b, _) in pairwise(pairs))
    if (pairs and pairs[0][0] != 0) or not rising or not all(0 <= weight < math.inf for _, weight in pairs):
        raise ValueError(
            f"the weights {' '.join(points)} do not have the form STEP:WEIGHT with rising steps from 0 on, as in 0:1 "
            "100000:0.1 300000:0"
        )
    weight, previous_step = 0.0, -1  # not used: the first point, at step 0, replaces both
    for point_step, point_weight in pairs:
        if step < point_step:
            return weight + (point_weight - weight) * (step - previous_step) / (point_step - previous_step)
        weight, previous_step = point_weight, point_step
    return weight


def point_steps(points: Sequence[str]) -> list[int]:
    """Step 0 and the steps of `points`, which have the form that `weight_at` takes; sorted, without repeats."""
    return sorted({0, *(int(point.partition(":")[0]) for point in points)})


@dataclass(frozen=True)
class ModelConfig:
    """Generator and discriminator share width, heads and feed-forward size (XLM-E, Tables 8 and 9).

    Objectives with one encoder use the discriminator's settings for this encoder and ignore the generator's settings.
    """

    vocabulary: Count = 250_002
    """Vocabulary size, `<pad>` and `<mask>` included; must equal that of the data, `--size` of `xlme prep vocab`."""
    width: Size = 768
    """Hidden size (Base 768, Large 1,024, XL 1,536); a multiple of `heads`."""
    heads: Size = 12
    """Attention heads of a layer; a head of XLM-E has size 64, so change `heads` together with `width`."""
    feed_forward: Size = 3072
    """Inner size of the feed-forward network; four times `width` in all published sizes."""
    generator_layers: SmallCount = 4
    """Transformer layers of the generator: a third (Base) to a sixth (XL) of the discriminator's."""
    discriminator_layers: SmallCount = 12
    """Transformer layers of the discriminator, the model that is used after pre-training, or of the only encoder."""
    max_positions: Size = 512
    """Largest number of tokens in a text or pair; with learned positions, the rows of their table."""
    absolute_positions: bool = True
    """Add a learned position embedding to every token. If this is off, only the relative bias shows the order."""
    body: Literal["xlme", "modern"] = "xlme"
    """xlme: layers of XLM-R and XLM-E; modern: layers of ModernBERT, with rotary positions, GeGLU, local and global
    attention, and no biases. modern fixes `norm`, `relative_bias` and similar settings: start from a recipe
    `modern_*`."""
    local_window: Window = 128
    """modern: tokens that a position sees in a local layer, half of them on each side of the position."""
    global_every: Count = 3
    """modern: attention is global in every layer whose index, from 0, is a multiple of this, and local in the
    others."""
    rotary_base: Positive = 160_000.0
    """modern: base of the rotary positions in global layers; raise it before training on longer rows (ModernBERT has
    10,000 for rows of 1,024)."""
    local_rotary_base: Positive = 10_000.0
    """modern: base of the rotary positions in local layers."""
    layout: Literal["xlme", "xlm"] = "xlme"
    """Special tokens around the sides of a text or pair; must be the `--layout` with which the data were mixed."""
    language_embeddings: tuple[str, ...] = ()
    """Codes of the languages that have a learned embedding, which is added to each of their tokens; name every
    language of the data, or none (XLM-E has none)."""
    decoder_layers: Annotated[int, Range("not be negative", lambda value: value >= 0, most=1_000)] = 0
    """Number of layers in the decoder of a translation model. 0 takes as many as the encoder has, or half as many if
    `decoder` is interleaved."""
    decoder: Literal["xlm", "interleaved"] = "xlm"
    """Sublayers of a decoder layer. xlm: self-attention, cross-attention, feed-forward; interleaved: self-attention,
    feed-forward, cross-attention, feed-forward, as in DeltaLM, where such a layer starts from two encoder layers."""
    dropout: DropoutRate = 0.0
    """Dropout of the embedded tokens and of each sublayer's output in training, except in XLM-E's generator; raise
    it (0.1) if a run repeats its data."""
    attention_dropout: DropoutRate = 0.0
    """Dropout of the attention weights in training, except in XLM-E's generator; above 0 it needs more memory, because
    the weights are stored."""
    norm: Literal["post", "pre"] = "post"
    """Layer norm after each sublayer, as in Base, or before it, as in Large and XL; deep models train more stably with
    pre."""
    embedding_norm: bool = False
    """Normalise the embedded tokens in models with `norm` pre too; models with `norm` post always normalise them."""
    norm_epsilon: Positive = 1e-5
    """Added to the variance in every layer norm; change it only to match published weights (XLM: 1e-12)."""
    relative_bias: Literal["gated", "plain", "none"] = "gated"
    """Bias of attention by distance. gated: with a gate (XLM-E section 3.3); plain: without the gate; none: no bias
    (the paper's ablation)."""
    relative_buckets: Buckets = 32
    """Distance buckets of the relative bias, both directions together; raise it for longer rows."""
    relative_max_distance: Size = 128
    """Distances of this many tokens and more share the last bucket."""
    embedding_sharing: Literal["tied", "gdes"] = "tied"
    """tied: both networks learn one embedding; gdes: the discriminator's embedding is a gradient-stopped copy of the
    generator's plus a learned difference (DeBERTa-v3), which takes the memory of a second table."""
    masked_head: Literal["dense", "linear"] = "dense"
    """Layers of the masked head before its output projection, which is tied to the embedding. dense: a dense layer,
    GELU and norm, as in BERT and XLM-R; linear: none, as in XLM."""
    vocabulary_blocks: SmallCount = 1
    """Store the embedding as this many parameters. One is fastest on a GPU. With more, offloading engines need smaller
    buffers (XL on NVMe: 16). A run may be resumed with another number."""
    init_std: Positive = 0.02
    """Standard deviation of the initial weights; raise it for narrow models (0.05 at width 128)."""
    kernels: Literal["auto", "torch", "triton"] = "auto"
    """Attention, GELU and vocabulary softmax on a GPU: our Triton kernels or torch's operations. auto takes Triton's in
    bf16 where they support the model (no attention dropout, heads of size 16, 32, 64 or 128); a CPU ignores it."""
    compile: Literal["auto", "none", "layers"] = "auto"
    """Compilation for speed on a GPU. layers: torch compiles the layers, which takes up to a minute at the first step.
    auto takes layers on a GPU, and none on a CPU or for translation."""
    head_chunk: Count = 8192
    """Vocabulary entries whose logits are computed at a time; lower it if the softmax runs out of memory."""
    activation_checkpointing: bool = False
    """Recompute activations in the backward pass: far less memory for about a third more computing."""

    @property
    def biases(self) -> bool:
        """Whether linear maps and norms have a bias. This does not apply to the output layers of heads."""
        return self.body == "xlme"


@dataclass(frozen=True)
class ObjectiveConfig:
    """The training objective; every term of the loss is a mean over the term's task in the global batch."""

    name: str = "electra"
    """electra: XLM-E's L_MLM + L_TLM + λ L_MRTD + λ L_TRTD; mlm: L_MLM + L_TLM of one encoder, as in XLM and XLM-R;
    ernie_m: mlm plus L_CAMLM, ERNIE-M's first stage; btmlm: L_BTMLM, ERNIE-M's second stage; clm: causal language
    modelling; rts: L_MRTD + L_TRTD of the discriminator alone, on random tokens (Di Liello et al., 2022); corrective:
    electra, but the discriminator also predicts the masked tokens (COCO-LM, METRO); all_tokens: electra, but the
    discriminator predicts all tokens, a control (Clark et al., 2020); mt: machine translation by encoder and decoder,
    from pairs or from monolingual sentences, as in XLM."""
    mask_fraction: float = 0.15
    """Share of the ordinary tokens of a text or pair that are predicted, or replaced if the objective is rts. It is 1
    for clm, which also predicts the ends of sentences, and for mt, which also predicts the end of the second side."""
    random_fraction: NotNegative[float] = 0.1
    """Share of the predicted positions that show a random token; electra does not use it."""
    keep_fraction: NotNegative[float] = 0.1
    """Share of the predicted positions that show the original token; the rest show `<mask>`. electra reads
    generator_keep_fraction instead."""
    discriminator_weight: NotNegative[float] = 50.0
    """λ of the paper, the weight of the discriminator's losses; 0 trains the generator alone."""
    generator_temperature: Positive = 1.0
    """τ: the generator's samples are drawn from softmax(logits / τ), as ELECTRA's code allows. Above 1 the samples are
    more varied, below 1 more plausible. The generator's loss does not change."""
    generator_keep_fraction: BelowOne = 0.0
    """Share of the predicted positions at which the generator reads the original token (0.15 in ELECTRA's code). The
    other positions show `<mask>`, as all positions do in XLM-E's equation (1)."""
    random_fakes: tuple[str, ...] = ()
    """Share of the generator's samples that are replaced by random tokens in the discriminator's input, as STEP:SHARE,
    linear in between. 0:1 3000:0 falls from all samples at step 0 to none at step 3,000: the discriminator can detect
    random tokens before the generator has learned anything (see rts). Empty: none. Evaluations never replace any."""
    z_loss: NotNegative[float] = 0.0
    """Weight of log² Z, which is added to every −log p of the generator or of an only encoder, to keep the softmax's
    normaliser Z near 1 (PaLM, section 5: 1e-4). The gradient includes it, the reported losses do not."""
    pseudo_fractions: tuple[UpToOne, ...] = ()
    """btmlm: number of tokens that the model writes after a sentence, as a share of the sentence's length. One of the
    shares given is drawn for each sentence."""
    denoising: tuple[str, ...] = ()
    """mt: weight of the loss of restoring monolingual sentences from noised ones, as STEP:WEIGHT, linear in between
    (XLM: 0:1 100000:0.1 300000:0). Empty: no such loss."""
    back_translation: tuple[str, ...] = ()
    """mt: weight of the loss of back-translation, which starts from the model's own translations of monolingual
    sentences, as STEP:WEIGHT (XLM: 0:1). Empty: no such loss."""


@dataclass(frozen=True)
class DataConfig:
    """Rows of each task that one optimizer step reads; 0 leaves a task out."""

    mono_rows: NotNegative[int] = 2048
    """Rows of monolingual text in a step (2,048 rows of 512 are the paper's 1M tokens); lower it, and the learning
    rate, for small runs."""
    para_rows: NotNegative[int] = 2048
    """Rows of packed translation pairs in a step."""
    micro_batch: Count = 16
    """Largest number of rows of each task that one process runs at once; lower it if memory runs out: the loss curve
    stays the same. The task with fewer rows in a step is cut into as many micro-batches as the other task."""
    alternate: bool = False
    """Steps read monolingual rows and pairs in turns, as XLM's MLM and TLM; no step reads both."""
    phase_steps: tuple[int, ...] = ()
    """Number of steps that read each of several `--data` folders, except the last folder, which is read until the end
    of the run. The setting may change on resume if the finished steps would have read the same rows. In a phase whose
    rows are k times as long, a step reads k times fewer rows."""
    phase_mask_fractions: tuple[float, ...] = ()
    """objective.mask_fraction for each folder, if it changes during the run (0.3, 0.15, 0.05 in mmBERT)."""
    phase_rotary_bases: tuple[Positive, ...] = ()
    """model.rotary_base for each of `phase_steps`, if the base differs from the last phase's base (ModernBERT: 10,000
    before the last phase, which has rows of 8,192 tokens)."""

    @property
    def mean_rows(self) -> tuple[float, float]:
        """Mean number of rows of each task in a step, (mono, para)."""
        steps = 2 if self.alternate else 1
        return self.mono_rows / steps, self.para_rows / steps


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, and a linear warm-up of its learning rate (XLM-E, Table 10)."""

    learning_rate: Positive = 5e-4
    """Peak learning rate, reached after the warm-up; lower it if the loss diverges."""
    warmup_steps: NotNegative[int] = 10_000
    """Steps in which the learning rate rises from zero; set a tenth of the steps in a short run."""
    beta1: BelowOne = 0.9
    """Decay of AdamW's mean of gradients, per step."""
    beta2: BelowOne = 0.98
    """Decay of AdamW's mean of squared gradients, per step; raise it (0.999) for small batches."""
    epsilon: Positive = 1e-6
    """Added to AdamW's divisor; change it only to follow another paper."""
    weight_decay: NotNegative[float] = 0.01
    """Weight decay, decoupled as in AdamW; biases and norms have none."""
    clip: PositiveOrInfinite = 2.0
    """Largest global gradient norm; larger gradients are scaled down to it."""
    discriminator_rate: Positive = 1.0
    """Learning rate of the parameters that only the discriminator has, as a multiple of `learning_rate`. In small runs,
    a value below 1 lets the token states of the discriminator's layers keep more effective dimensions. Dong et al.
    (2023) decouple the optimizers of the two networks."""
    layer_decay: UpToOne = 1.0
    """Fine-tuning: the learning rate falls by this factor from each layer to the one below it."""


@dataclass(frozen=True)
class ScheduleConfig:
    """The learning rate after the warm-up."""

    name: Literal["linear", "cosine", "wsd", "inverse_sqrt"] = "linear"
    """linear: falls to zero at the last step (XLM-E, Table 10); cosine: falls to zero along half a cosine; wsd: stays
    at the peak until the last `decay_steps`; inverse_sqrt: falls in inverse proportion to the square root of the steps
    done, without an end (XLM)."""
    decay_steps: NotNegative[int] = 0
    """wsd: number of last steps in which the rate falls to zero, as 1 - √(share of these steps that is done) (Hägele et
    al., 2024). 0: the rate does not fall, except in branches (`pretrain --branch`)."""


@dataclass(frozen=True)
class EngineConfig:
    """How the model is executed; the loss curve stays the same, but for `precision` and `gradient_precision`."""

    kind: Literal["deepspeed", "pipeline", "plain"] = "deepspeed"
    """deepspeed: data parallel with ZeRO; pipeline: stages of layers, with data parallelism and ZeRO-1; plain: torch
    on one process, the reference for the others."""
    deepspeed: str = "zero1"
    """auto, a file of ds_configs/ by name (zero1, zero2, zero3, zero3_cpu …), or a path to a DeepSpeed JSON with engine
    keys only; a higher stage partitions more state. auto takes zero3 if a step has one micro-batch, else zero1: this
    choice is the faster one by the planner's estimates."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """Type of weights and activations while computing. auto: bf16 where the processor computes in it, else fp32. The
    plain engine computes in fp32 only."""
    gradient_precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Type in which gradients are added, when computing in bf16 under ZeRO-1 or ZeRO-3. bf16 takes half the memory,
    and its error grows with the number of processes. fp32 and auto add in fp32, over the processes and over a step's
    micro-batches; under ZeRO-1, auto stores the gradients in bf16 if a step has one micro-batch."""
    pipeline_stages: Stages = field(default=2, metadata=PRETRAINING_ONLY)
    """Processes that share one copy of the model under engine.kind pipeline; more for a model that does not fit."""
    pipeline_schedule: Literal["1f1b", "dualpipev"] = field(default="1f1b", metadata=PRETRAINING_ONLY)
    """Order of the work in the pipeline. With dualpipev, processes are idle for less time than with 1f1b. But a process
    holds two parts of the model, and a step needs two micro-batches for each stage."""
    balance: tuple[int, ...] = field(default=(), metadata=PRETRAINING_ONLY)
    """Number of layers of the discriminator, or of the only encoder, in each part of the pipeline. Empty: the counted
    operations of the parts are balanced. Set it if measurements show a slower stage. The first part may have no
    layers."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Storage of master weights and moments, if the GPU has no room for them; nvme needs ZeRO-3."""
    offload_parameters: Literal["none", "cpu", "nvme"] = "none"
    """Storage of weights while no layer needs them, if the GPU has no room for them; needs ZeRO-3."""
    nvme_folder: str = ""
    """Folder on a local disk for offloading to nvme, of one run at a time; its contents may be deleted after a run."""

    @property
    def pipeline_parts(self) -> int:
        """Number of parts into which the pipeline cuts the model, from the embedding to the loss."""
        return self.pipeline_stages * (2 if self.pipeline_schedule == "dualpipev" else 1)

    @property
    def processes_per_replica(self) -> int:
        """Number of processes that together hold one copy of the model and read the same rows."""
        return self.pipeline_stages if self.kind == "pipeline" else 1


@dataclass(frozen=True)
class TrainConfig:
    """Length of a run, and intervals of its logs, evaluations and checkpoints, in optimizer steps."""

    steps: Count = field(default=125_000, metadata=PRETRAINING_ONLY)
    """Optimizer steps of the whole run. A run that has begun can be made longer only with schedule inverse_sqrt, or wsd
    before its decay."""
    log_every: Count = 10
    """Steps between two lines on the terminal and in `metrics.jsonl`."""
    eval_every: NotNegative[int] = field(default=5_000, metadata=PRETRAINING_ONLY)
    """Steps between two evaluations on held-out text, which also update the report page; the last step has one too.
    0: only the last step has one."""
    eval_rows: Count = field(default=512, metadata=PRETRAINING_ONLY)
    """Held-out rows of each task that an evaluation reads, from the first row on; more rows give steadier figures."""
    save_every: Count = 2_500
    """Steps between two checkpoints; a crash loses at most this many and those taken while a checkpoint is written."""
    keep_last: Count = 3
    """Number of newest checkpoints that are kept; a checkpoint has 12 bytes for each parameter."""
    keep_every: NotNegative[int] = 25_000
    """Checkpoints at multiples of this step are never deleted; 0: only the newest (`keep_last`) are kept."""
    save_buffer_gib: NotNegative[float] = 4.0
    """Host memory of a process, in GiB, for the copies of the state that are written while training continues; 0:
    training waits for every save."""
    max_bad_steps: Count = 10
    """The run stops after this many skipped steps in a row (loss or gradient not finite, or a spike)."""
    spike_sigma: NotNegative[float] = 0.0
    """Skip steps whose gradient norm is this many standard deviations above the mean of the last 128 steps; 0: never.
    Try 6, as OLMo-core, if the loss jumps."""
    watchdog_minutes: Annotated[float, Range("not be negative", lambda value: value >= 0, most=525_600)] = 30.0
    """Minutes after which a process that has finished no step, save or part of the start ends the run and reports
    where it hangs; 0: never."""
    wandb: str = ""
    """Weights & Biases project that also receives the records (`pip install wandb`); empty: none."""
    audit: bool = field(default=False, metadata=PRETRAINING_ONLY)
    """Record in `audit/` which rows each step read, with checksums of their tokens; `xlme audit` checks
    them."""


@dataclass(frozen=True)
class Training:
    """The settings that every run of pre-training or fine-tuning has; engines and the training loop read them."""

    name: str
    """Name of the run in its report and records."""
    seed: Seed = 1
    """Seeds initial weights, masked positions and the generator's samples; change it for an independent second
    run."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    train: TrainConfig = field(default_factory=TrainConfig)


@dataclass(frozen=True)
class StartConfig:
    """The first weights of a run; by default they are random, from its seed."""

    folder: str = ""
    """The model to start from: a run, one of its checkpoints (RUN@STEP), an export, or an XLM-R model as Hugging Face
    stores it. An unfinished run gives its newest checkpoint. The layers of the model in `folder` must have the shape of
    this run's layers. The data must have this model's vocabulary, or a vocabulary that begins with all of its
    pieces."""
    take: Literal["all", "state", "generator", "discriminator", "encoder"] = "all"
    """all: every parameter, to continue with other data or another schedule; state: also the optimizer's state and
    the number of steps of a run (`--branch` sets this); generator, discriminator, or encoder (of a model with only one,
    such as XLM-R): every encoder of this run starts from the named encoder, with its embedding and head, and a
    shallower encoder takes its first layers (ELECTRA's head start)."""
    into: Literal["both", "encoder", "decoder"] = "both"
    """mt: the side that starts from the encoder that was taken. The decoder's cross-attention starts from random
    weights, unless `decoder` is interleaved."""
    decoder: str = ""
    """mt: another run, export or XLM-R model, from whose encoder (or discriminator) the decoder starts; XLM's decoder
    starts from a causal model. Its embedding is not taken: encoder and decoder share the embedding of `folder`."""


@dataclass(frozen=True)
class RunConfig(Training):
    """All settings of a pre-training run: a recipe returns it, and `config.json` in the run folder stores it.

    `print` and `xlme config --recipe base` print every setting with its help.
    """

    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    start: StartConfig = field(default_factory=StartConfig)

    def __repr__(self) -> str:
        return "\n".join(["RunConfig(", *(f"    {name}={value!r}," for name, value in vars(self).items()), ")"])

    def __str__(self) -> str:
        from .io.toml import to_toml

        return to_toml(self)


def from_json(kind: type[Settings], values: Mapping[str, Any]) -> Settings:
    """Settings of class `kind` from `values`, which `dataclasses.asdict` made and JSON stored. Raises TypeError for an
    unknown setting, KeyError for a missing one."""
    if missing := [setting.name for setting in fields(kind) if setting.name not in values]:  # type: ignore[arg-type]
        raise KeyError(missing[0])
    sections = get_type_hints(kind)
    settings = {
        key: from_json(sections[key], value)
        if is_dataclass(sections.get(key))
        else tuple(value)
        if isinstance(value, list)
        else value
        for key, value in values.items()
    }
    return kind(**settings)
