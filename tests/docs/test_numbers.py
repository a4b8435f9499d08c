"""The ratios in README.md and docs/how-to/gpu.md are those of the files in benchmarks/results."""

import json
from pathlib import Path

import pytest

from ddp_from_scratch.bench.results import Run, Samples

ROOT = Path(__file__).parents[2]
ON_CPU = "torch DDP on node, views|Reducer on gloo, views|ddp.SGD on gloo|" + (
    "NodeSharedSGD on gloo, fuse_wgrad"
)
ON_GPU = "Reducer on nccl, views|ddp.SGD on nccl|ddp.SGD on nccl, one flat bucket|no communication"
ROWS = [
    ("README.md", "MLP, batch 16", "mlp-gloo+mpi-2", ON_CPU),
    ("README.md", "the same, 4 ranks on 2 cores", "mlp-gloo+mpi-4", ON_CPU),
    ("README.md", "the same, AdamW", "mlp-gloo+mpi-2-adamw", ON_CPU.replace("SGD", "AdamW")),
    ("README.md", "MLP, batch 64", "mlp64-gloo+mpi-2", ON_CPU),
    ("README.md", "ResNet-18", "resnet18-gloo+mpi-2", ON_CPU),
    ("README.md", "transformer", "transformer-gloo+mpi-2", ON_CPU),
    ("README.md", "500 layers", "layers500-gloo+mpi-2", ON_CPU),
    ("docs/how-to/gpu.md", "MLP, batch 16", "mlp-nccl-1", ON_GPU),
    ("docs/how-to/gpu.md", "transformer, 2 x 64 tokens", "transformer-nccl-1", ON_GPU),
    ("docs/how-to/gpu.md", "ResNet-50, batch 4", "resnet50-nccl-1", ON_GPU),
    ("docs/how-to/gpu.md", "GPT-2, 4 x 512 tokens", "gpt2-nccl-1", ON_GPU),
]


@pytest.mark.parametrize(("page", "label", "file", "contenders"), ROWS)
def test_ratios_are_those_of_the_results(page, label, file, contenders):
    content = json.loads((ROOT / f"benchmarks/results/step_time-{file}.json").read_text())
    run = Run([Samples(**sample) for sample in content["samples"]])
    (row,) = [x for x in (ROOT / page).read_text().splitlines() if x.startswith(f"| {label} |")]
    cells = [cell.strip() for cell in row.strip("|").split("|")][1:]
    by_name = {sample.name: sample for sample in run.samples}
    found = [run.ratio(by_name[name], run.torch_ddp) for name in contenders.split("|")]
    texts = [f"{middle:.2f} ({low:.2f} to {high:.2f})" for middle, low, high in found]
    if page == "README.md":
        texts.append(f"{run.ratio(by_name[contenders.split('|')[-1]], run.alone)[0]:.2f}")
    else:
        texts.insert(0, f"{run.torch_ddp.quartiles[1]:.1f}")
    assert len(cells) == len(texts)
    for cell, text in zip(cells, texts, strict=True):
        assert cell in (text, text.partition(" (")[0])  # some leave out the interval
