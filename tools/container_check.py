"""Performs the steps of the serving image without Docker, then serves a model from the result.

    python tools/container_check.py

COPY and RUN steps of the `Dockerfile` are done in a temporary folder, with a fresh environment in
place of the image's Python. As root, the entry point then runs as the image's user and, where the
system allows it, with a read-only root. What is not done here: the base image and `useradd`.
"""

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).parents[1]
UID = 10001
SECONDS = 60


def steps(text: str) -> list[tuple[str, str]]:
    """Returns the instructions of a Dockerfile with their arguments."""
    lines = re.sub(r"\\\n", " ", text).splitlines()
    kept = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    return [(kind, rest.strip()) for kind, _, rest in (line.partition(" ") for line in kept)]


def build(app: Path, environment: dict[str, str]) -> None:
    """Does what the image's ARG, COPY and RUN instructions say, in the folder `app`."""
    for kind, rest in steps((ROOT / "Dockerfile").read_text()):
        if kind == "ARG":
            name, _, value = rest.partition("=")
            environment[name] = value
        elif kind == "COPY":
            *sources, target = shlex.split(rest)
            for source in sources:
                if (ROOT / source).is_dir():
                    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
                    shutil.copytree(ROOT / source, app / target, ignore=ignored)
                else:
                    shutil.copy(ROOT / source, app / target)
        elif kind == "RUN":
            command = re.sub(r"&& useradd .*", "", rest)
            print("RUN", " ".join(command.split()), flush=True)
            subprocess.run(["sh", "-ec", command], cwd=app, env=environment, check=True)


def confined(command: list[str]) -> list[str]:
    """Returns the command as the image's user under a read-only root, where root may do that."""
    if os.geteuid():
        print("not root: the server runs as this user, with a root that it could write")
        return command
    user = ["setpriv", f"--reuid={UID}", f"--regid={UID}", "--clear-groups", "--", *command]
    script = 'mount -o remount,bind,ro / && exec "$@"'
    isolated = ["unshare", "--mount", "sh", "-c", script, "sh"]
    if subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode:
        print("the root cannot be made read-only here")
        return user
    probe = [*isolated, *user[:5], "touch", f"/tmp/solodg-{os.getpid()}"]
    done = subprocess.run(probe, capture_output=True, text=True, check=False)
    assert done.returncode, "the root is not read-only"
    return [*isolated, *user]


def main() -> None:
    """Builds, serves, and checks health, a prediction, metrics and that torch is absent."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        app, venv, model = folder / "app", folder / "venv", folder / "model.onnx"
        app.mkdir()
        solodg = [sys.executable, "-m", "solodg"]
        small = ["--target", "sky", "--backbone", "small_cnn", "--steps", "5"]
        output = ["--output", folder / "run"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run([*solodg, "train", "toy", *small, *output], check=True, **quiet)
        subprocess.run([*solodg, "export", folder / "run", "--onnx", model], check=True, **quiet)
        subprocess.run([sys.executable, "-m", "venv", venv], check=True)
        environment = {"PATH": f"{venv / 'bin'}:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}
        environment |= {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
        build(app, environment)
        found = list(venv.glob("lib/python*/site-packages/torch"))
        assert not found, "torch was installed"
        check(venv, model, environment)
        size = sum(path.stat().st_size for path in venv.rglob("*") if path.is_file())
        print(f"ok: serves without torch; the environment has {size / 1e6:.0f} MB")


def check(venv: Path, model: Path, environment: dict[str, str]) -> None:
    """Starts the image's entry point at a free port and asks what a user and Docker ask."""
    known = dict(steps((ROOT / "Dockerfile").read_text()))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    entry = [*json.loads(known["ENTRYPOINT"]), *json.loads(known["CMD"])]
    changed = {"solodg": str(venv / "bin" / "solodg"), "/model/model.onnx": str(model)}
    command = [changed.get(word, word).replace("8000", port) for word in entry]
    health = json.loads(known["HEALTHCHECK"].split(" CMD ")[1])
    health = [str(venv / "bin" / "python"), *(word.replace("8000", port) for word in health[1:])]
    scratch = {"TMPDIR": "/dev/shm"}  # in memory, as --tmpfs /tmp is for the image
    process = subprocess.Popen(confined(command), env=environment | scratch, cwd="/")
    try:
        deadline = time.monotonic() + SECONDS
        while subprocess.run(health, env=environment, capture_output=True, check=False).returncode:
            assert process.poll() is None, "it ended"
            assert time.monotonic() < deadline, "it did not start"
            time.sleep(0.2)
        image = (ROOT / "docs" / "disc.png").read_bytes()
        image += bytes(3 * 1024**2)  # so that the form passes through a temporary file
        form = b'--x\r\nContent-Disposition: form-data; name="images"; filename="a.png"\r\n\r\n'
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/predict",
            form + image + b"\r\n--x--\r\n",
            {"Content-Type": "multipart/form-data; boundary=x"},
        )
        answer = json.load(urllib.request.urlopen(request, timeout=SECONDS))
        print("predicted:", answer["predictions"][0]["class"])
        metrics = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SECONDS)
        assert b"solodg_requests_total" in metrics.read()
    finally:
        process.terminate()
        process.wait(SECONDS)


if __name__ == "__main__":
    main()
