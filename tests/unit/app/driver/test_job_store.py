"""The job table on SQLite, and on a PostgreSQL server that the tests start for themselves where one is installed."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from app.driver.database import UnusableDatabase, _prepare_sqlite
from app.driver.job_state import FINAL, TRANSITIONS, IllegalTransition, Job, JobError, JobState, VideoParams
from app.driver.job_store import (
    SCHEMA,
    JobExists,
    JobIsFinal,
    JobNotFinal,
    JobNotFound,
    JobStore,
    JobTakenOver,
)


def postgres_binary(name: str) -> str | None:
    # Debian keeps the server's programs off PATH.
    return shutil.which(name) or next(map(str, Path("/usr/lib/postgresql").glob(f"*/bin/{name}")), None)


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """URL of the maintenance database of a server on a Unix socket of its own; it ends with the session."""
    initdb, server = postgres_binary("initdb"), postgres_binary("postgres")
    if initdb is None or server is None:
        pytest.skip("no PostgreSQL server installed (apt-get install postgresql)")
    if importlib.util.find_spec("psycopg") is None:
        pytest.skip("no PostgreSQL driver installed (pip install 'psycopg[binary]')")
    user = "nobody" if os.geteuid() == 0 else None  # the server refuses to run as root
    folder = Path(tempfile.mkdtemp(prefix="worldstage-pg-"))  # not tmp_path: others may not enter that, and sockets
    try:  # have short names
        if user:
            shutil.chown(folder, user)
        data = str(folder / "data")
        setup = [initdb, "-D", data, "-U", "worldstage", "-A", "trust", "--no-sync", "--locale=C", "-E", "UTF8"]
        subprocess.run(setup, check=True, capture_output=True, user=user, cwd=folder)
        with (folder / "log").open("wb") as log:
            command = [server, "-D", data, "-k", str(folder), "-c", "listen_addresses=", "-c", "fsync=off"]
            process = subprocess.Popen(command, stdout=log, stderr=log, user=user, cwd=folder)
        try:
            url = f"postgresql+psycopg://worldstage@/postgres?host={folder}"
            wait_for(url, folder / "log")
            yield url
        finally:
            process.send_signal(signal.SIGQUIT)  # at once, without a last checkpoint: the data goes too
            process.wait(30)
    finally:
        shutil.rmtree(folder)


def wait_for(url: str, log: Path) -> None:
    engine = create_engine(url)
    for _ in range(300):
        try:
            engine.connect().close()
            break
        except OperationalError:
            time.sleep(0.1)
    else:
        pytest.fail(f"PostgreSQL did not start: {log.read_text()}")
    engine.dispose()


@pytest.fixture(params=["sqlite", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path}/made/jobs.db"
    server: str = request.getfixturevalue("postgres")
    name = f"jobs_{uuid.uuid4().hex}"  # a schema of its own is as good as a database, and much faster made
    engine = create_engine(server)
    with engine.begin() as connection:
        connection.execute(text(f"CREATE SCHEMA {name}"))
    engine.dispose()
    return f"{server}&options=-csearch_path%3D{name}"


@pytest.fixture
def store(url: str) -> Iterator[JobStore]:
    store = JobStore(url)
    yield store
    store.close()


def make_job(job_id: str, state: JobState = JobState.QUEUED, model: str = "wan") -> Job:
    params = VideoParams(
        model=model,
        prompt="ein Würfel 🎲 \x00 'quoted'",  # a zero character is no text to PostgreSQL, inside JSON it is
        negative_prompt="",
        width=32,
        height=16,
        num_frames=5,
        fps=16,
        num_inference_steps=2,
        guidance_scale=5.1,
        guidance_scale_2=None,
        flow_shift=3.0,
        seed=2**63 - 1,
        max_sequence_length=4,
        outputs=("sheet",),
    )
    return Job(id=job_id, params=params, state=state, created_at=1000.1, fingerprint="f" * 64)


def test_a_job_comes_back_whole_after_a_restart(url: str) -> None:
    job = make_job("a")
    store = JobStore(url)
    store.create(job)
    store.create(make_job("b"), plan='{"nodes": []}')
    store.close()
    store = JobStore(url)
    assert store.get("a") == job
    assert store.plan("a") is None
    assert store.plan("b") == '{"nodes": []}'
    store.close()


def test_ids_are_known_and_unique(store: JobStore) -> None:
    store.create(make_job("a"))
    with pytest.raises(JobExists, match="job a: the id is taken"):
        store.create(make_job("a", model="other"))
    assert store.get("a") == make_job("a")
    for call in (store.get, store.plan, store.delete, store.update):
        with pytest.raises(JobNotFound, match="job z: no such job"):
            call("z")
    with pytest.raises(JobNotFound):
        store.transition("z", JobState.ENCODING)
    with pytest.raises(JobNotFound):
        store.list(1, after="z")


def ids(jobs: tuple[Job, ...]) -> str:
    return "".join(job.id for job in jobs)


def test_pages_follow_the_order_of_acceptance_though_clocks_tie(store: JobStore) -> None:
    for job_id in "dbace":
        store.create(make_job(job_id))
    assert ids(store.list(10)) == "ecabd"
    assert ids(store.list(2)) == "ec"
    assert ids(store.list(2, after="c")) == "ab"
    assert ids(store.list(2, after="b")) == "d"
    assert store.list(2, after="d") == ()
    assert ids(store.list(3, order="asc")) == "dba"
    assert ids(store.list(3, after="a", order="asc")) == "ce"
    store.transition("b", JobState.CANCELLED)  # a change moves nothing
    assert ids(store.list(10, order="asc")) == "dbace"
    with pytest.raises(ValueError, match="limit: got 0, expected 1 or more"):
        store.list(0)


def test_a_deleted_last_job_gives_its_place_to_nobody(store: JobStore, url: str) -> None:
    store.create(make_job("a"))
    store.create(make_job("b", JobState.FAILED))
    engine = create_engine(url)
    with engine.connect() as connection:
        last = connection.execute(text("SELECT max(sequence) FROM jobs")).scalar_one()
        store.delete("b")
        store.create(make_job("c"))
    with engine.connect() as connection:
        assert connection.execute(text("SELECT max(sequence) FROM jobs")).scalar_one() > last
    engine.dispose()


@pytest.mark.parametrize("old", JobState)
def test_every_pair_of_states(store: JobStore, old: JobState) -> None:
    for new in JobState:
        store.create(make_job(new, old))
        if new in TRANSITIONS[old]:
            assert store.transition(new, new).state is new
            assert store.get(new) == make_job(new, new)
        else:
            with pytest.raises(IllegalTransition, match=f"job {new}: {old} -> {new} is not allowed"):
                store.transition(new, new, step=9)
            assert store.get(new) == make_job(new, old)


def test_a_step_carries_its_changes(store: JobStore) -> None:
    store.create(make_job("a"))
    error = JobError(code="worker_lost", message="rank 1 went away")
    begun = store.transition("a", JobState.ENCODING, attempt=1, started_at=1001.5, gang="g1", plan="{}")
    assert (begun.attempt, begun.started_at, begun.gang, begun.step) == (1, 1001.5, "g1", 0)
    failed = store.transition("a", JobState.FAILED, error=error, finished_at=1002.0, timings={"queued": 1.5})
    assert failed == store.get("a")
    assert (failed.error, failed.finished_at, failed.timings, failed.gang) == (error, 1002.0, {"queued": 1.5}, "g1")
    assert store.plan("a") == "{}"


def test_an_update_stays_in_the_state(store: JobStore) -> None:
    store.create(make_job("a", JobState.DENOISING), plan="{}")
    assert store.update("a", step=3, files={"video.mp4": 5}).state is JobState.DENOISING
    assert store.update("a", gang="g2", plan='{"a": 1}') == store.get("a")
    job = store.get("a")
    assert (job.step, job.files, job.gang, store.plan("a")) == (3, {"video.mp4": 5}, "g2", '{"a": 1}')
    store.update("a", plan=None)
    assert store.plan("a") is None


def test_an_attempt_that_was_followed_by_another_has_no_say(store: JobStore) -> None:
    store.create(make_job("a"))
    store.transition("a", JobState.ENCODING, held=0)
    store.update("a", held=0, attempt=1)
    store.update("a", held=1, step=3)
    for late in (0, 2):
        with pytest.raises(JobTakenOver, match=f"job a: attempt 1 has begun, attempt {late} has no say any more"):
            store.update("a", held=late, step=9)
        with pytest.raises(JobTakenOver):
            store.transition("a", JobState.FAILED, held=late)
    assert (store.get("a").state, store.get("a").step) == (JobState.ENCODING, 3)
    store.transition("a", JobState.FAILED)  # on nobody's behalf


@pytest.mark.parametrize("wrong", [{"state": "failed"}, {"id": "b"}, {"params": None}, {"stepp": 1}], ids=str)
def test_what_may_not_change(store: JobStore, wrong: dict[str, object]) -> None:
    store.create(make_job("a"))
    with pytest.raises(TypeError, match=f"changes: got {next(iter(wrong))}, expected some of attempt, cache, error"):
        store.update("a", **wrong)
    with pytest.raises(ValidationError):
        store.update("a", step="three")
    assert store.get("a") == make_job("a")


@pytest.mark.parametrize("state", JobState)
def test_only_final_jobs_are_deleted_and_only_others_change(store: JobStore, state: JobState) -> None:
    store.create(make_job("a", state))
    if state in FINAL:
        with pytest.raises(JobIsFinal, match=f"state is {state}, a final job does not change"):
            store.update("a", step=1)
        store.delete("a")
        with pytest.raises(JobNotFound):
            store.get("a")
    else:
        store.update("a", step=1)
        with pytest.raises(JobNotFinal, match=f"state is {state}, only cancelled, completed, failed jobs"):
            store.delete("a")
        assert store.get("a").step == 1


def test_recovery_and_counts(store: JobStore) -> None:
    assert store.unfinished() == ()
    for number, state in enumerate([*reversed(JobState), JobState.QUEUED]):
        store.create(make_job(str(number), state))
    assert ids(store.unfinished()) == "34567"
    assert store.counts() == {state: 2 if state is JobState.QUEUED else 1 for state in JobState}


def test_concurrent_updates_of_one_job_lose_nothing(store: JobStore) -> None:
    store.create(make_job("a", JobState.DENOISING))
    failures: list[BaseException] = []

    def repeat(changes: list[dict[str, object]]) -> None:
        try:
            for change in changes:
                store.update("a", **change)
        except BaseException as error:  # noqa: BLE001 - shown by the assertion below
            failures.append(error)

    work = (
        [{"step": n} for n in range(21)],
        [{"attempt": n} for n in range(21)],
        [{"gang": str(n)} for n in range(21)],
    )
    threads = [threading.Thread(target=repeat, args=(changes,)) for changes in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    job = store.get("a")
    assert (job.step, job.attempt, job.gang) == (20, 20, "20")


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    """Another process; it runs `code` once told to by a line."""
    prelude = "import sys\nfrom app.driver.job_state import *\nfrom app.driver.job_store import *\n"
    command = [sys.executable, "-c", f"{prelude}print('ready', flush=True)\nsys.stdin.readline()\n{code}", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def go(processes: list[subprocess.Popen[str]]) -> list[list[str]]:
    """The words each printed."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=60) for process in processes]
    assert all(process.returncode == 0 for process in processes), answers
    return [out.split() for out, _ in answers]


def test_of_two_drivers_one_wins_each_step(store: JobStore, url: str) -> None:
    names = [f"job{number}" for number in range(40)]
    for name in names:
        store.create(make_job(name))
    race = """
store = JobStore(sys.argv[1])
for number in range(40):
    try:
        store.transition(f"job{number}", JobState.ENCODING, gang=sys.argv[2])
        print(f"job{number}")
    except IllegalTransition as error:
        assert error.old is JobState.ENCODING
"""
    first, second = go([start(race, url, "first"), start(race, url, "second")])
    assert sorted(first + second) == sorted(names)
    assert [store.get(name).gang for name in names] == ["first" if name in first else "second" for name in names]


def test_many_processes_open_an_empty_database_at_once(url: str) -> None:
    answers = go([start("print(len(JobStore(sys.argv[1]).unfinished()))", url) for _ in range(4)])
    assert answers == [["0"]] * 4
    engine = create_engine(url)
    with engine.connect() as connection:
        assert connection.execute(text("SELECT version FROM worldstage_schema")).scalars().all() == [SCHEMA]
    engine.dispose()


def test_a_killed_writer_leaves_whole_rows_and_nothing_it_confirmed_is_lost(url: str) -> None:
    store = JobStore(url)
    store.create(make_job("template"))
    write = """
store = JobStore(sys.argv[1])
template = store.get("template")
number = 0
while True:
    name = f"{sys.argv[2]}-{number}"
    store.create(template.model_copy(update={"id": name}), plan="{}")
    store.transition(name, JobState.ENCODING, step=1)
    print(name, flush=True)
    number += 1
"""
    confirmed: list[str] = []
    for kill in range(3):
        process = start(write, url, str(kill))
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("go\n")
        process.stdin.flush()
        confirmed += [process.stdout.readline().strip() for _ in range(5 + kill)]
        process.kill()
        confirmed += process.communicate()[0].split()
    found = {job.id: job for job in store.unfinished()}
    assert [(found[name].state, found[name].step) for name in confirmed] == [(JobState.ENCODING, 1)] * len(confirmed)
    # At most the one it was writing when it died is unconfirmed.
    assert len(found) - 1 - len(confirmed) in range(4)
    store.create(make_job("after"))  # and no lock is left behind
    store.close()
    if url.startswith("sqlite"):
        with sqlite3.connect(url.removeprefix("sqlite:///")) as file:
            assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        file.close()


def test_tables_of_a_newer_version_are_refused_untouched(url: str) -> None:
    JobStore(url).close()
    engine = create_engine(url)
    with engine.begin() as connection:
        connection.execute(text(f"UPDATE worldstage_schema SET version = {SCHEMA + 1}"))
        connection.execute(text("DROP TABLE jobs"))
    words = f"schema version {SCHEMA + 1}, this worldstage reads version {SCHEMA}; use the worldstage that wrote it"
    with pytest.raises(UnusableDatabase, match=words):
        JobStore(url)
    with engine.connect() as connection, pytest.raises(Exception, match="jobs"):
        connection.execute(text("SELECT * FROM jobs"))
    engine.dispose()


def test_sqlite_keeps_a_write_ahead_log_and_syncs_every_commit(tmp_path: Path) -> None:
    store = JobStore(f"sqlite:///{tmp_path}/jobs.db")
    with store._engine.connect() as connection:
        pragmas = [connection.exec_driver_sql(f"PRAGMA {name}").scalar() for name in ("journal_mode", "synchronous")]
    store.close()
    assert pragmas == ["wal", 2]  # 2 is FULL


def test_sqlite_without_a_write_ahead_log_is_refused() -> None:
    # Network file systems answer so; a database in memory does too.
    with sqlite3.connect(":memory:") as connection, pytest.raises(UnusableDatabase, match="'memory', expected 'wal'"):
        _prepare_sqlite(connection, None)
    connection.close()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("sqlite://", "got SQLite database ':memory:', expected a plain file"),
        ("sqlite:///:memory:", "memory survives no restart"),
        ("sqlite:///file:jobs.db?uri=true", "got SQLite database 'file:jobs.db', expected a plain file"),
        ("mysql://host/jobs", "got a mysql database, expected one of sqlite, postgresql"),
        ("jobs.db", "expected sqlite:///folder/jobs.db"),
        ("postgresql+nothing://host/jobs", "expected sqlite:///folder/jobs.db, or postgresql"),
    ],
)
def test_databases_that_cannot_keep_jobs_are_refused(url: str, words: str) -> None:
    with pytest.raises(UnusableDatabase, match=words):
        JobStore(url)


def test_a_lost_connection_is_made_again(postgres: str) -> None:
    store = JobStore(postgres)
    store.counts()
    engine = create_engine(postgres)
    with engine.connect() as connection:
        others = (
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND usename = USER"
        )
        assert connection.execute(text(others)).all()
    assert sum(store.counts().values()) == 0
    store.close()
    engine.dispose()
