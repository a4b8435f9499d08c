"""The command line's options: what is refused, in what words, and what the others come to."""

import math
from pathlib import Path

import pytest

from ddp_from_scratch import UsageError
from ddp_from_scratch.training.cli import make_parser, parse
from ddp_from_scratch.training.main import main
from ddp_from_scratch.training.settings import Settings, option_of

ABOUT = "Trains.\n\n    python run.py\n"
SECONDS = "must be a positive number of seconds, at most 1,000,000"
UNKNOWN = "unrecognized arguments:"
RATE = "--lr must be a positive number, at most 1e+30, got"
# Arguments, and the beginning of the one line that says what was expected.
REFUSED = {
    "--lr -0.1": f"{RATE} -0.1",
    "--lr nan": f"{RATE} nan",
    "--lr 1e308": f"{RATE} 1e+308",
    "--lr fast": "argument --lr: invalid float value: 'fast'; see --help",
    "--lr": "argument --lr: expected one argument; see --help",
    "--epochs 0": "--epochs must be 1 to 1,000,000,000, got 0",
    "--epochs 1.5": "argument --epochs: invalid int value: '1.5'; see --help",
    "--epochs=--": "argument --epochs: expected one argument; see --help",
    "--batch-size 0": "--batch-size must be 1 to 1,000,000,000, got 0",
    "--global-batch-size -8": "--global-batch-size must be 1 to 1,000,000,000, got -8",
    "--accumulate 0": "--accumulate must be 1 to 1,000,000,000, got 0",
    "--threads 100000": "--threads must be 1 to 1,024, got 100000",
    "--workers -1": "--workers must be 0 to 1,024, got -1",
    "--momentum -0.5": "--momentum must be 0 to 1e+30, got -0.5",
    "--weight-decay inf": "--weight-decay must be 0 to 1e+30, got inf",
    "--timeout 0": f"--timeout {SECONDS}, got 0.0",
    "--timeout nan": f"--timeout {SECONDS}, got nan",
    "--stall-after 0": f"--stall-after {SECONDS}, or inf, got 0.0",
    "--stall-after 1e300": f"--stall-after {SECONDS}, or inf, got 1e+300",
    "--bucket-cap-mb -1": "--bucket-cap-mb must be 0 or more, or auto, got -1.0",
    "--bucket-cap-mb big": "argument --bucket-cap-mb: must be a number or auto, got 'big'; see",
    "--bucket-cap-mb auto --deterministic": "--bucket-cap-mb auto goes by the clock, which --det",
    "--shards 2 --bucket-cap-mb auto": "--bucket-cap-mb auto cannot be used with --shards: give",
    "--shards 2 --compress bf16": "--compress cannot be used with --shards: leave it out",
    "--shards 3": "--shards must be a power of two, got 3",
    "--check-sync -1": "--check-sync must be 0 or more, got -1",
    "--stragglers 0": "--stragglers must be 1 to 1,000,000,000, got 0",
    "--timeline-steps 2": "--timeline-steps is for --timeline, which is not given",
    "--timeline t --timeline-steps 0": "--timeline-steps must be 1 to 1,000,000,000, got 0",
    "--powersgd-rank 2": "--powersgd-rank is for --compress powersgd, which is not given",
    "--compress powersgd --powersgd-rank 0": "--powersgd-rank must be 1 or more, got 0",
    "--seed -1": "--seed must be 0 to 2**62 - 1, got -1",
    f"--seed {2**62}": f"--seed must be 0 to 2**62 - 1, got {2**62}",
    "--resume auto": "--resume auto looks into --checkpoint-dir, which is not given",
    "--no-shared-memory --backend mpi": "--no-shared-memory is for gloo, and the backend is mpi",
    "--max-failures 2": "--max-failures is for --go-on, which is not given",
    "--go-on --max-failures -1": "--max-failures must be 0 or more, got -1",
    "--go-on --backend mpi": "--go-on is for gloo, and the backend is mpi: leave one of them out",
    "--go-on --timeline t": "--timeline cannot be had with --go-on: leave one out",
    "--go-on --stragglers 5": "--stragglers cannot be had with --go-on: leave one out",
    "--master-port 0": "--master-port must be 1 to 65535, got 0",
    "--master-port 65536": "--master-port must be 1 to 65535, got 65536",
    "--checkpoint x.pt": "--checkpoint belongs to test; to continue a run: --resume FILE",
    "test": "test needs --checkpoint FILE, the model to evaluate",
    **{
        f"test --checkpoint x.pt {option}": f"{option.split()[0]} has no meaning for test"
        for option in ("--lr 0.1", "--compress bf16", "--no-overlap", "--check-sync", "--resume x")
    },
    # An unknown word is named.
    "evaluate": "the command must be train or test, got 'evaluate'; see --help",
    "--ep 3": f"{UNKNOWN} --ep; did you mean --epochs? Otherwise see --help",
    "--epoch=1": f"{UNKNOWN} --epoch=1; did you mean --epochs? Otherwise see --help",
    "--bucketcap 1": f"{UNKNOWN} --bucketcap; did you mean --bucket-cap-mb? Otherwise see --help",
    "--zzz": f"{UNKNOWN} --zzz; see --help",
    "--batch-size 32 --global-batch-size 32": "argument --global-batch-size: not allowed with",
    "--batch-size 8 --global-batch-size 16": "argument --global-batch-size: not allowed with",
    **{
        f"{option} x": f"argument {option}: invalid choice: 'x' (choose from"
        for option in ("--backend", "--dataset", "--precision", "--compress")
    },
}


@pytest.mark.parametrize("arguments", REFUSED)
def test_what_is_refused_is_one_line(arguments):
    with pytest.raises(UsageError) as error:
        parse(arguments.split(), ABOUT)
    text = str(error.value)
    assert text.startswith(REFUSED[arguments])
    assert "\n" not in text


OF_RUNS = {
    "--go-on --nproc 4 --shards 2": "--shards must be at least as many as ranks, got 2",
    "OMPI_COMM_WORLD_RANK=0 --nproc 2": "a launcher, but mpirun has started this",
    "RANK=0 WORLD_SIZE=1 --node-rank 0": "a launcher, but torchrun has started",
    "RANK=0 WORLD_SIZE=1 --go-on": "starting without a launcher: torchrun ends",
    "--nproc 1,1": "needs --node-rank and --master-addr",
    "--nproc 1,1 --backend mpi": "mpirun --host A:8,B:2 python run.py --backend mpi",
    "--nproc 2 --master-port 29500": "--master-port are for several machines",
    "--nproc 2 --node-rank 1": "--node-rank 1 is for several machines, with a count for each as in "
    "--nproc 8,2; got --nproc 2",
    "--nproc 8,2 --node-rank 2": "--node-rank must be 0 to 1 with --nproc 8,2, got 2",
    "--backend nccl": "--backend nccl needs a GPU, and none is visible here: use --backend gl",
}


@pytest.mark.parametrize("words", OF_RUNS)
def test_how_ranks_are_started(words, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    variables = [word for word in words.split() if word[0] != "-" and "=" in word]
    for variable in variables:
        monkeypatch.setenv(*variable.split("="))
    with pytest.raises(UsageError) as error:
        main(["run.py"], words.split()[len(variables) :])
    assert OF_RUNS[words] in str(error.value)
    assert "\n" not in str(error.value)


def test_every_option_reaches_its_setting():
    settings, options = parse([], ABOUT)
    assert settings == parse(["train"], ABOUT)[0] == Settings()
    assert (options.command, options.nproc, options.node_rank) == ("train", None, None)
    given = {
        **{"backend": "mpi", "dataset": "fake", "data_dir": Path("d"), "model": "mlp"},
        **{"epochs": 3, "global_batch_size": 64, "lr": 0.5, "momentum": 0.8, "weight_decay": 0.01},
        **{"bucket_cap_mb": math.inf, "compress": "powersgd", "powersgd_rank": 3, "accumulate": 2},
        **{"precision": "bf16", "seed": 7, "workers": 1, "threads": 2, "timeout": 9.0},
        **{"stall_after": 3.0, "checkpoint_dir": Path("c"), "resume": "auto", "log_dir": Path("l")},
        **{"timeline": Path("t"), "timeline_steps": 4, "stragglers": 6, "check_sync": 5},
    }
    on = {"download", "scale_lr", "sync_batch_norm", "deterministic", "quiet"}
    off = {"overlap", "stop_on_nan"}
    arguments = [part for name, v in given.items() for part in (option_of(name), str(v))]
    arguments += [*map(option_of, on), "--no-overlap", "--no-stop-on-nan", "--nproc", "8,2"]
    arguments += ["--node-rank", "1", "--master-addr", "h", "--master-port", "1"]
    settings, options = parse(arguments, ABOUT)
    switches = dict.fromkeys(on, True) | dict.fromkeys(off, False)
    assert settings == Settings(**given, **switches)
    assert (options.nproc, options.node_rank) == ("8,2", 1)
    assert (options.master_addr, options.master_port) == ("h", 1)
    auto, *more = ("--bucket-cap-mb=auto", "--shards=4", "--go-on", "--max-failures=2")
    assert parse([auto], ABOUT)[0] == Settings(bucket_cap_mb="auto")
    expected = Settings(shards=4, go_on=True, max_failures=2, shared_memory=False)
    assert parse([*more, "--no-shared-memory"], ABOUT)[0] == expected
    left = {f for f in Settings.__dataclass_fields__ if f not in {*given, *on, *off}}
    assert left == {"batch_size", "shards", "go_on", "max_failures", "shared_memory"}

    arguments = "test --checkpoint x.pt --dataset fake --batch-size 5 --precision bf16 --quiet"
    settings, options = parse(arguments.split(), ABOUT)
    assert (options.checkpoint, options.dataset) == (Path("x.pt"), "fake")
    assert (settings.batch_size, settings.precision, settings.quiet) == (5, "bf16", True)
    assert parse(["test", "--checkpoint", "x.pt"], ABOUT)[1].dataset is None  # the checkpoint's


def test_power_sgd_has_a_rank():
    settings = parse(["--compress", "powersgd"], ABOUT)[0]
    assert settings.powersgd_rank == 2
    saved = settings.as_saved()
    assert Settings(compress="powersgd", powersgd_rank=2).changes_since(saved) == []
    changed = Settings(compress="bf16").changes_since(saved)
    assert changed == ["compress powersgd -> bf16", "powersgd_rank 2 -> None"]


def test_help():
    parser = make_parser(ABOUT)
    told = parser.format_help()
    assert "(default: 0.05)" in told
    assert "and larger (default: 2)" in " ".join(told.split())
    assert ABOUT.partition("\n\n")[2] in told
    assert all(action.help for action in parser._actions)
    of_module = make_parser(ABOUT, ["-m", "ddp_from_scratch"]).format_help()
    assert of_module.startswith("usage: python -m ddp_from_scratch ")
    assert "    python -m ddp_from_scratch\n" in of_module


def test_global_batch_size_is_shared_out():
    assert Settings(batch_size=8).rank_batch_size(3) == 8
    settings = Settings(global_batch_size=48, accumulate=2)
    assert [settings.rank_batch_size(ranks) for ranks in (1, 3)] == [24, 8]
    with pytest.raises(UsageError, match=r"multiple of 5 ranks x --accumulate 2 = 10, got 48$"):
        settings.rank_batch_size(5)
    settings = Settings(shards=4, global_batch_size=48, accumulate=2)
    assert {settings.rank_batch_size(ranks) for ranks in (1, 2, 3)} == {6}
    with pytest.raises(UsageError, match="multiple of 16 --shards x --accumulate 1 = 16, got 8"):
        Settings(shards=16, global_batch_size=8).rank_batch_size(2)


LONG = {"accumulate": 2, "epochs": 20}


@pytest.mark.parametrize(
    ("options", "ranks", "rates"),
    [
        ({"scale_lr": False}, 4, {0: 0.1}),
        # 4 ranks x 2 backward passes: 8 times the batch, so 8 times the rate after 5 epochs of 2
        # steps. Each of those 10 steps adds (8 - 1) / 10 of 0.1.
        (LONG, 4, {0: 0.17, 1: 0.24, 4: 0.45, 9: 0.8, 10: 0.8, 39: 0.8}),
        # A run of 4 epochs warms up for 2 of them: 4 steps from 0.1 to 0.2.
        ({"epochs": 4}, 2, {0: 0.125, 1: 0.15, 2: 0.175, 3: 0.2, 4: 0.2, 5: 0.2}),
        # A run of a single step takes the whole rate; one rank has nothing to scale.
        ({"epochs": 1}, 2, {0: 0.2}),
        ({}, 1, {3: 0.1}),
        # By shards, whatever the number of ranks.
        *((LONG | {"shards": 4}, ranks, {9: 0.8}) for ranks in (1, 3)),
    ],
)
def test_learning_rate(options, ranks, rates):
    settings = Settings(**{"lr": 0.1, "scale_lr": True} | options)
    per_epoch = 1 if options.get("epochs") == 1 else 2
    found = {step: settings.learning_rate(step, per_epoch, ranks) for step in rates}
    assert found == pytest.approx(rates)
