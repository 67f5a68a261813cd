"""One step by hand: sample with the engine, grade, and take the learner's gradient steps.

    python examples/pieces.py

``burnish/loops/sync.py`` repeats the same calls for every step, and ``burnish.train`` records the
results in a run's directory.
"""

from burnish.launch import local
from burnish.launch.resolve import resolve
from burnish.launch.settings import rollout_settings
from burnish.recipe.load import load_recipe
from burnish.rollout.packing import pack, train_batches
from burnish.rollout.rollout import grade, sample
from burnish.tasks.stream import PromptStream


def step(recipe):
    """Take the first step of a recipe; return its groups and the metrics of each gradient step."""
    resolved = resolve(recipe)
    task, engine, _ = local.build_sampler(resolved)
    learner = local.build_learner(resolved)

    settings = rollout_settings(recipe)
    asked = PromptStream(task).take(recipe.prompts_per_rollout)
    responses = sample(engine, asked, settings.group_size, settings.params)
    groups = grade(task, asked, responses)

    batch = pack(groups).to(learner.device)
    parts = train_batches(batch, recipe.train.batch)
    scores = learner.score(batch, parts)
    advantages = learner.program.advantages(batch, scores)
    learned = learner.program.batches(batch, advantages, scores, parts)
    metrics = [learner.step(part) for part in learned]

    engine.load(learner.weights())  # the next rollout is sampled with the new weights
    task.close()
    return groups, metrics


if __name__ == "__main__":
    groups, metrics = step(load_recipe("sort"))
    print(f"rewards of the first group: {groups[0].rewards}")
    print(f"loss {metrics[0]['train/loss']:.4f}, gradient norm {metrics[0]['train/grad_norm']:.4f}")
