"""Packaging of xlme_ds: version ranges and extras. `constraints.txt` holds the exact set that was proven together."""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent


def version() -> str:
    """The version written in `xlme_ds/__init__.py`, read without importing the package."""
    source = (ROOT / "xlme_ds" / "__init__.py").read_text(encoding="utf-8")
    version_line = re.search(r'^__version__ = "([^"]+)"', source, re.M)
    assert version_line, "xlme_ds/__init__.py has no __version__"
    return version_line.group(1)


def readme() -> str:
    """The README, or nothing in a tree that has none."""
    path = ROOT / "README.md"
    return path.read_text(encoding="utf-8") if path.exists() else ""


CORE = [
    "torch>=2.10,<3",  # inductor sums in one order
    "deepspeed==0.19.8",  # what was proven: `engine/deepspeed_compat.py` checks it, too
    "sentencepiece>=0.2.2",  # earlier ones round long lines differently (xlme_ds/data/segment.py)
    "protobuf>=7.36.1",  # what sentencepiece 0.2.3 was generated with; stage vocap writes a model
    "pyarrow>=20",
    "numpy>=2",
    "numba>=0.62",  # the loops over the rows of a batch, as machine code
    "tyro>=1",
    "docstring_parser>=0.15",  # of `--help`
    "typing_extensions>=4.12",  # `override`, which Python 3.11 has not
    "rich>=14",
    "tensorboard>=2.19",
    "matplotlib>=3.10",
    "jinja2>=3.1",
    "psutil>=6",
    "safetensors>=0.5",
]
TRITON = 'triton>=3.5; platform_system == "Linux"'
EXTRAS = {
    # The other sides of bench/loader.py and bench/step.py
    "bench": ["datasets>=4", "tokenizers>=0.21", "transformers>=4.57"],
    "hf": ["tokenizers>=0.21", "transformers>=4.57"],  # an export is written with the first and loaded with the second
    "onnx": ["transformers>=4.57", "onnx>=1.19", "onnxscript>=0.5"],  # export --onnx
    "translate": ["sacrebleu>=2.4"],  # BLEU and chrF
    "finetune": ["seqeval>=1.2.2"],  # F1 of entities
    # The filter `language`: the first brings its model, the second reads one of fastText's format.
    "langid": ["py3langid>=0.4,<0.5", "fasttext-community>=0.11"],
    "minhash": ["datatrove>=0.10,<0.11", "regex"],  # `xlme prep minhash`; datatrove imports regex without asking for it
    "mteb": ["mteb>=2.26", "sentence-transformers>=5.4"],  # bench.peers.mteb
    "mpi": ["mpi4py>=4.1", "mpich>=4.3"],  # the mpich wheel brings mpiexec; on a cluster, its own MPI serves as well
    # model.kernels. torch's CUDA builds bring it; for its CPU builds, where tests and bench.roofline use it, it is 198
    # MB more.
    "triton": [TRITON],
    "wandb": ["wandb>=0.19"],  # train.wandb
    "dev": [
        "pytest>=8",
        "pytest-xdist>=3.6",  # make test runs three files of tests at a time
        "hypothesis>=6",
        "ruff>=0.12",
        "mypy>=1.15",
        "transformers>=4.57",  # parity tests against Hugging Face's XLM-R
        "onnx>=1.19",
        "onnxscript>=0.5",
        "onnxruntime>=1.23",  # runs what export --onnx writes
        "seqeval>=1.2.2",
        "sentence-transformers[train]>=5.4",  # loads an export and trains it
        "scikit-learn>=1.6",  # AUC, F1, accuracy and retrieval against a second opinion
        "torchmetrics>=1.4",  # SQuAD's F1 and exact match against a second opinion
        "nltk>=3.9",  # alignment error rate against a second opinion
        "sacrebleu>=2.4",
        "POT>=0.9.5",  # optimal transport against a second opinion
        "mkdocs-material>=9.6",  # the site of docs/
        "wandb>=0.19",
        "py3langid>=0.4,<0.5",
        "fasttext-community>=0.11",
        "datatrove>=0.10,<0.11",
        "regex",
        TRITON,
        "setuptools>=77",  # the packaging test builds a wheel
        "wheel",
    ],
}

setup(
    name="xlme-ds",
    version=version(),
    description="XLM-E: ELECTRA-style cross-lingual pre-training in 100 languages, on DeepSpeed",
    long_description=readme(),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.11,<3.14",
    packages=[
        *find_packages(include=["xlme_ds", "xlme_ds.*", "data_prep", "data_prep.*"]),
        "ds_configs",
        "xlme_ds.slurm",
    ],
    package_dir={"xlme_ds.slurm": "slurm"},
    entry_points={"console_scripts": ["xlme = xlme_ds.__main__:main"]},
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        *(f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)),
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    project_urls={"Paper": "https://aclanthology.org/2022.acl-long.427/"},
    package_data={
        "xlme_ds": ["py.typed"],
        "xlme_ds.models": ["*.json"],
        "xlme_ds.slurm": ["*.sh"],
        "xlme_ds.export": ["*.jinja"],
        "xlme_ds.report": ["*.html", "*.jinja", "*.toml"],
        "data_prep": ["corpora/*.toml"],
        "data_prep.inspect": ["*.jinja"],
        "ds_configs": ["*.json"],
    },
    install_requires=CORE,
    extras_require=EXTRAS,
    zip_safe=False,
)
