"""Objectives: tensors in, (sum, count) out. Each one is a file here with the class that this table names."""

from .electra import ElectraObjective

OBJECTIVES = {"electra": ElectraObjective}
