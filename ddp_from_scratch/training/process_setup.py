"""Setup of a process before training and testing, alike on every rank."""

import hashlib
import os
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist

import ddp_from_scratch
from ddp_from_scratch.shards.tree_reduction import seed_generators
from ddp_from_scratch.training.coordination import require_same, together
from ddp_from_scratch.training.datasets import load_dataset
from ddp_from_scratch.training.image_data import ImageData
from ddp_from_scratch.training.settings import Settings
from ddp_from_scratch.world.process_group import World


def prepare_process(settings: Settings, world: World, asked: dict[str, str]) -> dist.ProcessGroup:
    """Compares the options of all ranks, then sets threads, determinism and seeds of this process.

    `asked` has values, by name, that all ranks must have alike beside the settings. Returns a group
    for CPU tensors.

    Raises:
        UsageError: on every rank: settings or versions differ.
    """
    group = cpu_group(world, settings.timeout)
    require_alike(settings, group, asked)
    torch.set_num_threads(settings.threads)
    if settings.deterministic:
        # cuBLAS repeats only with it.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Not without need: the call imports torch's compiler, which takes a second.
    if settings.deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(settings.deterministic)
    torch.backends.cudnn.benchmark = not settings.deterministic
    seed_generators(settings.seed)
    return group


def require_alike(
    settings: Settings, group: dist.ProcessGroup | None, asked: Mapping[str, str]
) -> None:
    """Compares versions, options and what else was asked for on all ranks. Collective.

    Raises:
        UsageError: on every rank: they differ.
    """
    # `asked` comes first in the message, and wins where both name an option.
    require_same(versions() | dict(asked) | settings.to_compare() | dict(asked), group)


@cache
def versions() -> dict[str, str]:
    """The versions of the code that this rank runs."""
    # Another torch may round, or communicate, in another way.
    source = hashlib.sha256()
    folder = Path(ddp_from_scratch.__file__).parent
    for file in sorted(folder.rglob("*.py")):
        source.update(file.relative_to(folder).as_posix().encode() + file.read_bytes())
    installed = list(metadata.distributions(name="torchvision"))  # an extra
    return {
        "torch": torch.__version__,
        "torchvision": installed[0].version if installed else "none",
        "ddp_from_scratch's source": source.hexdigest()[:16],
    }


def cpu_group(world: World, timeout: float) -> dist.ProcessGroup:
    """A group for CPU tensors: with gloo and mpi the default group."""
    # All that ranks exchange beside gradients must not wait for a GPU.
    if world.backend != "nccl":
        assert dist.group.WORLD is not None
        return dist.group.WORLD
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout))
    assert isinstance(group, dist.ProcessGroup), "every rank is a member"
    return group


def open_dataset(
    name: str, settings: Settings, world: World, group: dist.ProcessGroup | None
) -> ImageData:
    """The dataset, downloaded where asked by the first rank of each machine while others wait.

    Raises:
        UsageError: on every rank, as `load_dataset`; or the ranks' images are not the same.
    """
    with together(group):
        if settings.download and world.local_rank == 0:
            load_dataset(name, settings.data_dir, download=True)
    with together(group):
        # By every rank, after the download: the first `together` is a barrier.
        data = load_dataset(name, settings.data_dir, download=False)
    require_same({f"--dataset {name}": data.summary()}, group)
    return data
