"""The errors for gradients that a Reducer cannot average: each names the parameter and the rank."""

import torch

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
    if gradient.requires_grad and bucket.keeps_no_graph:
        raise RuntimeError(
            f"backward(create_graph=True) on rank {rank}: the gradient of parameter {name} cannot "
            f"keep its graph, since it is {bucket.keeps_no_graph}"
        )
