"""Files larger than the memory that a process may have."""

import sys

import pytest

LIMIT = 512 << 20


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/smaps_rollup")
@pytest.mark.parametrize("mode", ["r", "r+"])
def test_one_pass_over_twice_the_limit(run, path, mode):
    """A pass over twice the limit completes, and takes next to no memory of one's own."""
    with open(path, "wb") as file:
        file.truncate(2 * LIMIT)  # sparse
    program = """
        import sys, torch
        from mmtensor import MemoryMappedTensor

        def anonymous():
            with open("/proc/self/smaps_rollup") as lines:
                return next(int(line.split()[1]) for line in lines if "Anonymous" in line) << 10

        torch.ones(1 << 22).sum()
        before = anonymous()
        x = MemoryMappedTensor.from_filename(sys.argv[1], torch.float32, -1, mode=sys.argv[2])
        growth = 0
        for chunk in x.split(1 << 22):
            assert chunk.sum() == 0
            growth = max(growth, anonymous() - before)
        print(len(x), growth)
    """
    count, growth = run(program, path, mode, limits=f"-d {LIMIT >> 10}").split()
    assert int(count) == LIMIT // 2
    assert int(growth) < 100_000_000
