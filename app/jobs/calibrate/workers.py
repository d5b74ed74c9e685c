"""Processes that each hold a loaded model and work off tasks: a small machine's cores, a large one's GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

from tqdm import tqdm

from app.jobs.calibrate.studio import Studio, StudioSpec
from app.jobs.processes import process_context

Answer = TypeVar("Answer", covariant=True)


class Task(Protocol[Answer]):
    """Picklable, with a picklable answer."""

    def __call__(self, studio: Studio) -> Answer:
        """Do the work in a worker process."""


class WorkerFailed(RuntimeError):
    """A task raised, or its process has gone."""


class Workers:
    """A context manager; processes fork from a server that has imported torch once, and load the model then."""

    def __init__(self, spec: StudioSpec, count: int) -> None:
        context = process_context(spec.on_gpu, __name__)
        self._lines: list[Connection] = []
        self._processes = []
        for index in range(count):
            line, remote = context.Pipe()
            process = context.Process(target=_work, args=(remote, spec, index), daemon=True)
            process.start()
            remote.close()
            self._lines.append(line)
            self._processes.append(process)

    def map(self, tasks: Sequence[Task[Answer]], label: str) -> Iterator[tuple[int, Answer]]:
        """Index and answer of every task, in the order in which they end, under a progress bar."""
        waiting = list(enumerate(tasks))[::-1]
        running: dict[Connection, int] = {}
        idle = list(self._lines)
        with tqdm(total=len(tasks), desc=label, unit="task", mininterval=5) as bar:
            while waiting or running:
                while idle and waiting:
                    index, task = waiting.pop()
                    line = idle.pop()
                    line.send(task)
                    running[line] = index
                for ready in wait(list(running)):
                    assert isinstance(ready, Connection)
                    index = running.pop(ready)
                    idle.append(ready)
                    answer = _received(ready)
                    bar.update()
                    yield index, answer

    def all(self, tasks: Sequence[Task[Answer]], label: str) -> list[Answer]:
        """The answers in the order of the tasks."""
        answers = dict(self.map(tasks, label))
        return [answers[index] for index in range(len(tasks))]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for line in self._lines:
            with suppress(OSError):  # the process may have gone
                line.send(None)
            line.close()
        for process in self._processes:
            process.join(60 if kind is None else 1)
            if process.is_alive():
                process.terminate()


def _received(line: Connection) -> Any:
    try:
        answer = line.recv()
    except EOFError:
        raise WorkerFailed("a worker process has ended; its output above says why") from None
    if isinstance(answer, BaseException):
        raise WorkerFailed(f"a task failed in its worker: {answer!r}") from answer
    return answer


def _work(line: Connection, spec: StudioSpec, index: int) -> None:
    studio = Studio(spec, index)
    while (task := line.recv()) is not None:
        try:
            answer = task(studio)
        except Exception as error:  # noqa: BLE001 (handed to the process that asked, which raises it)
            answer = error
        line.send(answer)
