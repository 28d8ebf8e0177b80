"""The interfaces of an objective and of its data: engines and the training loop use `Objective` and `BatchSource`, the
rest of the program uses `Pretraining`.

B rows, T tokens, M masked positions. Tasks are in the order of data.rows.TASKS: mono, para.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self, cast

from torch import Tensor, nn

from ..config import ModelConfig, ObjectiveConfig, OptimizerConfig, RunConfig, StartConfig
from ..data.batch import Batch
from ..data.collate import Collate, Purpose
from ..data.order import Phase, StepPlan
from ..models.layer_costs import MicroBatch
from ..models.pipeline import Flops, Part
from ..models.text_encoder import EncoderName

if TYPE_CHECKING:  # models and engines run where there is no pyarrow
    from ..data.shards import RowStore


class Objective(Protocol):
    """A pre-training task. The loss is Σ weight · sum / count over the terms, where sums and counts are added up over
    the micro-batches of the global batch."""

    terms: tuple[str, ...]  # their names
    statistics_shape: tuple[int, ...]  # of the tensor that `statistics` returns
    weights: Tensor  # float64 [terms]

    def at(self, step: int) -> Self:
        """This objective with the weights of `step`; by default all steps have the same weights."""
        return self

    def build(self, cfg: ModelConfig) -> nn.Module:
        """The model that this objective trains, uninitialised; its input is a batch."""

    def learning_rates(self, names: Sequence[str], cfg: OptimizerConfig) -> list[float]:
        """For each parameter in `names` the factor of the step's learning rate; by default 1."""
        return [1.0] * len(names)

    def probe(self, batch: Any) -> Any:
        """`batch` changed so that its loss, which checkpoints store, is the same with another processor or kernel:
        rounding must not change what the model samples or predicts. By default `batch` itself."""
        return batch

    def counts(self, batch: Any) -> Tensor:
        """The divisor of each term's sum, float64 [terms]."""

    def sums(self, output: Any, batch: Any) -> Tensor:
        """The summed loss of each term, float32 [terms]; carries the gradient."""

    def statistics(self, output: Any, batch: Any) -> Tensor:
        """More numbers for the metrics, float64; the statistics of several batches are added up."""

    def summarise(self, sums: Tensor, counts: Tensor, statistics: Tensor) -> dict[str, float]:
        """The metrics by name, `loss` among them, from the sums, counts and statistics of a global batch."""


class BatchSource(Protocol):
    """The batches that an engine trains on. `loader.Loader` implements it for data folders."""

    plan: StepPlan
    row_tokens: int  # tokens of a row; the mean where rows differ

    @property
    def phases(self) -> Sequence[Phase]:
        """The phases of the run."""

    @property
    def fingerprints(self) -> dict[str, str]:
        """Checksums of the data by name; a run resumes only with the same ones."""

    def step(self, step: int) -> Sequence[Any]:
        """All micro-batches of this rank in step `step`."""

    def describe_rows(self, step: int, micro_batch: int | None = None) -> str:
        """The row numbers of a micro-batch of this rank, or of the whole step, such as `mono 328-335, para 164-167`."""

    def probe(self) -> Any:
        """A small batch that is equal on all ranks and for any world size."""


class Quantity(NamedTuple):
    """A metric as the report page and the model card show it."""

    title: str  # of the figure; quantities with the same title share a figure
    unit: str = ""
    task: str = ""  # the task it is measured on; empty: on each task, as metrics `auc_mono` and `auc_para` of `auc`
    unigram: bool = False  # whether it is −log p of a task's tokens, comparable with a unigram model's


class FirstWeights(NamedTuple):
    """The encoder of another model from which a part of this model starts."""

    folder: str  # of the other model
    which: EncoderName | None  # the encoder there; None: its main one
    layers: int  # the part takes this many layers of that encoder
    remedy: str  # which setting to change if that encoder has fewer layers, for the error
    convert: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict  # that encoder's parameters to the part's


# Settings that only some objectives read (`Pretraining.reads`); with other objectives they must have their defaults.
OBJECTIVE_SETTINGS = (
    *("objective.discriminator_weight", "objective.generator_temperature", "objective.generator_keep_fraction"),
    *("objective.random_fakes", "objective.random_fraction", "objective.keep_fraction", "objective.z_loss"),
    *("objective.pseudo_fractions", "objective.denoising", "objective.back_translation"),
    *("model.decoder", "model.decoder_layers", "start.into", "start.decoder"),
)


class Pretraining(Objective, Protocol):
    """An objective of pre-training: one file, and one line in `OBJECTIVES`.

    The rest of the program uses only what is declared here. If an objective predicts tokens, its first term is their
    −log p (nats), on monolingual text, or on pairs if it reads only pairs; the term's quantity has `unigram` set.
    """

    description: str  # one sentence without its full stop, for report, model card and plan
    # The metrics by name, terms included. A metric of each task is listed once, without `_mono` and `_para`.
    quantities: Mapping[str, Quantity]
    mask_fraction: float  # share of an item's ordinary tokens that are predicted
    # The encoders of its model: the name that starts an encoder's parameter names, and the prefix of the parameters of
    # its head. The first encoder is split into pipeline stages, evaluated, fine-tuned and exported. The blocks of the
    # token embedding are the parameters `embedding_n`.
    encoders: Mapping[EncoderName, str]
    reads: tuple[str, ...] = ()  # the settings in OBJECTIVE_SETTINGS that it reads
    # The class of `export/remote` of its exported model; empty: each encoder is exported with the class for its head.
    export_class: str = ""
    reads_whole_rows: bool = True  # whether its first encoder reads whole rows of a batch, not one side of a pair
    may_start_random: bool = False  # whether `start.take` may name an encoder while `start.folder` is empty
    starts_in_layout: bool = False  # whether `model.layout` must equal that of the model it starts from

    def __init__(self, cfg: ObjectiveConfig): ...

    def batches(self, rows: "RowStore", purpose: Purpose) -> Collate:
        """The function that makes batches from `rows` and from the rows of the other task in the same folder."""

    def check_rows(self, rows: "RowStore", purpose: Purpose) -> None:
        """Raise ValueError for rows of one task that the objective cannot read."""

    def check(self, run: RunConfig) -> None:
        """Raise ValueError for settings with which it cannot train; by default for settings in OBJECTIVE_SETTINGS that
        it does not read and that differ from their defaults."""
        defaults = RunConfig(name="")
        for name in OBJECTIVE_SETTINGS:
            value, default = attrgetter(name)(run), attrgetter(name)(defaults)
            if name not in self.reads and value != default:
                remedy = "leave it empty" if default in ("", ()) else f"leave it at {default}"
                raise ValueError(
                    f"{name} is {value}, and objective.name {run.objective.name} does not read it: {remedy}"
                )

    def build(self, cfg: ModelConfig, part: Part | None = None) -> nn.Module:
        """The model, or the stage that runs one `part` of it in a pipeline (`models/pipeline.py`)."""

    def flops(self, cfg: ModelConfig, row_tokens: int) -> Flops:
        """Operations per token of a forward pass on full rows of `row_tokens` tokens."""

    def passes(self, batch: MicroBatch) -> list[MicroBatch]:
        """The size of the input of each forward pass before a micro-batch's backward pass, the largest first."""
        return [batch]

    def by_language(self, output: Any, batch: Batch, languages: int) -> Tensor:
        """`sums` and `counts` of each language's tokens, float64 [2, terms, languages]."""

    def predicted_positions(self, batch: Batch) -> Tensor:
        """The predicted positions [M], as ascending indices into the flattened tokens; by default the masked ones."""
        return batch.masked_M

    def shown(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """For the report page: the tokens with the model's own at the predicted positions, [B, T]; and the
        probability of each token that it was replaced, [B, T], or None if the model does not predict it."""

    def first_weights(self, start: StartConfig, cfg: ModelConfig) -> dict[str, FirstWeights]:
        """The encoder that each part of the model starts from, by the prefix of the part's parameters; by default each
        encoder starts from `start.take`."""
        weights = dict[str, FirstWeights]()
        for name in self.encoders:
            setting = "generator_layers" if name == "generator" else "discriminator_layers"
            layers = getattr(cfg, setting)
            weights[name] = FirstWeights(start.folder, cast(EncoderName, start.take), layers, f"lower model.{setting}")
        return weights

    def shape(self, cfg: ModelConfig) -> dict[str, Any]:
        """Settings by name that must be equal in two models if one starts from all parameters of the other. Settings
        that must be equal for a single encoder are not among them."""
        names = ["generator_layers", "embedding_sharing"] if len(self.encoders) > 1 else []
        return {name: getattr(cfg, name) for name in (*names, "discriminator_layers")}


def require_masks(run: RunConfig) -> None:
    """Raise ValueError if no tokens or all tokens are masked."""
    fraction = run.objective.mask_fraction
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"objective.mask_fraction is {fraction}: it must be between 0 and 1")


def require_sentences(rows: "RowStore", needed: bool) -> None:
    """Raise ValueError unless monolingual rows hold several sentences (`mix --sentences`) if `needed`, else one text
    each."""
    packed, expected = rows.manifest.packed, "sentences" if needed else ""
    if rows.folder.name == "mono" and packed != expected:
        mixed, must_be = (f"with --{unit}" if unit else "without --sentences" for unit in (packed, expected))
        raise ValueError(
            f"{rows.folder} was mixed {mixed}, and this objective reads what was mixed {must_be}: mix it again"
        )
