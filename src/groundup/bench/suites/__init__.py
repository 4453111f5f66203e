"""The benchmarks, one file each: the file's name is the command, its `BENCHMARK` the whole registration."""
