"""Pickling: references with exact geometry, values where a reference would lie."""

import io
import itertools
import os
import pickle
import re
import shutil
import tempfile
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import cloudpickle
import numpy as np
import processes
import pytest
import torch
from processes import COMPLEX_VIEWS, REAL_VIEWS, Tagged, facts, values

import mmtensor
import mmtensor.mapping
from mmtensor import MemoryMappedTensor, SizeError, StaleFileError

MODES = ("r", "r+", "c")
PLAIN = [view for view in (*REAL_VIEWS, *COMPLEX_VIEWS) if view.startswith("torch.")]
PICKLERS = {
    "pickle 3": lambda x: pickle.dumps(x, 3),
    "pickle 4": lambda x: pickle.dumps(x, 4),
    "pickle 5": lambda x: pickle.dumps(x, 5),
    "cloudpickle": cloudpickle.dumps,
    "ForkingPickler": lambda x: bytes(ForkingPickler.dumps(x)),
}


@pytest.fixture
def place():
    """Return a directory whose path has an ordinary length, which pytest's own has not."""
    with tempfile.TemporaryDirectory(prefix="data-") as directory:
        yield Path(directory)


@pytest.fixture
def real(place):
    """Return the path of a file with a (6, 4) float32 array."""
    return mmtensor.save_array(place / "real.bin", processes.real_values().numpy())


@pytest.fixture
def complex_(place):
    """Return the path of a file with a (6, 4) complex64 array."""
    return mmtensor.save_array(place / "complex.bin", processes.complex_values().numpy())


def opened(path, mode="r", dtype="float32"):
    """Open the file of a (6, 4) array."""
    return MemoryMappedTensor.from_filename(path, dtype, (6, 4), mode=mode)


def of_file(view, real, complex_, mode="r"):
    """Open the file that a view is of, and make the view."""
    if view in REAL_VIEWS:
        return REAL_VIEWS[view](opened(real, mode))
    return COMPLEX_VIEWS[view](opened(complex_, mode, "complex64"))


def there_and_back(x, pickler="pickle 5"):
    """Pickle and unpickle."""
    return pickle.loads(PICKLERS[pickler](x))


def journeys(views):
    """List views with the picklers that send them as references.

    What is no MemoryMappedTensor is torch's to pickle; `ForkingPickler` asks us.
    """
    return [
        (view, pickler)
        for view in views
        for pickler in PICKLERS
        if view not in PLAIN or pickler == "ForkingPickler"
    ]


class TestViews:
    """Every view of a file arrives as it was."""

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize(("view", "pickler"), journeys(REAL_VIEWS))
    def test_real(self, real, view, mode, pickler):
        """A view comes back with class, file, mode, geometry and values."""
        x = REAL_VIEWS[view](opened(real, mode))
        assert facts(there_and_back(x, pickler)) == facts(x)

    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize(("view", "pickler"), journeys(COMPLEX_VIEWS))
    def test_complex(self, complex_, view, mode, pickler):
        """A conjugated or negated view comes back with its bits and values."""
        x = COMPLEX_VIEWS[view](opened(complex_, mode, "complex64"))
        assert facts(there_and_back(x, pickler)) == facts(x)

    @pytest.mark.parametrize("pickler", [p for p in PICKLERS if p != "ForkingPickler"])
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("view", PLAIN)
    def test_plain_by_value(self, real, complex_, view, mode, pickler):
        """A plain view is pickled by torch where it is asked: values, geometry and bits."""
        x = of_file(view, real, complex_, mode)
        back = there_and_back(x, pickler)
        assert type(back) is torch.Tensor
        assert mmtensor.locate(back) is None
        assert (back.shape, back.stride(), back.dtype) == (x.shape, x.stride(), x.dtype)
        assert (back.is_conj(), back.is_neg()) == (x.is_conj(), x.is_neg())
        assert values(back) == values(x)

    @pytest.mark.parametrize("view", [*REAL_VIEWS, *COMPLEX_VIEWS])
    def test_what_a_view_is_says_what_it_should(self, real, complex_, view):
        """Method views are memory-mapped tensors, function forms are plain tensors."""
        x = of_file(view, real, complex_)
        expected = torch.Tensor if view.startswith("torch.") else MemoryMappedTensor
        assert type(x) is expected
        assert facts(x)[1].path == str(complex_ if view in COMPLEX_VIEWS else real)

    @pytest.mark.parametrize("view", [*REAL_VIEWS, *COMPLEX_VIEWS])
    def test_size(self, real, complex_, view):
        """A reference takes at most 300 bytes."""
        assert len(str(complex_)) >= 25
        x = of_file(view, real, complex_)
        assert len(ForkingPickler.dumps(x)) <= 300
        if view not in PLAIN:
            assert len(pickle.dumps(x)) <= 300
            assert len(cloudpickle.dumps(x)) <= 300

    def test_size_does_not_grow_with_the_file(self, place):
        """Ten elements of a 100 MB file are sent in at most 300 bytes."""
        path = place / "big.bin"
        with path.open("wb") as file:
            file.truncate(100_000_000)
        x = MemoryMappedTensor.from_filename(path, "float32", -1, mode="r")[500:510]
        assert len(pickle.dumps(x)) <= 300
        assert facts(there_and_back(x)) == facts(x)

    @pytest.mark.parametrize(
        "dtype", ["bool", "uint16", "int64", "float16", "float64", "bfloat16", "float8_e5m2"]
    )
    def test_dtypes(self, place, dtype):
        """The dtype comes back, those that NumPy lacks included."""
        x = MemoryMappedTensor.from_tensor(
            torch.tensor([0, 1, 1]).to(getattr(torch, dtype)), filename=place / "x.bin"
        )
        back = there_and_back(x[1:])
        assert back.dtype is x.dtype
        assert torch.equal(back.float(), torch.ones(2))

    def test_offset(self, real):
        """A tensor that starts behind a header comes back at the same position."""
        x = MemoryMappedTensor.from_filename(real, "float32", (5, 4), mode="r", offset=16)
        back = there_and_back(x[1:])
        assert mmtensor.locate(back).offset == 32
        assert facts(back) == facts(x[1:])

    def test_partial(self, real):
        """A part of a file comes back though the file is larger."""
        x = MemoryMappedTensor.from_filename(real, "float32", 4, mode="r+", partial=True)
        assert facts(there_and_back(x)) == facts(x)

    def test_empty_file(self, place):
        """A tensor of a file without bytes comes back with its shape."""
        x = MemoryMappedTensor.zeros(0, 3, filename=place / "empty.bin")
        back = there_and_back(x)
        assert back.shape == (0, 3)
        assert back.filename == x.filename

    def test_relative_path(self, real, monkeypatch, tmp_path):
        """A file that was opened by a relative path is found after a change of directory."""
        monkeypatch.chdir(real.parent)
        x = opened(real.name)
        monkeypatch.chdir(tmp_path)
        assert facts(there_and_back(x)) == facts(x)

    @pytest.mark.parametrize("name", ["grüße 文件.bin", "with\nnewline", os.fsdecode(b"\xff.bin")])
    def test_unusual_names(self, place, name):
        """A file name of any characters, or of bytes that are none, travels."""
        x = MemoryMappedTensor.from_tensor(torch.arange(3), filename=place / name)
        assert facts(there_and_back(x)) == facts(x)

    def test_symbolic_link(self, real, place):
        """A file that was opened through a symbolic link is opened through it again."""
        (place / "link.bin").symlink_to(real)
        x = opened(place / "link.bin")
        assert there_and_back(x).filename == str(place / "link.bin")

    def test_storage(self, real):
        """The storage itself travels as a reference as well."""
        x = opened(real, "r+")
        back = there_and_back(x.untyped_storage())
        assert back is x.untyped_storage()

    @pytest.mark.parametrize(
        "change",
        [
            lambda x: x.t_(),
            lambda x: x.transpose_(0, 1),
            lambda x: x.unsqueeze_(0),
            lambda x: x[:1].squeeze_(),
            lambda x: x.resize_(3),
            lambda x: x.as_strided_((2, 2), (4, 2), 1),
            lambda x: x.set_(x[2:5]),
            lambda x: setattr(x, "data", x[1:3]) or x,
        ],
    )
    def test_metadata_changed_in_place(self, real, change):
        """A tensor whose geometry was changed in place arrives with the new one."""
        x = change(opened(real, "r+"))
        assert facts(there_and_back(x)) == facts(x)

    def test_data_on_other_memory(self, real):
        """A tensor that was put on regular memory is a regular tensor, and travels as one."""
        x = opened(real, "r+")
        x.data = torch.ones(2)
        back = there_and_back(x)
        assert type(back) is torch.Tensor
        assert torch.equal(back, torch.ones(2))


class TestAttributes:
    """What users put on tensors travels along."""

    @pytest.mark.parametrize("pickler", PICKLERS)
    def test_attributes(self, real, pickler):
        """Attributes of a tensor come back."""
        x = opened(real)[1:]
        x.tag = "a"
        x.limits = [1, 2]
        back = there_and_back(x, pickler)
        assert (back.tag, back.limits) == ("a", [1, 2])
        assert facts(back) == facts(x)

    @pytest.mark.parametrize("pickler", PICKLERS)
    def test_subclass(self, real, pickler):
        """A subclass of MemoryMappedTensor comes back as that subclass, views included."""
        x = Tagged.from_filename(real, "float32", (6, 4), mode="r")
        assert type(x[1:]) is Tagged
        back = there_and_back(x[1:], pickler)
        assert type(back) is Tagged
        assert values(back) == values(x[1:])

    def test_subclass_elsewhere(self, real, run):
        """A process that learns of the subclass from the message makes that subclass of it."""
        xs = [opened(real), Tagged.from_filename(real, "float32", (6, 4), mode="r")]
        (real.parent / "message").write_bytes(pickle.dumps(xs))
        program = """
            import pathlib, pickle, sys
            from mmtensor import MemoryMappedTensor
            sys.path.insert(0, sys.argv[2])
            xs = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())
            print([type(x).__name__ for x in xs], float(xs[1].sum()))
        """
        out = run(program, real.parent / "message", Path(__file__).parent)
        assert out == "['MemoryMappedTensor', 'Tagged'] 300.0"

    @pytest.mark.parametrize("pickler", PICKLERS)
    @pytest.mark.parametrize("mode", MODES)
    def test_parameter(self, real, mode, pickler):
        """A parameter on a file comes back as a parameter on the same file."""
        x = torch.nn.Parameter(opened(real, mode), requires_grad=False)
        back = there_and_back(x, pickler)
        assert isinstance(back, torch.nn.Parameter)
        assert not back.requires_grad
        assert mmtensor.locate(back) == mmtensor.locate(x)

    def test_attributes_of_values(self, real):
        """Attributes and the subclass's name for parameters survive the way by value."""
        x = torch.nn.Parameter(opened(real, "c"), requires_grad=False)
        x.tag = "a"
        with torch.no_grad():
            x[0] = 9
        back = there_and_back(x)
        assert isinstance(back, torch.nn.Parameter)
        assert back.tag == "a"
        assert values(back) == values(x)


class TestSharing:
    """Views of one file meet on one mapping where they arrive."""

    @pytest.mark.parametrize("mode", ["r", "r+"])
    def test_one_message(self, real, mode):
        """Several views in one pickle stand on one storage."""
        x = opened(real, mode)
        a, b, c = there_and_back([x[1:], x.t(), torch.t(x)], "ForkingPickler")
        assert a.untyped_storage() is b.untyped_storage() is c.untyped_storage()

    @pytest.mark.parametrize("mode", ["r", "r+"])
    def test_several_messages(self, real, mode):
        """Views in several pickles stand on one storage, the sender's own here."""
        x = opened(real, mode)
        a, b = there_and_back(x[1:]), there_and_back(x[2:])
        assert a.untyped_storage() is b.untyped_storage() is x.untyped_storage()
        assert a.const_data_ptr() == x[1:].const_data_ptr()

    @pytest.mark.parametrize("mode", ["r", "r+"])
    def test_after_the_sender_is_gone(self, real, mode):
        """Two pickles unpickled where nothing is mapped yet share the new mapping."""
        x = opened(real, mode)
        one, two = pickle.dumps(x[1:]), pickle.dumps(x[2:])
        del x
        a, b = pickle.loads(one), pickle.loads(two)
        assert a.untyped_storage() is b.untyped_storage()
        assert b.const_data_ptr() - a.const_data_ptr() == 16

    def test_one_message_copy_on_write(self, real):
        """Two views of one opening in ``c`` share private pages at the receiver too."""
        x = opened(real, "c")
        a, b = there_and_back([x[1:], x[2:]])
        assert a.untyped_storage() is b.untyped_storage()
        assert a.untyped_storage() is not x.untyped_storage()
        a[1] = 9
        assert values(b[0]) == [9] * 4
        assert values(x) == values(processes.real_values())

    def test_several_messages_copy_on_write(self, real):
        """Two pickles of one opening in ``c`` have private pages each."""
        x = opened(real, "c")
        a, b = there_and_back(x), there_and_back(x)
        a.fill_(9)
        assert values(b) == values(x) == values(processes.real_values())

    def test_modes_stay_apart(self, real):
        """A reference in ``r`` is read-only where the file is open in ``r+`` as well."""
        reader, writer = opened(real, "r"), opened(real, "r+")
        back = there_and_back(reader[1:])
        assert back.untyped_storage() is not writer.untyped_storage()
        with pytest.raises(mmtensor.ReadOnlyError, match='opened with mode "r"'):
            back[0] = 1

    @pytest.mark.parametrize("function", [torch.t, torch.flatten])
    def test_plain_views_stay_read_only(self, real, function):
        """A plain view of a tensor in ``r`` refuses writes after its journey."""
        back = there_and_back(function(opened(real)), "ForkingPickler")
        assert type(back) is torch.Tensor
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            back.fill_(1)
        assert values(opened(real)) == values(processes.real_values())

    def test_writes_meet(self, real):
        """What is written through a tensor that came back is seen through the first one."""
        x = opened(real, "r+")
        there_and_back(x[2]).fill_(9)
        assert values(x[2]) == [9] * 4


# --- files that are not what they were ------------------------------------------------


def delete(path):
    """Remove the file."""
    path.unlink()


def replace(path):
    """Give its name to another file of the same size."""
    new = path.with_suffix(".new")
    new.write_bytes(bytes(range(96)))
    new.replace(path)


def replace_by_longer(path):
    """Give its name to a longer file."""
    new = path.with_suffix(".new")
    new.write_bytes(b"\x01" * 200)
    new.replace(path)


def replace_by_shorter(path):
    """Give its name to a shorter file."""
    new = path.with_suffix(".new")
    new.write_bytes(b"\x01" * 40)
    new.replace(path)


def truncate(path):
    """Cut it short."""
    os.truncate(path, 40)


def empty(path):
    """Cut it to nothing."""
    os.truncate(path, 0)


def grow(path):
    """Append to it."""
    os.truncate(path, 200)


def put_directory(path):
    """Put a directory in its place."""
    path.unlink()
    path.mkdir()


def put_link(path):
    """Put a link to another file of the same size in its place."""
    other = path.with_suffix(".other")
    other.write_bytes(bytes(range(96)))
    path.unlink()
    path.symlink_to(other)


def put_dangling_link(path):
    """Put a link that leads nowhere in its place."""
    path.unlink()
    path.symlink_to(path.with_suffix(".nowhere"))


def put_fifo(path):
    """Put a FIFO in its place."""
    path.unlink()
    os.mkfifo(path)


def move_directory(path):
    """Move the directory that it is in."""
    path.parent.rename(path.parent.with_name(path.parent.name + ".moved"))


# change -> (error, pattern that the message must match)
STALE = {
    delete: (FileNotFoundError, "No such file.*real.bin"),
    replace: (StaleFileError, "not the one that the reference was made from: another file"),
    replace_by_longer: (StaleFileError, "its size is 200 bytes, 96 were expected"),
    replace_by_shorter: (SizeError, "must have 96 bytes.*its size is 40 bytes.*too small"),
    truncate: (SizeError, "must have 96 bytes.*its size is 40 bytes.*too small"),
    empty: (SizeError, "must have 96 bytes.*its size is 0 bytes.*too small"),
    grow: (StaleFileError, "its size is 200 bytes, 96 were expected"),
    put_directory: (IsADirectoryError, "expected a regular file, got a directory.*real.bin"),
    put_link: (StaleFileError, "another file has its name"),
    put_dangling_link: (FileNotFoundError, "No such file.*real.bin"),
    put_fifo: (ValueError, "must be a regular file, got a FIFO.*real.bin"),
    move_directory: (FileNotFoundError, "No such file.*real.bin"),
}


@pytest.fixture
def inside(place):
    """Return the path of a file in a directory of its own, which a test may move."""
    (place / "inside").mkdir()
    return mmtensor.save_array(place / "inside" / "real.bin", processes.real_values().numpy())


class TestStale:
    """A file that changes between pickling and unpickling is an error, never other bytes."""

    @pytest.mark.parametrize("mapped", [True, False], ids=["mapped here", "not mapped here"])
    @pytest.mark.parametrize("view", ["whole", "rows", "torch.t"])
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("change", STALE, ids=lambda change: change.__name__)
    def test_here(self, inside, change, mode, view, mapped):
        """Unpickling raises, whether the old file is still mapped or not; nothing is made."""
        error, pattern = STALE[change]
        x = opened(inside, mode)
        data = bytes(ForkingPickler.dumps(REAL_VIEWS[view](x)))
        if not mapped:
            del x
        change(inside)
        before = sorted(p.name for p in inside.parent.parent.rglob("*"))
        with pytest.raises(error, match=pattern) as raised:
            pickle.loads(data)
        assert type(raised.value) is error
        assert sorted(p.name for p in inside.parent.parent.rglob("*")) == before

    def test_in_another_process(self, place, run):
        """A process that never had the files raises the same errors."""
        cases = []
        for number, (change, mode) in enumerate(itertools.product(STALE, MODES)):
            path = place / str(number) / "real.bin"
            path.parent.mkdir()
            mmtensor.save_array(path, processes.real_values().numpy())
            cases.append((*STALE[change], pickle.dumps(opened(path, mode)[1:])))
            change(path)
        (place / "cases").write_bytes(pickle.dumps([data for *_, data in cases]))
        code = (
            "import pickle, pathlib, sys\n"
            "errors = []\n"
            "for data in pickle.loads(pathlib.Path(sys.argv[1]).read_bytes()):\n"
            "    try:\n"
            "        errors.append(repr(pickle.loads(data)))\n"
            "    except Exception as error:\n"
            "        errors.append(error)\n"
            "pathlib.Path(sys.argv[1]).write_bytes(pickle.dumps(errors))\n"
        )
        assert run(code, place / "cases") == ""
        errors = pickle.loads((place / "cases").read_bytes())
        assert [type(error) for error in errors] == [error for error, *_ in cases]
        for error, (_, pattern, _) in zip(errors, cases, strict=True):
            assert re.search(pattern, str(error))

    @pytest.mark.parametrize("mode", MODES)
    def test_inode_number_that_is_used_again(self, inside, mode):
        """A new file of the same size, device and inode number is told from the old one."""
        x = opened(inside, mode)
        data = pickle.dumps(x)
        number = inside.stat().st_ino
        del x  # a mapped file keeps its inode number from being used again
        for attempt in range(200):
            if attempt:
                inside.rename(inside.with_suffix(f".{attempt}"))  # its number is taken
            else:
                inside.unlink()
            inside.write_bytes(bytes(96))
            if inside.stat().st_ino == number:
                break
        else:
            pytest.skip("the file system does not use inode numbers again")
        with pytest.raises(StaleFileError, match="another file has its name and its inode number"):
            pickle.loads(data)

    def test_message_says_what_to_do(self, real):
        """The error says how to go on, and names the file."""
        data = pickle.dumps(opened(real))
        replace(real)
        with pytest.raises(StaleFileError, match="Open it again by name.*real.bin") as raised:
            pickle.loads(data)
        assert raised.value.filename == str(real)

    def test_error_travels(self, real):
        """The error itself can be sent back from a worker process."""
        data = pickle.dumps(opened(real))
        replace(real)
        with pytest.raises(StaleFileError, match="another file has its name") as raised:
            pickle.loads(data)
        back = pickle.loads(pickle.dumps(raised.value))
        assert (type(back), str(back)) == (StaleFileError, str(raised.value))

    def test_same_file_under_its_name_again(self, real):
        """A file that was renamed and renamed back is the same file."""
        x = opened(real)
        data = pickle.dumps(x)
        real.rename(real.with_suffix(".away"))
        real.with_suffix(".away").rename(real)
        assert facts(pickle.loads(data)) == facts(x)

    @pytest.mark.parametrize("mode", MODES)
    def test_new_bytes_in_the_same_file(self, real, mode):
        """A file whose bytes were changed in place is the same file, with those bytes."""
        data = pickle.dumps(opened(real, mode))
        opened(real, "r+").fill_(5)
        assert values(pickle.loads(data)) == [[5.0] * 4] * 6

    def test_other_machine(self, real, monkeypatch):
        """Elsewhere the inode says nothing: a file of the same size at that path is taken."""
        data = pickle.dumps(opened(real))
        monkeypatch.setattr(mmtensor.mapping, "machine", lambda: b"elsewher")
        shutil.copy(real, real.with_suffix(".copy"))
        real.with_suffix(".copy").replace(real)
        assert values(pickle.loads(data)) == values(processes.real_values())

    @pytest.mark.parametrize(
        ("change", "error", "pattern"),
        [
            (delete, FileNotFoundError, "No such file"),
            (truncate, SizeError, "too small"),
            (grow, StaleFileError, "200 bytes, 96 were expected"),
        ],
    )
    def test_other_machine_wrong_size(self, real, monkeypatch, change, error, pattern):
        """Elsewhere the size is checked."""
        data = pickle.dumps(opened(real))
        monkeypatch.setattr(mmtensor.mapping, "machine", lambda: b"elsewher")
        change(real)
        with pytest.raises(error, match=pattern):
            pickle.loads(data)


class TestByValue:
    """What no reference can say travels as a regular tensor with the values."""

    @pytest.mark.parametrize("pickler", PICKLERS)
    @pytest.mark.parametrize("mode", MODES)
    @pytest.mark.parametrize("change", [delete, replace, replace_by_longer, put_link])
    def test_file_is_another_one_before_pickling(self, real, change, mode, pickler):
        """A tensor whose name leads elsewhere travels with the bytes that it has."""
        x = opened(real, mode)
        assert mmtensor.locate(there_and_back(x, pickler)).path == str(real)
        change(real)
        back = there_and_back(x.t(), pickler)
        assert type(back) is torch.Tensor
        assert mmtensor.locate(back) is None
        assert torch.equal(back, processes.real_values().t())

    @pytest.mark.parametrize("view", ["torch.conj", "torch.view_as_real", "imag of conj"])
    def test_bits_by_value(self, complex_, view):
        """Conjugated and negated views keep their values on this way."""
        x = COMPLEX_VIEWS[view](opened(complex_, "r", "complex64"))
        expected = values(x)
        delete(complex_)
        for pickler in PICKLERS:
            assert values(there_and_back(x, pickler)) == expected

    @pytest.mark.parametrize("mode", MODES)
    def test_truncated_before_pickling(self, real, mode):
        """A file that was cut under the tensor is an error when it is pickled."""
        x = opened(real, mode)
        assert facts(there_and_back(x)) == facts(x)
        truncate(real)
        with pytest.raises(SizeError, match="must have 96 bytes.*40 bytes.*Replace files"):
            pickle.dumps(x)

    @pytest.mark.parametrize("mode", MODES)
    def test_grown_before_pickling(self, real, mode):
        """A file that grew under the tensor is still its file."""
        x = opened(real, mode)
        assert facts(there_and_back(x)) == facts(x)
        grow(real)
        assert facts(there_and_back(x)) == facts(x)

    @pytest.mark.parametrize("pickler", PICKLERS)
    @pytest.mark.parametrize(
        "change",
        [
            lambda x: x[1].fill_(9),
            lambda x: x.numpy()[1].fill(9),
            lambda x: torch.t(x)[:, 1].fill_(9),
            lambda x: x.untyped_storage().fill_(9),
        ],
        ids=["torch", "NumPy", "plain view", "storage"],
    )
    def test_copy_on_write_that_was_written_to(self, real, change, pickler):
        """Private changes, however they were made, travel as values; the file has none."""
        x = opened(real, "c")
        change(x)
        back = there_and_back(x[1:], pickler)
        assert type(back) is torch.Tensor
        assert mmtensor.locate(back) is None
        assert values(back) == values(x[1:])
        assert values(opened(real)) == values(processes.real_values())

    def test_plain_view_of_written_pages(self, real):
        """A plain view of private changes travels as values, too."""
        x = opened(real, "c")
        x[1] = 9
        for pickler in PICKLERS:
            back = there_and_back(torch.t(x), pickler)
            assert mmtensor.locate(back) is None
            assert values(back) == values(x.t())

    def test_only_what_was_written(self, place):
        """Of a large file in ``c``, pages that nobody wrote to still travel as references."""
        x = MemoryMappedTensor.zeros(64, 4096, filename=place / "pages.bin", dtype=torch.uint8)
        y = MemoryMappedTensor.from_filename(x.filename, "uint8", (64, 4096), mode="c")
        assert values(y[:, 0]) == [0] * 64  # every page is there, from the file
        y[3] = 1
        assert mmtensor.locate(there_and_back(y[3])) is None
        assert mmtensor.locate(there_and_back(y[:32])) is None
        assert mmtensor.locate(there_and_back(y[8:])) == mmtensor.locate(y[8:])

    def test_no_more_bytes_than_needed(self, place):
        """A small view of a large tensor takes few bytes on this way as well."""
        x = MemoryMappedTensor.zeros(1_000_000, filename=place / "big.bin")
        Path(x.filename).unlink()
        assert len(pickle.dumps(x[10:20])) < 1000
        assert len(pickle.dumps(x[0].expand(1000, 1000))) < 1000


class TestAnonymous:
    """Anonymous memory has no name that a pickle could hold."""

    @pytest.mark.parametrize("pickler", [p for p in PICKLERS if p != "ForkingPickler"])
    @pytest.mark.parametrize("view", REAL_VIEWS)
    def test_by_value(self, view, pickler):
        """Pickle and cloudpickle send the values of anonymous memory."""
        x = REAL_VIEWS[view](MemoryMappedTensor.from_tensor(processes.real_values()))
        back = there_and_back(x, pickler)
        assert type(back) is torch.Tensor
        assert mmtensor.locate(back) is None
        assert values(back) == values(x)

    def test_attributes(self):
        """Attributes and parameters survive the way by value."""
        x = torch.nn.Parameter(MemoryMappedTensor.ones(3), requires_grad=False)
        x.tag = "a"
        back = there_and_back(x)
        assert isinstance(back, torch.nn.Parameter)
        assert (back.tag, values(back)) == ("a", [1, 1, 1])

    def test_wrapped_array(self):
        """A tensor on an array's own memory travels as values."""
        x = MemoryMappedTensor.from_numpy(np.arange(6.0))
        back = there_and_back(x[2:])
        assert type(back) is torch.Tensor
        assert values(back) == [2, 3, 4, 5]


def test_pickler_with_a_file(real):
    """A pickle written to a stream is read back from it."""
    x = opened(real)
    stream = io.BytesIO()
    pickle.dump({"x": x, "rows": [x[0], x[1]]}, stream)
    stream.seek(0)
    back = pickle.load(stream)
    assert facts(back["x"]) == facts(x)
    assert [facts(row) for row in back["rows"]] == [facts(x[0]), facts(x[1])]


@pytest.mark.parametrize("dtype", list(mmtensor.dtypes.DTYPES))
@pytest.mark.parametrize("protocol", [3, 4, 5])
def test_anonymous_memory_by_value(dtype, protocol):
    """Anonymous memory goes through plain pickle by value, whatever its dtype."""
    x = MemoryMappedTensor.ones(3, dtype=dtype)
    again = pickle.loads(pickle.dumps(x, protocol=protocol))
    assert type(again) is torch.Tensor
    assert again.dtype == x.dtype
    assert again.view(torch.uint8).tolist() == x.view(torch.uint8).tolist()


def test_empty_file_made_again(tmp_path):
    """A reference to an empty file that took the place of another one arrives."""
    path = tmp_path / "x.bin"
    path.touch()
    old = MemoryMappedTensor.from_filename(path, "uint8", 0, mode="r")
    pickle.dumps(old)
    for _ in range(20):
        path.unlink()
        path.touch()  # often with the inode number of the one before
        message = pickle.dumps(MemoryMappedTensor.from_filename(path, "uint8", 0, mode="r"))
        assert pickle.loads(message).shape == (0,)
    assert old.shape == (0,)
