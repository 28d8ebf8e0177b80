"""The interfaces of an objective and of its data: `Objective` and `BatchSource` for engines and the training loop,
`Pretraining` for the rest of the program.

M masked positions. Tasks are in the order of data.rows.TASKS: mono, para.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from torch import Tensor, nn

from ..config import ModelConfig, ObjectiveConfig, OptimizerConfig, RunConfig
from ..data.batch import Batch
from ..data.collate import Collate, Purpose
from ..data.order import StepPlan
from ..io.errors import Check
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
        """This objective with the weights of `step`; most have equal weights in all steps."""

    def build(self, cfg: ModelConfig) -> nn.Module:
        """The model that this objective trains, uninitialised; it takes a batch."""

    def learning_rates(self, names: Sequence[str], cfg: OptimizerConfig) -> list[float]:
        """The learning rate of each parameter, by name, as a multiple of that of the step."""

    def probe(self, batch: Any) -> Any:
        """`batch` without anything that another processor or kernel could change by a rounding: checkpoints store its
        loss."""

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
    has_decoder: bool  # whether its model has a decoder next to its encoder
    # Whether its heads are on encoders that see the tokens on both sides: not on a decoder, nor on a causal encoder.
    reads_both_sides: bool

    def __init__(self, cfg: ObjectiveConfig): ...

    def batches(self, rows: "RowStore", purpose: Purpose) -> Collate:
        """The function that makes batches from `rows` and the rows of the other task next to them."""

    def check_rows(self, rows: "RowStore", purpose: Purpose) -> None:
        """Raise ValueError for rows of one task that the objective cannot read."""

    def checks(self, run: RunConfig) -> list[Check]:
        """Conditions on the settings that it reads, beyond their ranges, each with its error message."""

    def build(self, cfg: ModelConfig, part: Part | None = None) -> nn.Module:
        """The model, or the form of one `part` of it that a pipeline runs (`models/pipeline.py`)."""

    def work(self, cfg: ModelConfig, row_tokens: int) -> Work:
        """Operations of a forward pass on full rows of `row_tokens` tokens, a token."""

    def by_language(self, output: Any, batch: Batch, languages: int) -> Tensor:
        """`sums` and `counts` by the language of the token (of `languages`), float64 [2, terms, languages]."""

    def places(self, batch: Batch) -> Tensor:
        """The places that it predicts, as indices into the flattened tokens, ascending [M]."""

    def shown(self, output: Any, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """For the page: the tokens [B, T] with what the model put in the masked places, and the probability [B, T] that
        each was replaced; None from a model that judges none."""


def masks_some(run: RunConfig) -> Check:
    """Check that a share of the tokens is masked, neither none nor all."""
    fraction = run.objective.mask_fraction
    return 0.0 < fraction < 1.0, f"objective.mask_fraction is {fraction}: it must be between 0 and 1"


OF_GENERATORS = "discriminator_weight", "generator_temperature", "generator_keep_fraction", "random_fakes"
OF_MASKING = "random_fraction", "keep_fraction"


def not_read(run: RunConfig, *names: str) -> list[Check]:
    """Check that settings which the objective does not read have their defaults."""
    settings, usual = run.objective, ObjectiveConfig()
    return [
        (
            getattr(settings, name) == getattr(usual, name),
            f"objective.{name} is {getattr(settings, name)}, and objective.name {settings.name} does not read it: "
            f"leave it {f'at {getattr(usual, name)}' if getattr(usual, name) != () else 'empty'}",
        )
        for name in names
    ]


def adds_none(run: RunConfig) -> Check:
    """Check that no tokens are added to those of the data."""
    settings = run.objective
    return (
        not settings.pseudo_fractions,
        f"objective.pseudo_fractions are for objective.name btmlm, not {settings.name}: leave them empty",
    )


def require_sentences(rows: "RowStore", needed: bool) -> None:
    """Raise ValueError for monolingual rows that hold whole sentences (mix --sentences) where they must not, or that
    hold none where they are `needed`."""
    has = bool(rows.manifest.settings.get("sentences"))
    mixed, must_be = ("with" if each else "without" for each in (has, needed))
    if rows.folder.name == "mono" and has != needed:
        raise ValueError(
            f"{rows.folder} was mixed {mixed} --sentences, and this objective reads what was mixed {must_be} it: mix "
            "it again"
        )
