"""What the command line can choose from. Does not import torch, so --help answers at once."""

MODELS = (  # `workloads.py` has these
    *("mlp", "mlp64", "small", "resnet18", "resnet50", "transformer"),
    *("layers500", "layers500odd", "gpt2"),
)
OPTIMIZERS = ("sgd", "adamw")  # `contenders.py`
CONTENDERS = (  # `contenders.py`; an older torch lacks some of torch's own
    "torch DDP, default",
    "torch DDP, views",
    "torch DDP, batched copies",
    "torch DDP, tapering buckets",
    "torch DDP, ZeroRedundancyOptimizer",
    "Reducer, no shared memory",
    "Reducer",
    "Reducer, views",
    "Reducer, views, timeline",
    "ddp.SGD",
    "ddp.SGD, one flat bucket",
    "ddp.SGD, fuse_wgrad",
    "ddp.SGD, shard=world",
    "ddp.SGD, shard=node",
    "ddp.SGD, shard=node, fuse_wgrad",
)
WAYS = ("interleaved", "kept", "alone")  # `timing.py`
