"""A tiny language model and rollouts for it."""

import copy
import dataclasses

import numpy as np
import pytest
import torch

from burnish.learner.learner import LocalLearner
from burnish.learner.optimizer import Optimizer
from burnish.learner.program import compile
from burnish.model.critic import Critic
from burnish.model.transformer import ModelConfig, Transformer
from burnish.recipe.critic import CriticConfig
from burnish.recipe.objective.objective import ObjectiveConfig
from burnish.recipe.recipe import TrainConfig
from burnish.rollout.packing import Pack, pack
from burnish.types import Scores
from tests.conftest import make_group

CONFIG = ModelConfig(
    vocab_size=37, n_layers=2, d_model=16, n_heads=4, d_ff=24, n_kv_heads=2, init_std=0.3
)
SHAPE = {"groups": ((5, (4, 1, 6, 4)), (3, (7, 2, 7)), (1, (3, 5, 5)), (6, (2, 2)))}


def make_policy(dtype=torch.float64, **changes):
    return Transformer(CONFIG).init_weights(3).to(dtype).learn(**changes)


def make_groups(shape=SHAPE["groups"], temperature=0.8):
    """Random tokens; the second token of every longer response was put there by the system."""
    random = np.random.default_rng(0)
    groups = []
    for index, (prompt, lengths) in enumerate(shape):
        responses = [random.integers(0, 37, n).tolist() for n in lengths]
        sampled = [[i != 1 for i in range(n)] for n in lengths]
        rewards = random.normal(size=len(lengths)).tolist()
        tokens = random.integers(0, 37, prompt).tolist()
        groups.append(
            make_group(index, tokens, responses, rewards, temperature=temperature, sampled=sampled)
        )
    return groups


def make_learner(policy, objective=None, critic=None, **train):
    """Two epochs: with one step on a batch nothing would be scored before it."""
    settings = {"batch": 100, "epochs": 2, "clip_norm": 1e9, "learning_rate": 1e-2} | train
    train = TrainConfig(**settings)
    if critic is None:
        return LocalLearner(policy, compile(ObjectiveConfig(**(objective or {}))), train)
    section = CriticConfig(**critic)
    program = compile(ObjectiveConfig(**{"advantage": "gae"} | (objective or {})), section)
    own = train.model_copy(update={"learning_rate": section.learning_rate})
    values = Optimizer(Critic(policy, shared=section.shared), own)
    return LocalLearner(policy, program, train, critic=values)


def make_learn_batch(learner, batch, *, moved=0.1):
    """Streams that make every term count: proximal and reference are off by some noise."""
    random = torch.Generator().manual_seed(1)

    def near(x):
        noise = moved * torch.randn(x.shape, generator=random, dtype=torch.float64)
        return x + noise.to(x)

    scores = Scores(*(None if x is None else near(x) for x in learner.score(batch)))
    advantages = learner.program.advantages(batch, scores).to(scores.proximal)
    (learn,) = learner.program.batches(batch, advantages, scores, [Pack.whole(batch)])
    return dataclasses.replace(learn, loss_weight=learn.loss_weight.to(scores.proximal))


def masters(learner):
    """A copy of the weights in float32."""
    return {name: view.clone() for name, view in learner.optimizer.masters.exchange().items()}


def hf_gradients(policy):
    """Hugging Face name -> gradient."""
    holder = copy.deepcopy(policy)
    with torch.no_grad():
        for ours, theirs in zip(holder.parameters(), policy.parameters(), strict=True):
            ours.copy_(theirs.grad)
    return {name: view.clone() for name, view in holder.exchange().items()}


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Models this small are slower on several threads, which wait for each other all the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def batch():
    return pack(make_groups())
