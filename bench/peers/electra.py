"""The same ELECTRA training by Hugging Face's modules and a loop of plain torch, to compare with a run of ours.

`python -m bench.peers.electra --run RUN --data MIXED --out OUT` takes settings and first weights of a run of `electra`
with tied embeddings and no relative bias, whose two networks are then ElectraForMaskedLM and ElectraForPreTraining, and
trains these on the same rows with the same masks and uniforms. It prints the losses of steps, and writes OUT like RUN,
with its own weights: `xlme evaluate` and `xlme finetune` score the two side by side. What is another's is the model,
the losses, the gradients and AdamW; rows, masks, uniforms, first weights and the schedule are ours.
"""

import argparse
import json
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from bench.peers.hugging_face import HuggingFacePeer, Parts, add, add_layers
from xlme_ds.config import ModelConfig, ObjectiveConfig, RunConfig
from xlme_ds.data.batch import Batch
from xlme_ds.data.rows import TASKS
from xlme_ds.engine.build import open_data
from xlme_ds.models.init import initialise
from xlme_ds.objectives import objective_of
from xlme_ds.train.schedule import learning_rate
from xlme_ds.trained import CONFIG_FILE, MODEL_FOLDER, WEIGHTS_FILE, read_run_config

TIED = "tied", 1, "post", "none", "dense", True, ()


class Peer(HuggingFacePeer):
    """Generator and discriminator of transformers, from the weights that a run of ours begins with."""

    def __init__(self, run: RunConfig):
        from transformers import ElectraForMaskedLM, ElectraForPreTraining

        cfg, objective = run.model, run.objective
        usual = replace(ObjectiveConfig(), mask_fraction=objective.mask_fraction)
        form = cfg.embedding_sharing, cfg.vocabulary_blocks, cfg.norm, cfg.relative_bias, cfg.masked_head
        form = (*form, cfg.absolute_positions, cfg.language_embeddings)
        dropout = cfg.dropout or cfg.attention_dropout
        if replace(objective, discriminator_weight=usual.discriminator_weight) != usual or dropout or form != TIED:
            raise SystemExit(
                "error: transformers' ELECTRA has tied embeddings, post-LN layers and no relative bias: name a run of "
                "electra with --model.embedding-sharing tied --model.relative-bias none, and without dropout, z-loss, "
                "temperature, kept tokens and vocabulary blocks"
            )
        if run.start.folder:
            raise SystemExit("error: this run began with the weights of another: name one that began with its own")
        self.run = run
        self.generator = ElectraForMaskedLM(_settings(cfg, cfg.generator_layers))
        self.discriminator = ElectraForPreTraining(_settings(cfg, cfg.discriminator_layers))
        table = self.generator.electra.embeddings.word_embeddings.weight
        self.generator.generator_lm_head.weight = table
        self.discriminator.electra.embeddings.word_embeddings.weight = table
        ours = objective_of(run.objective).build(cfg)
        initialise(ours, run.seed, cfg.init_std)
        super().__init__(_by_our_names(self.generator, self.discriminator), ours.state_dict(), run.optimizer)

    def losses(self, batch: Batch) -> list[Tensor]:
        """Summed losses MLM, TLM, MRTD, TRTD of a micro-batch (XLM-E equations (1) to (5)); carry the gradient."""
        tokens, chosen_M, shape = batch.tokens_BT.flatten(), batch.masked_M, batch.tokens_BT.shape
        apart_B1TT = (batch.segments_BT[:, None, :, None] != batch.segments_BT[:, None, None, :]).float()
        given: Any = {"attention_mask": apart_B1TT * torch.finfo(torch.float32).min, "position_ids": batch.positions_BT}
        bf16 = torch.autocast("cpu", torch.bfloat16) if self.run.engine.precision == "bf16" else nullcontext()
        with bf16:
            masked_BT = tokens.index_fill(0, chosen_M, self.run.model.vocabulary - 1).view(shape)
            hidden_MD = self.generator.electra(masked_BT, **given).last_hidden_state.flatten(0, 1)[chosen_M]
            logits_MV = self.generator.generator_lm_head(self.generator.generator_predictions(hidden_MD)).float()
            cumulated_MV = logits_MV.detach().double().softmax(1).cumsum(1)
            drawn_M = torch.searchsorted(cumulated_MV, batch.uniforms_M[:, None].double(), right=True).squeeze(1)
            corrupted = tokens.index_copy(0, chosen_M, drawn_M.clamp(max=self.run.model.vocabulary - 1))
            hidden_BTD = self.discriminator.electra(corrupted.view(shape), **given).last_hidden_state
            verdicts = self.discriminator.discriminator_predictions(hidden_BTD).float().flatten()
        nll_M = F.cross_entropy(logits_MV, tokens[chosen_M], reduction="none")
        costs = F.binary_cross_entropy_with_logits(verdicts, (corrupted != tokens).float(), reduction="none")
        task_N, real_N = batch.task_B.repeat_interleave(shape[1]), batch.segments_BT.flatten() > 0
        masked = [nll_M[task_N[chosen_M] == task].sum() for task in range(len(TASKS))]
        return masked + [costs[real_N & (task_N == task)].sum() for task in range(len(TASKS))]

    def step(self, batches: Sequence[Batch], rate: float) -> list[float]:
        """Train on a step's micro-batches; the means of the four losses."""
        tasks = [(batch, batch.task_B == task) for task in range(len(TASKS)) for batch in batches]
        of_each = len(batches)
        masked = [int(of_B[batch.masked_M // batch.tokens_BT.shape[1]].sum()) for batch, of_B in tasks]
        real = [int((batch.segments_BT[of_B] > 0).sum()) for batch, of_B in tasks]
        counts = [max(sum(each[n : n + of_each]), 1) for each in (masked, real) for n in (0, of_each)]
        weight, means = self.run.objective.discriminator_weight, [0.0] * len(counts)
        for batch in batches:
            parts = [loss / count for loss, count in zip(self.losses(batch), counts, strict=True)]
            (parts[0] + parts[1] + weight * (parts[2] + parts[3])).backward()
            means = [mean + part.item() for mean, part in zip(means, parts, strict=True)]
        self.update(rate)
        return means


def _settings(cfg: ModelConfig, layers: int) -> Any:
    from transformers import ElectraConfig

    return ElectraConfig(
        vocab_size=cfg.vocabulary, embedding_size=cfg.width, hidden_size=cfg.width, num_hidden_layers=layers,
        num_attention_heads=cfg.heads, intermediate_size=cfg.feed_forward, max_position_embeddings=cfg.max_positions,
        layer_norm_eps=cfg.norm_epsilon, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        pad_token_id=None,  # whose embedding would have no gradient
    )  # fmt: skip


def _by_our_names(generator: Any, discriminator: Any) -> Parts:
    """The parameters that each of ours is, in its order. Their token types are 0 and stay so: they are in none."""
    found: Parts = {"embedding_0": [generator.electra.embeddings.word_embeddings.weight]}
    for which, model in (("generator", generator), ("discriminator", discriminator)):
        nn.init.zeros_(model.electra.embeddings.token_type_embeddings.weight)
        add_layers(found, which, model.electra)
    add(found, "masked_head.dense", generator.generator_predictions.dense)
    add(found, "masked_head.norm", generator.generator_predictions.LayerNorm)
    found["masked_head.bias"] = [generator.generator_lm_head.bias]
    add(found, "replaced_head.dense", discriminator.discriminator_predictions.dense)
    add(found, "replaced_head.output", discriminator.discriminator_predictions.dense_prediction)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Train, print a JSON object for every K steps, and write the weights."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers.electra", description=__doc__)
    parser.add_argument("--run", type=Path, required=True, help="folder of a run of ours")
    parser.add_argument("--data", type=Path, required=True, help="its data")
    parser.add_argument("--out", type=Path, required=True, help="a new folder")
    parser.add_argument("--every", type=int, default=50, metavar="K", help="steps between printed losses")
    options = parser.parse_args(arguments)
    if (options.out / MODEL_FOLDER).exists():
        parser.error(f"{options.out} has a model already: choose a new folder")
    run = read_run_config(options.run)
    peer, loader = Peer(run), open_data(run, options.data)
    for step in range(run.train.steps):
        rate = learning_rate(step, run.train.steps, run.optimizer, run.schedule)
        means = peer.step(loader.step(step), rate)
        if (step + 1) % options.every == 0 or step + 1 == run.train.steps:
            losses = dict(zip(("mlm", "tlm", "mrtd", "trtd"), means, strict=True))
            print(json.dumps({"step": step + 1} | losses), flush=True)
    shutil.copytree(options.run / MODEL_FOLDER, options.out / MODEL_FOLDER)
    save_file(peer.state(), options.out / MODEL_FOLDER / WEIGHTS_FILE)
    shutil.copy(options.run / CONFIG_FILE, options.out)


if __name__ == "__main__":
    main()
