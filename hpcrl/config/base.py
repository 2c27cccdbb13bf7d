"""The base of all configuration models and the field types they share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic_core import CoreSchema

from hpcrl.config.meanings import meanings_of

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
"""Letters, digits, ``.``, ``_`` and ``-``: safe as a directory, a job name and a label."""

RoleName = Literal["trainer", "engine", "prefill", "decode", "orchestrator", "store", "router", "env"]
"""Purpose of a process, as people write it; `hpcrl.config.plan.Role` in code."""

ExtensionName = Annotated[str, Field(pattern=r"^([A-Za-z_][\w.]*:[A-Za-z_]\w*|[A-Za-z_][\w-]*)$")]
"""``package.module:Name``, or the name under which an installed package registers an extension (`hpcrl.extend`)."""

NodeRole = Literal["trainer", "engine", "prefill", "decode", "orchestrator", "env"]
"""Roles that have nodes of their own, or may have (the orchestrator, workers of environments); the others run on the
trainer's nodes."""

SlurmWord = Annotated[str, Field(pattern=r"^[A-Za-z0-9_@%+=:.,&|*\[\]()/-]+$")]
"""A word that Slurm takes as an account, a constraint, a device: no blanks, no quotes."""

MOST = 1 << 53
"""Maximum of numbers. Above it a number is not exact in JSON, and no value of a recipe is that large: results that are
computed from numbers up to it stay finite."""
PositiveInt = Annotated[int, Field(gt=0, le=MOST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MOST)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, le=MOST, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=1e-6, le=1e9, allow_inf_nan=False)]
"""Rate of hardware, in gigabytes or teraflops a second: no hardware is outside these bounds, and inside them all times
are finite."""
Fraction = Annotated[float, Field(ge=0, le=1)]


class StrictModel(BaseModel):
    """Frozen; unknown keys are errors; no silent conversions (``"8"`` is not 8, ``true`` is not 1)."""

    # a validator is built on first use: most models are only parts of others
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler, /) -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, meaning in meanings_of(cls).items():
            if name in properties:
                properties[name].setdefault("description", meaning)
        return schema
