"""map and map_iter: processes, threads, any executor, a dask cluster; and what goes wrong."""

import contextlib
import functools
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import cloudpickle
import map_functions as fn
import pytest
import torch
from conftest import ROOT, descriptors, settled_descriptors

from mmtensor import JaggedTensor, MapError, MemoryMappedTensor, ReadOnlyError, TensorDict, pool
from mmtensor.chunks import cut
from mmtensor.results import naming

pytestmark = pytest.mark.timeout(120)

ROWS = 9
X = torch.arange(ROWS).repeat_interleave(4).view(ROWS, 4).float()
# Seconds within which the death of a worker must be noticed.
SOON = 20


class ByValue(Executor):
    """An executor as loky's: it pickles with cloudpickle and knows nothing of descriptors."""

    def submit(self, function, /, *args, **kwargs):
        """Run at once what has come through a pickle, and send back the result so."""
        future = Future()
        function, args, kwargs = pickle.loads(cloudpickle.dumps((function, args, kwargs)))
        try:
            future.set_result(pickle.loads(cloudpickle.dumps(function(*args, **kwargs))))
        except Exception as error:  # noqa: BLE001  # as executors do
            future.set_exception(error)
        return future


@pytest.fixture(scope="module")
def forked():
    """Return an executor with processes that run already."""
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as executor:
        list(executor.map(abs, range(8)))
        yield executor


@pytest.fixture(scope="module")
def dask_executor():
    """Return the executor of a dask cluster with two worker processes on this machine."""
    distributed = pytest.importorskip("distributed", reason="needs the extra dask")
    with (
        distributed.LocalCluster(
            n_workers=2,
            threads_per_worker=1,
            processes=True,
            host="127.0.0.1",
            dashboard_address="127.0.0.1:0",
        ) as cluster,
        distributed.Client(cluster) as client,
    ):
        yield client.get_executor()


HOWS = ("inline", "threads", "fork", "running", "by value")
ELSEWHERE = ("spawn", "forkserver", "dask")


@pytest.fixture(params=HOWS)
def how(request):
    """Return the arguments that choose who does the work."""
    return _how(request, request.param)


@pytest.fixture(params=ELSEWHERE)
def elsewhere(request):
    """Return the arguments for workers that take seconds to start."""
    return _how(request, request.param)


def _how(request, name):
    if name == "inline":
        return {"num_workers": 0}
    if name == "threads":
        executor = ThreadPoolExecutor(2)
        request.addfinalizer(executor.shutdown)
        return {"executor": executor}
    if name == "running":
        return {"executor": request.getfixturevalue("forked")}
    if name == "by value":
        return {"executor": ByValue(), "num_workers": 2}
    if name == "dask":
        return {"executor": request.getfixturevalue("dask_executor")}
    return {"num_workers": 2, "mp_start_method": name}


def in_regular_memory(_):
    """Return the source in regular memory."""
    return TensorDict({"x": X.clone()}, [ROWS])


def on_files(directory):
    """Return the source memory-mapped."""
    return in_regular_memory(directory).memmap(directory / "source")


def in_shared_memory(directory):
    """Return the source in shared memory."""
    return in_regular_memory(directory).share_memory_()


SOURCES = (in_regular_memory, on_files, in_shared_memory)
FORK = {"num_workers": 2, "mp_start_method": "fork"}


def with_images(directory, sizes=(3, 0, 5)):
    """Return a memory-mapped source with a jagged leaf and text."""
    images = JaggedTensor.zeros([[n, 2] for n in sizes])
    return TensorDict(
        {"x": X[: len(sizes)], "image": images, "name": ["", "b", "cc"][: len(sizes)]},
        [len(sizes)],
    ).memmap(directory / "images")


def our_workers():
    """Return the processes of map that have not ended."""
    return [one for one in multiprocessing.active_children() if "mmtensor-map" in one.name]


# --- results -----------------------------------------------------------------------------


@pytest.mark.parametrize("source", SOURCES)
def test_tensordicts_are_stacked(how, source, tmp_path):
    """With chunksize=0 the TensorDicts for all elements are stacked, in order."""
    td = source(tmp_path)
    if isinstance(how.get("executor"), ByValue) and td.is_shared():
        with pytest.raises(ValueError, match="shared memory cannot go to the workers"):
            td.map(fn.double, chunksize=0, **how)
        return
    result = td.map(fn.double, chunksize=0, **how)
    assert type(result) is TensorDict
    assert result.batch_size == (ROWS,)
    assert torch.equal(result["y"], X * 2)
    assert not result.is_locked


@pytest.mark.parametrize("source", SOURCES[:2])
@pytest.mark.parametrize("size", [1, 2, 4, 9, 100])
def test_tensors_are_concatenated(how, source, size, tmp_path):
    """With chunks of several elements the tensors are concatenated, the last one shorter."""
    result = source(tmp_path).map(fn.total, chunksize=size, **how)
    assert type(result) is torch.Tensor
    assert torch.equal(result, X.sum(-1))


def test_nothing_comes_of_nothing(how, tmp_path):
    """The result is None where the function returns None."""
    assert on_files(tmp_path).map(fn.nothing, chunksize=0, **how) is None


def test_in_place_on_files(how, tmp_path):
    """What the function writes to a chunk of a memory-mapped TensorDict is on the file."""
    td = on_files(tmp_path)
    td.map(fn.negate, chunksize=2, **how)
    assert torch.equal(td["x"], -X)
    assert torch.equal(TensorDict.load_memmap(tmp_path / "source")["x"], -X)


def test_in_place_in_shared_memory(tmp_path):
    """What the function writes to a chunk of a shared TensorDict is seen by the caller."""
    td = in_shared_memory(tmp_path)
    td.map(fn.negate, chunksize=0, **FORK)
    assert torch.equal(td["x"], -X)


def test_in_place_in_regular_memory(tmp_path):
    """Processes have a copy of what is in regular memory; the caller's is not touched."""
    td = in_regular_memory(tmp_path)
    td.map(fn.negate, chunksize=0, **FORK)
    assert torch.equal(td["x"], X)


@pytest.mark.parametrize("chunksize", [0, 4])
def test_workers_write_to_out(how, chunksize, tmp_path):
    """With a memory-mapped out the results are there, and out is returned."""
    out = TensorDict({"y": torch.zeros(ROWS, 4)}, [ROWS]).memmap(tmp_path / "out")
    assert on_files(tmp_path).map(fn.double, chunksize=chunksize, out=out, **how) is out
    assert torch.equal(out["y"], X * 2)
    assert torch.equal(TensorDict.load_memmap(tmp_path / "out")["y"], X * 2)


@pytest.mark.parametrize("chunksize", [0, 4])
@pytest.mark.parametrize("kind", ["regular", "shared", "c"])
def test_out_in_memory(how, kind, chunksize, tmp_path):
    """Results reach an out that workers cannot write to, or only in memory."""
    out = TensorDict({"y": torch.zeros(ROWS, 4)}, [ROWS])
    if kind == "shared":
        out.share_memory_()
    elif kind == "c":
        out.memmap(tmp_path / "out")
        out = TensorDict.load_memmap(tmp_path / "out", mode="c")
    assert on_files(tmp_path).map(fn.double, chunksize=chunksize, out=out, **how) is out
    assert torch.equal(out["y"], X * 2)
    if kind == "c":
        assert not TensorDict.load_memmap(tmp_path / "out")["y"].any()


def test_tensor_as_out(how, tmp_path):
    """A tensor takes the results of a function that returns tensors."""
    out = MemoryMappedTensor.zeros(ROWS, filename=tmp_path / "out.bin")
    assert on_files(tmp_path).map(fn.total, chunksize=0, out=out, **how) is out
    assert torch.equal(out, X.sum(-1))


def test_workers_elsewhere(elsewhere, tmp_path):
    """Workers that were not forked give the same: results, written to out, and in place."""
    td = on_files(tmp_path)
    out = TensorDict({"y": torch.zeros(ROWS, 4)}, [ROWS]).memmap(tmp_path / "out")
    assert td.map(fn.double, chunksize=0, out=out, **elsewhere) is out
    assert torch.equal(out["y"], X * 2)
    assert torch.equal(td.map(fn.negate_and_total, chunksize=4, **elsewhere), -X.sum(-1))
    assert torch.equal(td["x"], -X)


def test_regular_memory_elsewhere(elsewhere, tmp_path):
    """Workers that were not forked get regular memory, and their exceptions come back."""
    td = in_regular_memory(tmp_path)
    seen = []
    results = td.map_iter(fn.fail_at_five, chunksize=1, **elsewhere)
    with pytest.raises(MapError, match=r"chunk 5 of 9 .*: ValueError: no fives") as caught:
        seen.extend(results)
    assert all(torch.equal(one, X[n : n + 1]) for n, one in enumerate(seen))
    assert type(caught.value.__cause__) is ValueError


def test_shared_memory_in_spawned_processes(tmp_path):
    """A shared TensorDict reaches spawned workers by its descriptor, not as a copy."""
    td = in_shared_memory(tmp_path)
    td.map(fn.negate, chunksize=0, num_workers=2, mp_start_method="spawn")
    assert torch.equal(td["x"], -X)


def test_shared_memory_cannot_go_to_a_cluster(dask_executor, tmp_path):
    """A shared TensorDict is refused by workers that would get a copy; its clone is not."""
    td = in_shared_memory(tmp_path)
    with pytest.raises(ValueError, match=r"Memory-map it.*pass td.clone\(\)"):
        td.map(fn.double, chunksize=0, executor=dask_executor)
    result = td.clone().map(fn.double, chunksize=0, executor=dask_executor)
    assert torch.equal(result["y"], X * 2)


def test_out_in_shared_memory_with_a_cluster(dask_executor, tmp_path):
    """Results of a cluster are written to an out in shared memory by the caller."""
    out = TensorDict({"y": torch.zeros(ROWS, 4)}, [ROWS]).share_memory_()
    on_files(tmp_path).map(fn.double, chunksize=0, out=out, executor=dask_executor)
    assert torch.equal(out["y"], X * 2)


def test_lambda_on_a_cluster(dask_executor, tmp_path):
    """A lambda goes to an executor that pickles with cloudpickle."""
    result = on_files(tmp_path).map(lambda td: td["x"] + 1, chunksize=0, executor=dask_executor)
    assert torch.equal(result, X + 1)


def test_nested_results_with_text(how, tmp_path):
    """Nested leaves are stacked, and the strings for all elements become a list."""
    result = on_files(tmp_path).map(fn.nested, chunksize=0, **how)
    assert torch.equal(result["n", "x"], X + 1)
    assert result["t"] == [f"row {n}" for n in range(ROWS)]


@pytest.mark.parametrize("chunksize", [0, 2, None])
def test_another_dimension(how, chunksize, tmp_path):
    """Chunks along another dimension are joined along it."""
    td = TensorDict({"x": torch.arange(24).view(2, 4, 3)}, [2, 4]).memmap(tmp_path / "td")
    result = td.map(fn.double, 1, chunksize=chunksize, **how)
    assert result.batch_size == (2, 4)
    assert torch.equal(result["y"], td["x"] * 2)
    out = TensorDict({"y": torch.zeros(2, 4, 3)}, [2, 4]).memmap(tmp_path / "out")
    td.map(fn.double, -1, chunksize=chunksize, out=out, **how)
    assert torch.equal(out["y"], (td["x"] * 2).float())


def test_jagged_and_text_leaves(how, tmp_path):
    """The function gets elements of jagged leaves and lists of strings."""
    result = with_images(tmp_path).map(fn.length_of_image, chunksize=0, **how)
    assert result.tolist() == [[6, 0], [0, 1], [10, 2]]


def test_jagged_leaf_is_filled_in_place(how, tmp_path):
    """Workers fill the elements of a jagged leaf on a file in place."""
    td = with_images(tmp_path)
    td.map(fn.fill_image, chunksize=0, **how)
    again = TensorDict.load_memmap(tmp_path / "images")["image"]
    assert again.values.tolist() == [0.0] * 6 + [2.0] * 10


def test_jagged_leaf_of_out(how, tmp_path):
    """Results of different shapes are written to a jagged leaf of out."""
    td = with_images(tmp_path)
    out = td.select("image").memmap(tmp_path / "out")
    td.map(fn.image_of_ones, chunksize=0, out=out, **how)
    assert out["image"].values.tolist() == [1.0] * 16


@pytest.mark.parametrize("source", SOURCES)
def test_chunks_are_views_as_any_other(source, tmp_path):
    """A chunk is locked, memory-mapped and shared as the TensorDict is, whoever gets it."""
    td = source(tmp_path)
    expected = fn.facts(td[:3]).tolist()
    with ThreadPoolExecutor(2) as executor:
        for options in ({"executor": executor}, FORK):
            chunks = list(td.map_iter(fn.facts, chunksize=3, **options))
            assert [chunk.tolist() for chunk in chunks] == [expected] * 3


def test_regular_chunks_in_spawned_processes(tmp_path):
    """Chunks of regular memory are unlocked in spawned workers, where they are in a block."""
    (chunk,) = in_regular_memory(tmp_path).map_iter(
        fn.facts, num_workers=1, mp_start_method="spawn"
    )
    assert chunk.tolist() == [0, 0, 0, 1, ROWS]


def test_order_does_not_depend_on_who_is_first(how, tmp_path):
    """Results stand in the order of the chunks, however long each took."""
    result = on_files(tmp_path).map(fn.slow_if_even, chunksize=0, **how)
    assert result.tolist() == list(range(ROWS))


def test_many_elements(how):
    """Thousands of elements come back complete and in order."""
    x = torch.arange(3000.0).view(-1, 1)
    result = TensorDict({"x": x}, [3000]).map(fn.double, chunksize=0, **how)
    assert torch.equal(result["y"], x * 2)


def test_large_results(how):
    """Results too large for a message come back complete and in order."""
    x = torch.arange(40.0).view(-1, 1).expand(-1, 50_000)
    result = TensorDict({"x": x}, [40]).map(fn.double, chunksize=0, **how)
    assert torch.equal(result["y"], x * 2)


def test_as_many_chunks_as_workers(tmp_path):
    """Without a size there are as many chunks as workers, and num_chunks says how many."""
    td = on_files(tmp_path)
    assert [len(part) for part in td.map_iter(fn.total, num_workers=2)] == [5, 4]
    parts = td.map_iter(fn.total, num_workers=2, num_chunks=4)
    assert [len(part) for part in parts] == [3, 3, 3]


def test_no_elements(how):
    """Without elements, the function gets one empty chunk, or is not called for elements."""
    td = TensorDict({"x": torch.zeros(0, 4)}, [0])
    assert td.map(fn.total, chunksize=3, **how).shape == (0,)
    assert td.map(fn.total, chunksize=0, **how) is None
    assert list(td.map_iter(fn.total, chunksize=0, **how)) == []


def test_random_numbers(tmp_path):
    """Every chunk has random numbers of its own, which the seed of the caller decides."""
    td = on_files(tmp_path)
    torch.manual_seed(3)
    first = td.map(fn.draw, chunksize=0, **FORK)
    torch.manual_seed(3)
    second = td.map(fn.draw, chunksize=0, num_workers=1, mp_start_method="fork")
    assert torch.equal(first, second)
    assert len(set(first.tolist())) == ROWS
    assert not torch.equal(first, td.map(fn.draw, chunksize=0, **FORK))


def test_workers_have_one_thread(tmp_path):
    """Torch uses one thread in each worker process that map starts."""
    assert on_files(tmp_path).map(fn.threads, chunksize=0, **FORK).tolist() == [1] * ROWS


def test_progress_bar(how, tmp_path, capfd):
    """A bar on stderr counts all chunks, if asked for."""
    td = on_files(tmp_path)
    td.map(fn.nothing, chunksize=0, **how)
    assert capfd.readouterr().err == ""
    td.map(fn.nothing, chunksize=0, pbar=True, **how)
    assert f"{ROWS}/{ROWS}" in capfd.readouterr().err


# --- what travels ------------------------------------------------------------------------


class Recording(Executor):
    """Notes how large the pickled arguments of each task are."""

    def __init__(self, executor):
        self.executor = executor
        self.sizes = []

    def submit(self, function, /, *args, **kwargs):
        """Hand on a task."""
        self.sizes.append(len(pickle.dumps(args)))
        return self.executor.submit(function, *args, **kwargs)


def test_the_source_crosses_once(forked, tmp_path):
    """Workers of a running executor get the source with the first tasks, then only integers."""
    leaves = {f"leaf {n}": torch.zeros(20, 2) for n in range(50)}
    td = TensorDict({"x": torch.zeros(20, 1), **leaves}, [20]).memmap(tmp_path / "td")
    recording = Recording(forked)
    td.map(fn.slow_if_even, chunksize=0, executor=recording, num_workers=2)
    large = [size for size in recording.sizes if size > 200]
    # Two workers and four tasks under way, some of which may come back for want of it.
    assert len(recording.sizes) > 6
    assert len(large) <= 6
    assert recording.sizes[-1] < 100


def test_few_messages(forked, tmp_path):
    """A thousand quick elements are a few tasks."""
    td = TensorDict({"x": torch.zeros(1000, 2)}, [1000]).memmap(tmp_path / "td")
    recording = Recording(forked)
    td.map(fn.double, chunksize=0, executor=recording, num_workers=2)
    assert len(recording.sizes) < 200


@pytest.mark.parametrize("source", SOURCES)
def test_no_descriptor_is_left(forked, source, tmp_path):
    """After map as many descriptors are open as before."""
    td = source(tmp_path)
    for options in (FORK, {"executor": forked}):
        td.map(fn.double, chunksize=0, **options)
        before = settled_descriptors()
        td.map(fn.double, chunksize=0, **options)
        # multiprocessing closes what it has handed on in a thread of its own: what `before`
        # still counts may be closed since, and what was handed on since may be open still.
        deadline = time.monotonic() + SOON
        while descriptors() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert descriptors() <= before


@pytest.mark.parametrize("chunksize", [0, 1])
def test_views_travel_without_what_they_are_views_of(chunksize):
    """A tensor that shows a part of regular memory comes back as that part only."""
    x = torch.arange(40.0).view(-1, 1).expand(-1, 1000).contiguous()
    td = TensorDict({"x": x}, [40])
    parts = list(td.map_iter(fn.view, chunksize=chunksize, **FORK))
    assert torch.equal(torch.cat(parts).view(40, 1000), x)
    assert max(part.untyped_storage().nbytes() for part in parts) < x.nbytes


def test_map_from_a_thread(tmp_path):
    """Threads may call map, and their workers outlive them no more than others do."""
    td = on_files(tmp_path)
    with ThreadPoolExecutor(2) as callers:
        calls = [callers.submit(td.map, fn.double, chunksize=0, **FORK) for _ in range(3)]
        assert all(torch.equal(call.result()["y"], X * 2) for call in calls)
    assert not our_workers()


def test_map_within_map(tmp_path):
    """A function may call map itself."""
    td = on_files(tmp_path)
    assert torch.equal(td.map(fn.map_again, chunksize=5, **FORK), X.sum(-1))


def test_no_process_is_left(tmp_path):
    """The processes that map has started have ended when it returns."""
    pids = on_files(tmp_path).map(fn.process, chunksize=0, **FORK)
    assert set(pids.tolist()) != {os.getpid()}
    assert not our_workers()
    assert not any(_is_alive(pid) for pid in set(pids.tolist()))


def _is_alive(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


# --- errors ------------------------------------------------------------------------------


@pytest.mark.parametrize("chunksize", [0, 1])
def test_an_exception_names_the_chunk(how, chunksize, tmp_path):
    """What the function raises surfaces as the cause of an error that names the chunk."""
    with pytest.raises(
        MapError, match=r"fn failed for chunk 5 of 9 \(element.*\): ValueError: no fives"
    ) as caught:
        on_files(tmp_path).map(fn.fail_at_five, chunksize=chunksize, **how)
    assert caught.value.chunk == 5
    assert type(caught.value.__cause__) is ValueError
    assert not our_workers()


def test_the_traceback_of_the_worker_is_kept(tmp_path):
    """The exception of another process has its traceback there as a note."""
    with pytest.raises(MapError, match="no fives") as caught:
        on_files(tmp_path).map(fn.fail_at_five, chunksize=0, **FORK)
    (note,) = caught.value.__cause__.__notes__
    assert 'raise ValueError("no fives")' in note


@pytest.mark.parametrize("running", [False, True])
def test_an_exception_that_does_not_travel(forked, running, tmp_path):
    """An exception whose constructor takes other arguments arrives, attributes and all."""
    options = {"executor": forked} if running else FORK
    with pytest.raises(MapError, match=r"chunk \d of 9 .*OddlyMade: first") as caught:
        on_files(tmp_path).map(fn.fail_oddly, chunksize=0, **options)
    assert type(caught.value.__cause__) is fn.OddlyMade
    assert caught.value.__cause__.two == "second"
    with pytest.raises(MapError, match=r"chunk \d of 9 .*Unspeakable$") as caught:
        on_files(tmp_path).map(fn.fail_unspeakably, chunksize=0, **options)
    assert type(caught.value.__cause__) is RuntimeError


def test_exit_in_a_worker(tmp_path):
    """sys.exit in the function is an error as any other."""
    with pytest.raises(MapError, match=r"chunk \d of 9 .*SystemExit: 7") as caught:
        on_files(tmp_path).map(fn.leave, chunksize=0, **FORK)
    assert type(caught.value.__cause__) is SystemExit


@pytest.mark.parametrize(
    ("function", "how_it_ended"),
    [(fn.exit_hard, "exit code 3"), (fn.kill_itself, "killed by signal 9")],
)
def test_a_worker_dies(function, how_it_ended, tmp_path):
    """A worker that dies is an error within seconds that says how; no process is left."""
    start = time.monotonic()
    with pytest.raises(MapError, match=f"{how_it_ended}, at work on chunk"):
        on_files(tmp_path).map(function, chunksize=0, **FORK)
    assert time.monotonic() - start < SOON
    assert not our_workers()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_the_chunk_of_a_dead_worker_is_named(method, tmp_path):
    """The error knows which chunk killed the worker, whatever else was in its task."""
    x = torch.arange(1000.0).view(-1, 1)
    td = TensorDict({"x": x}, [1000]).memmap(tmp_path / "td")
    with pytest.raises(MapError, match=r"exit code 3, at work on chunk 5 of 1000") as caught:
        td.map(fn.exit_at_five, chunksize=0, num_workers=2, mp_start_method=method)
    assert caught.value.chunk == 5


def test_results_of_tasks_that_end_early(how):
    """Chunks that a task has not come to in its time are done by others, in order."""
    x = torch.arange(200.0).view(-1, 1)
    result = TensorDict({"x": x}, [200]).map(fn.sometimes_slow, chunksize=0, **how)
    assert torch.equal(result, x * 2)


@pytest.mark.parametrize("function", [fn.exit_hard, fn.kill_itself])
def test_a_worker_of_an_executor_dies(function, tmp_path):
    """The death of a worker of somebody else's executor is an error within seconds."""
    start = time.monotonic()
    context = multiprocessing.get_context("fork")
    with (
        ProcessPoolExecutor(2, mp_context=context) as executor,
        pytest.raises(MapError, match="a worker of map was lost: .*terminated abruptly"),
    ):
        on_files(tmp_path).map(function, chunksize=0, executor=executor)
    assert time.monotonic() - start < SOON


@pytest.mark.slow
def test_a_worker_of_a_cluster_dies(dask_executor, tmp_path):
    """A cluster tries again with other workers, and then it is an error that names the chunk."""
    td = on_files(tmp_path)
    with pytest.raises(MapError, match=r"KilledWorker: .*at work on chunk"):
        td.map(fn.exit_hard, chunksize=0, executor=dask_executor)
    assert torch.equal(td.map(fn.total, chunksize=0, executor=dask_executor), X.sum(-1))


@pytest.mark.parametrize("method", ["map", "map_iter"])
def test_results_that_an_executor_cannot_send(forked, method, tmp_path):
    """A result that somebody else's executor cannot pickle is an error that names the chunks."""
    td = on_files(tmp_path)
    with pytest.raises(MapError, match=r"Can't (pickle|get) local object.*at work on chunk"):
        list(getattr(td, method)(fn.unpicklable, chunksize=0, executor=forked))


def test_a_lambda_works_in_threads(tmp_path):
    """Threads take any function."""
    with ThreadPoolExecutor(2) as executor:
        result = on_files(tmp_path).map(lambda td: td["x"] + 1, chunksize=0, executor=executor)
    assert torch.equal(result, X + 1)


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_a_lambda_does_not_go_to_processes(method, tmp_path):
    """A function that cannot be pickled is refused with what there is instead."""
    with pytest.raises(TypeError, match=r"fn must be picklable .*top of a module.*ThreadPool"):
        on_files(tmp_path).map(lambda td: td, num_workers=2, mp_start_method=method)


def test_a_lambda_does_not_go_to_running_processes(forked, tmp_path):
    """A function that cannot be pickled is refused before anything is sent."""
    with pytest.raises(TypeError, match=r"cloudpickle, such as loky.*or dask's"):
        on_files(tmp_path).map(lambda td: td, executor=forked)


def test_a_partial_with_data_goes_to_processes(tmp_path):
    """A function with data in it is looked at without a copy of the data, and works."""
    before = settled_descriptors()
    weights = MemoryMappedTensor.from_tensor(torch.arange(4.0))
    function = functools.partial(_weigh, weights=weights)
    result = on_files(tmp_path).map(function, chunksize=0, **FORK)
    assert torch.equal(result, X @ torch.arange(4.0))
    del weights, function
    assert descriptors() == before


def _weigh(td, weights):
    return td["x"] @ weights


def test_mixed_results(how, tmp_path):
    """None for some chunks and something for others is an error."""
    with pytest.raises(TypeError, match=r"must fit together, but for chunk \d of 9 .*None"):
        on_files(tmp_path).map(fn.mixed, chunksize=0, **how)


def test_results_of_another_kind(how, tmp_path):
    """What is neither a tensor nor a TensorDict cannot be joined."""
    with pytest.raises(TypeError, match="or None, got str"):
        on_files(tmp_path).map(fn.words, chunksize=0, **how)


def test_results_of_different_shapes(how, tmp_path):
    """Results that cannot be stacked are an error, also where each worker could."""
    message = (
        r"the results of fn must fit together, but for chunk \d of 9.*it returned a tensor of "
    )
    with pytest.raises(MapError, match=message + r"\[\d\], and for chunk \d of 9"):
        on_files(tmp_path).map(fn.first_numbers, chunksize=0, **how)


@pytest.mark.parametrize(
    ("function", "error", "message"),
    [
        (
            fn.odd_shape,
            MapError,
            (
                r"chunk 5 of 9 .*a tensor of \[5\], and for .*a tensor of \[4\]"
                # where a task had these two alone, nobody knows which is the odd one
                r"|chunk 6 of 9 .*a tensor of \[4\], and for chunk 5 of 9 .*a tensor of \[5\]"
            ),
        ),
        (fn.odd_none, TypeError, r"chunk 5 of 9 .*it returned None, and .*a tensor of \[4\]"),
        (
            fn.odd_keys,
            MapError,
            (
                r"chunk 5 of 9 .*a TensorDict of \[\] with 'z' of \[4\], and .* with 'y' of \[4\]"
                r"|chunk 6 of 9 .* with 'y' of \[4\], and for chunk 5 of 9 .* with 'z' of \[4\]"
            ),
        ),
    ],
)
def test_the_result_that_does_not_fit_the_others(how, tmp_path, function, error, message):
    """The one element whose result is unlike the others is named."""
    with pytest.raises(error, match=message):
        on_files(tmp_path).map(function, chunksize=0, **how)


def test_results_that_cannot_be_received(tmp_path):
    """A reference to a file that is gone by then is an error of fn's, not of the worker."""
    with pytest.raises(MapError, match="what it returned cannot be received: .*No such file"):
        on_files(tmp_path).map(functools.partial(fn.removed_file, tmp_path), chunksize=0, **FORK)


def test_results_that_cannot_be_sent(tmp_path):
    """A result that cannot be pickled is an error that names where it comes from."""
    with pytest.raises(MapError, match=r"chunk \d of 9 .*what it returned cannot be sent"):
        list(on_files(tmp_path).map_iter(fn.unpicklable, chunksize=0, **FORK))


@pytest.mark.parametrize("kind", ["files", "regular"])
def test_results_that_do_not_fit_out(how, kind, tmp_path):
    """A result that does not fit into out is an error that names the chunk and the leaf."""
    out = TensorDict({"y": torch.zeros(ROWS, 7)}, [ROWS])
    if kind == "files":
        out = out.memmap(tmp_path / "out")
    with pytest.raises(MapError, match=r"chunk \d of 9.*leaf 'y' takes shape \[7\]"):
        on_files(tmp_path).map(fn.double, chunksize=0, out=out, **how)


@pytest.mark.parametrize("kind", ["files", "regular"])
def test_out_that_cannot_hold_the_results(how, kind, tmp_path):
    """Fractions are not cut off in an out of integers, and integers become fractions."""
    out = TensorDict({"y": torch.zeros(ROWS, 4, dtype=torch.int64)}, [ROWS])
    if kind == "files":
        out = out.memmap(tmp_path / "out")
    message = r"chunk \d of 9.*leaf 'y' is of torch.float32, which torch.int64 of out cannot hold"
    with pytest.raises(MapError, match=message):
        on_files(tmp_path).map(fn.double, chunksize=0, out=out, **how)
    assert not out["y"].any()
    with pytest.raises(MapError, match=r"the result is of torch.float32, which torch.int64"):
        on_files(tmp_path).map(fn.total, chunksize=0, out=torch.zeros(ROWS).long(), **how)
    wide = torch.zeros(ROWS, dtype=torch.float64)
    assert on_files(tmp_path).map(fn.total, chunksize=0, out=wide, **how) is wide
    assert torch.equal(wide, X.sum(-1).double())


@pytest.mark.parametrize("chunksize", [0, 2, ROWS])
def test_results_of_another_kind_than_out(how, chunksize, tmp_path):
    """A tensor is not written to every leaf of out, nor a TensorDict to a tensor."""
    td = on_files(tmp_path)
    out = TensorDict({"x": torch.zeros(ROWS), "y": torch.zeros(ROWS, 4)}, [ROWS])
    message = r"the result for chunk \d of \d.*cannot be written to out: with out=, fn must return"
    with pytest.raises(MapError, match=message):
        td.map(fn.total, chunksize=chunksize, out=out, **how)
    assert not out["y"].any()
    with pytest.raises(MapError, match=message):
        td.map(fn.double, chunksize=chunksize, out=torch.zeros(ROWS, 4), **how)


def test_small_results_are_not_broadcast_together(how, tmp_path):
    """As many scalars as a row of out has columns are not taken for one row."""
    out = torch.zeros(3, 3)
    on_files(tmp_path)[:3].map(fn.slow_if_even, chunksize=0, out=out, **how)
    assert out.tolist() == [[0, 0, 0], [1, 1, 1], [2, 2, 2]]


def test_none_does_not_fit_out(how, tmp_path):
    """With out, a function that returns nothing is an error."""
    out = TensorDict({"y": torch.zeros(ROWS, 4)}, [ROWS])
    with pytest.raises(MapError, match=r"chunk \d of 9.*with out=, fn must return a tensor"):
        on_files(tmp_path).map(fn.nothing, chunksize=0, out=out, **how)


def test_read_only_out_is_refused(tmp_path):
    """An out that was opened read-only is refused before the function is called."""
    TensorDict({"y": torch.zeros(ROWS, 4)}, [ROWS]).memmap(tmp_path / "out")
    out = TensorDict.load_memmap(tmp_path / "out", mode="r")
    with pytest.raises(ReadOnlyError, match="leaf 'y' of out"):
        on_files(tmp_path).map(fn.double, chunksize=0, out=out, **FORK)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"chunksize": 1, "num_chunks": 2}, ValueError, "give chunksize or num_chunks, got both"),
        ({"chunksize": -1}, ValueError, "chunksize must be an integer of 0 or more, got -1"),
        ({"num_chunks": 0}, ValueError, "num_chunks must be an integer of 1 or more, got 0"),
        ({"num_workers": -1}, ValueError, "num_workers must be an integer of 0 or more, got -1"),
        ({"dim": 1}, IndexError, "dimension 1 is out of range for 1 batch"),
        ({"out": torch.zeros(4)}, ValueError, r"must have size 9.*got shape \[4\]"),
        ({"out": [1]}, TypeError, "out must be a TensorDict or a tensor, got <class 'list'>"),
        ({"executor": 4}, TypeError, "executor must be a concurrent.futures.Executor"),
        ({"fn": 3}, TypeError, "fn must be callable, got 3"),
        ({"mp_start_method": "no"}, ValueError, "cannot find context for 'no'"),
        ({"mp_start_method": "fork", "executor": ByValue()}, ValueError, "leave it out with"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_wrong_arguments(arguments, error, message, tmp_path):
    """A wrong argument is an error that says what is wrong with it."""
    with pytest.raises(error, match=message):
        on_files(tmp_path).map(**{"fn": fn.nothing, **arguments})


def test_an_unpickled_class_is_whole(tmp_path, run):
    """Where a TensorDict came by pickle and nothing was imported, its methods are there."""
    program = """
        import pickle, sys
        td = pickle.loads(bytes.fromhex(sys.argv[1]))
        assert "mmtensor.parallel" not in sys.modules
        print(list(td.map_iter(len, chunksize=4, num_workers=0)), len(td.batches(4)))
        """
    assert run(program, pickle.dumps(on_files(tmp_path)).hex()) == "[4, 4, 1] 3"


def test_without_batch_dimensions():
    """What has no batch dimension cannot be cut."""
    with pytest.raises(RuntimeError, match="without batch dimensions cannot be cut"):
        TensorDict({"x": torch.zeros(3)}).map(fn.nothing)


def test_an_executor_that_was_shut_down(tmp_path):
    """An executor that takes no more work says so itself."""
    executor = ThreadPoolExecutor(1)
    executor.shutdown()
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        on_files(tmp_path).map(fn.nothing, executor=executor)


# --- map_iter ----------------------------------------------------------------------------


@pytest.mark.parametrize("chunksize", [0, 2])
def test_results_come_one_by_one(how, chunksize, tmp_path):
    """map_iter yields the result for each chunk, in order."""
    results = list(on_files(tmp_path).map_iter(fn.double, chunksize=chunksize, **how))
    join = torch.stack if chunksize == 0 else torch.cat
    assert torch.equal(join(results)["y"], X * 2)


def test_anything_can_be_yielded(how, tmp_path):
    """map_iter yields whatever the function returns."""
    td = on_files(tmp_path)
    assert list(td.map_iter(fn.words, chunksize=0, **how)) == [f"row {n}" for n in range(ROWS)]
    shapes = [tuple(one.shape) for one in td.map_iter(fn.first_numbers, chunksize=0, **how)]
    assert shapes == [(n + 1,) for n in range(ROWS)]
    assert list(td.map_iter(fn.nothing, chunksize=0, **how)) == [None] * ROWS


@pytest.mark.parametrize("options", [FORK, {"num_workers": 0}])
def test_the_first_result_does_not_wait_for_the_last(options, tmp_path):
    """The first result is there before the last chunk is begun, and few are worked ahead."""
    td = TensorDict({"x": torch.zeros(400, 1)}, [400]).memmap(tmp_path / "td")
    iterator = td.map_iter(_mark_slowly, chunksize=0, **options)
    next(iterator)
    assert int(td["x"].count_nonzero()) < 100
    iterator.close()
    done = int(td["x"].count_nonzero())
    time.sleep(0.1)
    assert int(td["x"].count_nonzero()) == done
    assert not our_workers()


def _mark_slowly(td):
    time.sleep(0.01)
    td.set_("x", torch.ones(1))
    return td["x"].clone()


def test_nothing_starts_before_the_first_result_is_asked_for(tmp_path):
    """An iterator that nobody asks does nothing."""
    iterator = on_files(tmp_path).map_iter(fn.double, **FORK)
    assert not our_workers()
    iterator.close()


def test_an_iterator_that_is_dropped_leaves_nothing(tmp_path):
    """Workers end when the iterator is dropped half-way."""
    for _ in on_files(tmp_path).map_iter(fn.slow_if_even, chunksize=0, **FORK):
        break
    assert not our_workers()


# --- signals -----------------------------------------------------------------------------

_PROGRAM = """
import signal, sys, torch
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
import map_functions as fn
from mmtensor import TensorDict
td = TensorDict({"x": torch.zeros(4, 2)}, [4]).memmap(sys.argv[1])
if __name__ == "__main__":
    print("ready", flush=True)
    td.map(fn.sleep_long, chunksize=0, num_workers=2, mp_start_method="fork")
"""


def _workers_of(pid):
    return [int(one) for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _gone(pids):
    deadline = time.monotonic() + SOON
    while any(_is_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(_is_alive(pid) for pid in pids)


@pytest.mark.parametrize("to_all", [False, True])
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_workers_end_with_the_caller(sent, to_all, tmp_path):
    """Ctrl-C ends the caller and its workers, and so does its death, whoever gets the signal."""
    program = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(tmp_path / "td")],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert program.stdout.readline() == "ready\n"
        deadline = time.monotonic() + SOON
        while len(workers := _workers_of(program.pid)) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(workers) == 2
        time.sleep(0.3)  # until they are at work
        if to_all and sent == signal.SIGINT:
            os.killpg(program.pid, sent)
        else:
            program.send_signal(sent)
        _, errors = program.communicate(timeout=SOON)
        assert _gone(workers)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
    if sent == signal.SIGINT:
        assert errors.count("Traceback") == 1
        assert errors.rstrip().endswith("KeyboardInterrupt")
    assert program.returncode != 0


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(
    ("result", "what"),
    [
        (torch.tensor(1.0), r"a tensor of shape \(\)"),
        (TensorDict({"y": torch.ones(2)}, []), r"a TensorDict with batch size \(\)"),
    ],
)
def test_results_without_the_dimension(result, what, workers):
    """Chunks cannot be concatenated along a dimension that results lack; it says what can."""
    td = TensorDict({"x": torch.arange(6.0)}, [6])
    function = functools.partial(fn.constant, result)
    with pytest.raises(RuntimeError, match=rf"returned {what}.*chunksize=0"):
        td.map(function, chunksize=3, num_workers=workers)


def test_workers_in_the_place_of_the_dimension():
    """The second argument is the dimension."""
    td = TensorDict({"x": torch.arange(6.0)}, [6])
    with pytest.raises(IndexError, match="dim: dimension 4 is out of range.*num_workers="):
        td.map(fn.double, 4)


@pytest.mark.parametrize("function", [fn.uneven, fn.uneven_tree])
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("count", [8, 64])
def test_results_of_another_length_than_their_chunk(function, workers, count):
    """With `out` that is an error, and no row of another chunk is written over."""
    td = TensorDict({"i": torch.arange(count)}, [count])
    out = MemoryMappedTensor.full((count,), -1.0)
    into = out if function is fn.uneven else TensorDict({"y": out}, [count]).share_memory_()
    with pytest.raises(MapError, match=r"chunk \d+ of"):
        td.map(function, chunksize=2, out=into, num_workers=workers)
    held = out if function is fn.uneven else into["y"]
    written = {int(start): row.tolist() for start, row in enumerate(held.view(-1, 2))}
    # One row is broadcast to two, as an assignment does.
    assert all(row in ([-1.0, -1.0], [2.0 * at, 2.0 * at]) for at, row in written.items())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("chunksize", [0, 5])
def test_results_of_several_dtypes(workers, chunksize):
    """They become what one stack or cat of all of them makes, however they are grouped."""
    td = TensorDict({"i": torch.arange(200)}, [200])
    function = fn.of_three_dtypes
    parts = [td[i] for i in range(200)] if chunksize == 0 else td.split(5)
    results = [function(part) for part in parts]
    expected = torch.stack(results) if chunksize == 0 else torch.cat(results)
    found = td.map(function, chunksize=chunksize, num_workers=workers)
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)
    one_by_one = list(td.map_iter(function, chunksize=chunksize, num_workers=workers))
    assert [x.dtype for x in one_by_one] == [x.dtype for x in results]
    assert all(torch.equal(*pair) for pair in zip(one_by_one, results, strict=True))
    out = MemoryMappedTensor.zeros(200, dtype=torch.float64)
    td.map(function, chunksize=chunksize, out=out, num_workers=workers)
    assert out.tolist() == [float(x) for result in results for x in result.reshape(-1)]


def test_worker_killed_in_the_middle_of_a_message(monkeypatch):
    """The pipe says so with another error than between two messages."""

    def cut_off(_):
        raise OSError("got end of file during message")

    monkeypatch.setattr(pool, "receive", cut_off)
    td = TensorDict({"x": torch.arange(5, 15)}, [10])
    with pytest.raises(MapError, match="killed by signal 9"):
        td.map(fn.kill_itself, chunksize=0, num_workers=1)


@pytest.mark.parametrize("odd", range(4))
def test_the_odd_one_of_many_is_named(odd):
    """Also where it comes first, and the others do not fit it."""
    place = cut(TensorDict({"x": torch.arange(4)}, [4]), 0, 0, None, 1)
    pieces = [torch.zeros(2 if number == odd else 3) for number in range(4)]
    message = rf"chunk {odd} of 4 .* it returned a tensor of \[2\], and for .* a tensor of \[3\]"
    with (
        pytest.raises(MapError, match=message) as caught,
        naming(place, range(4), pieces, torch.stack),
    ):
        torch.stack(pieces)
    assert caught.value.chunk == odd
