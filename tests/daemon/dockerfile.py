"""Enough of a Dockerfile to carry out its first stage without a container engine."""

import re
import shutil
from pathlib import Path
from typing import NamedTuple

__all__ = ["Instruction", "copy_context", "stages_of"]


class Instruction(NamedTuple):
    """One line of it, continuations joined; `word` is in capitals: "COPY"."""

    word: str
    rest: str


def stages_of(text: str) -> list[list[Instruction]]:
    """The instructions of each stage, each beginning with its FROM."""
    lines = "\n".join(line for line in text.splitlines() if line.strip() and not line.startswith("#"))
    stages: list[list[Instruction]] = []
    for line in re.sub(r"\\\n\s*", "", lines).splitlines():
        word, rest = line.split(maxsplit=1)
        if word == "FROM":
            stages.append([])
        if stages:
            stages[-1].append(Instruction(word, rest))
    return stages


def copy_context(stage: list[Instruction], context: Path, workdir: Path) -> None:
    """Do what the stage's COPY lines do, with what .dockerignore (which lists what is *not* ignored) lets through."""
    ignore_lines = (context / ".dockerignore").read_text().splitlines()
    sent = [line[1:] for line in ignore_lines if line.startswith("!")]
    for instruction in stage:
        if instruction.word != "COPY":
            continue
        *sources, destination = instruction.rest.split()
        for source in sources:
            assert source in sent, f"{source} is copied, but .dockerignore keeps it out"
            if (context / source).is_dir():
                shutil.copytree(
                    context / source,
                    workdir / destination,
                    symlinks=True,
                    ignore=shutil.ignore_patterns("__pycache__"),
                )
            else:
                (workdir / destination).mkdir(exist_ok=True)
                shutil.copy(context / source, workdir / destination)
