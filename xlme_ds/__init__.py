"""XLM-E pre-training with DeepSpeed. Importing the package loads no torch; `xlme_ds.pretrain` is the main program."""

__version__ = "0.1.0"
