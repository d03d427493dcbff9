"""Offloading in the trainers that people use. Each file imports its library. Others need no code: see
docs/how_to/trainers.md. Start with `training.py`."""
