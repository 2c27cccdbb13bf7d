"""`hpcrl site bundle`: what is collected is installed without a network, and what is damaged is refused."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_wheels import digest_of, own_tiny_wheel, tiny_lock, tiny_wheel

from hpcrl.cli.main import main
from hpcrl.errors import UsageError
from hpcrl.sites.installation import bundle
from hpcrl.sites.installation.bundle import MANIFEST_NAME, read_bundle, unpack_role, write_bundle
from hpcrl.sites.installation.environment import install
from hpcrl.sites.installation.installers import Installer, InstallFailedError, pip_command
from hpcrl.sites.installation.interpreters import ask_interpreter, own_interpreter
from hpcrl.sites.installation.locks import Lock, parse_lock
from hpcrl.sites.installation.roles import Accelerator, SiteRole
from hpcrl.sites.installation.staging import staged

PYTHON, MACHINE = f"3.{sys.version_info.minor}", os.uname().machine
LOGIN = SiteRole.LOGIN


class Site:
    """Tiny packages on an index that is a directory, and an hpcrl whose lock has them."""

    def __init__(self, place: Path, patch: pytest.MonkeyPatch) -> None:
        self.place, self.index = place, place / "index"
        wheels = [tiny_wheel(self.index, "tiny_one"), tiny_wheel(self.index, "tiny_two", "2.0+cpu")]
        self.text = tiny_lock(wheels, unhashed=("tiny_two",))
        patch.setattr(bundle, "own_wheel", self.own_wheel)
        patch.setattr(bundle, "imports_of", lambda _: ("hpcrl", "tiny_one", "tiny_two"))
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            patch.delenv(name)
        for name, value in (("CONFIG_FILE", os.devnull), ("NO_INDEX", "1"), ("FIND_LINKS", str(self.index))):
            patch.setenv(f"PIP_{name}", value)

    def own_wheel(self, directory: Path) -> Path:
        return own_tiny_wheel(directory, files={"hpcrl/_data/locks/login.txt": self.text})

    def lock(self) -> Lock:
        return parse_lock("login", self.text, "of tests")

    def write(self, output: Path) -> str:
        return write_bundle(output, {LOGIN: self.lock()}, Accelerator.CUDA, PYTHON, MACHINE, say=lambda _: None)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A bundle that tests damage copies of."""
    place = tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as patch:
        Site(place, patch).write(place / "site.tar")
        patch.undo()
        patch.setattr(bundle, "imports_of", lambda _: ("hpcrl", "tiny_one", "tiny_two"))
        yield place / "site.tar"


def unpack(path: Path, prefix: Path) -> list[tuple[str, tuple[str, ...]]]:
    """Read a bundle as an installation does; give packages and digests."""
    with staged(prefix, "login") as stage:
        contents = unpack_role(path, read_bundle(path), LOGIN, stage)
        return [(package.name, package.digests) for package in contents.packages]


@pytest.mark.slow
def test_a_bundle_is_installed_without_a_network(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "site.tar"
    digest = site.write(path)
    assert digest == digest_of(path)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["index", "site.tar"]
    # the same wheels in a bundle are the same bytes
    assert site.write(tmp_path / "again.tar") == digest

    # nothing but the file: the index is gone, and variables name one that does not answer
    for wheel in site.index.iterdir():
        wheel.unlink()
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    made = install(
        tmp_path / "envs",
        "login",
        ask_interpreter(own_interpreter()),
        Installer("pip", pip_command()),
        lambda stage: unpack_role(path, read_bundle(path), LOGIN, stage),
        say=lambda _: None,
    )
    words = [made.python, "-I", "-c", "from importlib.metadata import version; print(version('tiny-two'))"]
    assert subprocess.run(words, capture_output=True, text=True, check=True).stdout == "2.0+cpu\n"
    # no wheels are left in the environment beside hpcrl's own
    assert [each.name for each in made.path.rglob("*.whl")] == ["hpcrl-0.1.0-py3-none-any.whl"]

    # by hand: plain pip, from the list that is in the file
    with tarfile.open(path) as archive:
        archive.extractall(tmp_path / "out", filter="data")
    monkeypatch.delenv("PIP_INDEX_URL")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "out/wheels"))
    words = [*pip_command(), "install", "-q", "--require-hashes", "--no-deps", "--target", str(tmp_path / "by-hand")]
    subprocess.run([*words, "-r", str(tmp_path / "out/login.txt")], check=True)
    assert {"hpcrl", "tiny_one", "tiny_two"} <= {each.name for each in (tmp_path / "by-hand").iterdir()}


@pytest.mark.slow
def test_what_was_collected_is_taken_up(site: Site, tmp_path: Path) -> None:
    missing = site.index / "tiny_two-2.0+cpu-py3-none-any.whl"
    missing.rename(tmp_path / missing.name)
    with pytest.raises(InstallFailedError, match="is unavailable in the version"):
        site.write(tmp_path / "site.tar")
    assert not (tmp_path / "site.tar").exists()
    # the first package is not asked for again
    collected = tmp_path / ".site.tar.collected/wheels"
    assert [path.name for path in collected.iterdir()] == ["tiny_one-1.0-py3-none-any.whl"]
    (site.index / "tiny_one-1.0-py3-none-any.whl").unlink()
    (tmp_path / missing.name).rename(missing)
    (site.index / "tiny_one-1.0-py3-none-any.whl").write_bytes(
        (collected / "tiny_one-1.0-py3-none-any.whl").read_bytes()
    )
    site.write(tmp_path / "site.tar")
    assert [name for name, _ in unpack(tmp_path / "site.tar", tmp_path)] == ["tiny-one", "tiny-two"]


def test_a_file_is_not_overwritten(site: Site, tmp_path: Path) -> None:
    (tmp_path / "site.tar").write_text("mine")
    with pytest.raises(UsageError, match="exists already"):
        site.write(tmp_path / "site.tar")
    assert (tmp_path / "site.tar").read_text() == "mine"


def members(path: Path) -> list[tuple[str, int, int]]:
    """Name, offset and size of what is in a bundle."""
    with tarfile.open(path) as archive:
        return [(member.name, member.offset_data, member.size) for member in archive]


def test_a_cut_bundle_is_refused(written: Path, tmp_path: Path) -> None:
    data, cut = written.read_bytes(), tmp_path / "cut.tar"
    whole = unpack(written, tmp_path)
    assert [len(digests) for _, digests in whole] == [1, 1]
    end = max(offset + size for _, offset, size in members(written))
    for length in [0, 100, 512, 700, *(offset for _, offset, _ in members(written)), end // 2, end - 1]:
        cut.write_bytes(data[:length])
        with pytest.raises(UsageError, match=r"\n    hint: "):
            unpack(cut, tmp_path)
        assert list(tmp_path.glob(".installing-*")) == []


def test_a_damaged_bundle_is_refused_wherever_it_is_damaged(written: Path, tmp_path: Path) -> None:
    data, damaged = bytearray(written.read_bytes()), tmp_path / "damaged.tar"
    tried = 0
    for name, offset, size in members(written):
        for position in {offset, offset + size // 3, offset + size - 1}:
            data[position] ^= 1
            damaged.write_bytes(data)
            data[position] ^= 1
            with pytest.raises(UsageError, match=r"\n    hint: ") as error:
                unpack(damaged, tmp_path)
            tried += 1
            if name != MANIFEST_NAME:
                assert f"{name} in {damaged} is damaged: its digest is another" in str(error.value)
    assert tried >= 3 * 5 - 1


def rewritten(source: Path, target: Path, change: dict[str, bytes | None]) -> Path:
    """Copy a bundle with members changed, added or (None) left out."""
    with tarfile.open(source) as old, tarfile.open(target, "w") as new:
        found = {member.name: old.extractfile(member).read() for member in old}  # type: ignore[union-attr]
        for name, content in {**found, **change}.items():
            if content is not None:
                entry = tarfile.TarInfo(name)
                entry.size = len(content)
                new.addfile(entry, io.BytesIO(content))
    return target


def test_what_is_not_listed_is_refused(written: Path, tmp_path: Path) -> None:
    extra = rewritten(written, tmp_path / "extra.tar", {"wheels/tiny_three-1.0-py3-none-any.whl": b"x"})
    with pytest.raises(UsageError, match="that it does not list"):
        unpack(extra, tmp_path)
    short = rewritten(written, tmp_path / "short.tar", {"wheels/tiny_one-1.0-py3-none-any.whl": None})
    with pytest.raises(UsageError, match=r"is truncated: wheels/tiny_one\S+ is missing"):
        unpack(short, tmp_path)


def test_names_in_a_manifest_stay_inside(written: Path, tmp_path: Path) -> None:
    with tarfile.open(written) as archive:
        manifest = json.loads(archive.extractfile(MANIFEST_NAME).read())  # type: ignore[union-attr]
    manifest["files"].append({"name": "wheels/../../evil.whl", "bytes": 1, "sha256": "0" * 64})
    evil = rewritten(written, tmp_path / "evil.tar", {MANIFEST_NAME: json.dumps(manifest).encode()})
    with pytest.raises(UsageError, match=r"lists 'wheels/../../evil\.whl', which no bundle has"):
        read_bundle(evil)


def test_a_wheel_that_the_lock_does_not_know_is_refused(site: Site, tmp_path: Path) -> None:
    """Also where the manifest agrees with it: the digests of packages are those that hpcrl ships."""
    site.write(tmp_path / "site.tar")
    other = tiny_wheel(tmp_path / "other", "tiny_one", code="print('other')\n")
    with tarfile.open(tmp_path / "site.tar") as archive:
        manifest = json.loads(archive.extractfile(MANIFEST_NAME).read())  # type: ignore[union-attr]
        lines = archive.extractfile("login.txt").read().decode()  # type: ignore[union-attr]
    old = next(each for each in manifest["files"] if "tiny_one" in each["name"])
    lines = lines.replace(old["sha256"], digest_of(other))
    old.update(sha256=digest_of(other), bytes=other.stat().st_size)
    listed = next(each for each in manifest["files"] if each["name"] == "login.txt")
    (tmp_path / "login.txt").write_text(lines)
    listed.update(sha256=digest_of(tmp_path / "login.txt"), bytes=len(lines))
    change = {
        MANIFEST_NAME: json.dumps(manifest).encode(),
        "login.txt": lines.encode(),
        old["name"]: other.read_bytes(),
    }
    forged = rewritten(tmp_path / "site.tar", tmp_path / "forged.tar", change)
    with pytest.raises(UsageError, match=r"lacks the tiny-one 1\.0 of its own list"):
        unpack(forged, tmp_path)


def refusal_of(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    monkeypatch.setattr(sys, "argv", ["hpcrl", "site", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 2
    return capsys.readouterr().err


def test_a_bundle_for_something_else_is_refused(
    written: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with tarfile.open(written) as archive:
        manifest = json.loads(archive.extractfile(MANIFEST_NAME).read())  # type: ignore[union-attr]
    words = ("install", "--prefix", str(tmp_path / "envs"), "--bundle")
    for change, says in (
        ({"machine": "riscv64"}, "is for Python 3.11 on riscv64"),
        ({"python": "3.99"}, "for Python 3.99"),
    ):
        text = json.dumps({**manifest, **change}).encode()
        other = rewritten(written, tmp_path / "other.tar", {MANIFEST_NAME: text})
        assert says in refusal_of(monkeypatch, capsys, *words, str(other), "--role", "login")
    assert "and not for vllm" in refusal_of(monkeypatch, capsys, *words, str(written), "--role", "vllm")
    said = refusal_of(monkeypatch, capsys, *words, str(written), "--role", "login", "--accelerator", "cpu")
    assert "is for cuda" in said
    assert "does not exist" in refusal_of(monkeypatch, capsys, *words, str(tmp_path / "none.tar"), "--role", "login")
    (tmp_path / "text.tar").write_text("no bundle")
    assert "is truncated or damaged" in refusal_of(
        monkeypatch, capsys, *words, str(tmp_path / "text.tar"), "--role", "login"
    )
    said = refusal_of(monkeypatch, capsys, "bundle", "-o", str(tmp_path / "new.tar"), "--python-version", "3.9")
    assert "are for Python 3.11, 3.12, 3.13, and this is 3.9" in said
    said = refusal_of(monkeypatch, capsys, "bundle", "-o", str(tmp_path / "new.tar"), "--machine", "riscv64")
    assert "for machines of the type x86_64, aarch64, and this is riscv64" in said
    assert not (tmp_path / "new.tar").exists()
