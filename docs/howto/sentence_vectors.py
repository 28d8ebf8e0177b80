"""Trains an export on translation pairs for sentence vectors: sentence_vectors.py EXPORT PAIRS OUT RATE."""

import shutil
import sys
import zipfile
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer, SentenceTransformerTrainingArguments
from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss

if len(sys.argv) != 5:
    sys.exit(__doc__)
source, folder, out, rate = sys.argv[1:]  # export, translation pairs, folder to write, and learning rate
texts = {path.name: path.read_bytes() for path in Path(folder).glob("*.*-*.*") if path.suffix != ".zip"}
for path in Path(folder).glob("*.zip"):
    with zipfile.ZipFile(path) as archive:
        texts |= {name: archive.read(name) for name in archive.namelist()}

english, other = [], []  # line n of X.en-de.en is translated by line n of X.en-de.de
for name in sorted(name for name in texts if name.endswith(".en")):  # X.de-en.en as well
    stem = name.removesuffix(".en")
    code = stem.rpartition(".")[2].removeprefix("en-").removesuffix("-en")
    for lines, side in ((english, name), (other, f"{stem}.{code}")):
        lines += texts.get(side, b"").decode().removesuffix("\n").split("\n")
    if f"{stem}.{code}" not in texts or len(english) != len(other):
        sys.exit(f"{folder}: {stem}.{code} is absent, or has not as many lines as {name}: give both sides of each pair")
if not english:
    sys.exit(f"{folder} has no pairs with English: name a folder of X.en-de.en with X.en-de.de, or of en-de.txt.zip")

model = SentenceTransformer(source, trust_remote_code=True)
longest, model.max_seq_length = model.max_seq_length, 48  # tokens; longer ones are cut while it trains
settings = SentenceTransformerTrainingArguments(
    out,
    max_steps=300,
    warmup_steps=30,
    per_device_train_batch_size=64,
    learning_rate=float(rate),
    batch_sampler="no_duplicates",
    dataloader_pin_memory=torch.cuda.is_available(),
    logging_steps=10,
    save_strategy="no",
    report_to="none",
)
pairs = Dataset.from_dict({"anchor": english, "positive": other})
trainer = SentenceTransformerTrainer(model, settings, pairs, loss=MultipleNegativesRankingLoss(model))
trainer.train()
model.max_seq_length = longest
model.save_pretrained(out)
shutil.copy(Path(source) / "sentencepiece.bpe.model", out)  # so that xlme reads the folder, too
print(out)
