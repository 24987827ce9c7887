"""A server that speaks the protocol of the Hugging Face Hub as far as runs are pushed and read.

Repositories are in memory. Large files come by Git LFS, as from a client without Xet.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

TOKEN = "hf_owner"


class Hub(ThreadingHTTPServer):
    """Repositories by name: their visibility, and the files of each commit and branch."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.visibility: dict[str, str] = {}
        self.commits: dict[str, dict[str, bytes]] = {}  # by hash
        self.branches: dict[tuple[str, str], str] = {}  # (repo, branch) -> hash
        self.large: dict[str, bytes] = {}  # by SHA-256
        self.cards: list[str] = []  # whose metadata the client asked to validate
        self.asked: list[str] = []

    def files(self, repo: str, branch: str = "main") -> dict[str, bytes]:
        """The files of a branch."""
        return self.commits[self.branches[repo, branch]]

    def commit(self, repo: str, branch: str, files: dict[str, bytes]) -> str:
        """Adds files to a branch."""
        before = self.commits.get(self.branches.get((repo, branch), ""), {})
        oid = hashlib.sha1(f"{repo}{branch}{len(self.commits)}".encode()).hexdigest()
        self.commits[oid] = before | files
        self.branches[repo, branch] = oid
        return oid


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: object = b"", **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def refuse(self, status: int, code: str) -> None:
        self.answer(status, {"error": code}, X_Error_Code=code, X_Error_Message=code)

    def may(self, repo: str) -> bool:
        """Whether the repository is there for this client; answers otherwise."""
        owner = self.headers.get("Authorization") == f"Bearer {TOKEN}"
        if repo not in self.server.visibility or (
            self.server.visibility[repo] == "private" and not owner
        ):
            self.refuse(404 if owner else 401, "RepoNotFound")
            return False
        return True

    def content(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_PUT(self) -> None:
        body = self.content()
        oid = self.path.rsplit("/", 1)[1]
        assert hashlib.sha256(body).hexdigest() == oid
        self.server.large[oid] = body
        self.answer(200)

    def do_POST(self) -> None:
        path, body = urlsplit(self.path).path, self.content()
        hub = self.server
        hub.asked.append(path)
        if path == "/api/validate-yaml":
            hub.cards.append(json.loads(body)["content"])
            self.answer(200, {"errors": [], "warnings": []})
            return
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.refuse(401, "Unauthorized")
            return
        if path == "/api/repos/create":
            asked = json.loads(body)
            repo = f"{asked['organization'] or 'me'}/{asked['name']}"
            if repo in hub.visibility:
                self.answer(409, {"error": "exists", "url": f"{hub.url}/{repo}"})
                return
            private = asked.get("private") or asked.get("visibility") == "private"
            hub.visibility[repo] = "private" if private else "public"
            hub.commit(repo, "main", {".gitattributes": b""})
            self.answer(200, {"url": f"{hub.url}/{repo}", "id": repo})
        elif found := re.fullmatch(r"/api/models/(.+/.+)/branch/(.+)", path):
            repo, branch = found.groups()
            hub.branches.setdefault((repo, unquote(branch)), hub.branches[repo, "main"])
            self.answer(200, {})
        elif found := re.fullmatch(r"/api/models/(.+/.+)/preupload/.+", path):
            asked = json.loads(body)["files"]
            modes = [
                {
                    "path": f["path"],
                    "uploadMode": "regular" if f["path"].endswith((".json", ".md")) else "lfs",
                    "shouldIgnore": False,
                }
                for f in asked
            ]
            self.answer(200, {"files": modes})
        elif path.endswith("/info/lfs/objects/batch"):
            objects = [
                {
                    "oid": o["oid"],
                    "size": o["size"],
                    "actions": {"upload": {"href": f"{hub.url}/lfs/{o['oid']}"}},
                }
                for o in json.loads(body)["objects"]
            ]
            kind = "application/vnd.git-lfs+json"
            self.answer(200, {"transfer": "basic", "objects": objects}, Content_Type=kind)
        elif found := re.fullmatch(r"/api/models/(.+/.+)/commit/(.+)", path):
            repo, branch = found.groups()
            files = {}
            for line in body.splitlines():
                entry = json.loads(line)
                value = entry["value"]
                if entry["key"] == "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                elif entry["key"] == "lfsFile":
                    files[value["path"]] = hub.large[value["oid"]]
            oid = hub.commit(repo, unquote(branch), files)
            url = f"{hub.url}/{repo}/commit/{oid}"
            self.answer(200, {"success": True, "commitOid": oid, "commitUrl": url})
        else:
            self.refuse(404, "NoSuchAddress")

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        hub, path = self.server, unquote(urlsplit(self.path).path)
        hub.asked.append(path)
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path):
            repo, what, revision = found.groups()
            if not self.may(repo):
                return
            oid = self.commit_of(repo, revision or "main")
            if oid is None:
                self.refuse(404, "RevisionNotFound")
                return
            files = hub.commits[oid]
            if what == "tree":
                self.answer(200, [self.entry(name, files[name]) for name in files])
                return
            names = [{"rfilename": name} for name in files]
            self.answer(200, {"id": repo, "sha": oid, "siblings": names, "private": False})
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            repo, revision, name = found.groups()
            if not self.may(repo):
                return
            oid = self.commit_of(repo, revision)
            if oid is None or name not in hub.commits[oid]:
                self.refuse(404, "RevisionNotFound" if oid is None else "EntryNotFound")
                return
            content = hub.commits[oid][name]
            digest = hashlib.sha256(content).hexdigest()
            self.answer(200, content, ETag=f'"{digest}"', X_Repo_Commit=oid)
        else:
            self.refuse(404, "NoSuchAddress")

    def commit_of(self, repo: str, revision: str) -> str | None:
        if revision in self.server.commits:
            return revision
        return self.server.branches.get((repo, revision))

    @staticmethod
    def entry(name: str, content: bytes) -> dict:
        digest = hashlib.sha256(content).hexdigest()
        return {"type": "file", "path": name, "size": len(content), "oid": digest[:40]}


@contextmanager
def hub_server() -> Iterator[Hub]:
    """Runs the server in a thread."""
    with Hub() as hub:
        threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05}).start()
        try:
            yield hub
        finally:
            hub.shutdown()
