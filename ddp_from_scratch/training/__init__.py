"""What `run.py` trains with: datasets, loaders, models, the loop, checkpoints and metrics."""
