"""Daemons of sandboxes that tests of a worker share: one as root, one as an ordinary user."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Iterator

import pytest
from sandbox_lab import PACKAGES, SECRET, SMALL, USER, skip_without_bubblewrap, user_python

from hpcrl.sandboxes import Sandbox
from hpcrl.sandboxes.client import SandboxClient, SandboxDaemon


@pytest.fixture(scope="session", params=["root", "user"])
def daemon(request: pytest.FixtureRequest) -> Iterator[SandboxDaemon]:
    """A daemon, whose environment has a secret."""
    skip_without_bubblewrap()
    as_root = os.geteuid() == 0
    if request.param == "root" and not as_root:
        pytest.skip("needs root")
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setenv("HPCRL_TEST_TOKEN", SECRET)
        patch.setenv("PYTHONPATH", os.pathsep.join(PACKAGES))
        options = {"python": user_python(), "user": USER} if as_root and request.param == "user" else {}
        daemon = SandboxDaemon(**options)
        stack.callback(daemon.stop)
        yield daemon


@pytest.fixture
async def host(daemon: SandboxDaemon) -> AsyncIterator[SandboxClient]:
    """A client; its sandboxes end with the test."""
    client = await SandboxClient.connect(daemon.directory)
    yield client
    await client.close()


@pytest.fixture
async def sandbox(host: SandboxClient) -> Sandbox:
    """An empty sandbox with small limits."""
    return await host.start(limits=SMALL)
