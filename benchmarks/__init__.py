"""Benchmarks: ``python -m benchmarks cpu | cuda | step | trace``. Named cases, one timer, peers as plug-ins."""
