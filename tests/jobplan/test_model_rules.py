"""Rules between a recipe and its model's sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcrl.cli.main import main
from hpcrl.config.load import load_cluster, load_recipe
from hpcrl.errors import ConfigError
from hpcrl.jobplan import check_sizes
from hpcrl.jobplan.model_rules import MODEL_RULES, check_model_rules
from hpcrl.models import load_facts
from hpcrl.models.layers import Layer, Moe
from hpcrl.models.quantising import fp8_problems

#: rule, settings that break it, model, key of the finding
BROKEN = {
    "experts-divide": (("trainer.parallelism.ep=24",), "GLM-5", "trainer.parallelism.ep"),
    "heads-divide": (("engine.tp=3",), "GLM-5", "engine.tp"),
    "heads-share-context": (("trainer.parallelism.cp=3",), "Qwen3-30B-A3B", "trainer.parallelism.cp"),
    "state-in-sequence": (
        ("trainer.parallelism.cp=2",),
        "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "trainer.parallelism.cp",
    ),
    "ring-is-dense": (("trainer.parallelism.cp_scheme=ring",), "GLM-5", "trainer.parallelism.cp_scheme"),
    "gather-is-of-latents": (("trainer.parallelism.cp_scheme=gather",), "GLM-5", "trainer.parallelism.cp_scheme"),
    "sequence-divides": (("trainer.micro_batch_tokens=131076",), "GLM-5", "trainer.micro_batch_tokens"),
    "fp8-blocks": (("engine.tp=8",), "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "engine.memory.weights"),
    "replay-has-routers": (("trainer.router_replay=true",), "Qwen3-8B", "trainer.router_replay"),
    "blocks-hold-prompts": (
        ("engine.backend=embedded",),
        "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "engine.prefill",
    ),
    "freeze-fits": (("trainer.freeze=['*.mlp.gate.weight']",), "GLM-5", "trainer.freeze"),
    "fp8-fits": (("trainer.precision.fp8.keep=['*.self_attn.k_proj']",), "GLM-5", "trainer.precision.fp8.keep"),
    "adapters-fit": (("trainer.lora={rank: 8, targets: [shared_experts]}",), "Qwen3-30B-A3B", "trainer.lora.targets"),
    "context-in-model": (("engine.max_model_len=300000",), "GLM-5", "engine.max_model_len"),
    "time-to-move": (("handoff.update_timeout_s=60.0",), "GLM-5", "handoff.update_timeout_s"),
}


def _check(model: str, *settings: str) -> None:
    check_model_rules(load_recipe("glm5_swe", settings), load_cluster("h200-28"), load_facts(model))


def test_latents_are_gathered_for_any_number_of_heads() -> None:
    """Of 128 heads 96 ranks cannot have equal shares; of latents every rank makes what it needs."""
    settings = ("trainer.parallelism.cp=96", "trainer.nodes=12", "trainer.ranks=96", "trainer.parallelism.ep=32")
    found = {}
    for scheme in ("ulysses", "gather"):
        with pytest.raises(ConfigError) as caught:
            _check("DeepSeek-V3", *settings, f"trainer.parallelism.cp_scheme={scheme}", "trainer.micro_batch_tokens=7")
        found[scheme] = [finding.what.rpartition("[")[2] for finding in caught.value.findings]
    assert "heads-share-context]" in found["ulysses"]
    assert not {"heads-share-context]", "gather-is-of-latents]", "ring-is-dense]"} & set(found["gather"])


def test_rows_of_one_expert_cannot_be_distinguished_from_unknown_ones() -> None:
    """Where KV is fetched; elsewhere each row is known."""
    facts = load_facts("Qwen3-30B-A3B")
    one = replace(facts, layers=tuple(_with_one_expert(layer) for layer in facts.layers))
    replay, pool = "trainer.router_replay=true", "engine.kv_store={segment_gib: 100}"
    cluster = load_cluster("h200-28")
    check_model_rules(load_recipe("qwen3_30b_a3b", (replay, pool)), cluster, facts)
    check_model_rules(load_recipe("qwen3_30b_a3b", (replay,)), cluster, one)
    with pytest.raises(ConfigError, match="one expert a token"):
        check_model_rules(load_recipe("qwen3_30b_a3b", (replay, pool)), cluster, one)


def _with_one_expert(layer: Layer) -> Layer:
    return replace(layer, mlp=replace(layer.mlp, num_experts_per_tok=1)) if isinstance(layer.mlp, Moe) else layer


@pytest.mark.parametrize("model", ["GLM-5", "GLM-5.2"])
def test_the_reference_recipe_keeps_all_rules(model: str) -> None:
    _check(model)


@pytest.mark.parametrize("name", BROKEN)
def test_rule(name: str) -> None:
    settings, model, key = BROKEN[name]
    rule = next(rule for rule in MODEL_RULES if rule.name == name)
    with pytest.raises(ConfigError) as caught:
        _check(model, *settings)
    mine = [finding for finding in caught.value.findings if finding.what.endswith(f"[{name}]")]
    assert key in [finding.key for finding in mine]
    assert all(finding.hint == rule.hint for finding in mine)


@pytest.mark.parametrize(
    ("model", "tp", "what"),
    [
        # 16 key heads of linear attention; heads of full attention would fit
        ("Qwen3-Next-80B-A3B-Instruct", 3, "3 does not divide the heads"),
        ("gpt-oss-120b", 3, "3 does not divide the heads"),
        ("Llama-4-Scout-17B-16E-Instruct", 3, "3 does not divide the heads"),
    ],
)
def test_heads_of_other_families_are_dealt_out_evenly(model: str, tp: int, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _check(model, f"engine.tp={tp}")
    assert what in str(caught.value)


def test_every_rule_is_tested() -> None:
    assert {rule.name for rule in MODEL_RULES} == set(BROKEN)


def test_a_dense_model_has_no_experts_to_return() -> None:
    with pytest.raises(ConfigError) as caught:
        _check("Qwen3-8B", "engine.return_routed_experts=true")
    assert "engine.return_routed_experts" in [finding.key for finding in caught.value.findings]


def test_experts_of_a_replica() -> None:
    """384 experts of Kimi K2 cannot be distributed over 5 x 8 GPUs, but over 8 x 8."""
    with pytest.raises(ConfigError, match="384 experts cannot be distributed evenly over the 40 ranks"):
        _check("Kimi-K2-Instruct", "engine.decode.nodes=5")
    _check("Kimi-K2-Instruct")


@pytest.mark.parametrize(
    ("model", "setting", "key", "what"),
    [
        ("gpt-oss-20b", "{}", "trainer.precision.fp8.experts", "published as one tensor"),
        ("gpt-oss-20b", "{linears: false}", "trainer.precision.fp8.experts", "published as one tensor"),
        ("GLM-5", "{keep: ['*.mlp.gate']}", "trainer.precision.fp8.keep", "keeps nothing of GLM-5"),
        # never in FP8: whoever keeps it believes that it would be
        ("GLM-5", "{keep: ['*.indexer.wk']}", "trainer.precision.fp8.keep", "keeps nothing of GLM-5"),
        ("GLM-5", "{experts: false, keep: ['*.experts.*']}", "trainer.precision.fp8.keep", "keeps nothing of GLM-5"),
        ("GLM-5", "{keep: ['*.experts.7.*']}", "trainer.precision.fp8.keep", "some experts of model.layers.3.mlp"),
        ("Qwen3-8B", "{linears: false}", "trainer.precision.fp8", "nothing of Qwen3-8B is left"),
        ("Qwen3-8B", "{keep: ['*']}", "trainer.precision.fp8", "nothing of Qwen3-8B is left"),
    ],
)
def test_what_fp8_keeps_is_checked_before_a_trainer_starts(model: str, setting: str, key: str, what: str) -> None:
    recipe = load_recipe("glm5_swe", (f"trainer.precision.fp8={setting}", "engine.max_model_len=32768"))
    with pytest.raises(ConfigError, match=what) as caught:
        check_model_rules(recipe, load_cluster("h200-28"), load_facts(model))
    assert [finding.key for finding in caught.value.findings if "fp8-fits" in finding.what] == [key]


@pytest.mark.parametrize(
    ("model", "setting"),
    [
        ("gpt-oss-20b", "{experts: false}"),
        ("GLM-5", "{keep: ['*.kv_b_proj', 'model.layers.0.*', '*.mlp.experts.*', '*.indexer.wq_b']}"),
        ("Qwen3-8B", "{experts: false}"),
    ],
)
def test_fp8_that_fits_its_model(model: str, setting: str) -> None:
    fp8 = load_recipe("glm5_swe", (f"trainer.precision.fp8={setting}",)).value.trainer.precision.fp8
    assert fp8 is not None
    found = list(fp8_problems(load_facts(model), linears=fp8.linears, experts=fp8.experts, keep=fp8.keep))
    assert found == []


def test_deadlines_follow_from_bytes_and_rates() -> None:
    """Five replicas read 1,488 GB each at 100 GB/s together: 74 s."""
    with pytest.raises(ConfigError, match=r"engines need 74 s to read a version of 1,488 GB"):
        _check("GLM-5", "handoff.update_timeout_s=60.0")
    _check("GLM-5", "handoff.update_timeout_s=80.0")
    # block FP8 has half the bytes
    _check("GLM-5", "handoff.update_timeout_s=60.0", "handoff.kind=fp8")


@pytest.mark.parametrize(
    ("setting", "what"),
    [
        ("handoff.publish_timeout_s=25.0", "a version of 1,488 GB takes 30 s"),
        ("checkpoint.save_timeout_s=150.0", "a checkpoint of 8,9.. GB takes 17. s"),
        ("checkpoint.verify_timeout_s=80.0", "a checkpoint of 8,9.. GB takes 8. s"),
    ],
)
def test_each_deadline_has_its_bytes(setting: str, what: str) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        _check("GLM-5", setting)
    assert [finding.key for finding in caught.value.findings] == [setting.partition("=")[0]]


def test_a_submit_checks_sizes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    settings = ["--set", "job.payload=probe", "--set", "trainer.parallelism.ep=24"]
    monkeypatch.setattr("sys.argv", ["hpcrl", "submit", "glm5_swe", "--cluster", "h200-28", "--dry-run", *settings])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "24 does not divide the 256 experts of GLM-5 [experts-divide]" in capsys.readouterr().err


def test_an_unknown_model_is_not_checked() -> None:
    """A start model that is made later, as the quickstart's, has no sizes yet."""
    check_sizes(load_recipe("quickstart", ("model.path=models/made-later",)), load_cluster("local"))
