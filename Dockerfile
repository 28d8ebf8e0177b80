# docker build -t xlme_ds .     The wheels of torch bring CUDA; the machine needs the NVIDIA driver and container toolkit.
FROM python:3.11-slim

# A compiler and headers for DeepSpeed's and Triton's kernels, which are built at the first use; npm for the sample text.
RUN apt-get update && apt-get install -y --no-install-recommends build-essential git libaio-dev npm \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /xlme
COPY . .
# --use-pep517: seqeval comes as source, which older pips build without its requirements.
RUN pip install --no-cache-dir --use-pep517 -c constraints.txt -e ".[mpi,triton,hf,finetune]"

# Data and runs: -v FOLDER:/runs
WORKDIR /runs
CMD ["xlme"]
