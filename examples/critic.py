"""PPO with a critic in a few minutes on a CPU: a tiny model from scratch learns to write letters.

    python examples/critic.py [seed=1] [critic.shared=true] [section.key=value …]

The reward is the share of lowercase letters, so that the reward of a response can be predicted
better with each of its tokens. The script prints the mean reward and the critic's explained
variance, averaged over every ten steps.
"""

import sys

import burnish

RECIPE = {
    "name": "letters",
    "task": {"name": "files", "chat": False, "validation_rows": 8},
    "model": {"name": "scratch", "tokenizer": "bytes", "layers": 2, "width": 64, "heads": 4}
    | {"d_ff": 128},
    "rollout": {"batch": 64, "group_size": 4, "max_tokens": 16},
    "objective": {"advantage": {"name": "gae", "whiten": True}, "reduction": "token_mean"}
    | {"proximal": "behavior"},
    "critic": {"learning_rate": 3e-3, "clip": 0.5, "warmup_rollouts": 5},
    "train": {"steps": 60, "batch": 64, "learning_rate": 2e-3},
    "validation": {"every": 60},
    "checkpoint": {"every": 60},
}


def letters(response: str, row: dict) -> float:
    return sum("a" <= c <= "z" for c in response) / max(1, len(response))


def main() -> None:
    prompts = [f"{i}: " for i in range(64)]
    run = burnish.train(RECIPE, prompts=prompts, reward=letters, overrides=sys.argv[1:])
    steps = run.metrics[1:]
    for first in range(0, len(steps), 10):
        rows = steps[first : first + 10]
        explained = [row.get("train/explained_variance", 0.0) for row in rows]
        reward = sum(row["rollout/reward"] for row in rows) / len(rows)
        told = f"reward {reward:.3f}, explained variance {sum(explained) / len(rows):.3f}"
        print(f"steps {first + 1} to {first + len(rows)}: {told}")


if __name__ == "__main__":
    main()
