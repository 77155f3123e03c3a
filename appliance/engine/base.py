"""The seam between the service and whatever computes answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from typing import Protocol

from appliance.engine.types import EngineEvent, EngineInfo, GenerationJob, LoadedModel

Progress = Callable[[str, float], None]
"""(phase, fraction 0..1): 'hash' while the model is copied and hashed, 'load' while the engine loads it."""


class Engine(Protocol):
    """One loaded model. Implementations: `engine.supervisor.SupervisedEngine`, `engine.fake.FakeEngine`."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def model(self) -> LoadedModel: ...

    @property
    def ready(self) -> bool:
        """True while a job submitted now would be evaluated (worker alive, model loaded, not wedged)."""

    async def start(self, progress: Progress) -> None:
        """Load the model. Raises BootError; returns when the first job can be taken."""

    def generate(self, job: GenerationJob) -> AsyncGenerator[EngineEvent, None]:
        """Yield PromptReady, Begun, then Delta events, then Finished. Closing the generator (`aclose`) cancels the job.

        Raises BadRequest (context_length_exceeded, template refusals), EngineFailed (the worker died or the engine
        reported an error), Unavailable (the worker is being restarted and did not come back in time, or has not the
        memory for one job more).
        """

    async def stop(self, grace_s: float) -> None: ...
