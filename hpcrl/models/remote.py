"""Metadata of a published model on the Hugging Face hub: its commit, and name, size and digest of each file.

Only `huggingface_hub` (the extra ``hub``) talks to the hub: it knows the user's token, proxies and ``HF_ENDPOINT``. It
is imported on the first request.
"""

from __future__ import annotations

import errno
import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import PurePosixPath
from typing import Any, BinaryIO, Literal, NamedTuple, cast

from hpcrl.errors import HpcrlError, UsageError
from hpcrl.models.hub import HubId

_COMMIT = re.compile(r"[0-9a-f]{40,64}")
_DIGITS = {"sha256": 64, "git": 40}


class FetchError(HpcrlError):
    """A published model could not be fetched, or not whole; what came is kept for the next call."""


class RemoteFile(NamedTuple):
    """A file of a published model.

    Attributes
    ----------
    name:
        As published; of files in folders with slashes.
    size:
        In bytes.
    algorithm, digest:
        ``sha256`` of the bytes of a large file, else ``git``: the SHA-1 of git's blob. In hexadecimal.
    """

    name: str
    size: int
    algorithm: Literal["sha256", "git"]
    digest: str


class RemoteModel(NamedTuple):
    """A published model at one commit, with all of its files."""

    commit: str
    files: tuple[RemoteFile, ...]


def list_remote(model: HubId, *, endpoint: str | None = None) -> RemoteModel:
    """Ask the hub for the files of a model.

    Parameters
    ----------
    endpoint:
        Address of the hub; None: ``HF_ENDPOINT``, or huggingface.co.

    Raises
    ------
    UsageError
        The model or revision does not exist, or this user has no access to it.
    FetchError
        The hub cannot be reached, or its answer is not a list of files.
    """
    from huggingface_hub import HfApi  # noqa: PLC0415 - not part of a core install

    try:
        with hub_errors(model):
            info = HfApi(endpoint=endpoint).model_info(model.name, revision=model.revision, files_metadata=True)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        what = f"{type(error).__name__}: {error}"
        raise FetchError(f"what the hub answers for {model} cannot be read: {what[:200]}") from error
    if not _COMMIT.fullmatch(str(info.sha)):
        raise FetchError(f"the hub names no commit of {model}")
    return RemoteModel(str(info.sha), tuple(_file(model, each) for each in info.siblings or ()))


def _file(model: HubId, listed: Any) -> RemoteFile:
    """Check an entry of the hub's list: names and digests become parts of paths here (FetchError)."""
    name = str(listed.rfilename)
    parts = PurePosixPath(name)
    if parts.is_absolute() or ".." in parts.parts or "\0" in name or not parts.parts:
        raise FetchError(f"the hub lists {name!r} for {model}, which is not a file of a directory")
    if listed.lfs is not None:
        found = RemoteFile(name, listed.lfs.size, "sha256", str(listed.lfs.sha256))
    else:
        found = RemoteFile(name, listed.size, "git", str(listed.blob_id))
    length = _DIGITS[found.algorithm]
    if not isinstance(found.size, int) or found.size < 0 or not re.fullmatch(f"[0-9a-f]{{{length}}}", found.digest):
        raise FetchError(f"the hub lists {name} of {model} without a size and a digest that can be compared")
    return found


def read_remote(
    model: HubId, commit: str, file: RemoteFile, target: BinaryIO, begin: int, *, endpoint: str | None = None
) -> None:
    """Write the bytes of a file from ``begin`` on to ``target``, which is positioned there.

    A connection that is cut is made anew some times, and continues where it ended. A server that begins at the first
    byte in spite of that makes ``target`` empty first.

    Raises
    ------
    UsageError, FetchError
        As `list_remote`.
    OSError
        The filesystem refused.
    """
    from huggingface_hub import constants, hf_hub_url  # noqa: PLC0415 - not part of a core install
    from huggingface_hub.file_download import http_get  # noqa: PLC0415
    from huggingface_hub.utils._headers import build_hf_headers  # noqa: PLC0415

    url = hf_hub_url(model.name, file.name, revision=commit, endpoint=endpoint)
    with hub_errors(model):
        http_get(
            url,
            target,
            resume_size=begin,
            headers=build_hf_headers(),
            # without a size it tries an alternative that the hub may serve; digests are compared in any case
            expected_size=file.size if file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE else None,
            tqdm_class=cast(Any, _NoBar),  # the library calls methods of a progress bar
        )


@contextmanager
def hub_errors(model: HubId) -> Iterator[None]:
    """Turn what `huggingface_hub` raises about ``model`` into messages for a person."""
    from huggingface_hub import errors  # noqa: PLC0415 - not part of a core install

    # errors of the HTTP library that this version of huggingface_hub uses
    transport: type[Exception] = vars(errors)["HTTPError"]
    login = "log in with a token that may read it: hf auth login, or HF_TOKEN"
    try:
        yield
    except errors.GatedRepoError as error:
        raise UsageError(
            f"{model} is gated, and you may not read it\n"
            f"    hint: ask for access on the page of the model, then {login}"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UsageError(
            f"{model.name} has no revision {model.revision!r}\n    hint: name a branch, tag or commit"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UsageError(
            f"there is no model {model.name} on the hub, or it is private\n    hint: correct the name, or {login}"
        ) from error
    except errors.OfflineModeIsEnabled as error:
        raise UsageError(
            f"the hub cannot be asked for {model}: HF_HUB_OFFLINE is set\n    hint: unset it, or copy the model here"
        ) from error
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            raise UsageError(f"the hub refuses {model} to you (HTTP {status})\n    hint: {login}") from error
        raise FetchError(f"the hub answers HTTP {status} for {model}\n    hint: call again later") from error
    except transport as error:
        what = str(error) or type(error).__name__
        raise FetchError(
            f"the hub cannot be reached for {model}: {what}\n"
            "    hint: call again; on a node without a network copy the model here"
        ) from error
    except OSError as error:
        # a size that differs from the list raises an error without a code
        if error.errno is None:
            raise FetchError(f"{model}: {str(error).splitlines()[0]}\n    hint: call again") from error
        if error.errno in (errno.ECONNREFUSED, errno.ECONNRESET, errno.ETIMEDOUT):
            raise FetchError(f"the hub cannot be reached for {model}: {error}\n    hint: call again") from error
        raise


def open_digest(file: RemoteFile) -> hashlib._Hash:
    """Return what the bytes of a file are given to, one after the other, for its digest."""
    if file.algorithm == "sha256":
        return hashlib.sha256()
    return hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False)


class _NoBar:
    """A bar of progress that shows nothing."""

    def __init__(self, **_: object) -> None:
        pass

    def __enter__(self) -> _NoBar:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, n: float | None = 1) -> None:
        """Count bytes; the file that is written counts them too."""
