"""JSON documents, checked against a JSON Schema by ``jsonschema``."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from hpcrl.config.rewards import JsonSchemaReward
from hpcrl.installing import install_command
from hpcrl.rollouts.environments.rewards.extraction import FENCE, last_fenced_block
from hpcrl.rollouts.environments.rewards.made import CheckerNotMadeError


class JsonSchemaCheck:
    """Validates documents."""

    def __init__(self, config: JsonSchemaReward) -> None:
        try:
            import jsonschema  # noqa: PLC0415 - an extra
            import referencing  # noqa: PLC0415 - comes with it
        except ImportError as error:
            what = f"documents are checked by the Python module 'jsonschema', which cannot be imported ({error})"
            raise CheckerNotMadeError(what, install_command("rewards")) from None
        self._config, self._library, self._registry = config, jsonschema, referencing.Registry()
        self._validator: Any = None
        if config.definition is not None:
            try:
                self._validator = self._made(config.definition)
            except ValueError as error:
                raise CheckerNotMadeError(f"definition {error}", "see https://json-schema.org") from None

    def answer_problem(self, answer: str) -> str:
        if self._validator is not None:
            return ""
        try:
            self._made(_parsed(answer))
        except ValueError as error:
            return str(error)
        return ""

    def score(self, reply: str, answer: str, row: dict[str, Any]) -> float:
        """Judge a reply (see `hpcrl.rollouts.environments.rewards.slow.SlowCheck`)."""
        validator = self._validator or self._made(_parsed(answer))
        try:
            document = _parsed(_last_fenced(reply) if self._config.fenced else reply)
        except ValueError:
            return 0.0
        return float(validator.is_valid(document))

    def _made(self, schema: Any) -> Any:
        """Return a validator of a schema (ValueError where it is none)."""
        kind = self._library.validators.validator_for(schema, default=self._library.Draft202012Validator)
        try:
            kind.check_schema(schema)
        except self._library.SchemaError as error:
            raise ValueError(f"is not a JSON Schema: {error.message[:200]}") from None
        # with an explicit registry the library fetches no documents
        return kind(schema, registry=self._registry)


def _parsed(text: str) -> Any:
    """Return a JSON document (ValueError where it is none)."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from None


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"has {name}, which is not valid in JSON")


def _last_fenced(text: str) -> str:
    """Return the last block between lines with fences, or else the text between the last two fences.

    A word after the first one names the language.
    """
    block, is_open = last_fenced_block(text)
    if block is not None and not is_open:
        return block
    before, fence, _ = text.rpartition(FENCE)
    _, begin, inside = before.rpartition(FENCE)
    if not fence or not begin:
        return ""
    language, line_end, rest = inside.partition("\n")
    return rest if line_end and language.strip().isalpha() else inside
