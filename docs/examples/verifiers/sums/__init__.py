"""One turn: add two numbers."""

import random

import verifiers.v1 as vf

__all__ = ["SumsTaskset"]


class SumData(vf.TaskData):
    answer: int


class SumTask(vf.Task[SumData]):
    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        words = trace.last_reply.replace(".", " ").split()
        return float(bool(words) and words[-1] == str(self.data.answer))

    @vf.metric
    async def characters(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class SumsConfig(vf.TasksetConfig):
    largest: int = 50
    tasks: int = 200


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    def load(self) -> list[SumTask]:
        rng = random.Random(0)
        pairs = [
            (rng.randint(1, self.config.largest), rng.randint(1, self.config.largest)) for _ in range(self.config.tasks)
        ]
        return [SumTask(SumData(prompt=f"What is {a} + {b}?", answer=a + b), self.config.task) for a, b in pairs]
