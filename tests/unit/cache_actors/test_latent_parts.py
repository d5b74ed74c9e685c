"""Save queue, prompt vectors, audit rotation, donor index: the parts behind the latent cache."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import numpy as np
import pytest

from cache_actors.blob_store import EntryKey
from cache_actors.donor_index import DonorIndex
from cache_actors.latent_audit import Audit
from cache_actors.latent_config import Floors
from cache_actors.latent_shadow import ShadowWindows
from cache_actors.prompt_vectors import PromptVectors
from cache_actors.save_queue import SaveQueue
from tests.latents import WordEmbedder


def test_a_queue_works_in_order_refuses_what_does_not_fit_and_survives_a_fault() -> None:
    done: list[int] = []
    gate = threading.Event()

    def work(item: int) -> None:
        gate.wait(10)
        if item == 2:
            raise RuntimeError("bad item")
        done.append(item)

    queue: SaveQueue[int] = SaveQueue(work, max_bytes=10)
    assert [queue.offer(i, 4) for i in (1, 2, 3)] == [True, True, False]
    assert queue.waiting_bytes == 8
    assert not queue.flush(0.01)
    gate.set()
    assert queue.flush(10)
    assert queue.offer(4, 10)
    assert queue.close(10) == 0
    assert done == [1, 4]
    assert not queue.offer(5, 1)


def test_closing_drops_what_the_deadline_leaves() -> None:
    gate = threading.Event()
    queue: SaveQueue[int] = SaveQueue(lambda item: gate.wait(10) and None, max_bytes=10)
    for i in range(3):
        queue.offer(i, 1)
    assert queue.close(0.05) == 2
    gate.set()


def test_a_late_vector_serves_the_next_to_ask() -> None:
    embedder = WordEmbedder()
    gate, original = threading.Event(), embedder.embed

    def slow(texts: list[str]) -> np.ndarray:
        gate.wait(10)
        return original(texts)

    embedder.embed = slow  # type: ignore[method-assign]
    vectors = PromptVectors(embedder)
    with pytest.raises(TimeoutError):
        vectors.of("a fox", 0.01)
    gate.set()
    assert np.linalg.norm(vectors.of("a fox", 10)) == pytest.approx(1, abs=1e-5)
    vectors.of("a fox", 10)
    assert embedder.asked == ["a fox"]
    vectors.close()


def test_the_audit_log_rotates_and_its_failure_breaks_nothing(tmp_path: Path) -> None:
    audit = Audit(tmp_path / "a", max_bytes=500, keep=2)
    for i in range(20):
        audit.write("save_stored", {"request_id": f"r{i}"}, cache_id="c")
    files = sorted((tmp_path / "a").iterdir())
    assert len(files) == 3
    assert sum(f.stat().st_size for f in files) < 3 * 700
    last = json.loads((tmp_path / "a" / "audit.jsonl").read_text().splitlines()[-1])
    assert (last["request_id"], last["tenant"], last["event_type"], last["v"]) == ("r19", None, "save_stored", 1)
    for file in files:
        file.unlink()
    (tmp_path / "a").rmdir()
    audit.write("save_stored")
    assert audit.counts == {"save_stored": 21, "audit_failures": 1}


def test_donors_are_found_in_their_own_partition_alone() -> None:
    index = DonorIndex(2)
    x, y = np.array([1, 0], np.float32), np.array([0, 1], np.float32)
    for partition, name, vector in (("p", "a", x), ("p", "b", y), ("q", "a", x)):
        index.add(EntryKey(partition, name), vector)
    assert [c.key for c in index.nearest("p", x, 8)] == [EntryKey("p", "a"), EntryKey("p", "b")]
    assert [c.key for c in index.nearest("q", x, 8)] == [EntryKey("q", "a")]
    assert index.nearest("r", x, 8) == []
    index.add(EntryKey("p", "a"), y)  # a new vector for a known donor
    assert [c.score for c in index.nearest("p", x, 8)] == [0, 0]
    index.remove(EntryKey("p", "a"))
    index.remove(EntryKey("p", "a"))
    assert len(index) == 2
    assert [c.key.name for c in index.nearest("p", x, 8)] == ["b"]


def test_shadow_takes_its_fraction_and_the_same_requests_each_time() -> None:
    windows = ShadowWindows(0.25, 4, Floors())
    chosen = [windows.chosen(f"request {i}") for i in range(4000)]
    # Binomial(4000, 1/4): four standard deviations are 110.
    assert abs(sum(chosen) - 1000) < 110
    assert chosen == [windows.chosen(f"request {i}") for i in range(4000)]
    assert not any(ShadowWindows(0.0, 4, Floors()).chosen(str(i)) for i in range(100))
