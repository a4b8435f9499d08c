"""Workloads: models to train, each with the batch of one rank."""

import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._pytree import tree_leaves, tree_map

from ddp_from_scratch.common.errors import PeerError, UsageError, one_line
from ddp_from_scratch.training.errors import needs_extra

Loss = Callable[[nn.Module, Any], torch.Tensor]


def _classification_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    inputs, labels = batch
    return cross_entropy(model(inputs), labels)


@dataclass(frozen=True)
class Workload:
    """A model and the batch of one rank."""

    name: str
    model: Callable[[], nn.Module]  # initialised with torch's random generator
    batch: Callable[[], Any]  # an argument of `loss`
    loss: Loss = _classification_loss
    is_own: bool = False  # True if it is from a file of the user's

    def check(self) -> None:
        """Computes the default loss once, if the user's file has a model without a loss.

        Raises:
            UsageError: it does not fit the model and its batch.
        """
        if not self.is_own or self.loss is not _classification_loss:
            return
        try:
            self.loss(self.model().eval(), self.batch())
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, RuntimeError) as error:
            # All ranks of a launcher raise it, so only rank 0 reports it.
            kind = PeerError if dist.is_initialized() and dist.get_rank() else UsageError
            raise kind(
                f"{self.name.partition(',')[0]} returns no loss, and the default one, "
                f"cross_entropy(model(batch[0]), batch[1]), raises {type(error).__name__}: "
                f"{one_line(error)}: return a third value, a function loss(model, batch)"
            ) from error

    def joined(self, count: int) -> "Workload":
        """Returns the same with batches of `count` times as many samples, the first dimension."""
        if count == 1:
            return self

        def join(*parts: Any) -> Any:
            is_batch = isinstance(parts[0], torch.Tensor) and parts[0].dim() > 0
            return torch.cat(parts) if is_batch else parts[0]

        return replace(self, batch=lambda: tree_map(join, *(self.batch() for _ in range(count))))

    def samples(self) -> int:
        """Returns the number of samples in a batch: the length of its first tensor."""
        leaves = tree_leaves(self.batch())
        return next((len(t) for t in leaves if isinstance(t, torch.Tensor) and t.dim()), 1)


def workload(name: str) -> Workload:
    """Finds a workload: one of `WORKLOADS`, a model of torchvision, or "file.py:function"."""
    if name in WORKLOADS:
        return WORKLOADS[name]
    file, colon, function = name.rpartition(":")
    return _of_file(Path(file), function) if colon else _of_torchvision(name)


def _of_file(path: Path, function: str) -> Workload:
    sys.path.insert(0, str(path.parent))  # like a script, the file may import its neighbours
    try:
        names = runpy.run_path(str(path))
    except (OSError, SyntaxError, ImportError) as error:
        raise UsageError(f"cannot take {function} from {path}: {one_line(error)}") from error
    if function not in names:
        raise UsageError(f"cannot take {function} from {path}: it has no such name")
    make = names[function]
    made = make()
    if not (isinstance(made, tuple) and len(made) in (2, 3) and isinstance(made[0], nn.Module)):
        raise UsageError(
            f"{path}:{function} must return a module and a batch, optionally a loss, got "
            f"{type(made).__name__}"
        )
    name = f"{path.name}:{function}, {_megabytes(made[0])}"
    loss = made[2] if len(made) == 3 else _classification_loss
    return Workload(name, lambda: make()[0], lambda: make()[1], loss, is_own=True)


def _of_torchvision(name: str) -> Workload:
    torchvision = _torchvision()
    if name not in torchvision.models.list_models(module=torchvision.models):
        raise UsageError(
            f"there is no model {name!r}: --model takes {', '.join(WORKLOADS)}, a classifier of "
            f"torchvision (resnet34, vit_b_16, ...) or FILE.py:FUNCTION"
        )
    # By default, these two return more than logits.
    auxiliary = name in ("googlenet", "inception_v3")
    plain = {"aux_logits": False, "init_weights": True} if auxiliary else {}

    def model() -> nn.Module:
        made: nn.Module = torchvision.models.get_model(name, num_classes=1000, **plain)
        return made

    # The meta device allocates nothing; a RegNet computes with tensors while it is made.
    with torch.device("cpu" if name.startswith("regnet") else "meta"):
        size = _megabytes(model())
    return Workload(f"{name}, {size}, batch 4 at 224x224", model, lambda: _images(4, 224))


def _torchvision() -> Any:
    # Imported only if used, since the import takes a second.
    with needs_extra("train"):
        import torchvision

    return torchvision


def _megabytes(model: nn.Module) -> str:
    return f"{sum(parameter.nbytes for parameter in model.parameters()) / 2**20:.3g} MB"


class Transformer(nn.Module):
    """A GPT-2: learned positions, norms before each part, and a head tied to the embedding."""

    def __init__(self, vocabulary: int, context: int, width: int, heads: int, depth: int) -> None:
        super().__init__()
        self.tokens: nn.Embedding = nn.Embedding(vocabulary, width)
        self.positions: nn.Embedding = nn.Embedding(context, width)
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(width)
        blocks = nn.TransformerEncoder(layer, depth, norm, enable_nested_tensor=False)
        self.blocks: nn.TransformerEncoder = blocks
        self.head: nn.Linear = nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.02)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.head.weight = self.tokens.weight  # tied: its gradient comes from two places

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        length = tokens.shape[1]
        later = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.tokens(tokens) + self.positions.weight[:length]
        logits: torch.Tensor = self.head(self.blocks(hidden, later, is_causal=True))
        return logits.flatten(0, 1)


class _Residual(nn.Linear):
    """Adds to its input, so gradients get through hundreds of layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * super().forward(x)


def _mlp(width: int = 1024, layers: int = 16) -> nn.Module:
    pairs = ((nn.Linear(width, width), nn.ReLU()) for _ in range(layers))
    return nn.Sequential(*chain.from_iterable(pairs))


def _images(count: int, side: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(count, 3, side, side), torch.randint(1000, (count,))


def text_batch(count: int, length: int, vocabulary: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns random tokens, with the next token as each label."""
    tokens = torch.randint(vocabulary, (count, length + 1))
    return tokens[:, :-1], tokens[:, 1:].flatten()


WORKLOADS = {
    "mlp": Workload(  # much communication for little computation
        "MLP, 64 MB, batch 16", _mlp, lambda: (torch.randn(16, 1024), torch.randint(1024, (16,)))
    ),
    "mlp64": Workload(  # the same communication with more computation to hide it
        "MLP, 64 MB, batch 64", _mlp, lambda: (torch.randn(64, 1024), torch.randint(1024, (64,)))
    ),
    "small": Workload(  # nothing to gain: what a step costs besides computation and sending
        "MLP, 0.5 MB, batch 16",
        lambda: _mlp(256, 2),
        lambda: (torch.randn(16, 256), torch.randint(256, (16,))),
    ),
    "resnet18": Workload(  # small images: a step takes only a tenth of a second on a CPU
        "ResNet-18, 45 MB, batch 8 at 64x64",
        lambda: _torchvision().models.resnet18(num_classes=1000),
        lambda: _images(8, 64),
    ),
    "resnet50": Workload(
        "ResNet-50, 97 MB, batch 4 at 64x64",
        lambda: _torchvision().models.resnet50(num_classes=1000),
        lambda: _images(4, 64),
    ),
    "transformer": Workload(
        "transformer, 39 MB, 2 x 64 tokens",
        lambda: Transformer(8192, 64, width=384, heads=6, depth=4),
        lambda: text_batch(2, 64, 8192),
    ),
    "layers500": Workload(  # 1000 parameters of at most 4 kB: shows the cost per parameter
        "500 layers, 2 MB, batch 16",
        lambda: nn.Sequential(*(_Residual(32, 32) for _ in range(500))),
        lambda: (torch.randn(16, 32), torch.randint(32, (16,))),
    ),
    # No size is a multiple of a cache line or a SIMD vector.
    "layers500odd": Workload(
        "500 layers of 31, 2 MB, batch 16",
        lambda: nn.Sequential(*(_Residual(31, 31) for _ in range(500))),
        lambda: (torch.randn(16, 31), torch.randint(31, (16,))),
    ),
    "gpt2": Workload(  # for a GPU
        "GPT-2, 475 MB, 4 x 512 tokens",
        lambda: Transformer(50257, 1024, width=768, heads=12, depth=12),
        lambda: text_batch(4, 512, 50257),
    ),
}
