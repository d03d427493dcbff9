"""Benchmarks, one file per question. `python -m bench` runs them all, or those named."""
