"""The errors for gradients that a Reducer cannot average: each names the parameter and the rank."""

from collections.abc import Sequence

import torch

from ddp_from_scratch.common.errors import shortened
from ddp_from_scratch.core.bucket import Bucket, FlatBucket


def taken_gradient(name: str, rank: int) -> RuntimeError:
    """The error for a `.grad` that the program has set to None during backward."""
    return RuntimeError(
        f"the gradient of parameter {name} was taken away on rank {rank} before it was averaged: a "
        f"hook of the program has set .grad to None. Step, and clear gradients, when backward() "
        f"has returned"
    )


def second_gradient(name: str, rank: int) -> RuntimeError:
    """The error for a gradient of a parameter whose bucket has been launched."""
    return RuntimeError(
        f"parameter {name} got a second gradient on rank {rank} while the first was being "
        f"averaged. Accumulate several backward passes under no_sync(), all but the last; where "
        f"one pass gives it several gradients, or it is used outside of the module's forward, use "
        f"static_graph=True"
    )


def check_gradient(gradient: torch.Tensor | None, bucket: Bucket, name: str, rank: int) -> None:
    """Raises a RuntimeError if the bucket cannot hold this gradient."""
    if gradient is None:
        return
    if gradient.is_sparse and isinstance(bucket, FlatBucket):
        raise RuntimeError(
            f"the gradient of parameter {name} is sparse on rank {rank}, but its module does not "
            f"declare it: only the weights of Embedding and EmbeddingBag with sparse=True are "
            f"gathered, others lie in flat buckets"
        )
    if gradient.requires_grad and bucket.no_graph_reason:
        raise RuntimeError(
            f"backward(create_graph=True) on rank {rank}: the gradient of parameter {name} cannot "
            f"keep its graph, since it is {bucket.no_graph_reason}"
        )


def check_bucket(bucket: Bucket, names: Sequence[str], rank: int) -> None:
    """Raises a RuntimeError if the bucket cannot hold one of its gradients."""
    for index, parameter in zip(bucket.members, bucket.parameters(), strict=True):
        check_gradient(parameter.grad, bucket, names[index], rank)


def check_not_launching(bucket: Bucket | None, rank: int) -> None:
    """Raises a RuntimeError if a comm hook or an observer calls back while a bucket is launched."""
    if bucket is not None:
        raise RuntimeError(
            f"a comm hook or an observer has called back its Reducer on rank {rank} during the "
            f"launch of {bucket.name}: no_sync(), missing(), another backward pass, and adding or "
            f"removing observers must wait until backward() has returned"
        )


def no_gradient(names: Sequence[str], rank: int) -> RuntimeError:
    """The error for parameters without a gradient in `average_gradients()`."""
    return RuntimeError(
        f"no gradient to average on rank {rank} for: {shortened(names)}. Every parameter needs "
        f"one, unless the Reducer has find_unused_parameters=True"
    )


def compiled_autograd() -> RuntimeError:
    """The error for a backward pass that torch has compiled."""
    return RuntimeError(
        "compiled autograd is not supported, because it cannot compile a Reducer's hooks: leave "
        "torch._dynamo.config.compiled_autograd False; torch.compile(model) works"
    )
