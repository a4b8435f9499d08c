"""One file that a run continues from, and what happens when it is not whole."""

import random

import pytest
import torch
from torch import nn

from ddp_from_scratch.common.errors import UsageError
from ddp_from_scratch.training import checkpoint
from ddp_from_scratch.training.report import Report
from ddp_from_scratch.training.settings import Settings
from tests.support.refusal import refusal

MODEL = nn.Linear(4, 3)


def state(step):
    """The part that is looked at here of what a run writes after so many steps."""
    return {
        "model": {"weight": torch.full((3, 4), float(step)), "bias": torch.zeros(3)},
        "model_spec": {"name": "mlp", "channels": 1, "image_size": 8, "num_classes": 10},
        "epoch": 0,
        "step": step,
        "settings": Settings().as_saved(1),
    }


def newest(folder):
    settings, spec = Settings(checkpoint_dir=folder, resume="auto"), state(1)["model_spec"]
    return checkpoint.find_checkpoint(settings, spec, MODEL, Report(is_rank_0=True, quiet=False))


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_was_saved_is_loaded_and_the_newest_two_are_kept(tmp_path):
    """The newest by when they were written: a later one may have fewer steps behind it."""
    for step in (1000, 10, 100):
        path = checkpoint.save(tmp_path / "deep" / "er", state(step))
    assert names(path.parent) == ["checkpoint-000002.pt", "checkpoint-000003.pt"]
    assert checkpoint.files(path.parent)[0] == path
    loaded = checkpoint.load(path)
    assert loaded["model"]["weight"].tolist() == [[100.0] * 4] * 3
    # torch reads the file as any of its own.
    assert torch.load(path, weights_only=True)["step"] == 100


def test_a_flipped_bit_is_found_wherever_it_is(tmp_path):
    path = checkpoint.save(tmp_path, state(1))
    whole = path.read_bytes()
    draw = random.Random(0)
    for bit in [0, 8 * len(whole) - 1, *(draw.randrange(8 * len(whole)) for _ in range(300))]:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        told = refusal(checkpoint.load, path)
        assert told.startswith((f"{path} is damaged: its bytes", f"{path} is truncated, or is not"))
    path.write_bytes(whole)
    checkpoint.load(path)


class Foreign:
    pass


def test_a_file_that_no_run_has_written_is_one_clear_line_and_is_not_unpickled(tmp_path):
    whole = checkpoint.save(tmp_path, state(1)).read_bytes()
    contents = [whole[:kept] for kept in (0, 1, 100, -1)]
    contents += [b"hello\n" * 100, b"root:x:0:0\n" * 10, random.Random(7).randbytes(4000)]
    contents += [{"model": {}}, {"format": checkpoint.FORMAT}, [1, 2], Foreign(), torch.ones(2)]
    path = tmp_path / "foreign.pt"
    for content in contents:
        if isinstance(content, bytes):
            path.write_bytes(content)
        else:
            torch.save(content, path)
        told = f"{path} is truncated, or is not a checkpoint of ddp_from_scratch"
        assert refusal(checkpoint.load, path) == told
    for path in (tmp_path, tmp_path / "none.pt"):
        assert refusal(checkpoint.load, path).startswith(f"cannot read checkpoint {path}: ")


def test_one_that_may_be_whole_is_not_passed_over(tmp_path, monkeypatch):
    """Another program, or the same in an hour, reads it."""
    checkpoint.save(tmp_path, state(1))
    monkeypatch.setattr(checkpoint, "VERSION", 2)
    newer = checkpoint.save(tmp_path, state(2))
    monkeypatch.undo()
    told = "checkpoint version 2, this program reads up to 1: install a newer"
    assert told in refusal(newest, tmp_path)
    newer.unlink()
    newer.symlink_to(newer.name)  # an OSError whoever runs the tests
    assert "-000002.pt: Too many" in refusal(newest, tmp_path)
    assert checkpoint.files(tmp_path)[0] == newer


def test_a_run_goes_back_to_the_newest_whole_one_and_says_so(tmp_path, capsys):
    good, bad = (checkpoint.save(tmp_path, state(step)) for step in (1, 2))
    damaged = bytearray(bad.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    bad.write_bytes(damaged)
    assert newest(tmp_path)["step"] == 1
    told = capsys.readouterr()
    assert told.out == f"resuming from {good}: epoch 1, step 1\n"
    assert told.err == (
        f"warning: {bad} is damaged: its bytes are not those that were written (sha256 differs); "
        f"using checkpoint-000001.pt instead\n"
    )
    # The good one is not removed in favour of that, which somebody may want to look at.
    assert bad.with_suffix(".unreadable").read_bytes() == damaged
    newer = checkpoint.save(tmp_path, state(3))
    assert checkpoint.files(tmp_path) == [newer, good]
    for path in (good, newer):
        path.write_bytes(b"")
    assert f"no checkpoint in {tmp_path} can be read" in refusal(newest, tmp_path)
    assert newest(tmp_path / "nothing") is None


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


def test_a_link_is_not_followed(tmp_path):
    """It may lead to any file of the user's."""
    precious, folder = tmp_path / "precious", tmp_path / "folder"
    precious.write_text("precious")
    folder.mkdir()
    for name in (".lock", "checkpoint-000001.tmp"):
        (folder / name).symlink_to(precious)
    assert not checkpoint.save(folder, state(1)).is_symlink()
    with pytest.raises(UsageError, match=r"--checkpoint-dir .*\.lock is a symbolic link: remove"):
        checkpoint.prepare_folder(folder, resume="auto")
    assert precious.read_text() == "precious"


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path):
    lock = checkpoint.prepare_folder(tmp_path, resume="auto")
    left = tmp_path / "checkpoint-000001.tmp"
    left.touch()  # it writes
    with pytest.raises(UsageError, match="in use by another run: give"):
        checkpoint.prepare_folder(tmp_path, resume="auto")
    assert left.exists()
    lock.close()
    checkpoint.prepare_folder(tmp_path, resume="auto").close()


def test_a_failed_write_leaves_the_older_checkpoint(tmp_path, monkeypatch):
    old = checkpoint.save(tmp_path / "folder", state(1))
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"--checkpoint-dir .*file/x cannot be written to: Not a"):
        checkpoint.prepare_folder(tmp_path / "file" / "x", resume=None)
    assert "cannot write checkpoint" in refusal(checkpoint.save, tmp_path / "file" / "x", state(1))
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
        checkpoint.save(old.parent, state(2))
    assert names(old.parent) == [old.name]
    checkpoint.load(old)


@pytest.mark.parametrize("name", ["bias", "more"])
def test_a_model_with_other_tensors_is_refused(tmp_path, name):
    """Another version of torchvision may have another model by the same name."""
    content = state(1)
    content["model"] = {"weight": content["model"]["weight"]}
    there, here = "missing", (3,)
    if name == "more":
        content["model"] |= {"bias": torch.zeros(3), "more": torch.zeros(5)}
        there, here = (5,), "missing"
    path = checkpoint.save(tmp_path, content)
    told = f"does not fit this version of mlp: {name} is {there} there and {here} here"
    assert told in refusal(newest, tmp_path)
    spec = content["model_spec"]
    checkpoint.check_model({"model": MODEL.state_dict(), "model_spec": spec}, MODEL, path)
