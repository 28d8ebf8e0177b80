"""The settings of a run: frozen dataclasses, which `xlme_ds.validate` checks. Nothing here imports torch.

A recipe (`xlme_ds.recipes`) returns one `RunConfig`; parts of the program take the section they need and no more.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

Check = tuple[bool, str]  # whether something fits, and the sentence for the user if it does not


def refuse(checks: Iterable[Check]) -> None:
    """Raise ValueError with the sentence of the first check that fails."""
    for fits, sentence in checks:
        if not fits:
            raise ValueError(sentence)


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


@dataclass(frozen=True)
class ObjectiveConfig:
    """What is trained for; every term of the loss is a mean over its task's global batch."""

    name: str = "electra"
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
    """Tokens that btmlm writes after a sentence, for a token of it: every sentence draws one of these."""


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


@dataclass(frozen=True)
class TrainConfig:
    """Length and cadence of a run, in optimizer steps."""

    steps: int = 125_000
    log_every: int = 10
    eval_every: int = 5_000
    """Held-out text is evaluated, and the report page brought up to date, at these steps and at the last; 0: at the
    last only."""
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
    wandb: str = ""
    """Project of Weights & Biases that the records go to as well (`pip install "xlme-ds[wandb]"`); empty: none."""
    audit: bool = False
    """Record in `audit/` which rows each step read, with checksums of their tokens; `python -m xlme_ds.audit` checks
    them."""


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


@dataclass(frozen=True)
class StartConfig:
    """The first weights of a run; by default they are drawn from its seed."""

    folder: str = ""
    """A run, one of its checkpoints (RUN@STEP), or an export, with the same vocabulary and the same shape of layers; a
    run that is not finished counts as its newest checkpoint."""
    take: Literal["all", "generator", "discriminator", "encoder"] = "all"
    """all: every parameter, to go on with other data or another schedule; generator, discriminator, or encoder where
    there is only one: that encoder for every one here, as far up as they have layers (ELECTRA's head start), with the
    embedding and its head."""


@dataclass(frozen=True)
class RunConfig(Training):
    """Everything a pre-training run is: what a recipe returns and what `config.json` of the run folder holds."""

    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    start: StartConfig = field(default_factory=StartConfig)
