"""The base of all configuration models and the field types they share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, GetJsonSchemaHandler
from pydantic_core import CoreSchema

from hpcrl.config.meanings import meanings_of

__all__ = [
    "MOST",
    "Fraction",
    "Name",
    "NodeRole",
    "NonNegativeFloat",
    "NonNegativeInt",
    "PositiveFloat",
    "PositiveInt",
    "RoleName",
    "SlurmWord",
    "StrictModel",
]

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
"""Letters, digits, ``.``, ``_`` and ``-``: safe as a directory, a job name and a label."""

RoleName = Literal["trainer", "engine", "prefill", "decode", "orchestrator", "store", "router"]
"""What a process is for, as people write it; `hpcrl.config.plan.Role` in code."""

NodeRole = Literal["trainer", "engine", "prefill", "decode", "orchestrator"]
"""Roles that have nodes of their own, or may have (the orchestrator); the others run beside the trainer."""

SlurmWord = Annotated[str, Field(pattern=r"^[A-Za-z0-9_@%+=:.,&|*\[\]()/-]+$")]
"""A word that Slurm takes as an account, a constraint, a device: no blanks, no quotes."""

MOST = 1 << 53
"""Above it a number is no longer exact in JSON, and nothing in a recipe is that large: what is computed from numbers up
to it stays finite."""
PositiveInt = Annotated[int, Field(gt=0, le=MOST)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MOST)]
NonNegativeFloat = Annotated[float, Field(ge=0, le=MOST, allow_inf_nan=False)]
PositiveFloat = Annotated[float, Field(gt=0, le=MOST, allow_inf_nan=False)]
Rate = Annotated[float, Field(ge=1e-6, le=1e9, allow_inf_nan=False)]
"""What hardware does a second, in gigabytes or teraflops: none is outside of these bounds, and inside of them all times
are finite."""
Fraction = Annotated[float, Field(ge=0, le=1)]


class StrictModel(BaseModel):
    """Frozen; unknown keys are errors; no silent conversions (``"8"`` is not 8, ``true`` is not 1)."""

    # a model's own validator is made where something is read by it: most are parts of others alone
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, defer_build=True)

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler, /) -> dict[str, Any]:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema).get("properties", {})
        for name, meaning in meanings_of(cls).items():
            if name in properties:
                properties[name].setdefault("description", meaning)
        return schema
