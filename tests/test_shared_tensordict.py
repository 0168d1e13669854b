"""All leaves in one block of shared memory, and containers on their way to a process."""

import errno
import multiprocessing
import os
import pickle
import time
from concurrent.futures import ThreadPoolExecutor

import cloudpickle
import pytest
import torch
import torch.multiprocessing
from conftest import descriptors, settled_descriptors
from tensordict_children import answer, describe

from mmtensor import JaggedTensor, MemoryMappedTensor, TensorDict
from mmtensor.storage import mapping_of

pytestmark = pytest.mark.timeout(120)


def make():
    """Return a regular container with leaves of every kind."""
    return TensorDict(
        {
            "x": torch.arange(6.0).view(3, 2),
            "n": {"y": torch.arange(3), "m": {"z": torch.zeros(3, 1, dtype=torch.bool)}},
            "j": JaggedTensor(torch.arange(6), [[2, 1], [0, 3], [1, 4]]),
            "half": torch.tensor([1.5, 2, 3], dtype=torch.bfloat16),
            "none": torch.empty(3, 0),
            "expanded": torch.arange(3)[:, None].expand(3, 1000),
            "transposed": torch.arange(12).view(4, 3).t(),
            "conj": torch.tensor([1 + 2j, 3, 4j]).conj(),
            "title": "a title",
            "names": ["a", "b", "c"],
        },
        batch_size=[3],
    )


class Child:
    """A process that describes the containers it is sent."""

    def __init__(self, method, library=multiprocessing):
        context = library.get_context(method)
        self.source, self.results = context.SimpleQueue(), context.SimpleQueue()
        self.process = context.Process(target=answer, args=(self.source, self.results))
        self.process.start()

    def ask(self, td):
        """Send a container and return what the child says of it."""
        self.source.put(td)
        described, self.descriptors = self.results.get()
        return described

    def close(self):
        """End the process."""
        self.source.put(None)
        self.process.join(60)
        assert self.process.exitcode == 0
        self.process.close()


@pytest.fixture(params=["fork", "spawn", "forkserver"])
def child(request):
    """Return a child process, started by each method."""
    process = Child(request.param)
    yield process
    process.close()


# --- sharing -----------------------------------------------------------------------------


def test_one_block():
    """All leaves of a tree are in one block, with the values as they were, and locked."""
    td, before = make(), descriptors()
    inner, expected = td["n"], describe(make())[2]
    assert td.share_memory_() is td
    assert descriptors() == before + 1
    assert td.is_shared()
    assert td.is_locked
    assert td["n"] is inner
    assert inner.is_shared()
    blocks = {id(mapping_of(leaf)) for _, leaf in td._flat() if isinstance(leaf, torch.Tensor)}
    assert blocks == {id(mapping_of(td["j"].values))}
    for path, leaf in describe(td)[2].items():
        if isinstance(leaf, tuple) and len(leaf) == 6:
            assert leaf[0] == "MemoryMappedTensor"
            assert leaf[1:4] == expected[path][1:4]
            assert td[path].is_shared()
        else:
            assert leaf == expected[path]
    assert td["expanded"].stride() == (1, 0)
    assert td.share_memory_() is td


def test_a_thousand_leaves():
    """A thousand leaves take one descriptor, under a limit that is far below."""
    td = TensorDict({f"k{i}": torch.full((2,), i) for i in range(1000)}, [2])
    before = settled_descriptors()
    td.share_memory_()
    assert descriptors() == before + 1
    assert td["k999"].tolist() == [999, 999]
    del td
    assert descriptors() == before


def test_leaves_start_at_aligned_addresses():
    """Leaves of odd sizes do not move others to addresses that a dtype cannot have."""
    td = TensorDict({f"k{i}": torch.ones(i, dtype=torch.uint8) for i in range(1, 9)})
    td["z"] = torch.ones(3, dtype=torch.complex128)
    td.share_memory_()
    assert {leaf.data_ptr() % 64 for leaf in td.values()} == {0}


@pytest.mark.parametrize("data", [{}, {"s": "text"}, {"x": torch.empty(0)}], ids=str)
def test_nothing_to_share(data):
    """A container of nothing can be shared."""
    td = TensorDict(data).share_memory_()
    assert td.is_shared()
    assert list(td.keys()) == list(data)


def test_gradients_are_left_behind():
    """A parameter is shared as a tensor that requires no gradient."""
    td = TensorDict({"p": torch.nn.Parameter(torch.ones(2))}).share_memory_()
    assert type(td["p"]) is MemoryMappedTensor
    assert not td["p"].requires_grad


def test_what_cannot_be_shared(tmp_path):
    """Files, other devices and parts of locked containers are refused; nothing changes."""
    with pytest.raises(RuntimeError, match="memory-mapped, and other processes see it already"):
        make().memmap(tmp_path / "td").share_memory_()
    td = TensorDict({"x": torch.ones(1), "n": {"meta": torch.empty(1, device="meta")}})
    with pytest.raises(RuntimeError, match="leaf 'meta' is .*device meta: only dense tensors"):
        td.share_memory_()
    assert not td.is_locked
    assert type(td["x"]) is torch.Tensor
    locked = make().lock_()
    with pytest.raises(RuntimeError, match="share_memory_ would change .* part of"):
        locked["n"].share_memory_()
    with pytest.raises(RuntimeError, match="memmap_ would change .* part of"):
        locked["n"].memmap_(tmp_path / "n")
    outer = TensorDict({"inner": locked["n"]})
    for method in (outer.share_memory_, lambda: outer.memmap_(tmp_path / "n")):
        with pytest.raises(RuntimeError, match="would change the leaves of another locked"):
            method()
    own = TensorDict({"inner": make().memmap(tmp_path / "own")})
    assert own.share_memory_().is_shared()
    assert own["inner"].is_shared()
    assert locked.share_memory_().is_shared()
    with pytest.raises(RuntimeError, match="in shared memory.*Use td.memmap"):
        locked.memmap_(tmp_path / "other")
    assert locked.memmap(tmp_path / "other").is_memmap()


@pytest.mark.usefixtures("mounting")
def test_no_room(run):
    """Without room in /dev/shm sharing is an OSError, and the container is as it was."""
    program = """
        import subprocess, torch
        from mmtensor import TensorDict
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", "/dev/shm"], check=True)
        td = TensorDict({"x": torch.ones(1 << 20)})
        try:
            td.share_memory_()
        except OSError as error:
            print(error.errno, td.is_shared(), td.is_locked, type(td["x"]).__name__)
    """
    assert run(program, private_mounts=True) == f"{errno.ENOSPC} False False Tensor"


# --- to another process ------------------------------------------------------------------


def test_shared_containers_arrive_shared(child):
    """A shared container arrives in the same memory; what is written there is seen here."""
    td = make().share_memory_()
    for part in (td, td[1], td[0:2], td["n"]):
        before = describe(part)
        assert before[1][2]
        assert child.ask(part) == before
    assert td["x"].tolist() == [[7, 7]] * 3
    td.set_("x", torch.zeros(3, 2))
    child.ask(td[1])
    assert td["x"].tolist() == [[0, 0], [7, 7], [0, 0]]


def test_memory_mapped_containers_arrive_as_references(child, tmp_path):
    """A memory-mapped container arrives on the same files, with the same mode."""
    make().memmap(tmp_path / "td")
    for mode in ("r", "c", "r+"):
        td = TensorDict.load(tmp_path / "td", mode=mode)
        before = describe(td)
        assert child.ask(td) == before
        assert child.ask(td.exclude("x")[1:]) == describe(td.exclude("x")[1:])
    assert td["x"].tolist() == [[7, 7]] * 3


def test_views_of_memory_mapped_containers(child, tmp_path):
    """Views arrive locked and memory-mapped, as they left."""
    td = make().memmap(tmp_path / "td").exclude("j", "names").memmap(tmp_path / "other")
    for view in (td[1], td[0:2], td.unsqueeze(0), td["n"], td.unbind()[2]):
        before = describe(view)
        assert before[1][3]
        assert child.ask(view) == before


@pytest.mark.parametrize("count", [1, 100, 100_000], ids=["message", "small", "block"])
def test_regular_containers_arrive_by_value(child, count):
    """A regular container arrives with its values, unlocked; writes do not come back."""
    td = make()
    td["large"] = torch.arange(3 * count).view(3, count)
    # Jagged values that are in shared memory already travel as they are.
    before = describe(td)
    for _ in range(2):
        got = child.ask(td)
        assert got[:2] == before[:2]
        for path, leaf in got[2].items():
            assert leaf == before[2][path] or leaf[:5] == before[2][path][:5]
    assert td["x"].tolist() == [[0, 1], [2, 3], [4, 5]]
    assert child.ask(td.lock_())[1][1]


def test_gradients_and_subclasses_arrive(child):
    """Leaves that torch has its own ways for go those ways."""
    td = TensorDict({"p": torch.nn.Parameter(torch.ones(2)), "m": MemoryMappedTensor.ones(2)}, [2])
    described = child.ask(td)[2]
    assert described["p"][0] == "Parameter"
    assert described["p"][4]
    assert described["m"][0] == "MemoryMappedTensor"


def test_descriptors_are_closed(child):
    """A hundred containers leave no descriptor behind, here or there."""
    td, shared = make(), make().share_memory_()
    td["large"] = torch.zeros(3, 10_000)
    child.ask(td)
    child.ask(shared)
    here, there = descriptors(), child.descriptors
    for _ in range(50):
        child.ask(td)
        child.ask(shared)
    assert child.descriptors <= there + 1
    # The thread that hands descriptors out closes its own after the receiver has them.
    deadline = time.monotonic() + 20
    while descriptors() > here + 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert descriptors() <= here + 1


def test_torch_multiprocessing():
    """The queues of torch.multiprocessing carry containers as those of multiprocessing do."""
    child = Child("spawn", torch.multiprocessing)
    td = make().share_memory_()
    before = describe(td)
    assert child.ask(td) == before
    child.close()


def test_a_sender_may_forget():
    """A container can be dropped right after it was put; many can be on their way."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    for number in range(20):
        queue.put(TensorDict({"x": torch.full((100_000,), number)}).share_memory_())
    for number in range(20):
        assert queue.get(timeout=60)["x"].unique().tolist() == [number]
    queue.close()
    queue.join_thread()


def test_message_size(tmp_path):
    """A shared container of a hundred leaves is one short message; so is one on files."""
    td = TensorDict({f"k{i}": torch.ones(4) for i in range(100)}, [4])
    message = multiprocessing.reduction.ForkingPickler.dumps
    assert len(message(td.clone().share_memory_())) < 8000
    assert len(message(td.memmap(tmp_path / "td"))) < 25_000
    assert len(pickle.dumps(td.memmap(tmp_path / "td")[0:1])) < 25_000


@pytest.mark.parametrize("module", [pickle, cloudpickle])
def test_pickle_of_shared_memory(module):
    """Outside multiprocessing a shared container goes by value, and is regular then."""
    td = make().share_memory_()
    copy = pickle.loads(module.dumps(td))
    assert not copy.is_shared()
    assert not copy.is_locked
    copy["x"].zero_()
    assert td["x"].sum() == 15


@pytest.mark.parametrize("module", [pickle, cloudpickle])
def test_pickle_of_files(module, tmp_path):
    """A memory-mapped container pickles as references, by every pickler."""
    td = make().memmap(tmp_path / "td")
    copy = pickle.loads(module.dumps(td))
    assert describe(copy) == describe(td)
    copy["x"][0] = 9
    assert td["x"][0].tolist() == [9, 9]


def test_pickle_of_private_changes(tmp_path):
    """A container in mode c that was written to travels with its values, as a regular one."""
    make().memmap(tmp_path / "td")
    td = TensorDict.load(tmp_path / "td", mode="c")
    assert pickle.loads(pickle.dumps(td)).is_memmap()
    td["x"][0] = 9
    copy = pickle.loads(pickle.dumps(td))
    assert copy["x"][0].tolist() == [9, 9]
    assert not copy.is_memmap()
    assert not copy.is_locked


def test_pickle_of_what_was_replaced(tmp_path):
    """A container whose directory was saved over travels with its own values."""
    old = make().memmap(tmp_path / "td")
    changed = make()
    changed["x"].zero_()
    changed.memmap(tmp_path / "td")
    copy = pickle.loads(pickle.dumps(old))
    assert copy["x"].sum() == 15
    assert not copy.is_memmap()


def test_threads_make_leaves_at_once(tmp_path):
    """Threads that ask a view for its leaves at the same time all get the same values."""
    td = make().memmap(tmp_path / "td")
    for _ in range(20):
        view = td[0:2]
        with ThreadPoolExecutor(4) as pool:
            seen = list(pool.map(describe, [view] * 4))
        assert seen == [describe(view)] * 4


def test_nothing_stays_in_shared_memory():
    """No name appears in /dev/shm, however a container is shared and sent."""
    before = set(os.listdir("/dev/shm"))
    td = make().share_memory_()
    queue = multiprocessing.get_context("fork").SimpleQueue()
    queue.put(td)
    received = queue.get()
    assert set(os.listdir("/dev/shm")) <= before
    assert describe(received) == describe(td)
