"""One step by hand: sample with the engine, grade, and take the learner's gradient steps.

    python examples/pieces.py

``burnish/loops/sync.py`` goes through the same pieces again and again, and ``burnish.train`` keeps
what comes of it in a run's directory.
"""

from burnish import build, config
from burnish.rollout.packing import pack, train_batches
from burnish.rollout.rollout import grade, sample, sampling


def step(recipe):
    """Takes the first step of a recipe; returns the groups and each gradient step's metrics."""
    recipe = build.prepare(recipe)
    task, engine, _ = build.build_sampler(recipe)
    learner = build.build_learner(recipe)

    prompts = [task.prompt(i) for i in range(recipe.prompts_per_rollout)]
    size, params = recipe.rollout.group_size, sampling(recipe)
    responses = sample(engine, prompts, first_group=0, samples=size, params=params)
    groups = grade(task, prompts, responses, 0)

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
