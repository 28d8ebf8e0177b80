"""The interfaces of an objective and of its data: `Objective` and `BatchSource` for engines and the training loop,
`Pretraining` for the rest of the program.

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
from ..models.pipeline import Part, Work
from ..models.text_encoder import Which

if TYPE_CHECKING:  # models and engines run where there is no pyarrow
    from ..data.shards import RowStore


class Objective(Protocol):
    """Tensors in, sums and counts out: a mean is a sum over the counts of the whole global batch."""

    terms: tuple[str, ...]  # names of the summands of the loss
    statistics_shape: tuple[int, ...]
    weights: Tensor  # float64, of each term in the loss

    def at(self, step: int) -> Self:
        """This objective with the weights of `step`; here they are equal in all steps."""
        return self

    def build(self, cfg: ModelConfig) -> nn.Module:
        """The model that this objective trains, uninitialised; it takes a batch."""

    def learning_rates(self, names: Sequence[str], cfg: OptimizerConfig) -> list[float]:
        """The learning rate of each parameter, by name, as a multiple of that of the step; here 1."""
        return [1.0] * len(names)

    def probe(self, batch: Any) -> Any:
        """`batch` without anything that another processor or kernel could change by a rounding: checkpoints store its
        loss. Here there is nothing of that kind."""
        return batch

    def counts(self, batch: Any) -> Tensor:
        """The counts that each term is a mean over, float64 [terms]."""

    def sums(self, output: Any, batch: Any) -> Tensor:
        """The summed losses of each term, float32 [terms]; carries the gradient."""

    def statistics(self, output: Any, batch: Any) -> Tensor:
        """Counts from which the reported numbers follow, float64, additive."""

    def summarise(self, sums: Tensor, counts: Tensor, statistics: Tensor) -> dict[str, float]:
        """The reported numbers of a global batch, `loss` among them, from added-up sums, counts and statistics."""


class BatchSource(Protocol):
    """The batches of a step, for an engine. `loader.Loader` implements it for data folders."""

    plan: StepPlan
    row_tokens: int  # tokens of a row; the mean, where they differ

    @property
    def phases(self) -> Sequence[Phase]:
        """The phases of the run."""

    @property
    def fingerprints(self) -> dict[str, str]:
        """A checksum of the data, by part: a resumed run must have the same."""

    def step(self, step: int) -> Sequence[Any]:
        """All micro-batches of this rank in step `step`."""

    def rows_of(self, step: int, micro_batch: int | None = None) -> str:
        """The rows of that micro-batch of this rank, or of the whole step, in words: `mono 328-335, para 164-167`."""

    def probe(self) -> Any:
        """A small batch that is equal on all ranks, whatever their number."""


class Quantity(NamedTuple):
    """A reported number in words, as report page and model card show it."""

    title: str  # of its figure; quantities of one title share a figure
    unit: str = ""
    task: str = ""  # whose rows it is of, mono or para; empty where the name says so (`auc_mono` of `auc`)
    unigram: bool = False  # whether it is the −log p of a task's tokens, to which that of a unigram model is compared


class FirstWeights(NamedTuple):
    """The encoder of another model that a part of this model takes its first weights from."""

    folder: str  # of the other model
    which: Which | None  # the encoder there; None: its main one
    layers: int  # number of its layers that the part takes
    remedy: str  # what to change where it has fewer
    convert: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = dict  # its parameters as those of the part


# Settings that some objectives read (`Pretraining.reads`): for the others they must have their defaults.
SPECIAL = (
    *("objective.discriminator_weight", "objective.generator_temperature", "objective.generator_keep_fraction"),
    *("objective.random_fakes", "objective.random_fraction", "objective.keep_fraction", "objective.z_loss"),
    *("objective.pseudo_fractions", "objective.denoising", "objective.back_translation"),
    *("model.decoder", "model.decoder_layers", "start.into", "start.decoder"),
)


class Pretraining(Objective, Protocol):
    """An objective of pre-training: one file, and one line in `OBJECTIVES`.

    The rest of the program uses only what is declared here. The first term is the −log p (nats) of predicted tokens of
    monolingual text, or of pairs where nothing else is read; its quantity is then a `unigram` one.
    """

    description: str  # one sentence without its full stop, for report, model card and plan
    # What it reports, the terms among it, by name; without `_mono` or `_para` where there is one of each task.
    quantities: Mapping[str, Quantity]
    mask_fraction: float  # of the ordinary tokens of an item, those that are predicted
    # The encoders of its model, by the prefix of the parameters (a dot follows), with the prefix of the head that is
    # trained on each; the first one is cut into stages, evaluated, fine-tuned and exported. A token embedding is
    # `embedding_n`.
    encoders: Mapping[Which, str]
    reads: tuple[str, ...] = ()  # those of the settings in SPECIAL that it reads
    # The class of `export/remote` that its model is exported as; empty: that of the head of each encoder.
    export_class: str = ""
    reads_whole_rows: bool = True  # whether its first encoder reads the rows of a batch as they are, not taken apart
    may_start_random: bool = False  # whether weights may be random though `start.take` names an encoder
    starts_in_layout: bool = False  # whether it needs the layout of the model that it starts from

    def __init__(self, cfg: ObjectiveConfig): ...

    def batches(self, rows: "RowStore", purpose: Purpose) -> Collate:
        """The function that makes batches from `rows` and the rows of the other task next to them."""

    def check_rows(self, rows: "RowStore", purpose: Purpose) -> None:
        """Raise ValueError for rows of one task that the objective cannot read."""

    def check(self, run: RunConfig) -> None:
        """Raise ValueError for settings that it cannot train with, beyond their ranges; here for those that it does
        not read."""
        usual = RunConfig(name="")
        for name in SPECIAL:
            value, default = (attrgetter(name)(settings) for settings in (run, usual))
            if name not in self.reads and value != default:
                remedy = "leave it empty" if default in ("", ()) else f"leave it at {default}"
                raise ValueError(
                    f"{name} is {value}, and objective.name {run.objective.name} does not read it: {remedy}"
                )

    def build(self, cfg: ModelConfig, part: Part | None = None) -> nn.Module:
        """The model, or the form of one `part` of it that a pipeline runs (`models/pipeline.py`)."""

    def work(self, cfg: ModelConfig, row_tokens: int) -> Work:
        """Operations of a forward pass on full rows of `row_tokens` tokens, a token."""

    def passes(self, batch: MicroBatch) -> list[MicroBatch]:
        """The inputs of the passes over a micro-batch that one backward pass goes through, the largest first."""
        return [batch]

    def by_language(self, output: Any, batch: Batch, languages: int) -> Tensor:
        """`sums` and `counts` by the language of the token (of `languages`), float64 [2, terms, languages]."""

    def places(self, batch: Batch) -> Tensor:
        """The places that it predicts, as indices into the flattened tokens, ascending [M]; here the masked ones."""
        return batch.masked_M

    def shown(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """For the page: the tokens [B, T] with what the model put in the masked places, and the probability [B, T] that
        each was replaced; None from a model that judges none."""

    def first_weights(self, start: StartConfig, cfg: ModelConfig) -> dict[str, FirstWeights]:
        """The encoder that each part of the model starts from, by the prefix of the part's parameters."""
        weights, which = dict[str, FirstWeights](), cast(Which, start.take)
        for name in self.encoders:
            setting = "generator_layers" if name == "generator" else "discriminator_layers"
            weights[name] = FirstWeights(start.folder, which, getattr(cfg, setting), f"lower model.{setting}")
        return weights

    def shape(self, cfg: ModelConfig) -> dict[str, Any]:
        """The settings, by name, that another model needs to have too if all of its parameters are taken, besides
        those that every encoder needs."""
        names = ["generator_layers", "embedding_sharing"] if len(self.encoders) > 1 else []
        return {name: getattr(cfg, name) for name in (*names, "discriminator_layers")}


def require_masks(run: RunConfig) -> None:
    """Raise ValueError unless a share of the tokens is masked, neither none nor all."""
    fraction = run.objective.mask_fraction
    if not 0.0 < fraction < 1.0:
        raise ValueError(f"objective.mask_fraction is {fraction}: it must be between 0 and 1")


def require_sentences(rows: "RowStore", needed: bool) -> None:
    """Raise ValueError for monolingual rows of several texts where an objective reads one text a row, or, where it
    needs sentences (mix --sentences), for other rows."""
    wanted, unit = "sentences" if needed else "", rows.manifest.packed
    if rows.folder.name == "mono" and unit != wanted:
        mixed, must_be = (f"with --{packed}" if packed else "without --sentences" for packed in (unit, wanted))
        raise ValueError(
            f"{rows.folder} was mixed {mixed}, and this objective reads what was mixed {must_be}: mix it again"
        )
