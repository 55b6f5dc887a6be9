"""Benchmarks: ``python -m benchmarks cpu`` or ``cuda``. Named cases, one timer, peers as plug-ins."""
