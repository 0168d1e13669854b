"""The storage: the identity that every view shares."""

import copy
import gc
import io
import pickle
import weakref

import numpy as np
import pytest
import torch

from mmtensor import MemoryMappedTensor
from mmtensor.mapping import FileMapping
from mmtensor.storage import MappedStorage, mapping_of, storage_on, tensor_on


@pytest.fixture(params=["r", "r+", "c"])
def x(request, numbers):
    """Return a tensor of a file in each mode."""
    return MemoryMappedTensor.from_filename(numbers[0], "f4", (3, 4), mode=request.param)


def test_one_storage_for_every_view(x):
    """Every view, plain or not, of any chain of views, has the same storage object."""
    storage = x.untyped_storage()
    assert type(storage) is MappedStorage
    for view in (x[1], torch.t(x), torch.t(x)[1:].unsqueeze(0), x.view(torch.uint8), x.detach()):
        assert view.untyped_storage() is storage


def test_storage_lives_as_long_as_a_view(numbers):
    """The storage's class and mapping are there when only C++ has held it for a while."""
    x = MemoryMappedTensor.from_filename(numbers[0], "f4", (3, 4), mode="r")
    view = torch.t(x)[1]
    reference = weakref.ref(mapping_of(x))
    del x
    gc.collect()
    assert isinstance(view.untyped_storage().mapping, FileMapping)
    assert reference() is mapping_of(view)
    del view
    assert reference() is None


def test_storage_held_by_autograd(numbers):
    """A storage that only an autograd graph holds keeps its mapping."""
    x = MemoryMappedTensor.from_filename(numbers[0], "f4", (3, 4), mode="r")
    weight = torch.ones(4, requires_grad=True)
    loss = (x * weight).sum()
    expected = x.sum(0).tolist()
    del x
    gc.collect()
    loss.backward()
    assert weight.grad.tolist() == expected


def test_addresses(x):
    """Addresses are available in every mode, of storages and tensors."""
    storage = x.untyped_storage()
    assert storage.data_ptr() == x.data_ptr() == x.numpy().ctypes.data
    assert x[1, 2].data_ptr() == x.data_ptr() + 24
    assert x[:0].data_ptr() == torch.empty(0).data_ptr()


def test_text(x):
    """A storage prints where it is, and not every byte."""
    for text in (repr(x.untyped_storage()), str(x.untyped_storage())):
        assert text == f"MappedStorage({x.filename!r}, mode={x.mode!r}, nbytes=48)"
    assert "memory" in repr(MemoryMappedTensor.ones(3).untyped_storage())


def test_name_and_size(x):
    """A storage has the name of its file and its size."""
    assert (x.untyped_storage().filename, x.untyped_storage().nbytes()) == (x.filename, 48)
    assert MemoryMappedTensor.ones(3).untyped_storage().filename is None


@pytest.mark.parametrize(
    "make", [lambda s: s.clone(), copy.copy, copy.deepcopy, lambda s: s.tolist(), bytes]
)
def test_copies_of_a_storage(x, numbers, make):
    """Copies of a storage have its bytes."""
    made = make(x.untyped_storage())
    assert bytes(made) == numbers[1].tobytes()


def test_clone_is_independent(x, numbers):
    """A clone of a storage is in regular memory."""
    clone = x.untyped_storage().clone()
    assert type(clone) is torch.UntypedStorage
    clone.fill_(0)
    assert x.tolist() == numbers[1].tolist()


def test_pieces_of_a_storage(x, numbers):
    """A byte is a number; a range of bytes is a copy, of which nothing reaches the file."""
    storage = x.untyped_storage()
    data = numbers[1].tobytes()
    assert storage[5] == data[5]
    part = storage[4:12]
    assert type(part) is torch.UntypedStorage
    assert bytes(part) == data[4:12]
    part.fill_(0)
    assert bytes(storage) == data


def test_new_storage_of_the_same_kind(x):
    """`new` gives an empty regular storage, as torch's own code asks for it."""
    new = x.untyped_storage().new()
    assert type(new) is torch.UntypedStorage
    assert new.nbytes() == 0


def test_sharing(x):
    """A storage of a file is shared, but for ``c``, which cannot be and says why."""
    for thing in (x, x.untyped_storage(), torch.t(x)):
        assert thing.is_shared() == (x.mode != "c")
        if x.mode == "c":
            with pytest.raises(RuntimeError, match='mode "c" .* is private to its process'):
                thing.share_memory_()
        else:
            assert thing.share_memory_() is thing


def test_plain_views_travel(x):
    """A plain view is pickled through its storage, with its values."""
    view = torch.t(x)[1:]
    again = pickle.loads(pickle.dumps(view))
    assert torch.equal(again, view)
    assert again.stride() == view.stride()


def test_storage_travels(x, numbers):
    """A storage is pickled by reference where its file has its bytes."""
    again = pickle.loads(pickle.dumps(x.untyped_storage()))
    assert type(again) is MappedStorage
    assert (again is x.untyped_storage()) == (x.mode != "c")
    assert bytes(again) == numbers[1].tobytes()


@pytest.mark.parametrize("zipped", [True, False])
def test_checkpoint_of_plain_views(x, zipped):
    """`torch.save` stores plain views with their values, in both of its formats."""
    file = io.BytesIO()
    torch.save({"a": torch.t(x), "b": x[1]}, file, _use_new_zipfile_serialization=zipped)
    file.seek(0)
    loaded = torch.load(file)
    assert torch.equal(loaded["a"], x.t())
    assert torch.equal(loaded["b"], x[1])


def test_storage_is_found_again(x):
    """There is one storage on a mapping as long as it lives, and a new one afterwards."""
    mapping = mapping_of(x)
    assert storage_on(mapping) is x.untyped_storage()
    assert tensor_on(mapping, torch.uint8, (48,)).untyped_storage() is x.untyped_storage()


def test_new_storage_on_an_old_mapping(numbers):
    """A mapping whose storage is gone gets a new one, as read-only as the first."""
    x = MemoryMappedTensor.from_filename(numbers[0], "f4", (3, 4), mode="r")
    mapping = mapping_of(x)
    del x
    y = tensor_on(mapping, torch.float32, (3, 4))
    assert y.tolist() == numbers[1].tolist()
    with pytest.raises(RuntimeError, match="data pointer"):
        y.zero_()


def test_array_keeps_the_mapping(numbers):
    """An array of a tensor keeps the map when every tensor is gone."""
    x = MemoryMappedTensor.from_filename(numbers[0], "f4", (3, 4), mode="r")
    array = x.t().numpy()
    del x
    gc.collect()
    np.testing.assert_array_equal(array, numbers[1].T)
