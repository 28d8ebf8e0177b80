"""XLM-E pre-training with DeepSpeed. Importing the package loads no torch; `xlme_ds.pretrain` is the main program."""

import os

__version__ = "0.1.0"

# torch's large tensors on the CPU in huge pages: a fresh one then costs a hundredth of the page faults. Read at the first.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
