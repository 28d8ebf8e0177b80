"""The interfaces of an objective and of its data. An engine trains with `Objective` and `BatchSource`. Pipelines, the
losses by language and the rest of the program need `Pretraining`.

B rows, T tokens, M masked positions. Tasks are in the order of data.rows.TASKS: mono, para.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, Self, cast

from torch import Tensor, nn

from ..config import EncoderName, ModelConfig, ObjectiveConfig, OptimizerConfig, RunConfig, StartConfig
from ..data.batch import Batch
from ..data.collate import Collate, Purpose, collate
from ..data.order import Phase, StepPlan
from ..data.shards import RowStore
from ..models.layers import MicroBatchShape
from ..models.pipeline import Flops, PipelinePart


class Objective(Protocol):
    """The loss that a model is trained with. It is Σ weight · sum / count over the terms. Before the division, sums and
    counts are added up over the micro-batches of the global batch."""

    terms: tuple[str, ...]  # the names of the terms
    statistics_shape: tuple[int, ...]  # the shape of the tensor that `statistics` returns
    weights: Tensor  # the weight of each term, float64 [terms]

    def at(self, step: int) -> Self:
        """This objective with the weights of `step`; by default all steps have the same weights."""
        return self

    def build(self, cfg: ModelConfig) -> nn.Module:
        """The model that this objective trains, with uninitialised parameters. Its input is a batch."""

    def learning_rate_scales(self, names: Sequence[str], cfg: OptimizerConfig) -> list[float]:
        """The factor by which the step's learning rate is multiplied, for each parameter in `names`; by default 1."""
        return [1.0] * len(names)

    def as_probe(self, batch: Any) -> Any:
        """`batch` prepared for the probe loss; by default unchanged. A checkpoint stores this loss. A resumed run,
        perhaps on another processor, computes it again and compares the two. So rounding must not decide which tokens
        the model samples."""
        return batch

    def counts(self, batch: Any) -> Tensor:
        """The number by which each term's sum is divided, float64 [terms]."""

    def sums(self, output: Any, batch: Any) -> Tensor:
        """The summed loss of each term, float32 [terms]; carries the gradient."""

    def statistics(self, output: Any, batch: Any) -> Tensor:
        """The other numbers from which metrics are computed, float64 `statistics_shape`. The statistics of several
        batches are added up."""

    def summarise(self, sums: Tensor, counts: Tensor, statistics: Tensor) -> dict[str, float]:
        """The metrics by name, from the sums, counts and statistics of a global batch. One of them is `loss`."""


class BatchSource(Protocol):
    """The batches that an engine trains on. `loader.Loader` implements it for data folders."""

    plan: StepPlan
    row_tokens: int  # tokens of a row; the mean number if rows differ in length

    @property
    def phases(self) -> Sequence[Phase]:
        """The phases of the run, in order. A phase is a range of steps that read one data folder."""

    @property
    def fingerprints(self) -> dict[str, str]:
        """Checksums of the data by name. A run resumes only if none of them has changed."""

    def micro_batches(self, step: int) -> Sequence[Any]:
        """All micro-batches of this rank in step `step`."""

    def describe_rows(self, step: int, micro_batch: int | None = None) -> str:
        """The row numbers of a micro-batch of this rank, or of the whole step, such as `mono 328-335, para 164-167`."""

    def probe(self) -> Any:
        """A small batch that is equal on all ranks and for any world size."""


class Quantity(NamedTuple):
    """A metric as the report page and the model card show it."""

    title: str  # the title of its figure; quantities with the same title share one figure
    unit: str = ""
    # The task on which the metric is measured. If `task` is empty and the metric is measured on both tasks, there are
    # two metrics, such as `auc_mono` and `auc_para` for `auc`.
    task: str = ""
    unigram: bool = False  # whether the metric is a mean −log p of tokens, comparable with a unigram model's loss


class WeightSource(NamedTuple):
    """An encoder of another model, from whose weights a part of this model starts."""

    folder: str  # the other model's folder
    encoder_name: EncoderName | None  # the encoder's name in the other model; None: that model's main encoder
    layers: int  # number of the encoder's layers that the part takes, from the first on
    remedy: str  # the error message's advice if the encoder has fewer layers, such as "lower model.decoder_layers"
    # Turns the parameters of the encoder into those of the part.
    convert: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict


# Settings that not every objective reads. `Pretraining.used_settings` lists those that an objective reads; the rest
# must have the default values.
OBJECTIVE_SETTINGS = (
    *("objective.discriminator_weight", "objective.generator_temperature", "objective.generator_keep_fraction"),
    *("objective.random_fakes", "objective.random_fraction", "objective.keep_fraction", "objective.z_loss"),
    *("objective.pseudo_fractions", "objective.denoising", "objective.back_translation"),
    *("model.decoder", "model.decoder_layers", "start.into", "start.decoder"),
)


class Pretraining(Objective, Protocol):
    """An objective of pre-training. Each is named in `OBJECTIVES`.

    The rest of the program uses only the members that are declared here. If an objective predicts tokens, its first
    term must be the −log p of these tokens, in nats. The tokens are those of monolingual text, or of pairs if the
    objective reads only pairs. The term's quantity must have `unigram` set.
    """

    # One sentence without its full stop, shown in the report, the model card and the plan. {rows} becomes what the run
    # reads, such as "text and translation pairs".
    description: str
    # The metrics by name, including the terms. If a metric is measured on both tasks, the key is its name without
    # `_mono` or `_para`.
    quantities: Mapping[str, Quantity]
    mask_fraction: float  # share of an item's ordinary tokens that are predicted
    # The encoders of the model. The key is an encoder's name, with which the names of its parameters begin; the value
    # is the prefix of its head's parameters. The first encoder is split into pipeline stages, evaluated, fine-tuned and
    # exported. The token embedding belongs to no encoder: its blocks are the model's `embedding_0`, `embedding_1`, ….
    encoders: Mapping[EncoderName, str]
    used_settings: tuple[str, ...] = ()  # the settings in OBJECTIVE_SETTINGS that the objective reads
    # The class in `export/remote` with which the whole model is exported. If it is empty, each encoder is exported
    # alone, with the class for its head.
    export_class: str = ""
    reads_whole_rows: bool = True  # whether the first encoder reads whole rows; if not, it reads one side of a pair
    may_start_random: bool = False  # whether `start.take` may name an encoder while `start.folder` is empty
    starts_in_layout: bool = False  # whether `model.layout` must equal the layout of the model that it starts from

    def __init__(self, cfg: ObjectiveConfig): ...

    def collate_for(self, rows: RowStore, purpose: Purpose) -> Collate:
        """The function that makes batches from `rows` and from the rows of the other task in the same folder, by
        default `collate`."""
        return collate

    def check_rows(self, rows: RowStore, purpose: Purpose) -> None:
        """Raise ValueError for rows of one task that the objective cannot read."""

    def check(self, run: RunConfig) -> None:
        """Raise ValueError for settings with which the objective cannot train. By default these are the settings in
        OBJECTIVE_SETTINGS that the objective does not read and that differ from their defaults."""
        defaults = RunConfig(name="")
        for name in OBJECTIVE_SETTINGS:
            value, default = attrgetter(name)(run), attrgetter(name)(defaults)
            if name not in self.used_settings and value != default:
                remedy = "leave it empty" if default in ("", ()) else f"leave it at {default}"
                raise ValueError(
                    f"{name} is {value}, and objective.name {run.objective.name} does not read it: {remedy}"
                )

    def build(self, cfg: ModelConfig, part: PipelinePart | None = None) -> nn.Module:
        """The model, or the stage of a pipeline that runs one `part` of it (`models/pipeline.py`)."""

    def flops(self, cfg: ModelConfig, row_tokens: int) -> Flops:
        """Operations per token of a forward pass on full rows of `row_tokens` tokens."""

    def forward_passes(self, batch: MicroBatchShape) -> list[MicroBatchShape]:
        """The sizes of the forward passes that come before a micro-batch's one backward pass, the largest first. By
        default there is one pass, which has the micro-batch's own size."""
        return [batch]

    def by_language(self, output: Any, batch: Batch, languages: int) -> Tensor:
        """`sums` (index 0) and `counts` (index 1) of each language's tokens, float64 [2, terms, languages]."""

    def predicted_positions(self, batch: Batch) -> Tensor:
        """The predicted positions [M], as ascending indices into the flattened tokens; by default the masked ones."""
        return batch.masked_M

    def tokens_and_probabilities(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Returns (tokens [B, T], probabilities [B, T]) for the report page. The tokens are the batch's, with the
        model's own tokens at the predicted positions. A probability is the model's estimate that the token was
        replaced; None instead of all probabilities if the model does not predict this."""

    def weight_sources(self, start: StartConfig, cfg: ModelConfig) -> dict[str, WeightSource]:
        """The weights that each part of the model starts from, by the prefix of the part's parameters. By default every
        encoder starts from the encoder `start.take`."""
        sources = dict[str, WeightSource]()
        for name in self.encoders:
            setting = "generator_layers" if name == "generator" else "discriminator_layers"
            layers = getattr(cfg, setting)
            sources[name] = WeightSource(start.folder, cast(EncoderName, start.take), layers, f"lower model.{setting}")
        return sources

    def shape_settings(self, cfg: ModelConfig) -> dict[str, Any]:
        """The settings, by name, that must be equal in two models if one starts from all parameters of the other. The
        settings in `first_weights.SHAPE` must be equal even if it starts from one encoder alone."""
        names = ["generator_layers", "embedding_sharing"] if len(self.encoders) > 1 else []
        return {name: getattr(cfg, name) for name in (*names, "discriminator_layers")}


def require_masks(run: RunConfig) -> None:
    """Raise ValueError if `objective.mask_fraction` masks no tokens or all tokens."""
    fraction = run.objective.mask_fraction
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"objective.mask_fraction is {fraction}: it must be between 0 and 1")


def require_sentences(rows: RowStore, needed: bool) -> None:
    """Raise ValueError if monolingual rows were mixed in another way than the objective needs; pairs are not checked.

    If sentences are `needed`, each row must hold several (`mix --sentences`). If not, each must be a slice of text
    (mixed without `--sentences` or `--documents`).
    """
    unit = rows.manifest.packed_unit
    if rows.folder.name == "mono" and unit != ("sentences" if needed else ""):
        actual = f"with --{unit}" if unit else "without --sentences"
        required = "with --sentences" if needed else "without --sentences or --documents"
        raise ValueError(
            f"{rows.folder} was mixed {actual}, and this objective reads what was mixed {required}: mix it again"
        )
