"""``hpcrl plan`` and its commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcrl.cli.main import main
from hpcrl.errors import ExitCode
from hpcrl.jobplan.model_rules import MODEL_RULES

Hpcrl = Callable[..., tuple[int, str, str]]
GLM5 = ("glm5_swe", "-c", "h200-28")
NODE = ("qwen3_30b_a3b_node", "-c", "h200-28")
_ASKED: dict[tuple[str, ...], tuple[int, str, str]] = {}


@pytest.fixture
def hpcrl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Hpcrl:
    """The command, in an empty directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HPCRL_RUNS_ROOT", str(tmp_path / "runs"))

    def call(*arguments: str) -> tuple[int, str, str]:
        # what only shipped files go into is the same each time, and asked for by many tests
        if arguments in _ASKED:
            return _ASKED[arguments]
        monkeypatch.setattr(sys, "argv", ["hpcrl", "plan", *arguments])
        code = 0
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
        out, err = capsys.readouterr()
        if "--picture" not in arguments and not list(tmp_path.iterdir()):
            _ASKED[arguments] = code, out, err
        return code, out, err

    return call


def test_the_reference_run_fits_and_is_forecast(hpcrl: Hpcrl, tmp_path: Path) -> None:
    code, out, err = hpcrl(*GLM5)
    assert code == 0, err
    assert out.startswith("fits; tightest: trainer host, ")
    for word in ("trainer gpu", "decode host", "binds", "GPU-hours a step", "GB weights written", "of the step"):
        assert word in out
    assert "\nsandboxes  851 at most on the trainer's first node, whose limits add up to 1,702.0 GiB, 158.1 GiB " in out
    # answers first: fits, starts, step, binds, better, and only then tables
    places = [out.index(f"\n{word} ") for word in ("starts", "step", "binds", "better", "role", "memory")]
    assert places == sorted(places)
    assert "hpcrl.trainer" not in out
    assert "-m hpcrl.trainer" in hpcrl(*GLM5, "--commands")[1]
    assert "does not fit" not in out
    # it is known how large the model is, and no files of it are here: a submit refuses it in the same words
    assert "\nstarts     not yet: hpcrl submit says: models/GLM-5 holds no model (no config.json)\n" in out
    assert "\nstarts     no: hpcrl submit says: 29 nodes of partition 'gpu'" in hpcrl(*GLM5, "--nodes", "29")[1]
    # what is planned may be more than this version can start
    out = hpcrl(*GLM5, "--set", "engine.tp=2")[1]
    assert "engine.tp" in out.partition("\nstep")[0]
    assert "--set job.payload=probe" in out
    assert "planned here" not in hpcrl(*GLM5, "--set", "job.payload=probe")[1]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("page", "between", "arguments"),
    [
        ("planning", ("## How to read a plan\n", "\n- **The first lines**"), GLM5),
        ("qwen3-one-node", ("## What the plan says\n", "\nThe trainer"), NODE),
    ],
)
def test_the_plan_in_the_documentation_is_todays(
    page: str, between: tuple[str, str], arguments: tuple[str, ...], hpcrl: Hpcrl, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "140")
    text = (Path(__file__).parents[2] / "docs" / f"{page}.md").read_text()
    sample = text.partition(between[0])[2].partition(between[1])[0]
    lines = [" ".join(line.split()) for line in sample.splitlines() if line.strip() not in {"", "..."}]
    said = " ".join(hpcrl(*arguments)[1].split())
    assert len(lines) >= 15
    assert [line for line in lines if line not in said] == [], f"copy these lines from `hpcrl plan {arguments[0]}`"


@pytest.mark.parametrize("recipe", ["glm5_swe", "qwen3_30b_a3b", "qwen3_30b_a3b_lowmem", "qwen3_30b_a3b_node"])
def test_recipes_that_are_shipped_for_gpus_fit(recipe: str, hpcrl: Hpcrl) -> None:
    code, out, err = hpcrl(recipe, "-c", "h200-28")
    assert code == 0, err
    assert out.startswith("fits; tightest: ")


def test_what_the_documentation_says_of_other_settings_is_planned(hpcrl: Hpcrl) -> None:
    """The table of docs/qwen3-one-node.md: GiB of a trainer's GPU, and seconds or minutes of the trainer's work."""
    text = (Path(__file__).parents[2] / "docs" / "qwen3-one-node.md").read_text()
    rows = [line.split("|")[1:4] for line in text.splitlines() if line.startswith("| `--set ")]
    assert len(rows) >= 4
    for settings, memory, work in rows:
        out = hpcrl(*NODE, *settings.strip().strip("`").split())[1]
        (gpu,) = (line for line in out.splitlines() if line.startswith("trainer gpu"))
        (trainer,) = (line for line in out.splitlines() if line.startswith("trainer  1      4     FSDP"))
        assert memory.strip().partition(",")[0] == gpu.split()[3], settings
        assert work.strip() in trainer, settings


def test_json_is_the_plan_with_its_forecast(hpcrl: Hpcrl) -> None:
    code, out, _ = hpcrl("show", *GLM5, "--json")
    document = json.loads(out)
    assert code == 0
    assert document["layout"]["components"]
    forecast = document["forecast"]
    assert forecast["memory"]["fits"]
    assert forecast["why_not"] == []
    assert not forecast["unstartable"]
    loop = forecast["loop"]
    assert loop["step_s"] >= max(loop["trainer_s"], loop["rollout_s"]) * 0.999
    assert forecast["gpu_hours_per_step"] == pytest.approx(224 * loop["step_s"] / 3600)
    terms = [term for table in forecast["times"].values() for term in table["terms"]]
    assert all(term["formula"] for term in terms)
    trainer = forecast["times"]["trainer"]
    counted = sum(term["seconds"] for term in trainer["terms"] if term["counts"])
    assert counted == pytest.approx(trainer["seconds"])


def test_explain_names_formula_input_and_source(hpcrl: Hpcrl) -> None:
    _, out, _ = hpcrl(*GLM5, "--explain")
    for word in ("compute.experts", "fsdp.gather", "ep.all_to_all", "handoff.read", "decode.attention"):
        assert word in out
    assert "master weights" in out
    assert "DeepEP on H800" in out
    assert "rollouts of swe" in out
    assert "\nsandboxes on the trainer's first node, not counted\n  sandboxes: 1702.00 GiB = Σ sandboxes" in out


def test_a_smaller_trainer_fails_with_reason_and_hint(hpcrl: Hpcrl) -> None:
    code, out, _ = hpcrl(*GLM5, "--set", "trainer.nodes=6", "--set", "trainer.ranks=48")
    assert code == ExitCode.DOES_NOT_FIT
    assert out.startswith("DOES NOT FIT trainer gpu: ")
    assert out.index("hint: ") < out.index("\nbinds ")
    assert "GiB short" in out
    assert "hint: --set trainer.nodes=" in out


def test_nodes_takes_the_best_split(hpcrl: Hpcrl) -> None:
    code, out, err = hpcrl(*GLM5, "--nodes", "28", "--json")
    assert code == 0, err
    document = json.loads(out)
    assert document["forecast"]["layout"]["nodes"] == 28
    assert sum(component["nodes"] for component in document["layout"]["components"]) == 28
    assert document["forecast"]["memory"]["fits"]
    own = json.loads(hpcrl(*GLM5, "--json")[1])
    assert document["forecast"]["loop"]["step_s"] <= own["forecast"]["loop"]["step_s"]


def test_sizes_that_do_not_fit_the_model_are_refused(hpcrl: Hpcrl) -> None:
    code, _, err = hpcrl(*GLM5, "--set", "trainer.parallelism.ep=24")
    assert code == 2
    assert "24 does not divide the 256 experts of GLM-5 [experts-divide]" in err


def test_a_split_keeps_what_its_sides_say_of_themselves(hpcrl: Hpcrl) -> None:
    _, out, _ = hpcrl(*GLM5, "--nodes", "24", "--json")
    commands = {group["role"]: " ".join(group["command"]) for group in json.loads(out)["groups"]}
    assert "--max-num-batched-tokens 8192" in commands["prefill"]
    assert "--enable-dbo" in commands["prefill"]
    assert "--max-num-batched-tokens 96" in commands["decode"]


def test_missing_numbers_of_a_profile_are_named(hpcrl: Hpcrl) -> None:
    code, out, _ = hpcrl("quickstart", "-c", "roce-h100", "--set", "model.path=GLM-5", "--json")
    forecast = json.loads(out)["forecast"]
    assert code == ExitCode.UNKNOWN
    assert forecast["verdict"]["fits"] is None
    assert forecast["loop"] is None
    assert any(key.endswith(("gpu.nvlink_gb_s", "filesystem.write_gb_s")) for key in forecast["missing"])
    assert "lacks" in forecast["because"]


def test_the_quickstart_says_how_to_get_times(hpcrl: Hpcrl) -> None:
    code, out, _ = hpcrl("quickstart")
    assert code == 0
    assert "hpcrl plan calibrate RUN" in out


def test_search_prints_a_table_and_draws(hpcrl: Hpcrl, tmp_path: Path, slow_trainer: tuple[str, ...]) -> None:
    code, out, err = hpcrl("search", *slow_trainer, "--nodes", "27..28", "--picture", "p.svg")
    assert code == 0, err
    rows = [line.split("  ")[0] for line in out.splitlines() if line[:1] not in (" ", "")]
    assert {"recipe"} < set(rows)
    assert {name for row in rows for name in row.split(", ")} >= {"cheapest", "knee", "fastest"}
    assert len(hpcrl("search", *slow_trainer, "--nodes", "27..28", "--all")[1].splitlines()) > len(out.splitlines())
    assert (tmp_path / "p.svg").read_text().startswith("<svg")
    table = out
    code, out, _ = hpcrl("search", *slow_trainer, "--nodes", "27..28", "--json")
    document = json.loads(out)
    assert {candidate["nodes"] for candidate in document["candidates"]} == {27, 28}
    # each marked row stands below the table as a command
    marked = [candidate for candidate in document["candidates"] if candidate["mark"]]
    assert any("same nodes" in candidate["mark"] and candidate["nodes"] == 28 for candidate in marked)
    for candidate in marked:
        printed = table.split(f"\n{candidate['mark']} ({candidate['nodes']} nodes):\n")[1].split("\n\n")[0]
        words = printed.replace("\\\n", " ").split()
        assert words[:5] == ["hpcrl", "plan", *GLM5]
        assert words[5:] == [word for setting in candidate["settings"] for word in ("--set", setting)]
    code, _, err = hpcrl("search", "quickstart", "--nodes", "2..4")
    assert code == 2
    assert "not a Slurm site" in err


def test_a_search_says_that_the_recipe_itself_does_not_fit(hpcrl: Hpcrl) -> None:
    whole = ("--set", "trainer.memory.activation_checkpointing=none")
    code, out, err = hpcrl("search", "qwen3_30b_a3b", "-c", "h200-28", "--nodes", "4", *whole)
    assert code == 0, err
    assert "\nrecipe, does not fit " in out
    assert "\nthe recipe's own layout does not fit: trainer gpu: " in out


def test_diff_shows_fields_and_what_they_change(hpcrl: Hpcrl, tmp_path: Path) -> None:
    (tmp_path / "half.yaml").write_text("extends: glm5_swe\nname: half\nrollouts: {rollouts_per_step: 128}\n")
    code, out, err = hpcrl("diff", "glm5_swe", "half.yaml", "-c", "h200-28")
    assert code == 0, err
    assert "recipe.rollouts.rollouts_per_step" in out
    document = json.loads(hpcrl("diff", "glm5_swe", "half.yaml", "-c", "h200-28", "--json")[1])
    assert {field["key"] for field in document["fields"]} == {"recipe.name", "recipe.rollouts.rollouts_per_step"}
    figures = {figure["name"]: figure for figure in document["figures"]}
    assert figures["trainer (s)"]["b"] == pytest.approx(figures["trainer (s)"]["a"] / 2, rel=0.15)
    assert "are the same" in hpcrl("diff", "quickstart", "quickstart")[1]


def test_diff_compares_a_recipe_with_itself_changed(hpcrl: Hpcrl) -> None:
    change = ("--set", "rollouts.rollouts_per_step=128", "-c", "h200-28", "--json")
    document = json.loads(hpcrl("diff", "glm5_swe", *change)[1])
    assert [field["key"] for field in document["fields"]] == ["recipe.rollouts.rollouts_per_step"]
    assert (document["a"], document["b"]) == ("glm5_swe", "glm5_swe with --set")
    figures = {figure["name"]: figure for figure in document["figures"]}
    assert figures["trainer (s)"]["b"] < figures["trainer (s)"]["a"]
    # of two recipes, the second one is changed
    assert json.loads(hpcrl("diff", "glm5_swe", "glm5_swe", *change)[1])["fields"] == document["fields"]
    code, _, err = hpcrl("diff", "glm5_swe")
    assert code == ExitCode.USAGE
    assert "--set KEY=VALUE" in err
    code, _, err = hpcrl("diff", "quickstart", "--set", "steps=3")
    assert code == ExitCode.USAGE
    assert "trainer.steps" in err


@pytest.mark.parametrize(
    "command", [("plan", "diff", "glm5_swe", "--set", "seed=1"), ("simulate", "glm5_swe", "--days", "0.01")]
)
def test_kernel_times_are_read_by_all_that_predict(
    hpcrl: Hpcrl, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["hpcrl", *command, "-c", "h200-28", "--tables", "none.yaml"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == ExitCode.USAGE
    assert "none.yaml" in capsys.readouterr().err


def test_a_recipe_called_like_a_command_is_given_as_a_path(hpcrl: Hpcrl, tmp_path: Path) -> None:
    (tmp_path / "search").write_text("extends: quickstart\nname: mine\n")
    code, out, err = hpcrl("./search", "--json")
    assert code == 0, err
    assert json.loads(out)["recipe"] == "mine"
    assert hpcrl("-c", "h200-28", "nothing-of-this-name")[0] == 2


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "martian", "hidden_size": 1024}, "model_type is 'martian'; known are"),
        ({"model_type": "qwen3_moe", "vocab_size": 1000, "hidden_size": 1024}, "config.json lacks "),
        (None, "no config.json there, and no known model of this name"),
    ],
)
def test_a_model_of_unknown_sizes_is_reported_first_with_what_was_skipped(
    hpcrl: Hpcrl, tmp_path: Path, config: dict[str, Any] | None, why: str
) -> None:
    model = tmp_path / "strange"
    model.mkdir()
    if config is not None:
        (model / "config.json").write_text(json.dumps(config))
    code, out, _ = hpcrl(*GLM5, "--set", f"model.path={model}")
    assert code == ExitCode.UNKNOWN
    first, hint, skipped = out.splitlines()[:3]
    assert first.startswith("NOT KNOWN the model's sizes are not known: ")
    assert why in first
    assert "hint: set model.path" in hint
    assert skipped.startswith("SKIPPED memory of every GPU and host; rules about the model's sizes: ")
    assert all(rule.name in skipped for rule in MODEL_RULES)
    document = json.loads(hpcrl(*GLM5, "--set", f"model.path={model}", "--json")[1])
    assert document["forecast"]["verdict"]["exit_code"] == ExitCode.UNKNOWN
    # a search cannot do without
    assert hpcrl("search", *GLM5, "--nodes", "28", "--set", f"model.path={model}")[0] == ExitCode.UNKNOWN


def test_a_model_that_is_made_later_is_not_a_defect(hpcrl: Hpcrl) -> None:
    code, out, _ = hpcrl("quickstart")
    assert code == 0
    first, skipped = out.splitlines()[:2]
    assert first == "NOT KNOWN YET whether it fits, until the model is made (hpcrl warmup)"
    assert skipped.startswith("SKIPPED memory of every GPU and host; ")


def test_more_nodes_than_the_site_has_are_reported_first(hpcrl: Hpcrl) -> None:
    code, out, _ = hpcrl(*GLM5, "--nodes", "29")
    assert code == ExitCode.DOES_NOT_FIT
    assert out.startswith("DOES NOT FIT 29 nodes of partition 'gpu' (")
    assert "which has 28" in out.splitlines()[0]


@pytest.mark.parametrize("command", [(), ("diff",), ("search",)])
def test_more_nodes_than_the_site_has_are_one_code_in_all_commands(hpcrl: Hpcrl, command: tuple[str, ...]) -> None:
    """Whether they were asked for by a size or by settings; a recipe that is wrong as well is a wrong recipe."""
    more = ("--set", "trainer.nodes=13", "--set", "trainer.ranks=104")
    code, out, err = hpcrl(*command, *GLM5, *more)
    assert (code, out) == (ExitCode.DOES_NOT_FIT, "")
    assert "which has 28 [nodes-available]" in err
    assert "hint: " in err
    code, _, err = hpcrl(*command, *GLM5, *more, "--set", "rollouts.group_size=1")
    assert (code, "[group-has-peers]" in err) == (ExitCode.USAGE, True)


def test_a_difference_that_does_not_fit_says_so(hpcrl: Hpcrl) -> None:
    """In memory, here."""
    code, out, _ = hpcrl("diff", *GLM5, "--set", "trainer.memory.optimizer_offload=false")
    assert code == ExitCode.DOES_NOT_FIT
    assert out.startswith("DOES NOT FIT glm5_swe with --set: ")
    assert "GPU-hours a step" in out


def test_marks_of_a_search_are_whole_in_narrow_terminals(hpcrl: Hpcrl, monkeypatch: pytest.MonkeyPatch) -> None:
    import rich.console

    for width in (80, 100, 119):
        monkeypatch.setattr("hpcrl.cli.output.table_console", lambda width=width: rich.console.Console(width=width))
        out = hpcrl("search", *GLM5, "--nodes", "27..28", "--set", "seed=1")[1]
        table = out[: out.index("layouts were found")]
        assert "…" not in table
        for mark in ("cheapest", "knee", "fastest", "same nodes", "recipe"):
            assert any(line.startswith(mark) or f", {mark}" in line for line in table.splitlines()), (width, mark)
        assert "GPU-hours" in table


def test_what_an_engine_has_free_is_named_as_its_kv_cache(hpcrl: Hpcrl) -> None:
    _, out, _ = hpcrl(*GLM5)
    lines = {line.split()[2]: line for line in out.splitlines() if line.startswith("KV cache")}
    places = json.loads(hpcrl(*GLM5, "--json")[1])["forecast"]["memory"]["places"]
    decode = next(place for place in places if (place["role"], place["kind"]) == ("decode", "gpu"))
    assert f"{decode['kv_tokens']:,} tokens" in lines["decode:"]
    assert decode["kv_sequences"] == pytest.approx(decode["kv_tokens"] / 131072, rel=0.01)
    assert f"{decode['kv_sequences']:.1f} sequences of 131,072" in lines["decode:"]
    assert "prefill:" in lines
    row = next(line for line in out.splitlines() if line.startswith("decode gpu"))
    assert " KV " in row


def test_how_uneven_experts_may_be_is_printed(hpcrl: Hpcrl) -> None:
    _, out, _ = hpcrl(*GLM5)
    margin = json.loads(hpcrl(*GLM5, "--json")[1])["forecast"]["expert_imbalance"]
    assert (margin["planned"], margin["most"]) == (1.25, 8)
    assert f"more than {margin['overflows_above']:.2f} times the mean of tokens" in out


@pytest.fixture(scope="module")
def slow_trainer(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """The reference plan, bound by its trainer alone, a fifth slower than engines: rollouts age while they wait."""
    file = tmp_path_factory.mktemp("slow") / "slow.yaml"
    values = {"trainer_busy": 0.4, "sparse_attention": 0.5, "sparse_backward": 0.25}
    values |= {"index_scores": 0.4, "index_choice": 0.5}
    entries = ", ".join(f"{name}: {{value: {value}, source: other kernels}}" for name, value in values.items())
    file.write_text(f"format_version: 1\nefficiencies: {{{entries}}}\n")
    return *GLM5, "--calibration", str(file)


def test_the_printed_loop_obeys_littles_law_and_is_as_stale_as_simulated(
    hpcrl: Hpcrl, slow_trainer: tuple[str, ...]
) -> None:
    """`hpcrl simulate` of the same plan has a mean staleness of 7.94, nearly all at the bound of 8."""
    loop = json.loads(hpcrl(*slow_trainer, "--json")[1])["forecast"]["loop"]
    started_per_s = 256 / loop["step_s"] / (1.0 - loop["dropped_share"])
    assert loop["in_flight"] == pytest.approx(started_per_s * loop["rollout_duration_s"]["mean"], rel=0.005)
    assert loop["staleness_mean"] == pytest.approx(7.94, abs=0.3)
    out = hpcrl(*slow_trainer)[1]
    assert f"{loop['in_flight']:.0f} in flight ({loop['started_per_s']:.4g} a second" in out
    assert "held by the trainer" in out


def test_the_step_is_a_range_with_what_makes_it(hpcrl: Hpcrl) -> None:
    forecast = json.loads(hpcrl(*GLM5, "--json")[1])["forecast"]
    step = forecast["ranges"]["step"]
    assert step["low_s"] < step["mid_s"] < step["high_s"]
    assert step["mid_s"] == forecast["loop"]["step_s"]
    widths = [cause["high_s"] / cause["low_s"] for cause in step["causes"]]
    assert widths == sorted(widths, reverse=True)
    # as wide as all of them together, wider than any of them alone
    assert step["high_s"] / step["low_s"] > widths[0] > 1.2
    origins = {cause["name"]: cause["origin"] for cause in forecast["ranges"]["rollouts"]["causes"]}
    assert origins["workloads.swe.sampled_share"] == "assumed"
    assert origins["workloads.swe.tokens"] == "published"
    # each table and each term has its own
    for table in forecast["times"].values():
        assert table["range"]["low_s"] <= table["seconds"] <= table["range"]["high_s"]
    kernels = next(term for term in forecast["times"]["decode"]["terms"] if term["name"] == "decode.kernels")
    assert kernels["range"]["origin"] == "published"
    assert kernels["range"]["high_s"] == pytest.approx(1.5 * kernels["seconds"])
    out = hpcrl(*GLM5)[1]
    line = next(line for line in out.splitlines() if line.startswith("step "))
    assert f"{step['low_s'] / 60:.1f} to {step['high_s'] / 60:.1f} min, expected {step['mid_s'] / 60:.1f} min" in line
    assert f"{step['causes'][0]['name'].rpartition('.')[2]} ({step['causes'][0]['origin']}) alone" in out


def test_a_better_split_of_the_same_nodes_is_named(hpcrl: Hpcrl, slow_trainer: tuple[str, ...]) -> None:
    forecast = json.loads(hpcrl(*slow_trainer, "--json")[1])["forecast"]
    better = forecast["better"]
    assert better["nodes"] == 28
    assert better["loop"]["step_s"] < forecast["loop"]["step_s"]
    # what a search finds, too
    document = json.loads(hpcrl("search", *slow_trainer, "--nodes", "28", "--json")[1])
    assert better["loop"]["step_s"] == min(candidate["loop"]["step_s"] for candidate in document["candidates"])
    assert "knee" in next(candidate["mark"] for candidate in document["candidates"] if candidate["mark"])
    # that one has no better one
    assert json.loads(hpcrl(*slow_trainer, "--nodes", "28", "--json")[1])["forecast"]["better"] is None


@pytest.mark.parametrize("arguments", [GLM5, ("search", *GLM5, "--nodes", "27..29")])
def test_nothing_is_cut_or_broken_at_eighty_columns(
    hpcrl: Hpcrl, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]
) -> None:
    monkeypatch.setattr("hpcrl.cli.output._PIPE_WIDTH", 80)
    out = hpcrl(*arguments, "--set", "seed=1")[1]
    lines = [line for line in out.splitlines() if not line.startswith(("directory ", "gpu "))]
    assert "…" not in out
    assert [line for line in lines if len(line.rstrip()) > 84] == []


def test_the_real_model_is_measured_only_as_it_would_run(hpcrl: Hpcrl) -> None:
    code, _, err = hpcrl(*GLM5, "--real-model")
    assert (code, "this one has GPUs" in err, "hint: " in err) == (ExitCode.USAGE, True, True)
    local = ("quickstart", "--real-model")
    code, _, err = hpcrl(*local, "--set", "model.path=Mixtral-8x7B-Instruct-v0.1")
    assert (code, "'mixtral'" in err) == (ExitCode.USAGE, True)
    fp8 = ("--set", "model.path=Qwen3-8B", "--set", "trainer.precision.fp8={}", "--set", "handoff.kind=fp8")
    code, _, err = hpcrl(*local, *fp8)
    assert (code, "without what trainer.precision.fp8 asks for" in err) == (ExitCode.USAGE, True)
