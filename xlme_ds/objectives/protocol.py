"""The interfaces of an objective and of its data: engines and the training loop use `Objective` and `BatchSource`, the
rest of the program uses `Pretraining`.

M masked positions. Tasks are in the order of data.rows.TASKS: mono, para.
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
    """Functions from tensors to sums and counts: a mean is a sum divided by its count, both of the global batch."""

    terms: tuple[str, ...]  # names of the summands of the loss
    statistics_shape: tuple[int, ...]
    weights: Tensor  # of the terms in the loss, float64 [terms]

    def at(self, step: int) -> Self:
        """This objective with the weights of `step`; by default they are equal in all steps."""
        return self

    def build(self, cfg: ModelConfig) -> nn.Module:
        """The model that this objective trains, uninitialised; its input is a batch."""

    def learning_rates(self, names: Sequence[str], cfg: OptimizerConfig) -> list[float]:
        """The learning rates of the parameters `names` as multiples of the step's; by default 1."""
        return [1.0] * len(names)

    def probe(self, batch: Any) -> Any:
        """`batch` changed so that its loss, which checkpoints store, does not depend on rounding: another processor or
        kernel could round to another sample or prediction. By default `batch` itself."""
        return batch

    def counts(self, batch: Any) -> Tensor:
        """The counts that each term is a mean over, float64 [terms]."""

    def sums(self, output: Any, batch: Any) -> Tensor:
        """The summed loss of each term, float32 [terms]; carries the gradient."""

    def statistics(self, output: Any, batch: Any) -> Tensor:
        """Counts that the reported numbers are computed from, float64; those of several batches are added."""

    def summarise(self, sums: Tensor, counts: Tensor, statistics: Tensor) -> dict[str, float]:
        """The reported numbers of a global batch, `loss` among them, from added-up sums, counts and statistics."""


class BatchSource(Protocol):
    """The batches of a step, for an engine. `loader.Loader` implements it for data folders."""

    plan: StepPlan
    row_tokens: int  # tokens of a row; the mean where rows differ

    @property
    def phases(self) -> Sequence[Phase]:
        """The phases of the run."""

    @property
    def fingerprints(self) -> dict[str, str]:
        """A checksum of each part of the data: a resumed run must have the same ones."""

    def step(self, step: int) -> Sequence[Any]:
        """All micro-batches of this rank in step `step`."""

    def describe_rows(self, step: int, micro_batch: int | None = None) -> str:
        """The rows of a micro-batch of this rank, or of the whole step, in words: `mono 328-335, para 164-167`."""

    def probe(self) -> Any:
        """A small batch that is equal on all ranks, whatever their number."""


class Quantity(NamedTuple):
    """A reported number in words, as the report page and the model card show it."""

    title: str  # of its figure; quantities with the same title share one
    unit: str = ""
    task: str = ""  # mono or para, the rows it is measured on; empty if it has one value a task (`auc_mono` of `auc`)
    unigram: bool = False  # whether it is −log p of a task's tokens, to be compared with that of a unigram model


class FirstWeights(NamedTuple):
    """The encoder of another model from which a part of this model starts."""

    folder: str  # of the other model
    which: EncoderName | None  # the encoder there; None: its main one
    layers: int  # how many of its layers the part takes
    remedy: str  # the change to suggest if it has fewer
    convert: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict  # from its parameters to the part's


# Settings that only some objectives read (`Pretraining.reads`); for all others they must have their defaults.
OBJECTIVE_SETTINGS = (
    *("objective.discriminator_weight", "objective.generator_temperature", "objective.generator_keep_fraction"),
    *("objective.random_fakes", "objective.random_fraction", "objective.keep_fraction", "objective.z_loss"),
    *("objective.pseudo_fractions", "objective.denoising", "objective.back_translation"),
    *("model.decoder", "model.decoder_layers", "start.into", "start.decoder"),
)


class Pretraining(Objective, Protocol):
    """An objective of pre-training: one file, and one line in `OBJECTIVES`.

    The rest of the program uses only what is declared here. If the first term is −log p (nats) of predicted tokens, its
    quantity is a `unigram` one; the tokens are of monolingual text, or of pairs if only pairs are read.
    """

    description: str  # one sentence without its full stop, for report, model card and plan
    # The numbers that it reports, terms included, by name, without `_mono` or `_para` where each task has one.
    quantities: Mapping[str, Quantity]
    mask_fraction: float  # share of the ordinary tokens of an item that are predicted
    # For each encoder of its model, the prefix of its parameters (a dot follows) and that of its head's. The first one
    # is cut into stages, evaluated, fine-tuned and exported. The blocks of the token embedding are `embedding_n`.
    encoders: Mapping[EncoderName, str]
    reads: tuple[str, ...] = ()  # the settings in OBJECTIVE_SETTINGS that it reads
    # The class of `export/remote` as which its model is exported; empty: each encoder as the class of its head.
    export_class: str = ""
    reads_whole_rows: bool = True  # whether its first encoder reads whole rows of a batch, not parts of them
    may_start_random: bool = False  # whether `start.take` may name an encoder without `start.folder`
    starts_in_layout: bool = False  # whether its layout must be that of the model that it starts from

    def __init__(self, cfg: ObjectiveConfig): ...

    def batches(self, rows: "RowStore", purpose: Purpose) -> Collate:
        """The function that makes batches from `rows` and from the rows of the other task in the same folder."""

    def check_rows(self, rows: "RowStore", purpose: Purpose) -> None:
        """Raise ValueError for rows of one task that the objective cannot read."""

    def check(self, run: RunConfig) -> None:
        """Raise ValueError for settings with which it cannot train; by default for changed settings that it does not
        read."""
        defaults = RunConfig(name="")
        for name in OBJECTIVE_SETTINGS:
            value, default = (attrgetter(name)(settings) for settings in (run, defaults))
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
        """The input sizes of the forward passes that precede a micro-batch's backward pass, the largest first."""
        return [batch]

    def by_language(self, output: Any, batch: Batch, languages: int) -> Tensor:
        """`sums` and `counts` by the language of the token, float64 [2, terms, languages]."""

    def places(self, batch: Batch) -> Tensor:
        """The predicted positions as ascending indices into the flattened tokens [M]; by default the masked ones."""
        return batch.masked_M

    def shown(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """For the report page: the tokens [B, T] with the model's own at the masked positions, and the probability
        [B, T] that each was replaced, or None if the model does not predict that."""

    def first_weights(self, start: StartConfig, cfg: ModelConfig) -> dict[str, FirstWeights]:
        """The encoder that each part of the model starts from, by the prefix of the part's parameters; by default
        `start.take`."""
        weights, which = dict[str, FirstWeights](), cast(EncoderName, start.take)
        for name in self.encoders:
            setting = "generator_layers" if name == "generator" else "discriminator_layers"
            weights[name] = FirstWeights(start.folder, which, getattr(cfg, setting), f"lower model.{setting}")
        return weights

    def shape(self, cfg: ModelConfig) -> dict[str, Any]:
        """Settings by name, in addition to those of every encoder, in which another model must be equal if all of its
        parameters are taken."""
        names = ["generator_layers", "embedding_sharing"] if len(self.encoders) > 1 else []
        return {name: getattr(cfg, name) for name in (*names, "discriminator_layers")}


def require_masks(run: RunConfig) -> None:
    """Raise ValueError unless a share of the tokens is masked, neither none nor all."""
    fraction = run.objective.mask_fraction
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"objective.mask_fraction is {fraction}: it must be between 0 and 1")


def require_sentences(rows: "RowStore", needed: bool) -> None:
    """Raise ValueError for monolingual rows of another form: sentences (mix --sentences) where they are `needed`, else
    one text a row."""
    wanted, unit = "sentences" if needed else "", rows.manifest.packed
    if rows.folder.name == "mono" and unit != wanted:
        mixed, must_be = (f"with --{packed}" if packed else "without --sentences" for packed in (unit, wanted))
        raise ValueError(
            f"{rows.folder} was mixed {mixed}, and this objective reads what was mixed {must_be}: mix it again"
        )
