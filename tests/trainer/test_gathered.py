"""When embedding and head are gathered: each only while it is needed, and both all the time where they are one."""

from dataclasses import replace

import pytest
from test_meshes import ARCHS
from torch.distributed.tensor import DTensor
from trainer_testing import Rollouts, make_recipe, write_model_dir

from hpcrl.models.arch import load_arch
from hpcrl.trainer.parallel.mesh import distributed
from hpcrl.trainer.step.policy import TrainerPolicy


@pytest.mark.parametrize("memory", [{}, {"lm_head_chunk_tokens": 3}], ids=["all logits", "in pieces"])
@pytest.mark.parametrize("tied", [False, True], ids=["two", "tied"])
def test_embedding_and_head_are_gathered_while_they_are_needed(tmp_path, tied, memory):
    arch = replace(ARCHS["qwen3_moe"], tie_word_embeddings=tied)
    model_dir = write_model_dir(tmp_path, arch)
    gathered = {}
    with distributed(timeout_s=120) as parallel:
        recipe = make_recipe(model_dir, steps=9, memory=memory)
        policy = TrainerPolicy(recipe, load_arch(model_dir), parallel, model_dir=model_dir)
        model = policy.model

        def look(moment):
            def note(*_):
                names = {"embedding": model.embed_tokens, "head": model.lm_head}
                gathered[moment] = {n for n, m in names.items() if not isinstance(m.weight, DTensor)}

            return note

        model.layers[0].register_forward_hook(look("forward of a layer"))
        model.norm.register_forward_hook(look("forward of the head"))
        model.layers[0].register_full_backward_hook(look("backward of a layer"))
        # behind what FSDP2 does before the embedding's backward pass
        model.embed_tokens.register_forward_hook(
            lambda module, inputs, y: y.register_hook(look("backward of the embedding")) and None
        )
        policy.forward_backward(Rollouts(1).shard())
    both = {"embedding", "head"}
    assert gathered == {
        "forward of a layer": both if tied else set(),
        "forward of the head": both if tied else {"head"},
        "backward of a layer": both if tied else set(),
        "backward of the embedding": both if tied else set(),
    }
