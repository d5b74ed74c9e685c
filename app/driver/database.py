"""A durable database at a SQLAlchemy URL, and tables of a known version in it.

SQLite with a write-ahead log on a local disk, or PostgreSQL.  Statements commit by themselves; what belongs together is
put into `exclusive`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from sqlalchemy import Connection, Engine, MetaData, Table, create_engine, event, insert, inspect, make_url, select
from sqlalchemy.engine import URL
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import ArgumentError
from sqlalchemy.pool import ConnectionPoolEntry

_BUSY_TIMEOUT_MS = 10_000  # a commit takes milliseconds; ten seconds is a stuck disk, and an error beats waiting on
_SCHEMA_LOCK = 0x776F726C64  # any constant of our own: PostgreSQL's advisory locks are plain numbers

# One transaction in which no other process can be in one.
_EXCLUSIVE = {
    "sqlite": ("BEGIN IMMEDIATE",),
    "postgresql": ("BEGIN", f"SELECT pg_advisory_xact_lock({_SCHEMA_LOCK})"),
}


class UnusableDatabase(ValueError):
    """The database at `database_url` cannot hold the tables."""


def open_engine(database_url: str) -> Engine:
    """Connections to the database; the folder of a SQLite file is made.  Raises UnusableDatabase."""
    try:
        url = make_url(database_url)
        kind = url.get_backend_name()
        if kind not in _EXCLUSIVE:
            raise UnusableDatabase(f"database_url: got a {kind} database, expected one of {', '.join(_EXCLUSIVE)}")
        # pre_ping: a restarted PostgreSQL server costs a reconnect, not a failed job.
        engine = create_engine(url, isolation_level="AUTOCOMMIT", pool_pre_ping=kind != "sqlite")
    except (ArgumentError, ImportError) as error:
        raise UnusableDatabase(
            f"database_url: {error}; expected sqlite:///folder/jobs.db, or postgresql+psycopg://user@host/database "
            "with psycopg installed"
        ) from error
    if kind == "sqlite":
        _make_folder(url)
        event.listen(engine, "connect", _prepare_sqlite)
    return engine


def open_schema(engine: Engine, metadata: MetaData, version: Table, expected: int) -> None:
    """Make the tables, or check that those that are there are of this version.  Raises UnusableDatabase.

    version: one of them, with a column ``version``; its only row records it.
    """
    with engine.connect() as connection, exclusive(connection):
        found = connection.scalar(select(version.c.version)) if inspect(connection).has_table(version.name) else None
        if found is None:
            metadata.create_all(connection)
            connection.execute(insert(version).values(version=expected))
        elif found != expected:
            raise UnusableDatabase(
                f"database_url: {version.name} has schema version {found}, this worldstage reads version {expected}; "
                "use the worldstage that wrote it, or another database"
            )


@contextmanager
def exclusive(connection: Connection) -> Iterator[None]:
    """One transaction; another process that wants one waits."""
    for statement in _EXCLUSIVE[connection.dialect.name]:
        connection.exec_driver_sql(statement)
    try:
        yield
    except BaseException:
        connection.exec_driver_sql("ROLLBACK")
        raise
    connection.exec_driver_sql("COMMIT")


def _make_folder(url: URL) -> None:
    database = url.database or ":memory:"
    if database == ":memory:" or database.startswith("file:"):
        raise UnusableDatabase(
            f"database_url: got SQLite database {database!r}, expected a plain file, as in sqlite:///folder/jobs.db; "
            "memory survives no restart"
        )
    Path(database).parent.mkdir(parents=True, exist_ok=True)


def _prepare_sqlite(connection: DBAPIConnection, _: ConnectionPoolEntry) -> None:
    cursor = connection.cursor()
    cursor.execute(f"PRAGMA busy_timeout={_BUSY_TIMEOUT_MS}")
    (mode,) = cursor.execute("PRAGMA journal_mode=WAL").fetchone()
    if mode != "wal":
        raise UnusableDatabase(
            f"database_url: SQLite answered journal mode {mode!r}, expected 'wal'; put the file on a local disk"
        )
    # FULL, as with NORMAL a power cut takes the last commits of a write-ahead log, and with them accepted jobs.  It
    # costs one fsync a write; a job writes some ten rows.
    cursor.execute("PRAGMA synchronous=FULL")
    cursor.close()
