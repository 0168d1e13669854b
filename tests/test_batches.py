"""td.batches: the order, the buffers, threads that read ahead, and their end."""

import gc
import os
import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mmtensor import JaggedTensor, MemoryMappedTensor, ReadOnlyError, TensorDict, prefetch
from mmtensor import batches as module

pytestmark = pytest.mark.timeout(120)

ROWS = 23
X = torch.arange(ROWS * 6, dtype=torch.float32).view(ROWS, 2, 3)
TEXTS = [f"text {n}" for n in range(ROWS)]


def source():
    """Return a TensorDict with a leaf of every kind."""
    images = JaggedTensor.from_tensors([torch.full((n % 4, 2), n) for n in range(ROWS)])
    return TensorDict(
        {
            "x": X.clone(),
            "n": {"b": torch.arange(ROWS, dtype=torch.bfloat16), "flag": X[:, 0, 0] > 30},
            "image": images,
            "text": list(TEXTS),
            "title": "all of it",
        },
        [ROWS],
    )


def in_memory(_):
    """Return the source in regular memory."""
    return source()


def in_shared_memory(_):
    """Return the source in shared memory."""
    return source().share_memory_()


def on_files(directory):
    """Return the source memory-mapped, read-only."""
    source().memmap(directory / "td")
    return TensorDict.load_memmap(directory / "td", mode="r")


SOURCES = (in_memory, in_shared_memory, on_files)


@pytest.fixture(params=SOURCES)
def td(request, tmp_path):
    """Return the same TensorDict in memory, shared, and on files."""
    return request.param(tmp_path)


@pytest.fixture
def absent(monkeypatch):
    """Make it look as if no row was in memory, so that threads start."""
    monkeypatch.setattr(module, "are_absent", lambda *_: True)


@pytest.fixture
def asked(monkeypatch, absent):  # noqa: ARG001  # nothing is asked for otherwise
    """Note for which rows the kernel is asked."""
    rows = []
    ask = module.will_need_rows

    def note(mapping, tensor, ids):
        rows.append(ids.tolist())
        ask(mapping, tensor, ids)

    monkeypatch.setattr(module, "will_need_rows", note)
    return rows


def threads():
    """Return the threads of batches that run."""
    return [one for one in threading.enumerate() if one.name.startswith("mmtensor-batches")]


def check(batch, ids):
    """Check every leaf of a batch."""
    count = len(ids)
    assert batch.batch_size == (count,)
    assert list(batch.keys(True)) == [
        "x",
        "n",
        ("n", "b"),
        ("n", "flag"),
        "image",
        "text",
        "title",
    ]
    assert torch.equal(batch["x"], X[ids])
    assert batch["n", "b"].tolist() == ids
    assert batch["n", "b"].dtype is torch.bfloat16
    assert torch.equal(batch["n", "flag"], X[ids][:, 0, 0] > 30)
    assert batch["n"].batch_size == (count,)
    assert [one.tolist() for one in batch["image"]] == [[[n, n]] * (n % 4) for n in ids]
    assert batch["text"] == [TEXTS[n] for n in ids]
    assert batch["title"] == "all of it"
    assert not batch.is_locked


@pytest.mark.parametrize("size", [1, 4, 23, 100])
def test_every_row_in_order(td, size):
    """Without shuffling the batches are consecutive rows, the last one fewer."""
    batches = td.batches(size)
    assert len(batches) == -(-ROWS // size)
    seen = []
    for batch in batches:
        ids = list(range(len(seen), min(len(seen) + size, ROWS)))
        check(batch, ids)
        seen += ids
    assert seen == list(range(ROWS))
    assert next(batches, None) is None


@pytest.mark.parametrize("num_threads", [0, 1, 2])
@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.usefixtures("absent")
def test_order_of_a_generator(td, prefetch, num_threads):
    """A shuffled order is that of the generator, with or without threads."""
    expected = torch.randperm(ROWS, generator=torch.Generator().manual_seed(4)).tolist()
    generator = torch.Generator().manual_seed(4)
    batches = td.batches(
        5, shuffle=True, generator=generator, prefetch=prefetch, num_threads=num_threads
    )
    for number, batch in enumerate(batches):
        check(batch, expected[5 * number : 5 * number + 5])
    assert number == 4
    assert not threads()


def test_each_epoch_has_another_order(td):
    """Two epochs of one generator differ, and torch's seed decides where there is none."""
    generator = torch.Generator().manual_seed(0)

    def order(**options):
        batches = td.batches(4, shuffle=True, **options)
        return [n for batch in batches for n in batch["n", "b"].tolist()]

    one, two = order(generator=generator), order(generator=generator)
    assert sorted(one) == sorted(two) == list(range(ROWS))
    assert one != two
    torch.manual_seed(1)
    three = order()
    torch.manual_seed(1)
    assert order() == three


def test_the_order_is_drawn_at_once(td):
    """The order is decided when batches is called, not when the first is taken."""
    torch.manual_seed(5)
    expected = torch.randperm(ROWS).tolist()
    torch.manual_seed(5)
    batches = td.batches(ROWS, shuffle=True)
    torch.rand(10)
    assert next(batches)["n", "b"].tolist() == expected


def test_drop_last(td):
    """With drop_last all batches have the size."""
    batches = td.batches(5, drop_last=True)
    assert len(batches) == 4
    assert [len(batch) for batch in batches] == [5] * 4
    assert list(td.batches(100, drop_last=True)) == []


@given(st.integers(0, 40), st.integers(1, 50), st.integers(0, 3), st.booleans(), st.booleans())
def test_every_row_once(rows, size, prefetch, shuffle, drop_last):
    """Whatever the numbers, each row comes once, but for those that are left out."""
    td = TensorDict({"x": torch.arange(rows)}, [rows])
    batches = td.batches(size, shuffle=shuffle, prefetch=prefetch, drop_last=drop_last)
    seen = [n for batch in batches for n in batch["x"].tolist()]
    assert len(seen) == (rows // size * size if drop_last else rows)
    assert len(set(seen)) == len(seen)
    if not shuffle:
        assert seen == list(range(len(seen)))


@pytest.mark.parametrize("num_threads", [0, 2])
@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.usefixtures("absent")
def test_how_long_a_batch_is_valid(tmp_path, prefetch, num_threads):
    """A batch stays as it is while prefetch further ones are taken, and buffers come again."""
    td = on_files(tmp_path)
    taken, addresses = [], set()
    for batch in td.batches(2, prefetch=prefetch, num_threads=num_threads):
        taken.append((batch, batch["x"].clone()))
        addresses.add(batch["x"].data_ptr())
        for one, values in taken[-prefetch - 1 :]:
            assert torch.equal(one["x"], values)
    assert len(addresses) <= 2 * prefetch + 1


def test_writing_to_a_batch(td):
    """A batch can be written to, and has keys of its own; the source stays as it is."""
    for batch in td.batches(4):
        batch["x"].zero_()
        batch["new"] = torch.zeros(len(batch))
    assert torch.equal(td["x"], X)
    assert "new" not in td


def test_jagged_and_text_leaves_are_not_reused(td):
    """Jagged leaves and lists of strings of earlier batches stay as they are."""
    kept = [(batch["image"], batch["text"]) for batch in td.batches(2)]
    assert [n for _, text in kept for n in text] == TEXTS
    lengths = [len(one) for image, _ in kept for one in image]
    assert lengths == [n % 4 for n in range(ROWS)]


@pytest.mark.parametrize(
    "dtype",
    [
        torch.bool,
        torch.uint8,
        torch.uint16,
        torch.float16,
        torch.int64,
        torch.complex64,
        torch.complex128,
        torch.float8_e4m3fn,
    ],
)
def test_dtypes(dtype):
    """Rows of every dtype are gathered."""
    words = torch.arange(ROWS * 16, dtype=torch.uint8) % 2
    x = words.view(ROWS, 16).view(dtype)
    generator = torch.Generator().manual_seed(0)
    order = torch.randperm(ROWS, generator=generator)
    got = [
        batch["x"].clone()
        for batch in TensorDict({"x": x}, [ROWS]).batches(
            5, shuffle=True, generator=generator.manual_seed(0)
        )
    ]
    assert all(one.dtype is dtype for one in got)
    assert torch.equal(
        torch.cat([one.view(torch.uint8) for one in got]), words.view(ROWS, 16)[order]
    )


@pytest.mark.parametrize("shuffle", [False, True])
def test_views_are_gathered(shuffle, tmp_path):
    """Leaves that are no contiguous memory, conjugated or in need of gradients come out right."""
    z = torch.complex(torch.arange(12.0), torch.arange(12.0)).view(3, 4)
    td = TensorDict(
        {
            "t": MemoryMappedTensor.from_tensor(
                X[:4, 0].t().contiguous(), filename=tmp_path / "t"
            ).t(),
            "step": torch.arange(8)[::2],
            "wide": torch.ones(1).expand(4),
            "conj": z.t().conj(),
            "grad": torch.arange(4.0).requires_grad_(),
        },
        [4],
    )
    generator = torch.Generator().manual_seed(0)
    ids = torch.randperm(4, generator=generator) if shuffle else torch.arange(4)
    (batch,) = td.batches(4, shuffle=shuffle, generator=torch.Generator().manual_seed(0))
    for key in list(td.keys()):
        assert torch.equal(batch[key], td[key][ids]), key
    assert batch["grad"].requires_grad


def test_more_batch_dimensions():
    """The first batch dimension is cut, and the others stay."""
    td = TensorDict({"x": torch.arange(12).view(4, 3), "n": {"y": torch.ones(4, 3, 2)}}, [4, 3])
    shapes = [(batch.batch_size, batch["n"].batch_size) for batch in td.batches(3)]
    assert shapes == [((3, 3), (3, 3)), ((1, 3), (1, 3))]


# --- threads -----------------------------------------------------------------------------


def test_no_thread_where_rows_are_in_memory(td):
    """Rows that are in memory are gathered by the caller."""
    batches = td.batches(4)
    next(batches)
    assert not threads()


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.usefixtures("absent")
def test_threads_where_they_are_not(tmp_path, num_threads):
    """Threads gather rows that are not in memory, as many as asked for at most."""
    batches = on_files(tmp_path).batches(2, num_threads=num_threads)
    next(batches)
    assert 1 <= len(threads()) <= num_threads
    assert len(list(batches)) == 11
    assert not threads()


def test_the_kernel_is_asked_ahead(tmp_path, asked):
    """The rows of every batch are asked for, those of later ones before any is gathered."""
    batches = on_files(tmp_path).select("x").batches(5, shuffle=True, prefetch=2)
    ids = [module.Batches.__next__(batches)["x"][:, 0, 0].div(6).long().tolist()]
    first = list(asked)
    ids += [batch["x"][:, 0, 0].div(6).long().tolist() for batch in batches]
    assert first[0] == ids[0]
    assert first[1] == ids[1]
    assert sorted(asked) == sorted(ids)


def test_rows_on_disk(tmp_path):
    """Rows that the kernel has thrown out of memory come back right, through threads."""
    rows = torch.arange(4000).view(-1, 1).expand(-1, 2048).contiguous()
    TensorDict({"x": rows}, [4000]).memmap(tmp_path / "big")
    with open(tmp_path / "big" / "x.memmap", "r+b") as file:
        os.fsync(file)
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    td = TensorDict.load_memmap(tmp_path / "big", mode="r")
    seen = []
    for batch in td.batches(64, shuffle=True):
        assert bool((batch["x"] == batch["x"][:, :1]).all())
        seen += batch["x"][:, 0].tolist()
    assert sorted(seen) == list(range(4000))


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.usefixtures("absent")
def test_an_exception_in_a_thread_surfaces(tmp_path, monkeypatch, at):
    """What goes wrong in a thread is raised by next, for its batch; no thread is left."""
    gather = module._Gatherer.gather

    def fail(self, number, slot):
        if number == at:
            raise OSError(5, "the disk is gone")
        return gather(self, number, slot)

    monkeypatch.setattr(module._Gatherer, "gather", fail)
    batches = on_files(tmp_path).batches(4)
    for _ in range(at):
        next(batches)
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)
    assert not threads()
    assert next(batches, None) is None


@pytest.mark.parametrize("end", ["close", "with", "drop", "exception"])
@pytest.mark.usefixtures("absent")
def test_ending_early_leaves_no_thread(tmp_path, end):
    """No thread is left when an epoch is not read to its end."""
    batches = on_files(tmp_path).batches(2, num_threads=2)
    next(batches)
    assert threads()
    if end == "close":
        batches.close()
        batches.close()
        assert next(batches, None) is None
    elif end == "with":
        with batches:
            next(batches)
    elif end == "drop":
        del batches
        gc.collect()
    else:
        with pytest.raises(KeyError, match="stop here"):
            _read_until_it_breaks(batches)
        del batches
        gc.collect()
    if end in ("drop", "exception"):  # whoever dropped it did not wait for them
        end_of_waiting = time.monotonic() + 30
        while threads() and time.monotonic() < end_of_waiting:
            time.sleep(0.01)
    assert not threads()


def _read_until_it_breaks(batches):
    for _ in batches:
        raise KeyError("stop here")


# --- out ---------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["present", "absent"])
def test_out_gets_every_batch(td, where, request):
    """With out each batch is in its memory, also while threads ask the kernel ahead."""
    if where == "absent":
        request.getfixturevalue("absent")
    out = td[:5].clone()
    seen = []
    for batch in td.batches(4, out=out):
        assert batch["x"].data_ptr() == out["x"].data_ptr()
        check(batch, list(range(len(seen), len(seen) + len(batch))))
        assert torch.equal(out["x"][: len(batch)], batch["x"])
        seen += batch["n", "b"].tolist()
    assert seen == list(range(ROWS))
    assert not threads()


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (
            {"x": torch.zeros(3, 2)},
            ValueError,
            r"leaf 'x' of out must have shape \[4, 2\].*got \[3",
        ),
        (
            {"x": torch.zeros(4, 3)},
            ValueError,
            r"must have shape \[4, 2\].*got \[4, 3\] torch.flo",
        ),
        (
            {"x": torch.zeros(4, 2).int()},
            ValueError,
            r"dtype torch.float32, got \[4, 2\] torch.int",
        ),
        ({"y": torch.zeros(4, 2)}, ValueError, "leaf 'x' of out .*got none"),
        (torch.zeros(4, 2), TypeError, "out must be a TensorDict, got <class 'torch.Tensor'>"),
    ],
)
def test_out_must_fit(out, error, message):
    """An out without room for a batch is an error that names the leaf."""
    td = TensorDict({"x": torch.zeros(9, 2)}, [9])
    if isinstance(out, dict):
        out = TensorDict(out)
    with pytest.raises(error, match=message):
        td.batches(4, out=out)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an integer of 1 or more, got 0"),
        ({"batch_size": 2.5}, "batch_size must be an integer of 1 or more, got 2.5"),
        ({"batch_size": 2, "prefetch": -1}, "prefetch must be an integer of 0 or more, got -1"),
        ({"batch_size": 2, "num_threads": None}, "num_threads must be an integer of 0 or more"),
    ],
)
def test_wrong_arguments(arguments, message):
    """A wrong number is an error that names it."""
    with pytest.raises(ValueError, match=message):
        TensorDict({"x": torch.zeros(9)}, [9]).batches(**arguments)


def test_without_batch_dimensions():
    """What has no batch dimension has no batches."""
    with pytest.raises(RuntimeError, match="without batch dimensions has no elements"):
        TensorDict({"x": torch.zeros(3)}).batches(2)


@pytest.mark.usefixtures("absent")
def test_ranges_of_jagged_leaves_are_asked_for(tmp_path, monkeypatch):
    """The bytes of the elements of a jagged leaf are asked for before they are gathered."""
    asked = []
    monkeypatch.setattr(
        prefetch, "will_need_ranges", lambda _, a, b: asked.append((a.tolist(), b.tolist()))
    )
    image = JaggedTensor.from_tensors([torch.full((n,), n, dtype=torch.int16) for n in range(9)])
    td = TensorDict({"image": image}, [9]).memmap(tmp_path / "td")
    lengths = [len(one) for batch in td.batches(3) for one in batch["image"]]
    assert lengths == list(range(9))
    starts = np.cumsum([0, *range(9)]) * 2
    # The first element has no bytes.
    bounds = [(1, 3), (3, 6), (6, 9)]
    expected = [(starts[a:b].tolist(), starts[a + 1 : b + 1].tolist()) for a, b in bounds]
    assert asked == expected


def test_an_epoch_that_a_thread_of_its_own_collects(tmp_path, monkeypatch):
    """The garbage collector may end an epoch in a thread that gathers for it."""
    monkeypatch.setattr(module._Gatherer, "is_absent", lambda *_: True)
    td = TensorDict({"x": torch.zeros(64, 8)}, [64]).memmap(tmp_path / "td")
    gather = module._Gatherer.ask_and_gather

    def collecting(*arguments):
        gc.collect()
        return gather(*arguments)

    monkeypatch.setattr(module._Gatherer, "ask_and_gather", collecting)
    for _ in range(20):
        batches = td.batches(2)
        next(batches)
        batches.itself = batches
        del batches
    gc.collect()


def test_out_that_is_read_only(tmp_path):
    """Buffers that cannot be written to are refused, and named."""
    td = TensorDict({"x": torch.zeros(4)}, [4])
    td.memmap(tmp_path / "td")
    with pytest.raises(ReadOnlyError, match="writing to leaf 'x' of out would write to a read-on"):
        td.batches(2, out=TensorDict.load_memmap(tmp_path / "td", mode="r"))


def test_a_second_epoch(td):
    """One that has ended says so, instead of being empty; one that has not goes on."""
    batches = td.batches(4)
    for _ in batches:
        break
    assert sum(1 for _ in batches) == len(batches) - 1
    for ended in (batches, td.batches(2)):
        ended.close()
        with pytest.raises(RuntimeError, match="this epoch has ended.* Call it again for each"):
            iter(ended)


def test_a_batch_of_more_rows_than_there_are(td):
    """All rows in one batch take the memory of all rows, and no more."""
    (batch,) = td.batches(10**15)
    check(batch, list(range(ROWS)))
    assert list(td.batches(10**15, drop_last=True)) == []


def test_out_that_requires_gradients():
    """Autograd would not hear of what is written."""
    td = TensorDict({"x": torch.rand(8, 2)}, [8])
    out = TensorDict({"x": torch.zeros(4, 2, requires_grad=True)}, [4])
    with pytest.raises(ValueError, match="'x' of out requires gradients"):
        td.batches(4, out=out)
