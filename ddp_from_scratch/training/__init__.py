"""The program `run.py`: its command line, datasets, models, loop, checkpoints and metrics."""
