"""The start model: tokens of demonstrations, training, and what is written."""

import io
import os

import pytest
import torch
from safetensors.torch import load_file
from toy_environment import ToyEnvironment
from trainer_testing import make_recipe

from hpcrl.config.recipe import WarmupConfig
from hpcrl.errors import UsageError
from hpcrl.models.character_tokenizer import write_character_tokenizer
from hpcrl.models.tokenizer import ChatTokenizer
from hpcrl.rollouts.rendering import Renderer
from hpcrl.trainer.warmup import make as warmup
from hpcrl.trainer.warmup.demonstrations import DemonstrationSource, render_demonstration
from hpcrl.trainer.warmup.make import make_start_model

TALK = (
    {"role": "system", "content": "be short"},
    {"role": "user", "content": "say a"},
    {"role": "assistant", "content": "a!"},
    {"role": "tool", "content": "ok\n"},
    {"role": "assistant", "content": "b"},
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    write_character_tokenizer(path)
    return ChatTokenizer(path)


def recipe_with(**warmup_settings):
    settings = {"hidden_size": 32, "moe_intermediate_size": 32, "num_experts": 4, "steps": 40, "batch_size": 16}
    recipe = make_recipe("unused", steps=1)
    warmup_config = WarmupConfig(**{**settings, **warmup_settings})
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"warmup": warmup_config})})


def test_demonstrations_are_the_tokens_of_a_rollout(tokenizer):
    """The same ids that the orchestrator puts together piece by piece while a policy says the same words."""
    ids, said = render_demonstration(tokenizer, TALK)
    renderer, end = Renderer(tokenizer), [tokenizer.eos_token_id]
    pieces = [
        (renderer.opening(TALK[:2]), False),
        (tokenizer.encode("a!") + end, True),
        (renderer.extension(TALK[3:4], ended_by=tokenizer.eos_token_id).token_ids, False),
        (tokenizer.encode("b") + end, True),
    ]
    assert ids == [token for piece, _ in pieces for token in piece]
    assert said == [flag for piece, flag in pieces for _ in piece]
    assert ids == tokenizer.render_ids(TALK, add_generation_prompt=False)


def test_what_follows_the_last_reply_is_cut(tokenizer):
    ids, _ = render_demonstration(tokenizer, TALK[:4])
    assert ids == render_demonstration(tokenizer, TALK[:3])[0]


def with_template(path, template):
    write_character_tokenizer(path)
    (path / "chat_template.jinja").write_text(template)
    return ChatTokenizer(path)


def test_a_line_break_behind_the_end_token_is_not_learned(tokenizer, tmp_path):
    plain, flags = render_demonstration(tokenizer, TALK[:3])
    written = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{{ '\\n' }}{% endfor %}"
    other = with_template(tmp_path, f"{written}{{% if add_generation_prompt %}}<|assistant|>{{% endif %}}")
    ids, said = render_demonstration(other, TALK[:3])
    assert len(ids) > len(plain)
    assert [t for t, f in zip(ids, said, strict=True) if f] == [t for t, f in zip(plain, flags, strict=True) if f]


def test_templates_that_rewrite_the_past_are_refused(tmp_path):
    written = "{{ messages | length }}{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    tokenizer = with_template(tmp_path, f"{written}{{% if add_generation_prompt %}}<|assistant|>{{% endif %}}")
    with pytest.raises(ValueError, match="extension of its"):
        render_demonstration(tokenizer, TALK)


def test_a_conversation_without_the_assistant_is_refused(tokenizer):
    with pytest.raises(ValueError, match="needs a message of the assistant"):
        render_demonstration(tokenizer, TALK[:2])


def test_batches_are_mixed_by_weight_and_repeat_by_seed(tokenizer):
    asked = []

    class Watched(ToyEnvironment):
        def __init__(self, name):
            self.name = name

        def demonstration(self, prompt, *, correct, rng):
            asked.append((self.name, prompt.split, prompt.index, correct))
            return super().demonstration(prompt, correct=correct, rng=rng)

    def source():
        return DemonstrationSource([Watched("x"), Watched("y")], [3.0, 1.0], tokenizer, correct_share=0.3, seed=4)

    batch = source().batch(400)
    first, asked = asked, []
    again = source().batch(400)
    assert asked == first
    assert torch.equal(batch.input_ids, again.input_ids)
    of_x = [a for a in first if a[0] == "x"]
    assert len(of_x) == pytest.approx(300, abs=40)
    assert [a[2] for a in of_x] == list(range(len(of_x)))
    assert {a[1] for a in first} == {"train"}
    assert sum(a[3] for a in first) == pytest.approx(120, abs=35)
    # every demonstration has two replies: a letter, two letters, and their ends
    assert len(batch.targets) == 400 * 5
    assert torch.equal(batch.targets, batch.input_ids[batch.select + 1])


def test_the_model_learns_and_transformers_loads_it(tmp_path):
    losses = []
    output = tmp_path / "models" / "toy"
    final = make_start_model(
        recipe_with(), output, seed=3, progress=lambda step, steps, loss: losses.append((step, steps, loss))
    )
    assert [(step, steps) for step, steps, _ in losses] == [(step, 40) for step in range(1, 41)]
    assert losses[0][2] > 4.0
    assert final == pytest.approx(sum(loss for *_, loss in losses[-4:]) / 4)
    assert final < 2.5
    assert os.listdir(output.parent) == ["toy"]
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(output)
    assert type(model).__name__ == "Qwen3MoeForCausalLM"
    assert model.config.eos_token_id == ChatTokenizer(output).eos_token_id
    theirs = transformers.AutoTokenizer.from_pretrained(output)
    ids = theirs.apply_chat_template(list(TALK), return_dict=False)
    assert ids == ChatTokenizer(output).render_ids(TALK, add_generation_prompt=False)


#: sizes that no other family has
FAMILIES = {
    "glm_moe_dsa": {
        "q_lora_rank": 20,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 6,
        "v_head_dim": 10,
        "index_topk": 4,
        "index_n_heads": 4,
        "index_head_dim": 8,
        "indexer_types": ["full", "shared"],
        "first_k_dense_replace": 1,
    },
    "gpt_oss": {"sliding_window": 8},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_start_models_of_other_families(tmp_path, family):
    """Of the family that is asked for, with its own sizes, and such that they learn."""
    transformers = pytest.importorskip("transformers")
    losses = []
    make_start_model(
        recipe_with(family=family, config=FAMILIES[family], steps=20),
        tmp_path / "toy",
        seed=3,
        progress=lambda step, steps, loss: losses.append(loss),
    )
    assert losses[-1] < 0.8 * losses[0]
    config = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "toy").config
    assert (config.model_type, config.hidden_size, config.num_hidden_layers) == (family, 32, 2)
    # what transformers has a name for
    known = FAMILIES[family].keys() & vars(config).keys()
    assert {key: getattr(config, key) for key in known} == {key: FAMILIES[family][key] for key in known} != {}
    assert config.num_local_experts == 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"family": "gpt5"}, "model_type is 'gpt5'"),
        ({"family": "glm_moe_dsa"}, "lacks kv_lora_rank"),
        ({"config": {"index_topk": 4}}, "config has index_topk, which does not apply to qwen3_moe"),
        ({"config": {"vocab_size": 4}}, "config has vocab_size"),
        ({"config": {"decoder_sparse_step": "two"}}, "model.warmup is not a valid model"),
    ],
)
def test_sizes_that_are_no_model_are_refused(tmp_path, settings, message):
    with pytest.raises(UsageError, match=message):
        make_start_model(recipe_with(**settings), tmp_path / "toy", seed=0)
    assert os.listdir(tmp_path) == []


def test_random_weights_have_the_range_that_is_asked_for(tmp_path):
    """With a learning rate of nearly nothing they are as they were made."""
    spread = []
    for given in ({}, {"initializer_range": 0.2}):
        path = tmp_path / str(len(spread))
        make_start_model(recipe_with(steps=1, learning_rate=1e-12, **given), path, seed=1)
        spread.append(float(load_file(path / "model.safetensors")["model.layers.0.self_attn.q_proj.weight"].std()))
    assert spread == pytest.approx([0.02, 0.2], rel=0.1)


def test_equal_seeds_make_equal_models(tmp_path):
    models = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_start_model(recipe_with(steps=2), tmp_path / name, seed=seed)
        models.append(load_file(tmp_path / name / "model.safetensors"))
    same = [all(torch.equal(models[0][n], other[n]) for n in other) for other in models[1:]]
    assert same == [True, False]


def test_nothing_is_left_of_a_failure(tmp_path, monkeypatch):
    monkeypatch.setattr(warmup, "_write_model", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
    with pytest.raises(OSError, match="full"):
        make_start_model(recipe_with(steps=1), tmp_path / "toy", seed=0)
    assert os.listdir(tmp_path) == []


def test_a_model_is_only_replaced_when_asked(tmp_path):
    output = tmp_path / "toy"
    output.mkdir()
    (output / "mine").touch()
    with pytest.raises(UsageError, match="exists already"):
        make_start_model(recipe_with(steps=1), output, seed=0)
    assert os.listdir(output) == ["mine"]
    make_start_model(recipe_with(steps=1), output, seed=0, replace=True)
    assert "mine" not in os.listdir(output)
    assert os.listdir(tmp_path) == ["toy"]


def test_environments_without_demonstrations_are_named(tmp_path):
    recipe = recipe_with()
    (toy,) = recipe.environments
    silent = toy.model_copy(update={"factory": "toy_environment:SilentEnvironment"})
    with pytest.raises(UsageError, match="no demonstrations"):
        make_start_model(recipe.model_copy(update={"environments": [silent]}), tmp_path / "toy", seed=0)
    with pytest.raises(UsageError, match=r"no model\.warmup"):
        make_start_model(make_recipe("unused", steps=1), tmp_path / "toy", seed=0)


def test_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(recipe_with(steps=2).model_dump_json()))
    monkeypatch.setattr("sys.argv", ["warmup", "--output", str(tmp_path / "toy")])
    assert warmup.main() == 0
    captured = capsys.readouterr()
    assert "supervised loss" in captured.out
    assert "step 2/2" in captured.err
    recipe_file = tmp_path / "recipe.json"
    recipe_file.write_text(recipe_with(steps=2).model_dump_json())
    monkeypatch.setattr("sys.argv", ["warmup", "--recipe", str(recipe_file), "--output", str(tmp_path / "toy")])
    assert warmup.main() == 2
    assert "exists already" in capsys.readouterr().err
