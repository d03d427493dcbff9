"""The daemon in the model of the protocol."""

from collections.abc import Iterator

from tests.daemon.model_records import (
    Job,
    Message,
    Rules,
    Scope,
    State,
    answer,
    letter,
    with_item,
    with_job,
    without_job,
)
from tests.daemon.state_search import Step, Violation

__all__ = ["Daemon"]


class Daemon:
    """The steps of a living daemon from a state."""

    def __init__(self, rules: Rules, scope: Scope) -> None:
        self._rules = rules
        self._scope = scope

    def steps(self, state: State) -> Iterator[Step]:
        if state.to_daemon:
            yield from self._take(state)
        for job in state.jobs:
            if job.kind == "Write":
                yield from self._write_steps(state, job)
            elif job.kind == "Read":
                moved = state._replace(slots=with_item(state.slots, job.slot, state.extents[job.extent or 0]))
                yield f"the daemon fills slot {job.slot} with {letter(job.handle)}", answer(moved, job, "Loaded")
            else:
                yield from self._discard_steps(state, job)
        if self._scope.client_dies and state.process == 1:
            yield from self._lease_steps(state)

    def _take(self, state: State) -> Iterator[Step]:
        request, state = state.to_daemon[0], state._replace(to_daemon=state.to_daemon[1:])
        label = f"the daemon takes {request.kind}"
        if request.kind == "Resume":
            if not (self._rules.resumed_after_jobs and any(job.is_orphan for job in state.jobs)):
                yield label, state._replace(to_client=(Message("Resumed"),))
            return
        label += f" of {letter(request.handle)}"
        job = Job(request.kind, request.handle, request.key, slot=request.slot)
        if request.kind == "Discard":
            yield label, with_job(state, job)
        elif request.kind == "Read":
            extent = self._extent_of(state, request.key)
            if extent is not None:
                yield label, with_job(state, job._replace(extent=extent))
            elif state.handles[request.handle].is_live:
                yield label, Violation("an acknowledged record is lost")
            else:
                yield label, answer(state, job, "Loaded")
        elif self._rules.write_is_idempotent and state.index[request.key] is not None:
            yield label, answer(state, job, "Stored")
        elif not state.free:
            yield label, answer(state, job, "Full")
        else:
            for extent in state.free:
                begun = state._replace(free=state.free - {extent})
                yield f"{label}, to extent {extent}", with_job(begun, job._replace(extent=extent))

    def _extent_of(self, state: State, key: int) -> int | None:
        answered = (job.extent for job in state.jobs if job.stage == "answered" and job.key == key)
        return next(answered, state.index[key])

    def _write_steps(self, state: State, job: Job) -> Iterator[Step]:
        name = letter(job.handle)
        assert job.extent is not None
        if job.stage == "begun":
            moved = state._replace(extents=with_item(state.extents, job.extent, state.slots[job.slot or 0]))
            yield f"the daemon writes {name}", with_job(moved, job._replace(stage="moved", slot=None), instead_of=job)
            failed = state._replace(free=state.free | {job.extent})
            yield f"the daemon fails to write {name}", answer(failed, job, "Failed")
            return
        committed = state._replace(index=with_item(state.index, job.key, job.extent))
        if job.stage == "answered":
            yield f"the daemon commits {name}", without_job(committed, job)
            return
        yield f"the daemon commits {name} and answers", answer(committed, job, "Stored")
        if not self._rules.stored_after_commit:
            answered = with_job(answer(state, job, "Stored"), job._replace(stage="answered"))
            yield f"the daemon answers that {name} is stored", answered

    def _discard_steps(self, state: State, job: Job) -> Iterator[Step]:
        if self._rules.discard_waits_for_job and any(
            other.key == job.key and other.kind != "Discard" for other in state.jobs
        ):
            return
        extent = state.index[job.key]
        freed = state.free if extent is None else state.free | {extent}
        if not self._rules.extent_reused_after_commit and job.stage == "begun" and extent is not None:
            early = with_job(state._replace(free=freed), job._replace(stage="freed"), instead_of=job)
            yield f"the daemon frees the extent of {letter(job.handle)}", early
            return
        free = state.free if job.stage == "freed" else freed
        gone = state._replace(index=with_item(state.index, job.key, None), free=free)
        yield f"the daemon commits that {letter(job.handle)} is gone", answer(gone, job, "Gone")

    def _lease_steps(self, state: State) -> Iterator[Step]:
        """The first client is dead, so its lease may end: what it stored, under key 0, is freed."""
        running = [job for job in state.jobs if job.key == 0]
        if running and self._rules.lease_end_waits_for_jobs:
            return
        written = {job.extent for job in running if job.kind == "Write"}
        freed = {extent for extent in (state.index[0], *written) if extent is not None}
        if freed:
            ended = state._replace(index=with_item(state.index, 0, None), free=state.free | freed)
            yield "the daemon ends the dead client's lease", ended
