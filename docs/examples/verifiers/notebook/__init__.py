"""A tool: keep a word in a notebook, read it back, and say it."""

import verifiers.v1 as vf

from notebook.server import NotebookState, NotebookToolset, NotebookToolsetConfig

__all__ = ["NotebookTaskset"]

WORDS = ["maple", "river", "stone", "cloud", "amber", "cedar", "flint", "heron", "iris", "jade", "koala", "lotus"]


class WordData(vf.TaskData):
    word: str


class WordTask(vf.Task[WordData, NotebookState]):
    @vf.reward(weight=1.0)
    async def kept(self, trace: vf.Trace) -> float:
        return float(
            self.data.word in trace.last_reply and any(self.data.word in m.content for m in trace.tool_messages)
        )

    @vf.metric
    async def turns(self, trace: vf.Trace) -> float:
        return float(trace.num_turns)


class NotebookConfig(vf.TasksetConfig):
    tools: NotebookToolsetConfig = NotebookToolsetConfig()


class NotebookTaskset(vf.Taskset[WordTask, NotebookConfig]):
    @classmethod
    def toolsets(cls, config: NotebookConfig) -> list[vf.Toolset]:
        return [NotebookToolset(config.tools)]

    def load(self) -> list[WordTask]:
        asked = "Call notebook_keep with word={word!r}, then say the word that it returns."
        return [WordTask(WordData(prompt=asked.format(word=word), word=word), self.config.task) for word in WORDS]
