"""A stand-in for the application: the endpoints a job uses, with videos that are done after a few looks."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from app.config import VideoDefaults, VideoLimits

LOOKS = 2
"""Times a job is still in progress when it is asked for."""


class VideoServer:
    """Listens on a port of its own.  Prompts decide: "fail" fails, "slow" is never done, "refuse" is answered 400."""

    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.looks: dict[str, int] = {}
        self.fingerprint, self.steps = "f" * 64, 20
        self.full = 0
        """So many creations are answered 429 first."""
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                server.get(self)

            def do_POST(self) -> None:
                length = int(self.headers.get("Content-Length") or 0)
                server.post(self, self.rfile.read(length))

            def log_message(self, *_: object) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()

    @property
    def port(self) -> int:
        return self._http.server_address[1]

    def close(self) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    def get(self, handler: BaseHTTPRequestHandler) -> None:
        parts = handler.path.split("/")[1:]
        if parts == ["v1", "models"]:
            self._send(handler, 200, {"object": "list", "data": [self._model()]})
        elif parts == ["ready"]:
            self._send(handler, 200, {"status": "ready", "models": ["toy"]})
        elif parts[2] not in self.jobs:
            self._send(handler, 404, {"error": {"message": "no such video"}})
        elif parts[-1] == "content":
            data = f"video of {self.jobs[parts[2]]['prompt']}".encode()
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(data)))
            handler.end_headers()
            handler.wfile.write(data)
        else:
            self._send(handler, 200, self._look(parts[2]))

    def post(self, handler: BaseHTTPRequestHandler, body: bytes) -> None:
        if handler.path.endswith("/cancel"):
            job = self.jobs[handler.path.split("/")[3]]
            job["status"] = "cancelled"
            self._send(handler, 200, job)
            return
        fields = json.loads(body)
        if self.full:
            self.full -= 1
            self._send(handler, 429, {"error": {"message": "full"}}, {"Retry-After": "0"})
        elif fields["prompt"] == "refuse":
            self._send(handler, 400, {"error": {"message": "prompt: not this one"}})
        else:
            job = self.add(fields)
            self._send(handler, 200, job)

    def add(self, fields: dict[str, Any]) -> dict[str, Any]:
        job_id = f"video_{len(self.jobs)}"
        self.looks[job_id] = 0
        self.jobs[job_id] = {
            "id": job_id, "status": "queued", "progress": 0, "error": None, "prompt": fields["prompt"], "model": "toy",
            "size": "128x128", "num_frames": 17, "fps": 8, "num_inference_steps": self.steps, "guidance_scale": 5.0,
            "guidance_scale_2": None, "flow_shift": 3.0, "negative_prompt": "", "seed": fields.get("seed", 77),
            "max_sequence_length": 16, "outputs": [], "fingerprint": self.fingerprint, "timings": {"denoising": 1.5},
        }  # fmt: skip
        return self.jobs[job_id]

    def _look(self, job_id: str) -> dict[str, Any]:
        job = self.jobs[job_id]
        self.looks[job_id] += 1
        if job["status"] in ("queued", "in_progress"):
            job["status"], job["progress"] = "in_progress", 40
            if self.looks[job_id] > LOOKS and job["prompt"] != "slow":
                job["status"], job["progress"] = "completed", 100
                if job["prompt"] == "fail":
                    job["status"], job["error"] = "failed", {"code": "generation_failed", "message": "it broke"}
        return job

    def _model(self) -> dict[str, Any]:
        defaults = VideoDefaults(
            width=128, height=128, num_frames=17, fps=8, num_inference_steps=self.steps, max_sequence_length=16
        )
        return {
            "id": "toy", "object": "model", "created": 1, "owned_by": "worldstage", "kind": "video",
            "fingerprint": self.fingerprint, "dtype": "float32", "experts": 1, "topology": {"pp": 1, "cfg": 1},
            "defaults": defaults.model_dump(), "flow_shift": 3.0, "limits": VideoLimits().model_dump(),
        }  # fmt: skip

    def _send(
        self, handler: BaseHTTPRequestHandler, status: int, body: dict[str, Any], headers: dict[str, str] | None = None
    ) -> None:
        data = json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(data)
