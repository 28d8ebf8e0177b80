"""Train Hugging Face's ELECTRA in a loop of plain torch like a run of ours, to compare the two.

`xlme bench peers.electra --run RUN --data MIXED --out OUT` reads the settings of RUN, a run with objective.name
electra, tied embeddings and no relative bias. It loads RUN's initial weights into ElectraForMaskedLM and
ElectraForPreTraining, and trains on the same rows with the same masks and the same uniform random numbers, from which
replacements are sampled. It prints losses, and writes OUT with RUN's settings and the peer's weights, so that `xlme
evaluate` and `xlme finetune` can score OUT like RUN. Model, losses, gradients and AdamW are the peer's; all else is
ours.
"""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from bench.measure import one_sentence
from bench.peers.steps import electra_networks
from xlme_ds.config import ObjectiveConfig, OptimizerConfig, RunConfig
from xlme_ds.data.batch import Batch, sum_by_task
from xlme_ds.io.folders import require_new
from xlme_ds.io.help import call_from_command_line
from xlme_ds.models.init import has_weight_decay, initialise
from xlme_ds.objectives import objective_of
from xlme_ds.train.data import open_loader
from xlme_ds.train.schedule import learning_rate
from xlme_ds.trained.config_json import CONFIG_FILE, read_run_config
from xlme_ds.trained.runs import MODEL_FOLDER
from xlme_ds.trained.weights import WEIGHTS_FILE

PeerParameters = dict[str, Sequence[nn.Parameter]]
"""The name of our parameter -> the peer's parameters that, concatenated in this order, equal our parameter."""
SAME_MODEL: dict[str, Any] = {  # with these settings our model is the same as transformers'
    "embedding_sharing": "tied", "vocabulary_blocks": 1, "norm": "post", "relative_bias": "none",
    "masked_head": "dense", "absolute_positions": True, "language_embeddings": (), "dropout": 0.0,
    "attention_dropout": 0.0,
}  # fmt: skip


class HuggingFacePeer:
    """A model of Hugging Face that starts from our weights and trains with torch's AdamW, to compare with ours."""

    def __init__(self, parameters: PeerParameters, weights: Mapping[str, Tensor], optimizer: OptimizerConfig):
        self.parameters, self.clip = parameters, optimizer.clip
        groups: dict[float, list[nn.Parameter]] = {optimizer.weight_decay: [], 0.0: []}  # weight decay -> parameters
        for name, parts in parameters.items():
            groups[optimizer.weight_decay if has_weight_decay(parts[0].dim()) else 0.0] += parts
            with torch.no_grad():
                for part, weight in zip(parts, weights[name].chunk(len(parts)), strict=True):
                    part.copy_(weight)
        self.optimizer = torch.optim.AdamW(
            [{"params": group, "weight_decay": weight_decay} for weight_decay, group in groups.items()],
            betas=(optimizer.beta1, optimizer.beta2), eps=optimizer.epsilon, fused=True)  # fmt: skip

    def state(self) -> dict[str, Tensor]:
        """The peer's weights under our names."""
        return {name: torch.cat([part.detach() for part in parts]) for name, parts in self.parameters.items()}

    def update(self, rate: float) -> None:
        """Clip the gradients, take a step at this learning rate, and zero the gradients."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        nn.utils.clip_grad_norm_(list(chain(*self.parameters.values())), self.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()


def map_modules(parts: PeerParameters, name: str, *modules: nn.Module) -> None:
    """Record that our `name.weight` and `name.bias` are the concatenated weights and biases of `modules`."""
    for kind in ("weight", "bias"):
        parts[f"{name}.{kind}"] = [getattr(module, kind) for module in modules]


def map_layers(parts: PeerParameters, encoder: str, bert: Any) -> None:
    """Record the parameters of `bert`, an encoder of BERT or ELECTRA, under the names of our `encoder`: positions,
    input norm, and layers without cross-attention."""
    parts[f"{encoder}.positions"] = [bert.embeddings.position_embeddings.weight]
    map_modules(parts, f"{encoder}.input_norm", bert.embeddings.LayerNorm)
    for index, layer in enumerate(bert.encoder.layer):
        prefix = f"{encoder}.layers.{index}"
        attention = layer.attention
        map_modules(parts, f"{prefix}.attention.qkv", attention.self.query, attention.self.key, attention.self.value)
        map_modules(parts, f"{prefix}.attention.output", attention.output.dense)
        map_modules(parts, f"{prefix}.attention_norm", attention.output.LayerNorm)
        map_modules(parts, f"{prefix}.up", layer.intermediate.dense)
        map_modules(parts, f"{prefix}.down", layer.output.dense)
        map_modules(parts, f"{prefix}.feed_forward_norm", layer.output.LayerNorm)


class Peer(HuggingFacePeer):
    """transformers' generator and discriminator, with the initial weights of a run of ours."""

    def __init__(self, run: RunConfig):
        cfg, ours = run.model, run.objective
        like_theirs = ObjectiveConfig(mask_fraction=ours.mask_fraction, discriminator_weight=ours.discriminator_weight)
        if ours != like_theirs or replace(cfg, **SAME_MODEL) != cfg or run.optimizer.discriminator_rate != 1:
            raise ValueError(
                "transformers' ELECTRA has tied embeddings, post-LN layers and no relative bias: name a run of electra "
                "with --model.embedding-sharing tied --model.relative-bias none, and without dropout, z-loss, "
                "temperature, readable tokens, vocabulary blocks and optimizer.discriminator_rate"
            )
        if run.start.folder:
            raise ValueError("this run began with another run's weights: name a run without --start.folder")
        self.run = run
        # With a padding id, transformers would give the embedding of that id no gradient; our model gives it one.
        self.generator, self.discriminator = electra_networks(cfg, layer_norm_eps=cfg.norm_epsilon, pad_token_id=None)
        self.objective = objective_of(run.objective)
        our_model = self.objective.build(cfg)
        initialise(our_model, run.seed, cfg.init_std)
        super().__init__(_by_our_names(self.generator, self.discriminator), our_model.state_dict(), run.optimizer)

    def losses(self, batch: Batch) -> Tensor:
        """The losses [MLM, TLM, MRTD, TRTD] of a micro-batch: float32 [4] with gradients, each a sum over tokens (XLM-E
        equations (1) to (5))."""
        tokens, chosen_M, shape = batch.tokens_BT.flatten(), batch.masked_M, batch.tokens_BT.shape
        other_item_B1TT = (batch.segments_BT[:, None, :, None] != batch.segments_BT[:, None, None, :]).float()
        bias_B1TT = other_item_B1TT * torch.finfo(torch.float32).min
        inputs: Any = {"attention_mask": bias_B1TT, "position_ids": batch.positions_BT}
        bf16 = torch.autocast("cpu", torch.bfloat16) if self.run.engine.precision == "bf16" else nullcontext()
        with bf16:
            masked_BT = tokens.index_fill(0, chosen_M, self.run.model.vocabulary - 1).view(shape)
            hidden_MD = self.generator.electra(masked_BT, **inputs).last_hidden_state.flatten(0, 1)[chosen_M]
            logits_MV = self.generator.generator_lm_head(self.generator.generator_predictions(hidden_MD)).float()
            cdf_MV = logits_MV.detach().double().softmax(1).cumsum(1)
            sample_M = torch.searchsorted(cdf_MV, batch.uniforms_M[:, None].double(), right=True).squeeze(1)
            corrupted = tokens.index_copy(0, chosen_M, sample_M.clamp(max=self.run.model.vocabulary - 1))
            hidden_BTD = self.discriminator.electra(corrupted.view(shape), **inputs).last_hidden_state
            replaced_logits = self.discriminator.discriminator_predictions(hidden_BTD).float().flatten()
        nll_M = F.cross_entropy(logits_MV, tokens[chosen_M], reduction="none")
        replaced = (corrupted != tokens).float()
        replaced_losses = F.binary_cross_entropy_with_logits(replaced_logits, replaced, reduction="none")
        at, task_N = batch.segments_BT.flatten() > 0, batch.task_B.repeat_interleave(shape[1])  # at: no padding
        return torch.cat([sum_by_task(nll_M, task_N[chosen_M]), sum_by_task(replaced_losses[at], task_N[at])])

    def step(self, batches: Sequence[Batch], rate: float) -> list[float]:
        """Train on a step's micro-batches. Returns the mean losses [MLM, TLM, MRTD, TRTD]."""
        counts = torch.stack([self.objective.counts(batch) for batch in batches]).sum(0).clamp(min=1)
        weight, means = self.run.objective.discriminator_weight, torch.zeros(len(counts))
        for batch in batches:
            mlm, tlm, mrtd, trtd = losses = self.losses(batch) / counts
            (mlm + tlm + weight * (mrtd + trtd)).backward()
            means += losses.detach()
        self.update(rate)
        return means.tolist()


def _by_our_names(generator: Any, discriminator: Any) -> PeerParameters:
    """The peer's parameters by our names. Sets the token-type embeddings to 0, and leaves them out: they stay 0."""
    parts: PeerParameters = {"embedding_0": [generator.electra.embeddings.word_embeddings.weight]}
    for name, model in (("generator", generator), ("discriminator", discriminator)):
        nn.init.zeros_(model.electra.embeddings.token_type_embeddings.weight)
        map_layers(parts, name, model.electra)
    map_modules(parts, "masked_head.dense", generator.generator_predictions.dense)
    map_modules(parts, "masked_head.norm", generator.generator_predictions.LayerNorm)
    parts["masked_head.bias"] = [generator.generator_lm_head.bias]
    map_modules(parts, "replaced_head.dense", discriminator.discriminator_predictions.dense)
    map_modules(parts, "replaced_head.output", discriminator.discriminator_predictions.dense_prediction)
    return parts


def train(run: Path, data: Path, out: Path, every: int = 50) -> None:
    """Train, print the losses as a JSON object every K steps, and write the weights.

    Args:
        run: Folder of a run of ours.
        data: Data of that run.
        out: A new folder.
        every: Steps between printed losses.
    """
    with one_sentence("xlme bench peers.electra"):
        require_new(out)
        config = read_run_config(run)
        peer, loader = Peer(config), open_loader(config, data)
    for step in range(config.train.steps):
        rate = learning_rate(step, config.train.steps, config.optimizer, config.schedule)
        means = peer.step(loader.micro_batches(step), rate)
        if (step + 1) % every == 0 or step + 1 == config.train.steps:
            losses = dict(zip(("mlm", "tlm", "mrtd", "trtd"), means, strict=True))
            print(json.dumps({"step": step + 1} | losses), flush=True)
    shutil.copytree(run / MODEL_FOLDER, out / MODEL_FOLDER)
    save_file(peer.state(), out / MODEL_FOLDER / WEIGHTS_FILE)
    shutil.copy(run / CONFIG_FILE, out)


def main(arguments: list[str] | None = None) -> None:
    """Run the command; a user's mistake ends it with one sentence and exit code 2."""
    call_from_command_line(train, "xlme bench peers.electra", arguments, __doc__)


if __name__ == "__main__":
    main()
