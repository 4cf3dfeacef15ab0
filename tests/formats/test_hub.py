"""Finding a model: a local folder, or a hub id answered by a hub that runs here, with files over HTTP."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from hemiola.errors import CheckpointError
from hemiola.formats.hub import resolve

COMMIT = "5" * 40
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"not needed",
    "pytorch_model.bin": b"not needed",
}


class FakeHub(BaseHTTPRequestHandler):
    """One public model, owner/tiny."""

    def log_message(self, *args: object) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        path, headers = self.path.partition("?")[0], {}
        name = path.rpartition("/")[2]
        if path in ("/api/models/owner/tiny/revision/main", f"/api/models/owner/tiny/revision/{COMMIT}"):
            files = [{"rfilename": file} for file in FILES]
            status, body = 200, json.dumps({"id": "owner/tiny", "sha": COMMIT, "siblings": files}).encode()
        elif path == f"/api/models/owner/tiny/tree/{COMMIT}":
            tree = [{"type": "file", "path": file, "size": len(FILES[file]), "oid": digest(file)} for file in FILES]
            status, body = 200, json.dumps(tree).encode()
        elif path.startswith(f"/owner/tiny/resolve/{COMMIT}/") and name in FILES:
            status, body, headers = 200, FILES[name], {"ETag": f'"{digest(name)}"', "X-Repo-Commit": COMMIT}
        else:
            code = "RevisionNotFound" if path.startswith("/api/models/owner/tiny/") else "RepoNotFound"
            status, body, headers = 404, b"{}", {"X-Error-Code": code}
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET


def digest(name: str) -> str:
    return hashlib.sha1(FILES[name]).hexdigest()


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    """A hub at a port of this machine that huggingface_hub takes for its own, and an empty cache."""
    with ThreadingHTTPServer(("127.0.0.1", 0), FakeHub) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        yield server
        server.shutdown()
        thread.join()


def test_a_local_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "tiny").mkdir(parents=True)
    assert resolve(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/tiny") == Path("owner/tiny")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve("~/owner") == tmp_path / "owner"


@pytest.mark.parametrize("model", ["/no/such/folder", "./owner/tiny", "justaname", "a/b/c", "", "../x"])
def test_what_cannot_be_a_hub_id_is_not_looked_up(model: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hemiola.formats.hub.snapshot_download", None)  # calling it would be a TypeError
    if model == "":
        assert resolve(model) == Path()  # the current folder
        return
    with pytest.raises(CheckpointError, match="no such model folder; expected a folder that exists, or a hub id"):
        resolve(model)


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="no such model folder; found a file"):
        resolve(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("revision", [None, COMMIT])
def test_a_download_takes_what_is_needed_and_shows_progress(
    hub: ThreadingHTTPServer, capfd: pytest.CaptureFixture[str], revision: str | None
) -> None:
    folder = resolve("owner/tiny", revision)
    needed = {"config.json", "model.safetensors", "chat_template.jinja"}
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {name: FILES[name] for name in needed}
    out, err = capfd.readouterr()
    assert out == ""
    assert "Fetching 3 files" in err


def test_what_was_downloaded_is_found_again_without_the_hub(hub: ThreadingHTTPServer) -> None:
    folder = resolve("owner/tiny")
    hub.shutdown()
    hub.server_close()
    assert resolve("owner/tiny") == folder


def test_an_unknown_model_or_revision(hub: ThreadingHTTPServer) -> None:
    with pytest.raises(
        CheckpointError, match=r"owner/other: neither a local folder nor available.*Repository Not Found"
    ):
        resolve("owner/other")
    with pytest.raises(CheckpointError, match=r"owner/tiny at v9: neither a local.*Revision Not Found"):
        resolve("owner/tiny", "v9")


def test_no_hub_and_no_copy(hub: ThreadingHTTPServer) -> None:
    hub.shutdown()
    hub.server_close()
    with pytest.raises(CheckpointError, match=r"owner/tiny: neither a local folder nor available from the hub; found"):
        resolve("owner/tiny")
