"""The settings of a run: frozen dataclasses, each checked by its own `validate`. Nothing here imports torch.

A recipe (`xlme_ds.recipes`) returns one `RunConfig`; parts of the program take the section they need and no more.
"""

from dataclasses import dataclass, field
from typing import Literal, Self


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class ModelConfig:
    """Generator and discriminator share width, heads and feed-forward size (XLM-E, Tables 8 and 9).

    Objectives with one encoder take the discriminator's settings for it, and read none of the generator's.
    """

    vocabulary: int = 250_002
    """Ids, `<pad>` and `<mask>` included; must equal the vocabulary of the data."""
    width: int = 768
    heads: int = 12
    feed_forward: int = 3072
    generator_layers: int = 4
    discriminator_layers: int = 12
    max_positions: int = 512
    """Rows of the learned absolute position table; also the longest item."""
    absolute_positions: bool = True
    layout: Literal["xlme", "xlm"] = "xlme"
    """Special tokens around the sides of an item; must be the `--layout` that the data were mixed with."""
    language_embeddings: tuple[str, ...] = ()
    """Codes of the languages that have a learned vector, added to the embedded tokens as positions are: all that the
    data have."""
    dropout: float = 0.0
    """Of the embedded tokens and of what attention and feed-forward network add, while training; XLM-E's generator
    drops nothing."""
    attention_dropout: float = 0.0
    """Of the attention weights, while training; they then exist whole, as in no other case. XLM-E's generator drops
    none."""
    norm: Literal["post", "pre"] = "post"
    embedding_norm: bool = False
    """Normalise the embedded tokens in pre-LN models too; post-LN models always do."""
    norm_epsilon: float = 1e-5
    """Added to the variances (XLM: 1e-12)."""
    relative_bias: Literal["gated", "plain", "none"] = "gated"
    """XLM-E section 3.3: gated, the plain bucket bias, or none (the paper's ablation)."""
    relative_buckets: int = 32
    relative_max_distance: int = 128
    embedding_sharing: Literal["tied", "gdes"] = "tied"
    """gdes: the discriminator adds its own difference to a gradient-stopped copy (DeBERTa-v3)."""
    masked_head: Literal["dense", "linear"] = "dense"
    """Before the decoder that is tied to the embedding: dense, GELU and norm, as of BERT and XLM-R, or nothing, as of
    XLM."""
    vocabulary_blocks: int = 1
    """Store the embedding as this many parameters: bounds the buffers of offloading engines."""
    init_std: float = 0.02
    attention: Literal["sdpa", "triton"] = "sdpa"
    """On a GPU: torch's scaled_dot_product_attention with the whole bias, or our Triton kernels. The CPU has a form of
    its own."""
    compile: Literal["none", "layers", "graphs"] = "none"
    """Of pre-training on a GPU. layers: torch compiles them, for a minute at the first step (on a CPU it gains little);
    graphs: it replays them as CUDA graphs besides, with ZeRO 1 or 2 in bf16."""
    head_chunk: int = 8192
    """Ids of the vocabulary whose logits exist at the same time, at all masked positions of a micro-batch."""
    activation_checkpointing: bool = False

    def validate(self) -> None:
        """Raise ValueError, naming the setting, for a model that cannot be built."""
        sizes = ("vocabulary", "width", "heads", "feed_forward", "generator_layers", "discriminator_layers")
        for name in (*sizes, "max_positions", "vocabulary_blocks", "head_chunk"):
            _require(getattr(self, name) >= 1, f"model.{name} is {getattr(self, name)}: it must be at least 1")
        _require(
            self.width % self.heads == 0,
            f"model.width {self.width} is not a multiple of model.heads {self.heads}: choose another number of heads",
        )
        _require(
            self.relative_buckets >= 4 and self.relative_buckets % 2 == 0,
            f"model.relative_buckets is {self.relative_buckets}: it must be even and at least 4 (half for each direction)",
        )
        _require(
            self.relative_max_distance > self.relative_buckets // 4,
            f"model.relative_max_distance {self.relative_max_distance} must exceed a quarter of model.relative_buckets",
        )
        block = -(-self.vocabulary // self.vocabulary_blocks)
        _require(
            block * (self.vocabulary_blocks - 1) < self.vocabulary,
            f"model.vocabulary {self.vocabulary} does not split into model.vocabulary_blocks {self.vocabulary_blocks}: "
            f"use {-(-self.vocabulary // block)}",
        )
        size = self.width // self.heads
        _require(
            self.attention == "sdpa" or size in (16, 32, 64, 128),
            f"model.attention triton takes heads of size 16, 32, 64 or 128, model.width / model.heads is {size}: set it to sdpa",
        )
        _require(
            self.compile != "graphs" or not self.activation_checkpointing,
            "model.compile graphs keeps the activations in its graphs: set it to layers, or leave model.activation_checkpointing off",
        )
        for name in ("init_std", "norm_epsilon"):
            _require(getattr(self, name) > 0, f"model.{name} is {getattr(self, name)}: it must be positive")
        for name in ("dropout", "attention_dropout"):
            _require(
                0 <= getattr(self, name) < 1,
                f"model.{name} is {getattr(self, name)}: it must be at least 0 and below 1",
            )
        _require(
            self.attention == "sdpa" or not self.attention_dropout,
            "model.attention triton never has attention weights whole, which model.attention_dropout drops from: set it to sdpa",
        )
        _require(
            len(set(self.language_embeddings)) == len(self.language_embeddings),
            "model.language_embeddings names a language twice: name each once",
        )


OBJECTIVE_DESCRIPTIONS = {
    "electra": "multilingual and translation replaced token detection: a generator fills masked tokens, a discriminator finds "
    "the replaced ones",
    "mlm": "masked language modelling of one encoder, on text and on translation pairs",
    "ernie_m": "masked language modelling of one encoder, on text and on translation pairs, half of which are masked so that each "
    "side is predicted from the other alone",
    "btmlm": "masked language modelling of one encoder on text, beside tokens of another language that it writes itself",
    "clm": "causal language modelling of one encoder: every token from those before it",
}
"""What pages and model cards say of each objective."""


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is trained for; every term of the loss is a mean over its task's global batch."""

    name: Literal["electra", "mlm", "ernie_m", "btmlm", "clm"] = "electra"
    """electra: XLM-E's L_MLM + L_TLM + λ L_MRTD + λ L_TRTD; mlm: L_MLM + L_TLM of one encoder, as XLM and XLM-R;
    ernie_m: with L_CAMLM, ERNIE-M's first stage; btmlm: L_BTMLM, its second; clm: causal language modelling."""
    mask_fraction: float = 0.15
    """Of the ordinary tokens of an item, those that are to be predicted; 1 for clm, which predicts ends of sentences
    too."""
    random_fraction: float = 0.1
    """Of the positions that are to be predicted, those that show a random token; electra masks them all."""
    keep_fraction: float = 0.1
    """Those that show the original; the rest shows `<mask>`."""
    discriminator_weight: float = 50.0
    """λ of the paper."""
    pseudo_fractions: tuple[float, ...] = ()
    """Tokens that btmlm writes behind a sentence, for a token of it: every sentence draws one of these."""

    def validate(self) -> None:
        """Raise ValueError, naming the setting, for values outside their range."""
        if self.name == "clm":
            _require(
                self.mask_fraction == 1.0,
                f"objective.mask_fraction is {self.mask_fraction}, and objective.name clm predicts every token: set it to 1",
            )
        else:
            _require(
                0.0 < self.mask_fraction < 1.0,
                f"objective.mask_fraction is {self.mask_fraction}: it must be between 0 and 1",
            )
        for name in ("random_fraction", "keep_fraction"):
            _require(getattr(self, name) >= 0, f"objective.{name} is {getattr(self, name)}: it must not be negative")
        _require(
            self.random_fraction + self.keep_fraction <= 1,
            f"objective.random_fraction {self.random_fraction} and objective.keep_fraction {self.keep_fraction} exceed 1 "
            "together: lower one",
        )
        _require(
            self.discriminator_weight >= 0,
            f"objective.discriminator_weight is {self.discriminator_weight}: it must not be negative",
        )
        _require(
            self.name != "btmlm" or bool(self.pseudo_fractions),
            "objective.name btmlm needs objective.pseudo_fractions: give shares of a sentence, for example 0.05 0.1 0.15 0.2",
        )
        _require(
            self.name == "btmlm" or not self.pseudo_fractions,
            f"objective.pseudo_fractions are for objective.name btmlm, not {self.name}: leave them empty",
        )
        _require(
            all(0 < fraction <= 1 for fraction in self.pseudo_fractions),
            f"objective.pseudo_fractions is {self.pseudo_fractions}: each must be above 0, up to 1",
        )


@dataclass(frozen=True)
class DataConfig:
    """Rows that one optimizer step consumes of each task; 0 leaves a task out."""

    mono_rows: int = 2048
    """Rows of monolingual text a step (2,048 rows of 512 are the paper's 1M tokens)."""
    para_rows: int = 2048
    """Rows of packed translation pairs a step."""
    micro_batch: int = 16
    """Rows of each task that one process runs at once; the larger task is cut into as many pieces as the smaller."""
    alternate: bool = False
    """Steps read monolingual rows and pairs in turns, as XLM's MLM and TLM, and no step reads both."""

    @property
    def mean_rows(self) -> tuple[float, float]:
        """Rows of each task a step, on the average."""
        steps = 2 if self.alternate else 1
        return self.mono_rows / steps, self.para_rows / steps

    def validate(self) -> None:
        """Raise ValueError, naming the setting, for a batch without rows."""
        _require(min(self.mono_rows, self.para_rows) >= 0, "data.mono_rows and data.para_rows must not be negative")
        _require(
            self.mono_rows + self.para_rows > 0,
            "data.mono_rows and data.para_rows are both 0: a step needs rows of a task",
        )
        _require(
            not self.alternate or self.mono_rows == self.para_rows,
            f"data.alternate needs as many rows of both tasks, data.mono_rows is {self.mono_rows} and data.para_rows "
            f"{self.para_rows}: set them to the same",
        )
        _require(self.micro_batch >= 1, f"data.micro_batch is {self.micro_batch}: it must be at least 1")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, linear warm-up then linear decay to zero at the last step (XLM-E, Table 10)."""

    learning_rate: float = 5e-4
    warmup_steps: int = 10_000
    beta1: float = 0.9
    beta2: float = 0.98
    epsilon: float = 1e-6
    weight_decay: float = 0.01
    """Decoupled; none on biases and norms."""
    clip: float = 2.0
    """Largest global gradient norm."""
    layer_decay: float = 1.0
    """Fine-tuning: the learning rate falls by this factor from each layer to the one below it."""

    def validate(self) -> None:
        """Raise ValueError, naming the setting, for values outside their range."""
        for name in ("learning_rate", "epsilon", "clip"):
            _require(getattr(self, name) > 0, f"optimizer.{name} is {getattr(self, name)}: it must be positive")
        _require(0 < self.layer_decay <= 1, f"optimizer.layer_decay is {self.layer_decay}: it must be above 0, up to 1")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, f"optimizer.{name} is {getattr(self, name)}: it must be in [0, 1)")
        _require(self.warmup_steps >= 0, f"optimizer.warmup_steps is {self.warmup_steps}: it must not be negative")
        _require(self.weight_decay >= 0, f"optimizer.weight_decay is {self.weight_decay}: it must not be negative")


@dataclass(frozen=True)
class EngineConfig:
    """How the model is run; changes speed and memory, never the loss curve."""

    kind: Literal["deepspeed", "pipeline", "plain"] = "deepspeed"
    """deepspeed: data parallel with ZeRO; pipeline: stages of layers, data parallel besides, with ZeRO-1;
    plain: torch on one process, the reference the others are compared with."""
    deepspeed: str = "zero1"
    """A file of ds_configs/ by name, or a path to a DeepSpeed JSON that holds engine keys only."""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """auto: bf16 where the processor computes in it, else fp32."""
    gradient_precision: Literal["auto", "fp32", "bf16"] = "auto"
    """What micro-batches add up in, when computing in bf16, under ZeRO-1 or ZeRO-3; bf16 takes half of the memory.
    auto: bf16 where a step has one micro-batch, whose gradients are bf16 before they get there, else fp32."""
    pipeline_stages: int = 2
    """Processes that share one copy of the model under engine.kind pipeline."""
    pipeline_schedule: Literal["1f1b", "dualpipev"] = "1f1b"
    """dualpipev: a process holds two parts of the model, and a step needs two micro-batches a stage."""
    balance: tuple[int, ...] = ()
    """Layers of the discriminator (or the one encoder) in each part of the pipeline; empty: from counted operations.
    The first may have none."""
    offload_optimizer: Literal["none", "cpu", "nvme"] = "none"
    """Where master weights and moments wait between the steps; nvme needs ZeRO-3."""
    offload_parameters: Literal["none", "cpu", "nvme"] = "none"
    """Where the weights wait between the layers' turns; needs ZeRO-3."""
    nvme_folder: str = ""
    """Folder on a local disk for what is offloaded to nvme; what is in it after a run may be deleted."""

    @property
    def pipeline_parts(self) -> int:
        """Parts into which the pipeline cuts the model, from the embedding to the loss."""
        return self.pipeline_stages * (2 if self.pipeline_schedule == "dualpipev" else 1)

    @property
    def processes_per_replica(self) -> int:
        """Processes that together hold one copy of the model and read the same rows."""
        return self.pipeline_stages if self.kind == "pipeline" else 1

    def validate(self) -> None:
        """Raise ValueError for a combination that no engine runs."""
        _require(
            not (self.kind == "plain" and self.precision == "bf16"),
            "engine.kind plain runs in fp32 only: set engine.precision to fp32, or engine.kind to deepspeed",
        )
        _require(
            self.pipeline_stages >= 2,
            f"engine.pipeline_stages is {self.pipeline_stages}: it must be at least 2, or use engine.kind deepspeed",
        )
        _require(
            self.gradient_precision != "bf16" or (self.kind == "deepspeed" and self.precision != "fp32"),
            "engine.gradient_precision bf16 is for engine.kind deepspeed computing in bf16: set it to auto",
        )
        offloads = (self.offload_optimizer, self.offload_parameters)
        _require(
            self.kind == "deepspeed" or offloads == ("none", "none"),
            f"engine.kind {self.kind} offloads nothing: set engine.offload_optimizer and engine.offload_parameters to none",
        )
        _require(
            "nvme" not in offloads or bool(self.nvme_folder),
            "offloading to nvme needs engine.nvme_folder: name a folder on a local disk",
        )
        if self.balance:
            _require(self.kind == "pipeline", f"engine.balance is not for engine.kind {self.kind}: leave it empty")
            _require(
                len(self.balance) == self.pipeline_parts,
                f"engine.balance {self.balance} must have {self.pipeline_parts} numbers, one for each part of the pipeline",
            )
            _require(
                self.balance[0] >= 0 and min(self.balance[1:]) >= 1,
                f"engine.balance {self.balance} leaves a part empty: only the first may have 0 layers",
            )


@dataclass(frozen=True)
class TrainConfig:
    """Length and cadence of a run, in optimizer steps."""

    steps: int = 125_000
    log_every: int = 10
    eval_every: int = 5_000
    """Held-out text is evaluated at these steps and at the last; 0: at the last only."""
    eval_rows: int = 512
    """Rows of each task of the held-out data that an evaluation reads, from its start."""
    save_every: int = 2_500
    keep_last: int = 3
    """Newest checkpoints that are kept."""
    keep_every: int = 25_000
    """Checkpoints of multiples of this step are kept for good; 0: none."""
    save_buffer_gib: float = 4.0
    """Host memory of a process, in GiB, for what is copied and not yet written while training goes on; 0: training
    waits."""
    max_bad_steps: int = 10
    """After so many steps in a row that were left out (loss or gradient not finite, or a spike) the run ends."""
    spike_sigma: float = 0.0
    """Leave out steps whose gradient norm is so many standard deviations above the mean of the last 128; 0: none
    (OLMo-core: 6)."""
    watchdog_minutes: float = 30.0
    """A process in which no step, save or part of the start finishes for so long ends the run, and says where it stood;
    0: never."""
    audit: bool = False
    """Record in `audit/` which rows each step read, with checksums of their tokens; `python -m xlme_ds.audit` checks
    them."""

    def validate(self) -> None:
        """Raise ValueError, naming the setting, for values outside their range."""
        for name in ("steps", "log_every", "save_every", "keep_last", "eval_rows", "max_bad_steps"):
            _require(getattr(self, name) >= 1, f"train.{name} is {getattr(self, name)}: it must be at least 1")
        for name in ("eval_every", "keep_every", "save_buffer_gib", "spike_sigma", "watchdog_minutes"):
            _require(getattr(self, name) >= 0, f"train.{name} is {getattr(self, name)}: it must not be negative")


@dataclass(frozen=True)
class Training:
    """What every training run has: the sections that engines and the training loop read."""

    name: str
    seed: int = 1
    """Seeds the initial weights, the masked positions and the generator's samples."""
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    train: TrainConfig = field(default_factory=TrainConfig)

    def validate(self) -> Self:
        """Check every section and what binds them; returns self. Raises ValueError."""
        for section in (self.model, self.data, self.optimizer, self.engine, self.train):
            section.validate()
        _require(
            self.optimizer.warmup_steps <= self.train.steps,
            f"optimizer.warmup_steps {self.optimizer.warmup_steps} exceeds train.steps {self.train.steps}: shorten the warm-up",
        )
        _require(
            not self.data.alternate or self.train.log_every % 2 == 1,
            f"train.log_every {self.train.log_every} would show one task alone under data.alternate: set it to an odd number",
        )
        _require(
            self.model.compile != "graphs" or (self.engine.kind == "deepspeed" and self.engine.precision != "fp32"),
            f"model.compile graphs is for engine.kind deepspeed computing in bf16, engine.kind is {self.engine.kind} and "
            f"engine.precision {self.engine.precision}: set it to layers",
        )
        if self.engine.kind == "pipeline":
            self._validate_pipeline(self.engine, self.model.discriminator_layers)
        return self

    @staticmethod
    def _validate_pipeline(engine: EngineConfig, layers: int) -> None:
        _require(
            engine.pipeline_parts <= layers + 1,
            f"engine.pipeline_stages {engine.pipeline_stages} ({engine.pipeline_schedule}) cuts the model into "
            f"{engine.pipeline_parts} parts, of which all but the first need one of model.discriminator_layers {layers}: "
            "use fewer stages",
        )
        _require(
            not engine.balance or sum(engine.balance) == layers,
            f"engine.balance {engine.balance} adds up to {sum(engine.balance)}, model.discriminator_layers is {layers}",
        )


@dataclass(frozen=True)
class StartConfig:
    """The first weights of a run; by default they are drawn from its seed."""

    folder: str = ""
    """A finished run or an export, with the same vocabulary and the same shape of layers."""
    take: Literal["all", "generator", "discriminator", "encoder"] = "all"
    """all: every parameter, to go on with other data or another schedule; generator, discriminator, or encoder where
    there is only one: that encoder for every one here, as far up as they have layers (ELECTRA's head start), with the
    embedding and its head."""


@dataclass(frozen=True)
class RunConfig(Training):
    """Everything a pre-training run is: what a recipe returns and what `config.json` of the run folder holds."""

    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    start: StartConfig = field(default_factory=StartConfig)

    def validate(self) -> Self:
        """See `Training`."""
        self.objective.validate()
        _require(
            not (self.objective.pseudo_fractions and self.data.para_rows),
            f"objective.name {self.objective.name} reads monolingual rows alone: set data.para_rows to 0",
        )
        _require(
            not (self.objective.pseudo_fractions and self.model.layout != "xlme"),
            f"objective.name {self.objective.name} lays its sentences out as xlme has pairs: set model.layout to xlme",
        )
        _require(
            self.model.attention == "sdpa" or self.objective.name in ("electra", "mlm"),
            f"model.attention triton lets a position see its whole item, which is not so under objective.name "
            f"{self.objective.name}: set it to sdpa",
        )
        return super().validate()
