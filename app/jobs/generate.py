"""``python -m app.jobs.generate``: a video for each line of a prompts file, plainly or as a Ray job.

    python -m app.jobs.generate --config configs/demo.yaml --prompts prompts.txt --out out/
    ray job submit --working-dir . -- \\
        python -m app.jobs.generate --config configs/demo.yaml --prompts prompts.txt --out out/

The videos come from the application of the config: the running one if it answers at the config's address, which then
shares its queue with its other clients; else one that this job starts for itself and takes down.  Both are spoken to
over HTTP, so a line means what it means in `POST /v1/videos`.

`out` gets an mp4 a line and `manifest.jsonl`, which a second run reads: it skips lines that are done, follows jobs
that were submitted and still live, and makes the rest.  A line is done when its video is there with the manifest's
bytes, made from the weights now served with the parameters it would have now; a changed line is another video.
"""

from __future__ import annotations

import argparse
import hashlib
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tqdm import tqdm

from app.api.errors import ApiError
from app.api.video_request import parse_request, resolve
from app.jobs.manifest import Entry, Manifest, ManifestError
from app.jobs.prompt_lines import PromptLine, PromptsError, read_prompts
from app.jobs.served_application import ApplicationError, read_application, served
from app.jobs.video_client import FINAL, Refused, Stopped, VideoClient
from app.model_card import ModelCard

POLL_S = 0.5
LOG_EVERY_S = 10.0
INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended."""
PARAMS = (
    "model", "size", "num_frames", "fps", "num_inference_steps", "guidance_scale", "guidance_scale_2", "flow_shift",
    "negative_prompt", "seed", "max_sequence_length", "outputs",
)  # fmt: skip
"""Fields of a job that are kept in the manifest; `resolve` gives the same ones before there is a job."""


def effective(line: PromptLine, cards: Sequence[ModelCard]) -> dict[str, Any]:
    """What the line asks for on the served models, keys `PARAMS`; a seed that would be drawn is None.

    Raises `app.api.errors.ApiError`: an unknown model, a value above a limit.
    """
    params = resolve(parse_request(line.fields), cards)
    values = params.model_dump(mode="json") | {"size": f"{params.width}x{params.height}"}
    return {name: values[name] for name in PARAMS} | {"seed": line.fields.get("seed")}


def is_done(line: PromptLine, manifest: Manifest, cards: Sequence[ModelCard]) -> bool:
    """Whether the line's video is there, whole, from the weights served now and with the parameters it has now."""
    entry = manifest.last.get(line.key)
    if entry is None or entry.status != "completed" or entry.file is None:
        return False
    wanted = effective(line, cards)
    if wanted["seed"] is None:
        wanted["seed"] = entry.seed
    fingerprints = {card.name: card.fingerprint for card in cards}
    path = manifest.path.parent / entry.file
    if entry.params != wanted or fingerprints[wanted["model"]] != entry.fingerprint or not path.is_file():
        return False
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == entry.sha256


class VideoMaker:
    """Makes the video of a line, in a thread of its own; `progress` may be read meanwhile."""

    def __init__(self, client: VideoClient, manifest: Manifest) -> None:
        self._client, self._manifest, self._writing = client, manifest, threading.Lock()
        self.progress: dict[str, int] = {}
        """Percent by key."""

    def make(self, line: PromptLine) -> Entry:
        """To the line's last entry, which is in the manifest.  Whatever goes wrong with it is the entry's error."""
        entry = Entry(line.key, line.number, "submitted", line.fields["prompt"], line.fields)
        try:
            job = self._submit(line, entry)
            entry = replace(entry, job_id=job["id"])
            job = self._follow(line.key, job)
            entry = replace(
                entry,
                model=job["model"],
                fingerprint=job["fingerprint"],
                seed=job["seed"],
                params={name: job[name] for name in PARAMS},
                timings=job["timings"],
            )
            if job["status"] == "completed":
                file = f"{line.number:04d}-{line.key[:12]}.mp4"
                got = self._client.download(job["id"], self._manifest.path.parent / file)
                entry = replace(entry, status="completed", file=file, sha256=got.sha256, bytes=got.bytes)
            else:
                reason = job["error"]["message"] if job["error"] else "cancelled by another client"
                entry = replace(entry, status=job["status"], error=reason)
        except Stopped:
            entry = replace(entry, status="cancelled", error=self._give_up(entry.job_id))
        except (Refused, OSError) as error:
            entry = replace(entry, status="failed", error=str(error))
        self._write(entry)
        return entry

    def _submit(self, line: PromptLine, entry: Entry) -> dict[str, Any]:
        """The line's job: one that an earlier run submitted, if it lives or is completed, else a new one."""
        before = self._manifest.last.get(line.key)
        if before is not None and before.status == "submitted" and before.job_id is not None:
            try:
                job = self._client.get(before.job_id)
            except Refused as error:
                if error.status != 404:
                    raise
            else:
                if job["status"] not in ("failed", "cancelled"):
                    return job
        job = self._client.create(line.fields)
        self._write(replace(entry, job_id=job["id"], model=job["model"], seed=job["seed"]))
        return job

    def _follow(self, key: str, job: dict[str, Any]) -> dict[str, Any]:
        while job["status"] not in FINAL:
            self.progress[key] = job["progress"]
            self._client.sleep(POLL_S)
            job = self._client.get(job["id"])
        return job

    def _give_up(self, job_id: str | None) -> str:
        """Cancels a job of an interrupted run; the reason for its entry."""
        try:
            if job_id is not None:
                self._client.cancel(job_id)
        except (Refused, OSError) as error:
            return f"the run was interrupted, and the job could not be cancelled: {error}"
        return "the run was interrupted"

    def _write(self, entry: Entry) -> None:
        with self._writing:
            self._manifest.append(replace(entry, at=datetime.now(UTC).isoformat(timespec="seconds")))


def make_all(
    lines: Sequence[PromptLine], client: VideoClient, manifest: Manifest, stop: threading.Event, in_flight: int
) -> list[Entry]:
    """Make the videos of `lines`, `in_flight` at a time, behind a progress bar.

    stop: set, it ends everything: jobs in flight are cancelled, lines not begun are left out of the result.
    """
    maker, entries = VideoMaker(client, manifest), []
    # A log, as of a Ray job, would get a line for each change.
    every_s = 0.1 if sys.stderr.isatty() else LOG_EVERY_S
    with (
        ThreadPoolExecutor(in_flight, thread_name_prefix="video") as pool,
        tqdm(total=len(lines), unit="video", mininterval=every_s) as bar,
    ):
        futures: set[Future[Entry]] = {pool.submit(maker.make, line) for line in lines}
        while futures:
            done, futures = wait(futures, timeout=POLL_S, return_when=FIRST_COMPLETED)
            for future in done:
                if future.cancelled():
                    continue
                entry = future.result()
                entries.append(entry)
                maker.progress.pop(entry.key, None)
                if entry.status != "completed":
                    bar.write(f"line {entry.line}: {entry.status}: {entry.error}", file=sys.stderr)
            if stop.is_set():
                for future in futures:
                    future.cancel()
            bar.set_postfix(failed=sum(entry.status != "completed" for entry in entries), refresh=False)
            bar.update(round(len(entries) + sum(list(maker.progress.values())) / 100, 2) - bar.n)
    return entries


@contextmanager
def _signals_set(stop: threading.Event) -> Iterator[None]:
    """Ctrl-C and SIGTERM (`ray job stop`) set the event here, instead of raising wherever the process is."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda *_: stop.set())
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _warn_of_a_passing_folder(out: Path) -> None:
    """A Ray job with a working directory runs in a copy of it, which the cluster removes at some time."""
    if "working_dir_files" in out.resolve().parts:
        print(
            f"out: {out.resolve()} is inside the job's copy of its working directory, which Ray removes when it needs "
            "the room; an absolute path would keep the videos",
            file=sys.stderr,
        )


def main(arguments: list[str] | None = None) -> int:
    """Exit status: 0 when every line has its video, 1 when not, 2 when nothing could begin, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="python -m app.jobs.generate", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, required=True, help="Serve config file with one worldstage application")
    parser.add_argument("--prompts", type=Path, required=True, help="a prompt or a JSON request a line")
    parser.add_argument("--out", type=Path, required=True, help="folder for the videos and the manifest")
    parser.add_argument("--in-flight", type=int, default=4, help="jobs at a time (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.in_flight < 1:
        parser.error(f"--in-flight: got {options.in_flight}, expected 1 or more")
    try:
        lines, content = read_prompts(options.prompts), read_application(options.config)
        with Manifest(options.out) as manifest:
            _warn_of_a_passing_folder(options.out)
            with served(content, lambda line: print(line, flush=True)) as address:
                return _run(lines, address, manifest, options.in_flight)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return INTERRUPTED
    except (PromptsError, ManifestError, ApplicationError, Refused) as error:
        print(error, file=sys.stderr)
        return 2


def _run(lines: Sequence[PromptLine], address: str, manifest: Manifest, in_flight: int) -> int:
    stop = threading.Event()
    client = VideoClient(address, stop)
    cards = [
        ModelCard.model_validate(
            {name: model[name] for name in ModelCard.model_fields if name != "name"} | {"name": served_as}
        )
        for served_as, model in client.models().items()
    ]
    _check(lines, cards)
    todo = [line for line in lines if not is_done(line, manifest, cards)]
    print(f"{len(lines)} lines, {len(lines) - len(todo)} of them done in {manifest.path}", flush=True)
    with _signals_set(stop):
        entries = make_all(todo, client, manifest, stop, in_flight)
    completed = sum(entry.status == "completed" for entry in entries)
    print(f"{completed} made, {len(todo) - completed} not; manifest: {manifest.path}", flush=True)
    if stop.is_set():
        return INTERRUPTED
    return 0 if completed == len(todo) else 1


def _check(lines: Sequence[PromptLine], cards: Sequence[ModelCard]) -> None:
    """Every line against the served models.  Raises PromptsError with every fault found."""
    faults = []
    for line in lines:
        try:
            effective(line, cards)
        except ApiError as error:
            faults.append(f"line {line.number}: {error}")
    if faults:
        raise PromptsError("\n".join(faults))


if __name__ == "__main__":
    sys.exit(main())
