"""Benchmarks: the asv suite, the comparison with peers, and the targets."""
