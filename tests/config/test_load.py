"""Loading: extends, overrides, provenance, numbers, search order."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from hpcrl.config import yamltree
from hpcrl.config.cluster import cluster_from_json
from hpcrl.config.load import leaves, load_cluster, load_recipe
from hpcrl.config.recipe import EngineConfig, WordsEnv
from hpcrl.config.resources import list_clusters, list_recipes
from hpcrl.config.rules.table import RULES, SITE_RULES, check_rules
from hpcrl.config.yamltree import parse_value
from hpcrl.errors import ConfigError
from hpcrl.runs.rundir import RunDir

BASE = """\
name: base
model: {path: m}
environments:
  - {name: a, kind: words}
trainer:
  steps: 5
  optimizer:
    learning_rate: 1e-3
"""


def write(directory: Path, name: str, text: str) -> str:
    path = directory / f"{name}.yaml"
    path.write_text(text)
    return str(path)


def test_extends_merges_mappings_and_replaces_lists(tmp_path: Path) -> None:
    write(tmp_path, "base", BASE)
    top = write(
        tmp_path,
        "top",
        "extends: base.yaml\nname: top\nenvironments:\n  - {name: b, kind: words, task: sort}\n"
        "trainer: {optimizer: {weight_decay: 0.1}}\n",
    )
    loaded = load_recipe(top)
    recipe = loaded.value
    assert recipe.name == "top"
    assert recipe.trainer.steps == 5
    assert (recipe.trainer.optimizer.learning_rate, recipe.trainer.optimizer.weight_decay) == (1e-3, 0.1)
    (environment,) = recipe.environments
    assert isinstance(environment, WordsEnv)
    assert environment.task == "sort"
    assert loaded.where("trainer.steps") == f"{tmp_path / 'base.yaml'}:6"
    assert loaded.where("trainer.optimizer.weight_decay") == f"{top}:5"
    assert loaded.where("environments.0.task") == f"{top}:4"


def test_null_takes_out_a_mapping_of_what_is_extended(tmp_path: Path) -> None:
    engine = "engine: {backend: vllm, memory: {weights: fp8}, kv_store: {segment_gib: 3}, vllm_args: {seed: 1}}\n"
    write(tmp_path, "base", f"{BASE}{engine}")
    top = write(tmp_path, "top", "extends: base.yaml\nengine:\n  memory: null\n  kv_store: null\n  vllm_args: null\n")
    loaded = load_recipe(top)
    assert loaded.value.engine == EngineConfig(backend="vllm")
    assert loaded.where("engine.vllm_args") == f"{top}:5"
    # where nothing is extended, null is a value like others
    with pytest.raises(ConfigError, match=r"engine\.memory"):
        load_recipe(write(tmp_path, "alone", f"{BASE}engine: {{memory: null}}\n"))


def test_extends_in_a_circle_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, "one", "extends: two.yaml\n")
    two = write(tmp_path, "two", "extends: one.yaml\n")
    with pytest.raises(ConfigError, match="circle"):
        load_recipe(two)


def test_provenance_of_every_value(tmp_path: Path) -> None:
    path = write(tmp_path, "base", BASE)
    loaded = load_recipe(path, ["trainer.ranks=2", "environments.0.weight=0.5"])
    origins = {".".join(map(str, key)): loaded.origin(key) for key, _ in leaves(loaded.value)}
    assert origins["trainer.steps"] == f"{path}:6"
    assert origins["trainer.ranks"] == "--set"
    assert origins["environments.0.weight"] == "--set"
    assert origins["environments.0.name"] == f"{path}:4"
    assert origins["trainer.threads"] == "default"
    assert loaded.value.environments[0].weight == 0.5


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("trainer.steps", "no '='"),
        ("=3", "no key"),
        ("trainer..steps=3", "no key"),
        ("trainer.steps.deep=3", "no parts"),
        ("environments.7.weight=1", "items 0 to 0"),
        ("trainer.steps=[1", "not a YAML value"),
        ("trainer.stepz=3", "did you mean 'steps'"),
    ],
)
def test_wrong_overrides(tmp_path: Path, override: str, says: str) -> None:
    with pytest.raises(ConfigError, match=r".") as error:
        load_recipe(write(tmp_path, "base", BASE), [override])
    assert says in str(error.value)
    assert "--set" in str(error.value)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("1E5", 1e5),
        ("2.5", 2.5),
        (".5", 0.5),
        ("-3", -3),
        ("1_000", 1000),
        ("v1e3", "v1e3"),
        ("on", True),
    ],
)
def test_numbers(text: str, value: object) -> None:
    parsed = parse_value(text)
    assert parsed == value
    assert type(parsed) is type(value)


def test_nearer_cluster_profile_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = "name: local\nkind: local\npaths: {{runs_root: {}}}\n"
    user = tmp_path / "config/hpcrl/clusters"
    user.mkdir(parents=True)
    write(user, "local", text.format("user"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    assert load_cluster("local").value.paths.runs_root == "user"
    (tmp_path / "clusters").mkdir()
    write(tmp_path / "clusters", "local", text.format("here"))
    # the current directory's is last: somebody else may have put it there
    assert load_cluster("local").value.paths.runs_root == "user"
    assert load_cluster("clusters/local.yaml").value.paths.runs_root == "here"


#: recipes that are larger than this machine, and the packaged site they are for
SITES = {
    "glm5_swe": "h200-28",
    "glm5_swe_small": "devcluster",
    "qwen3_30b_a3b": "pyxis-site",
    "qwen3_30b_a3b_lowmem": "roce-h100",
    "qwen3_30b_a3b_node": "h200-28",
    "qwen3_30b_a3b_small": "devcluster",
}


@pytest.mark.parametrize("name", list_recipes())
def test_packaged_recipes_are_good(name: str) -> None:
    # probes start together, which elastic engines do not
    probes = name in SITES and load_recipe(name).value.job.layout != "elastic"
    overrides = ["job.payload=probe"] if probes else []
    check_rules(load_recipe(name, overrides), load_cluster(SITES.get(name, "local")))


def test_a_recipe_without_its_parts_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"engine\.tp: .*\[planned-settings\]") as caught:
        check_rules(load_recipe("glm5_swe", ["engine.tp=2"]), load_cluster(SITES["glm5_swe"]))
    # its engines are part of this version
    assert "payload-exists" not in str(caught.value)
    assert "parallelism.ep" not in str(caught.value)


def test_a_setting_that_has_moved_says_where_it_is() -> None:
    with pytest.raises(ConfigError, match=r"(?s)trainer\.memory\.fp8: .*it is trainer\.precision\.fp8 now"):
        load_recipe("glm5_swe", ["trainer.memory.fp8=true"])


@pytest.mark.parametrize("name", sorted(SITES))
def test_recipes_of_sites_with_wide_replicas_are_good(name: str) -> None:
    check_rules(load_recipe(name), load_cluster(SITES[name]))


@pytest.mark.parametrize("name", list_clusters())
def test_packaged_clusters_are_good(name: str) -> None:
    cluster = load_cluster(name)
    check_rules(load_recipe("quickstart"), cluster)
    assert cluster_from_json(cluster.value.model_dump_json()) == cluster.value


def test_packaged_recipe_is_found_by_its_documented_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert load_recipe("recipes/quickstart.yaml").value.name == "quickstart"


def test_rules_are_named_once() -> None:
    rules = (*RULES, *SITE_RULES)
    assert len({rule.name for rule in rules}) == len(rules)


def test_what_earlier_runs_wrote_is_read(tmp_path: Path) -> None:
    """Their resolved recipes and profiles have every key of their time, also those that are gone."""
    run = RunDir(tmp_path / "run")
    run.path.mkdir()
    recipe, cluster = load_recipe("quickstart").value, load_cluster("h200-28").value
    written = recipe.model_dump(mode="json")
    written["trainer"]["memory"]["fp8"] = False
    run.recipe_path.write_text(yaml.safe_dump(written))
    assert run.recipe() == load_recipe(str(run.recipe_path)).value == recipe
    written["trainer"]["memory"]["fp8"] = True
    run.recipe_path.write_text(yaml.safe_dump(written))
    with pytest.raises(ConfigError, match=r"it is trainer\.precision\.fp8 now"):
        load_recipe(str(run.recipe_path))

    written = cluster.model_dump(mode="json")
    written["partitions"]["gpu"]["node"]["scratch_gb_s"] = 40
    written["capabilities"]["preempt_signal"] = True
    run.cluster_path.write_text(yaml.safe_dump(written))
    assert run.cluster() == cluster


DOCUMENTS = (
    "",
    "a: {b: [1, 1e-3, 010, 1:30, .inf, ~, yes, 2026-11-24], c: 'x: y'}\n",
    "a: &same [1, {b: 2}]\nb: *same\nc: |\n  text\n    more\nd: >-\n  folded\n  text\n",
    "a: 1\na: 2\nb: !!int x\n? [1]\n: 2\n",
    "\ufeffa: \u00fc\n---\nb: 1\n",
    "a: [1, 2\nb: 3\n",
    "a: *unknown\n",
    "\ta: 1\n",
    "a: \x07\n",
    "a: !half 1\n",
    "a: \udcff\n",
    "[" * 65 + "]" * 65,
    "{a: " * 3000,
    "- " * 5000 + "1",
    "&a [*a]",
    "a: &a [1, 2, 3, 4]\nb: &b [" + ", ".join(["*a"] * 200) + "]\nc: [" + ", ".join(["*b"] * 200) + "]\n",
)


@pytest.mark.parametrize("text", DOCUMENTS, ids=lambda text: repr(text[:12]))
def test_libyaml_reads_what_pyyaml_reads(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Values, lines, findings and messages are the same without it, on machines that have no libyaml too."""

    def read() -> object:
        try:
            value, builder = yamltree._parse(text, Path("some.yaml"))
        except yaml.YAMLError as error:
            return yamltree._problem(error)
        return repr(value), builder.origins, builder.findings

    assert yamltree._QUICK
    with_libyaml = read()
    monkeypatch.setattr(yamltree, "_QUICK", ())
    assert read() == with_libyaml
