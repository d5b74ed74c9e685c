"""The durable job table.

Invariant: a row changes only by a compare-and-set on its revision, and only along `job_state.TRANSITIONS`; a final row
never changes again.  So of two drivers racing on one step exactly one wins, whatever database and process they are in.

Every method is one statement that commits by itself, or a read followed by such a compare-and-set; no transaction spans
two calls, so a process killed anywhere leaves whole rows.  All methods are safe to call from any thread, and block for
a disk write or a network round trip: an event loop calls them by `asyncio.to_thread`.
"""

from __future__ import annotations

from typing import Any, Literal, TypedDict, Unpack

from sqlalchemy import (
    BigInteger,
    Column,
    CursorResult,
    Executable,
    Float,
    Integer,
    MetaData,
    Row,
    Select,
    String,
    Table,
    Text,
    delete,
    func,
    insert,
    select,
    update,
)
from sqlalchemy.exc import IntegrityError

from app.driver.database import open_engine, open_schema
from app.driver.job_state import FINAL, TRANSITIONS, IllegalTransition, Job, JobError, JobState, StepCacheReport
from cache_actors.latent_report import CacheReport

SCHEMA = 1
"""Version of the tables below, recorded in the database."""

_metadata = MetaData()
_version = Table("worldstage_schema", _metadata, Column("version", Integer, primary_key=True, autoincrement=False))
_jobs = Table(
    "jobs",
    _metadata,
    # Order of acceptance: clocks tie and step back.  AUTOINCREMENT, as SQLite else gives a deleted last number again.
    Column("sequence", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("revision", Integer, nullable=False),
    # Copies out of `body`, for indexes and for people with an SQL prompt.
    Column("state", String(16), nullable=False, index=True),
    Column("created_at", Float, nullable=False, index=True),
    Column("model", String(64), nullable=False, index=True),
    Column("body", Text, nullable=False),  # Job as JSON
    Column("plan", Text),  # Plan as JSON
    sqlite_autoincrement=True,
)


class JobNotFound(LookupError):
    """No job has this id."""

    def __init__(self, job_id: str) -> None:
        super().__init__(job_id)
        self.job_id = job_id

    def __str__(self) -> str:
        return f"job {self.job_id}: no such job"


class JobExists(ValueError):
    """A job with this id is in the table already."""

    def __init__(self, job_id: str) -> None:
        super().__init__(job_id)
        self.job_id = job_id

    def __str__(self) -> str:
        return f"job {self.job_id}: the id is taken"


class JobNotFinal(ValueError):
    """A job that can still run was to be deleted."""

    def __init__(self, job_id: str, state: JobState) -> None:
        super().__init__(job_id, state)
        self.job_id, self.state = job_id, state

    def __str__(self) -> str:
        return f"job {self.job_id}: state is {self.state}, only {', '.join(sorted(FINAL))} jobs can be deleted"


class JobIsFinal(ValueError):
    """A job that has ended was to be changed."""

    def __init__(self, job_id: str, state: JobState) -> None:
        super().__init__(job_id, state)
        self.job_id, self.state = job_id, state

    def __str__(self) -> str:
        return f"job {self.job_id}: state is {self.state}, a final job does not change"


class JobTakenOver(ValueError):
    """A job was to be changed for an attempt that is not its present one."""

    def __init__(self, job_id: str, attempt: int, present: int) -> None:
        super().__init__(job_id, attempt, present)
        self.job_id, self.attempt, self.present = job_id, attempt, present

    def __str__(self) -> str:
        return f"job {self.job_id}: attempt {self.present} has begun, attempt {self.attempt} has no say any more"


class JobChanges(TypedDict, total=False):
    """What may change in a job; meanings and units as in `Job`.  `plan`: the present attempt's plan as JSON."""

    started_at: float | None
    finished_at: float | None
    attempt: int
    step: int
    gang: str | None
    timings: dict[str, float]
    files: dict[str, int]
    error: JobError | None
    step_cache: StepCacheReport | None
    cache: CacheReport | None
    plan: str | None


class JobStore:
    """The job table at a SQLAlchemy URL: a SQLite file, whose folder is made, or PostgreSQL.

    Raises UnusableDatabase for another kind of database, for SQLite without write-ahead log, and for tables written by
    a newer worldstage.
    """

    def __init__(self, database_url: str) -> None:
        self._engine = open_engine(database_url)
        try:
            open_schema(self._engine, _metadata, _version, SCHEMA)
        except BaseException:
            self._engine.dispose()
            raise

    def create(self, job: Job, plan: str | None = None) -> None:
        """Add a job; once this returns it is on disk.  plan: JSON.  Raises JobExists."""
        values = {"id": job.id, "revision": 0, "created_at": job.created_at, "model": job.params.model, "plan": plan}
        try:
            self._write(insert(_jobs).values(**values, **_body(job)))
        except IntegrityError as error:
            if self._row(job.id) is None:
                raise
            raise JobExists(job.id) from error

    def get(self, job_id: str) -> Job:
        """Raises JobNotFound."""
        return _job(self._require(job_id))

    def plan(self, job_id: str) -> str | None:
        """The job's plan as JSON, None before it has one.  Raises JobNotFound."""
        plan: str | None = self._require(job_id).plan
        return plan

    def list(self, limit: int, after: str | None = None, order: Literal["asc", "desc"] = "desc") -> tuple[Job, ...]:
        """At most `limit` (1 or more) jobs in order of acceptance, `desc` newest first; those behind job `after`.

        Raises JobNotFound for `after`.
        """
        if limit < 1:
            raise ValueError(f"limit: got {limit}, expected 1 or more")
        ascending = order == "asc"
        sequence = _jobs.c.sequence
        query = select(_jobs).order_by(sequence.asc() if ascending else sequence.desc()).limit(limit)
        if after is not None:
            last = self._require(after).sequence
            query = query.where(sequence > last if ascending else sequence < last)
        return tuple(map(_job, self._read(query)))

    def unfinished(self) -> tuple[Job, ...]:
        """Jobs that are not final, in order of acceptance."""
        return tuple(map(_job, self._read(select(_jobs).where(_jobs.c.state.not_in(FINAL)).order_by(_jobs.c.sequence))))

    def counts(self) -> dict[JobState, int]:
        """Number of jobs by state, every state named."""
        query = select(_jobs.c.state, func.count().label("jobs")).group_by(_jobs.c.state)
        found = {JobState(row.state): row.jobs for row in self._read(query)}
        return {state: found.get(state, 0) for state in JobState}

    def transition(
        self, job_id: str, new_state: JobState, held: int | None = None, **changes: Unpack[JobChanges]
    ) -> Job:
        """Take one step of the job's life, with changes that belong to it.  Returns the job after it.

        held: the attempt on whose behalf; None for a step that belongs to none.
        Raises IllegalTransition when TRANSITIONS has no such step from the state found in the database at the moment of
        writing, JobTakenOver when another attempt than `held` is the present one, JobNotFound.
        """
        while True:
            row = self._require(job_id)
            _check_held(row, held)
            old = JobState(row.state)
            if new_state not in TRANSITIONS[old]:
                raise IllegalTransition(job_id, old, new_state)
            job = self._replace(row, new_state, changes)
            if job is not None:
                return job

    def update(self, job_id: str, held: int | None = None, **changes: Unpack[JobChanges]) -> Job:
        """Change a job within its state.  Returns the job after it.  Raises JobIsFinal, JobTakenOver, JobNotFound."""
        while True:
            row = self._require(job_id)
            _check_held(row, held)
            state = JobState(row.state)
            if state in FINAL:
                raise JobIsFinal(job_id, state)
            job = self._replace(row, state, changes)
            if job is not None:
                return job

    def delete(self, job_id: str) -> None:
        """Remove a final job.  Raises JobNotFinal, JobNotFound."""
        final = delete(_jobs).where(_jobs.c.id == job_id, _jobs.c.state.in_(FINAL))
        if self._write(final).rowcount == 0:
            raise JobNotFinal(job_id, JobState(self._require(job_id).state))

    def close(self) -> None:
        """Give the connections back; the store must not be used afterwards."""
        self._engine.dispose()

    def _replace(self, row: Row[*tuple[Any, ...]], state: JobState, changes: JobChanges) -> Job | None:
        """The row with `changes`, or None when someone else changed it since it was read."""
        unknown = changes.keys() - JobChanges.__annotations__.keys()
        if unknown:
            allowed = ", ".join(sorted(JobChanges.__annotations__))
            raise TypeError(f"changes: got {', '.join(sorted(unknown))}, expected some of {allowed}")
        fields = {name: value for name, value in changes.items() if name != "plan"}
        job = Job.model_validate({**dict(_job(row)), **fields, "state": state})
        plan = changes.get("plan", row.plan)
        as_read = (_jobs.c.id == row.id, _jobs.c.revision == row.revision)
        statement = update(_jobs).where(*as_read).values(revision=row.revision + 1, plan=plan, **_body(job))
        return job if self._write(statement).rowcount == 1 else None

    def _row(self, job_id: str) -> Row[*tuple[Any, ...]] | None:
        return next(iter(self._read(select(_jobs).where(_jobs.c.id == job_id))), None)

    def _require(self, job_id: str) -> Row[*tuple[Any, ...]]:
        row = self._row(job_id)
        if row is None:
            raise JobNotFound(job_id)
        return row

    def _read(self, query: Select[*tuple[Any, ...]]) -> tuple[Row[*tuple[Any, ...]], ...]:
        with self._engine.connect() as connection:
            return tuple(connection.execute(query))

    def _write(self, statement: Executable) -> CursorResult[*tuple[Any, ...]]:
        with self._engine.connect() as connection:
            return connection.execute(statement)


def _job(row: Row[*tuple[Any, ...]]) -> Job:
    return Job.model_validate_json(row.body)


def _check_held(row: Row[*tuple[Any, ...]], held: int | None) -> None:
    present = _job(row).attempt
    if held is not None and held != present:
        raise JobTakenOver(row.id, held, present)


def _body(job: Job) -> dict[str, str]:
    return {"state": job.state, "body": job.model_dump_json()}
