"""Benchmarks on one harness: see benchmark.py for what a benchmark is, sweep.py for how cells are measured and kept."""
