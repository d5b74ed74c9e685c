"""What is reused, what never is, and why: the oracles of the cache's contract, one test each."""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cache_actors.blob_store import Pin
from cache_actors.latent_cache import LatentCache
from cache_actors.latent_calls import Lookup
from cache_actors.latent_entries import EntryFilter, entry_key
from cache_actors.latent_report import CacheReport, Reason
from cache_actors.latent_shadow import ShadowResult
from cache_actors.similarity_map import MapError
from tests.latents import (
    REPORT,
    SHAPE,
    WordEmbedder,
    ask,
    audit,
    identity,
    latents,
    opened,
    save,
    similarity_map,
    tier,
)

LEFT, SAME, RIGHT = "a red ball moves left", "A red ball moving to the left", "a red ball moves right"
SIMILAR: dict[str, Any] = {"experimental": False}


def reason(answer: Any) -> str | None:
    return None if answer.report.reason is None else str(answer.report.reason)


# --- levels 0 and 1 ------------------------------------------------------------------------------------------------


def test_the_same_request_gets_the_stored_files(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    assert reason(ask(cache, identity())) == "no_candidate"
    assert save(cache, identity())
    answer = ask(cache, identity())
    assert answer.blobs == {"video.mp4": b"mp4"}
    assert answer.report.model_dump(include={"decision", "level", "skipped_steps", "seed_used", "reason"}) == {
        "decision": "hit",
        "level": 0,
        "skipped_steps": 20,
        "seed_used": 1,
        "reason": None,
    }


def test_a_stored_result_is_found_before_the_queue_and_a_miss_leaves_no_trace(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    before = Lookup(identity(), "exact", "req", "job", seed_given=True)
    assert cache.stored_result(before) is None
    assert cache.stats()["lookups"] == []
    save(cache, identity())
    for none in ({"word": "refresh"}, {"word": "off"}, {"seed_given": False}):
        assert cache.stored_result(replace(before, **none)) is None
    answer = cache.stored_result(before)
    assert answer is not None
    assert (answer.report.level, answer.blobs) == (0, {"video.mp4": b"mp4"})
    assert cache.stats()["lookups"] == [{"level": 0, "decision": "hit", "reason": None, "count": 1}]
    assert [line["event_type"] for line in audit(tmp_path)][-1] == "lookup_hit"


def test_another_output_format_resumes_the_trajectory(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    save(cache, identity())
    answer = ask(cache, identity(fps=16))
    assert (answer.report.level, answer.step, answer.report.skipped_steps) == (1, 10, 10)
    assert answer.blobs == {"state": latents(10)}


def test_other_numerics_get_files_but_no_state(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    save(cache, identity())
    assert ask(cache, identity(numerics="H200")).report.level == 0
    assert ask(cache, identity(numerics="H200", fps=16)).report.decision == "miss"


def test_the_deepest_state_stays(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    for step in (5, 15, 10):
        save(cache, identity(), files=None, donors={}, state=(step, latents(step)))
    answer = ask(cache, identity())
    assert (answer.step, answer.blobs["state"]) == (15, latents(15))


def test_a_state_before_reused_steps_is_not_stored(tmp_path: Path) -> None:
    """The residuals that those steps reuse are not in it, so a resumed run would not be bit-equal."""
    cache = opened(tmp_path)
    of = identity(reused_steps=(12, 14))
    save(cache, of, files=None, state=(13, latents()))
    assert cache.stats()["saves"] == {"step_cache": 1}
    save(cache, of, files=None, state=(15, latents()))
    assert ask(cache, of).step == 15


def test_refresh_computes_anew_and_replaces(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    save(cache, identity())
    answer = ask(cache, identity(), "refresh")
    assert (answer.report.decision, reason(answer)) == ("bypass", "bypass_request")
    save(cache, identity(), files={"video.mp4": b"new"}, word="exact")
    assert ask(cache, identity()).blobs == {"video.mp4": b"mp4"}  # saving again is no replacement
    save(cache, identity(), files={"video.mp4": b"new"}, word="refresh")
    assert ask(cache, identity()).blobs == {"video.mp4": b"new"}


def test_a_drawn_seed_asks_for_a_new_video(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    save(cache, identity())
    answer = ask(cache, identity(), seed_given=False)
    assert (answer.report.decision, reason(answer)) == ("bypass", "no_seed")


@pytest.mark.parametrize(
    "changes",
    [
        {"tenant": "other"},
        {"weights": "d" * 64},
        {"width": 64},
        {"num_inference_steps": 30},
        {"guidance_scale": 6.0},
        {"negative_prompt": "blurry"},
        {"flow_shift": 5.0},
        {"loras": ({"weights": "e" * 64, "scale": 1.0, "expert": "transformer"},)},
        {"step_profile": "profile"},
        {"dtype": "bfloat16"},
    ],
    ids=lambda changes: next(iter(changes)),
)
@pytest.mark.parametrize("word", ["exact", "approximate"])
def test_another_partition_never_hits_and_the_miss_names_the_field(
    tmp_path: Path, changes: dict[str, Any], word: str
) -> None:
    cache = opened(tmp_path, {"experimental": True})
    save(cache, identity(), word=word)
    answer = ask(cache, identity(**changes), word)
    (field,) = changes
    assert answer.report.decision == "miss"
    assert answer.blobs == {}
    if field == "tenant":  # what another tenant stores is not even hinted at
        assert (reason(answer), answer.report.differs) == ("no_candidate", ())
    else:
        assert (reason(answer), answer.report.differs) == ("incompatible", (field,))


# --- level 2 -------------------------------------------------------------------------------------------------------


def test_a_paraphrase_gets_the_donor_s_latents(tmp_path: Path) -> None:
    cache = opened(tmp_path, SIMILAR)
    save(cache, identity(LEFT))
    answer = ask(cache, identity(SAME), "approximate")
    report = answer.report
    assert (report.decision, report.level, report.reason) == ("hit", 2, None)
    assert report.donor == entry_key("donor", identity(LEFT)).name
    assert (answer.step, report.skipped_steps, answer.blobs) == (3, 3, {"latents": latents(3)})
    assert report.derived_depth == 1
    assert 0.6 < (report.similarity or 0) < 0.9
    assert ask(cache, identity(SAME), "exact").report.decision == "miss"


def test_more_similar_skips_more(tmp_path: Path) -> None:
    cache = opened(tmp_path, SIMILAR)
    save(cache, identity("the red ball moves left"), files=None, state=None)
    assert ask(cache, identity("the red ball moves left"), "approximate").report.skipped_steps == 6


@pytest.mark.parametrize(
    ("prompt", "detail"),
    [
        (RIGHT, "direction: right / left"),
        ("a blue ball moves left", "colour: blue / red"),
        ("no red ball moves left", "negation: no / nothing"),
        ("two red balls move left", "number: #2 balls move / ball moves"),
    ],
)
def test_another_meaning_never_hits(tmp_path: Path, prompt: str, detail: str) -> None:
    cache = opened(tmp_path, SIMILAR)
    save(cache, identity(LEFT))
    answer = ask(cache, identity(prompt), "approximate")
    assert (answer.report.decision, reason(answer), answer.report.detail) == ("miss", "guard_terms", detail)
    assert answer.report.candidates_tried == 1


def test_several_candidates_are_tried(tmp_path: Path) -> None:
    cache = opened(tmp_path, SIMILAR, similarity_map=similarity_map(tier(0.2, 3)))
    far = "the red ball is moving leftwards"  # fewer words in common than the two that mean something else
    for prompt in (RIGHT, "a red ball moves up", far):
        save(cache, identity(prompt))
    answer = ask(cache, identity(LEFT), "approximate")
    assert (answer.report.donor, answer.report.candidates_tried) == (entry_key("donor", identity(far)).name, 3)


def test_seed_policy(tmp_path: Path) -> None:
    cache = opened(tmp_path, SIMILAR)
    save(cache, identity(LEFT, seed=1))
    own = ask(cache, identity(SAME, seed=2), "approximate")
    assert reason(own) == "seed_mismatch"
    donor = ask(cache, identity(SAME, seed=2), "approximate", seed_policy="donor")
    assert (donor.report.level, donor.report.seed_used) == (2, 1)
    assert reason(ask(cache, identity(SAME), "approximate", seed_given=False)) == "no_seed"
    assert ask(cache, identity(SAME, 9), "approximate", seed_given=False, seed_policy="donor").report.level == 2


def test_what_a_donor_started_is_no_donor_no_state_and_no_exact_result(tmp_path: Path) -> None:
    cache = opened(tmp_path, SIMILAR)
    save(cache, identity(LEFT))
    b = identity(SAME)
    hit = ask(cache, b, "approximate").report
    save(cache, b, report=hit, word="approximate", files={"video.mp4": b"derived"})
    assert cache.stats()["entries"] == {"result": 1, "state": 1, "donor": 1, "approx": 1}
    assert ask(cache, b, "exact").report.decision == "miss"
    again = ask(cache, b, "approximate")
    assert (again.report.level, again.report.derived_depth, again.blobs) == (0, 1, {"video.mp4": b"derived"})
    c = ask(cache, identity("the red ball is moving left"), "approximate")
    assert c.report.donor == entry_key("donor", identity(LEFT)).name


def test_purging_a_donor_removes_what_derives_from_it(tmp_path: Path) -> None:
    cache = opened(tmp_path, SIMILAR)
    save(cache, identity(LEFT))
    hit = ask(cache, identity(SAME), "approximate").report
    save(cache, identity(SAME), report=hit, word="approximate")
    cache.remove(entry_key("donor", identity(LEFT)).name)
    assert cache.stats()["entries"] == {"result": 1, "state": 1}


def test_no_measured_bound_no_hit_unless_experimental(tmp_path: Path) -> None:
    weak = similarity_map(tier(0.6, 3, ssim=0.5))
    few = similarity_map(tier(0.6, 3, pairs=5))
    for i, (served, text) in enumerate(((weak, "mean SSIM"), (few, "5 pairs"))):
        cache = opened(tmp_path / str(i), SIMILAR, similarity_map=served)
        save(cache, identity(LEFT))
        answer = ask(cache, identity(SAME), "approximate")
        assert reason(answer) == "unqualified"
        assert text in (answer.report.detail or "")
        cache.close(1)
        cache = opened(tmp_path / str(i), {"experimental": True}, similarity_map=served)
        answer = ask(cache, identity(SAME), "approximate")
        assert (answer.report.level, answer.report.experimental) == (2, True)


def test_a_map_speaks_only_of_what_it_was_measured_on(tmp_path: Path) -> None:
    cache = opened(tmp_path, SIMILAR)
    other = identity(LEFT, num_inference_steps=30)
    save(cache, other)
    answer = ask(cache, identity(SAME, num_inference_steps=30), "approximate")
    assert (reason(answer), answer.report.differs) == ("unqualified", ("num_inference_steps",))


def test_a_donor_without_the_step_is_passed_over(tmp_path: Path) -> None:
    cache = opened(tmp_path, SIMILAR)
    save(cache, identity(LEFT), donors={6: latents(6)}, files=None, state=None)
    assert reason(ask(cache, identity(SAME), "approximate")) == "no_usable_step"  # its score allows 3 only
    save(cache, identity(LEFT), donors={5: latents(5)}, files=None, state=None, word="refresh")  # no step of the map
    assert cache.stats()["entries"] == {"donor": 1}


@pytest.mark.parametrize("fault", ["raises", "nan", "zero", "size", "slow"])
def test_a_faulty_embedder_is_a_miss(tmp_path: Path, fault: str) -> None:
    embedder = WordEmbedder()
    cache = opened(tmp_path, {"lookup_timeout_s": 0.05}, embedder=embedder)
    bad = {
        "nan": np.full((1, 64), np.nan, np.float32),
        "zero": np.zeros((1, 64), np.float32),
        "size": np.ones((1, 3), np.float32),
    }
    release = threading.Event()

    def embed(texts: list[str]) -> np.ndarray:
        if fault == "raises":
            raise RuntimeError("lost")
        if fault == "slow":
            release.wait(10)
            return WordEmbedder().embed(texts)
        return bad[fault]

    embedder.embed = embed  # type: ignore[method-assign]
    answer = ask(cache, identity(LEFT), "approximate")
    expected = {"raises": "encoder_error", "slow": "lookup_timeout"}.get(fault, "bad_vector")
    assert (answer.report.decision, reason(answer)) == ("miss", expected)
    release.set()
    save(cache, identity(LEFT))
    stored = cache.stats()["entries"]
    assert stored == ({"result": 1, "state": 1, "donor": 1} if fault == "slow" else {"result": 1, "state": 1})


def test_an_empty_prompt_is_not_embedded(tmp_path: Path) -> None:
    embedder = WordEmbedder()
    cache = opened(tmp_path, SIMILAR, embedder=embedder)
    assert reason(ask(cache, identity(""), "approximate")) == "empty_prompt"
    assert embedder.asked == []


def test_a_prompt_is_embedded_once(tmp_path: Path) -> None:
    embedder = WordEmbedder()
    cache = opened(tmp_path, SIMILAR, embedder=embedder)
    for _ in range(3):
        ask(cache, identity(LEFT), "approximate")
    save(cache, identity(LEFT))
    assert embedder.asked == [LEFT]


def test_vectors_of_the_text_encoder_come_with_the_request(tmp_path: Path) -> None:
    encoder = {"embedder": {"kind": "text_encoder", "dim": 64, "fingerprint": "words"}}
    cache = opened(tmp_path, encoder, embedder=None)
    vectors = WordEmbedder().embed([LEFT, SAME])
    save(cache, identity(LEFT), vector=vectors[0])
    assert ask(cache, identity(SAME), "approximate", vector=vectors[1]).report.level == 2
    assert reason(ask(cache, identity(SAME), "approximate")) == "bad_vector"


def test_a_map_of_another_embedder_or_guard_stops_the_start(tmp_path: Path) -> None:
    for i, changes in enumerate(({"embedder": "x"}, {"meaning": 0})):
        with pytest.raises(MapError, match="calibrate again"):
            opened(tmp_path / str(i), SIMILAR, similarity_map=similarity_map(**changes))


# --- modes, faults, limits -----------------------------------------------------------------------------------------


def test_modes(tmp_path: Path) -> None:
    cache = opened(tmp_path, SIMILAR, mode="write_only")
    assert save(cache, identity())
    assert reason(ask(cache, identity())) == "write_only"
    cache.close(1)
    cache = opened(tmp_path, SIMILAR, mode="read_only")
    assert not save(cache, identity(seed=2))
    assert ask(cache, identity()).report.level == 0
    assert reason(ask(cache, identity(seed=2))) == "no_candidate"


def test_a_request_that_says_off_leaves_nothing(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    assert not save(cache, identity(), word="off")
    assert cache.stats()["entries"] == {}


def test_lookups_do_not_wait_for_saves_and_a_full_queue_drops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = opened(tmp_path, SIMILAR, save_queue_mib=0.001)
    save(cache, identity())
    blocked, release = threading.Event(), threading.Event()
    original = type(cache._store)._write

    def slow(self: Any, *arguments: Any) -> Any:
        blocked.set()
        release.wait(20)
        return original(self, *arguments)

    monkeypatch.setattr(type(cache._store), "_write", slow)
    from cache_actors.latent_calls import Save

    def offer(seed: int) -> bool:
        return cache.offer(Save(identity(seed=seed), "r", "j", REPORT, "exact", files={"video.mp4": b"x" * 600}))

    began = time.perf_counter()
    assert offer(2)
    assert blocked.wait(10)
    assert not offer(3)
    assert ask(cache, identity()).report.level == 0
    assert ask(cache, identity(SAME), "approximate").report.level == 2
    assert time.perf_counter() - began < 5  # the write itself would block for 20 s
    release.set()
    assert cache.flush(10)
    assert cache.stats()["saves"]["dropped"] == 1
    assert [line["event_type"] for line in audit(tmp_path)].count("save_dropped") == 1


@pytest.mark.parametrize("fault", ["flip", "truncate", "delete"])
def test_a_damaged_donor_is_quarantined_and_the_next_one_serves(tmp_path: Path, fault: str) -> None:
    cache = opened(tmp_path, SIMILAR)
    save(cache, identity(LEFT), donors={6: latents(6)})
    save(cache, identity("the red ball moves left"))
    victim = cache._store.get(entry_key("donor", identity(LEFT))).folder / "latents-0006"
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.unlink() if fault == "delete" else victim.write_bytes(data[: 50 if fault == "truncate" else None])
    asked = identity(LEFT, fps=99, numerics="other")  # its exact levels hold nothing
    answer = ask(cache, asked, "approximate")
    assert answer.report.donor == entry_key("donor", identity("the red ball moves left")).name
    assert answer.report.candidates_tried == 2
    assert ask(cache, asked, "approximate").report.candidates_tried == 1
    assert cache.stats()["removed"] == {"quarantined": 1}
    events = [line["event_type"] for line in audit(tmp_path)]
    assert events.count("quarantined") == events.count("kv_missing_after_vector_hit") == 1


def test_a_damaged_result_is_a_miss_with_its_reason(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    save(cache, identity(), state=None)
    (cache._store.get(entry_key("result", identity())).folder / "video.mp4").write_bytes(b"mpX")
    assert reason(ask(cache, identity())) == "corrupt"
    assert reason(ask(cache, identity())) == "no_candidate"


@pytest.mark.parametrize(
    "payload",
    [
        b"not a tensor file",
        latents(1, (1, 2, 2, 4, 8)),
        latents(1)[:-4],
        latents(1).replace(b"F32", b"I32"),
        latents(1).replace(b'"latents"', b'"stnetal"'),
    ],
)
def test_payloads_that_are_no_latents_of_the_request_are_not_stored(tmp_path: Path, payload: bytes) -> None:
    cache = opened(tmp_path, SIMILAR)
    save(cache, identity(), files=None, donors={3: payload}, state=(4, payload))
    assert cache.stats()["entries"] == {}
    assert cache.stats()["saves"] == {"bad_latents": 2}


def test_latents_of_another_shape_never_reach_the_sampler(tmp_path: Path) -> None:
    """Saved by a program with a fault: whole on disk, wrong all the same."""
    cache = opened(tmp_path)
    of = identity()
    save(cache, of, files=None, donors={})
    key = entry_key("state", of)
    facts = cache._store.get(key).facts
    cache._store.put(key, {"state": latents(1, (1, 2, 2, 4, 8))}, facts, replacing=True)
    assert reason(ask(cache, of)) == "corrupt"
    assert cache._store.get(key) is None


def test_a_time_to_live(tmp_path: Path) -> None:
    now = [1000.0]
    cache = opened(tmp_path, SIMILAR, ttl_s=60.0, clock=lambda: now[0])
    save(cache, identity())
    now[0] += 59
    assert ask(cache, identity()).report.level == 0
    now[0] += 2
    assert reason(ask(cache, identity())) == "expired"
    assert cache.sweep() == 3
    assert cache.stats()["similar"]["donors"] == 0
    assert reason(ask(cache, identity())) == "no_candidate"


def test_the_budget_holds_while_requests_are_served(tmp_path: Path) -> None:
    cache = opened(tmp_path, SIMILAR, budget_gib=0.0005)  # 512 KiB: about ten requests
    save(cache, identity(LEFT))
    pinned = entry_key("donor", identity(LEFT))
    cache.pin(pinned.name, Pin("me", time.time() + 600))
    for seed in range(2, 40):
        save(cache, identity(seed=seed))
        assert cache.stats()["disk_bytes"] <= 2**29 // 1000
        assert ask(cache, identity(SAME), "approximate").report.donor == pinned.name
    stats = cache.stats()
    assert stats["removed"]["evicted"] > 50
    assert stats["similar"]["donors"] == stats["entries"]["donor"]


def test_the_number_of_entries_is_bounded(tmp_path: Path) -> None:
    cache = opened(tmp_path, max_entries=4)
    for seed in range(9):
        save(cache, identity(seed=seed))
    assert sum(cache.stats()["entries"].values()) == 4


# --- restart -------------------------------------------------------------------------------------------------------


def test_a_restart_loses_nothing(tmp_path: Path) -> None:
    cache = opened(tmp_path, SIMILAR)
    save(cache, identity(LEFT))
    hit = ask(cache, identity(SAME), "approximate").report
    save(cache, identity(SAME), report=hit, word="approximate")
    cache.close(1)
    cache = opened(tmp_path, SIMILAR)
    assert ask(cache, identity(LEFT)).report.level == 0
    assert ask(cache, identity(LEFT, fps=16)).report.level == 1
    assert ask(cache, identity("the red ball moves left", fps=16), "approximate").report.level == 2
    assert ask(cache, identity(SAME), "approximate").report.derived_depth == 1
    assert ask(cache, identity(LEFT, width=64)).report.differs == ("width",)
    cache.remove(entry_key("donor", identity(LEFT)).name)
    assert "approx" not in cache.stats()["entries"]


def test_lookups_are_served_while_a_start_reads_entries(tmp_path: Path) -> None:
    cache = opened(tmp_path)
    save(cache, identity())
    cache.close(1)
    from tests.latents import config

    cold = LatentCache(config(tmp_path))
    assert reason(ask(cold, identity())) == "warming"
    cold.warm()
    assert ask(cold, identity()).report.level == 0


def _save_for_ever(root: str, committed: str) -> None:
    cache = opened(Path(root), {"experimental": True})
    with open(committed, "ab", buffering=0) as log:
        for seed in range(100_000):
            save(cache, identity(seed=seed), donors={3: latents(seed)}, state=(5, latents(seed)))
            log.write(b"%d\n" % seed)


def test_kill_9_in_the_middle_loses_no_committed_entry_and_serves_no_torn_one(tmp_path: Path) -> None:
    root, log = tmp_path / "cache", tmp_path / "log"
    child = os.fork()
    if child == 0:
        try:
            _save_for_ever(str(root), str(log))
        finally:
            os._exit(1)
    deadline = time.monotonic() + 30
    while (not log.exists() or log.stat().st_size < 12) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.07)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    seeds = [int(line) for line in log.read_text().split()]
    assert len(seeds) >= 5
    cache = opened(root, {"experimental": True})
    for seed in seeds:
        assert ask(cache, identity(seed=seed)).blobs == {"video.mp4": b"mp4"}
        assert ask(cache, identity(seed=seed, fps=3)).blobs == {"state": latents(seed)}
        similar = ask(cache, identity(SAME, seed=seed), "approximate")
        if similar.report.decision == "hit":  # only the nearest few are tried, and all prompts are one
            assert similar.blobs == {"latents": latents(seed)}
    assert "quarantined" not in cache.stats()["removed"]


# --- what is told --------------------------------------------------------------------------------------------------


def test_audit_and_counters_agree(tmp_path: Path) -> None:
    cache = opened(tmp_path, SIMILAR)
    ask(cache, identity(LEFT), "approximate", request_id="r1")
    save(cache, identity(LEFT))
    ask(cache, identity(LEFT), request_id="r2")
    ask(cache, identity(SAME), "approximate", request_id="r3")
    ask(cache, identity(RIGHT), "approximate", request_id="r4")
    ask(cache, identity(LEFT), "off", request_id="r5")
    lines = audit(tmp_path)
    lookups = [line for line in lines if line["event_type"].startswith("lookup")]
    assert [(line["request_id"], line["event_type"], line["level"]) for line in lookups] == [
        ("r1", "lookup_miss", None),
        ("r2", "lookup_hit", 0),
        ("r3", "lookup_hit", 2),
        ("r4", "lookup_miss", None),
        ("r5", "lookup_bypass", None),
    ]
    assert lookups[2]["skip_step"] == 3
    assert lookups[3]["reason"] == "guard_terms"
    stats = cache.stats()
    hits = sum(row["count"] for row in stats["lookups"] if row["decision"] == "hit")
    misses = sum(row["count"] for row in stats["lookups"] if row["decision"] == "miss")
    assert (hits, misses) == (2, 2)
    assert stats["hit_rate"] == {"0": 0.25, "1": 0.0, "2": 0.25}
    assert stats["skipped_steps"] == 23
    assert stats["saved_gpu_seconds"] == pytest.approx(10 * 20 / 20 + 10 * 3 / 20)
    stored = [line for line in lines if line["event_type"] == "save_stored"]
    assert sorted((line["kind"], tuple(line["saved_steps"])) for line in stored) == [
        ("donor", (3, 6)),
        ("result", ()),
        ("state", (10,)),
    ]
    assert all(line["request_id"] and line["tenant"] == "team" and line["partition"] for line in lines)
    assert not any(LEFT in str(line) for line in lines)


def test_a_failed_save_leaves_no_trace_but_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = opened(tmp_path, SIMILAR)

    def full(*arguments: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("cache_actors.blob_store._write_synced", full)
    save(cache, identity())
    assert cache.stats()["saves"] == {"disk_full": 3}
    assert [line["event_type"] for line in audit(tmp_path)] == ["save_failed"] * 3
    assert cache.stats()["disk_bytes"] == 0
    assert list((tmp_path / "store" / "incoming").iterdir()) == []
    monkeypatch.undo()
    save(cache, identity())
    assert ask(cache, identity()).report.level == 0


def test_an_index_that_cannot_take_a_donor_leaves_no_donor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from cache_actors.vector_index import IndexUnavailable, VectorIndex

    def refuse(*arguments: Any) -> None:
        raise IndexUnavailable("no faiss")

    cache = opened(tmp_path, SIMILAR)
    monkeypatch.setattr(VectorIndex, "add", refuse)
    save(cache, identity(), files=None, state=None)
    assert cache.stats()["entries"] == {}
    assert [line["event_type"] for line in audit(tmp_path)] == ["save_failed"]


def test_operators_list_pin_and_purge(tmp_path: Path) -> None:
    cache = opened(tmp_path, SIMILAR)
    save(cache, identity(LEFT))
    save(cache, identity(RIGHT, tenant="other"), files=None, state=None)
    listed = cache.entries(EntryFilter(tenant="team"), limit=2)
    assert len(listed) == 2
    rest = cache.entries(EntryFilter(tenant="team"), limit=2, after=listed[-1]["id"])
    assert len(rest) == 1
    assert "prompt" not in listed[0]
    donor = entry_key("donor", identity(LEFT))
    assert cache.pin(donor.name, Pin("me", 9e9))["pin"] == {"owner": "me", "until": 9e9}
    assert cache.entry(donor.name)["pin"] is not None
    assert cache.entry("y") is None
    assert cache.pin("y", None) is None
    tried = cache.purge(EntryFilter(tenant="team"), dry_run=True)
    assert len(tried["entries"]) == 3
    assert tried["bytes"] > 0
    assert cache.purge(EntryFilter(tenant="team"), dry_run=False)["entries"] == tried["entries"]
    assert cache.stats()["entries"] == {"donor": 1}
    assert cache.stats()["similar"]["donors"] == 1


def test_shadow_runs_are_chosen_recorded_and_suspend_a_bad_tier(tmp_path: Path) -> None:
    cache = opened(tmp_path, {"shadow_fraction": 1.0, "shadow_window": 4})
    save(cache, identity(LEFT))
    hit = ask(cache, identity(SAME), "approximate")
    assert (hit.report.shadow, hit.report.level) == (True, 2)
    assert cache.stats()["skipped_steps"] == 0  # nothing was skipped: the cold video is served
    save(cache, identity(SAME), report=hit.report, word="approximate")
    assert cache.stats()["entries"]["donor"] == 2  # and it was computed from noise
    for _ in range(4):
        cache.record_shadow(
            ShadowResult(
                request_id="r",
                job_id="j",
                tenant="team",
                partition=identity().partition(),
                donor="d",
                similarity=0.8,
                skip_steps=3,
                ssim=0.5,
                psnr_db=20.0,
                temporal_error=0.5,
            )
        )
    assert cache.stats()["similar"]["suspended_tiers"] == [3]
    events = [line["event_type"] for line in audit(tmp_path)]
    assert (events.count("shadow_result"), events.count("tier_suspended")) == (4, 1)
    asked = identity("the red ball is moving left", fps=9)
    assert reason(ask(cache, asked, "approximate")) == "tier_suspended"


def test_every_reason_is_spoken_of_somewhere() -> None:
    """`disabled` is said by the driver of a server without the block; all others by this package."""
    sources = "".join(path.read_text() for path in Path("cache_actors").glob("*.py"))
    said = {name for name in Reason.__members__ if sources.count(f"Reason.{name}") or name == "DISABLED"}
    said |= {"EXPIRED", "BLOB_MISSING"}  # by their values, from `BlobMissing.reason`
    assert said == set(Reason.__members__)
    assert CacheReport(decision="disabled", reason=Reason.DISABLED).skipped_steps == 0
    assert SHAPE[0] == 1
