"""Benchmarks: ``python -m benchmarks``. One timer, named cases, peers as plug-ins."""
