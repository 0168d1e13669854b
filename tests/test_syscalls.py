"""The system calls that Python does not offer."""

import errno
import mmap
import os

import numpy as np
import pytest

from mmtensor import syscalls
from mmtensor.syscalls import PAGE


@pytest.fixture
def fd(path):
    """Return a descriptor of a file of four pages."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT)
    os.ftruncate(descriptor, 4 * PAGE)
    yield descriptor
    os.close(descriptor)


def test_map_and_unmap(fd):
    """A mapped page shows the file, and the file what is written there."""
    address = syscalls.mmap(4 * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
    view = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * 8).from_address(address))
    view[3] = 9
    assert os.pread(fd, 8, 0) == bytes([0, 0, 0, 9, 0, 0, 0, 0])
    syscalls.msync(address, PAGE)
    assert syscalls.munmap(address, 4 * PAGE) == 0


def test_mmap_error(fd):
    """A map that the system refuses is an OSError with its number."""
    with pytest.raises(OSError, match="Invalid argument") as caught:
        syscalls.mmap(0, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    assert caught.value.errno == errno.EINVAL


def test_offsets_beyond_four_gigabytes(path, fd):
    """An offset beyond 4 GiB reaches the right page."""
    os.truncate(path, (5 << 30) + PAGE)
    os.pwrite(fd, b"far", 5 << 30)
    address = syscalls.mmap(PAGE, mmap.PROT_READ, mmap.MAP_SHARED, fd, 5 << 30)
    assert bytes((np.ctypeslib.ctypes.c_char * 3).from_address(address)) == b"far"
    syscalls.munmap(address, PAGE)


def test_advice_error():
    """Advice about an address that is not mapped is an OSError."""
    with pytest.raises(OSError, match="Cannot allocate memory|Invalid argument"):
        syscalls.madvise(PAGE, PAGE, 3)


def test_sync_error():
    """Flushing an address that is not mapped is an OSError."""
    with pytest.raises(OSError, match="Cannot allocate memory"):
        syscalls.msync(PAGE, PAGE)


def test_rename_refuses_an_existing_target(tmp_path):
    """A rename that must not replace raises FileExistsError and changes nothing."""
    for name in "ab":
        (tmp_path / name).write_text(name)
    with pytest.raises(FileExistsError, match="File exists"):
        syscalls.rename_noreplace(str(tmp_path / "a"), str(tmp_path / "b"))
    assert [(tmp_path / name).read_text() for name in "ab"] == ["a", "b"]
    syscalls.rename_noreplace(str(tmp_path / "a"), str(tmp_path / "c"))
    assert sorted(os.listdir(tmp_path)) == ["b", "c"]


@pytest.mark.parametrize("privileged", [True, False])
def test_link_of_an_unnamed_file(tmp_path, monkeypatch, privileged):
    """An unnamed file gets a name, which must be free, with a privilege and without."""
    monkeypatch.setattr(syscalls, "_links_descriptors", privileged)
    descriptor = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)
    os.write(descriptor, b"x")
    syscalls.link_descriptor(descriptor, str(tmp_path / "a"))
    assert (tmp_path / "a").read_bytes() == b"x"
    with pytest.raises(FileExistsError, match="File exists"):
        syscalls.link_descriptor(descriptor, str(tmp_path / "a"))
    os.close(descriptor)


def test_handles(tmp_path):
    """A handle tells files apart, even when one has got the other's inode number."""
    path = str(tmp_path / "a")
    handles = set()
    for _ in range(20):
        with open(path, "wb"):
            pass
        handles.add(syscalls.file_handle(path))
        descriptor = os.open(path, os.O_RDONLY)
        assert syscalls.file_handle(descriptor) in handles
        os.close(descriptor)
        os.unlink(path)
    if handles == {b""}:
        pytest.skip("this file system has no handles")
    assert len(handles) == 20


def test_handle_of_nothing(tmp_path):
    """A path that names nothing has no handle."""
    assert syscalls.file_handle(str(tmp_path / "nothing")) == b""


@pytest.mark.parametrize("page", [0, 3])
def test_written_pages(fd, page):
    """A written private page is found, a page that was only read is none."""
    flags = mmap.MAP_PRIVATE
    address = syscalls.mmap(4 * PAGE, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
    view = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_uint8 * (4 * PAGE)).from_address(address))
    assert not syscalls.written_pages(address, 4 * PAGE)
    assert view.sum() == 0
    assert not syscalls.written_pages(address, 4 * PAGE)
    view[page * PAGE + 5] = 1
    for other in range(4):
        assert syscalls.written_pages(address + other * PAGE + 7, 9) == (other == page)
    assert syscalls.written_pages(address, 4 * PAGE)
    # A range that begins and ends inside the page touches it.
    assert syscalls.written_pages(address + page * PAGE + PAGE - 1, 1)
    syscalls.munmap(address, 4 * PAGE)


def test_written_pages_without_the_list(monkeypatch):
    """Where the kernel's list cannot be read, the answer is yes: bytes are sent then."""

    def refuse(*arguments):
        del arguments
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    assert syscalls.written_pages(PAGE, PAGE)
