"""Tries an installed SoloDG in an empty folder: trains, predicts, exports, predicts again.

.venv-release/bin/python tools/smoke.py
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


def main() -> None:
    """Runs the commands of the README with the package of this Python; any failure ends it."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(ROOT / "docs" / "disc.png", folder)

        def run(*command: str) -> str:
            # -P: neither this folder nor the checkout is on the path.
            done = subprocess.run(
                [sys.executable, "-P", *command], cwd=folder, text=True, stdout=subprocess.PIPE
            )
            if done.returncode:
                sys.exit(f"failed: {' '.join(command)}")
            return done.stdout

        place = run("-c", "import solodg; print(solodg.__file__)").strip()
        if "site-packages" not in place:
            sys.exit(f"this is not an installed package: {place}")
        small = ("--target", "sky", "--backbone", "small_cnn", "--steps", "30", "--output", "run")
        run("-m", "solodg", "train", "toy", *small)
        run("-m", "solodg", "export", "run", "--onnx", "model.onnx")
        for model in ("run", "model.onnx"):
            answer = run("-m", "solodg", "predict", model, "disc.png")
            if "disc" not in answer:
                sys.exit(f"{model}: {answer}")
        run("-m", "solodg", "report", "run")
        print(f"ok: {run('-m', 'solodg', '--version').strip()} at {place}")


if __name__ == "__main__":
    main()
