"""A link in a checkpoint folder is not followed: it may lead to any file of the user's."""

from pathlib import Path

import pytest

from ddp_from_scratch.errors import UsageError
from ddp_from_scratch.training import checkpoint
from tests.training.test_checkpoint import state


def test_a_lock_that_is_a_link_is_refused(tmp_path: Path) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "folder"
    precious.write_text("precious")
    folder.mkdir()
    (folder / ".lock").symlink_to(precious)
    with pytest.raises(UsageError, match=r"--checkpoint-dir .*\.lock is a symbolic link: remove"):
        checkpoint.prepare_folder(folder, resume=None)
    assert precious.read_text() == "precious"


def test_a_temporary_file_that_is_a_link_is_not_written_through(tmp_path: Path) -> None:
    precious, folder = tmp_path / "precious", tmp_path / "folder"
    precious.write_text("precious")
    folder.mkdir()
    (folder / "checkpoint-000001.tmp").symlink_to(precious)
    checkpoint.save(folder, state(1))
    assert precious.read_text() == "precious"
    assert not (folder / "checkpoint-000001.pt").is_symlink()
