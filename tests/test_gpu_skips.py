"""What becomes of a GPU's test that is skipped."""

from __future__ import annotations

import pytest

pytest_plugins = ["pytester"]

TESTS = """
import pytest

pytestmark = pytest.mark.gpu

@pytest.fixture
def library():
    pytest.skip("deep_gemm is not installed")

def test_without_a_gpu():
    pytest.skip("no GPU")

def test_without_a_library(library):
    pass

def test_with_an_error():
    pytest.importorskip("a_library_that_nobody_has")

@pytest.mark.skipif(True, reason="too slow")
def test_that_is_marked():
    pass
"""


def test_only_no_gpu_is_a_reason(pytester: pytest.Pytester, request: pytest.FixtureRequest) -> None:
    conftest = request.config.rootpath / "tests" / "conftest.py"
    source = conftest.read_text(encoding="utf-8")
    hook = source[source.index("@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport") :]
    pytester.makeconftest(f"import pytest\nfrom collections.abc import Iterator\n\n{hook}")
    pytester.makeini("[pytest]\nmarkers = gpu: needs a GPU\n")
    pytester.makepyfile(TESTS, test_others="import pytest\n\ndef test_of_a_processor():\n    pytest.skip('slow')\n")
    result = pytester.runpytest_inprocess("-p", "no:cacheprovider", "-rA")
    outcomes = result.parseoutcomes()
    assert outcomes.get("skipped") == 2
    assert outcomes.get("failed", 0) + outcomes.get("errors", 0) == 3
    result.stdout.fnmatch_lines(["*for another reason than that there is none: deep_gemm is not installed*"])
