"""The settings of an environment kind. Commands on the login node import this module: it imports nothing heavy."""

from typing import Any, Literal

from pydantic import Field

from hpcrl.config.environments import HostedEnv


class CountLettersEnv(HostedEnv):
    """How often is a letter in a word?"""

    kind: Literal["count_letters"]
    letters: str = Field(default="ab", min_length=1, description="Letters that words are made of.")
    length: int = Field(default=4, gt=0, le=9, description="Letters of a word.")

    def call(self) -> tuple[str, dict[str, Any]]:
        """Return what makes the environment in its process, and its arguments."""
        return "hpcrl_lab_example.tasks:CountLetters", {"letters": self.letters, "length": self.length}
