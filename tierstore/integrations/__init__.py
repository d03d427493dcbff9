"""Offloading in the trainers that people use. Each file imports its library, and is imported only by who uses that.

Other trainers need no code: see docs/how_to/trainers.md. Start with `training.py`.
"""
