"""A process that tries something of a recipe before a submit, in the interpreter of a role and with a deadline.

Modules are found where the role will find them: the shell's ``PYTHONPATH`` counts for a local run, and for a job only
what the profile says or lets through.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrl.config.cluster import ClusterProfile, SlurmCluster
from hpcrl.config.load import Loaded
from hpcrl.config.plan import Plan, Role
from hpcrl.config.recipe import Recipe
from hpcrl.errors import UsageError
from hpcrl.interpreter import module_command, with_safe_path
from hpcrl.jobplan.plan import absolute_paths

__all__ = ["TrialProcess"]


@dataclass(frozen=True)
class TrialProcess:
    """How something is tried.

    Attributes
    ----------
    module:
        ``python -m MODULE WHAT`` reads a request and prints an answer, both JSON.
    role:
        Whose interpreter and environment it has.
    subject:
        What is tried, as the object of a sentence.
    made:
        What is done with it in the role, as the end of a sentence about a container.
    slow_hint:
        What to do where it takes too long.
    """

    module: str
    role: Role
    subject: str
    made: str
    slow_hint: str

    def interpreter(self, plan: Plan) -> str:
        """Return the interpreter of the role."""
        group = next((group for group in plan.groups if group.role is self.role), None)
        return (group.python if group is not None else None) or plan.python or sys.executable

    def hidden(self, plan: Plan, site: ClusterProfile) -> str:
        """Return why nothing can be tried here; empty where it can."""
        if plan.container is not None:
            return f"they are {self.made} in the container"
        if not Path(self.interpreter(plan)).is_file():
            return f"the {self.role.value}'s Python, {self.interpreter(plan)}, is not visible here"
        if isinstance(site, SlurmCluster):
            entries = self._variables(plan, site).get("PYTHONPATH", "").split(os.pathsep)
            if away := [entry for entry in entries if entry and not Path(entry).exists()]:
                return f"PYTHONPATH names {', '.join(away)}, which is not visible here"
        return ""

    def ask(
        self,
        what: str,
        request: dict[str, Any],
        recipe: Loaded[Recipe],
        plan: Plan,
        site: ClusterProfile,
        *,
        timeout_s: float,
    ) -> dict[str, Any]:
        """Return the answer to a request about a recipe.

        Raises
        ------
        UsageError
            The interpreter cannot answer, or not within ``timeout_s``.
        """
        python = self.interpreter(plan)
        resolved = absolute_paths(recipe.value, Path.cwd())
        text = json.dumps({"recipe": resolved.model_dump(mode="json"), **request})
        try:
            result = subprocess.run(
                module_command(python, self.module, what),
                input=text.encode(),
                stdout=subprocess.PIPE,
                env=self._variables(plan, site),
                timeout=timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UsageError(
                f"trying {self.subject} took longer than {timeout_s:g} s, and was ended\n    hint: {self.slow_hint}"
            ) from None
        except OSError as error:
            raise UsageError(f"{python} cannot try {self.subject}: {error}") from error
        if result.returncode:
            raise UsageError(
                f"{python} cannot try {self.subject}: it ended with {result.returncode} (what it printed is above)\n"
                "    hint: hpcrl must be installed for this interpreter"
            )
        answer: dict[str, Any] = json.loads(result.stdout)
        return answer

    def _variables(self, plan: Plan, site: ClusterProfile) -> dict[str, str]:
        """Return the environment that the role will have, as far as it matters for imports."""
        variables = dict(os.environ)
        if isinstance(site, SlurmCluster) and "PYTHONPATH" not in site.launch.inherit:
            variables.pop("PYTHONPATH", None)
        for group in plan.groups:
            if group.role is self.role:
                # what names a place on a node is not known here
                variables |= {name: value for name, value in group.env.items() if "{node_" not in value}
        return with_safe_path(variables)
