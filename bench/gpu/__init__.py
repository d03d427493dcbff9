"""The accelerator path, proved and measured by one command: `python -m bench.gpu` (docs/project/internals/gpu.md)."""
