"""Trained models, read from the folders of runs, checkpoints and exports."""
