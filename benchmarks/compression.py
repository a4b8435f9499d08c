"""python -m benchmarks.compression: compares what models learn with float32 and 8-bit messages.

Examples:
    sudo python -m benchmarks.compression            the digits, and a GPT on letters; three seeds
    sudo python -m benchmarks.compression --quick    one seed, few steps

Two ranks train on two hosts of their own: network namespaces on this machine (harness/network.py),
since only messages between machines are compressed. The same steps run with float32 and with
`int8_blockwise`, from the same parameters and with the same batches:

    digits   run.py with its defaults, with and without `--compress int8`; the test accuracy
    gpt      examples/gpt.py with AdamW; the mean loss of both ranks in the last tenth of the steps

The differences between seeds show how much of a difference is chance.
"""

import argparse
import json
import sys
import tempfile
from itertools import product
from pathlib import Path
from statistics import mean, stdev

import torch
import torch.distributed as dist
from tqdm import tqdm

import ddp_from_scratch as ddp
from benchmarks.harness import network
from benchmarks.harness.letters import batches, make_step
from benchmarks.harness.report import make_parser, write
from ddp_from_scratch.bench.results import text_table
from ddp_from_scratch.launch import environment
from ddp_from_scratch.launch.rank_process import run_to_exit

RUN = str(Path(__file__).parents[1] / "run.py")
FLOAT32, INT8 = KINDS = ("float32", "int8")


def main() -> int:
    options = parse(sys.argv[1:])
    if environment.launcher() != "none":
        train_gpt(options)
        return 0
    network.check_available([options.backend])
    with (
        network.stoppable(),
        network.two_hosts() as hosts,
        tempfile.TemporaryDirectory(prefix="compression-") as name,
    ):
        folder = Path(name)
        found = {
            "digits": digits(hosts, options, folder),
            "gpt": gpt(hosts, options, folder),
        }
    report(options, found)
    return 0


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = make_parser("benchmarks.compression", __doc__)
    parser.add_argument("--backend", choices=("gloo", "mpi"), default="gloo", help="default: gloo")
    parser.add_argument("--seeds", type=int, help="seeds (default: 3; 1 with --quick)")
    text = "steps of the GPT (default: 300; 20 with --quick)"
    parser.add_argument("--steps", type=int, help=text)
    parser.add_argument("--quick", action="store_true", help="one seed, 20 steps, one epoch")
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)  # for a rank's losses
    options = parser.parse_args(arguments)
    for name, usual, quick in (("seeds", 3, 1), ("steps", 300, 20)):
        if getattr(options, name) is None:
            setattr(options, name, quick if options.quick else usual)
    if options.seeds < 1:
        raise ddp.UsageError(f"--seeds must be 1 or more, got {options.seeds}")
    if options.steps < 10:
        raise ddp.UsageError(f"--steps must be 10 or more, got {options.steps}")
    return options


Losses = dict[str, list[float]]
"""One number for each seed, by the kind of messages."""


def digits(
    hosts: tuple[network.Host, network.Host], options: argparse.Namespace, folder: Path
) -> Losses:
    """Returns the test accuracy after run.py's default epochs."""
    found: Losses = {kind: [] for kind in KINDS}
    for seed, kind in product(range(options.seeds), KINDS):
        logs = folder / f"digits-{kind}-{seed}"
        command = [sys.executable, RUN, "--backend", options.backend, "--seed", str(seed)]
        command += ["--log-dir", str(logs), "--checkpoint-dir", str(logs)]
        command += ["--compress", "int8"] * (kind == INT8) + ["--epochs", "1"] * options.quick
        run(hosts, options, command)
        lines = (logs / "metrics.jsonl").read_text().splitlines()
        found[kind].append(float(json.loads(lines[-1])["test_accuracy"]))
    return found


def gpt(
    hosts: tuple[network.Host, network.Host], options: argparse.Namespace, folder: Path
) -> Losses:
    """Returns the loss in the last tenth of the steps."""
    into = folder / "gpt.json"
    command = [sys.executable, "-m", "benchmarks.compression", "--into", str(into)]
    command += ["--backend", options.backend, "--seeds", str(options.seeds)]
    run(hosts, options, [*command, "--steps", str(options.steps)])
    found: Losses = json.loads(into.read_text())
    return found


def run(
    hosts: tuple[network.Host, network.Host], options: argparse.Namespace, command: list[str]
) -> None:
    """Runs a command on one rank of each host; exits with the code of a rank that failed."""
    if code := network.run_ranks(hosts, 1, options.backend, command):
        raise SystemExit(code)


# A rank ---------------------------------------------------------------------------------------


def train_gpt(options: argparse.Namespace) -> None:
    with ddp.process_group(options.backend, threads=1) as world:
        found: Losses = {kind: [] for kind in KINDS}
        for seed in range(options.seeds):
            steps = {
                FLOAT32: make_step("adamw", options.steps, seed),
                INT8: make_step("adamw", options.steps, seed, compress),
            }
            losses: dict[str, list[torch.Tensor]] = {kind: [] for kind in KINDS}
            draw = batches(torch.Generator().manual_seed(world.world_size * seed + world.rank))
            hide = world.rank != 0 or None
            for _ in tqdm(range(options.steps), f"gpt, seed {seed}", disable=hide, leave=False):
                batch = draw()
                for kind, step in steps.items():
                    losses[kind].append(step(batch))
            for kind in KINDS:
                last = torch.stack(losses[kind][-options.steps // 10 :]).mean()
                dist.all_reduce(last)
                found[kind].append(last.item() / world.world_size)
        if world.rank == 0:
            options.into.write_text(json.dumps(found))


def compress(reducer: ddp.Reducer) -> None:
    reducer.register_comm_hook(ddp.comm_hooks.Int8State(), ddp.comm_hooks.int8_blockwise)


# The table ------------------------------------------------------------------------------------


def report(options: argparse.Namespace, found: dict[str, Losses]) -> None:
    title = f"float32 and 8-bit messages between two hosts; {options.backend}, a rank on each"
    rows = []
    for name, by_kind in found.items():
        for kind, values in by_kind.items():
            spread = f"{stdev(values):.4f}" if len(values) > 1 else ""
            seeds = " ".join(f"{value:.4f}" for value in values)
            rows.append([f"{name}, {kind}", f"{mean(values):.4f}", spread, seeds])
    print(f"\n{title}\ndigits: test accuracy; gpt: loss in the last of {options.steps} steps")
    print(text_table(["", "mean", "standard deviation", "seeds"], rows), flush=True)
    settings = {"benchmark": "compression", "backend": options.backend, "steps": options.steps}
    write(f"compression-{options.backend}-2", title, found, options.results, **settings)


if __name__ == "__main__":
    run_to_exit(main)
