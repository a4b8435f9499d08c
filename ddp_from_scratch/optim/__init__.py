"""Optimizers on flat parameters: SGD, and SGD whose state the ranks of a machine share."""
