"""Tensors of files and of anonymous memory between real processes."""

import concurrent.futures
import gc
import multiprocessing
import os
import pickle
import signal
from multiprocessing.reduction import ForkingPickler

import cloudpickle
import processes
import pytest
import torch
import torch.multiprocessing
from processes import (
    CHANNELS,
    COMPLEX_VIEWS,
    LIBRARIES,
    METHODS,
    REAL_VIEWS,
    Child,
    Tagged,
    facts,
    values,
)

import mmtensor
from mmtensor import MemoryMappedTensor, SizeError, StaleFileError

KINDS = ("r", "r+", "c", "anonymous")

pytestmark = pytest.mark.timeout(120)


def make(directory, kind, data):
    """Put data on a file opened in a mode, or into anonymous memory."""
    if kind == "anonymous":
        return MemoryMappedTensor.from_tensor(data)
    path = directory / f"{data.dtype}-{kind.replace('+', 'w')}.bin"
    if not path.exists():
        mmtensor.save_array(path, data.numpy())
    return MemoryMappedTensor.from_filename(path, data.dtype, data.shape, mode=kind)


def all_views(directory, kind):
    """Make every view, of a real and a complex tensor."""
    real = make(directory, kind, processes.real_values())
    imaginary = make(directory, kind, processes.complex_values())
    return [view(real) for view in REAL_VIEWS.values()], [
        view(imaginary) for view in COMPLEX_VIEWS.values()
    ]


@pytest.fixture(scope="module")
def children():
    """Return a function that finds or starts a child; all of them end well in the end."""
    running = {}

    def child(method="spawn", library="multiprocessing", channel="queue"):
        key = (method, library, channel)
        if key not in running:
            running[key] = Child(*key)
        return running[key]

    yield child
    codes = {key: c.close() for key, c in running.items()}
    assert codes == dict.fromkeys(codes, 0)


# Forking again for each channel costs nothing; a fresh interpreter each time does.
WAYS = [
    (method, library, channel)
    for method in METHODS
    for library in LIBRARIES
    for channel in CHANNELS
    if method == "fork"
    or (method, library, channel)
    in {
        ("spawn", "multiprocessing", "queue"),
        ("spawn", "torch.multiprocessing", "simple"),
        ("forkserver", "torch.multiprocessing", "queue"),
        ("forkserver", "multiprocessing", "pipe"),
    }
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("method", "library", "channel"), WAYS)
class TestViews:
    """Every view goes to another process and back as it is."""

    def test_there(self, children, tmp_path, method, library, channel, kind):
        """All views of one tensor in one message arrive exactly, on one mapping."""
        child = children(method, library, channel)
        for xs in all_views(tmp_path, kind):
            arrived, storages = child.ask(processes.all_facts, xs)
            assert arrived == [facts(x) for x in xs]
            assert storages == 1

    def test_back(self, children, tmp_path, method, library, channel, kind):
        """All views come back exactly, and but for ``c`` on the storage they left from."""
        child = children(method, library, channel)
        for xs in all_views(tmp_path, kind):
            back = child.ask(processes.echo, xs)
            assert [facts(x) for x in back] == [facts(x) for x in xs]
            same = [x.untyped_storage() is xs[0].untyped_storage() for x in back]
            assert same == [kind != "c"] * len(xs)

    def test_one_by_one(self, children, tmp_path, method, library, channel, kind):
        """A message that holds one view only arrives as well."""
        child = children(method, library, channel)
        for x in (REAL_VIEWS["view"], REAL_VIEWS["torch.t"], REAL_VIEWS["diagonal"]):
            view = x(make(tmp_path, kind, processes.real_values()))
            child.put(processes.all_facts, [view])
        for x in (REAL_VIEWS["view"], REAL_VIEWS["torch.t"], REAL_VIEWS["diagonal"]):
            view = x(make(tmp_path, kind, processes.real_values()))
            assert child.get() == ([facts(view)], 1)

    def test_extras(self, children, tmp_path, method, library, channel, kind):
        """Attributes, parameters and subclasses arrive; storages and containers do."""
        child = children(method, library, channel)
        x = make(tmp_path, kind, processes.real_values())
        x.tag = "a"
        parameter = torch.nn.Parameter(x[1:], requires_grad=False)
        tagged = Tagged(x)
        message = {"x": x, "parameter": parameter, "tagged": tagged[0], "storage": (1, [x[2]])}
        back = child.ask(processes.echo, message)
        assert back["x"].tag == "a"
        assert isinstance(back["parameter"], torch.nn.Parameter)
        assert type(back["tagged"]) is Tagged
        assert facts(back["tagged"]) == facts(tagged[0])
        assert facts(back["storage"][1][0]) == facts(x[2])


class TestWrites:
    """Who sees what is written where."""

    @pytest.mark.parametrize("view", ["rows", "t", "torch.t"])
    @pytest.mark.parametrize("kind", ["r+", "anonymous"])
    @pytest.mark.parametrize("method", METHODS)
    def test_seen(self, children, tmp_path, method, kind, view):
        """A child's write to a shared tensor is seen by the parent, and the other way round."""
        x = make(tmp_path, kind, processes.real_values())
        child = children(method)
        child.ask(processes.write, REAL_VIEWS[view](x), 7)
        assert (REAL_VIEWS[view](x) == 7).all()
        assert child.ask(processes.keep, x) == (1, [values(x)])
        x.fill_(3)
        assert child.ask(processes.keep, x[0]) == (1, [values(x), values(x[0])])
        child.ask(processes.forget)

    @pytest.mark.parametrize("method", METHODS)
    def test_private(self, children, tmp_path, method):
        """A child's write to a tensor in ``c`` is seen by nobody else."""
        x = make(tmp_path, "c", processes.real_values())
        assert children(method).ask(processes.write, x, 7) == [[7] * 4] * 6
        assert values(x) == values(processes.real_values())
        assert values(make(tmp_path, "r", processes.real_values())) == values(x)

    @pytest.mark.parametrize("method", METHODS)
    def test_refused(self, children, tmp_path, method):
        """A child cannot write to a tensor in ``r``, and hears why."""
        x = make(tmp_path, "r", processes.real_values())
        with pytest.raises(mmtensor.ReadOnlyError, match='opened with mode "r"'):
            children(method).ask(processes.write, x[1:], 7)
        with pytest.raises(RuntimeError, match="Cannot access data pointer"):
            children(method).ask(processes.write, torch.t(x), 7)
        assert values(x) == values(processes.real_values())

    @pytest.mark.parametrize("how", ["torch", "NumPy", "plain view"])
    @pytest.mark.parametrize(
        ("method", "library"), [("fork", "multiprocessing"), ("spawn", "torch.multiprocessing")]
    )
    def test_written_copy_on_write_travels_by_value(
        self, children, tmp_path, method, library, how
    ):
        """Private changes travel as a regular tensor with the values."""
        x = make(tmp_path, "c", processes.real_values())
        {"torch": x[1:3], "NumPy": x[1:3].numpy(), "plain view": torch.t(x[1:3])}[how][:] = 9
        child = children(method, library)
        for view in (x, x.t(), torch.t(x), x[1]):
            kind, where, *rest = child.ask(processes.all_facts, [view])[0][0]
            assert (kind, where) == ("Tensor", None)
            assert rest[-1] == values(view)
        assert values(make(tmp_path, "r", processes.real_values())) == values(
            processes.real_values()
        )


class TestSharing:
    """Views of one file meet on one mapping at the receiver."""

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("method", METHODS)
    def test_several_messages(self, children, tmp_path, method, kind):
        """Views that arrive in several messages share one mapping, but for those in ``c``."""
        x = make(tmp_path, kind, processes.real_values())
        child = children(method)
        for number, view in enumerate((x, x[1], x.t()), start=1):
            storages, _ = child.ask(processes.keep, view)
            assert storages == (number if kind == "c" else 1)
        child.ask(processes.forget)

    def test_many_views(self, children, tmp_path):
        """64 views of one file cost the receiver one mapping and no descriptor."""
        x = make(tmp_path, "r+", processes.real_values())
        child = children()
        child.ask(processes.echo, x)
        before = child.ask(processes.open_descriptors)
        for _ in range(64):
            storages, _ = child.ask(processes.keep, x[1:])
        assert storages == 1
        assert child.ask(processes.open_descriptors) == before
        child.ask(processes.forget)


class TestLifetime:
    """What a message needs lives until it has been read."""

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("method", METHODS)
    def test_sender_drops_its_tensor_after_put(self, children, tmp_path, method, kind):
        """The sender may let go of its tensor right after ``put``."""
        child = children(method)
        expected = processes.real_values()
        for number in range(20):
            x = (
                make(tmp_path, kind, expected)
                if kind != "anonymous"
                else (MemoryMappedTensor.from_tensor(expected + number))
            )
            child.put(processes.all_facts, [x[1:]])
            del x
        gc.collect()
        for number in range(20):
            (arrived,), _ = child.get()
            added = number if kind == "anonymous" else 0
            assert arrived[-1] == values(expected[1:] + added)

    @pytest.mark.parametrize("kind", ["r", "r+", "c"])
    @pytest.mark.parametrize("method", METHODS)
    def test_sender_has_ended_file(self, tmp_path, method, kind):
        """A reference to a file outlives the process that sent it."""
        make(tmp_path, kind, processes.real_values())
        context = multiprocessing.get_context(method)
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_send_file, args=(send, str(tmp_path), kind))
        process.start()
        send.close()
        assert processes.join(process) == 0
        assert values(receive.recv()) == values(processes.real_values()[1:])
        receive.close()

    @pytest.mark.parametrize("method", METHODS)
    def test_sender_has_ended_anonymous(self, method):
        """Anonymous memory is gone with its only holder: an error at once, and no hang."""
        context = multiprocessing.get_context(method)
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_send_anonymous, args=(send,))
        process.start()
        send.close()
        assert processes.join(process) == 0
        assert receive.poll(processes.PATIENCE)
        with pytest.raises(ConnectionError, match="the process that sent it has ended.*a file"):
            receive.recv()
        receive.close()

    def test_sender_was_killed(self, tmp_path):
        """A file whose sender was killed opens all the same."""
        make(tmp_path, "r+", processes.real_values())
        context = multiprocessing.get_context("fork")
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=_send_and_hang, args=(send, str(tmp_path)))
        process.start()
        send.close()
        x = receive.recv()
        assert receive.poll(processes.PATIENCE)
        os.kill(process.pid, signal.SIGKILL)
        assert processes.join(process) == -signal.SIGKILL
        assert values(x) == values(receive.recv()) == values(processes.real_values())
        receive.close()

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("method", METHODS)
    def test_sent_on(self, children, tmp_path, method, kind):
        """A tensor that was received can be sent again: through a second child and back."""
        x = make(tmp_path, kind, processes.real_values())
        once = children(method).ask(processes.echo, x[1:])
        twice = children("spawn").ask(processes.echo, once)
        assert facts(twice) == facts(x[1:])
        assert (twice.untyped_storage() is x.untyped_storage()) == (kind != "c")

    def test_from_child_to_child(self, children):
        """What one child made and let go of reaches another through the parent."""
        x = children("fork").ask(_made_in_child, 5.0)
        assert facts(children("spawn").ask(processes.echo, x)) == facts(x)
        assert values(x) == [5.0] * 3


def _send_file(connection, directory, kind):
    [path] = [name for name in os.listdir(directory) if name.startswith("torch.float32")]
    x = MemoryMappedTensor.from_filename(f"{directory}/{path}", "float32", (6, 4), mode=kind)
    connection.send(x[1:])


def _send_anonymous(connection):
    connection.send(MemoryMappedTensor.from_tensor(processes.real_values()))


def _send_and_hang(connection, directory):
    x = MemoryMappedTensor.from_filename(
        f"{directory}/torch.float32-rw.bin", "float32", (6, 4), mode="r+"
    )
    connection.send(x)
    connection.send(x)
    signal.pause()


def _made_in_child(value):
    return MemoryMappedTensor.full((3,), value)


class TestArguments:
    """Tensors as arguments and results of everything that runs functions elsewhere."""

    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize(
        ("method", "library"),
        [
            ("fork", "multiprocessing"),
            ("fork", "torch.multiprocessing"),
            ("spawn", "multiprocessing"),
            ("forkserver", "torch.multiprocessing"),
        ],
    )
    def test_process_arguments(self, tmp_path, method, library, kind):
        """A view that is an argument of a process is the same view there."""
        context = LIBRARIES[library].get_context(method)
        x = make(tmp_path, kind, processes.complex_values()).conj()[1:]
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=processes.send_facts, args=(send, x))
        process.start()
        send.close()
        assert receive.poll(processes.PATIENCE)
        assert receive.recv() == facts(x)
        assert processes.join(process) == 0
        receive.close()

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("library", LIBRARIES)
    def test_pool(self, tmp_path, method, library):
        """Arguments and results of a pool, and what its initializer gets, are references."""
        xs = [make(tmp_path, kind, processes.real_values()) for kind in KINDS]
        context = LIBRARIES[library].get_context(method)
        with context.Pool(1, initializer=processes.keep, initargs=(xs[1],)) as pool:
            there = pool.map_async(processes.facts, xs).get(processes.PATIENCE)
            back = pool.map_async(processes.echo, xs).get(processes.PATIENCE)
            pool.apply_async(processes.write, (xs[1][0], 8)).get(processes.PATIENCE)
            _, kept = pool.apply_async(processes.keep, (xs[0],)).get(processes.PATIENCE)
            pool.close()
            pool.join()
        assert kept[0][0] == [8] * 4
        assert values(xs[1][0]) == [8] * 4
        assert [f[1] for f in there] == [mmtensor.locate(x) for x in xs]
        assert [facts(x) for x in back] == [facts(x) for x in xs]

    @pytest.mark.parametrize("method", METHODS)
    def test_executor(self, tmp_path, method):
        """Arguments and results of concurrent.futures are references."""
        xs = [make(tmp_path, kind, processes.real_values())[1:].t() for kind in KINDS]
        context = multiprocessing.get_context(method)
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
            there = list(executor.map(processes.facts, xs, timeout=processes.PATIENCE))
            back = list(executor.map(processes.echo, xs, timeout=processes.PATIENCE))
            made = executor.submit(_made_in_child, 2.5).result(processes.PATIENCE)
        assert there == [facts(x) for x in xs] == [facts(x) for x in back]
        assert type(made) is MemoryMappedTensor
        assert values(made) == [2.5] * 3

    def test_threads(self, tmp_path):
        """A thread pool hands tensors on as they are."""
        x = make(tmp_path, "r", processes.real_values())
        with concurrent.futures.ThreadPoolExecutor(2) as executor:
            assert executor.submit(processes.echo, x).result(processes.PATIENCE) is x

    @pytest.mark.parametrize("kind", KINDS)
    def test_pickle_to_a_child(self, children, tmp_path, kind):
        """What pickle and cloudpickle made here is the same tensor in another process."""
        x = make(tmp_path, kind, processes.real_values())[1:].t()
        for dumps in (pickle.dumps, cloudpickle.dumps):
            arrived = children().ask(processes.load, dumps(x))
            if kind == "anonymous":
                assert arrived[:2] == ("Tensor", None)
                assert arrived[-1] == values(x)
            else:
                assert arrived == facts(x)

    def test_global_of_a_forked_child(self, tmp_path):
        """A forked child uses the tensors that it inherited, without any message."""
        xs = [make(tmp_path, kind, processes.real_values()) for kind in KINDS]
        context = multiprocessing.get_context("fork")
        queue = context.SimpleQueue()

        def child():
            for x in xs[1:]:
                x[0] = 6
            queue.put([facts(x) for x in xs])

        process = context.Process(target=child)
        process.start()
        assert processes.join(process) == 0
        there = queue.get()
        assert [f[1] for f in there] == [mmtensor.locate(x) for x in xs]
        assert [values(x[0]) == [6] * 4 for x in xs] == [False, True, False, True]


class TestStale:
    """A child that cannot have the sender's bytes gets an error and goes on."""

    @pytest.mark.parametrize("channel", ["queue", "simple"])
    @pytest.mark.parametrize("method", ["fork", "spawn"])
    def test_error_reaches_the_reader(self, children, tmp_path, method, channel):
        """Gone, replaced, cut: the reader's ``get`` raises; the next message arrives."""
        child = children(method, "multiprocessing", channel)
        path = mmtensor.save_array(tmp_path / "x.bin", processes.real_values().numpy())
        for change, error, pattern in (
            (path.unlink, FileNotFoundError, "No such file.*x.bin"),
            (lambda: _replace(path), StaleFileError, "another file has its name.*x.bin"),
            (lambda: os.truncate(path, 8), SizeError, "must have 96 bytes.*8 bytes"),
        ):
            mmtensor.save_array(path, processes.real_values().numpy(), existsok=True)
            x = MemoryMappedTensor.from_filename(path, "float32", (6, 4), mode="r")
            message = bytes(ForkingPickler.dumps((processes.echo, x[1:])))
            change()
            child.put(processes.load, message)
            with pytest.raises(error, match=pattern):
                child.get()
        assert child.ask(processes.echo, 1) == 1

    def test_replaced_before_put(self, children, tmp_path):
        """The sender's bytes arrive though its file has been replaced by then."""
        path = mmtensor.save_array(tmp_path / "x.bin", processes.real_values().numpy())
        x = MemoryMappedTensor.from_filename(path, "float32", (6, 4), mode="r")
        _replace(path)
        (arrived,), _ = children().ask(processes.all_facts, [x[1:]])
        assert arrived[:2] == ("Tensor", None)
        assert arrived[-1] == values(processes.real_values()[1:])


def _replace(path):
    new = path.with_suffix(".new")
    new.write_bytes(bytes(96))
    new.replace(path)


def test_torch_tensors_are_left_to_torch(children):
    """Regular tensors go through the channels as torch sends them."""
    x = torch.arange(4)
    back = children("fork", "torch.multiprocessing").ask(processes.echo, [x, x.t(), x[1:]])
    assert [b.tolist() for b in back] == [[0, 1, 2, 3], [0, 1, 2, 3], [1, 2, 3]]
    assert back[0].untyped_storage()._cdata == back[2].untyped_storage()._cdata


def items_without_a_reference(directory):
    """Make one of everything that can go by value or by descriptor only."""
    data = torch.arange(1000.0)
    written = make(directory, "c", data)
    written += 1
    pairs = make(directory, "c", torch.complex(data, data + 1))
    pairs += 1
    gone = MemoryMappedTensor.from_tensor(data + 2, filename=directory / "gone.bin")
    (directory / "gone.bin").unlink()
    elements = [torch.ones(3), torch.zeros(500)]
    jagged = mmtensor.JaggedTensor.from_tensors(elements, filename=directory / "j.bin")
    mmtensor.JaggedTensor.from_tensors(elements[:1], filename=directory / "j.bin", existsok=True)
    apart = mmtensor.JaggedTensor(gone, [[300], [700]])
    source = mmtensor.TensorDict({"x": data, "n": {"y": data.view(1000, 1)}}, [1000])
    replaced = source.memmap(directory / "td")
    source.memmap(directory / "td")
    return {
        "written": written,
        "plain view": torch.t(written.view(10, 100)),
        "conjugated": pairs.conj(),
        "gone": gone,
        "storage": gone[:0].untyped_storage(),
        "jagged": jagged,
        "jagged on a tensor": apart,
        "steps of it": apart[::-1],
        "anonymous jagged": mmtensor.JaggedTensor.from_tensors(elements),
        "regular container": source,
        "replaced container": replaced,
        "rows of it": replaced[10:900],
    }


@pytest.mark.parametrize("method", METHODS)
def test_arguments_of_a_process_without_a_reference(method, tmp_path):
    """What is made for the message lives until a new process has it."""
    items = items_without_a_reference(tmp_path)
    expected = {name: processes.numbers_of(value) for name, value in items.items()}
    context = multiprocessing.get_context(method)
    here, there = context.Pipe()
    child = context.Process(target=processes.send_numbers, args=(items, there))
    child.start()
    there.close()
    assert here.poll(processes.PATIENCE)
    assert here.recv() == expected
    child.join()
    assert child.exitcode == 0
    here.close()
