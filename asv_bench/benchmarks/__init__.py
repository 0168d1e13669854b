"""Benchmarks of mmtensor, for airspeed velocity. See ``asv_bench/README.md``."""

import os

# Before anything imports torch: its thread pool stalls at random on few cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")
