"""One file that a run continues from, and what happens when it is not whole."""

import random

import numpy as np
import pytest
import torch

from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.training import checkpoint

CPU = torch.device("cpu")


def state(step):
    return {"global_step": step, "model": {"weight": torch.full((3,), float(step))}}


def test_what_was_saved_is_loaded_and_the_newest_two_are_kept(tmp_path):
    """The newest by when they were written: a later one may have fewer steps behind it."""
    for step in (1000, 10, 100):
        path = checkpoint.save(tmp_path / "deep" / "er", state(step))
    assert [p.name for p in checkpoint.files(path.parent)] == [
        "checkpoint-000003.pt",
        "checkpoint-000002.pt",
    ]
    loaded = checkpoint.load(path, CPU)
    assert loaded["model"]["weight"].tolist() == [100.0] * 3
    assert not list(path.parent.glob("*.tmp"))


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
    assert (path, loaded["global_step"]) == (good, 1)
    assert len(complaints) == 1
    assert "checkpoint-000002.pt" in complaints[0]
    good.write_bytes(b"")
    with pytest.raises(UsageError, match=r"no checkpoint in .* can be read"):
        checkpoint.load_newest(tmp_path, CPU)


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--checkpoint-dir .*file/x cannot be written to"):
        checkpoint.prepare_folder(tmp_path / "file" / "x", resuming=False)
    with pytest.raises(UsageError, match="cannot write checkpoint"):
        checkpoint.save(tmp_path / "file" / "x", state(1))


def test_a_folder_of_another_run_is_refused_and_what_a_killed_one_left_removed(tmp_path):
    checkpoint.save(tmp_path, state(1))
    (tmp_path / "checkpoint-000002.tmp").touch()
    with pytest.raises(UsageError, match="another run: continue that one with --resume auto"):
        checkpoint.prepare_folder(tmp_path, resuming=False)
    checkpoint.prepare_folder(tmp_path, resuming=True)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint-000001.pt"]


def test_a_failed_write_leaves_the_older_checkpoint(tmp_path, monkeypatch):
    old = checkpoint.save(tmp_path, state(1))

    def full_disk(content, file):
        file.write(b"half")
        raise RuntimeError("no space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(UsageError, match="no space left"):
        checkpoint.save(tmp_path, state(2))
    assert [path.name for path in tmp_path.iterdir()] == [old.name]


def draw():
    return torch.rand(2).tolist(), random.random(), np.random.rand(), np.random.randn()


def test_random_generators_go_on_where_they_were(tmp_path):
    np.random.randn()  # leaves the second of a pair of normal numbers behind
    path = checkpoint.save(tmp_path, {"global_step": 0, "rng": checkpoint.rng_state()})
    expected = draw()
    assert draw() != expected
    checkpoint.set_rng_state(checkpoint.load(path, CPU)["rng"])
    assert draw() == expected
