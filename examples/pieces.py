"""One step by hand: sample with the engine, grade, and take the learner's gradient steps.

    python examples/pieces.py

``burnish/loops/sync.py`` goes through the same pieces again and again, and ``burnish.train`` keeps
what comes of it in a run's directory.
"""

from burnish import build, config
from burnish.rollout.packing import pack, train_batches
from burnish.rollout.rollout import grade, sample, sampling
from burnish.tasks.stream import PromptStream


def step(recipe):
    """Takes the first step of a recipe; returns the groups and each gradient step's metrics."""
    recipe = build.prepare(recipe)
    task, engine, _ = build.build_sampler(recipe)
    learner = build.build_learner(recipe)

    asked = PromptStream(task).take(recipe.prompts_per_rollout)
    responses = sample(engine, asked, recipe.rollout.group_size, sampling(recipe))
    groups = grade(task, asked, responses)

    batch = pack(groups).to(learner.device)
    parts = train_batches(batch, recipe.train.batch)
    scores = learner.score(batch, parts)
    advantages = learner.program.advantages(batch, scores)
    learned = learner.program.batches(batch, advantages, scores, parts)
    metrics = [learner.step(part) for part in learned]

    engine.load(learner.weights())  # the next rollout is sampled with what was learned
    task.close()
    return groups, metrics


if __name__ == "__main__":
    groups, metrics = step(config.load("sort"))
    print(f"rewards of the first group: {groups[0].rewards}")
    print(f"loss {metrics[0]['train/loss']:.4f}, gradient norm {metrics[0]['train/grad_norm']:.4f}")
