"""Hooks into autograd: gradients that become ready, and the backward pass under way."""
