"""The durable table of worlds and of their paths; the chunks' latents are in the storage.

Invariant: a world changes only by a compare-and-set on its revision, and a path has no gap.  So of two drivers that
change one world exactly one wins, and the other finds out.

All methods block for a disk write or a network round trip; they are safe to call from any thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Float,
    Integer,
    MetaData,
    Row,
    String,
    Table,
    Text,
    delete,
    func,
    insert,
    select,
    update,
)

from app.driver.database import exclusive, open_engine, open_schema
from app.worlds.world_state import Chunk, World

SCHEMA = 1
"""Version of the tables below, recorded in the database."""

_metadata = MetaData()
_version = Table(
    "worldstage_worlds_schema", _metadata, Column("version", Integer, primary_key=True, autoincrement=False)
)
_worlds = Table(
    "worlds",
    _metadata,
    Column("sequence", BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True),
    Column("id", String(64), nullable=False, unique=True),
    Column("revision", Integer, nullable=False),
    Column("used_at", Float, nullable=False),
    Column("body", Text, nullable=False),  # World as JSON
    sqlite_autoincrement=True,
)
_chunks = Table(
    "world_chunks",
    _metadata,
    Column("world", String(64), primary_key=True),
    Column("position", Integer, primary_key=True, autoincrement=False),
    Column("body", Text, nullable=False),  # Chunk as JSON
)


class WorldNotFound(LookupError):
    """No world has this id."""


class WorldTakenOver(RuntimeError):
    """Another driver has changed the world since this one read it."""


class StoredWorld:
    """A world as it was read: its revision goes with every change."""

    def __init__(self, world: World, chunks: Sequence[Chunk], revision: int, used_at: float) -> None:
        self.world, self.chunks, self.revision, self.used_at = world, list(chunks), revision, used_at


class WorldStore:
    """The tables at a SQLAlchemy URL.  Raises `database.UnusableDatabase`."""

    def __init__(self, database_url: str) -> None:
        self._engine = open_engine(database_url)
        open_schema(self._engine, _metadata, _version, SCHEMA)

    def create(self, world: World, chunks: Sequence[Chunk], used_at: float) -> StoredWorld:
        """Add a world; once this returns it is on disk.  used_at: Unix seconds."""
        rows = [{"world": world.id, "position": n, "body": c.model_dump_json()} for n, c in enumerate(chunks)]
        with self._engine.connect() as connection, exclusive(connection):
            values = {"id": world.id, "revision": 0, "used_at": used_at, "body": world.model_dump_json()}
            connection.execute(insert(_worlds).values(**values))
            if rows:
                connection.execute(insert(_chunks), rows)
        return StoredWorld(world, chunks, 0, used_at)

    def get(self, world_id: str) -> StoredWorld:
        """Raises WorldNotFound."""
        with self._engine.connect() as connection, exclusive(connection):
            row = self._row(connection, world_id)
            path = select(_chunks.c.body).where(_chunks.c.world == world_id).order_by(_chunks.c.position)
            chunks = [Chunk.model_validate_json(found.body) for found in connection.execute(path)]
        return StoredWorld(World.model_validate_json(row.body), chunks, row.revision, row.used_at)

    def count(self) -> int:
        """Worlds that are not deleted."""
        with self._engine.connect() as connection:
            return int(connection.scalar(select(func.count()).select_from(_worlds)) or 0)

    def ids(self, limit: int, after: str | None, order: Literal["asc", "desc"]) -> tuple[str, ...]:
        """At most `limit` (1 or more) ids in order of creation, `desc` newest first; those behind world `after`.

        Raises WorldNotFound for `after`.
        """
        sequence = _worlds.c.sequence
        query = select(_worlds.c.id).order_by(sequence.asc() if order == "asc" else sequence.desc()).limit(limit)
        with self._engine.connect() as connection:
            if after is not None:
                last = self._row(connection, after).sequence
                query = query.where(sequence > last if order == "asc" else sequence < last)
            return tuple(row.id for row in connection.execute(query))

    def append(self, stored: StoredWorld, chunk: Chunk, used_at: float) -> None:
        """Add a chunk to the path's end.  Raises WorldTakenOver."""
        with self._engine.connect() as connection, exclusive(connection):
            self._advance(connection, stored, used_at)
            row = {"world": stored.world.id, "position": len(stored.chunks), "body": chunk.model_dump_json()}
            connection.execute(insert(_chunks).values(**row))
        stored.chunks.append(chunk)
        stored.revision, stored.used_at = stored.revision + 1, used_at

    def truncate(self, stored: StoredWorld, chunks: int, used_at: float) -> None:
        """Keep the first `chunks` of the path.  Raises WorldTakenOver."""
        with self._engine.connect() as connection, exclusive(connection):
            self._advance(connection, stored, used_at)
            beyond = (_chunks.c.world == stored.world.id, _chunks.c.position >= chunks)
            connection.execute(delete(_chunks).where(*beyond))
        del stored.chunks[chunks:]
        stored.revision, stored.used_at = stored.revision + 1, used_at

    def delete(self, world_id: str) -> None:
        """Raises WorldNotFound."""
        with self._engine.connect() as connection, exclusive(connection):
            self._row(connection, world_id)
            connection.execute(delete(_chunks).where(_chunks.c.world == world_id))
            connection.execute(delete(_worlds).where(_worlds.c.id == world_id))

    def close(self) -> None:
        """Give the connections back; the store must not be used afterwards."""
        self._engine.dispose()

    @staticmethod
    def _row(connection: Connection, world_id: str) -> Row[*tuple[Any, ...]]:
        row = connection.execute(select(_worlds).where(_worlds.c.id == world_id)).first()
        if row is None:
            raise WorldNotFound(f"no world {world_id}")
        return row

    @staticmethod
    def _advance(connection: Connection, stored: StoredWorld, used_at: float) -> None:
        as_read = (_worlds.c.id == stored.world.id, _worlds.c.revision == stored.revision)
        changed = update(_worlds).where(*as_read).values(revision=stored.revision + 1, used_at=used_at)
        if connection.execute(changed).rowcount != 1:
            raise WorldTakenOver(f"world {stored.world.id}: changed by another driver, or deleted")
