"""Benchmarks, run by ``python -m benchmarks``: named cases, one timer, peers as plug-ins."""
