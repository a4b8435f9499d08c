"""The command line's options: which are refused, with which error, and how others are set."""

import math
import re
from pathlib import Path

import pytest

from ddp_from_scratch import UsageError
from ddp_from_scratch.training.main import main, parse, parse_counts
from ddp_from_scratch.training.settings import Settings
from tests.support.refusal import refusal

SECONDS = "must be a positive number of seconds, at most 1,000,000"
UNKNOWN = "unrecognized arguments:"
# Arguments, and the beginning of the one line that says what was expected.
REFUSED = {
    "--lr": "argument --lr: expected one argument; see --help",
    "--lr 1e308": "--lr must be a positive number, at most 1e+30, got 1e+308",
    "--optimizer adamw --momentum 0.5": "--momentum is for sgd and muon, not adamw: leave it out",
    "--optimizer muon --elastic --precision fp16": "--elastic cannot repeat the loss scaling of",
    "--check 0": f"--check {SECONDS}, got 0.0",
    "--timeout 0": f"--timeout {SECONDS}, got 0.0",
    "--bucket-cap-mb auto": "argument --bucket-cap-mb: invalid float value: 'auto'; see --help",
    "--bucket-cap-mb -1": "--bucket-cap-mb must be 0 or more, got -1.0",
    "--virtual-ranks 2 --compress bf16": "--compress cannot be used with --virtual-ranks: leave",
    "--virtual-ranks 2 --sync-batch-norm": "--sync-batch-norm cannot be used with --virtual-ranks",
    "--elastic --sync-batch-norm": "--sync-batch-norm cannot be used with --elastic: leave one",
    "--balance": "--balance needs virtual ranks: add --virtual-ranks",
    "--recheck 5": "--recheck needs virtual ranks: add --virtual-ranks",
    "--virtual-ranks 3": "--virtual-ranks must be a power of two, got 3",
    "--powersgd-rank 2": "--powersgd-rank is for --compress powersgd, which is not given",
    "--compress int8 --backend nccl": "--compress int8 is for gloo and mpi, not nccl: use bf16 or",
    f"--seed {2**62}": f"--seed must be 0 to 2**62 - 1, got {2**62}",
    "--resume auto": "--resume auto needs --checkpoint-dir, which is not given",
    "--no-shared-memory --backend mpi": "--no-shared-memory is for gloo, and the backend is mpi",
    "--max-restarts 2": "--max-restarts is for --elastic, which is not given",
    "--elastic --no-replace-wrong": "--no-replace-wrong is for --elastic with --recheck: give",
    "--elastic --backend mpi": "--elastic is for gloo, and the backend is mpi: leave one",
    "--elastic --timeline t": "--timeline cannot be used with --elastic: leave one out",
    "--master-port 65536": "--master-port must be 1 to 65535, got 65536",
    "--checkpoint x.pt": "--checkpoint belongs to test; to continue a run: --resume FILE",
    "test": "test needs --checkpoint FILE, the model to evaluate",
    **{
        f"test --checkpoint x.pt {option}": f"{option.split()[0]} has no meaning for test"
        for option in ("--lr 0.1", "--compress bf16", "--no-overlap", "--check", "--resume x")
    },
    "--threads many": "argument --threads: must be a number or auto, got 'many'; see --help",
    "--threads 0": "--threads must be auto, or 1 to 1,024, got 0",
    "RANK=0 WORLD_SIZE=1 --bind none": "--bind is for starting without a launcher, but torchrun",
    # An unknown word is named.
    "evaluate": "the command must be train or test, got 'evaluate'; see --help",
    "--ep 3": f"{UNKNOWN} --ep; did you mean --epochs? Otherwise see --help",
    "--zzz": f"{UNKNOWN} --zzz; see --help",
    "--batch-size 32 --global-batch-size 32": "argument --global-batch-size: not allowed with",
    # How ranks are started.
    "OMPI_COMM_WORLD_RANK=0 --nproc 2": "--nproc is for starting without a launcher, but mpirun "
    "has started this",
    "RANK=0 WORLD_SIZE=1 DDP_STARTED_HERE=1 DDP_MEMBER=0": "start_ranks(max_restarts=...) has "
    "started this process, in a job that replaces lost ranks: add --elastic, or leave max_restarts",
    "--nproc 1,1 --backend mpi": "--backend mpi runs on several machines under mpirun: mpirun "
    "--host A:8,B:2 python run.py --backend mpi",
    "--nproc 2 --node-rank 1": "--node-rank 1 is for several machines, with a count for each as in "
    "--nproc 8,2; got --nproc 2",
    "--nproc 8,2 --node-rank 2": "--node-rank must be 0 to 1 with --nproc 8,2, got 2",
    "--backend nccl": "--backend nccl needs a GPU, and none is visible here: use --backend gl",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_is_refused_is_one_line(words, monkeypatch):
    monkeypatch.setattr("torch.accelerator.device_count", lambda: 0)
    variables = [word for word in words.split() if re.match(r"[A-Z_]+=", word)]
    for variable in variables:
        monkeypatch.setenv(*variable.split("="))
    told = refusal(main, ["run.py"], words.split()[len(variables) :])
    assert told.startswith(REFUSED[words])


def test_each_optimizer_has_its_own_defaults():
    def rates(*words):
        settings, _ = parse(words)
        return settings.lr, settings.momentum, settings.weight_decay

    assert rates() == (0.05, 0.9, 1e-4)
    assert rates("--optimizer", "adamw") == (1e-3, None, 0.01)
    assert rates("--optimizer", "muon", "--lr", "7", "--momentum", "0") == (7.0, 0.0, 0.01)


def test_options_reach_their_settings():
    settings, options = parse([])
    assert settings == parse(["train"])[0] == Settings()
    assert (options.command, options.nproc, options.node_rank) == ("train", None, None)
    given = "--data-dir d --lr 0.5 --seed=7 --check-sync 5 --quiet --no-overlap"
    given += " --bucket-cap-mb inf --nproc 8,2 --node-rank 1 --master-addr h --master-port 1"
    settings, options = parse(given.split())
    switches = {"quiet": True, "overlap": False}
    numbers = {"lr": 0.5, "seed": 7, "check_sync": 5, "bucket_cap_mb": math.inf}
    assert settings == Settings(data_dir=Path("d"), **numbers, **switches)
    assert (options.nproc, options.node_rank) == ("8,2", 1)
    assert (options.master_addr, options.master_port) == ("h", 1)
    assert parse(["--check-sync"])[0] == Settings(check_sync=0)
    assert parse(["--check"])[0].check == 60
    assert parse(["--compress", "powersgd"])[0].powersgd_rank == 2

    arguments = "test --checkpoint x.pt --dataset fake --batch-size 5 --precision bf16 --quiet"
    settings, options = parse(arguments.split())
    assert (options.checkpoint, options.dataset) == (Path("x.pt"), "fake")
    assert (settings.batch_size, settings.precision, settings.quiet) == (5, "bf16", True)
    assert parse(["test", "--checkpoint", "x.pt"])[1].dataset is None  # the checkpoint's


def test_global_batch_size_is_shared_out():
    assert Settings(batch_size=8).rank_batch_size(3) == 8
    settings = Settings(global_batch_size=48, accumulate=2)
    assert [settings.rank_batch_size(ranks) for ranks in (1, 3)] == [24, 8]
    with pytest.raises(UsageError, match=r"multiple of 5 ranks x --accumulate 2 = 10, got 48$"):
        settings.rank_batch_size(5)
    settings = Settings(virtual_ranks=4, global_batch_size=48, accumulate=2)
    assert {settings.rank_batch_size(ranks) for ranks in (1, 2, 3)} == {6}
    told = refusal(Settings(virtual_ranks=16, global_batch_size=8).rank_batch_size, 2)
    assert "multiple of 16 --virtual-ranks x --accumulate 1 = 16, got 8" in told


LONG = {"accumulate": 2, "epochs": 20}


@pytest.mark.parametrize(
    ("options", "ranks", "rates"),
    [
        ({"scale_lr": False}, 4, {0: 0.1}),
        # 4 ranks x 2 passes: 8 times the rate after 10 steps, each of which adds 0.7 of 0.1.
        (LONG, 4, {0: 0.17, 1: 0.24, 4: 0.45, 9: 0.8, 10: 0.8, 39: 0.8}),
        # A run of 4 epochs warms up for 2 of them: 4 steps from 0.1 to 0.2.
        ({"epochs": 4}, 2, {0: 0.125, 1: 0.15, 2: 0.175, 3: 0.2, 4: 0.2, 5: 0.2}),
        # A run of a single step takes the whole rate; one rank has nothing to scale.
        ({"epochs": 1}, 2, {0: 0.2}),
        ({}, 1, {3: 0.1}),
        # By virtual ranks, whatever the number of ranks.
        *((LONG | {"virtual_ranks": 4}, ranks, {9: 0.8}) for ranks in (1, 3)),
    ],
)
def test_learning_rate(options, ranks, rates):
    settings = Settings(**{"lr": 0.1, "scale_lr": True} | options)
    per_epoch = 1 if options.get("epochs") == 1 else 2
    found = {step: settings.learning_rate(step, per_epoch, ranks) for step in rates}
    assert found == pytest.approx(rates)


def test_parse_counts():
    assert parse_counts("2", 0) == (2,)
    assert parse_counts("8,2,16", 2) == (8, 2, 16)
    wrong = ("", "0", "-2", "two", "2,", ",2", "2,0", "2 ,2", "1.5", "02", "2\n")
    too_many = ("1000000", "2,1025", "9" * 5000)
    for texts, node_rank, error in (
        (wrong, 0, "--nproc must be"),
        (too_many, 0, "--nproc must be at most 1,024 for a machine, got "),
        (["8,2"], -1, "--node-rank must be 0 to 1 with --nproc 8,2, got -1"),
        (["8,2"], 2, "--node-rank must be 0 to 1 with --nproc 8,2, got 2"),
    ):
        for text in texts:
            assert refusal(parse_counts, text, node_rank).startswith(error)


def test_a_resumed_run_with_virtual_ranks_takes_the_threads_of_its_checkpoint():
    auto, _ = parse(["--threads", "auto"])
    with_virtual_ranks, _ = parse(["--threads", "auto", "--virtual-ranks", "4"])
    assert not with_virtual_ranks.keeps_threads
    assert Settings(virtual_ranks=4).keeps_threads
    for settings, changes in (
        (auto, ["threads 8 -> 1"]),
        (Settings(virtual_ranks=4), []),
        (Settings(virtual_ranks=4, threads=1), ["threads 8 -> 1"]),
    ):
        assert settings.changes_since(settings.as_saved(8), 1) == changes
