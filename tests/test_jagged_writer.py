"""`JaggedWriter`: appending, going on, crashing."""

import errno
import os
import random
import signal
import struct
import threading
import time

import numpy as np
import pytest
import torch
from conftest import descriptors, settled_descriptors
from hypothesis import given
from hypothesis import strategies as st

from mmtensor import DtypeError, JaggedTensor, JaggedWriter, SizeError, jagged_writer
from mmtensor.jagged_writer import _BUFFER, _PENDING

SIDES = ("x.memmap", "x.offsets.memmap", "x.shape.memmap")


@pytest.fixture
def path(tmp_path):
    """Return the name of the values of a jagged tensor that does not exist."""
    return tmp_path / "x.memmap"


def element(number):
    """Return the element that has this number: shapes and values differ."""
    shape = (number % 5, 1 + number % 7)
    if number % 101 == 100:
        shape = (300, 1 + number % 700)
    return torch.full(shape, number % 251, dtype=torch.uint8)


def read(path, dtype="uint8"):
    """Open what is on disk, with all checks."""
    return JaggedTensor.from_filename(path, dtype, mode="r", validate=True)


def check(j, first=0):
    """Assert that elements from `first` on are those with these numbers, byte for byte."""
    expected = [element(number) for number in range(first, len(j))]
    assert j[first:].shapes.tolist() == [list(x.shape) for x in expected]
    flat = torch.cat([x.reshape(-1) for x in expected]) if expected else torch.empty(0)
    assert torch.equal(j[first:].values.clone(), flat.to(torch.uint8))


def sizes(directory):
    """Return the sizes of the three files."""
    return [(directory / name).stat().st_size for name in SIDES]


def test_append(path):
    """What was appended is there after closing, in order, and the files have no more."""
    with JaggedWriter(path, torch.uint8, ndim=2) as writer:
        for number in range(50):
            writer.append(element(number))
        assert len(writer) == 50
    j = read(path)
    check(j)
    assert len(j) == 50
    assert sizes(path.parent) == [j.numel(), 8 * 51, 8 * 2 * 50]


def test_files_are_those_that_from_tensors_writes(path, tmp_path):
    """A closed writer and `from_tensors` leave the same bytes."""
    elements = [element(number) for number in range(300)]
    with JaggedWriter(path, "uint8", 2) as writer:
        writer.extend(elements)
    (tmp_path / "y").mkdir()
    JaggedTensor.from_tensors(elements, filename=tmp_path / "y" / "x.memmap")
    for name in SIDES:
        assert (tmp_path / name).read_bytes() == (tmp_path / "y" / name).read_bytes()


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), max_size=5), max_size=5),
    st.sampled_from(["float32", "bfloat16", "bool", "complex128", "int64"]),
    st.booleans(),
)
def test_sessions(tmp_path, sessions, dtype, flush):
    """Any number of writers, one after the other, leaves all elements of all of them."""
    found = getattr(torch, dtype)
    name = tmp_path / "x.memmap"
    expected = []
    for number, shapes in enumerate(sessions):
        with JaggedWriter(name, dtype, 2, append=number > 0, existsok=number == 0) as writer:
            assert len(writer) == len(expected)
            for shape in shapes:
                value = torch.full(shape, len(expected) + 1).to(found)
                writer.append(value)
                expected.append(value)
                if flush:
                    writer.flush()
                    assert len(read(name, dtype)) == len(expected)
    if sessions:
        torch.testing.assert_close(read(name, dtype), expected, rtol=0, atol=0)
        assert read(name, dtype).ndim == 2


@pytest.mark.parametrize("ndim", [0, 1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 3])
def test_dimensions_survive(ndim, count, path):
    """The number of dimensions comes back, also with no elements, open or closed."""
    one = torch.ones((1,) * ndim)
    writer = JaggedWriter(path, "float32", ndim)
    for _ in range(count):
        writer.append(one)
    writer.flush()
    assert (len(read(path, "float32")), read(path, "float32").ndim) == (count, ndim)
    writer.close()
    assert (len(read(path, "float32")), read(path, "float32").ndim) == (count, ndim)
    with JaggedWriter(path, "float32", ndim, append=True) as writer:
        writer.append(one)
    assert (len(read(path, "float32")), read(path, "float32").ndim) == (count + 1, ndim)


def test_elements_of_every_kind(path):
    """Arrays, strided and read-only tensors are appended; changing them later does nothing."""
    array = np.arange(6, dtype="f4").reshape(2, 3)
    tensor = torch.arange(6.0).view(2, 3)
    with JaggedWriter(path, "float32", 2) as writer:
        writer.append(array)
        writer.append(tensor)
        writer.append(tensor.t())
        writer.append(array[:, ::-1])
        writer.append(array.T[1:, :0])
        expected = [tensor.clone(), tensor.clone(), tensor.t().clone(), tensor.flip(1)]
        array[:] = -1
        tensor[:] = -1
    j = read(path, "float32")
    torch.testing.assert_close(list(j)[:4], expected, rtol=0, atol=0)
    assert j[4].shape == (2, 0)


def test_strings_and_bytes(path):
    """A writer of one-dimensional uint8 takes str and bytes."""
    with JaggedWriter(path, "uint8") as writer:
        writer.extend(["zwölf", b"\x00\xff", bytearray(b"ab"), "", memoryview(b"c")])
    assert read(path).to_bytes() == ["zwölf".encode(), b"\x00\xff", b"ab", b"", b"c"]
    with (
        JaggedWriter(path, "uint8", 2, existsok=True) as writer,
        pytest.raises(TypeError, match="an element must be a torch tensor or a NumPy array"),
    ):
        writer.append("text")


@pytest.mark.parametrize("nbytes", [_BUFFER - 1, _BUFFER, _BUFFER + 1, 3 * _BUFFER])
def test_large_elements(nbytes, path):
    """Elements around and beyond the size of the buffer come in order with small ones."""
    with JaggedWriter(path, "uint8") as writer:
        for fill, size in ((1, 3), (2, nbytes), (3, 5), (4, nbytes), (5, 1)):
            writer.append(torch.full((size,), fill, dtype=torch.uint8))
    j = read(path)
    assert [(len(x), int(x.min()), int(x.max())) for x in j] == [
        (3, 1, 1), (nbytes, 2, 2), (5, 3, 3), (nbytes, 4, 4), (1, 5, 5),
    ]  # fmt: skip


def test_many_small_elements_are_flushed_by_themselves(path):
    """Without a flush, many elements do not wait in memory for ever."""
    with JaggedWriter(path, "uint8") as writer:
        for _ in range(40_000):
            writer.append(torch.ones(1, dtype=torch.uint8))
        assert 30_000 < len(read(path)) < 40_000
    assert len(read(path)) == 40_000


def test_flush_makes_elements_visible(path):
    """Readers that open after a flush find the elements; those from before keep theirs."""
    with JaggedWriter(path, "uint8", 2) as writer:
        earlier = []
        for number in range(20):
            writer.append(element(number))
            assert len(read(path)) == number
            writer.flush(durable=number % 2 == 0)
            earlier.append(read(path))
        for number, j in enumerate(earlier):
            assert len(j) == number + 1
            check(j)
    for j in earlier:
        check(j)


def test_extend_with_a_jagged_tensor(path):
    """A jagged tensor is appended as a whole; a slice with a step as well."""
    source = JaggedTensor.from_tensors([element(number) for number in range(120)])
    with JaggedWriter(path, "uint8", 2) as writer:
        writer.append(element(0))
        writer.extend(source[1:])
        writer.extend(source[::-2])
    j = read(path)
    check(j[:120])
    torch.testing.assert_close(j[120:], list(source)[::-2], rtol=0, atol=0)
    with (
        JaggedWriter(path, "uint8", append=True, ndim=2) as writer,
        pytest.raises(TypeError, match="elements have dtype torch.float32 and 1 dimensions"),
    ):
        writer.extend(JaggedTensor.zeros([[1]]))
    assert len(read(path)) == 180


def test_progress_bar(path, capsys):
    """``pbar=True`` shows a bar, for any iterable and for a jagged tensor."""
    with JaggedWriter(path, "uint8", 2) as writer:
        writer.extend((element(number) for number in range(3)), pbar=True)
        assert "3element" in capsys.readouterr().err
        writer.extend(JaggedTensor.from_tensors([element(3)]), pbar=True)
        assert "1/1" in capsys.readouterr().err
        writer.extend([element(4)])
        assert capsys.readouterr().err == ""
    check(read(path))


WRONG = [
    (
        torch.ones(2, 2),
        TypeError,
        "element 1 has dtype torch.float32, but the writer has torch.ui",
    ),
    (torch.ones(2, dtype=torch.uint8), ValueError, "element 1 has 1 dimensions"),
    (np.ones((2, 2)), TypeError, "element 1 has dtype torch.float64"),
    ([[1]], TypeError, "element 1: an element must be a torch tensor or a NumPy array"),
    (3, TypeError, "element 1: an element must be"),
    (b"ab", TypeError, "element 1: an element must be"),
    (torch.ones(2, 2, dtype=torch.uint8).to_sparse(), TypeError, "element 1: expected a dense"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), WRONG, ids=lambda x: str(x)[:20])
def test_wrong_elements(wrong, error, message, path):
    """An element that does not fit raises and names its number; nothing of it is written."""
    with JaggedWriter(path, "uint8", 2) as writer:
        writer.append(element(0))
        writer.flush()
        before = sizes(path.parent)
        with pytest.raises(error, match=message):
            writer.append(wrong)
        writer.flush()
        assert sizes(path.parent) == before
        with pytest.raises(error, match=message):
            writer.extend([wrong, element(1)])
        writer.extend(element(number) for number in range(1, 5))
    check(read(path))
    assert len(read(path)) == 5


def test_elements_before_an_error_are_kept(path):
    """If the iterable or the block raises, what was appended before is in the files."""

    def failing():
        yield element(0)
        yield element(1)
        raise LookupError("the source is gone")

    with (
        pytest.raises(LookupError, match="the source is gone"),
        JaggedWriter(path, "uint8", 2) as writer,
    ):
        writer.extend(failing())
    assert writer.closed
    assert len(read(path)) == 2


def test_existing_files(path, unchanged):
    """Without `append` or `existsok` an existing file is a FileExistsError."""
    with JaggedWriter(path, "uint8", 2) as writer:
        writer.append(element(0))
    with unchanged(), pytest.raises(FileExistsError, match="pass existsok=True"):
        JaggedWriter(path, "uint8", 2)
    old = read(path)
    with JaggedWriter(path, "uint8", 2, existsok=True) as writer:
        assert len(read(path)) == 0
        writer.append(element(1))
    assert torch.equal(read(path)[0], element(1))
    check(old)


def test_append_to_nothing(path):
    """``append=True`` makes the files where there are none."""
    with JaggedWriter(path, "uint8", 2, append=True) as writer:
        writer.append(element(0))
    check(read(path))


def test_append_to_what_from_tensors_wrote(path):
    """A writer goes on where `from_tensors` has stopped."""
    j = JaggedTensor.from_tensors([element(number) for number in range(30)], filename=path)
    with JaggedWriter(path, "uint8", 2, append=True) as writer:
        writer.extend(element(number) for number in range(30, 60))
    check(read(path))
    assert len(read(path)) == 60
    assert len(j) == 30
    check(j)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("uint8", 1), ValueError, "have 2 dimensions each, not 1"),
        (("uint8", 3), ValueError, "have 2 dimensions each, not 3"),
        (("float64", 2), ValueError, "must have at least 112 bytes"),
    ],
)
def test_append_with_another_layout(arguments, error, message, path, unchanged):
    """Another number of dimensions, or a larger dtype, is refused before anything is written."""
    JaggedTensor.from_tensors([element(1), element(3)], filename=path)
    with unchanged(), pytest.raises(error, match=message):
        JaggedWriter(path, *arguments, append=True)


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float64", "complex128"])
def test_another_dtype_after_a_kill(path, run, unchanged, dtype):
    """A writer that was killed has left the size of its numbers: nothing is cut or misread."""
    code = f"""
        import os
        import torch
        from mmtensor import JaggedWriter

        w = JaggedWriter({str(path)!r}, "float32", 2)
        w.extend([torch.ones(5, 7)] * 8)
        w.flush()
        os._exit(0)
    """
    run(code)
    message = f"(has 4 bytes per number, but {dtype} has|must have at least)"
    with unchanged():
        with pytest.raises((DtypeError, SizeError), match=message):
            JaggedWriter(path, dtype, 2, append=True)
        with pytest.raises((DtypeError, SizeError), match=message):
            JaggedTensor.from_filename(path, dtype, mode="r")
    assert len(JaggedTensor.from_filename(path, "float32", mode="r")) == 8
    with JaggedWriter(path, "float32", 2, append=True) as w:
        w.append(torch.zeros(1, 1))
    assert JaggedTensor.from_filename(path, "float32", mode="r").numel() == 8 * 35 + 1


@pytest.mark.parametrize("dtype", ["uint8", "float16", "float64"])
def test_opening_with_another_dtype(path, dtype):
    """Files that were closed properly have as many numbers as their offsets say."""
    JaggedTensor.from_tensors([torch.ones(3), torch.zeros(2)], filename=path)
    message = f"(has 4 bytes per number, but {dtype} has|must have at least)"
    with pytest.raises((DtypeError, SizeError), match=message):
        JaggedTensor.from_filename(path, dtype, mode="r")


def test_a_marker_without_the_size_of_numbers(path):
    """Writers of an earlier version have left it so; it is replaced."""
    with JaggedWriter(path, "float32", 2) as w:
        w.append(torch.ones(2, 3))
    shapes = str(path).replace(".memmap", ".shape.memmap")
    with open(shapes, "ab") as file:
        file.write(struct.pack("=q", -3))
    with JaggedWriter(path, "float32", append=True, ndim=2) as w:
        w.append(torch.zeros(4, 1))
        with open(shapes, "rb") as file:
            assert file.read()[-8:] == struct.pack("=q", -3 - 4 * 256)
    j = JaggedTensor.from_filename(path, "float32", mode="r")
    assert j.shapes.tolist() == [[2, 3], [4, 1]]


def test_append_with_a_smaller_dtype(path, unchanged):
    """A smaller dtype would overwrite the values: it is refused."""
    JaggedTensor.from_tensors([torch.ones(3), torch.zeros(2)], filename=path)
    with unchanged(), pytest.raises(TypeError, match="has 4 bytes per number, but uint8 has 1"):
        JaggedWriter(path, "uint8", append=True)


def test_append_without_offsets(path, unchanged):
    """Values without offsets, as another program writes them, are not taken for nothing."""
    JaggedTensor.from_tensors([element(1)], filename=path)
    (path.parent / SIDES[1]).unlink()
    with unchanged(), pytest.raises(FileNotFoundError, match="x.offsets.memmap"):
        JaggedWriter(path, "uint8", 2, append=True)


@pytest.mark.parametrize("arguments", [("uint8", -1), ("uint8", 1.5), ("uint8", True)])
def test_wrong_ndim(arguments, path, unchanged):
    """A number of dimensions that is none raises."""
    with unchanged(), pytest.raises(ValueError, match="ndim must be a non-negative integer"):
        JaggedWriter(path, *arguments)


def test_a_second_writer_is_kept_out(path):
    """Two writers at a time would overwrite each other's elements: the second one raises."""
    with JaggedWriter(path, "uint8", 2) as writer:
        writer.append(element(0))
        with pytest.raises(BlockingIOError, match="another writer has the jagged tensor open"):
            JaggedWriter(path, "uint8", 2, append=True)
        writer.append(element(1))
    with JaggedWriter(path, "uint8", 2, append=True) as writer:
        writer.append(element(2))
    check(read(path))


def test_a_closed_writer(path):
    """A closed writer takes nothing, closes again without a word, and holds no descriptor."""
    before = settled_descriptors()
    writer = JaggedWriter(path, "uint8", 2)
    assert descriptors() == before + 3
    assert not writer.closed
    assert "len=0)" in repr(writer)
    writer.append(element(0))
    writer.close()
    writer.close()
    assert descriptors() == before
    assert writer.closed
    assert "len=1, closed" in repr(writer)
    assert writer.filename == str(path)
    for use in (
        lambda: writer.append(element(1)),
        lambda: writer.extend([element(1)]),
        lambda: writer.extend(JaggedTensor.from_tensors([element(1)])),
        writer.flush,
    ):
        with pytest.raises(ValueError, match="the writer is closed"):
            use()
    with pytest.raises(FileExistsError, match="existsok"):
        JaggedWriter(path, "uint8", 2)
    with pytest.raises(ValueError, match="2 dimensions each, not 1"):
        JaggedWriter(path, "uint8", append=True)
    assert descriptors() == before


def test_a_forgotten_writer_closes_itself(path):
    """A writer that nobody holds any more has written everything."""
    writer = JaggedWriter(path, "uint8", 2)
    writer.append(element(0))
    del writer
    check(read(path))
    assert len(read(path)) == 1


# --- what an interrupted append leaves ---------------------------------------------------


class TestNoRoom:
    """Without room nothing is lost and nothing is written twice."""

    @pytest.fixture
    def full(self, monkeypatch):
        """Return a switch for a disk without room."""
        switch = threading.Event()
        write_all = jagged_writer.write_all

        def write(*arguments):
            if switch.is_set():
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return write_all(*arguments)

        monkeypatch.setattr(jagged_writer, "write_all", write)
        return switch

    def test_extend_again(self, path, full, monkeypatch):
        """Of a jagged tensor that did not fit nothing counts, and what follows is right."""
        source = JaggedTensor.from_tensors([element(number) for number in range(20)])
        writer = JaggedWriter(path, "uint8", 2)
        writer.append(element(1))
        chunks = JaggedTensor._chunks

        def some(j):
            yield from chunks(j[:9])
            full.set()
            yield from chunks(j[9:])

        monkeypatch.setattr(JaggedTensor, "_chunks", some)
        with pytest.raises(OSError, match="No space left"):
            writer.extend(source)
        full.clear()
        monkeypatch.setattr(JaggedTensor, "_chunks", chunks)
        writer.append(element(2))
        writer.extend(source)
        writer.close()
        expected = [element(1), element(2), *map(element, range(20))]
        assert read(path).tolist() == [one.tolist() for one in expected]

    def test_append_again(self, path, full):
        """An element that could not be appended is not in the writer, and can come again."""
        writer = JaggedWriter(path, torch.uint8)
        one = torch.ones(1, dtype=torch.uint8)
        for _ in range(_PENDING):
            writer.append(one)
        full.set()
        for _ in range(3):
            with pytest.raises(OSError, match="No space left"):
                writer.append(one)
        assert len(writer) == _PENDING
        full.clear()
        writer.append(one)
        writer.close()
        assert len(read(path)) == _PENDING + 1

    def test_close_again(self, path, full):
        """A writer that cannot be closed stays open, with what is waiting."""
        writer = JaggedWriter(path, torch.uint8)
        writer.append(torch.ones(3, dtype=torch.uint8))
        full.set()
        with pytest.raises(OSError, match="No space left"):
            writer.close()
        assert not writer.closed
        full.clear()
        writer.close()
        assert read(path)[0].tolist() == [1, 1, 1]


@pytest.mark.parametrize("end", ["exit", "close", "append"])
def test_a_forked_child_leaves_the_writer_alone(path, end):
    """A child that inherits a writer neither writes nor cuts, and cannot use it."""
    writer = JaggedWriter(path, torch.uint8, ndim=2)
    writer.extend([element(number) for number in range(5)])
    process = os.fork()
    if process == 0:
        try:
            if end == "close":
                writer.close()
            elif end == "append":
                with pytest.raises(ValueError, match="belongs to process .* forked"):
                    writer.append(element(5))
            del writer
        except BaseException:  # noqa: BLE001  # the child must not go on with the tests
            os._exit(1)
        os._exit(0)
    writer.extend([element(number) for number in range(5, 10)])
    writer.flush()
    assert os.waitpid(process, 0)[1] == 0
    check(read(path))
    writer.extend([element(number) for number in range(10, 12)])
    writer.close()
    assert len(read(path)) == 12
    check(read(path))
    with JaggedWriter(path, torch.uint8, ndim=2, append=True):  # nobody else holds the lock
        pass


def _junk(path, values=0, rows=0, offset=b""):
    with open(path, "ab") as file:
        file.write(b"\xff" * values)
    with open(path.parent / SIDES[2], "ab") as file:
        file.write(struct.pack(f"={rows}q", *range(2, rows + 2)))
    with open(path.parent / SIDES[1], "ab") as file:
        file.write(offset)


@pytest.mark.parametrize("values", [0, 1, 5000])
@pytest.mark.parametrize("rows", [0, 1, 2, 40])
@pytest.mark.parametrize("offset", [b"", b"\x01\x02"])
def test_unfinished_tails(values, rows, offset, path):
    """Bytes behind what the offsets say are not read, overwritten by appending, and cut."""
    JaggedTensor.from_tensors([element(number) for number in range(10)], filename=path)
    _junk(path, values, rows, offset)
    before = read(path)
    check(before)
    assert len(before) == 10
    with JaggedWriter(path, "uint8", 2, append=True) as writer:
        check(read(path))
        for number in range(10, 25):
            writer.append(element(number))
            writer.flush()
            check(read(path))
    j = read(path)
    check(j)
    check(before)
    assert sizes(path.parent) == [j.numel(), 8 * 26, 8 * 2 * 25]


def test_the_first_moments_of_a_writer(path, unchanged):
    """Files without offsets and without values are the remains of a writer: it starts again."""
    path.write_bytes(b"")
    (path.parent / SIDES[2]).write_bytes(struct.pack("=q", -3))
    with unchanged(), pytest.raises(FileExistsError, match="existsok"):
        JaggedWriter(path, "uint8", 2)
    with JaggedWriter(path, "uint8", 2, append=True) as writer:
        writer.append(element(0))
    check(read(path))


def _append_until_killed(path, flush):
    with JaggedWriter(path, "uint8", 2, append=True) as writer:
        for number in range(len(writer), 1_000_000):
            writer.append(element(number))
            if flush:
                writer.flush()


@pytest.mark.parametrize("flush", [True, False], ids=["flushed", "unflushed"])
def test_kills(flush, path):
    """Killed a hundred times, at any moment, a writer leaves what was complete, in order."""
    delays = random.Random(0)  # noqa: S311  # when to kill, not a secret
    known = 0
    for kill in range(50):
        child = os.fork()
        if child == 0:
            try:
                _append_until_killed(path, flush)
            finally:
                os._exit(1)
        time.sleep(delays.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), "the writer failed before it was killed"
        try:
            j = read(path)
        except FileNotFoundError:
            assert known == 0
            continue
        assert len(j) >= known
        check(j, first=known)
        known = len(j)
        if kill % 10 == 9:
            check(j)
            for name in SIDES:
                (path.parent / name).unlink()
            known = 0
    with JaggedWriter(path, "uint8", 2, append=True) as writer:
        for number in range(len(writer), len(writer) + 3):
            writer.append(element(number))
    check(read(path))
    assert sizes(path.parent)[1:] == [8 * len(read(path)) + 8, 16 * len(read(path))]


def test_readers_while_a_writer_works(path):
    """Whoever opens while another process appends finds a prefix, with its dimensions."""
    child = os.fork()
    if child == 0:
        try:
            for _ in range(30):
                with JaggedWriter(path, "uint8", 2, append=True) as writer:
                    for number in range(len(writer), len(writer) + 20):
                        writer.append(element(number))
                        writer.flush()
            os._exit(0)
        finally:
            os._exit(1)
    known = opened = 0
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        try:
            j = read(path)
        except FileNotFoundError:
            continue
        assert len(j) >= known
        assert j.ndim == 2
        check(j, first=max(len(j) - 30, 0))
        known = len(j)
        opened += 1
    assert opened > 5
    check(read(path))
    assert len(read(path)) == 600


def test_durable_flush(path, monkeypatch):
    """Values and shapes are on stable storage before the offsets that speak of them."""
    synced = []
    fsync = os.fsync

    def watch(fd):
        (file,) = [
            one for one in path.parent.iterdir() if os.path.samestat(one.stat(), os.fstat(fd))
        ]
        synced.append((file.name, len(read(path))))
        fsync(fd)

    with JaggedWriter(path, "uint8", 2) as writer:
        writer.append(element(1))
        writer.flush()
        assert synced == []
        monkeypatch.setattr(os, "fsync", watch)
        writer.append(element(2))
        writer.flush(durable=True)
        monkeypatch.undo()
    assert synced == [("x.memmap", 1), ("x.shape.memmap", 1), ("x.offsets.memmap", 2)]
