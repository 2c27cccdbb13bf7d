"""The program that plots: pages have its lines and bars, and no other kind of trace."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from hpcrl.analysis.page.plotly_program import read_plotly, with_drawn_traces

PROGRAM = (
    'var Q=(()=>{var a=W((b,c)=>{"use strict";c.exports={moduleType:"trace",name:"pie"}});'
    'var d=W((b,c)=>{"use strict";c.exports=a()});'
    'var e=W((b,c)=>{"use strict";c.exports={moduleType:"trace",name:"bar"}});'
    'var $f=W((b,c)=>{"use strict";c.exports=e()});'
    "var z=W((b,c)=>{var g=h();g.register([d(),$f(),d()]);c.exports=g});return z()})();"
)


def test_only_bars_are_started_besides_the_core() -> None:
    assert with_drawn_traces(PROGRAM) == PROGRAM.replace("[d(),$f(),d()]", "[$f()]")


@pytest.mark.parametrize(
    "program",
    [
        "",
        "var Plotly = {};",
        # no bars, no list, and a list of something else
        PROGRAM.replace('name:"bar"', 'name:"box"'),
        PROGRAM.replace(".register([", ".register(["[:-1]),
        PROGRAM.replace("[d(),$f(),d()]", "[d(),$f(1),d()]"),
        PROGRAM.replace("c.exports=e()", "c.exports=e"),
    ],
)
def test_a_program_of_another_form_stays_as_it_is(program: str) -> None:
    assert with_drawn_traces(program) == program


def test_the_program_of_the_package_has_this_form() -> None:
    spec = find_spec("plotly")
    assert spec is not None
    assert spec.origin is not None
    whole = (Path(spec.origin).parent / "package_data/plotly.min.js").read_text(encoding="utf-8")
    found = read_plotly()
    kinds = [len(text.split(",")) for text in re.findall(r"\.register\(\[([\w$(),]+)\]\)", found)]
    assert kinds[-1] == 1
    assert 0 < len(whole) - len(found) < 1000
