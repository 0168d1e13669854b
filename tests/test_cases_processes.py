"""Things that went wrong for people who send such tensors between processes."""

import os
import sys
from multiprocessing.shared_memory import SharedMemory

import pytest
import torch
from processes import Child, all_facts, facts, values

import mmtensor
from mmtensor import MemoryMappedTensor

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize("library", ["multiprocessing", "torch.multiprocessing"])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_case_4(tmp_path, method, library):
    """Views put into a queue reach the consumer with their values, on the same file."""
    m = MemoryMappedTensor.from_tensor(torch.arange(20.0), filename=tmp_path / "m.bin")
    child = Child(method, library)
    views = [
        m[:10].view(2, 5),
        m[:10].view(2, 5).T,
        m.unsqueeze(0),
        m.narrow(0, 3, 4),
        m.detach(),
    ]
    for view in views:
        child.put(all_facts, [view])
    for view in views:
        (arrived,), _ = child.get()
        assert arrived == facts(view)
        assert arrived[1].path == str(tmp_path / "m.bin")
    assert child.close() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /dev/shm")
def test_case_11(run):
    """A block that an unrelated process attached to by name survives that process's exit."""
    block = SharedMemory(create=True, size=24)
    try:
        program = """
            import sys
            from mmtensor import MemoryMappedTensor as M
            m = M.from_shared_memory(sys.argv[1], "int64", 3)
            m[1] = 7
            print(m.tolist())
        """
        assert run(program, block.name) == "[0, 7, 0]"  # and nothing on stderr
        assert block.name in os.listdir("/dev/shm")
        m = MemoryMappedTensor.from_shared_memory(block, "int64", 3)
        assert values(m) == [0, 7, 0]
    finally:
        block.close()
        block.unlink()


@pytest.mark.parametrize("kind", ["file", "anonymous"])
@pytest.mark.parametrize("channel", ["queue", "simple", "pipe"])
def test_case_34(tmp_path, channel, kind):
    """A conjugated view, and its imaginary part, keep their signs through a queue."""
    x = MemoryMappedTensor.from_tensor(
        torch.tensor([1 + 2j, 3 - 4j]), filename=tmp_path / "z.bin" if kind == "file" else None
    )
    child = Child("fork", channel=channel)
    for view, expected in (
        (x.conj(), [1 - 2j, 3 + 4j]),
        (x.conj().imag, [-2, 4]),
        (torch.conj(x), [1 - 2j, 3 + 4j]),
        (torch.imag(torch.conj(x))[1:], [4]),
    ):
        (arrived,), _ = child.ask(all_facts, [view])
        assert arrived == facts(view)
        assert arrived[-1] == expected
        assert arrived[1].mode == mmtensor.locate(x).mode
    assert child.close() == 0
