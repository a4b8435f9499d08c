"""One file that a run continues from, and what happens when it is not whole."""

import copy
import fcntl
import os
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.training import checkpoint
from ddp_from_scratch.training.contents import check_contents, check_fit
from ddp_from_scratch.training.evaluate import load_model
from ddp_from_scratch.training.folder_lock import FolderLock
from ddp_from_scratch.training.report import Report
from ddp_from_scratch.training.resume import find_checkpoint
from ddp_from_scratch.training.settings import Settings
from tests.support.failing_run import RUN_PY, Run

CPU = torch.device("cpu")
MODEL = nn.Linear(4, 3)


def state(step):
    """What a run of one rank writes after so many steps, with PowerSGD and loss scaling."""
    weights = {"weight": torch.full((3, 4), float(step)), "bias": torch.zeros(3)}
    momenta = {i: {"momentum_buffer": torch.zeros_like(w)} for i, w in enumerate(weights.values())}
    errors = [{"weight": torch.zeros(3, 4)}]
    return {
        "model": weights,
        "model_spec": {"name": "mlp", "channels": 1, "image_size": 8, "num_classes": 10},
        "optimizer": {"state": momenta, "param_groups": [{"params": [0, 1]}]},
        "scaler": torch.amp.GradScaler("cpu").state_dict(),
        "compression": {"iteration": step, "errors": errors, "loss_scale": 1.0}
        | {"qs": {"weight": torch.zeros(4, 1)}},
        "ready_order": ["bias", "weight"],
        "buckets": {"bucket_cap_mb": [1.0, 25.0], "overlap": True},
        "epoch": 0,
        "step": step,
        "images": 32 * step,
        "totals": torch.zeros(3, dtype=torch.float64),
        "rng": [checkpoint.rng_state()],
        "settings": {"dataset": "digits", "epochs": 10},
        "world_size": 1,
        "global_batch_size": 32,
    }


def test_what_was_saved_is_loaded_and_the_newest_two_are_kept(tmp_path):
    """The newest by when they were written: a later one may have fewer steps behind it."""
    for step in (1000, 10, 100):
        path = checkpoint.save(tmp_path / "deep" / "er", state(step))
    assert [p.name for p in checkpoint.files(path.parent)] == [
        "checkpoint-000003.pt",
        "checkpoint-000002.pt",
    ]
    loaded = checkpoint.load(path, CPU)
    assert loaded["model"]["weight"].tolist() == [[100.0] * 4] * 3
    assert not list(path.parent.glob("*.tmp"))


def test_torch_reads_the_file_as_any_of_its_own(tmp_path):
    path = checkpoint.save(tmp_path, state(7))
    assert torch.load(path, weights_only=True)["step"] == 7


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path):
    path = checkpoint.save(tmp_path, state(1))
    whole = path.read_bytes()
    draw = random.Random(0)
    for bit in [0, 8 * len(whole) - 1, *(draw.randrange(8 * len(whole)) for _ in range(300))]:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(UsageError, match=r"checkpoint-000001\.pt is (damaged|truncated)"):
            checkpoint.load(path, CPU)
    path.write_bytes(whole)
    checkpoint.load(path, CPU)


@pytest.mark.parametrize("kept", [0, 1, 100, -1])
def test_a_truncated_file_is_one_clear_line(tmp_path, kept):
    path = checkpoint.save(tmp_path, state(1))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(UsageError, match=r"checkpoint-000001\.pt is truncated") as error:
        checkpoint.load(path, CPU)
    assert "\n" not in str(error.value)


class Foreign:
    pass


@pytest.mark.parametrize(
    "content", [{"model": {}}, {"format": checkpoint.FORMAT}, [1, 2], Foreign(), torch.ones(2)]
)
def test_a_foreign_file_is_one_clear_line_and_is_not_unpickled(tmp_path, content):
    torch.save(content, tmp_path / "foreign.pt")
    with pytest.raises(
        UsageError, match=r"foreign\.pt is truncated, or is not a checkpoint of ddp_from_scratch"
    ):
        checkpoint.load(tmp_path / "foreign.pt", CPU)


def test_text_a_folder_and_no_file_are_one_clear_line(tmp_path):
    (tmp_path / "text.pt").write_text("hello\n" * 100)
    (tmp_path / "lines.pt").write_text("root:x:0:0\n" * 10)
    (tmp_path / "noise.pt").write_bytes(random.Random(7).randbytes(4000))
    for path in (*tmp_path.iterdir(), tmp_path, tmp_path / "none.pt"):
        with pytest.raises(UsageError, match="checkpoint") as error:
            checkpoint.load(path, CPU)
        assert "\n" not in str(error.value)
        assert str(path) in str(error.value)


def test_a_newer_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "VERSION", 2)
    path = checkpoint.save(tmp_path, state(1))
    monkeypatch.undo()
    with pytest.raises(UsageError, match="checkpoint version 2, this program reads up to 1"):
        checkpoint.load(path, CPU)


def test_the_newest_whole_file_is_used_and_the_others_named(tmp_path):
    assert checkpoint.load_newest(tmp_path / "nothing", CPU) is None
    good, bad = (checkpoint.save(tmp_path, state(step)) for step in (1, 2))
    bad.write_bytes(b"PK")
    (tmp_path / "checkpoint-000003.tmp").touch()
    found = checkpoint.load_newest(tmp_path, CPU)
    assert found is not None
    path, loaded, complaints = found
    assert (path, loaded["step"]) == (good, 1)
    assert len(complaints) == 1
    assert "checkpoint-000002.pt is truncated" in complaints[0]
    # The good one is not removed in favour of that, which somebody may want to look at.
    assert bad.with_suffix(".unreadable").read_bytes() == b"PK"
    newer = [checkpoint.save(tmp_path, state(step)) for step in (3,)]
    assert checkpoint.files(tmp_path) == [*newer, good]
    for path in (good, *newer):
        path.write_bytes(b"")
    with pytest.raises(UsageError, match=r"no checkpoint in .* can be read"):
        checkpoint.load_newest(tmp_path, CPU)


def test_one_that_may_be_whole_is_not_passed_over(tmp_path, monkeypatch):
    """Another program, or the same in an hour, reads it."""
    checkpoint.save(tmp_path, state(1))
    monkeypatch.setattr(checkpoint, "VERSION", 2)
    newer = checkpoint.save(tmp_path, state(2))
    monkeypatch.undo()
    with pytest.raises(UsageError, match=r"checkpoint version 2, .* install a newer"):
        checkpoint.load_newest(tmp_path, CPU)
    assert checkpoint.files(tmp_path)[0] == newer

    newer.unlink()
    newer.symlink_to(newer.name)  # an OSError whoever runs the tests
    with pytest.raises(UsageError, match=r"cannot read checkpoint .*-000002\.pt: Too many"):
        checkpoint.load_newest(tmp_path, CPU)
    assert checkpoint.files(tmp_path)[0] == newer


def test_a_run_goes_back_to_the_newest_whole_one_and_says_so(tmp_path, capsys):
    settings = Settings(checkpoint_dir=tmp_path, resume="auto")
    spec, report = state(1)["model_spec"], Report(speaks=True, quiet=False)
    good, bad = (checkpoint.save(tmp_path, state(step)) for step in (1, 2))
    damaged = bytearray(bad.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    bad.write_bytes(damaged)
    found = find_checkpoint(settings, spec, MODEL, report)
    assert found is not None
    assert found["step"] == 1
    told = capsys.readouterr()
    assert told.out == f"resuming from {good}\n"
    assert told.err == (
        f"warning: {bad} is damaged: its bytes are not those that were written (sha256 differs); "
        f"using checkpoint-000001.pt instead\n"
    )


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--checkpoint-dir .*file/x cannot be written to"):
        checkpoint.prepare_folder(tmp_path / "file" / "x", resume=None)
    with pytest.raises(UsageError, match="cannot write checkpoint"):
        checkpoint.save(tmp_path / "file" / "x", state(1))


def test_a_folder_of_another_run_is_refused_and_what_a_killed_one_left_removed(tmp_path):
    folder, elsewhere = tmp_path / "a", tmp_path / "b"
    path, other = (checkpoint.save(f, state(1)) for f in (folder, elsewhere))
    (folder / "checkpoint-000002.tmp").touch()
    with pytest.raises(UsageError, match="another run: continue that one with --resume auto"):
        checkpoint.prepare_folder(folder, resume=None)
    # Its checkpoints would be removed as soon as this run has two of its own.
    with pytest.raises(UsageError, match=f"holds the checkpoints of another run than.*{other}: "):
        checkpoint.prepare_folder(folder, resume=str(other))
    assert path.exists()
    for resume in ("auto", str(path), f"{tmp_path}/b/../a/{path.name}"):
        checkpoint.prepare_folder(folder, resume=resume).close()
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-000001.pt"]
    checkpoint.prepare_folder(tmp_path / "c", resume=str(path)).close()


HOLD = """
import sys
from pathlib import Path
from ddp_from_scratch.training import checkpoint
lock = checkpoint.prepare_folder(Path(sys.argv[1]), resume="auto")
print("held", flush=True)
sys.stdin.read()
"""


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path):
    left = tmp_path / "checkpoint-000001.tmp"
    for end in ("kill", "communicate"):
        with subprocess.Popen(
            [sys.executable, "-c", HOLD, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        ) as first:
            assert first.stdout is not None
            assert first.stdout.readline() == b"held\n"
            left.touch()  # it writes
            with pytest.raises(
                UsageError, match=rf"is in use by another run \(process {first.pid} on "
            ):
                checkpoint.prepare_folder(tmp_path, resume="auto")
            assert left.exists()
            getattr(first, end)()
        checkpoint.prepare_folder(tmp_path, resume="auto").close()


def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch):
    def without(file, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", without)
    lock = FolderLock(tmp_path)
    assert not lock.holds
    lock.close()


def test_a_failed_write_leaves_the_older_checkpoint(tmp_path, monkeypatch):
    old = checkpoint.save(tmp_path, state(1))
    save = torch.save

    def full_disk(content, file):
        """As on a full disk: torch's own error is of a position that it did not expect."""
        with open("/dev/full", "wb", buffering=0) as full:
            try:
                save(content, full)
            except OSError as error:
                raise RuntimeError("unexpected pos 640 vs 588") from error

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(UsageError, match=r"cannot write .*000002\.pt: No space left on device$"):
        checkpoint.save(tmp_path, state(2))
    assert [path.name for path in tmp_path.iterdir()] == [old.name]
    checkpoint.load(old, CPU)


@pytest.mark.slow
@pytest.mark.root
@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount a small disk")
def test_a_full_disk_ends_the_run_with_one_line_and_a_whole_checkpoint(tmp_path):
    """Room for one and a half: the first stays."""
    run = f"{sys.executable} {RUN_PY} --nproc 1 --epochs 2 --checkpoint-dir {tmp_path}"
    test = f"{sys.executable} {RUN_PY} test --nproc 1 --checkpoint {tmp_path}/checkpoint-000001.pt"
    mount = f"mount -t tmpfs -o size=512k none {tmp_path}"
    script = f"{mount} && {{ {run}; echo rc $?; {test} && ls {tmp_path}; }}"
    with Run("unshare", "-m", "sh", "-c", script) as run:
        assert run.wait() == 0
        told = f"error: cannot write checkpoint {tmp_path}/checkpoint-000002.pt: No space left on "
        assert run.err == f"{told}device\n"
        assert "rc 2\ndigits test accuracy 0." in run.out
        assert run.out.endswith("checkpoint-000001.pt\n")


# Contents -----------------------------------------------------------------------------------------


def changed(content, path, value):
    """`content` with another value at "key.key", or without that key where it is `...`."""
    *way, last = (int(key) if key.isdecimal() else key for key in path.split("/"))
    inside = content
    for key in way:
        inside = inside[key]
    if value is ...:
        del inside[last]
    else:
        inside[last] = value
    return content


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("optimizer", ..., "it has no optimizer"),
        ("rng", ..., "it has no rng"),
        ("epoch", -1, "epoch must be 0 or more, got -1"),
        ("epoch", 11, "epochs must be 11 or more, got 10"),
        ("step", 1.5, "step must be 0 or more, got 1.5"),
        ("images", True, "images must be 0 or more, got True"),
        ("images", 2**80, "images must be 0 or more, got 1208925819614629174706176"),
        ("global_batch_size", 0, "global_batch_size must be 1 or more, got 0"),
        ("settings", [1], "settings is not a table, but a list"),
        ("settings/dataset", 3, "dataset of settings must be str, got 3"),
        ("model_spec/image_size", "8", "image_size of model_spec must be 1 or more, got '8'"),
        ("model_spec/depth", 8, "model_spec has more"),
        (
            "totals",
            torch.zeros(2),
            "totals must be a tensor of (3,) and torch.float64, got one of (2,)",
        ),
        (
            "totals",
            torch.zeros(1, dtype=torch.float64).expand(10**15),
            "totals must be a tensor of (3,)",
        ),
        ("scaler/scale", ..., "scaler has no scale"),
        ("scaler/scale", float("nan"), "scale of scaler must be 0 or more, got nan"),
        ("buckets/bucket_cap_mb", "big", "bucket_cap_mb is not a size"),
        ("rng", [], "rng does not hold the generators of each rank"),
        ("rng/0/torch", torch.zeros(3), "rng of rank 0 cannot be used"),
        ("rng/0/python", (3, (1, 2), None), "rng of rank 0 cannot be used"),
        (
            "rng/0/numpy",
            ("MT19937", torch.zeros(2), 0, 0, 0.0),
            "numpy of rng of rank 0 must be a tensor",
        ),
        ("rng/0/cuda", torch.zeros(3), "cuda of rng of rank 0 must be a tensor"),
    ],
)
def test_wrong_contents_are_one_line(tmp_path, path, value, told):
    good = checkpoint.save(tmp_path, state(1))
    bad = checkpoint.save(tmp_path, changed(state(1), path, value))
    with pytest.raises(UsageError) as error:
        checkpoint.load(bad, CPU)
    assert f"{bad} is no checkpoint that a run has written: {told}" in str(error.value)
    assert "\n" not in str(error.value)
    found = checkpoint.load_newest(tmp_path, CPU)
    assert found is not None
    assert found[0] == good


@pytest.mark.parametrize(
    ("path", "value", "told"),
    [
        ("model/bias", ..., "the model has no bias"),
        ("model/bias", torch.zeros(4), r"must be a tensor of \(3,\) .*, got one of \(4,\)"),
        ("model/bias", torch.zeros(3).half(), "got one of .* torch.float16"),
        ("model/more", torch.zeros(4), "the model has no 'more'"),
        ("model/weight", torch.zeros(1).expand(3, 4), "weight of the model must be"),
        ("optimizer", {}, "optimizer has no state"),
        ("optimizer/state/2", {}, "the optimizer has a state for parameter 2"),
        ("optimizer/state/1", {"momentum_buffer": torch.zeros(4)}, "state of parameter 1 must be"),
        ("ready_order", ["bias"], "ready_order does not name each parameter once"),
        ("ready_order", [1, 2], "ready_order does not name each parameter once"),
        ("compression/errors", [{}, {}], "compression is not that of each rank"),
        ("compression/errors/0/weight", torch.zeros(2), "weight of compression must be"),
        ("compression/qs/weight", torch.zeros(5, 1), "compression of weight has another shape"),
        ("compression/iteration", "x", "iteration of compression must be 0 or more, got 'x'"),
    ],
)
def test_contents_that_do_not_fit_the_model_are_one_line(path, value, told):
    check_fit(state(1), MODEL)
    with pytest.raises(UsageError, match=told) as error:
        check_fit(changed(state(1), path, value), MODEL)
    assert "\n" not in str(error.value)


ODD = (..., None, -1, 0.5, 2**70, "x", [], {}, [None], {"x": 1}, torch.zeros(2), float("nan"))


def paths(content, prefix=""):
    keys = content if isinstance(content, dict) else range(len(content))
    for key in keys:
        yield f"{prefix}{key}"
        if isinstance(content[key], dict | list) and content[key]:
            yield from paths(content[key], f"{prefix}{key}/")


def test_whatever_stands_there_is_right_or_refused():
    """No entry is trusted: none ends in another exception than the one that is told in a line."""
    refusals = []
    whole = state(1)
    whole["rng"] = whole["rng"] * 2
    whole["world_size"], whole["compression"]["errors"] = 2, whole["compression"]["errors"] * 2
    for path in paths(whole):
        for value in ODD:
            try:
                content = changed(copy.deepcopy(whole), path, value)
                check_contents(content)
                check_fit(content, MODEL)
            except UsageError as error:
                refusals.append(str(error))
    assert len(refusals) > 400
    assert not [text for text in refusals if "\n" in text]


def test_a_model_of_absurd_size_is_not_built(tmp_path, ranks):
    for size, why in (
        (2**20, ": the model has no "),
        (2**40, ", it was written by another version"),
    ):
        path = checkpoint.save(tmp_path, changed(state(1), "model_spec/image_size", size))
        (told,) = ranks("gloo", 1)(refusal_of, path)
        assert told.startswith(f"{path} does not fit its own model mlp{why}")


def test_a_model_that_is_not_the_one_it_names_is_told_why(tmp_path, ranks):
    for name, why in (("mlp", "the model has no "), ("mlq", "unknown model 'mlq'")):
        path = checkpoint.save(tmp_path, changed(state(1), "model_spec/name", name))
        (told,) = ranks("gloo", 1)(refusal_of, path)
        assert told.startswith(f"{path} does not fit its own model {name}: {why}")


def refusal_of(world, path):
    with pytest.raises(UsageError) as error:
        load_model(Path(path), world, torch.distributed.group.WORLD)
    return str(error.value)


def draw():
    return torch.rand(2).tolist(), random.random(), np.random.rand(), np.random.randn()


def test_random_generators_go_on_where_they_were(tmp_path):
    np.random.randn()  # leaves the second of a pair of normal numbers behind
    path = checkpoint.save(tmp_path, state(0))
    expected = draw()
    assert draw() != expected
    checkpoint.set_rng_state(checkpoint.load(path, CPU)["rng"][0])
    assert draw() == expected
