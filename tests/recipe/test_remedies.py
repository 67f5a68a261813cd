"""A remedy that an error suggests works: with the suggested values, the recipe loads.

Random settings are put on built-in recipes. Each alternative of an error's message that assigns
values is applied to them, and the result must be a recipe.
"""

import random
import re

from burnish.errors import ConfigError
from burnish.recipe.load import list_recipes, load_recipe, nest, parse_overrides

VALUES = {
    "rollout.batch": [1, 7, 32, 60, 90, 96, 128, 1000],
    "rollout.group_size": [1, 2, 3, 5, 7, 8, 12, 16],
    "train.batch": [1, 5, 7, 15, 24, 36, 64, 300],
    "train.learn": ["all", "lora"],
    "objective.advantage": [
        "group_zscore",
        "raw",
        "remax",
        "vine",
        "gae",
        "maxrl",
        "teacher",
        "turn_mean",
    ],
    "objective.loss": ["reinforce", "clip", "gmpo"],
    "objective.proximal": ["behavior", "recompute"],
    "objective.importance": ["none", "truncate", "mask"],
    "objective.kl": ["none", {"name": "k1", "where": "reward"}, {"name": "k1"}, "k3"],
    "length": ["none", "overlong", "solve_rate", "among_correct", {"name": "target", "tokens": 80}],
    "selection.dead_groups": ["keep", "drop", "dynamic", "active"],
    "selection.dead_by": ["advantage", "correct"],
    "loop": ["lagged", "free", {"name": "lagged", "lag": 1}, {"name": "free", "window": 2}],
    "buffer": [{"capacity": 2}, {"capacity": 100}],
    "runtime": ["local", "ray", "torchrun", {"name": "ray", "transport": "gloo"}],
    "mesh.shard": [1, 2, 3],
    "device": ["cpu", "cuda:1"],
    "critic.warmup_rollouts": [0, 5, 1000],
    "task.reward": ["none"],
    "model.name": ["sorter", "smollm2-135m"],
    "preset": ["dapo", "gspo", "rloo", "ppo", "minimax"],
}
ASSIGNED = re.compile(r"([a-z_]+(?:\.[a-z_]+)+) = ('[^']*'|[\d.e+-]*\d)")
WITHIN = re.compile(r"has no effect with task = '|^objective(\.kl)? ")
"""Problems within one section."""


def remedies(problem):
    """The alternatives of a problem that assign values or remove settings, as pairs of assigned
    values and removed names."""
    if removed := re.match(r"(\S+) has no effect with .*; remove it$", problem):
        return [({}, [removed[1]])]
    found = []
    for alternative in problem.rpartition("; ")[2].split(", or "):
        assigned = {key: value.strip("'") for key, value in ASSIGNED.findall(alternative)}
        removed = re.findall(r"\[(\w+)\]", alternative) if "remove" in alternative else []
        if (assigned or removed) and not re.search(r" with | together ", alternative):
            found.append(({k: int(v) if v.isdigit() else v for k, v in assigned.items()}, removed))
    return found


def rule(problem):
    """A problem without its numbers and its remedy."""
    return re.sub(r"\d+", "N", problem.rpartition("; ")[0])


def problems_of(name, settings):
    try:
        load_recipe(name, [{key: value} for key, value in settings.items()])
    except ConfigError as error:
        return str(error).splitlines()
    return []


def follow(name, settings, changes, removed):
    """Load the recipe with the settings that the remedies leave, and with their values."""
    given = parse_overrides([{key: value} for key, value in settings.items()])
    replaced = {key.removesuffix(".name") for key in changes if key.endswith(".name")}
    replaced |= {key for key in changes if f"{key}.name" in given}
    names = {*removed, *replaced}
    kept = {k: v for k, v in given.items() if not any(f"{k}.".startswith(f"{n}.") for n in names)}
    return load_recipe(name, [nest(kept), *({key: value} for key, value in changes.items())])


def draws(count):
    random_ = random.Random(0)
    for _ in range(count):
        keys = random_.sample(sorted(VALUES), random_.randint(1, 3))
        settings = {key: random_.choice(VALUES[key]) for key in keys}
        yield random_.choice(list_recipes()), settings


def test_every_remedy_of_random_wrong_settings_loads():
    """One remedy of each problem is followed at the same time; every alternative has its turn. Only
    a problem that another of the settings has alone may be left. A problem within one section is
    found before the rules that join sections, so that it may hide problems of other settings."""
    wrong, followed = [], 0
    for name, settings in draws(1500):
        problems = problems_of(name, settings)
        ways = [remedies(problem) for problem in problems]
        for turn in range(max(map(len, ways), default=0) if all(ways) else 0):
            chosen = [way[min(turn, len(way) - 1)] for way in ways]
            changes = {key: value for assigned, _ in chosen for key, value in assigned.items()}
            followed += 1
            try:
                follow(name, settings, changes, [key for _, keys in chosen for key in keys])
            except ConfigError as error:
                alone = {rule(p) for k, v in settings.items() for p in problems_of(name, {k: v})}
                alone -= set(map(rule, problems))
                left = [line for line in str(error).splitlines() if rule(line) not in alone]
                if left and (len(settings) == 1 or not WITHIN.search(problems[0])):
                    said = "\n".join(problems)
                    wrong.append(f"{name} {settings}\n{said}\n{chosen}: {left}\n")
    assert not wrong, f"{len(wrong)} of {followed}:\n" + "\n".join(wrong[:40])
    assert followed > 300
