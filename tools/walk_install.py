"""Walk docs/install.md in a fresh container: ``python3 tools/walk_install.py DIR``, as root, with debootstrap.

DIR becomes a Debian of its own (debootstrap, minbase). It must not exist, or hold what an earlier walk has made
(``--again`` walks in it once more, with a new home and no environments). The commands of the section "On a virtual
cluster" run in it as they stand, in one shell, with an empty environment and a home of its own; they clone this
checkout's HEAD. It is a chroot with its own mounts, processes and host name. Of the network it has what this machine
has, and of this machine's settings only those that say where package indexes are.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SECTION = "On a virtual cluster"
MIRROR = "http://deb.debian.org/debian"
#: settings of package indexes: their variables, files and directories that they name
INDEX_VARIABLES = re.compile(r"^(PIP|UV)_[A-Z_]+$|^(https?|no)_proxy$", re.IGNORECASE)
INDEX_FILES = ("etc/pip.conf", "etc/xdg/pip", "etc/resolv.conf")
#: a place of its own: a package of the walk writes the usual file anew
CERTIFICATES, OURS = Path("/etc/ssl/certs/ca-certificates.crt"), "source/certificates.crt"
PLACES = re.compile(r"(?:file://)?(/[^\s:,]+)")
#: the container waits no longer for all of the walk
LIMIT_S = 3600


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--suite", default="bookworm", help="release of Debian")
    parser.add_argument("--again", action="store_true", help="walk once more in a container that is there")
    parser.add_argument("--without-vllm", action="store_true", help="embedded engines: 4 GB less to download")
    arguments = parser.parse_args()
    if os.geteuid() != 0 or not (shutil.which("debootstrap") and shutil.which("unshare")):
        print("this needs root, debootstrap and unshare: apt-get install debootstrap util-linux", file=sys.stderr)
        return 2
    place = arguments.directory.resolve()
    if place.exists() and not arguments.again:
        print(f"{place} exists: remove it, or give --again", file=sys.stderr)
        return 2
    if not place.exists():
        subprocess.run(["debootstrap", "--variant=minbase", arguments.suite, str(place), MIRROR], check=True)
    prepare(place)
    lines = commands(without_vllm=arguments.without_vllm)
    script = place / "walk.sh"
    script.write_text(traced(lines), encoding="utf-8")
    began = time.monotonic()
    code = enter(place, ["bash", "/walk.sh"])
    print(
        f"\n{'walked' if code == 0 else f'ended with code {code}'} after {time.monotonic() - began:.0f} s", flush=True
    )
    return code


def commands(*, without_vllm: bool) -> list[str]:
    """Return the lines of the section, as they stand."""
    page = (ROOT / "docs/install.md").read_text(encoding="utf-8")
    text = page.partition(f"\n## {SECTION}\n")[2].partition("\n## ")[0]
    lines = [line.strip() for line in re.findall(r"^ {4}\S.*$", text, re.MULTILINE)]
    if not lines:
        raise SystemExit(f"docs/install.md has no commands in {SECTION!r}")
    if without_vllm:
        lines = [re.sub(r" --vllm-python \S+", "", line) for line in lines if "--role vllm" not in line]
    return lines


def traced(lines: list[str]) -> str:
    """Return a script that says each line before it runs and how long it took, and ends at the first that fails."""
    parts = ["set -euo pipefail", "cd ~"]
    for line in lines:
        parts += [f"printf '\\n$ %s\\n' {quote(line)}", "SECONDS=0", line, 'echo "    ($SECONDS s)"']
    return "\n".join([*parts, ""])


def quote(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def prepare(place: Path) -> None:
    """Put a copy of the repository and the settings of package indexes into the container."""
    for left in ("root", "shared", "source"):
        shutil.rmtree(place / left, ignore_errors=True)
    (place / "root").mkdir(mode=0o700)
    (place / "source").mkdir()
    command = ["git", "clone", "--quiet", "--bare", "--no-local", str(ROOT), str(place / "source/hpcrl.git")]
    subprocess.run(command, check=True)
    if CERTIFICATES.is_file():
        shutil.copy(CERTIFICATES, place / OURS)
    for name in INDEX_FILES:
        ours, its = Path("/", name), place / name
        if ours.exists():
            its.parent.mkdir(parents=True, exist_ok=True)
            shutil.copytree(ours, its, dirs_exist_ok=True) if ours.is_dir() else shutil.copy(ours, its)


def index_settings() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if INDEX_VARIABLES.match(name)}


def index_places() -> list[Path]:
    """Return directories of this machine that are a package index, as the variables of pip and uv name them."""
    named = {Path(found) for value in index_settings().values() for found in PLACES.findall(value)}
    named |= {Path(found) for found in PLACES.findall(pip_settings())}
    return sorted(place for place in named if place.is_dir())


def pip_settings() -> str:
    asked = [sys.executable, "-m", "pip", "config", "list"]
    return subprocess.run(asked, capture_output=True, text=True, check=False).stdout.replace("'", " ")


def enter(place: Path, command: list[str]) -> int:
    """Run a command in the container; nothing of it goes on afterwards. Returns its exit code."""
    mounts = [f"mount --rbind /dev {quote(str(place / 'dev'))}", f"mount -t proc proc {quote(str(place / 'proc'))}"]
    mounts += [f"mount --rbind /sys {quote(str(place / 'sys'))}", f"mount -t tmpfs tmpfs {quote(str(place / 'tmp'))}"]
    mounts.append(f"mount -t tmpfs tmpfs {quote(str(place / 'dev/shm'))}")
    for index in index_places():
        target = place / str(index).lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        mounts.append(f"mount --bind -o ro {quote(str(index))} {quote(str(target))}")
    settings = {
        "HOME": "/root",
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "LANG": "C.UTF-8",
        "DEBIAN_FRONTEND": "noninteractive",
        "HPCRL_SOURCE": "/source/hpcrl.git",
        **index_settings(),
    }
    if (place / OURS).is_file():
        settings |= dict.fromkeys(("PIP_CERT", "SSL_CERT_FILE"), f"/{OURS}")
    words = ["env", "-i", *(f"{name}={value}" for name, value in settings.items()), *command]
    inside = " ".join(quote(word) for word in ["chroot", str(place), *words])
    script = "\n".join(["set -e", "hostname walk", *mounts, f"exec {inside}"])
    # when the first process of the name space ends, the kernel ends all others
    isolated = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--propagation=private"]
    process = subprocess.Popen([*isolated, "bash", "-c", script], stdin=subprocess.DEVNULL)
    try:
        return process.wait(LIMIT_S)
    except subprocess.TimeoutExpired:
        print(f"the walk did not end within {LIMIT_S} s", file=sys.stderr)
        return 124
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
