"""The command line's options: what is refused, in what words, and what the others come to."""

import math
import re
from pathlib import Path

import pytest

from ddp_from_scratch import UsageError
from ddp_from_scratch.training.cli import make_parser, parse
from ddp_from_scratch.training.main import main
from ddp_from_scratch.training.settings import Settings, option_of

ABOUT = "Trains.\n\n    python run.py\n"


def error_of(*arguments: str) -> str:
    with pytest.raises(UsageError) as error:
        parse(arguments, ABOUT)
    text = str(error.value)
    assert text
    assert "\n" not in text
    return text


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--lr -0.1", "--lr must be a positive number, at most 1e+30, got -0.1"),
        ("--lr 0", "--lr must be a positive number, at most 1e+30, got 0.0"),
        ("--lr nan", "--lr must be a positive number, at most 1e+30, got nan"),
        ("--lr inf", "--lr must be a positive number, at most 1e+30, got inf"),
        ("--lr fast", "argument --lr: invalid float value: 'fast'; see --help"),
        ("--epochs 0", "--epochs must be 1 to 1,000,000,000, got 0"),
        ("--epochs 1.5", "argument --epochs: invalid int value: '1.5'; see --help"),
        ("--batch-size 0", "--batch-size must be 1 to 1,000,000,000, got 0"),
        ("--global-batch-size -8", "--global-batch-size must be 1 to 1,000,000,000, got -8"),
        ("--accumulate 0", "--accumulate must be 1 to 1,000,000,000, got 0"),
        ("--threads 0", "--threads must be 1 to 1,024, got 0"),
        ("--workers -1", "--workers must be 0 to 1,024, got -1"),
        ("--momentum -0.5", "--momentum must be 0 to 1e+30, got -0.5"),
        ("--momentum nan", "--momentum must be 0 to 1e+30, got nan"),
        ("--weight-decay inf", "--weight-decay must be 0 to 1e+30, got inf"),
        (
            "--timeout 0",
            "--timeout must be a positive number of seconds, at most 1,000,000, got 0.0",
        ),
        (
            "--timeout nan",
            "--timeout must be a positive number of seconds, at most 1,000,000, got nan",
        ),
        ("--bucket-cap-mb -1", "--bucket-cap-mb must be 0 or more, or auto, got -1.0"),
        ("--bucket-cap-mb nan", "--bucket-cap-mb must be 0 or more, or auto, got nan"),
        (
            "--bucket-cap-mb big",
            "argument --bucket-cap-mb: must be a number or auto, got 'big'; see --help",
        ),
        (
            "--bucket-cap-mb auto --deterministic",
            "--bucket-cap-mb auto goes by the clock, which --deterministic rules out: give a "
            "size, such as an earlier run's",
        ),
        *(
            (
                f"--stall-after {value}",
                "--stall-after must be a positive number of seconds, at most 1,000,000, or inf, "
                f"got {float(value)}",
            )
            for value in ("0", "nan", "1e300")
        ),
        ("--lr 1e308", "--lr must be a positive number, at most 1e+30, got 1e+308"),
        ("--epochs=--", "argument --epochs: expected one argument; see --help"),
        ("--checkpoint-dir=--", "argument --checkpoint-dir: expected one argument; see --help"),
        ("--workers 100000", "--workers must be 0 to 1,024, got 100000"),
        ("--threads 100000", "--threads must be 1 to 1,024, got 100000"),
        ("--check-sync -1", "--check-sync must be 0 or more, got -1"),
        ("--powersgd-rank 2", "--powersgd-rank is for --compress powersgd, which is not given"),
        ("--timeline-steps 2", "--timeline-steps is for --timeline, which is not given"),
        ("--timeline t --timeline-steps 0", "--timeline-steps must be 1 to 1,000,000,000, got 0"),
        (
            "--compress fp16 --powersgd-rank 2",
            "--powersgd-rank is for --compress powersgd, which is not given",
        ),
        ("--compress powersgd --powersgd-rank 0", "--powersgd-rank must be 1 or more, got 0"),
        ("test --checkpoint x.pt --compress bf16", "--compress has no meaning for test"),
        ("--seed -1", "--seed must be 0 to 2**62 - 1, got -1"),
        ("--resume auto", "--resume auto looks into --checkpoint-dir, which is not given"),
        ("test", "test needs --checkpoint FILE, the model to evaluate"),
        ("--checkpoint x.pt", "--checkpoint belongs to test; to continue a run: --resume FILE"),
        ("test --checkpoint x.pt --lr 0.1", "--lr has no meaning for test"),
        ("test --checkpoint x.pt --resume x.pt", "--resume has no meaning for test"),
        ("test --checkpoint x.pt --no-overlap", "--no-overlap has no meaning for test"),
        ("test --checkpoint x.pt --check-sync", "--check-sync has no meaning for test"),
        ("test --checkpoint x.pt --log-dir logs", "--log-dir has no meaning for test"),
        ("--max-failures 2", "--max-failures is for --go-on, which is not given"),
        ("--go-on --max-failures -1", "--max-failures must be 0 or more, got -1"),
        (
            "--go-on --shards 2 --backend mpi",
            "--go-on is for gloo, and the backend is mpi: leave one of them out",
        ),
        *(
            (
                f"--go-on --shards 2 {option} 5",
                f"{option} cannot be had with --go-on: leave one out",
            )
            for option in ("--timeline", "--stragglers")
        ),
        ("--master-port 0", "--master-port must be 1 to 65535, got 0"),
        ("--master-port 65536", "--master-port must be 1 to 65535, got 65536"),
    ],
)
def test_a_bad_value_is_one_line_that_says_what_was_expected(arguments: str, told: str) -> None:
    assert error_of(*arguments.split()) == told


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ("--backend nccl2", ["--backend", "'nccl2'", "gloo", "nccl", "mpi"]),
        ("--dataset imagenet", ["--dataset", "'imagenet'", "digits", "cifar10"]),
        ("--precision fp8", ["--precision", "'fp8'", "fp32", "bf16"]),
        ("--compress zip", ["--compress", "'zip'", "bf16", "fp16", "powersgd"]),
        ("evaluate", ["'evaluate'", "train", "test"]),
        ("--learning-rate 1", ["--learning-rate", "unrecognized"]),
        ("--ep 3", ["--ep", "unrecognized"]),  # no guessing of abbreviations
        ("--batch-size 8 --global-batch-size 16", ["--batch-size", "not allowed with"]),
        ("--lr", ["--lr", "expected one argument"]),
    ],
)
def test_an_unknown_word_is_one_line_that_names_it(arguments: str, told: list[str]) -> None:
    text = error_of(*arguments.split())
    assert all(word in text for word in [*told, "see --help"]), text


@pytest.mark.parametrize(
    ("arguments", "environ", "told"),
    [
        (
            "--go-on --nproc 4 --shards 2",
            {},
            "--shards must be at least as many as ranks, got 2 of 4",
        ),
        (
            "--nproc 2",
            {"OMPI_COMM_WORLD_RANK": "0"},
            "--nproc is for starting without a launcher, but mpirun has",
        ),
        (
            "--node-rank 0",
            {"RANK": "0", "WORLD_SIZE": "1"},
            "--node-rank is for starting without a launcher, but torchrun has",
        ),
        ("--nproc 1,1", {}, "needs --node-rank and --master-addr"),
        (
            "--nproc 1,1 --backend mpi",
            {},
            "under mpirun: mpirun --host A:8,B:2 python run.py --backend mpi",
        ),
        ("--nproc 2 --master-port 29500", {}, "--master-port are for several machines"),
    ],
)
def test_how_ranks_are_started(
    arguments: str, environ: dict[str, str], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError) as error:
        main(["run.py"], arguments.split())
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_defaults() -> None:
    settings, options = parse([], ABOUT)
    assert settings == Settings()
    assert (options.command, options.nproc, options.node_rank) == ("train", None, None)
    assert parse(["train"], ABOUT)[0] == settings


def test_every_option_reaches_its_setting() -> None:
    arguments = (
        "--backend mpi --dataset fake --data-dir d --download --model mlp --epochs 3 "
        "--global-batch-size 64 --lr 0.5 --scale-lr --momentum 0.8 --weight-decay 0.01 "
        "--bucket-cap-mb inf --no-overlap --accumulate 2 "
        "--precision bf16 --seed 7 "
        "--compress powersgd --powersgd-rank 3 "
        "--sync-batch-norm --deterministic --no-stop-on-nan --workers 1 --threads 2 "
        "--timeout 9 --stall-after 3 "
        "--checkpoint-dir c "
        "--resume auto --log-dir l --check-sync 5 --quiet --nproc 8,2 --node-rank 1 "
        "--master-addr h --master-port 1"
    )
    settings, options = parse(arguments.split(), ABOUT)
    assert settings == Settings(
        backend="mpi",
        dataset="fake",
        data_dir=Path("d"),
        download=True,
        model="mlp",
        epochs=3,
        global_batch_size=64,
        lr=0.5,
        scale_lr=True,
        momentum=0.8,
        weight_decay=0.01,
        bucket_cap_mb=math.inf,
        overlap=False,
        compress="powersgd",
        powersgd_rank=3,
        sync_batch_norm=True,
        accumulate=2,
        precision="bf16",
        seed=7,
        deterministic=True,
        stop_on_nan=False,
        workers=1,
        threads=2,
        timeout=9.0,
        stall_after=3.0,
        checkpoint_dir=Path("c"),
        resume="auto",
        log_dir=Path("l"),
        check_sync=5,
        quiet=True,
    )
    assert (options.nproc, options.node_rank) == ("8,2", 1)
    assert (options.master_addr, options.master_port) == ("h", 1)


def test_bucket_cap_auto() -> None:
    assert parse(["--bucket-cap-mb", "auto"], ABOUT)[0] == Settings(bucket_cap_mb="auto")


def test_power_sgd_has_a_rank() -> None:
    settings = parse(["--compress", "powersgd"], ABOUT)[0]
    assert settings.powersgd_rank == 2
    told = make_parser(ABOUT).format_help()
    assert "and larger (default: 2)" in " ".join(told.split())
    saved = settings.as_saved()
    assert Settings(compress="powersgd", powersgd_rank=2).changes_since(saved) == []
    changed = Settings(compress="bf16").changes_since(saved)
    assert changed == ["compress powersgd -> bf16", "powersgd_rank 2 -> None"]


def test_test_takes_the_options_that_concern_it() -> None:
    arguments = "test --checkpoint x.pt --dataset fake --batch-size 5 --precision bf16 --quiet"
    settings, options = parse(arguments.split(), ABOUT)
    assert (options.checkpoint, options.dataset) == (Path("x.pt"), "fake")
    assert (settings.batch_size, settings.precision, settings.quiet) == (5, "bf16", True)
    assert parse(["test", "--checkpoint", "x.pt"], ABOUT)[1].dataset is None  # the checkpoint's


def test_shared_memory_is_switched_off_on_gloo_alone() -> None:
    assert not parse(["--no-shared-memory"], ABOUT)[0].shared_memory
    with pytest.raises(UsageError, match="--no-shared-memory is for gloo, and the backend is mpi"):
        parse(["--no-shared-memory", "--backend", "mpi"], ABOUT)


def test_help_lists_every_option() -> None:
    parser = make_parser(ABOUT)
    told = parser.format_help()
    options = set(re.findall(r"--[a-z-]+", told))
    assert {option_of(name) for name in Settings.__dataclass_fields__} <= options
    assert {"--no-overlap", "--nproc", "--node-rank", "--master-addr", "--master-port"} <= options
    assert {"--checkpoint", "--help"} <= options
    assert "(default: 0.05)" in told
    assert ABOUT.partition("\n\n")[2] in told
    assert all(action.help for action in parser._actions)


def test_help_is_printed_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse(["--help"], ABOUT)
    assert end.value.code == 0
    assert "--bucket-cap-mb" in capsys.readouterr().out


def test_global_batch_size_is_shared_out() -> None:
    assert Settings(batch_size=8).rank_batch_size(3) == 8
    settings = Settings(global_batch_size=48, accumulate=2)
    assert settings.rank_batch_size(3) == 8
    assert settings.rank_batch_size(1) == 24
    with pytest.raises(UsageError) as error:
        settings.rank_batch_size(5)
    assert str(error.value) == (
        "--global-batch-size must be a multiple of 5 ranks x --accumulate 2 = 10, got 48"
    )


def test_learning_rate() -> None:
    assert Settings(lr=0.1).learning_rate(0, 10, 4) == 0.1

    # 4 ranks x 2 backward passes: 8 times the batch, so 8 times the rate after 5 epochs of 2 steps.
    # Each of those 10 steps adds (8 - 1) / 10 of 0.1.
    scaled = Settings(lr=0.1, scale_lr=True, accumulate=2, epochs=20)
    rates = [scaled.learning_rate(step, 2, 4) for step in (0, 1, 4, 9, 10, 39)]
    assert rates == pytest.approx([0.17, 0.24, 0.45, 0.8, 0.8, 0.8])

    # A run of 4 epochs warms up for 2 of them: 4 steps from 0.1 to 0.2.
    short = Settings(lr=0.1, scale_lr=True, epochs=4)
    rates = [short.learning_rate(step, 2, 2) for step in range(6)]
    assert rates == pytest.approx([0.125, 0.15, 0.175, 0.2, 0.2, 0.2])

    # A run of a single step takes the whole rate; one rank has nothing to scale.
    assert Settings(lr=0.1, scale_lr=True, epochs=1).learning_rate(0, 1, 2) == pytest.approx(0.2)
    assert Settings(lr=0.1, scale_lr=True).learning_rate(3, 2, 1) == pytest.approx(0.1)
