"""Engines: DeepSpeed's or a plain one, which train a model on the ranks of a run."""

import logging

# DeepSpeed warns when it is imported where there is no GPU: a run says that it is on the CPU in its first line.
logging.getLogger("DeepSpeed").addFilter(lambda record: "Setting accelerator to CPU" not in record.getMessage())
