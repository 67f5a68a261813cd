"""Environments with several roles and traces, selected by their settings."""

import letters
import verifiers.v1 as vf


class PanelConfig(vf.EnvConfig):
    solver: vf.AgentConfig = vf.AgentConfig(retries=vf.RetryConfig(max_retries=3))
    critic: vf.AgentConfig = vf.AgentConfig()
    frozen: bool = True
    attempts: int = 1


class Panel(vf.Env[PanelConfig]):
    async def setup(self, agents):
        agents.critic.trainable = not self.config.frozen

    async def run(self, task, agents):
        for _ in range(self.config.attempts):
            await agents.solver.run(task)
        await agents.critic.run(task)


class Letters(letters.Letters):
    pass


class Talk(letters.Talk):
    pass


__all__ = ["Letters", "Panel", "Talk"]
