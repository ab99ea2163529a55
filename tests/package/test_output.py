"""Where commands write: files are replaced whole, pipes, devices and links stay what they are."""

from __future__ import annotations

import errno
import json
import os
import pty
import select
import stat
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from kvcache.errors import InvalidInputError
from kvcache.output import check_writable, write_file, write_json

REPORT = {"counts": list(range(40_000))}  # more than a pipe holds


def text_of(report: object) -> str:
    return json.dumps(report, indent=2) + "\n"


def read_in_thread(path: Path) -> Callable[[], str]:
    """Read a pipe to its end in another thread; the result is there when the writer is done."""
    found: list[str] = []
    # open for both, so that the writer finds a reader whenever it comes
    keeper = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    os.set_blocking(keeper, True)

    def read() -> None:
        with open(keeper) as pipe:
            while not found or not found[-1].endswith("}\n"):
                found.append(pipe.read(4096))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()

    def join() -> str:
        thread.join(20)
        return "".join(found)

    return join


def test_a_new_file_has_the_mode_that_the_umask_says(tmp_path: Path) -> None:
    path = tmp_path / "new.json"
    plain = tmp_path / "plain"
    plain.touch()
    write_json(path, {"a": 1})
    assert path.read_text() == text_of({"a": 1})
    assert path.stat().st_mode == plain.stat().st_mode


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666])
def test_a_file_is_replaced_by_another_one_of_the_same_mode(tmp_path: Path, mode: int) -> None:
    path, other_name = tmp_path / "out.json", tmp_path / "hard"
    path.write_text("before")
    path.chmod(mode)
    os.link(path, other_name)
    check_writable("--json", path)
    write_json(path, {"a": 1})
    assert path.read_text() == text_of({"a": 1})
    assert stat.S_IMODE(path.stat().st_mode) == mode
    assert other_name.read_text() == "before"  # who has it open reads on in the old one
    assert sorted(p.name for p in tmp_path.iterdir()) == ["hard", "out.json"]


@pytest.mark.parametrize("there", [True, False])
def test_a_link_stays_and_its_target_is_written(tmp_path: Path, there: bool) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    target, link, second = folder / "target.json", tmp_path / "link.json", tmp_path / "second.json"
    if there:
        target.write_text("before")
        target.chmod(0o600)
    link.symlink_to(Path("folder") / "target.json")
    second.symlink_to(link)
    check_writable("--json", second)
    write_json(second, {"a": 1})
    assert link.is_symlink()
    assert second.is_symlink()
    assert target.read_text() == text_of({"a": 1})
    assert [p.name for p in folder.iterdir()] == ["target.json"]
    if there:
        assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_a_pipe_is_written_into(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    read = read_in_thread(pipe)
    check_writable("--json", pipe)
    write_json(pipe, REPORT)
    assert read() == text_of(REPORT)
    assert stat.S_ISFIFO(pipe.lstat().st_mode)


def test_a_pipe_without_a_reader_is_an_error_and_no_wait(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    check_writable("--json", pipe)  # the reader may come later
    with pytest.raises(InvalidInputError, match=f"^{pipe}: cannot be written: nobody reads it$"):
        write_json(pipe, {})
    assert stat.S_ISFIFO(pipe.lstat().st_mode)


def test_a_reader_that_leaves_is_an_error(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)

    def read_a_byte() -> None:
        select.select([reader], [], [], 20)
        os.read(reader, 1)
        os.close(reader)

    thread = threading.Thread(target=read_a_byte, daemon=True)
    thread.start()
    with pytest.raises(InvalidInputError, match=f"^{pipe}: cannot be written: Broken pipe$"):
        write_json(pipe, REPORT)
    thread.join(20)


def test_a_device_is_written_into(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    device = Path(os.ttyname(theirs))
    link = tmp_path / "out.json"
    link.symlink_to(device)
    try:
        for path in (device, link):
            check_writable("--json", path)
            write_json(path, {"a": 1})
            shown = b""
            while not shown.endswith(b"}\r\n"):
                shown += os.read(ours, 100)
            assert shown.decode().replace("\r\n", "\n") == text_of({"a": 1})
            assert stat.S_ISCHR(device.stat().st_mode)
    finally:
        os.close(ours)
        os.close(theirs)


def test_the_file_that_stdout_goes_to_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "out.txt"
    with path.open("w") as out:
        monkeypatch.setattr("sys.stdout", out)
        print("before")
        write_json(path, {"a": 1})
        print("after")
    monkeypatch.undo()
    assert path.read_text() == "before\n" + text_of({"a": 1}) + "after\n"


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("before")

    def fails(partial: Path) -> None:
        partial.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(
        InvalidInputError, match=f"^{path}: cannot be written: No space left on device$"
    ):
        write_file(path, fails)
    assert path.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir()] == ["out.json"]


def test_no_place_for_a_file_is_said_before_anything_is_done(tmp_path: Path) -> None:
    loop, dangling, file = tmp_path / "loop", tmp_path / "dangling", tmp_path / "file"
    loop.symlink_to(loop)
    dangling.symlink_to(tmp_path / "no" / "target")
    file.write_text("")
    for path, reason in (
        (tmp_path, "is a folder"),
        (tmp_path / "no" / "out", f"there is no folder {tmp_path / 'no'}"),
        (dangling, f"there is no folder {tmp_path / 'no'}"),
        (loop, "cannot be written: Too many levels of symbolic links"),
        (file / "out", "cannot be written: Not a directory"),
    ):
        with pytest.raises(InvalidInputError, match=f"^--json: {path}: {reason}$"):
            check_writable("--json", path)


def test_a_dash_is_no_file() -> None:
    with pytest.raises(
        InvalidInputError, match=r"^--json: must be a file, got '-'; /dev/stdout is one$"
    ):
        check_writable("--json", Path("-"))


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_what_may_not_be_written_is_said_before_anything_is_done(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe, 0o400)
    with pytest.raises(InvalidInputError, match=r"pipe: cannot be written$"):
        check_writable("--json", pipe)
    tmp_path.chmod(0o500)
    with pytest.raises(InvalidInputError, match=r"folder .* cannot be written$"):
        check_writable("--json", tmp_path / "out.json")
    tmp_path.chmod(0o700)
