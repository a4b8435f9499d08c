"""Connects a Reducer to autograd: ready gradients, and the backward pass under way."""
