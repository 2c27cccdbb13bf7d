"""The tool server, a process of its own, that all rollouts share: each has its own page."""

import verifiers.v1 as vf


class NotebookState(vf.State):
    page: str = ""


class NotebookToolsetConfig(vf.SharedToolsetConfig):
    pass


class NotebookToolset(vf.Toolset[NotebookToolsetConfig, NotebookState]):
    TOOL_PREFIX = "notebook"

    @vf.tool
    async def keep(self, word: str) -> str:
        """Write a word on the page, and read it back."""
        self.state.page = word
        return self.state.page


if __name__ == "__main__":
    NotebookToolset.run()
