"""One training step (forward, backward, optimizer) of ours, of a Hugging Face loop and of plain torch, in one run.

    python -m bench.step [--json] [--quick] [--rounds 5] [--sizes base middle]

Each contender is a process of its own with all cores; ours and one peer take turns, step by step, so that what else the
machine does falls on both alike. All train generator and discriminator of one shape on the same rows, in bf16 with
float32 master weights and AdamW. Operations by the standard count (`xlme_ds.counting`), the same for all; the peak is a
bf16 matrix product of 4096 x 4096 x 4096, measured between the steps. Memory is the growth of a process's largest
resident set over what it had before the model was built. Rows are synthetic: two of text, two of packed pairs, 512
tokens each. B rows, T tokens, M masked positions, V vocabulary.
"""

import json
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
import tyro
from torch import Tensor, nn

from bench.synthetic import SyntheticSource
from bench.workers import Figures, Worker, answer, memory
from xlme_ds.config import DataConfig, ModelConfig, RunConfig
from xlme_ds.counting import flops_per_step
from xlme_ds.data.batch import Batch
from xlme_ds.recipes import recipe
from xlme_ds.validate import validate

Size = Literal["base", "middle", "tiny"]
PRODUCT = 2.0 * 4096**3  # operations
RATE = 1e-4
CPU = torch.device("cpu")


@dataclass(frozen=True)
class StepSettings:
    """What to measure."""

    # base: Base with XLM-R's 250,002 pieces; middle: 4 + 8 layers of width 384, 64,000 pieces; tiny: for tests
    sizes: tuple[Size, ...] = ("base", "middle")
    rounds: int = 5  # of which the medians are taken
    quick: bool = False  # the middle size alone, three rounds
    json: bool = False  # print JSON
    contender: str = ""  # used by the command itself


def sized(size: Size) -> RunConfig:
    """Base or a middle size, 4 rows of 512 a step."""
    run = recipe("base_zero1")
    model = run.model
    if size == "middle":
        model = replace(model, vocabulary=64_000, width=384, heads=6, feed_forward=1536, discriminator_layers=8)
    if size == "tiny":
        model = replace(model, vocabulary=600, width=32, heads=2, feed_forward=64, max_positions=64)
        model = replace(model, generator_layers=1, discriminator_layers=2)
    engine = replace(run.engine, precision="bf16")
    return validate(replace(run, model=model, data=DataConfig(2, 2, micro_batch=2), engine=engine))


class OurStep:
    """The engine of the run, DeepSpeed's ZeRO-1 on one process."""

    def __init__(self, run: RunConfig):
        from xlme_ds.engine.build import build_engine
        from xlme_ds.engine.ranks import start_process_group

        start_process_group(run.engine)
        source: Any = SyntheticSource(run, run.model.max_positions)
        self.engine: Any = build_engine(run, source, None)

    def step(self) -> None:
        """One optimizer step."""
        self.engine.train_batch(0, RATE, detailed=False)


class PeerStep(ABC):
    """The customary loop: weights in float32, bf16 by autocast, torch's fused AdamW; λ and clipping as in the run."""

    def __init__(self, run: RunConfig, device: torch.device = CPU):
        self.run, self.device = run, device
        self.batch: Batch = SyntheticSource(run, run.model.max_positions).batches[0].to(device)
        with device:
            self.model = self._build(run.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.01, fused=True)

    @abstractmethod
    def _build(self, cfg: ModelConfig) -> nn.Module:
        """Both networks, initialised."""

    @abstractmethod
    def _generate(self, masked_BT: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of the masked positions [M, V] and the generator's loss; `masked_BT` has <mask> in place."""

    @abstractmethod
    def _discriminate(self, ids_BT: Tensor) -> Tensor:
        """The discriminator's logits [B, T]."""

    def loss(self) -> Tensor:
        """Generator's loss plus λ times the discriminator's."""
        ids_BT, chosen_M = self.batch.tokens_BT, self.batch.masked_M
        masked_BT = ids_BT.flatten().index_fill(0, chosen_M, self.run.model.vocabulary - 1).view_as(ids_BT)
        logits_MV, loss = self._generate(masked_BT)
        with torch.no_grad():
            sample_M = torch.multinomial(logits_MV.float().softmax(-1), 1).squeeze(1)
        corrupted_BT = ids_BT.flatten().index_copy(0, chosen_M, sample_M).view_as(ids_BT)
        logits_BT, replaced_BT = self._discriminate(corrupted_BT), corrupted_BT != ids_BT
        weight = self.run.objective.discriminator_weight
        return loss + weight * F.binary_cross_entropy_with_logits(logits_BT.float(), replaced_BT.float())

    def step(self) -> None:
        """One optimizer step on all rows at once."""
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.loss()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.run.optimizer.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


class HuggingFaceStep(PeerStep):
    """`ElectraForMaskedLM` and `ElectraForPreTraining` with one embedding; its rows attend over their whole length."""

    def _build(self, cfg: ModelConfig) -> nn.Module:
        from transformers import ElectraConfig, ElectraForMaskedLM, ElectraForPreTraining

        def settings(layers: int) -> Any:
            return ElectraConfig(
                vocab_size=cfg.vocabulary, embedding_size=cfg.width, hidden_size=cfg.width, num_hidden_layers=layers,
                num_attention_heads=cfg.heads, intermediate_size=cfg.feed_forward,
                max_position_embeddings=cfg.max_positions, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            )  # fmt: skip

        self.generator = ElectraForMaskedLM(settings(cfg.generator_layers))
        self.discriminator = ElectraForPreTraining(settings(cfg.discriminator_layers))
        self.discriminator.electra.embeddings = self.generator.electra.embeddings
        return nn.ModuleList([self.generator, self.discriminator])

    def _generate(self, masked_BT: Tensor) -> tuple[Tensor, Tensor]:
        # Logits of all positions, as the library gives them; labels of −100 leave out the ones that are not masked.
        ids_BT, chosen_M = self.batch.tokens_BT, self.batch.masked_M
        labels_BT = torch.full_like(ids_BT, -100).flatten().index_copy(0, chosen_M, ids_BT.flatten()[chosen_M])
        out = self.generator(input_ids=masked_BT, labels=labels_BT.view_as(ids_BT))
        return out.logits.flatten(0, 1)[chosen_M], out.loss

    def _discriminate(self, ids_BT: Tensor) -> Tensor:
        return self.discriminator(input_ids=ids_BT).logits


class PlainTorchStep(PeerStep):
    """`nn.TransformerEncoder` twice; logits at the masked positions only, all at once."""

    def _build(self, cfg: ModelConfig) -> nn.Module:
        def encoder(layers: int) -> nn.Module:
            layer = nn.TransformerEncoderLayer(
                cfg.width, cfg.heads, cfg.feed_forward, dropout=0.0, activation="gelu", batch_first=True
            )
            return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

        self.tokens, self.places = nn.Embedding(cfg.vocabulary, cfg.width), nn.Embedding(cfg.max_positions, cfg.width)
        self.generator, self.discriminator = encoder(cfg.generator_layers), encoder(cfg.discriminator_layers)
        self.features = nn.Sequential(nn.Linear(cfg.width, cfg.width), nn.GELU(), nn.LayerNorm(cfg.width))
        self.decision = nn.Sequential(nn.Linear(cfg.width, cfg.width), nn.GELU(), nn.Linear(cfg.width, 1))
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=cfg.init_std)
        parts = self.tokens, self.places, self.generator, self.discriminator, self.features, self.decision
        return nn.ModuleList(parts)

    def _embed(self, ids_BT: Tensor) -> Tensor:
        return self.tokens(ids_BT) + self.places.weight[: ids_BT.shape[1]]

    def _generate(self, masked_BT: Tensor) -> tuple[Tensor, Tensor]:
        chosen_M = self.batch.masked_M
        hidden_MD = self.generator(self._embed(masked_BT)).flatten(0, 1)[chosen_M]
        logits_MV = self.features(hidden_MD) @ self.tokens.weight.t()
        return logits_MV, F.cross_entropy(logits_MV.float(), self.batch.tokens_BT.flatten()[chosen_M])

    def _discriminate(self, ids_BT: Tensor) -> Tensor:
        return self.decision(self.discriminator(self._embed(ids_BT))).squeeze(-1)


class MatrixProduct:
    """A bf16 product of 4096 x 4096 x 4096, whose rate is taken for the peak."""

    def __init__(self, run: RunConfig):
        self.a, self.b = (torch.randn(4096, 4096).bfloat16() for _ in range(2))

    def step(self) -> None:
        """One product."""
        torch.mm(self.a, self.b)


PEERS = {"huggingface": HuggingFaceStep, "plain_torch": PlainTorchStep}
CONTENDERS: dict[str, Any] = {"ours": OurStep, "matmul": MatrixProduct} | PEERS


def contender(name: str, size: Size) -> Callable[[object], Figures]:
    """Build a contender; the function takes a step, and returns its seconds and the memory so far."""
    torch.manual_seed(0)
    before = memory("VmRSS")
    built = CONTENDERS[name](sized(size))

    def step(_: object) -> Figures:
        begin = time.perf_counter()
        built.step()
        return {"s": time.perf_counter() - begin, "memory": memory("VmHWM") - before}

    return step


def taken_in_turns(workers: Mapping[str, Worker], rounds: int) -> list[dict[str, Figures]]:
    """The answers of all workers in `rounds` rounds, after two that warm up and do not count."""
    return [{name: worker.ask() for name, worker in workers.items()} for _ in range(2 + rounds)][2:]


def measure(size: Size, rounds: int) -> Figures:
    """Ours next to one peer after the other: all at once would not fit into 24 GB."""
    run = sized(size)
    flops = flops_per_step(run, run.model.max_positions)
    tokens = (run.data.mono_rows + run.data.para_rows) * run.model.max_positions
    answers: dict[str, list[Figures]] = {name: [] for name in CONTENDERS}
    ratios = {}
    for peer in PEERS:
        names = ("ours", peer, "matmul")
        workers = {name: Worker("bench.step", "--contender", name, "--sizes", size) for name in names}
        turns = taken_in_turns(workers, rounds)
        for name, worker in workers.items():
            worker.close()
            answers[name] += [turn[name] for turn in turns]
        # The ratio of each round, and their median: what disturbs a round falls on both.
        ratios[peer] = statistics.median(turn[peer]["s"] / turn["ours"]["s"] for turn in turns)
    seconds = {name: statistics.median(one["s"] for one in found) for name, found in answers.items()}
    peak = PRODUCT / seconds.pop("matmul")
    contenders = {
        name: {
            "tokens_per_s": tokens / median, "gflops": flops / median / 1e9, "step_s": median,
            "fraction_of_matmul_peak": flops / median / peak, "memory_gib": answers[name][-1]["memory"] / 2**30,
        }
        for name, median in seconds.items()
    }  # fmt: skip
    return {
        "contenders": contenders,
        "matmul_peak_gflops": peak / 1e9,
        **{f"ratio_vs_{peer}": ratio for peer, ratio in ratios.items()},
        "fraction_of_matmul_peak": contenders["ours"]["fraction_of_matmul_peak"],
        "memory_vs_huggingface": contenders["ours"]["memory_gib"] / contenders["huggingface"]["memory_gib"],
    }


def markdown(size: str, figures: Figures) -> str:
    """One size for people."""
    lines = [f"{size}: bf16 matrix product {figures['matmul_peak_gflops']:,.0f} GFLOP/s", ""]
    lines += ["| | tokens/s | GFLOP/s | of the peak | memory, GiB | time |", "|---|---|---|---|---|---|"]
    for name, one in figures["contenders"].items():
        lines.append(
            f"| {name} | {one['tokens_per_s']:,.0f} | {one['gflops']:,.0f} | {one['fraction_of_matmul_peak']:.0%} | "
            f"{one['memory_gib']:.2f} | {figures.get(f'ratio_vs_{name}', 1.0):.2f} |"
        )
    lines += ["", f"time: as a multiple of ours, {figures['contenders']['ours']['step_s']:.2f} s a step"]
    return "\n".join(lines)


def main() -> None:
    """Measure, and print tables or JSON; with `--quick` the JSON holds the figures of the middle size."""
    settings = tyro.cli(StepSettings, description=__doc__)
    if settings.contender:
        answer(lambda: contender(settings.contender, settings.sizes[0]))
        return
    sizes: tuple[Size, ...] = ("middle",) if settings.quick else settings.sizes
    found = {size: measure(size, 3 if settings.quick else settings.rounds) for size in sizes}
    if settings.json:
        print(json.dumps(found["middle"] if settings.quick else found, indent=1))
    else:
        print("\n\n".join(markdown(size, figures) for size, figures in found.items()))


if __name__ == "__main__":
    main()
